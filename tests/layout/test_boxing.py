"""SBP signatures, tested against arrays that NumPy splits, sums and joins."""

from __future__ import annotations

import itertools

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jaxscale.errors import LayoutError
from jaxscale.layout import MESH_AXES, Boxes, infer, make_mesh, rebox
from jaxscale.parallel.boxing import reboxed
from jaxscale.plan.collectives import collectives, sent_by_axis
from tests.truth.errors import raises_saying

SIZES = {"data": 2, "tensor": 4}
SHAPE = (16, 24)
PLACES = list(itertools.product(range(2), range(4)))  # device indices along data and tensor


def signatures():
    """Every signature of a matrix over the two axes, with both orders of two axes on one dimension."""
    for kinds in itertools.product(("S0", "S1", "B", "P"), repeat=2):
        split = [[], []]
        for axis, kind in zip(SIZES, kinds, strict=True):
            if kind[0] == "S":
                split[int(kind[1])].append(axis)
        partial = frozenset(a for a, k in zip(SIZES, kinds, strict=True) if k == "P")
        yield Boxes(tuple(map(tuple, split)), partial)
        if kinds in (("S0", "S0"), ("S1", "S1")):
            yield Boxes(tuple(tuple(reversed(s)) for s in split), partial)


ALL = list(signatures())


def index(boxes, place, shape):
    """The slice of a global array that a device holds."""
    at = dict(zip(SIZES, place, strict=True))
    out = []
    for size, axes in zip(shape, boxes.split, strict=True):
        start, length = 0, size
        for a in axes:
            length //= SIZES[a]
            start += at[a] * length
        out.append(slice(start, start + length))
    return tuple(out)


def by_place(arrays):
    return np.stack(arrays).reshape(2, 4, *arrays[0].shape)


def pieces(x, boxes, rng):
    """The local arrays of `x`, (2, 4, ...); terms of a sum over the partial axes."""
    counts = [n if a in boxes.partial else 1 for a, n in SIZES.items()]
    terms = rng.standard_normal((*counts, *x.shape))
    terms[0, 0] += x - terms.sum((0, 1))
    terms = np.broadcast_to(terms, (2, 4, *x.shape))
    return by_place([terms[p][index(boxes, p, x.shape)] for p in PLACES])


def whole(local, boxes, shape):
    """Join local arrays to the global one, and check that replicated ones are equal."""
    total = np.zeros(shape)
    for at in itertools.product(*(range(n) if a in boxes.partial else (0,) for a, n in SIZES.items())):
        term = np.full(shape, np.nan)
        for place in PLACES:
            if any(a in boxes.partial and p != i for a, p, i in zip(SIZES, place, at, strict=True)):
                continue
            where = index(boxes, place, shape)
            seen = term[where]
            assert np.isnan(seen).all() or np.array_equal(seen, local[place])
            term[where] = local[place]
        total += term
    return total


def run(fn, *arrays):
    """Call `fn` on every device's local arrays; also return the compiled program."""
    mesh = make_mesh("data=2,tensor=4")
    spec = PartitionSpec("data", "tensor")
    local = lambda *xs: jax.tree.map(lambda y: y[None, None], fn(*(x[0, 0] for x in xs)))  # noqa: E731
    mapped = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))
    compiled = mapped.lower(*arrays).compile()
    return jax.tree.map(np.asarray, compiled(*arrays)), compiled


