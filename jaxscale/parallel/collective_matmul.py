"""Matrix products that overlap with the collectives beside them: rings of permutes, a piece multiplied as it arrives.

Where the residual stream is split along its sequence over `tensor` (Korthikanti et al. 2022), a product into the
hidden width follows an all-gather and one out of it precedes a reduce-scatter. Cut into the devices' pieces, each
permute runs beside the product of another piece (Wang et al. 2023, "Overlap communication with dependent
computation"; Pati et al. 2024, T3, do it in hardware). The same bytes are sent.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxscale.errors import LayoutError
from jaxscale.layout import constrain, current, in_use
from jaxscale.parallel.reductions import sum_to
from jaxscale.parallel.sharded import cut_over, sharded_op, where_gradients_go

Names = tuple[str, ...]


def why_no_overlap(*hidden: str) -> str | None:
    """Why no ring can stand between a residual stream and dimensions of these names here; `None` where one can.

    Without a layout, or where `tensor` has one device, there is nothing to send and the answer is "".
    """
    layout = current()
    if layout is None or not any(cut_over(axis) for axis in hidden):
        return ""
    seq, residual = cut_over("seq"), cut_over("residual_seq")
    ring = residual[len(seq) :]
    if residual[: len(seq)] != seq or not ring:
        return (
            f"the layout {layout} does not split the residual stream's sequence over tensor, so there is no "
            "all-gather to overlap; use Layout(..., sequence_sharded=True), or no overlap"
        )
    for axis in hidden:
        if cut_over(axis) != ring:
            return (
                f"the layout {layout} splits '{axis}' over {cut_over(axis) or 'nothing'} and the residual stream's "
                f"sequence over {ring}; overlap needs both over the same mesh axes"
            )
    return None


def gather_matmul(
    x: Float[Array, "b s e"], kernels: tuple[Float[Array, "e ..."], ...], axes: tuple[Names, ...], dtype: Any
) -> tuple[Float[Array, "b s ..."], ...]:
    """`x · kernel` for each kernel, x's sequence gathered along a ring while its pieces are multiplied.

    One ring serves all kernels. Backwards x circulates again, for the kernels' gradients, beside the ring that sums its
    own (a reduce-scatter).

    Args:
      x: named ("batch", "residual_seq", "embed").
      kernels: parameters; each one's first dimension is contracted.
      axes: the logical axes of each.
      dtype: of the products; sums between devices are taken in it.

    Returns:
      for each kernel ("batch", "seq", *the rest of its names).

    Raises:
      LayoutError: the layout in force has no such ring; says what it would need.
    """
    return _gather_matmul(x, kernels, _ring_of(axes, kernels), dtype)


def matmul_scatter(
    h: Float[Array, "b s ..."], kernel: Float[Array, "... e"], axes: Names, dtype: Any
) -> Float[Array, "b s e"]:
    """`h · kernel`, summed along a ring that leaves each device its piece of the sequence.

    Args:
      h: named ("batch", "seq", *all but the last of `axes`).
      kernel: a parameter; all but its last dimension are contracted.
      axes: its logical axes.
      dtype: as for `gather_matmul`.

    Returns:
      named ("batch", "residual_seq", "embed").

    Raises:
      LayoutError: as `gather_matmul`.
    """
    return _matmul_scatter(h, kernel, _ring_of((axes,), (kernel,)), dtype)


@dataclasses.dataclass(frozen=True)
class _Ring:
    """The mesh axes of a ring, and the kernels' names."""

    over: Names
    axes: tuple[Names, ...]

    def wrap(self, fn: Any, *arrays: Array, ins: tuple[Names, ...], outs: tuple[Names, ...], grads: int = 0) -> Any:
        """`sharded_op`, the last `grads` outputs being kernels' gradients, summed over all devices' tokens."""
        tokens = cut_over("batch", "seq")
        where = [where_gradients_go(names, tokens) for names in outs[len(outs) - grads :]]
        kinds = ["activations"] * (len(outs) - grads) + ["grads" if w else "activations" for w in where]

        def local(*local_arrays: Array) -> tuple[Array, ...]:
            out = list(fn(*local_arrays))
            for i, split in enumerate(where, len(outs) - grads):
                out[i] = sum_to(out[i], tokens, split, dim=outs[i].index("embed"))
            return tuple(out)

        return sharded_op(local, *arrays, axes=ins, out_axes=outs, out_kinds=tuple(kinds), name="a product's operand")


