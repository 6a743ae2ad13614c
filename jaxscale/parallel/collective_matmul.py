"""Collective matmul: matrix products that overlap with an all-gather or reduce-scatter, as rings of permutes.

If the residual stream is sharded along its sequence over `tensor` (Korthikanti et al. 2022), a product into the hidden
width follows an all-gather, and a product out of it precedes a reduce-scatter. Here the product is computed shard by
shard, and each permute runs at the same time as the product of another shard (Wang et al. 2023, "Overlap communication
with dependent computation"; Pati et al. 2024, T3, do it in hardware). The same number of bytes is sent, or fewer:
operands travel in the numbers of the product, and sums in those of `Arithmetic.sums`, if it has any.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxscale.errors import LayoutError
from jaxscale.layout import constrain, current
from jaxscale.parallel.arithmetic import Arithmetic, Dims, Numbers, Operand
from jaxscale.parallel.reductions import sum_to
from jaxscale.parallel.seeds import mixed
from jaxscale.parallel.sharded import cut_over, sharded_op, where_gradients_go
from jaxscale.parallel.weight import axes_of, seed_for, shape_of, used

Names = tuple[str, ...]


def why_no_overlap(*hidden: str) -> str | None:
    """Return why products with these dimensions cannot overlap with collectives under the layout in force.

    Args:
      *hidden: logical axes of the hidden dimensions.

    Returns:
      `None` if they can; "" if there is nothing to overlap (no layout, `tensor` has one device, or the rules never
      shard sequences, as those of generation); else the reason.
    """
    layout = current()
    if layout is None or not any(cut_over(axis) for axis in hidden):
        return ""
    if not any(layout.resolved_rules.target("activations", axis) for axis in ("seq", "residual_seq")):
        return ""
    seq, residual = cut_over("seq"), cut_over("residual_seq")
    ring = residual[len(seq) :]
    if residual[: len(seq)] != seq or not ring:
        return (
            f"the layout {layout} does not shard the residual stream's sequence over tensor, so there is no "
            "all-gather to overlap; use Layout(..., sequence_sharded=True), or no overlap"
        )
    for axis in hidden:
        if cut_over(axis) != ring:
            return (
                f"the layout {layout} shards '{axis}' over {cut_over(axis) or 'nothing'} and the residual stream's "
                f"sequence over {ring}; overlap needs both over the same mesh axes"
            )
    return None


def gather_matmul(
    x: Float[Array, "b s e"],
    kernels: tuple[Float[Array, "e ..."], ...],
    axes: tuple[Names, ...],
    arithmetic: Arithmetic,
) -> tuple[Float[Array, "b s ..."], ...]:
    """Compute `x · kernel` for each kernel, while x's sequence is gathered around a ring.

    One ring serves all kernels. In the backward pass x is gathered again, for the kernels' gradients, at the same time
    as another ring sums x's own gradient (a reduce-scatter).

    Args:
      x: logical axes ("batch", "residual_seq", "embed").
      kernels: parameters, owner first dimension is contracted.
      axes: the logical axes of each kernel.
      arithmetic: the numbers of the products, in which x travels; its dtype is that of sums over devices.

    Returns:
      for each kernel an array with axes ("batch", "seq", then its axes without the first).

    Raises:
      LayoutError: the layout in force has no such ring; the message says what it needs.
    """
    return _gather_matmul(x, kernels, seed_for(x, arithmetic), _ring_of(axes, kernels), arithmetic)


def matmul_scatter(
    h: Float[Array, "b s ..."], kernel: Float[Array, "... e"], axes: Names, arithmetic: Arithmetic
) -> Float[Array, "b s e"]:
    """Compute `h · kernel`, summed around a ring that leaves each device its shard of the sequence.

    Args:
      h: logical axes ("batch", "seq", then all but the last of `axes`).
      kernel: a parameter, owner dimensions are contracted, except the last.
      axes: its logical axes.
      arithmetic: the numbers of the products; its dtype is that of sums over devices.

    Returns:
      logical axes ("batch", "residual_seq", "embed").

    Raises:
      LayoutError: the layout in force has no such ring; the message says what it needs.
    """
    return _matmul_scatter(h, kernel, seed_for(h, arithmetic), _ring_of((axes,), (kernel,)), arithmetic)


@dataclasses.dataclass(frozen=True)
class _Ring:
    """The mesh axes of a ring, and the kernels' logical axes."""

    over: Names
    axes: tuple[Names, ...]

    def wrap(
        self,
        fn: Callable[..., Iterable[Array]],
        *operands: Operand,
        ins: tuple[Names, ...],
        outs: tuple[Names, ...],
        grads: int = 0,
    ) -> tuple[Array, ...]:
        """Call `sharded_op`; the last `grads` outputs are kernels' gradients, summed over all devices' tokens."""
        tokens = cut_over("batch", "seq")
        splits = [where_gradients_go(names, tokens) for names in outs[len(outs) - grads :]]
        kinds = ["activations"] * (len(outs) - grads) + ["grads" if s else "activations" for s in splits]

        arrays, structure = jax.tree.flatten(operands)
        names = [
            axes_of(a, shape_of(operand), axes)
            for operand, axes in zip(operands, ins, strict=True)
            for a in jax.tree.leaves(operand)
        ]

        def local(*local_arrays: Array) -> tuple[Array, ...]:
            out = list(fn(*jax.tree.unflatten(structure, local_arrays)))
            for i, split in enumerate(splits, len(outs) - grads):
                out[i] = sum_to(out[i], tokens, split, dim=outs[i].index("embed"))
            return tuple(out)

        return sharded_op(local, *arrays, axes=names, out_axes=outs, out_kinds=tuple(kinds), name="a product's operand")


