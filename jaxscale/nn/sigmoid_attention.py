"""Sigmoid attention as an attention kernel of a model: `Transformer.attention = @SigmoidAttention()`."""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar

from jaxtyping import Array, Float, Int

from jaxscale.config import register
from jaxscale.errors import ConfigError
from jaxscale.nn.flash import WHOLE, over_devices, refuse_split
from pallas_kernels.flash_attention import flash_attention


@register
@dataclasses.dataclass(frozen=True)
class SigmoidAttention:
    """Attention whose weights are `sigmoid(score - log n)`, each on its own (Ramapuram et al. 2024).

    `n` is a constant and not the number of keys in a row, so that a document has the same output alone, in a packed row
    and while it is generated.

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
          LayoutError: the layout shards the sequence or `head_dim`, or heads and key heads over different mesh axes.
          KernelError: arguments that the kernel does not support.
        """
        refuse_split("SigmoidAttention", *WHOLE, softmax=False)

        def local(q: Array, k: Array, v: Array, segment_ids: Array | None, positions: Array | None) -> Array:
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

    def check(self, seq_len: int, heads: int, kv_heads: int) -> None:
        """See `jaxscale.nn.CheckedKernel`."""
        refuse_split("SigmoidAttention", *WHOLE, softmax=False)
