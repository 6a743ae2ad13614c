"""Parametrisations: how initial values, learning rates and logits scale with the width of a model.

With a transformer's standard initial values activations have the same size at every width, but the change of
activations in a step of training has not: with one learning rate for all tensors, the best one falls with the width. µP
(Yang & Hu 2021, Tensor Programs IV; Yang et al. 2022, Tensor Programs V) gives each tensor its own learning rate, and
the logits a factor, such that a step changes every layer's features by as much at any width. Hyperparameters tuned at
`base_width` can then be used at other widths.

Logical axes show which dimensions of a tensor are width. Only width is treated, not depth (CompleteP and others):
residual branches have the model's own factor 1 / sqrt(2 depth).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Protocol

import jax
import optax
from flax import nnx

from jaxscale.config import register
from jaxscale.errors import ConfigError, count
from jaxscale.layout import STACKED, TensorInfo, abstract
from jaxscale.optim.base import FusedTransformation, Optimizer, Schedule, Tree, apply_gradients

WIDTHS = ("embed", "expert_embed", "norm", "mlp", "expert_mlp", "heads", "kv_heads")
"""Logical axes that grow with the width. `head_dim` may grow together with "heads" or instead of it."""

STREAM = ("embed", "expert_embed")
"""Axes of the residual stream. Every matrix has it as input or output, which shows which side is which."""

HEAD = "head"
"""The first part of the output head's path."""


@dataclasses.dataclass(frozen=True)
class Role:
    """How a tensor scales with the width.

    Args:
      kind: a key of a parametrisation's table.
      fan_in: number of inputs, of one layer and one expert, relative to the model of the base width.
      fan_out: number of outputs, likewise.
    """

    kind: str
    fan_in: float
    fan_out: float


@dataclasses.dataclass(frozen=True)
class Powers:
    """Factors for tensors of a kind, relative to the standard parametrisation.

    Args:
      init: initial values are multiplied by fan_in to this power.
      adam: learning rates of Adam and its like are multiplied by fan_in and fan_out to these two powers.
      sgd: learning rates of gradient descent are multiplied by fan_in and fan_out to these two powers.
    """

    init: float = 0.0
    adam: tuple[float, float] = (0.0, 0.0)
    sgd: tuple[float, float] = (0.0, 0.0)


class Widenable(Protocol):
    """What a parametrisation needs from a model's config (a dataclass, such as `TransformerConfig`)."""

    @property
    def tied(self) -> bool:
        """Whether the token embedding is also the output head."""

    @property
    def attention_scale(self) -> float | None:
        """Factor on attention scores; `None` is 1 / sqrt(head_dim)."""

    @property
    def sizes(self) -> Any:
        """Sizes of the model, with `width` and `head_dim`."""

    def at_width(self, width: int) -> Widenable:
        """Return the config of the same model at another width.

        Args:
          width: size of the residual stream.

        Raises:
          ConfigError: there is no such model.
        """

    def make(self, rngs: nnx.Rngs) -> nnx.Module:
        """Return the model.

        Args:
          rngs: random keys for initial values.
        """