def _ring_of(axes: tuple[Names, ...], kernels: tuple[Array, ...]) -> _Ring:
    sizes = {a: n for names, k in zip(axes, kernels, strict=True) for a, n in zip(names, k.shape, strict=True)}
    hidden = sorted(sizes.keys() - {"embed", "head_dim"})
    why = why_no_overlap(*hidden)
    if why is not None:
        raise LayoutError(f"overlapped products: {why or 'nothing is sent that could overlap; use plain products'}")
    for axis in hidden:
        if cut_over(axis, size=sizes[axis]) != cut_over(axis):
            raise LayoutError(
                f"overlapped products: '{axis}' of {sizes[axis]} is replicated, because {current()} does not divide "
                "it, so that there is no ring; remove 'attention' from Transformer.overlap"
            )
    return _Ring(cut_over(hidden[0]), axes)


def _dims(left: Sequence[int], right: Sequence[int]) -> Dims:
    return (left, right), ((), ())


def _around(over: Names) -> list[tuple[int, int]]:
    n = lax.axis_size(over)
    return [(i, (i + 1) % n) for i in range(n)]


def _pieces_in_turn(x: Operand, over: Names, visit: Callable[[Operand, Array], None]) -> None:
    """Call `visit(piece, owner)` for every device's shard, while the next one is being sent."""
    n, me = lax.axis_size(over), lax.axis_index(over)
    for step in range(n):
        coming = jax.tree.map(lambda a: lax.ppermute(a, over, _around(over)), x) if step + 1 < n else x
        visit(x, (me - step) % n)
        x = coming


def _summed_in_turn(over: Names, term: Callable[[Array], Array], dtype: DTypeLike) -> Array:
    """Sum `term(i)` over devices for every shard i, and leave each device the sum for its own shard."""
    n, me = lax.axis_size(over), lax.axis_index(over)
    total = None
    for step in range(n):
        # this device adds its term to the sum of the device that is n - 1 - step places ahead
        part = term((me - 1 - step) % n)
        if total is None:
            total = part
        else:
            sent = lax.ppermute(total, over, _around(over))
            total = (sent.astype(jnp.float32) + part.astype(jnp.float32)).astype(dtype)
    assert total is not None
    return total


def _exchanged(over: Names, term: Callable[[Array], Array], numbers: Numbers, dtype: DTypeLike) -> Array:
    """Return what `_summed_in_turn` does, by an all-to-all of rounded terms, which each device adds in float32.

    A sum on its way around the ring would be rounded by every device. Here each term is rounded once, and a device's
    own is not. The permutes of the all-to-all run beside the products of later terms.
    """
    n, me = lax.axis_size(over), lax.axis_index(over)
    total = term(me)
    for step in range(1, n):
        part = numbers.left(term((me + step) % n), (2,))
        places = [(i, (i + step) % n) for i in range(n)]
        received = jax.tree.map(lambda a, to=places: lax.ppermute(a, over, to), part)
        total = total + received.dense(jnp.float32)
    return total.astype(dtype)


