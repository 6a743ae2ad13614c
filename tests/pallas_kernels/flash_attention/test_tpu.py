"""The TPU kernels: values and gradients interpreted with race detection, the list of tiles they walk, compiling."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import tiles
from pallas_kernels.aot import compile_kernel
from pallas_kernels.dispatch import KernelError, forget, interpreted, on_device
from pallas_kernels.flash_attention import (
    FULL,
    PARTIAL,
    SKIP,
    Blocks,
    Mask,
    Tokens,
    flash_attention,
    tile_table,
    tpu_forward,
    tpu_steps,
    tpu_walk,
)
from pallas_kernels.flash_attention.tpu_steps import Cut, pieces, step_counts, steps
from pallas_kernels.gate import TPUS, configurations
from tests.pallas_kernels.flash_attention.cases import FEATURES, covering, parameters
from tests.pallas_kernels.flash_attention.test_values import check
from tests.truth.long import short

CASES = covering(
    {n: FEATURES[n] for n in ("causal", "segments", "positions", "window", "softcap", "kind")}
    | {
        "dtype": ("float32", "bfloat16"),
        "lengths": ((33, 33), (17, 40)),
        "widths": ((8, 24),),
        "heads": ((2, 1), (4, 2)),
    }
)
UNITS = {"float32": 4.0, "bfloat16": 1.0}
"""The largest scores are about 8 here: half a unit in the last place of one is 4 units of the weight made from it."""
GATE = {name: (fn, shapes) for name, fn, shapes in configurations("flash_attention", "tpu")}
B, S, H, K, D = 2, 48, 2, 1, 16


@pytest.fixture
def small_tiles(monkeypatch):
    monkeypatch.setattr(tpu_forward, "PART", 8)  # of eight parts in a tile
    with tiles.trying("flash_attention", {"q": 16, "k": 32}):
        yield


def arrays(seed=0):
    random = np.random.default_rng(seed)
    return tuple(jnp.asarray(random.normal(size=shape), jnp.float32) for shape in ((B, S, H, D), *[(B, S, K, D)] * 2))


def close(got, want, tolerance=2e-5):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance), got, want)


@pytest.mark.parametrize("case", short(1, parameters(CASES)))
def test_values_and_gradients_are_as_exact_as_plain_ones(case, small_tiles, capsys):
    with interpreted(races=True):
        check(dict.fromkeys(FEATURES) | case, "mosaic_tpu", UNITS[case["dtype"]])
    assert "RACE" not in capsys.readouterr().out


@pytest.mark.parametrize(
    "options",
    short(1, [{"segments": True, "causal": True}, {"causal": True}, {"causal": True, "window": 20, "positions": True}]),
)
def test_a_list_too_long_for_smem_is_walked_in_pieces(options, small_tiles, monkeypatch, capsys):
    made = []

    def spy(*arguments):
        made.append(steps(*arguments))
        return made[-1]

    lists = B if "segments" in options or "positions" in options else 1
    monkeypatch.setattr(tpu_steps, "MOST_STEPS", 3 * lists)  # a tile of keys meets all three of queries
    monkeypatch.setattr(tpu_walk, "steps", spy)
    case = {"dtype": "float32", "kind": "softmax", "lengths": (48, 48), "widths": (8, 8), "heads": (1, 1)}
    with interpreted(races=True):
        check(dict.fromkeys(FEATURES) | case | options, "mosaic_tpu", UNITS["float32"])
    assert "RACE" not in capsys.readouterr().out
    assert len(made) == 3 and all(len(plan.own) > 1 for plan in made)


def test_a_table_of_blocks_decides_which_tiles_are_walked(small_tiles):
    blocks = Blocks.of(np.array([[1, 0], [0, 1], [0, 0]], bool), query=16, key=32)  # the last queries see nothing

    def value(implementation):
        f = lambda *a: flash_attention(*a, blocks=blocks, return_lse=True, implementation=implementation)  # noqa: E731
        y, pull = jax.vjp(f, *arrays())
        return y, pull(jax.tree.map(jnp.ones_like, y))

    with interpreted():
        value = jax.jit(value, static_argnums=0)
        close(value("mosaic_tpu"), value("dense"))


def test_an_invisible_tile_is_not_computed(small_tiles):
    q, k, v = arrays()
    ids = np.tile((np.arange(S) >= 32).astype(np.int32), (B, 1))  # a tile of keys of its own, and one of queries
    spoil = lambda x: x.at[:, 32:].set(jnp.nan)  # noqa: E731

    @jax.jit
    def value(q, k, v):
        f = lambda q: flash_attention(q, k, v, segment_ids=ids, implementation="mosaic_tpu")[:, :32]  # noqa: E731
        y, pull = jax.vjp(f, q)
        return y, pull(jnp.ones_like(y))[0][:, :32]

    with interpreted():
        close(value(q, spoil(k), spoil(v)), value(q, k, v))


@pytest.mark.long
def test_under_vmap_every_example_walks_its_own_tiles_and_empty_rows_stay_zero(small_tiles):
    ids = np.sort(np.random.default_rng(0).integers(1, 4, (B, S)), 1).astype(np.int32)
    of_q = np.where(np.arange(S) < 16, 9, ids).astype(np.int32)  # nobody has this id

    def grads(implementation):
        def one(q, k, v, of_q, ids):
            def f(*a):
                rest = {"segment_ids": (of_q[None], ids[None]), "implementation": implementation}
                return flash_attention(*(x[None] for x in a), causal=True, return_lse=True, **rest)

            y, pull = jax.vjp(f, q, k, v)
            # what a merge of two empty rows makes: NaN
            return y, pull((jnp.ones_like(y[0]), jnp.where(jnp.isneginf(y[1]), jnp.nan, 1.0)))

        return jax.vmap(one)(*arrays(), of_q, ids)

    grads = jax.jit(grads, static_argnums=0)
    with interpreted():
        got = grads("mosaic_tpu")
    (out, lse), (dq, *_) = got
    assert (
        not np.asarray(out)[:, 0, :16].any() and np.isneginf(lse[:, 0, :16]).all() and not np.asarray(dq)[:, :16].any()
    )
    close(got, grads("xla"))


# ---- the list of tiles


def cut(mask, s, t, segments=False, positions=False):
    return Cut(mask, B, s, t, 2, 1, 16, 32, segments, positions)


@pytest.mark.parametrize("most", [tpu_steps.MOST_STEPS, 6])
@pytest.mark.parametrize("own", ["queries", "keys"])
@pytest.mark.parametrize("name", ["causal", "window", "segments", "positions", "blocks"])
def test_every_tile_that_is_seen_is_met_once_and_no_other(name, own, most, monkeypatch):
    most *= B if name in ("segments", "positions") else 1
    monkeypatch.setattr(tpu_steps, "MOST_STEPS", most)
    s, t = 96, 150
    random = np.random.default_rng(0)
    table = random.random((6, 5)) < 0.5
    mask = {"window": Mask(True, 40), "blocks": Mask(blocks=Blocks.of(table, query=16, key=32))}.get(name, Mask(True))
    pair = [np.sort(random.integers(0, 90, (B, n)), 1) for n in (s, t)]
    tokens = Tokens(*(pair if name == "segments" else (None, None)), *(pair if name == "positions" else (None, None)))
    tiling = cut(mask, s, t, name == "segments", name == "positions")
    *plan, used = (np.asarray(x) for x in jax.jit(lambda tokens: steps(tiling, tokens, own)[:4])(tokens))
    want = tile_table(mask, tokens, s=s, t=t, q_tile=16, k_tile=32, each=True).astype(int)
    want = want.swapaxes(1, 2) if own == "keys" else want
    if own == "queries":
        want[:, :, -1] = np.minimum(want[:, :, -1], PARTIAL)  # its last keys are not there
    count = len(used)
    assert plan[0].shape[1] <= most and (count > 1) == (most <= 12)
    plan = [x.reshape(count, len(want), -1) for x in plan]
    for todo, most_used in zip(plan[2], used, strict=True):
        assert not todo[:, most_used:].any() and todo[:, most_used - 1].any()
    for mine, other, todo, state in zip(*(x.swapaxes(0, 1).reshape(len(want), -1) for x in plan), want, strict=True):
        met = np.full(state.shape, SKIP)
        for i, j, what in zip(mine, other, todo, strict=True):
            assert not what & 6 or met[i, j] == SKIP, "met twice"
            met[i, j] = FULL if what & 2 else PARTIAL if what & 4 else met[i, j]
        np.testing.assert_array_equal(met, state)
        for flag in (1, 8):  # every tile begins once and ends once, those that see nothing too
            np.testing.assert_array_equal(mine[todo & flag > 0], np.arange(state.shape[0]))
        assert (np.diff(mine) >= 0).all(), "a tile is not left and taken up again"


def test_the_list_of_documents_is_made_in_one_pass_in_memory_of_the_list():
    tiles, tile = 128, 16
    tiling = Cut(Mask(causal=True), 1, tiles * tile, tiles * tile, 1, 1, tile, tile, True, False)
    ids = jax.ShapeDtypeStruct((1, tiles * tile), jnp.int32)
    made = jax.jit(lambda ids: steps(tiling, Tokens(ids, ids), "queries")[:4]).lower(ids).compile().memory_analysis()
    table = 4 * tiles**2
    assert made.temp_size_in_bytes < 4 * table + 2 * made.output_size_in_bytes  # each step with each tile: 33 MB


def test_causal_costs_half_the_steps_with_segments_too_and_a_window_a_constant_number():
    tile = 32  # twice the queries of a tile make tiles square

    def count(n, mask, **data):
        return step_counts(Cut(mask, B, n * tile, n * tile, 2, 1, tile, tile, **data), "queries").sum()

    none = {"segments": False, "positions": False}
    assert count(20, Mask(), **none) == 400
    assert count(20, Mask(True), **none) == 210
    assert count(20, Mask(True), segments=True, positions=False) == 210
    assert count(20, Mask(True, window=tile), **none) == 39
    assert count(20, Mask(True), segments=False, positions=True) == 400  # only the data knows


def test_pieces_are_whole_tiles_as_few_as_can_be_and_about_equal():
    causal = np.arange(1, 513)  # 512k tokens in tiles of 1024
    for most in (65_536, 2000, 512):
        ranges = pieces(causal, most)
        sizes = [causal[start:stop].sum() for start, stop in ranges]
        assert [i for start, stop in ranges for i in range(start, stop)] == list(range(512))
        assert max(sizes) <= most and len(sizes) == pytest.approx(causal.sum() / most, rel=0.4, abs=1)
    assert max(causal[start:stop].sum() for start, stop in pieces(causal, 65_536)) <= causal.sum() / 3 + 512
    assert pieces(causal, 511) is None


# ---- what it refuses, and what it compiles to


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"dtype": "float16"}, "XLA converts float16"),
        ({"bias": 1.0}, "a bias is left to XLA"),
        ({"width": 320}, "at most 256 in a kernel, not 320"),
        ({"blocks": Blocks.of(np.ones((75, 2), bool), query=8, key=512)}, "multiple of 128 queries in a kernel, not 8"),
        ({"rows": 256, "length": 262144, "positions": True}, "may have to visit 131072 tiles in the 256 examples"),
    ],
    ids=["float16", "bias", "width", "blocks", "length"],
)
def test_an_unsupported_case_raises_with_the_reason(changes, words):
    length = changes.get("length", 600)
    rows = changes.get("rows", 1)
    x = jax.ShapeDtypeStruct((rows, length, 2, changes.get("width", 64)), changes.get("dtype", "float32"))
    positions = jax.ShapeDtypeStruct((rows, length), jnp.int32) if changes.get("positions") else None
    options = {n: changes[n] for n in ("bias", "blocks") if n in changes} | {"causal": True}

    def call(x, positions):
        return flash_attention(x, x, x, positions=positions, **options, implementation="mosaic_tpu")

    with interpreted(), pytest.raises(KernelError, match=words):
        jax.eval_shape(call, x, positions)


def test_a_long_sequence_without_a_kernel_is_logged_on_a_tpu(caplog):
    forget()
    for length in (8192, 524288):
        x = jax.ShapeDtypeStruct((1, length, 1, 320), "bfloat16")
        with on_device("TPU v6 lite"):
            jax.eval_shape(lambda x: flash_attention(x, x, x, causal=True), x)
        assert len(caplog.messages) == (length == 524288)
    assert caplog.messages[0].startswith("flash_attention on TPU v6 lite: xla; not mosaic_tpu: head_dim has to be at")


@pytest.mark.tpu_aot
@pytest.mark.parametrize("topology", TPUS)
def test_the_kernels_compile_for_every_generation(topology):
    # each direction on one generation with 128 MiB of VMEM and on one with less; the gate compiles all on all
    forward = topology in ("v5e", "tpu7x")
    fn, shapes = GATE["bfloat16 128 odd lengths forward" if forward else "bfloat16 96 window segments backward"]
    assert "tpu_custom_call" in compile_kernel(fn, *shapes, topology=topology).as_text()
