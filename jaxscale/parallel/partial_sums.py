"""Sums over devices after a product whose contracted dimension is sharded: as a star, or in chunks.

Without a sharded sequence, tensor parallelism sums each device's term after attention's output projection and after the
feed-forward's second product. The partitioner makes one all-reduce of each. `Layout.sums` replaces it there.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxscale.config import register
from jaxscale.errors import ConfigError, LayoutError
from jaxscale.layout import current
from jaxscale.layout.sums import Sums, Term
from jaxscale.parallel.arithmetic import Arithmetic
from jaxscale.parallel.sharded import cut_over, sharded_op
from jaxscale.parallel.weight import axes_of, input_gradient, kernel_gradient, seed_for, shape_of, used

Names = tuple[str, ...]
STAR = "star_sum"
"""The named scope of a star's permutes, by which the planner knows them."""


@register
@dataclasses.dataclass(frozen=True)
class StarSum:
    """All-reduce through one device: it receives all terms, adds them in float32, and sends the sum to all others.

    Two latencies in place of a ring's 2 (n - 1), and 2 (n - 1) payloads over the link of the device in the centre in
    place of 2 (n - 1) / n: for few devices on links of high latency (Li et al. 2024, TPI-LLM). Results are bitwise
    equal on all devices.
    """

    def __call__(self, term: Term, tokens: int, over: Names, dim: int) -> Float[Array, "b s e"]:
        """See `Sums`."""
        return star_sum(term(0, tokens), over)

    def seconds(self, devices: int, payload: float, latency: float, bandwidth: float) -> float:
        """Return the time of a sum; `ring_seconds` is that of an ordinary all-reduce.

        Args:
          devices: how many add their terms.
          payload: bytes of a term.
          latency: seconds of a message without bytes.
          bandwidth: bytes/s that a device sends, and at the same time receives.
        """
        return 2 * latency + 2 * (devices - 1) * payload / bandwidth if devices > 1 else 0.0


