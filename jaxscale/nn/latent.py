"""Multi-head latent attention: keys and values of all heads made of one narrow vector, which is what a cache keeps."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from jaxscale.layout import constrain, in_use
from jaxscale.nn.attention import AttentionKernel
from jaxscale.nn.cache import KeyValues, LayerCache
from jaxscale.nn.context import Context
from jaxscale.nn.linear import Linear
from jaxscale.nn.norms import RMSNorm
from jaxscale.nn.rotary import Rotary, rotate
from jaxscale.parallel import as_weight

if TYPE_CHECKING:
    from jaxscale.nn.attention_layer import MultiHeadLatent

_HEADS = ("batch", "seq", "heads", "head_dim")


class LatentAttention(nnx.Module):
    """Made by `MultiHeadLatent` (DeepSeek-V2, Liu et al. 2024, section 2.1).

    A head's query and key have a plain part and one that is turned by position; the turned part of the key is the same
    for all heads. Over a whole text every head's keys and values are made, and `kernel` mixes them. With a cache the
    matrices that would make them act on queries and outputs instead (the paper's absorbed form, equal but for
    rounding): all heads then attend to the kept vectors themselves, as to one key head whose first widths are values.

    Args:
      width: the residual stream's.
      heads: how many.
      sizes: what made it.
      kernel, rotary, window, softcap, out_scale, dtype, param_dtype: as `Attention`; likewise `scale`, by
        default `MultiHeadLatent.score_scale`.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        sizes: MultiHeadLatent,
        *,
        kernel: AttentionKernel,
        rotary: Rotary | None = None,
        window: int | None = None,
        softcap: float | None = None,
        scale: float | None = None,
        out_scale: float = 1.0,
        dtype: jnp.dtype = jnp.float32,
        param_dtype: jnp.dtype = jnp.float32,
        rngs: nnx.Rngs,
    ):
        z, stream = sizes, {"embed": width}
        linear = partial(Linear, dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        norm = partial(RMSNorm, eps=z.norm_eps, dtype=dtype, param_dtype=param_dtype)
        self.q_down = None if z.q_rank is None else linear(stream, {"latent": z.q_rank})
        self.q_norm = None if z.q_rank is None else norm(z.q_rank)
        of = stream if z.q_rank is None else {"latent_in": z.q_rank}
        self.q = linear(of, {"heads": heads, "head_dim": z.plain_dim})
        self.q_rotary = linear(of, {"heads": heads, "head_dim": z.rotary_dim})
        self.kv_down = linear(stream, {"latent": z.kv_rank})
        self.kv_norm = norm(z.kv_rank)
        self.k_rotary = linear(stream, {"head_dim": z.rotary_dim})
        self.k = linear({"latent_in": z.kv_rank}, {"heads": heads, "head_dim": z.plain_dim})
        self.v = linear({"latent_in": z.kv_rank}, {"heads": heads, "head_dim": z.value_dim})
        self.out = linear({"heads": heads, "head_dim": z.value_dim}, stream, scale=out_scale)
        self.kernel, self.rotary, self.window, self.softcap = kernel, rotary, window, softcap
        self.scale = z.score_scale(0, rotary) if scale is None else scale
        self.dtype = dtype
        self.decode_state = KeyValues(1, z.kv_rank + z.rotary_dim, z.kv_rank, dtype, shared=True)

    def __call__(self, x: Float[Array, "b s e"], context: Context) -> Float[Array, "b s e"]:
        with jax.named_scope("qkv"):
            x = constrain(x, "batch", "seq", "embed")
            # before queries: of the cotangents that x gets, those that heads on other devices add to come side by side,
            # and are summed over them once
            latent = self.kv_norm(constrain(self.kv_down(x), "batch", "seq", "latent"))
            k_turned = constrain(self.k_rotary(x), "batch", "seq", "head_dim")[:, :, None]
            q_from = x
            if self.q_down is not None and self.q_norm is not None:
                q_from = self.q_norm(constrain(self.q_down(x), "batch", "seq", "latent"))
            q, q_turned = (constrain(m(q_from), *_HEADS) for m in (self.q, self.q_rotary))
            if self.rotary is not None:
                cos, sin = context.rotary[self.rotary]
                q_turned, k_turned = rotate(q_turned, cos, sin), rotate(k_turned, cos, sin)
        given: dict[str, Any] = dict(window=self.window, softcap=self.softcap, scale=self.scale)
        if isinstance(context.cache, LayerCache):
            mixed = self._absorbed(context.cache, q, q_turned, latent, k_turned, given)
        else:
            with jax.named_scope("qkv"):
                k, v = constrain(self.k(latent), *_HEADS), constrain(self.v(latent), *_HEADS)
                k = jnp.concatenate([k, jnp.broadcast_to(k_turned, (*k.shape[:-1], k_turned.shape[-1]))], axis=-1)
                q, k = (constrain(y, *_HEADS) for y in (jnp.concatenate([q, q_turned], axis=-1), k))
                q, k, v = (checkpoint_name(y, "qkv") for y in (q, k, v))
            with jax.named_scope("mix"):
                told: dict[str, Any] = dict(segment_ids=context.segment_ids, positions=context.positions)
                mixed = self.kernel(q, k, v, causal=True, **told, **given)
        with jax.named_scope("out"):
            return self.out(constrain(mixed, *_HEADS))

    def _absorbed(
        self,
        cache: LayerCache,
        q: Float[Array, "b s h p"],
        q_turned: Float[Array, "b s h r"],
        latent: Float[Array, "b s l"],
        k_turned: Float[Array, "b s 1 r"],
        given: dict[str, Any],
    ) -> Float[Array, "b s h v"]:
        """Queries and outputs multiplied by what makes keys and values, and kept vectors attended to as they are."""
        used = lambda m: in_use(as_weight(m.kernel.get_value()).dense(), m.axes, self.dtype)  # noqa: E731
        latent = latent[:, :, None]
        with jax.named_scope("qkv"):
            q = jnp.concatenate([jnp.einsum("bshp,lhp->bshl", q, used(self.k)), q_turned], axis=-1)
            q = constrain(q.astype(self.dtype), *_HEADS)
        with jax.named_scope("mix"):
            mixed = cache.mix(q, jnp.concatenate([latent, k_turned], axis=-1), latent, **given)
        with jax.named_scope("out"):
            return jnp.einsum("bshl,lhv->bshv", mixed, used(self.v)).astype(self.dtype)
