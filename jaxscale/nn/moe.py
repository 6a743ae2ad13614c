"""Mixtures of experts: feed-forward layers of which each token uses some."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from jaxscale.config import register
from jaxscale.errors import ConfigError
from jaxscale.layout import constrain, current, in_use, named
from jaxscale.nn.linear import truncated_std
from jaxscale.nn.memory import MemoryPolicy, recomputed
from jaxscale.nn.mlp import FeedForward, SwiGLU
from jaxscale.nn.routers import Router, SoftmaxRouter
from jaxscale.nn.stats import BY_LAYER, Stats
from jaxscale.parallel import Arithmetic, Biases, Capacity, Choices, Slots, Weight, Weights, as_weight, expert_mlp
from jaxscale.parallel.dispatch import Dispatcher
from jaxscale.parallel.expert_products import DOWN, UP
from jaxscale.parallel.experts import check_groups
from jaxscale.parallel.sharded import cut_over
from jaxscale.signatures import check_method

_UP_BIAS, _DOWN_BIAS = ("experts", "expert_mlp"), ("experts", "norm")


@register
@dataclasses.dataclass(frozen=True)
class MixtureOfExperts:
    """A mixture of experts as `Transformer.mlp`: makes an `Experts` layer.

    Args:
      experts: number of experts.
      top_k: experts per token; with an expert-choice router, the average at `capacity = 1`.
      hidden: the hidden width of one expert; the model's `hidden` by default.
      router: chooses the experts of a token: `SoftmaxRouter()`, `SigmoidRouter()`, `ExpertChoiceRouter()`.
      before_attention: the router reads the block's input as it is before attention and its norm, so that a token's
        experts are known while attention runs (SmallThinker, Song et al. 2025, arXiv:2507.20984).
      shared: number of shared experts, which every token uses (Dai et al. 2024); they are one feed-forward layer.
      shared_gate: multiply the output of the shared experts by a sigmoid gate per token (Qwen1.5-MoE).
      expert: the kind of expert: `SwiGLU`, `GeGLU`, `ReGLU`, `GELU`, `SquaredReLU`, `ClampedSwiGLU`.
      capacity: an expert takes at most `capacity * top_k / experts` of a group's tokens and drops the others; `None`
        drops none.
      group: with a capacity, number of consecutive tokens of a row that share it; a whole row by default.
      dispatcher: how tokens get to the devices of their experts: `DroplessDispatch()`, `AllGatherDispatch()`,
        `HierarchicalDispatch()`, `FusedDispatch()`, or with a capacity `SlotDispatch()`; by default the first or the
        last. Weights are sharded alike with all.
      balance_loss: weight of the load-balance loss (0.01 in Switch), over the tokens of a micro-batch on all devices.
      sequence_balance: balance the tokens of each row, and not those of all rows together; the loss is the mean over
        rows (DeepSeek-V3, Liu et al. 2024, eq. 17, with a weight of 1e-4).
      z_loss: weight of the squared log-partition of the router's scores (0.001 in ST-MoE, Zoph et al. 2022).

    Raises:
      ConfigError: sizes out of their range, or a router or dispatcher that does not go with the capacity.
    """

    experts: int = 8
    top_k: int = 2
    hidden: int | None = None
    router: Router = SoftmaxRouter()
    before_attention: bool = False
    shared: int = 0
    shared_gate: bool = False
    expert: type[FeedForward] = SwiGLU
    capacity: float | None = None
    group: int | None = None
    dispatcher: Dispatcher | None = None
    balance_loss: float = 0.0
    sequence_balance: bool = False
    z_loss: float = 0.0

    def __post_init__(self) -> None:
        for name, least in (("experts", 1), ("top_k", 1), ("hidden", 1), ("shared", 0), ("group", 1)):
            value = getattr(self, name)
            if value is None and name in ("hidden", "group"):
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ConfigError(f"MixtureOfExperts.{name} = {value!r}: must be a whole number of at least {least}")
        if self.top_k > self.experts:
            raise ConfigError(
                f"MixtureOfExperts.top_k = {self.top_k} is more than its {self.experts} experts; the most is "
                f"{self.experts}"
            )
        routing = ("top_k", "capacity", "real")
        check_method("MixtureOfExperts.router", self.router, "__call__", ("scores", "bias"), routing)
        check_method("MixtureOfExperts.router", self.router, "probabilities", ("scores",), ())
        if self.capacity is not None and not 0 < self.capacity < math.inf:
            raise ConfigError(
                f"MixtureOfExperts.capacity = {self.capacity}: must be a finite number above 0 (1.0 for as many "
                "slots as choices), or None to drop no tokens"
            )
        if self.capacity is None and self.router.needs_capacity:
            raise ConfigError(
                f"{type(self.router).__name__} needs a number of slots per expert; set MixtureOfExperts.capacity, 1.0 "
                "for as many slots as choices"
            )
        if self.dispatcher is not None:
            self._check_dispatcher(self.dispatcher)
        if self.capacity is None and self.group is not None:
            raise ConfigError(
                f"MixtureOfExperts.group = {self.group} has no effect without a capacity, whose tokens it counts; set "
                "capacity, or leave group out"
            )
        limit = getattr(self.router, "limit", None)
        if limit is not None:
            limit.check(self.experts, self.top_k)
        if self.shared_gate and not self.shared:
            raise ConfigError(
                "MixtureOfExperts.shared_gate = True has no effect without shared experts; set shared, or leave "
                "it False"
            )
        if self.sequence_balance and not self.balance_loss:
            raise ConfigError(
                "MixtureOfExperts.sequence_balance = True has no effect without the load-balance loss; set "
                "balance_loss (0.0001 in DeepSeek-V3), or leave it False"
            )
        for name in ("balance_loss", "z_loss"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(f"MixtureOfExperts.{name} = {getattr(self, name)}: must be finite and at least 0")

    def _check_dispatcher(self, dispatcher: Dispatcher) -> None:
        name = type(dispatcher).__name__
        if not isinstance(dispatcher, Dispatcher):
            raise ConfigError(
                f"MixtureOfExperts.dispatcher = {dispatcher!r}: must be a Dispatcher, such as DroplessDispatch()"
            )
        if dispatcher.needs_capacity and self.capacity is None:
            raise ConfigError(
                f"{name} sends a number of slots per expert; set MixtureOfExperts.capacity, 1.0 for as many slots as "
                "choices, or MixtureOfExperts.dispatcher = DroplessDispatch()"
            )
        if self.capacity is not None and not dispatcher.needs_capacity:
            without = "" if self.router.needs_capacity else ", or MixtureOfExperts.capacity = None"
            raise ConfigError(
                f"{name} drops no token, and MixtureOfExperts.capacity = {self.capacity} does; use "
                f"SlotDispatch(){without}"
            )

    def check(self, config: Any) -> None:
        """Check the model's config.

        Args:
          config: the `TransformerConfig`.

        Raises:
          ConfigError: a field that experts do not support.
        """
        if self.before_attention and (config.parallel or config.stack.two_streams):
            name = "parallel = True" if config.parallel else f"stack = @{config.stack.__name__}"
            other = "parallel = False" if config.parallel else "stack = @Run"
            raise ConfigError(
                f"MixtureOfExperts.before_attention = True has no input of its own with Transformer.{name}; use "
                f"Transformer.{other}, or leave before_attention False"
            )
        if "mlp" in config.overlap:
            raise ConfigError("Transformer.overlap names 'mlp', and experts have other collectives; use ('attention',)")
        if "mlp_hidden" in MemoryPolicy.of(config.memory).tile:
            raise ConfigError(
                "Transformer.memory tiles 'mlp_hidden' along the sequence, and experts take tokens of all positions; "
                "remove it from MemoryPolicy.tile"
            )

    def dropless(self) -> MixtureOfExperts:
        """Return this mixture with the default dispatcher, and without a capacity unless its router needs one."""
        if self.capacity is None or self.router.needs_capacity:
            return self.on_any_mesh()
        return dataclasses.replace(self, capacity=None, group=None, dispatcher=None)

    def on_any_mesh(self) -> MixtureOfExperts:
        """Return this mixture with the default dispatcher, which every mesh supports and which sends rows exactly."""
        return self if self.dispatcher is None else dataclasses.replace(self, dispatcher=None)

    @property
    def gated(self) -> bool:
        """Whether an expert has a gate."""
        return self.expert.gated

    def widths(self, hidden: int) -> tuple[int, int]:
        """Return the hidden widths of one expert and of all shared experts together.

        Args:
          hidden: the model's `hidden`.
        """
        one = self.hidden or hidden
        return one, self.shared * one

    def slots(self, seq: int) -> Capacity | None:
        """Return an expert's capacity, or `None` if no tokens are dropped.

        Args:
          seq: tokens per row.

        Raises:
          ConfigError: `group` does not divide the row.
        """
        if self.capacity is None:
            return None
        group = min(self.group or seq, seq)
        if seq % group:
            fit = max(d for d in range(1, group + 1) if seq % d == 0)
            raise ConfigError(
                f"MixtureOfExperts.group = {group} does not divide rows of {seq} tokens; the nearest that does is {fit}"
            )
        return Capacity(min(math.ceil(self.capacity * self.top_k * group / self.experts), group), group)

    def __call__(
        self,
        width: int,
        hidden: int,
        *,
        bias: bool = False,
        out_scale: float = 1.0,
        dtype: DTypeLike = jnp.float32,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ) -> Experts:
        """Make the layer; arguments as `FeedForward`. The router has a bias, too, if the experts have (GPT-OSS)."""
        types: dict[str, Any] = dict(dtype=dtype, param_dtype=param_dtype)
        return Experts(self, width, hidden, bias=bias, out_scale=out_scale, rngs=rngs, **types)


class Experts(nnx.Module):
    """A router and its experts, made by `MixtureOfExperts`.

    Called with activations, a mask of tokens that are not padding (`real`) and, for `before_attention`, the block's
    input (`before`), it returns what the layer adds and its statistics (see `jaxscale.nn.stats`). Padding goes to no
    expert, takes no slot and is in no statistic.

    Args:
      config: the settings.
      width: width of the residual stream.
      hidden: the model's hidden width.
      bias: add a bias after every matrix, and to the router's scores.
      out_scale: multiplies the initial standard deviation of `down`.
      dtype: dtype of the computation.
      param_dtype: dtype of the parameters.
      rngs: random streams of the initial values.
    """

    reports = "moe"

    def __init__(
        self,
        config: MixtureOfExperts,
        width: int,
        hidden: int,
        *,
        bias: bool = False,
        out_scale: float,
        dtype: DTypeLike,
        param_dtype: DTypeLike,
        rngs: nnx.Rngs,
    ):
        c = self.config = config
        one, shared = c.widths(hidden)

        def parameter(axes: tuple[str, ...], *shape: int, scale: float = 1.0) -> nnx.Param[Any]:
            init = jax.nn.initializers.truncated_normal(truncated_std(shape[-2], scale))
            contracted = (-2,) if axes in (UP, DOWN) else None
            return nnx.Param(named(init, *axes, contracted=contracted)(rngs.params(), shape, param_dtype))

        self.router = parameter(("embed", "router"), width, c.experts)
        zeros = named(jax.nn.initializers.zeros, "router")
        balanced = c.router.balanced
        self.load_bias = nnx.Param(zeros(rngs.params(), (c.experts,), jnp.float32)) if balanced else None
        self.gate = parameter(UP, c.experts, width, one) if c.gated else None
        self.up = parameter(UP, c.experts, width, one)
        self.down = parameter(DOWN, c.experts, one, width, scale=out_scale)

        def zero(axes: tuple[str, ...], *shape: int) -> nnx.Param[Any] | None:
            return (
                nnx.Param(named(jax.nn.initializers.zeros, *axes)(rngs.params(), shape, param_dtype)) if bias else None
            )

        self.router_bias = zero(("router",), c.experts)
        self.gate_bias = zero(_UP_BIAS, c.experts, one) if c.gated else None
        self.up_bias = zero(_UP_BIAS, c.experts, one)
        self.down_bias = zero(_DOWN_BIAS, c.experts, width)
        types: dict[str, Any] = dict(dtype=dtype, param_dtype=param_dtype)
        self.shared = c.expert(width, shared, bias=bias, out_scale=out_scale, rngs=rngs, **types) if shared else None
        normal = jax.nn.initializers.truncated_normal(truncated_std(width))
        gate = named(normal, "norm")  # a vector that FSDP does not shard, as a norm's scale
        self.shared_gate = nnx.Param(gate(rngs.params(), (width,), param_dtype)) if c.shared_gate else None
        self.dtype = dtype
        self.arithmetic = Arithmetic.cast(dtype)

    def check_independent(self) -> None:
        """Raise `ConfigError` if the result for a sequence depends on the other sequences of a step."""
        c = self.config
        if c.router.needs_capacity:
            raise ConfigError(
                f"{type(c.router).__name__} chooses among all tokens of a group, later ones and padding included, so "
                "that a sequence would depend on the others; train a model for generation with SoftmaxRouter"
            )
        if c.capacity is not None:
            raise ConfigError(
                f"MixtureOfExperts.capacity = {c.capacity} drops tokens depending on the rest of the batch, so that a "
                "sequence would depend on the others; generate with MixtureOfExperts.capacity = None"
            )

    @property
    def reads_before_attention(self) -> bool:
        """Whether it is called with the block's input, too."""
        return self.config.before_attention

    def __call__(
        self,
        x: Float[Array, "b s e"],
        real: Bool[Array, "b s"] | None = None,
        before: Float[Array, "b s e"] | None = None,
    ) -> tuple[Float[Array, "b s e"], Stats]:
        """Apply the layer; `real` are the tokens that are not padding (`None` is all)."""
        c = self.config
        assert c.before_attention == (before is not None)
        capacity = c.slots(x.shape[1])
        if capacity is not None:
            check_groups(x.shape[1], capacity, dropless=not c.router.needs_capacity and c.dispatcher is None)
        with jax.named_scope("router"):
            scores = self.scores(x if before is None else before)
            bias = None if self.load_bias is None else self.load_bias.get_value()
            real = constrain(jnp.ones(x.shape[:2], bool) if real is None else real, "expert_batch", "expert_seq")
            routed = c.router(scores, bias, top_k=c.top_k, capacity=capacity, real=real)
        stored = [None if p is None else as_weight(p.get_value()) for p in (self.gate, self.up, self.down)]
        gathered = any(w is not None and w.gathers for w in stored)
        arithmetic = as_weight(self.up.get_value()).arithmetic(self.arithmetic)
        weights = self._grouped(stored, arithmetic, x) if gathered and capacity is None else None
        if weights is None:
            weights = Weights._make(
                None if w is None else w.gathered(axes, self.arithmetic.dtype) if gathered else w.dense()
                for w, axes in zip(stored, (UP, UP, DOWN), strict=True)
            )
        if arithmetic.reparametrised is not None:
            weights = Weights._make(jax.vmap(arithmetic.matrix)(w) if isinstance(w, jax.Array) else w for w in weights)
        act, combine = c.expert.activation, c.expert.combine
        if isinstance(routed, Choices):
            self._show(stored, weights, x, routed)
        with jax.named_scope("experts"):
            y = expert_mlp(
                x,
                routed,
                weights,
                biases=self._biases(),
                act=act,
                combine=combine,
                arithmetic=arithmetic,
                capacity=capacity,
                dispatcher=c.dispatcher,
                gathered=gathered,
                saves=not recomputed("mlp_up"),
            )
        if self.shared is not None:
            with jax.named_scope("shared"):
                y = y + self._gated(self.shared(constrain(x, "batch", "seq", "embed")), x)
        with jax.named_scope("router"):
            return y, routing_statistics(c, scores, routed, bias, capacity, real)

    def _grouped(self, stored: list[Weight | None], arithmetic: Arithmetic, x: Array) -> Weights | None:
        """Return the weights without dense copies of them, if all have a grouped product; else `None`."""
        layout, axes = current(), (UP, UP, DOWN)
        devices = 1 if layout is None else math.prod(layout.sizes[m] for m in cut_over("expert_batch", "expert_seq"))
        rows = x.shape[0] * x.shape[1] * self.config.top_k // devices
        each = [None if w is None else w.for_experts(a, arithmetic, rows) for w, a in zip(stored, axes, strict=True)]
        none = any(w is not None and one is None for w, one in zip(stored, each, strict=True))
        return None if none else Weights._make(each)

    def _biases(self) -> Biases | None:
        """Return the experts' biases, float32."""
        if self.up_bias is None or self.down_bias is None:
            return None
        gate = None if self.gate_bias is None else in_use(self.gate_bias.get_value(), _UP_BIAS, jnp.float32)
        up = in_use(self.up_bias.get_value(), _UP_BIAS, jnp.float32)
        return Biases(gate, up, in_use(self.down_bias.get_value(), _DOWN_BIAS, jnp.float32))

    def _show(self, stored: list[Weight | None], weights: Weights, x: Array, routed: Choices) -> None:
        """Tell each weight what its experts multiply by it, as functions, which calibration alone calls."""

        def chosen() -> Array:
            return jnp.any(jax.nn.one_hot(routed.ids, self.config.experts, dtype=bool), axis=2)

        def hidden() -> Array:
            expert, biases = self.config.expert, self._biases()

            def product(w: Array | Weight, bias: Array | None) -> Array:
                y = jnp.einsum("bse,xem->xbsm", x, as_weight(w).dense())
                return y if bias is None else y + bias[:, None, None]

            up = product(weights.up, biases and biases.up)
            if weights.gate is None:
                return expert.activation(up)
            return expert.combine(product(weights.gate, biases and biases.gate), up)

        for w, inputs in zip(stored, (lambda: x, lambda: x, hidden), strict=True):
            if w is not None:
                w.of_experts(chosen, inputs)

    def scores(self, x: Float[Array, "b s e"]) -> Float[Array, "b s x"]:
        """Return the router's scores, computed in float32.

        Args:
          x: the layer's input, or with `before_attention` the block's.
        """
        return scores_of(x, self.router.get_value(), None if self.router_bias is None else self.router_bias.get_value())

    def _gated(self, y: Array, x: Array) -> Array:
        """Multiply the output of the shared experts by their gate, computed in float32."""
        if self.shared_gate is None:
            return y
        gate = self.shared_gate.get_value().astype(jnp.float32)
        score = jnp.sum(constrain(x, "batch", "seq", "embed").astype(jnp.float32) * gate, axis=-1, keepdims=True)
        return (y.astype(jnp.float32) * jax.nn.sigmoid(score)).astype(y.dtype)