@dataclasses.dataclass(frozen=True)
class Parametrisation:
    """Base of parametrisations: a table of powers of the width relative to a base width.

    At the base width it is bit for bit the standard parametrisation. A model's field `parametrisation` holds one
    (`Transformer.parametrisation = @MuP()`); `None` is the standard parametrisation.

    Args:
      base_width: the width at which hyperparameters are tuned.

    Raises:
      ConfigError: `base_width` is not a whole number of at least 1.
    """

    base_width: int = 64

    table: ClassVar[Mapping[str, Powers]]
    logits: ClassVar[float]
    """The logits are multiplied by (width / base width) to this power."""
    scores: ClassVar[bool]
    """Whether attention scores are multiplied by 1 / head_dim instead of 1 / sqrt(head_dim)."""
    ties: ClassVar[bool]
    """Whether the token embedding may also be the output head."""

    def __post_init__(self) -> None:
        if not isinstance(self.base_width, int) or isinstance(self.base_width, bool) or self.base_width < 1:
            name = type(self).__name__
            raise ConfigError(f"{name}.base_width = {self.base_width!r}: must be a whole number of at least 1")

    def of(self, model: Widenable) -> Widening:
        """Return the factors of a model's tensors.

        Args:
          model: the model's config.

        Raises:
          ConfigError: there is no such model at the base width, its embeddings may not be tied, or the role of a tensor
            is unknown.
        """
        name = type(self).__name__
        if model.tied and not self.ties:
            raise ConfigError(
                f"{name} has different learning rates for the embedding and the head; set Transformer.tied = False"
            )
        plain: Any = dataclasses.replace(model, parametrisation=None)  # type: ignore[type-var]
        try:
            base = plain.at_width(self.base_width)
        except ConfigError as e:
            raise ConfigError(f"{name}.base_width = {self.base_width}: {e}") from None
        at_base = _infos(base)
        roles = {path: role_of(info, at_base[path]) for path, info in _infos(plain).items()}
        scale, d, base_d = model.attention_scale, plain.sizes.head_dim, base.sizes.head_dim
        if self.scores and d != base_d:
            scale = (base_d**-0.5 if scale is None else scale) * base_d / d
        return Widening(self, roles, (plain.sizes.width / base.sizes.width) ** self.logits, scale)


@register
@dataclasses.dataclass(frozen=True)
class MuP(Parametrisation):
    """Maximal update parametrisation, µP: layers learn features equally fast at any width (Yang et al. 2022).

    Let m_in and m_out be a tensor's inputs and outputs relative to the base model's. Factors relative to the standard
    parametrisation (initial standard deviation 1 / sqrt(fan_in), constant for lookups; one learning rate) are:

        tensor                                          initial values  Adam's rate  SGD's rate
        lookups (token embedding, learned positions)    1               1            m_out
        vectors (scales and biases)                     1               1            m_out
        hidden  (width to width)                        1               1 / m_in     m_out / m_in
        head    (its logits times 1 / m_in)             sqrt(m_in)      1            m_in
        output  (width to a fixed size: MoE's router)   1 / sqrt(m_in)  1 / m_in     1 / m_in

    The head's row is from Tensor Programs V, table 8, which allows tied embeddings. All other rows are from table 3
    (the two tables agree on them except for outputs, where they are equivalent), with fan_out / fan_in for SGD if
    dimensions grow unevenly. Attention scores have the factor 1 / head_dim instead of 1 / sqrt(head_dim), equal at the
    base width (definition 4.1), which matters if `head_dim` grows; `Transformer.attention_scale` is that of the base.

    A step subtracts weight decay · learning rate · parameter from every decayed parameter, with the learning rate that
    has no factor: the weight decay is divided by the factor of the rate. The authors' package `mup` does the same, and
    AdamW needs it for learning rates to transfer beyond the first steps (Wang & Aitchison 2024). Adam's `eps` is not
    scaled; choose it far below the gradients.

    A tied embedding is one tensor with the initial values and learning rate of a lookup, whose logits have the head's
    factor. Matrices of experts are hidden, and the router is an output. With grouped-query attention, query heads and
    key-value heads grow together; a `kv_heads` that the base width cannot have is an error.

    Args:
      base_width: the width at which hyperparameters are tuned.
    """

    table: ClassVar[Mapping[str, Powers]] = {
        "lookup": Powers(sgd=(0, 1)),
        "vector": Powers(sgd=(0, 1)),
        "hidden": Powers(adam=(-1, 0), sgd=(-1, 1)),
        "head": Powers(init=0.5, sgd=(1, 0)),
        "output": Powers(init=-0.5, adam=(-1, 0), sgd=(-1, 0)),
    }
    logits: ClassVar[float] = -1.0
    scores: ClassVar[bool] = True
    ties: ClassVar[bool] = True


