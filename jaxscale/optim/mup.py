"""Parametrisations: how initial values, learning rates and logits follow the width, from the names of dimensions.

A transformer's standard initial values keep activations as they are when the model widens, but not what a step of
training changes them by: with one learning rate for all tensors the best one falls with the width. µP (Yang & Hu 2021,
Tensor Programs IV; Yang et al. 2022, Tensor Programs V) gives each tensor a rate, and the head a factor, such that
every layer's features move by as much at any width. What was tuned at `base_width` then holds at all others.

Only width is treated. How residual branches and rates should follow the *depth* (CompleteP and others) is another
question, which nothing here answers: blocks keep the model's own 1 / sqrt(2 depth).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any, ClassVar, Protocol

import jax
import optax
from flax import nnx

from jaxscale.config import register
from jaxscale.errors import ConfigError
from jaxscale.layout import STACKED, TensorInfo, abstract
from jaxscale.optim.base import FusedTransformation, Optimizer, Schedule, Tree, apply_gradients

WIDTHS = ("embed", "expert_embed", "norm", "mlp", "expert_mlp", "heads", "kv_heads")
"""Logical axes that are width. A head's own (`head_dim`) grows along with "heads" or instead of it."""

STREAM = ("embed", "expert_embed")
"""Those of the residual stream: every matrix leads from it or to it, which tells its inputs from its outputs."""

HEAD = "head"
"""The first part of the output head's path."""


@dataclasses.dataclass(frozen=True)
class Role:
    """What a tensor is to the width.

    Args:
      kind: a key of a parametrisation's table.
      fan_in, fan_out: how many times the base's its inputs and its outputs are; of one layer, and of one expert.
    """

    kind: str
    fan_in: float
    fan_out: float


@dataclasses.dataclass(frozen=True)
class Powers:
    """What tensors of a kind are multiplied by, beyond what a standard parametrisation does.

    Args:
      init: initial values, by fan_in to this power.
      adam, sgd: learning rates under either rule, by fan_in and by fan_out to these powers.
    """

    init: float = 0.0
    adam: tuple[float, float] = (0.0, 0.0)
    sgd: tuple[float, float] = (0.0, 0.0)


class Widenable(Protocol):
    """What a parametrisation has to know of a model's config (a dataclass, such as `TransformerConfig`)."""

    @property
    def tied(self) -> bool: ...

    @property
    def attention_scale(self) -> float | None: ...

    @property
    def sizes(self) -> Any: ...

    def at_width(self, width: int) -> Any: ...

    def make(self, rngs: nnx.Rngs) -> Any: ...