def _take(x: Operand, at: Array, n: int) -> Operand:
    """Return the `at`-th of n pieces of an operand along its sequence."""

    def one(a: Array) -> Array:
        if a.shape[1] == 1:  # shared by the whole sequence
            return a
        size = a.shape[1] // n
        return lax.dynamic_slice_in_dim(a, at * size, size, 1)

    return jax.tree.map(one, x)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _gather_matmul(
    x: Array, kernels: tuple[Array, ...], seed: Array | None, ring: _Ring, arithmetic: Arithmetic
) -> tuple[Array, ...]:
    return _gather_matmul_fwd(x, kernels, seed, ring, arithmetic)[0]


def _gather_matmul_fwd(x, kernels, seed, ring, arithmetic):  # type: ignore[no-untyped-def]
    numbers, dtype = arithmetic.forward, arithmetic.out_dtype

    def local(x, *weights):  # type: ignore[no-untyped-def]
        n, (b, s, _) = lax.axis_size(ring.over), shape_of(x)
        out = [jnp.zeros((b, n * s, *shape_of(w)[1:]), dtype) for w in weights]

        def multiply(piece: Operand, owner: Array) -> None:
            for i, w in enumerate(weights):
                part = numbers.dot(piece, w, _dims((2,), (0,)), dtype)
                out[i] = lax.dynamic_update_slice_in_dim(out[i], part, owner * s, 1)

        _pieces_in_turn(x, ring.over, multiply)
        return out

    outs = tuple(_hidden(names[1:]) for names in ring.axes)
    weights = [_used(numbers, k, (0,), names) for k, names in zip(kernels, ring.axes, strict=True)]
    return ring.wrap(local, numbers.left(x, (2,)), *weights, ins=(_STREAM, *ring.axes), outs=outs), (x, kernels, seed)


def _gather_matmul_bwd(ring, arithmetic, residuals, dys):  # type: ignore[no-untyped-def]
    x, kernels, seed = residuals
    to_x, to_kernel, wire = arithmetic.input_gradient, arithmetic.kernel_gradient, arithmetic.gradient_sums
    each = [arithmetic.seeded(None if seed is None else mixed(seed + jnp.uint32(i))) for i in range(len(kernels))]

    def local(x, *rest):  # type: ignore[no-untyped-def]
        weights, dys, others = rest[: len(kernels)], rest[len(kernels) : -len(kernels)], rest[-len(kernels) :]
        n = lax.axis_size(ring.over)
        dws = [jnp.zeros(shape_of(w), jnp.float32) for w in weights]

        def correlate(piece: Operand, owner: Array) -> None:
            for i, dy in enumerate(others):
                dws[i] = dws[i] + to_kernel.dot(piece, _take(dy, owner, n), _dims((0, 1), (0, 1)), jnp.float32)

        def term(at: Array) -> Array:
            out: Any = 0.0
            for w, dy in zip(weights, dys, strict=True):
                dims = _dims(range(2, len(shape_of(dy))), range(1, len(shape_of(w))))
                out = out + to_x.dot(_take(dy, at, n), w, dims, jnp.float32)
            return out if wire else out.astype(arithmetic.dtype)

        _pieces_in_turn(x, ring.over, correlate)
        if wire:
            return _exchanged(ring.over, term, wire, arithmetic.dtype), *dws
        return _summed_in_turn(ring.over, term, arithmetic.dtype), *dws

    hidden = tuple(_hidden(names[1:]) for names in ring.axes)
    weights = [_used(to_x, k, range(1, k.ndim), names) for k, names in zip(kernels, ring.axes, strict=True)]
    cotangents = [a.input_gradient.left(dy, range(2, dy.ndim)) for a, dy in zip(each, dys, strict=True)]
    others = [a.kernel_gradient.right(dy, (0, 1)) for a, dy in zip(each, dys, strict=True)]
    arguments = (to_kernel.left(x, (0, 1)), *weights, *cotangents, *others)
    ins = (_STREAM, *ring.axes, *hidden, *hidden)
    dx, *dws = ring.wrap(local, *arguments, ins=ins, outs=(_STREAM, *ring.axes), grads=len(kernels))
    gradients = tuple(_as_gradient(d, k, a) for d, k, a in zip(dws, kernels, ring.axes, strict=True))
    return dx.astype(x.dtype), gradients, None


