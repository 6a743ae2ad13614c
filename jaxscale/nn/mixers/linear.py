"""Linear attention without the delta rule: no decay, a fixed one for each head, or one for each channel and token."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any, ClassVar

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
from jaxscale.nn.mixers.parts import HEADS, MatrixMixer, recurrence_flops
from jaxscale.nn.norms import RMSNorm
from jaxscale.nn.recurrent import matrix_recurrence
from jaxscale.nn.rotary import Rotary, rotate


class LinearHeads(nnx.Module):
    """`S = decay * S + k v^T`, `o = S^T q` for each head; the output is divided by a sum, or normalised and gated.

    Args:
      width: width of the residual stream.
      heads: number of heads.
      key_dim: width of a key.
      value_dim: width of a value.
      rank: with it, each channel's decay is `sigmoid(W x)^(1 / temperature)`, and `W` has this rank.
      temperature: see `rank`.
      retains: whether head i has the fixed decay `1 - 2^(-5 - i)`.
      positive: queries and keys pass `elu + 1`, and outputs are divided by the sum of the products of queries and keys;
        else the outputs are normalised by heads and gated.
      rotary: rotates queries and keys, or `None`.
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
        *,
        rank: int | None = None,
        temperature: float = 1.0,
        retains: bool = False,
        positive: bool = False,
        rotary: Rotary | None = None,
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
        self.gate = None if positive else linear(embed, {"heads": heads, "head_dim": value_dim})
        self.decay_down = None if rank is None else linear(embed, {"latent": rank})
        up = {"heads": heads, "head_dim": key_dim}
        self.decay_up = None if rank is None else linear({"latent": rank}, up, bias=True)
        self.norm = None if positive else RMSNorm(value_dim, axis="head_dim", eps=norm_eps, param_dtype=param_dtype)
        self.out = Linear({"heads": heads, "head_dim": value_dim}, {"embed": width}, scale=out_scale, **types)
        state = StateArray("state", (heads, key_dim, value_dim + positive), ("heads", None, None))
        self.decode_state = RecurrentState((state,))
        self.temperature, self.retains, self.rotary = temperature, retains, rotary
        self.product_dtype, self.dtype = product_dtype, dtype

    def __call__(self, x: Float[Array, "b s e"], context: Context) -> Float[Array, "b s e"]:
        """Apply the layer; with a cache in the context, go on from the sequences' states."""
        with jax.named_scope("qkv"):
            linears = [m for m in (self.q, self.k, self.v, self.gate, self.decay_down) if m is not None]
            q, k, v, *rest = into(x, *linears)
            q, k, v = (constrain(y, *HEADS).astype(jnp.float32) for y in (q, k, v))
            if self.rotary is not None:
                cos, sin = context.rotary[self.rotary]
                q, k = rotate(q, cos, sin), rotate(k, cos, sin)
            decay = None if self.decay_up is None else constrain(self.decay_up(rest[-1]), *HEADS)
        with jax.named_scope("mix"):
            scale = q.shape[-1] ** -0.5
            if self.gate is None:
                q, k = jax.nn.elu(q) + 1, jax.nn.elu(k) + 1
                v = jnp.concatenate([v, jnp.ones_like(v[..., :1])], axis=-1)
            rates = None
            if decay is not None:
                rates = jax.nn.log_sigmoid(decay.astype(jnp.float32)) / self.temperature
            elif self.retains:
                each = jnp.log1p(-(2.0 ** (-5.0 - jnp.arange(q.shape[2]))))
                rates = jnp.broadcast_to(each, q.shape[:3])
            out = matrix_recurrence(
                q * scale, k, v, context, self.decode_state, log_decay=rates, product_dtype=self.product_dtype
            )
            if self.gate is not None:
                context.share("memory", out)
        with jax.named_scope("out"):
            if self.gate is None or self.norm is None:
                out = out[..., :-1] / (out[..., -1:].astype(jnp.float32) + 1e-6)
            else:
                out = self.norm(out) * jax.nn.silu(rest[0].astype(jnp.float32))
            return out_of(constrain(out.astype(self.dtype), *HEADS), self.out)