@register
@dataclasses.dataclass(frozen=True)
class NTK(Parametrisation):
    """The neural tangent parametrisation (Jacot et al. 2018), for comparisons with µP.

    Its matrices are unit normals times 1 / sqrt(fan_in) (Yang & Hu 2021, table 1: a = 1/2, b = c = 0). That equals
    standard initial values with learning rates divided by fan_in for SGD, and by its root for Adam. The wider the
    model, the less a step of SGD changes hidden features, and the more a step of Adam does.

    Args:
      base_width: the width at which hyperparameters are tuned.
    """

    table: ClassVar[Mapping[str, Powers]] = {
        "lookup": Powers(),
        "vector": Powers(),
        "hidden": Powers(adam=(-0.5, 0), sgd=(-1, 0)),
        "head": Powers(adam=(-0.5, 0), sgd=(-1, 0)),
        "output": Powers(adam=(-0.5, 0), sgd=(-1, 0)),
    }
    logits: ClassVar[float] = 0.0
    scores: ClassVar[bool] = False
    ties: ClassVar[bool] = False


@dataclasses.dataclass(frozen=True)
class Widening:
    """The factors that a parametrisation gives the tensors of one model.

    Args:
      parametrisation: the parametrisation.
      roles: the role of every parameter, by its path.
      logits: factor on the output logits.
      attention_scale: as `Transformer.attention_scale`.
    """

    parametrisation: Parametrisation
    roles: Mapping[str, Role]
    logits: float
    attention_scale: float | None

    def init_factor(self, path: str) -> float:
        """Return the factor on a parameter's standard initial values.

        Args:
          path: the parameter's path.
        """
        role = self.roles[path]
        return role.fan_in ** self.parametrisation.table[role.kind].init

    def rate_factor(self, path: str, rule: str) -> float:
        """Return the factor on a parameter's learning rate.

        Args:
          path: the parameter's path.
          rule: "adam" or "sgd", a key of `RULES`.
        """
        role = self.roles[path]
        into, out = getattr(self.parametrisation.table[role.kind], rule)
        return role.fan_in**into * role.fan_out**out

    def rescale(self, model: nnx.Module) -> None:
        """Multiply a model's standard initial values by their factors, in place.

        Args:
          model: the model.
        """
        for path, variable in nnx.iter_graph(model):
            name = "/".join(map(str, path))
            if isinstance(variable, nnx.Param) and self.init_factor(name) != 1:
                variable.set_value(variable.get_value() * self.init_factor(name))

    def make(self, optimizer: Optimizer, learning_rate: Schedule, infos: Tree) -> optax.GradientTransformation:
        """Return an optimizer's transformation, with one group for all tensors that have the same factor on the rate.

        Args:
          optimizer: the optimizer; its class has a `width_rule`, "adam" or "sgd".
          learning_rate: the schedule at the base width.
          infos: a `TensorInfo` per parameter.

        Raises:
          ConfigError: the optimizer's class has no `width_rule`.
        """
        name, rule = type(optimizer).__name__, getattr(optimizer, "width_rule", None)
        if rule not in RULES:
            raise ConfigError(
                f"{type(self.parametrisation).__name__} has no learning rates for {name}; use an optimizer whose class "
                "has a `width_rule`, such as AdamW() or SGD(), or the standard parametrisation"
            )
        rates = jax.tree.map(lambda i: self.rate_factor(i.path, rule), infos)
        groups = sorted(set(jax.tree.leaves(rates)))
        if groups == [1.0]:
            return optimizer.make(learning_rate, infos)
        parts = {
            r: with_same_decay(optimizer, r).make(functools.partial(_times, r, learning_rate), _only(r, rates, infos))
            for r in groups
        }
        return by_group(parts, rates)


RULES = {
    "adam": "entries of an update do not depend on the gradient's scale (Adam, Adagrad, Lion)",
    "sgd": "updates are proportional to gradients",
}
"""Values of an optimizer's `width_rule`, with their meaning; the tables have columns for these kinds only."""


def with_same_decay(optimizer: Any, rate: float) -> Any:
    """Return an optimizer whose weight decay is the same after its learning rate is multiplied by `rate`.

    Args:
      optimizer: an optimizer, a dataclass that may have a `weight_decay`.
      rate: factor on the learning rate.
    """
    if not getattr(optimizer, "weight_decay", 0):
        return optimizer
    return dataclasses.replace(optimizer, weight_decay=optimizer.weight_decay / rate)