@register
@dataclasses.dataclass(frozen=True)
class ChunkedSum:
    """All-reduce in chunks of tokens, each of which can be sent while the next one's product is computed.

    The bytes are those of one all-reduce (Lin et al. 2024, FastAttention, after attention's output projection).

    Args:
      chunks: number of chunks; fewer where a device has fewer tokens.

    Raises:
      ConfigError: less than one chunk.
    """

    chunks: int = 4

    def __post_init__(self) -> None:
        if self.chunks < 1:
            raise ConfigError(f"ChunkedSum.chunks = {self.chunks}: must be at least 1")

    def __call__(self, term: Term, tokens: int, over: Names, dim: int) -> Float[Array, "b s e"]:
        """See `Sums`."""
        bounds = [tokens * i // self.chunks for i in range(self.chunks + 1)]
        sums: list[Array] = []
        for first, last in itertools.pairwise(bounds):
            if first < last:
                part = term(first, last)
                if sums:  # a sum begins after the one before, or compilers would merge them (as XLA's for CPUs does)
                    part, sums[-1] = lax.optimization_barrier((part, sums[-1]))
                sums.append(lax.psum(part, over))
        return jnp.concatenate(sums, dim)


def ring_seconds(devices: int, payload: float, latency: float, bandwidth: float) -> float:
    """Return the time of an all-reduce as a ring; arguments as for `StarSum.seconds`."""
    return 2 * (devices - 1) * (latency + payload / devices / bandwidth)


def star_sum(x: Float[Array, "..."], over: Names) -> Float[Array, "..."]:
    """Sum an array over mesh axes through their first device; for use inside `shard_map`.

    Args:
      x: this device's term.
      over: the mesh axes.

    Returns:
      the sum, in x's dtype, with the same bits on every device.
    """
    others = range(1, lax.axis_size(over))
    with jax.named_scope(STAR):
        total = x.astype(jnp.float32)
        for i in others:  # independent of each other; devices that receive nothing have zeros
            total = total + lax.ppermute(x, over, [(i, 0)]).astype(jnp.float32)
        total = total.astype(x.dtype)
        me = lax.axis_index(over)
        result = total
        for i in others:
            result = jnp.where(me == i, lax.ppermute(total, over, [(0, i)]), result)
        return result


def chosen_sums(axes: Names, shape: Sequence[int]) -> Sums | None:
    """Return the sums that the layout in force chooses for a product over some dimensions, or `None`.

    Args:
      axes: logical axes of the kernel, of which the last is not summed over.
      shape: the kernel's shape.

    Returns:
      `None` if it chooses none, or if one device has the whole product.

    Raises:
      LayoutError: the layout shards the sequence of the products' results further than their inputs'.
    """
    layout = current()
    if layout is None or layout.sums is None or not _over(axes, shape):
        return None
    if cut_over("residual_seq") != cut_over("seq"):
        raise LayoutError(
            f"Layout.sums = {layout.sums}: the layout's rules shard 'residual_seq' over {cut_over('residual_seq')} and "
            f"'seq' over {cut_over('seq') or 'nothing'}, so that products end in reduce-scatters; map both alike, or "
            "set sums to None"
        )
    return layout.sums


def summed_matmul(
    h: Float[Array, "b s ..."], kernel: Float[Array, "... e"], axes: Names, arithmetic: Arithmetic, sums: Sums
) -> Float[Array, "b s e"]:
    """Compute `h · kernel` and sum it over devices by `sums`; the gradients are those of the plain product.

    Args:
      h: logical axes ("batch", "seq", then all but the last of `axes`).
      kernel: a parameter, whose dimensions are contracted, except the last.
      axes: its logical axes.
      arithmetic: the numbers of the product and its gradients, and the dtype of the result and of what is sent.
      sums: from `chosen_sums`.
    """
    return _summed_matmul(h, kernel, seed_for(h, arithmetic), axes, arithmetic, sums)


def _over(axes: Names, shape: Sequence[int]) -> Names:
    return tuple(dict.fromkeys(m for a, n in zip(axes[:-1], shape, strict=False) for m in cut_over(a, size=n)))


@partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def _summed_matmul(h, kernel, seed, axes, arithmetic, sums):  # type: ignore[no-untyped-def]
    numbers, contracted = arithmetic.forward, tuple(range(kernel.ndim - 1))
    over, dtype = _over(axes, kernel.shape), arithmetic.out_dtype
    left = numbers.left(h, tuple(range(2, h.ndim)))
    right = used(numbers.right(kernel, contracted), kernel.shape, axes)
    arrays, structure = jax.tree.flatten((left, right))
    into = ("batch", "seq", *axes[:-1])
    names = [axes_of(a, h.shape, into) for a in jax.tree.leaves(left)]
    names += [axes_of(a, kernel.shape, axes) for a in jax.tree.leaves(right)]

    def local(*here):  # type: ignore[no-untyped-def]
        x, w = jax.tree.unflatten(structure, here)
        batch, seq = shape_of(x)[:2]
        dim = 1 if seq >= batch else 0  # decoding has one position of many sequences

        def some(a: Array, first: int, last: int) -> Array:
            return a if a.shape[dim] == 1 else lax.slice_in_dim(a, first, last, axis=dim)

        def term(first: int, last: int) -> Array:
            rows = jax.tree.map(lambda a: some(a, first, last), x)
            return numbers.dot(rows, w, ((tuple(range(2, h.ndim)), contracted), ((), ())), dtype)

        return sums(term, max(batch, seq), over, dim)

    return sharded_op(
        local, *arrays, axes=names, out_axes=("batch", "residual_seq", "embed"), name="a product's operand"
    )


def _forward(h, kernel, seed, axes, arithmetic, sums):  # type: ignore[no-untyped-def]
    return _summed_matmul(h, kernel, seed, axes, arithmetic, sums), (h, kernel, seed)


def _backward(axes, arithmetic, sums, residuals, dy):  # type: ignore[no-untyped-def]
    h, kernel, seed = residuals
    arithmetic, contracted = arithmetic.seeded(seed), tuple(range(kernel.ndim - 1))
    dh = input_gradient(h, kernel, dy, axes, contracted, arithmetic)
    return dh, kernel_gradient(h, dy, axes, contracted, arithmetic, kernel.dtype), None


_summed_matmul.defvjp(_forward, _backward)
