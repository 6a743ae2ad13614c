"""Tokens to their experts and back: dispatch by all-to-all over mesh axes, products grouped by expert between."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from jaxscale.errors import LayoutError
from jaxscale.layout import constrain, current
from jaxscale.layout.rules import Kind
from jaxscale.parallel.sharded import cut_over, free_and_manual

TOKENS = ("expert_batch", "expert_seq", "embed")
"""Names of the activations that experts are given and give."""

UP = ("experts", "expert_embed", "expert_mlp")
DOWN = ("experts", "expert_mlp", "expert_embed")
"""Names of the experts' weights."""


class Choices(NamedTuple):
    """Each token's experts (`ids`, int32) and what their answers are multiplied by (`weights`, float32).

    The id that is the number of experts is none of them.
    """

    ids: Int[Array, "b s k"]
    weights: Float[Array, "b s k"]


class Slots(NamedTuple):
    """Each expert's tokens, group by group: their places in the group, int32 (its size for an empty slot), and weights.

    A row of S tokens has `n` groups of S / n in a row.
    """

    token: Int[Array, "b n x c"]
    weight: Float[Array, "b n x c"]


class Weights(NamedTuple):
    """The experts' matrices as the model keeps them; `gate` is `None` without one."""

    gate: Float[Array, "x e f"] | None
    up: Float[Array, "x e f"]
    down: Float[Array, "x f e"]


@dataclasses.dataclass(frozen=True)
class Capacity:
    """How many tokens an expert takes of each group of consecutive tokens of a row.

    Args:
      slots: of an expert, for one group.
      group: tokens of a group; divides the row.
    """

    slots: int
    group: int