def _ring_of(axes: tuple[Names, ...], kernels: tuple[Array, ...]) -> _Ring:
    sizes = {a: n for names, k in zip(axes, kernels, strict=True) for a, n in zip(names, k.shape, strict=True)}
    hidden = sorted(sizes.keys() - {"embed", "head_dim"})
    why = why_no_overlap(*hidden)
    if why is not None:
        raise LayoutError(f"overlapped products: {why or 'no device to overlap with; use the plain ones'}")
    for axis in hidden:
        if cut_over(axis, size=sizes[axis]) != cut_over(axis):
            raise LayoutError(
                f"overlapped products: every device holds all {sizes[axis]} of '{axis}', which {current()} does not "
                "divide, so that there is no ring; take 'attention' out of Transformer.overlap"
            )
    return _Ring(cut_over(hidden[0]), axes)


def _dot(x: Array, y: Array, dims: Any, dtype: Any) -> Array:
    return lax.dot_general(x, y, (dims, ((), ())), preferred_element_type=dtype)


def _around(over: Names) -> list[tuple[int, int]]:
    n = lax.axis_size(over)
    return [(i, (i + 1) % n) for i in range(n)]


def _pieces_in_turn(x: Array, over: Names, visit: Any) -> None:
    """`visit(piece, whose)` for every device's piece; the next one is under way meanwhile."""
    n, me = lax.axis_size(over), lax.axis_index(over)
    for step in range(n):
        coming = lax.ppermute(x, over, _around(over)) if step + 1 < n else x
        visit(x, (me - step) % n)
        x = coming


def _summed_in_turn(over: Names, term: Any, dtype: Any) -> Array:
    """The sum over devices of `term(piece)`, each device left with its own piece."""
    n, me = lax.axis_size(over), lax.axis_index(over)
    total = None
    for step in range(n):
        # this device adds to the sum that comes to rest n - 1 - step devices further on
        part = term((me - 1 - step) % n)
        if total is None:
            total = part
        else:
            sent = lax.ppermute(total, over, _around(over))
            total = (sent.astype(jnp.float32) + part.astype(jnp.float32)).astype(dtype)
    assert total is not None
    return total