@dataclasses.dataclass(frozen=True)
class Parametrisation:
    """A table of powers, against a base width at which it is the standard parametrisation, to the bit.

    A model's field `parametrisation` holds one (`Transformer.parametrisation = @MuP()`); `None` is the standard one.

    Args:
      base_width: the width at which hyperparameters were tuned, or are to be.

    Raises:
      ConfigError: it is no whole number of at least 1.
    """

    base_width: int = 64

    table: ClassVar[Mapping[str, Powers]]
    logits: ClassVar[float]
    """The logits are multiplied by the width, in base widths, to this power."""
    scores: ClassVar[bool]
    """Whether attention scores shrink with a head's width, 1 / d, and not with its root."""
    ties: ClassVar[bool]
    """Whether the token embedding may be the head as well."""

    def __post_init__(self) -> None:
        if not isinstance(self.base_width, int) or isinstance(self.base_width, bool) or self.base_width < 1:
            name = type(self).__name__
            raise ConfigError(f"{name}.base_width = {self.base_width!r}: must be a whole number of at least 1")

    def of(self, model: Widenable) -> Widening:
        """What follows from it for a model.

        Raises:
          ConfigError: the model cannot be had at the base width, or has a tensor of unknown role.
        """
        name = type(self).__name__
        if model.tied and not self.ties:
            raise ConfigError(f"{name} gives embedding and head rates of their own; set Transformer.tied = False")
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
    """Maximal update parametrisation, µP: every layer learns features, as fast at any width (Yang et al. 2022).

    With m_in and m_out for how many times the base's a tensor's inputs and outputs are, it multiplies, against the
    standard parametrisation (initial standard deviation 1 / sqrt(fan_in), constant for lookups; one learning rate):

        tensor                                          initial values  Adam's rate  SGD's rate
        lookups (token embedding, learned positions)    1               1            m_out
        vectors (scales and biases)                     1               1            m_out
        hidden  (width to width)                        1               1 / m_in     m_out / m_in
        head    (its logits times 1 / m_in)             sqrt(m_in)      1            m_in
        output  (width to a fixed size: MoE's router)   1 / sqrt(m_in)  1 / m_in     1 / m_in

    The head's line is that of Tensor Programs V, table 8, which allows tied embeddings; all others are those of table
    3 (the two tables agree on them but for outputs, where they are equivalent), with fan_out / fan_in for SGD where
    widths grow unevenly. Attention scores have the factor 1 / d and not 1 / sqrt(d), equal at the base (definition
    4.1 there), which matters where a head's own width grows; `Transformer.attention_scale` is that of the base.

    A decayed parameter loses the learning rate times the weight decay, whatever its own rate is: its decay is divided
    by what its rate is multiplied by, as the authors' package `mup` does, and as AdamW needs for rates to transfer
    beyond the first steps (Wang & Aitchison 2024). Adam's `eps` is not scaled: let it stay far below the gradients.

    Tied embeddings: one tensor, a lookup by its initial values and rate, whose logits have the head's factor. Experts:
    each is hidden, and the router is an output. Grouped queries: heads and key heads grow together; a `kv_heads` that
    does not divide down to the base width is refused.
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
    """The neural tangent parametrisation (Jacot et al. 2018), to compare with.

    Its matrices are unit normals times 1 / sqrt(fan_in) (Yang & Hu 2021, table 1: a = 1/2, b = c = 0), which is the
    same as standard initial values with rates divided by fan_in for SGD, and by its root for Adam. Under SGD hidden
    features move ever less with the width; under Adam with one rate they move ever more.
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
    """What a parametrisation makes of one model.

    Args:
      parametrisation: which.
      roles: of every parameter, by its path.
      logits: factor on the output logits.
      attention_scale: as `Transformer.attention_scale`.
    """

    parametrisation: Parametrisation
    roles: Mapping[str, Role]
    logits: float
    attention_scale: float | None

    def init_factor(self, path: str) -> float:
        """What a parameter's standard initial values are multiplied by."""
        role = self.roles[path]
        return role.fan_in ** self.parametrisation.table[role.kind].init

    def rate_factor(self, path: str, rule: str) -> float:
        """What a parameter's learning rate is multiplied by, under "adam" or "sgd"."""
        role = self.roles[path]
        into, out = getattr(self.parametrisation.table[role.kind], rule)
        return role.fan_in**into * role.fan_out**out

    def rescale(self, model: nnx.Module) -> None:
        """Brings a model from standard initial values to its own, in place."""
        for path, variable in nnx.iter_graph(model):
            name = "/".join(map(str, path))
            if isinstance(variable, nnx.Param) and self.init_factor(name) != 1:
                variable.set_value(variable.get_value() * self.init_factor(name))

    def make(self, optimizer: Optimizer, learning_rate: Schedule, infos: Tree) -> optax.GradientTransformation:
        """The transformation of an optimizer: one for each group of tensors that share a rate.

        Args:
          optimizer: whose class has a `width_rule`, "adam" or "sgd".
          learning_rate: at the base width.
          infos: a `TensorInfo` per parameter.

        Raises:
          ConfigError: it has none.
        """
        name, rule = type(optimizer).__name__, getattr(optimizer, "width_rule", None)
        if rule not in RULES:
            raise ConfigError(
                f"{type(self.parametrisation).__name__} knows no learning rates for {name}; use one whose class has a "
                f"`width_rule`, such as AdamW() or SGD(), or the standard parametrisation"
            )
        rates = jax.tree.map(lambda i: self.rate_factor(i.path, rule), infos)
        groups = sorted(set(jax.tree.leaves(rates)))
        if groups == [1.0]:
            return optimizer.make(learning_rate, infos)
        parts = {
            r: slowed(optimizer, r).make(functools.partial(_times, r, learning_rate), _only(r, rates, infos))
            for r in groups
        }
        return by_group(parts, rates)