def scores_of(
    x: Float[Array, "b s e"], router: Float[Array, "e x"], bias: Float[Array, " x"] | None = None
) -> Float[Array, "b s x"]:
    """Return a router's scores, computed in float32.

    Args:
      x: what the router reads.
      router: its matrix.
      bias: added to the scores.
    """
    x = constrain(x, "expert_batch", "expert_seq", "embed").astype(jnp.float32)
    kernel = in_use(router, ("embed", "router"), jnp.float32)
    scores = jnp.einsum("bse,ex->bsx", x, kernel, precision=lax.Precision.HIGHEST)
    if bias is not None:
        scores = scores + in_use(bias, ("router",), jnp.float32)
    return constrain(scores, "expert_batch", "expert_seq", None)


def routing_statistics(
    c: MixtureOfExperts,
    scores: Float[Array, "b s x"],
    routed: Choices | Slots,
    bias: Float[Array, " x"] | None,
    capacity: Capacity | None,
    real: Bool[Array, "b s"],
) -> Stats:
    """Return the statistics over all tokens of the batch that are not padding, on all devices.

    Args:
      c: the settings.
      scores: of every token with every expert, float32.
      routed: what the router chose.
      bias: the load biases, if there are any.
      capacity: slots per expert, if limited.
      real: which tokens are not padding.
    """
    x = scores.shape[-1]
    count = jnp.sum(real, dtype=jnp.float32)
    tokens = jnp.maximum(count, 1.0)
    if isinstance(routed, Slots):
        dropped, by_row = _slots_load(routed, real)
    else:
        dropped, by_row = _choices_load(routed.ids, x, capacity)
    load = jnp.sum(by_row, axis=0)
    share = load / jnp.maximum(jnp.sum(load), 1.0)
    probabilities = jnp.where(real[..., None], c.router.probabilities(scores), 0.0)
    mean = jnp.sum(probabilities, axis=(0, 1)) / tokens
    entropy = jnp.sum(jax.scipy.special.entr(lax.stop_gradient(probabilities)))
    balance = _balance_of_rows(by_row, probabilities, real) if c.sequence_balance else x * jnp.sum(share * mean)
    z = jnp.sum(jnp.where(real, jnp.square(jax.nn.logsumexp(scores, axis=-1)), 0.0)) / tokens
    loss = c.balance_loss * balance + c.z_loss * z
    if bias is not None:  # its value is 0, and its derivative is each expert's load above the mean
        loss = loss + jnp.sum((bias - lax.stop_gradient(bias)) * (share - 1 / x))
    return {
        "loss": loss,
        "layers": jnp.ones([], jnp.float32),
        "load_balance": balance,
        "router_z": z,
        "dropped": dropped,
        "max_load": x * jnp.max(share),
        "router_entropy": entropy / tokens,
        # how often each expert was chosen, the number of tokens, and the sum of their entropies
        f"{BY_LAYER}experts_{x}": jnp.concatenate([load, jnp.stack([count, entropy])]),
    }