def expert_mlp(
    x: Float[Array, "b s e"],
    routed: Choices | Slots,
    weights: Weights,
    *,
    act: Callable[[Array], Array],
    dtype: Any,
    capacity: Capacity | None = None,
) -> Float[Array, "b s e"]:
    """Sum over each token's experts of `weight * down(act(gate(x)) * up(x))`, `down(act(up(x)))` without a gate.

    Under a layout every device sends each of its tokens to the devices that hold its experts, along those mesh axes of
    'experts' that cut tokens too; along the others every device has the same tokens, takes what is its own, and the
    answers are summed, as they are over the axes of 'expert_mlp'. Weights cut along 'expert_embed' (FSDP) are cast
    first and gathered second, and their gradients leave the products in the parameters' type and are reduce-scattered.

    Choices without a capacity are dropless (Gale et al. 2023): tokens sorted by expert, products over ragged groups.
    What devices exchange then has no fixed size: a TPU sends what there is (`ragged_all_to_all`); other platforms pad
    to the worst case, see `wire_rows`. With a capacity, an expert takes of each group as many tokens as it has slots,
    every token's first choices before any second ones, earlier tokens first (Lepikhin et al. 2021), and the rest of
    its weight is lost; the exchange is an ordinary all-to-all of the slots.

    Args:
      x: activations.
      routed: which token goes where.
      weights: float32 or bfloat16, named `UP` and `DOWN`.
      act: between the products.
      dtype: of the products' inputs and of what devices exchange.
      capacity: of `Choices`; `None` drops nothing. `Slots` are dispatched as they are.

    Returns:
      of x's shape, in `dtype`.

    Raises:
      LayoutError: a dimension that does not divide, or a group that the layout would cut.
    """
    if isinstance(routed, Slots):
        capacity = Capacity(routed.token.shape[3], x.shape[1] // routed.token.shape[1])
    x = x.astype(dtype)
    layout, (free, manual) = current(), free_and_manual()
    if layout is None or not free:
        return _local(x, routed, weights, weights, _How(act, dtype, capacity))
    how = _how(act, dtype, capacity)
    if not manual:
        _check(x, weights, capacity)
    x = constrain(x, *TOKENS)
    # A copy for every device that works at the same tokens, so that what sums over them, both ways, is the
    # partitioner's, which reduces straight to where the result goes.
    copies = math.prod(layout.sizes[m] for m in how.summed)
    spec = lambda *cuts: PartitionSpec(*(c or None for c in cuts))  # noqa: E731
    batch, seq = cut_over("expert_batch"), cut_over("expert_seq")
    tokens = spec(how.summed, batch, seq, ())
    route = spec(batch, seq, (), ())

    def kernels(embed: tuple[str, ...]) -> Any:
        up = spec(how.experts, embed, cut_over("expert_mlp"))
        down = spec(how.experts, cut_over("expert_mlp"), embed)
        return Weights(None if weights.gate is None else up, up, down)  # type: ignore[arg-type]  # of the same tree

    # Where gradients go: of these arrays only the derivative counts, of the weights only the values.
    taps = weights
    if how.scattered != how.gathered:
        names = zip(weights, (UP, UP, DOWN), strict=True)
        taps = Weights._make(w if w is None else constrain(w, *axes, kind="grads") for w, axes in names)
    weights = jax.tree.map(lax.stop_gradient, weights)
    stack = lax.with_sharding_constraint(jnp.broadcast_to(x, (copies, *x.shape)), tokens)
    y = jax.shard_map(
        lambda x, routed, weights, taps: _local(x[0], routed, weights, taps, how)[None],
        in_specs=(
            tokens,
            jax.tree.map(lambda r: PartitionSpec(*route[: r.ndim]), routed),
            kernels(how.gathered),
            kernels(how.scattered),
        ),
        out_specs=tokens,
        axis_names=free if manual else set(),
        check_vma=False,  # the summed copies differ
    )(stack, routed, weights, taps)
    # in y's own type, and with a constant to start from, without which its derivative is taken slice by slice
    return constrain(lax.reduce(y, np.zeros([], y.dtype), lax.add, (0,)), *TOKENS)


def wire_rows(ids: Int[Any, "d n k"], experts: int) -> dict[str, int]:
    """Rows that cross from a device to another in one dropless exchange, of one of its two ways.

    Args:
      ids: the experts that the tokens of each of D devices chose; device d holds the d-th `experts / D` of them.
      experts: how many there are.

    Returns:
      "useful": rows that a token asked for, which is what a ragged exchange sends; "padded": rows that a fixed-size
      exchange sends, since a device may be asked for all rows of another.
    """
    devices, tokens, k = ids.shape
    here = experts // devices
    going = jnp.asarray(ids) // here != jnp.arange(devices)[:, None, None]
    return {"useful": int(jnp.sum(going)), "padded": devices * (devices - 1) * tokens * min(k, here)}


@dataclasses.dataclass(frozen=True)
class _How:
    """All that is known before tracing besides shapes: arithmetic, capacity, and mesh axes by their part in it.

    `experts` are all axes over which experts lie, `sent` those of them over which tokens travel; over `summed` answers
    are summed; over `gathered` weights are cut and made whole; over `scattered` their gradients are cut.
    """

    act: Callable[[Array], Array]
    dtype: Any
    capacity: Capacity | None
    experts: tuple[str, ...] = ()
    sent: tuple[str, ...] = ()
    summed: tuple[str, ...] = ()
    gathered: tuple[str, ...] = ()
    scattered: tuple[str, ...] = ()


def _how(act: Callable[[Array], Array], dtype: Any, capacity: Capacity | None) -> _How:
    experts, mlp = cut_over("experts"), cut_over("expert_mlp")
    tokens = cut_over("expert_batch", "expert_seq")

    def embed(kind: Kind) -> tuple[str, ...]:  # rules that move weights for their use anyway make them whole as well
        same = all(cut_over(a, kind=kind) == cut_over(a) for a in ("experts", "expert_mlp"))
        return cut_over("expert_embed", kind=kind) if same else ()

    sent = tuple(m for m in experts if m in tokens)
    summed = tuple(m for m in (*experts, *mlp) if m not in tokens)
    return _How(act, dtype, capacity, experts, sent, summed, embed("params"), embed("grads"))


def _check(x: Array, weights: Weights, capacity: Capacity | None) -> None:
    layout = current()
    assert layout is not None
    if over := cut_over("embed"):
        raise LayoutError(
            f"experts take whole vectors, and the layout {layout} splits the activations' 'embed' over "
            f"{' and '.join(over)}; take that rule out"
        )
    layout.spec(UP, weights.up.shape, kind="activations", name="the experts' weights")
    layout.spec(UP, weights.up.shape, kind="params", name="the experts' weights")
    names = (*TOKENS[:2], "expert_mlp")
    layout.spec(names, (*x.shape[:2], weights.up.shape[2]), kind="activations", name="the experts' hidden layer")
    if capacity is not None:
        check_groups(x.shape[1], capacity)


def check_groups(seq: int, capacity: Capacity, *, dropless: bool = False) -> None:
    """Raises `LayoutError` where the layout in force cuts a row of `seq` tokens inside of a group.

    Args:
      seq: tokens of a row.
      capacity: whose groups.
      dropless: whether the router can do without a capacity, which is then offered.
    """
    layout = current()
    if layout is None or free_and_manual()[1]:  # inside another shard_map a row is a device's own
        return
    pieces = layout.split("expert_seq")
    if seq % pieces == 0 and seq // pieces % capacity.group:
        fit = math.gcd(capacity.group, seq // pieces)
        raise LayoutError(
            f"the layout {layout} cuts rows of {seq} tokens into {pieces} pieces, and experts count their capacity in "
            f"groups of {capacity.group}; set MixtureOfExperts.group = {fit}"
            + (", or MixtureOfExperts.capacity = None" if dropless else "")
        )


def _local(x: Array, routed: Choices | Slots, weights: Weights, taps: Weights, how: _How) -> Array:
    """One device's part: its tokens, the experts it holds."""
    answers = functools.partial(_mlp, weights=weights, taps=taps, how=how)
    here = weights.up.shape[0]
    if how.capacity is None:
        assert isinstance(routed, Choices)
        return _dropless(x, routed, here, answers, how)
    if isinstance(routed, Choices):
        routed = fill(routed, here * _size(how.experts), how.capacity)
    return _in_slots(x, routed, answers, how)


# --- with slots -------------------------------------------------------------------------------------------------------


def fill(choices: Choices, experts: int, capacity: Capacity) -> Slots:
    """The slots that tokens get by their choices, in the order that `expert_mlp` says."""
    b, s, k = choices.ids.shape
    n, g, c = s // capacity.group, capacity.group, capacity.slots

    def one(ids: Array, weights: Array) -> tuple[Array, Array]:  # of one group, (g, k)
        wanted, weights = ids.T.reshape(-1), weights.T.reshape(-1)  # all first choices before any second
        turn = jnp.cumsum(jax.nn.one_hot(wanted, experts, dtype=jnp.int32), axis=0) - 1
        at = jnp.take_along_axis(turn, wanted[:, None], axis=1)[:, 0]
        slot = jnp.where((at < c) & (wanted < experts), wanted * c + at, experts * c)  # out of range: dropped
        of = jnp.full(experts * c, g * k, jnp.int32).at[slot].set(jnp.arange(g * k, dtype=jnp.int32), mode="drop")
        token = jnp.where(of < g * k, of % g, g)
        weight = jnp.take(weights, of, mode="fill", fill_value=0)
        return token.reshape(experts, c), weight.reshape(experts, c)

    flat = lambda a: a.reshape(b * n, g, k)  # noqa: E731
    token, weight = jax.vmap(one)(flat(choices.ids), flat(choices.weights))
    return Slots(token.reshape(b, n, experts, c), weight.reshape(b, n, experts, c))


def _in_slots(x: Array, slots: Slots, answers: Callable[..., Array], how: _How) -> Array:
    b, s, e = x.shape
    n, c = slots.token.shape[1], slots.token.shape[3]
    groups = x.reshape(b * n, s // n, e)
    token, weight = (_mine(a.reshape(b * n, -1, c), how) for a in slots)
    taken = jax.vmap(lambda rows, at: jnp.take(rows, at, axis=0, mode="fill", fill_value=0))(groups, token)
    there = lambda a: lax.all_to_all(a, how.sent, 1, 0, tiled=True) if how.sent else a  # noqa: E731
    out = answers(there(taken), there(weight)[..., None])
    out = lax.all_to_all(out, how.sent, 0, 1, tiled=True) if how.sent else out
    empty = jnp.zeros((s // n, e), jnp.float32)
    y = jax.vmap(lambda token, said: empty.at[token].add(said.astype(jnp.float32), mode="drop"))(token, out)
    return y.reshape(b, s, e).astype(x.dtype)


def _mine(a: Array, how: _How) -> Array:
    """Of arrays by expert (groups, x, slots), those experts that a copy of these tokens is sent to from here."""
    if how.sent == how.experts:
        return a
    shape = a.shape
    a = a.reshape(shape[0], *(_size((m,)) for m in how.experts), -1, shape[2])
    for dim in reversed(range(len(how.experts))):
        if how.experts[dim] not in how.sent:
            a = lax.dynamic_index_in_dim(a, lax.axis_index(how.experts[dim]), dim + 1, keepdims=False)
    return a.reshape(shape[0], -1, shape[2])


# --- without ----------------------------------------------------------------------------------------------------------


def _dropless(x: Array, choices: Choices, here: int, answers: Callable[..., Array], how: _How) -> Array:
    b, s, e = x.shape
    k = choices.ids.shape[2]
    n = b * s
    devices = _size(how.sent)
    place = _place(choices.ids.reshape(-1), here, how)  # an expert's number among those that rows are sent to
    order = jnp.argsort(place, stable=True)
    back = jnp.argsort(order)
    rows = jnp.broadcast_to(x.reshape(n, 1, e), (n, k, e)).reshape(n * k, e)
    rows, scale = _move(rows, order, back), _move(choices.weights.reshape(n * k, 1), order, back)
    counts = jnp.bincount(place, length=devices * here).reshape(devices, here)  # what goes nowhere is not counted
    if not how.sent:
        out = answers(rows, scale, counts[0])
    else:
        trip = _Trip(how.sent, devices, n * min(k, here), n * k, ragged=True)
        # a TPU stores a ragged exchange's numbers a row of 128 each, so padding costs less here
        beside = dataclasses.replace(trip, ragged=False)
        theirs = lax.all_to_all(counts, how.sent, 0, 0, tiled=True)
        here_and_there = counts.sum(1), theirs.sum(1)
        # every sender's rows come sorted; what all of them sent is sorted once more
        ends = jnp.cumsum(theirs, axis=1)
        of = jnp.sum(jnp.arange(trip.room)[None, :, None] >= ends[:, None, :], axis=-1).reshape(-1)
        again = jnp.argsort(of, stable=True)
        undo = jnp.argsort(again)
        rows = _move(_carry(rows, *here_and_there, trip, True), again, undo)
        scale = _move(_carry(scale, *here_and_there, beside, True), again, undo)
        out = answers(rows, scale, theirs.sum(0))
        out = _carry(_move(out, undo, again), *here_and_there, trip, False)
    said = _move(out, back, order).reshape(n, k, e).astype(jnp.float32)
    # a row that went nowhere has nothing to say, whatever stands in its place
    y = jnp.sum(jnp.where((place < devices * here).reshape(n, k, 1), said, 0.0), axis=1)
    return y.reshape(b, s, e).astype(x.dtype)


def _place(ids: Array, here: int, how: _How) -> Array:
    """Experts numbered as rows are sorted: by the device they are sent to, then as they lie there; others last."""
    left = _size(how.experts)
    place, mine = jnp.zeros_like(ids), ids < left * here
    for m in how.experts:
        left //= _size((m,))
        at = ids // (here * left) % _size((m,))
        if m in how.sent:
            place = place * _size((m,)) + at
        else:
            mine &= at == lax.axis_index(m)
    return jnp.where(mine, place * here + ids % here, _size(how.sent) * here)


@jax.custom_vjp
def _move(rows: Float[Array, "r e"], order: Int[Array, " r"], back: Int[Array, " r"]) -> Float[Array, "r e"]:
    """`rows[order]`, where `back` undoes `order`: written with its derivative, so that neither way scatters."""
    return jnp.take(rows, order, axis=0)


_move.defvjp(lambda rows, order, back: (_move(rows, order, back), back), lambda back, d: (d[back], None, None))


@dataclasses.dataclass(frozen=True)
class _Trip:
    """Rows between devices along `axes`: there are `rows` at home, and away `room` for those of each of `devices`."""

    axes: tuple[str, ...]
    devices: int
    room: int
    rows: int
    ragged: bool


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _carry(
    rows: Float[Array, "r e"], sent: Int[Array, " d"], received: Int[Array, " d"], trip: _Trip, there: bool
) -> Float[Array, "q e"]:
    """Rows to where they are worked on, or back; each is the other's derivative.

    At home they lie one destination after the other, `sent` to each; away, those that `received` from device d begin
    at `d * room`, and the rest is zero.
    """
    padded = functools.partial(_carry_padded, trip=trip, there=there)
    if not trip.ragged:
        return padded(rows, sent, received)
    return lax.platform_dependent(
        rows, sent, received, tpu=functools.partial(_carry_ragged, trip=trip, there=there), default=padded
    )


def _carry_bwd(trip: _Trip, there: bool, kept: Any, d: Array) -> tuple[Array, None, None]:
    return _carry(d, *kept, trip, not there), None, None


_carry.defvjp(lambda rows, s, r, trip, there: (_carry(rows, s, r, trip, there), (s, r)), _carry_bwd)


def _carry_padded(rows: Array, sent: Array, received: Array, *, trip: _Trip, there: bool) -> Array:
    """By an ordinary all-to-all of `room` rows for every device."""
    starts = jnp.cumsum(sent) - sent
    if there:
        at = starts[:, None] + jnp.arange(trip.room)
        at = jnp.where(jnp.arange(trip.room) < sent[:, None], at, trip.rows).reshape(-1)
        return lax.all_to_all(jnp.take(rows, at, axis=0, mode="fill", fill_value=0), trip.axes, 0, 0, tiled=True)
    rows = lax.all_to_all(rows, trip.axes, 0, 0, tiled=True)
    i = jnp.arange(trip.rows)
    of = jnp.sum(i[:, None] >= jnp.cumsum(sent), axis=-1)  # past the last one's: went nowhere
    at = of * trip.room + i - jnp.take(starts, of, mode="clip")
    return jnp.take(rows, jnp.where(of < trip.devices, at, len(rows)), axis=0, mode="fill", fill_value=0)


def _carry_ragged(rows: Array, sent: Array, received: Array, *, trip: _Trip, there: bool) -> Array:
    """By a ragged one, which sends rows that are there and no others."""
    home = (jnp.cumsum(sent) - sent).astype(jnp.int32)
    away = jnp.arange(trip.devices, dtype=jnp.int32) * trip.room
    sent, received = sent.astype(jnp.int32), received.astype(jnp.int32)
    if there:
        me = jnp.full(trip.devices, lax.axis_index(trip.axes) * trip.room, jnp.int32)
        begin, sizes, end, coming, size = home, sent, me, received, trip.devices * trip.room
    else:
        theirs = lax.all_to_all(home, trip.axes, 0, 0, tiled=True)
        begin, sizes, end, coming, size = away, received, theirs, sent, trip.rows
    empty = jnp.zeros((size, rows.shape[1]), rows.dtype)
    return lax.ragged_all_to_all(rows, empty, begin, sizes, end, coming, axis_name=trip.axes)


# --- products ---------------------------------------------------------------------------------------------------------


def _mlp(rows: Array, scale: Array, sizes: Array | None = None, *, weights: Weights, taps: Weights, how: _How) -> Array:
    """Every expert's answer to its rows, times `scale`, float32, of each.

    Rows are (groups, x, slots, e), or (rows, e) sorted by expert, `sizes` of each. They are scaled before the last
    product: after it, the derivative of `scale` would need the answers themselves, and so the product and the way back
    once more where activations are recomputed.
    """

    def product(rows: Array, kernel: Array, tap: Array, embed: int) -> Array:
        return _product(rows, kernel, tap, sizes, embed, how)

    up = checkpoint_name(product(rows, weights.up, taps.up, 1), "mlp_up")
    if weights.gate is None or taps.gate is None:
        h = how.act(up)
    else:
        h = how.act(checkpoint_name(product(rows, weights.gate, taps.gate, 1), "mlp_up")) * up
    return product((checkpoint_name(h, "mlp_hidden") * scale).astype(how.dtype), weights.down, taps.down, 2)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _product(rows: Array, kernel: Array, tap: Array, sizes: Array | None, embed: int, how: _How) -> Array:
    """Rows times their expert's matrix, for which `project` says why it is written with its derivative.

    Args:
      rows: (groups, x, slots, in), or (rows, in) sorted by expert.
      kernel: (x, in, out), its dimension `embed` cut over `how.gathered`.
      tap: gets the kernel's gradient, and is of its type; its dimension `embed` is cut over `how.scattered`.
      sizes: rows of each expert, int, or `None`.
      embed: 1 or 2.
      how: as said, and the type of the inputs.
    """
    return _product_fwd(rows, kernel, tap, sizes, embed, how)[0]


def _product_fwd(rows, kernel, tap, sizes, embed, how):  # type: ignore[no-untyped-def]
    return _grouped(rows.astype(how.dtype), _whole(kernel, embed, how), sizes), (rows, kernel, sizes)


def _product_bwd(embed, how, kept, dy):  # type: ignore[no-untyped-def]
    rows, kernel, sizes = kept
    dy = dy.astype(how.dtype)
    drows = _grouped(dy, jnp.swapaxes(_whole(kernel, embed, how), 1, 2), sizes).astype(rows.dtype)
    rows = rows.astype(how.dtype)
    if sizes is None:
        dkernel = jnp.einsum("nxci,nxco->xio", rows, dy, preferred_element_type=kernel.dtype)
    else:
        numbers = lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), [0], [])
        dkernel = lax.ragged_dot_general(rows, dy, sizes, numbers, preferred_element_type=kernel.dtype)
    if how.scattered:
        dkernel = lax.psum_scatter(dkernel, how.scattered, scatter_dimension=embed, tiled=True)
    return drows, None, dkernel, None


_product.defvjp(_product_fwd, _product_bwd)


def _whole(kernel: Array, embed: int, how: _How) -> Array:
    kernel = kernel.astype(how.dtype)
    return lax.all_gather(kernel, how.gathered, axis=embed, tiled=True) if how.gathered else kernel


def _grouped(rows: Array, matrices: Array, sizes: Array | None) -> Array:
    if sizes is None:
        return jnp.einsum("nxci,xio->nxco", rows, matrices)
    out = lax.ragged_dot(rows, matrices, sizes.astype(jnp.int32))
    # rows past the last expert's are nobody's; what a product leaves there is not promised, either way
    return jnp.where(jnp.arange(len(rows))[:, None] < jnp.sum(sizes), out, 0)


def _size(axes: tuple[str, ...]) -> int:
    return math.prod(lax.axis_size(m) for m in axes)