RULES = {
    "adam": "entries of an update do not depend on the gradient's scale (Adam, Adagrad, Lion)",
    "sgd": "updates are proportional to gradients",
}
"""What an optimizer says of itself by `width_rule`; another kind has no place in the tables."""


def slowed(optimizer: Any, rate: float) -> Any:
    """An optimizer for tensors whose learning rate is multiplied by `rate`: what decay takes of them stays the same."""
    if not getattr(optimizer, "weight_decay", 0):
        return optimizer
    return dataclasses.replace(optimizer, weight_decay=optimizer.weight_decay / rate)


def by_group(parts: Mapping[float, optax.GradientTransformation], groups: Tree) -> optax.GradientTransformation:
    """A transformation for each group of parameters; in place if all of them are.

    Args:
      parts: by group.
      groups: the group of every parameter.
    """
    order = list(parts)

    def merged(found: list[Tree]) -> Tree:
        return jax.tree.map(lambda group, *each: each[order.index(group)], groups, *found)

    def init(params: Tree) -> Tree:
        return {_name(r): tx.init(_only(r, groups, params)) for r, tx in parts.items()}

    def each(step: Any, state: Tree, *trees: Tree) -> tuple[Tree, Tree]:
        found = {
            r: step(tx, state[_name(r)], *(None if t is None else _only(r, groups, t) for t in trees))
            for r, tx in parts.items()
        }
        return merged([new for new, _ in found.values()]), {_name(r): state for r, (_, state) in found.items()}

    def update(grads: Tree, state: Tree, params: Tree | None = None) -> tuple[Tree, Tree]:
        return each(lambda tx, state, grads, params: tx.update(grads, state, params), state, grads, params)

    def update_and_apply(grads: Tree, state: Tree, params: Tree) -> tuple[Tree, Tree]:
        return each(lambda tx, state, grads, params: apply_gradients(tx, grads, state, params), state, grads, params)

    notes = tuple(note for tx in parts.values() for note in getattr(tx, "notes", ()))
    return FusedTransformation(init, update, update_and_apply, (*notes, *_notes(groups)))


def role_of(info: TensorInfo, base: TensorInfo) -> Role:
    """What a tensor is to the width, by its names and by its shape against the base's.

    Dimensions along which tensors are stacked (layers, experts) are none of its own.

    Raises:
      ConfigError: neither its first nor its last dimension is the residual stream's.
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
            f"{info.path} has the axes {info.axes}, and a parametrisation cannot tell its inputs from its outputs; let "
            f"its first or its last be the residual stream's, one of {', '.join(STREAM)}"
        )
    if path[0] == HEAD:
        return Role("head", _growth(outputs), _growth(inputs))  # kept as (vocab, embed)
    kinds = {(False, True): "lookup", (True, True): "hidden", (True, False): "output", (False, False): "vector"}
    wide = any(a in WIDTHS for a, _ in inputs), any(a in WIDTHS for a, _ in outputs)
    return Role(kinds[wide], _growth(inputs), _growth(outputs))


def _growth(dims: list[tuple[str | None, float]]) -> float:
    return math.prod(growth for _, growth in dims)


def _infos(model: Any) -> dict[str, TensorInfo]:
    return {i.path: i for i in jax.tree.leaves(abstract(lambda: model.make(nnx.Rngs(params=0)))[1])}


def _only(group: float, groups: Tree, tree: Tree) -> Tree:
    """The tree with nothing where another group stands."""
    return jax.tree.map(lambda g, x: x if g == group else None, groups, tree)


def _times(factor: float, rate: Schedule, step: jax.Array) -> jax.Array:
    return factor * rate(step)


def _name(rate: float) -> str:
    return f"rate_x{rate:.6g}"


def _notes(rates: Tree) -> tuple[str, ...]:
    found = jax.tree.leaves(rates)
    return tuple(
        f"the learning rate of {found.count(r)} tensors is multiplied by {r:.6g}" for r in sorted(set(found)) if r != 1
    )