def _balance_of_rows(
    load: Float[Array, "b x"], probabilities: Float[Array, "b s x"], real: Bool[Array, "b s"]
) -> Float[Array, ""]:
    """Return the mean over rows with tokens of experts * sum over experts of (share of choices * mean probability)."""
    tokens = jnp.sum(real, axis=1, dtype=jnp.float32)
    share = load / jnp.maximum(jnp.sum(load, axis=1, keepdims=True), 1.0)
    mean = jnp.sum(probabilities, axis=1) / jnp.maximum(tokens, 1.0)[:, None]
    rows = jnp.maximum(jnp.sum(tokens > 0, dtype=jnp.float32), 1.0)
    return load.shape[-1] * jnp.sum(share * mean) / rows


def _choices_load(ids: Int[Array, "b s k"], experts: int, capacity: Capacity | None) -> tuple[Array, Array]:
    """Return the share of choices without a slot, and how often each expert was chosen by each row's tokens."""
    b, s, k = ids.shape
    group = s if capacity is None else capacity.group
    chosen = jax.nn.one_hot(ids, experts, dtype=jnp.float32).reshape(b, s // group, group * k, experts)
    counts = jnp.sum(chosen, axis=2)
    dropped = jnp.zeros([]) if capacity is None else jnp.sum(jnp.maximum(counts - capacity.slots, 0.0))
    return dropped / jnp.maximum(jnp.sum(counts), 1.0), jnp.sum(counts, axis=1)


def _slots_load(slots: Slots, real: Bool[Array, "b s"]) -> tuple[Array, Array]:
    """Return the share of tokens that no expert chose, and how many of each row each expert chose."""
    b, n, x, c = slots.token.shape
    group = real.shape[1] // n
    chosen = jax.nn.one_hot(slots.token, group, dtype=jnp.float32)
    none = (jnp.sum(chosen, axis=(2, 3)) == 0) & real.reshape(b, n, group)
    share = jnp.sum(none, dtype=jnp.float32) / jnp.maximum(jnp.sum(real, dtype=jnp.float32), 1.0)
    return share, jnp.sum(chosen, axis=(1, 3, 4))