def by_group(parts: Mapping[float, optax.GradientTransformation], groups: Tree) -> optax.GradientTransformation:
    """Combine a transformation for each group of parameters.

    Args:
      parts: a transformation per group.
      groups: the group of each parameter.
    """
    order = list(parts)

    def merged(trees: list[Tree]) -> Tree:
        return jax.tree.map(lambda group, *each: each[order.index(group)], groups, *trees)

    def init(params: Tree) -> Tree:
        return {_name(r): tx.init(_only(r, groups, params)) for r, tx in parts.items()}

    def each(step: Callable[..., tuple[Tree, Tree]], state: Tree, *trees: Tree) -> tuple[Tree, Tree]:
        results = {
            r: step(tx, state[_name(r)], *(None if t is None else _only(r, groups, t) for t in trees))
            for r, tx in parts.items()
        }
        return merged([new for new, _ in results.values()]), {_name(r): state for r, (_, state) in results.items()}

    def update(grads: Tree, state: Tree, params: Tree | None = None) -> tuple[Tree, Tree]:
        return each(lambda tx, state, grads, params: tx.update(grads, state, params), state, grads, params)

    def update_and_apply(grads: Tree, state: Tree, params: Tree) -> tuple[Tree, Tree]:
        return each(lambda tx, state, grads, params: apply_gradients(tx, grads, state, params), state, grads, params)

    notes = tuple(note for tx in parts.values() for note in getattr(tx, "notes", ()))
    return FusedTransformation(init, update, update_and_apply, (*notes, *_notes(groups)))


def role_of(info: TensorInfo, base: TensorInfo) -> Role:
    """Return a tensor's role, from its path and logical axes and its shape relative to the base model's.

    Stacked dimensions (layers, experts) are ignored.

    Args:
      info: the parameter.
      base: the same parameter of the model at the base width.

    Raises:
      ConfigError: neither the first nor the last dimension is that of the residual stream.
    """
    path = info.path.split("/")
    own = [(a, n / b) for a, n, b in zip(info.axes, info.shape, base.shape, strict=True) if a not in STACKED]
    if path[-1] in ("scale", "bias") or len(own) < 2:
        return Role("vector", 1.0, _growth(own))
    if own[0][0] in STREAM:
        inputs, outputs = own[:1], own[1:]
    elif own[-1][0] in STREAM:
        inputs, outputs = own[:-1], own[-1:]
    else:
        raise ConfigError(
            f"{info.path} has the axes {info.axes}, which do not show its inputs and outputs; its first or last axis "
            f"must be the residual stream's, one of {', '.join(STREAM)}"
        )
    if path[0] == HEAD:
        return Role("head", _growth(outputs), _growth(inputs))  # its shape is (vocab, embed)
    kinds = {(False, True): "lookup", (True, True): "hidden", (True, False): "output", (False, False): "vector"}
    wide = any(a in WIDTHS for a, _ in inputs), any(a in WIDTHS for a, _ in outputs)
    return Role(kinds[wide], _growth(inputs), _growth(outputs))


def _growth(dims: list[tuple[str | None, float]]) -> float:
    return math.prod(growth for _, growth in dims)


def _infos(model: Widenable) -> dict[str, TensorInfo]:
    return {i.path: i for i in jax.tree.leaves(abstract(lambda: model.make(nnx.Rngs(params=0)))[1])}


def _only(group: float, groups: Tree, tree: Tree) -> Tree:
    """Return the tree with `None` in place of what is in another group."""
    return jax.tree.map(lambda g, x: x if g == group else None, groups, tree)


def _times(factor: float, rate: Schedule, step: int | jax.Array) -> jax.Array:
    return factor * rate(step)


def _name(rate: float) -> str:
    return f"rate_x{rate:.6g}"


def _notes(rates: Tree) -> tuple[str, ...]:
    factors = jax.tree.leaves(rates)
    return tuple(
        f"the learning rate of {count(factors.count(r), 'tensor')} is multiplied by {r:.6g}"
        for r in sorted(set(factors))
        if r != 1
    )