def _take(x: Array, at: Array, n: int) -> Array:
    size = x.shape[1] // n
    return lax.dynamic_slice_in_dim(x, at * size, size, 1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _gather_matmul(x: Array, kernels: tuple[Array, ...], ring: _Ring, dtype: Any) -> tuple[Array, ...]:
    return _gather_matmul_fwd(x, kernels, ring, dtype)[0]


def _gather_matmul_fwd(x, kernels, ring, dtype):  # type: ignore[no-untyped-def]
    def local(x, *weights):  # type: ignore[no-untyped-def]
        n = lax.axis_size(ring.over)
        out = [jnp.zeros((x.shape[0], n * x.shape[1], *w.shape[1:]), dtype) for w in weights]

        def multiply(piece: Array, whose: Array) -> None:
            for i, w in enumerate(weights):
                part = _dot(piece, w, ((2,), (0,)), dtype)
                out[i] = lax.dynamic_update_slice_in_dim(out[i], part, whose * x.shape[1], 1)

        _pieces_in_turn(x, ring.over, multiply)
        return out

    outs = tuple(_hidden(names[1:]) for names in ring.axes)
    weights = _in_use(kernels, ring, dtype)
    return ring.wrap(local, x.astype(dtype), *weights, ins=(_STREAM, *ring.axes), outs=outs), (x, kernels)


def _gather_matmul_bwd(ring, dtype, kept, dys):  # type: ignore[no-untyped-def]
    x, kernels = kept

    def local(x, *rest):  # type: ignore[no-untyped-def]
        weights, dys = rest[: len(kernels)], rest[len(kernels) :]
        n = lax.axis_size(ring.over)
        dws = [jnp.zeros(w.shape, jnp.float32) for w in weights]

        def correlate(piece: Array, whose: Array) -> None:
            for i, dy in enumerate(dys):
                dws[i] = dws[i] + _dot(piece, _take(dy, whose, n), ((0, 1), (0, 1)), jnp.float32)

        def term(at: Array) -> Array:
            out: Any = 0.0
            for w, dy in zip(weights, dys, strict=True):
                dims = tuple(range(2, dy.ndim)), tuple(range(1, w.ndim))
                out = out + _dot(_take(dy, at, n), w, dims, jnp.float32)
            return out.astype(dtype)

        _pieces_in_turn(x, ring.over, correlate)
        return _summed_in_turn(ring.over, term, dtype), *dws

    ins = (_STREAM, *ring.axes, *(_hidden(names[1:]) for names in ring.axes))
    given = (x.astype(dtype), *_in_use(kernels, ring, dtype), *(d.astype(dtype) for d in dys))
    dx, *dws = ring.wrap(local, *given, ins=ins, outs=(_STREAM, *ring.axes), grads=len(kernels))
    return dx.astype(x.dtype), tuple(_as_gradient(d, k, a) for d, k, a in zip(dws, kernels, ring.axes, strict=True))


_gather_matmul.defvjp(_gather_matmul_fwd, _gather_matmul_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _matmul_scatter(h: Array, kernel: Array, ring: _Ring, dtype: Any) -> Array:
    return _matmul_scatter_fwd(h, kernel, ring, dtype)[0]


def _matmul_scatter_fwd(h, kernel, ring, dtype):  # type: ignore[no-untyped-def]
    (names,) = ring.axes

    def local(h, w):  # type: ignore[no-untyped-def]
        dims = tuple(range(2, h.ndim)), tuple(range(w.ndim - 1))
        n = lax.axis_size(ring.over)
        return [_summed_in_turn(ring.over, lambda at: _dot(_take(h, at, n), w, dims, dtype), dtype)]

    ins = (_hidden(names[:-1]), names)
    (y,) = ring.wrap(local, h.astype(dtype), *_in_use((kernel,), ring, dtype), ins=ins, outs=(_STREAM,))
    return y, (h, kernel)


def _matmul_scatter_bwd(ring, dtype, kept, dy):  # type: ignore[no-untyped-def]
    (h, kernel), (names,) = kept, ring.axes

    def local(h, w, dy):  # type: ignore[no-untyped-def]
        n = lax.axis_size(ring.over)
        dh, dw = jnp.zeros(h.shape, dtype), jnp.zeros(w.shape, jnp.float32)

        def multiply(piece: Array, whose: Array) -> None:
            nonlocal dh, dw
            part = _dot(piece, w, ((2,), (w.ndim - 1,)), dtype)
            dh = lax.dynamic_update_slice_in_dim(dh, part, whose * piece.shape[1], 1)
            dw = dw + _dot(_take(h, whose, n), piece, ((0, 1), (0, 1)), jnp.float32)

        _pieces_in_turn(dy, ring.over, multiply)
        return dh, dw

    ins = (_hidden(names[:-1]), names, _STREAM)
    given = (h.astype(dtype), *_in_use((kernel,), ring, dtype), dy.astype(dtype))
    dh, dw = ring.wrap(local, *given, ins=ins, outs=(_hidden(names[:-1]), names), grads=1)
    return dh.astype(h.dtype), _as_gradient(dw, kernel, names)


_matmul_scatter.defvjp(_matmul_scatter_fwd, _matmul_scatter_bwd)

_STREAM = ("batch", "residual_seq", "embed")


def _hidden(names: Names) -> Names:
    return ("batch", "seq", *names)


def _in_use(kernels: tuple[Array, ...], ring: _Ring, dtype: Any) -> list[Array]:
    return [in_use(k, names, dtype) for k, names in zip(kernels, ring.axes, strict=True)]


def _as_gradient(dw: Array, kernel: Array, names: Names) -> Array:
    return constrain(dw.astype(kernel.dtype), *names, kind="grads")
