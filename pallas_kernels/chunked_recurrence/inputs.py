"""What a recurrence is made of, and the checks of it."""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.errors import KernelError

CHUNK = 64
"""Tokens in a chunk of XLA's form, by default."""
BLOCK = 16
"""Chunks are a multiple of it; with decay by channels, rows of a chunk whose exponents are computed pair by pair."""
FAR = -1e9
"""An exponent of nothing: its exponential, and that one's derivative, are exactly zero."""
PRODUCTS = ("float32", "bfloat16")
"""Dtypes of products' operands; sums are float32."""
LEAST = -20.0
"""The strongest decay's logarithm: e^-20 of a state is nothing beside it in float32, and sums of stronger ones would
lose the weaker ones.
"""


class Inputs(NamedTuple):
    """The arrays of a recurrence.

    Args:
      q: (B, S, H, K), like the next.
      k: keys.
      v: (B, S, H, V).
      log_decay: (B, S, H) or (B, S, H, K) float32 of `LEAST` to 0, or `None`.
      beta: (B, S, H), or `None`.
      starts: (B, S) bool, or `None`.
      initial: (B, H, K, V) float32, or `None`.
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    log_decay: jax.Array | None
    beta: jax.Array | None
    starts: jax.Array | None
    initial: jax.Array | None


@dataclasses.dataclass(frozen=True)
class Facts:
    """What is known of a recurrence while tracing.

    Args:
      batch: rows.
      seq: tokens of a row.
      heads: number of heads.
      key: width of a key.
      value: width of a value.
      dtype: of the products' operands, or another dtype that q, k and v have and no kernel takes.
      decay: "none", "heads" or "channels".
      delta: whether it is the delta rule's.
      chunk: tokens in a chunk, or `None` for the implementation's own.
    """

    batch: int
    seq: int
    heads: int
    key: int
    value: int
    dtype: str
    decay: str
    delta: bool
    chunk: int | None

    def size(self, chunk: int) -> int:
        """Return the tokens of a chunk: a multiple of `BLOCK`, or a power of two below that.

        Args:
          chunk: tokens wanted.
        """
        size = min(chunk, 1 << max(0, self.seq - 1).bit_length())
        return 1 << (size - 1).bit_length() if size < BLOCK else BLOCK * math.ceil(size / BLOCK)


def checked(inputs: Inputs, chunk: int | None, product_dtype: str | None = None) -> Facts:
    """Return the facts of a recurrence.

    Args:
      inputs: the arrays.
      chunk: tokens in a chunk, or `None`.
      product_dtype: one of `PRODUCTS`, or `None` for the widest dtype of q, k and v.

    Raises:
      KernelError: shapes or dtypes do not fit.
    """
    q, k, v, log_decay, beta, starts, initial = inputs
    if q.ndim != 4 or k.shape != q.shape:
        raise KernelError(f"q and k are (B, S, H, K), both alike, not {tuple(q.shape)} and {tuple(k.shape)}")
    b, s, h, key = q.shape
    if v.ndim != 4 or v.shape[:3] != q.shape[:3]:
        raise KernelError(f"v is ({b}, {s}, {h}, V) beside q {tuple(q.shape)}, not {tuple(v.shape)}")
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise KernelError(f"{name} is a float array, not {x.dtype}; cast it first")
    if log_decay is not None and log_decay.shape not in ((b, s, h), (b, s, h, 1), q.shape):
        raise KernelError(f"log_decay is ({b}, {s}, {h}) or ({b}, {s}, {h}, {key}), not {tuple(log_decay.shape)}")
    if beta is not None and beta.shape != (b, s, h):
        raise KernelError(f"beta is ({b}, {s}, {h}), not {tuple(beta.shape)}")
    if starts is not None and (starts.shape != (b, s) or starts.dtype != bool):
        raise KernelError(f"starts is bool ({b}, {s}), not {starts.dtype}{tuple(starts.shape)}")
    if initial is not None and initial.shape != (b, h, key, v.shape[3]):
        raise KernelError(f"initial is ({b}, {h}, {key}, {v.shape[3]}), not {tuple(initial.shape)}")
    if chunk is not None and (not isinstance(chunk, int) or isinstance(chunk, bool) or chunk < 1):
        raise KernelError(f"a chunk has at least 1 token, a whole number, not {chunk!r}")
    if product_dtype not in (None, *PRODUCTS):
        raise KernelError(f"product_dtype is None or one of {', '.join(PRODUCTS)}, not {product_dtype!r}")
    decay = "none" if log_decay is None else "channels" if log_decay.shape == q.shape and key > 1 else "heads"
    dtype = product_dtype or str(jnp.result_type(q, k, v))
    return Facts(b, s, h, key, v.shape[3], dtype, decay, beta is not None, chunk)