@pytest.mark.parametrize("before", ALL, ids=str)
def test_every_change_of_signature_keeps_the_tensor_and_sends_the_bytes_predicted(before):
    rng = np.random.default_rng(0)
    x = rng.standard_normal(SHAPE)
    local = pieces(x, before, rng).astype(np.float32)
    plans = [rebox(before, after, SHAPE, 4, SIZES) for after in ALL]
    got, compiled = run(lambda x: [reboxed(x, plan) for plan in plans], local)
    for after, y in zip(ALL, got, strict=True):
        np.testing.assert_allclose(whole(y, after, SHAPE), x, atol=1e-4, err_msg=f"{before} to {after}")
    predicted = {}
    for move in itertools.chain.from_iterable(plans):
        if move.sent:
            predicted[move.axis,] = predicted.get((move.axis,), 0) + move.sent
    # equal programs of two plans are compiled once
    shared = sum(m.sent for plan in _prefixes(plans) for m in plan)
    mesh_sizes = dict.fromkeys(MESH_AXES, 1) | SIZES
    counted = sent_by_axis(collectives(compiled, mesh_sizes))
    assert sum(counted.values()) == shared <= sum(predicted.values())


def _prefixes(plans):
    """Each distinct prefix of a plan once, by its last move."""
    seen = {}
    for plan in plans:
        for i in range(len(plan)):
            seen.setdefault(tuple(plan[: i + 1]), plan[i])
    return [[m] for m in seen.values()]


@pytest.mark.parametrize("equation", ["ij,jk->ik", "ij,ij->i"])
def test_an_einsum_of_pieces_has_the_signature_inferred(equation):
    rng = np.random.default_rng(1)
    a, b = rng.standard_normal((8, 8)), rng.standard_normal((8, 8))
    cases = []
    for x, y in itertools.product(ALL, ALL):
        try:
            cases.append((x, y, infer(equation, x, y)))
        except LayoutError:
            continue
    assert len(cases) > 20
    cases = cases[:: max(1, len(cases) // 40)]
    local = [(pieces(a, x, rng), pieces(b, y, rng)) for x, y, _ in cases]
    for (_, _, out), (x, y) in zip(cases, local, strict=True):
        got = by_place([np.einsum(equation, x[p], y[p]) for p in PLACES])
        want = np.einsum(equation, a, b)
        np.testing.assert_allclose(whole(got, out, want.shape), want, atol=1e-9)


def test_what_an_einsum_refuses_is_wrong_when_done_anyway():
    x, y = Boxes(((), ("data",))), Boxes(((), ("data",)))  # ij,jk: j split in one, k in the other
    with raises_saying(LayoutError, "'data' splits both 'j' and 'k'", "reshard"):
        infer("ij,jk->ik", x, y)
    with raises_saying(LayoutError, "splits 'j' in one operand and not in another", "slice"):
        infer("ij,jk->ik", x, Boxes(((), ())))
    with raises_saying(LayoutError, "not the sum of products", "all-reduce"):
        infer("ij,jk->ik", Boxes(((), ()), {"data"}), Boxes(((), ()), {"data"}))
    with raises_saying(LayoutError, "nest the mesh axes in one order"):
        infer("ij,ij->i", Boxes((("data", "tensor"), ())), Boxes((("tensor", "data"), ())))


def test_megatrons_pair_of_matrices_needs_one_sum():
    up = infer("be,ef->bf", Boxes((("data",), ())), Boxes(((), ("tensor",))))
    assert up == Boxes((("data",), ("tensor",)))
    down = infer("bf,fe->be", up, Boxes((("tensor",), ())))
    assert down.words(SIZES) == "data:S(0) tensor:P"
    (move,) = rebox(down, Boxes((("data",), ())), (16, 32), 2, SIZES)
    assert (move.kind, move.sent) == ("all-reduce", 2 * 3 * 16 * 32 * 2 // 2 // 4)


def test_bad_signatures_are_named():
    with raises_saying(LayoutError, "'tensr'", "did you mean 'tensor'"):
        Boxes((("tensr",), ()))
    with raises_saying(LayoutError, "'data' twice"):
        Boxes((("data",), ("data",)))
    with raises_saying(LayoutError, "10", "does not divide", "12"):
        rebox(Boxes((("tensor",), ())), Boxes(((), ())), (10, 3), 4, SIZES)
    with raises_saying(LayoutError, "'bs,se'", "output"):
        infer("bs,se", Boxes(((), ())), Boxes(((), ())))