_gather_matmul.defvjp(_gather_matmul_fwd, _gather_matmul_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _matmul_scatter(h: Array, kernel: Array, seed: Array | None, ring: _Ring, arithmetic: Arithmetic) -> Array:
    return _matmul_scatter_fwd(h, kernel, seed, ring, arithmetic)[0]


def _matmul_scatter_fwd(h, kernel, seed, ring, arithmetic):  # type: ignore[no-untyped-def]
    (names,), numbers, dtype = ring.axes, arithmetic.forward, arithmetic.out_dtype

    def local(h, w):  # type: ignore[no-untyped-def]
        dims, n = _dims(range(2, len(shape_of(h))), range(len(shape_of(w)) - 1)), lax.axis_size(ring.over)
        of_term = dtype if arithmetic.sums is None else jnp.float32

        def term(at: Array) -> Array:
            return numbers.dot(_take(h, at, n), w, dims, of_term)

        if arithmetic.sums is not None:
            return [_exchanged(ring.over, term, arithmetic.sums, dtype)]
        return [_summed_in_turn(ring.over, term, dtype)]

    summed = range(kernel.ndim - 1)
    arguments = numbers.left(h, range(2, h.ndim)), _used(numbers, kernel, summed, names)
    (y,) = ring.wrap(local, *arguments, ins=(_hidden(names[:-1]), names), outs=(_STREAM,))
    return y, (h, kernel, seed)


def _matmul_scatter_bwd(ring, arithmetic, residuals, dy):  # type: ignore[no-untyped-def]
    (h, kernel, seed), (names,), dtype = residuals, ring.axes, arithmetic.dtype
    arithmetic = arithmetic.seeded(seed)
    to_h, to_kernel = arithmetic.input_gradient, arithmetic.kernel_gradient

    # If only the product for dh rounds, dy travels once, as it is, and is rounded on arrival (but not at random, since
    # an element's random number is that of its place in the whole array).
    apart = to_kernel.rounds or to_h.random
    cut = (cut_over("batch"), cut_over("residual_seq"), ())

    def local(h, w, *travelling):  # type: ignore[no-untyped-def]
        n, s = lax.axis_size(ring.over), shape_of(travelling[0])[1]
        dh, dw = jnp.zeros((shape_of(h)[0], n * s, *shape_of(w)[:-1]), dtype), jnp.zeros(shape_of(w), jnp.float32)

        def multiply(pieces: tuple[Operand, ...], owner: Array) -> None:
            nonlocal dh, dw
            left, right = pieces[0] if apart else to_h.left(pieces[0], (2,), cut=cut), pieces[-1]
            part = to_h.dot(left, w, _dims((2,), (len(shape_of(w)) - 1,)), dtype)
            dh = lax.dynamic_update_slice_in_dim(dh, part, owner * s, 1)
            dw = dw + to_kernel.dot(_take(h, owner, n), right, _dims((0, 1), (0, 1)), jnp.float32)

        _pieces_in_turn(travelling, ring.over, multiply)
        return dh, dw

    travelling = (to_h.left(dy, (2,)), to_kernel.right(dy, (0, 1))) if apart else (to_kernel.right(dy, (0, 1)),)
    arguments = to_kernel.left(h, (0, 1)), _used(to_h, kernel, (kernel.ndim - 1,), names), *travelling
    ins = (_hidden(names[:-1]), names, *(_STREAM,) * len(travelling))
    dh, dw = ring.wrap(local, *arguments, ins=ins, outs=(_hidden(names[:-1]), names), grads=1)
    return dh.astype(h.dtype), _as_gradient(dw, kernel, names), None


_matmul_scatter.defvjp(_matmul_scatter_fwd, _matmul_scatter_bwd)

_STREAM = ("batch", "residual_seq", "embed")


def _hidden(names: Names) -> Names:
    return ("batch", "seq", *names)


def _used(numbers: Numbers, kernel: Array, summed: Sequence[int], names: Names) -> Operand:
    return used(numbers.right(kernel, summed), kernel.shape, names)


def _as_gradient(dw: Array, kernel: Array, names: Names) -> Array:
    return constrain(dw.astype(kernel.dtype), *names, kind="grads")
