"""Sigmoid attention as an attention kernel of a model: `Transformer.attention = @SigmoidAttention()`."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from einops import rearrange
from jax import lax
from jaxtyping import Array, Float, Int

from jaxscale.config import register
from jaxscale.errors import ConfigError
from jaxscale.nn.cache import LayerCache
from jaxscale.nn.flash import WHOLE, over_devices, refuse_split
from jaxscale.parallel.sharded import cut_over
from pallas_kernels.flash_attention import flash_attention


@register
@dataclasses.dataclass(frozen=True)
class SigmoidAttention:
    """Attention whose weights are `sigmoid(score - log n)`, each on its own (Ramapuram et al. 2024).

    `n` is a constant and not the number of keys in a row, so that a document has the same output alone, in a packed row
    and while it is generated: a token that is decoded after 10 others, or after 10,000, has the same `n`. In the paper
    it is the length of the rows in training, which stays with the model.

    Args:
      length: `n`, usually the tokens of a row in training; with as many keys, the weights begin with a sum near 1.
      deterministic: see `pallas_kernels.flash_attention.flash_attention`.
      implementation: see `pallas_kernels.flash_attention.flash_attention`.

    Raises:
      ConfigError: a length below 1.
    """

    softmax: ClassVar[bool] = False

    length: int
    deterministic: bool = False
    implementation: str | None = None

    def __post_init__(self) -> None:
        if isinstance(self.length, bool) or not isinstance(self.length, int) or self.length < 1:
            raise ConfigError(
                f"SigmoidAttention.length = {self.length!r}: must be a whole number of at least 1, such as "
                "train.seq_len"
            )

    def __call__(
        self,
        q: Float[Array, "b s h d"],
        k: Float[Array, "b t kv d"],
        v: Float[Array, "b t kv dv"],
        *,
        causal: bool = True,
        segment_ids: Int[Array, "b s"] | None = None,
        positions: Int[Array, "b s"] | None = None,
        window: int | None = None,
        softcap: float | None = None,
        scale: float | None = None,
    ) -> Float[Array, "b s h dv"]:
        """Compute attention; see `jaxscale.nn.flash_attention` for the arguments.

        Raises:
          LayoutError: the layout shards `head_dim` or the keys' sequence, heads and key heads over different mesh axes,
            or the sequence of fewer queries than keys.
          KernelError: arguments that the kernel does not support.
        """
        over = self._over(q.shape[1] == k.shape[1])

        def local(q: Array, k: Array, v: Array, segment_ids: Any, positions: Any) -> Array:
            if over:  # k and v are whole; a pair is of this device's queries and of all keys
                if positions is None:
                    columns = lax.axis_index(over) * q.shape[1] + jnp.arange(q.shape[1], dtype=jnp.int32)
                    positions = jnp.broadcast_to(columns, q.shape[:2])
                segment_ids, positions = (
                    x if x is None else (x, lax.all_gather(x, over, axis=1, tiled=True))
                    for x in (segment_ids, positions)
                )
            out: Array = flash_attention(
                q,
                k,
                v,
                causal=causal,
                segment_ids=segment_ids,
                positions=positions,
                window=window,
                softcap=softcap,
                scale=scale,
                bias=-math.log(self.length),
                kind="sigmoid",
                deterministic=self.deterministic,
                implementation=self.implementation,
            )
            return out

        return over_devices(local, q, k, v, segment_ids, positions, keys="kv_seq", name="SigmoidAttention")

    def cached(
        self,
        cache: LayerCache,
        q: Float[Array, "b s h d"],
        k: Float[Array, "b s kv d"],
        v: Float[Array, "b s kv dv"],
        *,
        window: int | None = None,
        softcap: float | None = None,
        scale: float | None = None,
    ) -> Float[Array, "b s h dv"]:
        """See `CachedKernel`; each step reads the whole reserved length of its sequences, with plain products."""

        def run(q: Array, k: Array, v: Array, far: Array) -> Array:
            q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
            q = rearrange(q, "b n s (kv group) d -> b n s kv group d", kv=k.shape[3])
            with jax.default_matmul_precision("highest"):
                scores = jnp.einsum("bnskgd,bntkd->bnkgst", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
                if softcap is not None:
                    scores = softcap * jnp.tanh(scores / softcap)
                seen = (far >= 0) if window is None else (far >= 0) & (far < window)
                weights = jnp.where(seen[:, :, None, None], jax.nn.sigmoid(scores - math.log(self.length)), 0)
                return rearrange(jnp.einsum("bnkgst,bntkd->bnskgd", weights, v), "b n s kv g d -> b n s (kv g) d")

        return cache.mix_by(q, k, v, run).astype(q.dtype)

    def check(self, seq_len: int, heads: int, kv_heads: int) -> None:
        """See `jaxscale.nn.CheckedKernel`."""
        self._over(True)

    @staticmethod
    def _over(one_length: bool) -> tuple[str, ...]:
        """Return the mesh axes that shard the queries' sequence, after checking that nothing else is split."""
        refuse_split("SigmoidAttention", *(axis for axis in WHOLE if axis != "seq" or not one_length), softmax=False)
        return cut_over("seq")
