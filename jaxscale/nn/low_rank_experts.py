"""Experts that share the matrices of one feed-forward layer and differ by low-rank terms (MixLoRA)."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float

from jaxscale.config import register
from jaxscale.errors import ConfigError, check_positive, check_whole
from jaxscale.layout import constrain, in_use, named
from jaxscale.nn.linear import project, truncated_std
from jaxscale.nn.mlp import FeedForward, SwiGLU
from jaxscale.nn.moe import MixtureOfExperts, routing_statistics, scores_of
from jaxscale.nn.stats import Stats
from jaxscale.parallel import Arithmetic, Choices


@register
@dataclasses.dataclass(frozen=True)
class LowRankExperts:
    """Experts over one feed-forward layer as `Transformer.mlp` (MixLoRA, Li et al. 2024, arXiv:2404.15159).

    An expert's matrices are the layer's plus a low-rank product of its own. A router chooses `top_k` of them for a
    token by softmax, and their weights sum to 1. `train.adapters = @MixLoRA()` makes a trained model's feed-forward
    layers these, and trains routers and low-rank products alone.

    Args:
      experts: number of experts.
      top_k: experts per token.
      rank: rank of an expert's product in each matrix.
      alpha: low-rank products are scaled by `alpha / rank`.
      dense: the kind of feed-forward layer: `SwiGLU`, `GeGLU`, `ReGLU`, `GELU`, `SquaredReLU`.
      balance_loss: weight of the load-balance loss.

    Raises:
      ConfigError: sizes out of their range.
    """

    experts: int = 8
    top_k: int = 2
    rank: int = 8
    alpha: float = 16.0
    dense: type[FeedForward] = SwiGLU
    balance_loss: float = 0.01

    def __post_init__(self) -> None:
        check_whole("LowRankExperts.rank", self.rank)
        check_positive("LowRankExperts.alpha", self.alpha)
        if not (isinstance(self.dense, type) and issubclass(self.dense, FeedForward)):
            raise ConfigError(f"LowRankExperts.dense = {self.dense!r}: must be a feed-forward layer, such as @SwiGLU")
        _ = self.mixture

    @property
    def gated(self) -> bool:
        """Whether the layer has a gate; the model's default hidden width depends on it."""
        return self.dense.gated

    @property
    def mixture(self) -> MixtureOfExperts:
        """The routing, as settings of a mixture of experts."""
        return MixtureOfExperts(self.experts, self.top_k, balance_loss=self.balance_loss)

    def check(self, config: Any) -> None:
        """Check the model's config.

        Args:
          config: the `TransformerConfig`.

        Raises:
          ConfigError: a field that experts do not support.
        """
        self.mixture.check(config)

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
    ) -> LowRankMixture:
        """Make the layer; arguments as `FeedForward`."""
        types: dict[str, Any] = dict(dtype=dtype, param_dtype=param_dtype)
        return LowRankMixture(self, width, hidden, bias=bias, out_scale=out_scale, rngs=rngs, **types)