class _Heads(MatrixMixer):
    """Sizes and FLOPs that the mixers of this file share."""

    gated: ClassVar[bool] = True

    heads: int | None
    value_dim: int | None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole(self, optional=tuple(name for name in ("heads", "key_dim", "value_dim") if hasattr(self, name)))

    def products(self, config: Any, batch: int, seq: int, window: int | None) -> dict[str, int]:
        """See `Mixer`."""
        width = config.sizes.width
        heads, key, value = self._sizes(config.sizes.heads, config.sizes.head_dim)
        tokens = batch * seq
        return {
            "qkv": 2 * tokens * (width * heads * (2 * key + (1 + self.gated) * value) + self._more(width, heads, key)),
            "recurrence": recurrence_flops(tokens, heads, key, value, delta=False),
            "residual_mid": 2 * tokens * width * heads * value,
        }

    def _more(self, width: int, heads: int, key: int) -> int:
        """Multiplications of a token besides those of queries, keys, values and gates."""
        return 0

    def _sizes(self, heads: int, head_dim: int) -> tuple[int, int, int]:
        """Heads, width of a key and of a value."""
        key_dim: int | None = getattr(self, "key_dim", None)  # rotary positions want keys of the model's width
        return self.heads or heads, key_dim or head_dim, self.value_dim or head_dim

    def _make(
        self, width: int, heads: int, head_dim: int, options: dict[str, Any], mine: dict[str, Any]
    ) -> LinearHeads:
        return LinearHeads(width, *self._sizes(heads, head_dim), **mine | self.options(options))


@register
@dataclasses.dataclass(frozen=True)
class LinearAttention(_Heads):
    """Linear attention (Katharopoulos et al. 2020): `elu + 1` in place of the exponential of the scores, no decay.

    Args:
      heads: number of heads; `None` is the model's.
      key_dim: width of a key; `None` is the model's `head_dim`.
      value_dim: width of a value; `None` is the model's `head_dim`.
    """

    gives: ClassVar[tuple[str, ...]] = ()
    gated: ClassVar[bool] = False

    heads: int | None = None
    key_dim: int | None = None
    value_dim: int | None = None

    def __call__(self, width: int, heads: int, kv_heads: int, head_dim: int, **options: Any) -> LinearHeads:
        """See `Mixer`."""
        return self._make(width, heads, head_dim, options, dict(positive=True))


@register
@dataclasses.dataclass(frozen=True)
class RetNet(_Heads):
    """Retention (Sun et al. 2023): a fixed decay for each head, `1 - 2^(-5 - i)`; positions rotate queries and keys.

    Args:
      heads: number of heads; `None` is the model's.
      value_dim: width of a value; `None` is the model's `head_dim`, which is also that of a key.
    """

    heads: int | None = None
    value_dim: int | None = None

    def __call__(self, width: int, heads: int, kv_heads: int, head_dim: int, **options: Any) -> LinearHeads:
        """See `Mixer`."""
        return self._make(width, heads, head_dim, options, dict(retains=True, rotary=options["rotary"]))


@register
@dataclasses.dataclass(frozen=True)
class GatedLinearAttention(_Heads):
    """Gated linear attention (Yang et al. 2024): each channel of keys has a decay that the token chooses.

    Args:
      heads: number of heads; `None` is the model's.
      key_dim: width of a key; `None` is the model's `head_dim`.
      value_dim: width of a value; `None` is the model's `head_dim`.
      rank: of the matrix that makes the decays.
      temperature: the decay is a sigmoid to the power of `1 / temperature`, so that it begins near 1.
    """

    heads: int | None = None
    key_dim: int | None = None
    value_dim: int | None = None
    rank: int = 16
    temperature: float = 16.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole(self, "rank")

    def _more(self, width: int, heads: int, key: int) -> int:
        return self.rank * (width + heads * key)

    def __call__(self, width: int, heads: int, kv_heads: int, head_dim: int, **options: Any) -> LinearHeads:
        """See `Mixer`."""
        mine = dict(rank=self.rank, temperature=self.temperature)
        return self._make(width, heads, head_dim, options, mine)
