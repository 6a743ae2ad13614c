"""Kimi Delta Attention: the delta rule with a decay for each channel."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxscale.config import register
from jaxscale.layout import constrain
from jaxscale.nn.cache import RecurrentState, StateArray
from jaxscale.nn.context import Context
from jaxscale.nn.linear import Linear, into, out_of
from jaxscale.nn.mixer import check_whole
from jaxscale.nn.mixers.parts import (
    HEADS,
    MatrixMixer,
    ShortConvolution,
    rate_logarithm,
    recurrence_flops,
    step_size_bias,
    unit,
)
from jaxscale.nn.norms import RMSNorm
from jaxscale.nn.recurrent import matrix_recurrence


class KimiDelta(nnx.Module):
    """`S = (I - beta k k^T) Diag(decay) S + beta k v^T` for each head; the output `S^T q` is normalised and gated.

    Queries, keys and values pass a short convolution; queries and keys have length 1. The decays and the output's gate
    are made by two matrices each, with `rank` numbers between them.

    Args:
      width: width of the residual stream.
      heads: number of heads.
      key_dim: width of a key.
      value_dim: width of a value.
      rank: see above.
      taps: tokens that the convolutions see.
      norm_eps: epsilon of the output's norm.
      out_scale: multiplies the initial standard deviation of the output projection.
      product_dtype: see `MatrixMixer`.
      dtype: dtype of the computation; the recurrence's sums and states are float32.
      param_dtype: dtype of the parameters.
      rngs: random streams of the initial values.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        key_dim: int,
        value_dim: int,
        rank: int,
        taps: int,
        *,
        norm_eps: float,
        product_dtype: str,
        out_scale: float,
        dtype: jnp.dtype,
        param_dtype: jnp.dtype,
        rngs: nnx.Rngs,
    ):
        types = dict[str, Any](dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        linear = partial(Linear, dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        embed = {"embed": width}
        self.q, self.k = (linear(embed, {"heads": heads, "head_dim": key_dim}) for _ in range(2))
        self.v = linear(embed, {"heads": heads, "head_dim": value_dim})
        self.beta = linear(embed, {"heads": heads})
        self.decay_down, self.gate_down = (linear(embed, {"latent": rank}) for _ in range(2))
        self.decay_up = Linear({"latent": rank}, {"heads": heads, "head_dim": key_dim}, **types)
        self.gate_up = Linear({"latent": rank}, {"heads": heads, "head_dim": value_dim}, **types)
        self.q_conv = ShortConvolution("q", taps, heads, key_dim, **types)
        self.k_conv = ShortConvolution("k", taps, heads, key_dim, **types)
        self.v_conv = ShortConvolution("v", taps, heads, value_dim, **types)
        self.rate = rate_logarithm(rngs, heads, param_dtype)
        self.step = step_size_bias(rngs, (heads, key_dim), ("heads", "head_dim"), param_dtype)
        self.norm = RMSNorm(value_dim, axis="head_dim", eps=norm_eps, param_dtype=param_dtype)
        self.out = Linear({"heads": heads, "head_dim": value_dim}, {"embed": width}, scale=out_scale, **types)
        state = StateArray("state", (heads, key_dim, value_dim), ("heads", None, None))
        convolutions = (self.q_conv, self.k_conv, self.v_conv)
        self.decode_state = RecurrentState((state, *(c.stored for c in convolutions)))
        self.product_dtype, self.dtype = product_dtype, dtype

    def __call__(self, x: Float[Array, "b s e"], context: Context) -> Float[Array, "b s e"]:
        """Apply the layer; with a cache in the context, go on from the sequences' states."""
        with jax.named_scope("qkv"):
            q, k, v, beta, decay, gate = into(x, self.q, self.k, self.v, self.beta, self.decay_down, self.gate_down)
            q, k, v = (
                conv(constrain(y, *HEADS), context, self.decode_state)
                for conv, y in ((self.q_conv, q), (self.k_conv, k), (self.v_conv, v))
            )
            decay, gate = (constrain(up(y), *HEADS) for up, y in ((self.decay_up, decay), (self.gate_up, gate)))
        with jax.named_scope("mix"):
            step = jax.nn.softplus(decay.astype(jnp.float32) + self.step.get_value())
            out = matrix_recurrence(
                unit(q) * q.shape[-1] ** -0.5,
                unit(k),
                v,
                context,
                self.decode_state,
                log_decay=-jnp.exp(self.rate.get_value().astype(jnp.float32))[:, None] * step,
                beta=jax.nn.sigmoid(beta.astype(jnp.float32)),
                product_dtype=self.product_dtype,
            )
            context.share("memory", out)
        with jax.named_scope("out"):
            out = self.norm(out) * jax.nn.sigmoid(gate.astype(jnp.float32))
            return out_of(constrain(out.astype(self.dtype), *HEADS), self.out)


@register
@dataclasses.dataclass(frozen=True)
class KimiDeltaAttention(MatrixMixer):
    """Kimi Delta Attention (Kimi Team 2025, Kimi Linear).

    Args:
      heads: number of heads; `None` is the model's.
      key_dim: width of a key; `None` is the model's `head_dim`.
      value_dim: width of a value; `None` is the model's `head_dim`.
      rank: width between the two matrices that make decays and gates; `None` is that of a value.
      taps: tokens that the convolutions of queries, keys and values see, the current one included.

    Raises:
      ConfigError: a number of heads, a width, or `taps` below 1.
    """

    heads: int | None = None
    key_dim: int | None = None
    value_dim: int | None = None
    rank: int | None = None
    taps: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole(self, "taps", optional=("heads", "key_dim", "value_dim", "rank"))

    def products(self, config: Any, batch: int, seq: int, window: int | None) -> dict[str, int]:
        """See `Mixer`."""
        width = config.sizes.width
        heads, key, value, rank = self._sizes(config.sizes.heads, config.sizes.head_dim)
        tokens = batch * seq
        low_rank = 2 * width * rank + rank * heads * (key + value)
        return {
            "qkv": 2 * tokens * (width * (heads * (2 * key + value) + heads) + low_rank),
            "recurrence": recurrence_flops(tokens, heads, key, value, delta=True),
            "residual_mid": 2 * tokens * width * heads * value,
        }

    def __call__(self, width: int, heads: int, kv_heads: int, head_dim: int, **options: Any) -> KimiDelta:
        """See `Mixer`."""
        sizes = self._sizes(heads, head_dim)
        return KimiDelta(width, *sizes, self.taps, **self.options(options))

    def _sizes(self, heads: int, head_dim: int) -> tuple[int, int, int, int]:
        """Heads, width of a key and of a value, rank."""
        value = self.value_dim or head_dim
        return self.heads or heads, self.key_dim or head_dim, value, self.rank or value