class LowRankMixture(nnx.Module):
    """A feed-forward layer, a router, and low-rank products of each expert, made by `LowRankExperts`.

    The parameters `gate`, `up` and `down` are those of the feed-forward layer. `up_a` (embed, experts * rank) and
    `up_b` (experts * rank, mlp) are the products of all experts, and so on. The layer's own products are computed once
    for all experts: up and gate before the low-rank terms are added, and down after the experts' hidden features are
    summed. Low-rank products and activations are computed for every token and expert; the weights of experts that a
    token did not choose are 0. The backward pass computes an expert's hidden features again.

    Args:
      config: the settings.
      width: width of the residual stream.
      hidden: the hidden width.
      bias: add a bias after every matrix of the layer.
      out_scale: multiplies the initial standard deviation of `down`.
      dtype: dtype of the computation.
      param_dtype: dtype of the parameters.
      rngs: random streams of the initial values.
    """

    reports = "moe"

    def __init__(
        self,
        config: LowRankExperts,
        width: int,
        hidden: int,
        *,
        bias: bool,
        out_scale: float,
        dtype: DTypeLike,
        param_dtype: DTypeLike,
        rngs: nnx.Rngs,
    ):
        self.config, self.dtype = config, dtype
        types: dict[str, Any] = dict(dtype=dtype, param_dtype=param_dtype)
        layer = config.dense(width, hidden, bias=bias, out_scale=out_scale, rngs=rngs, **types)
        self.gate, self.up, self.down = layer.gate, layer.up, layer.down

        def parameter(random: bool, axes: tuple[str, str], *shape: int) -> nnx.Param[Any]:
            normal = jax.nn.initializers.truncated_normal(truncated_std(shape[0]))
            init = normal if random else jax.nn.initializers.zeros
            return nnx.Param(named(init, *axes)(rngs.params(), shape, jnp.float32))

        def pair(axes: tuple[str, str], *sizes: int) -> tuple[nnx.Param[Any], nnx.Param[Any]]:
            ranks = config.experts * config.rank
            first = parameter(True, (axes[0], "rank"), sizes[0], ranks)
            return first, parameter(False, ("rank", axes[1]), ranks, sizes[1])

        self.router = parameter(True, ("embed", "router"), width, config.experts)
        into = ("embed", "mlp"), width, hidden
        gate: tuple[Any, Any] = pair(*into) if config.dense.gated else (None, None)
        self.gate_a, self.gate_b = gate
        self.up_a, self.up_b = pair(*into)
        self.down_a, self.down_b = pair(("mlp", "embed"), hidden, width)

    def __call__(
        self, x: Float[Array, "b s e"], real: Bool[Array, "b s"] | None = None
    ) -> tuple[Float[Array, "b s e"], Stats]:
        """Apply the layer; `real` are the tokens that are not padding (`None` is all)."""
        c, mixture = self.config, self.config.mixture
        with jax.named_scope("router"):
            real = constrain(jnp.ones(x.shape[:2], bool) if real is None else real, "expert_batch", "expert_seq")
            scores = scores_of(x, self.router.get_value())
            routed = mixture.router(scores, None, top_k=c.top_k, capacity=None, real=real)
            assert isinstance(routed, Choices)
            hit = routed.ids[..., None] == jnp.arange(c.experts)
            weights = constrain(jnp.sum(jnp.where(hit, routed.weights[..., None], 0.0), axis=2), "batch", "seq", None)
        x = constrain(x, "batch", "seq", "embed")
        with jax.named_scope("experts"):
            y = self._experts(x, jnp.moveaxis(weights, -1, 0))
        with jax.named_scope("router"):
            return y, routing_statistics(mixture, scores, routed, None, None, real)

    def _experts(self, x: Float[Array, "b s e"], weights: Float[Array, "x b s"]) -> Float[Array, "b s e"]:
        c = self.config
        scale = c.alpha / c.rank
        up = self.up(x)
        gate = None if self.gate is None else self.gate(x)
        stacked = {"up": self._pair(x, self.up_a, self.up_b)}
        if gate is not None:
            stacked["gate"] = self._pair(x, self.gate_a, self.gate_b)
        down_a = in_use(self.down_a.get_value(), ("mlp", "rank"), self.dtype)
        down_a = jnp.moveaxis(down_a.reshape(down_a.shape[0], c.experts, c.rank), 1, 0)
        down_b = in_use(self.down_b.get_value(), ("rank", "embed"), self.dtype)

        def one(
            total: Float[Array, "b s f"], of: tuple[dict[str, tuple[Array, Array]], Array, Array]
        ) -> tuple[Array, Array]:
            pairs, a, weight = of

            def with_own(own: Array, name: str) -> Array:
                low, b = pairs[name]
                return constrain(own + scale * (low @ b).astype(own.dtype), "batch", "seq", "mlp")

            h = with_own(up, "up")
            if gate is None:
                h = c.dense.activation(h)
            else:
                h = c.dense.combine(with_own(gate, "gate"), h)
            h = h * weight[..., None].astype(h.dtype)
            return total + h.astype(jnp.float32), h @ a

        start = constrain(jnp.zeros(up.shape, jnp.float32), "batch", "seq", "mlp")
        total, low = lax.scan(jax.checkpoint(one), start, (stacked, down_a, weights))
        low = jnp.moveaxis(low, 0, 2).reshape(*x.shape[:2], c.experts * c.rank)
        y = self.down(constrain(total.astype(up.dtype), "batch", "seq", "mlp"))
        return y + scale * (low @ down_b).astype(y.dtype)

    def _pair(
        self, x: Float[Array, "b s e"], a: nnx.Param[Any] | None, b: nnx.Param[Any] | None
    ) -> tuple[Float[Array, "x b s r"], Float[Array, "x r f"]]:
        """Return each expert's `x · a`, and its `b`."""
        assert a is not None and b is not None
        c = self.config
        low = project(x, a.get_value(), ("embed", "rank"), (0,), Arithmetic.cast(self.dtype))
        low = jnp.moveaxis(low.reshape(*low.shape[:2], c.experts, c.rank), 2, 0)
        own = in_use(b.get_value(), ("rank", "mlp"), self.dtype)
        return low, own.reshape(c.experts, c.rank, own.shape[-1])
