"""Grouped products: against float64 with groups that end anywhere; interpreted without races; compiling for TPUs."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxscale.testing.ops import allowed, error_of
from pallas_kernels import tiles
from pallas_kernels.aot import compile_kernel
from pallas_kernels.dispatch import KernelError, interpreted
from pallas_kernels.gate import configurations
from pallas_kernels.grouped_matmul import grouped_matmul, grouped_outer, reference, tpu
from tests.pallas_kernels.grouped_matmul import cases

TILE = {"rows": 256, "k": 128, "n": 128}


def check(feature, dtype, implementation, tile=TILE, **shapes):
    """Compare the three products with float64, and their errors with those of ordinary products."""
    rows, matrices, sizes, dy = cases.arrays(feature, dtype, **shapes)
    with interpreted(races=True), tiles.trying("grouped_matmul", tile):
        got = jax.jit(cases.three(sizes, implementation))(rows, matrices, dy)
    plain = jax.jit(lambda *a: cases.plain(*a, sizes))(rows, matrices, dy)
    for part, ours, theirs, true in zip(cases.PARTS, got, plain, cases.truth(rows, matrices, sizes, dy), strict=True):
        assert ours.shape == true.shape and ours.dtype == dtype
        assert error_of(ours, true) <= allowed(error_of(theirs, true), ours.dtype), part


def test_groups_that_end_anywhere_have_exact_products_and_no_races(capsys):
    check("empty, and rows after", "float32", "mosaic_tpu", k=64, n=72, m=300)
    assert "RACE" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("implementation", "dtype"), [("mosaic_tpu", "float32"), ("xla", "bfloat16"), ("xla_tiles", "bfloat16")]
)
def test_a_bias_is_added_to_the_rows_of_its_group_and_gets_its_gradient(implementation, dtype):
    rows, matrices, sizes, dy = cases.arrays("empty, and rows after", dtype, k=256, n=72, m=300)
    bias = jnp.asarray(np.random.default_rng(1).normal(size=(len(sizes), 72)), jnp.float32)

    def both(bias):
        y, pull = jax.vjp(lambda b: grouped_matmul(rows, matrices, sizes, bias=b, implementation=implementation), bias)
        return y, *pull(dy)

    with interpreted(), tiles.trying("grouped_matmul", TILE):  # two tiles of k
        got, dbias = jax.jit(both)(bias)
    wide = [np.asarray(a.astype(jnp.float32), np.float64) for a in (rows, matrices, bias, dy)]
    true = reference.matmul(*wide[:2], sizes, bias=wide[2])
    assert got.dtype == dtype and not np.asarray(got, np.float32)[sizes.sum() :].any()
    assert error_of(got, true) <= (2e-6 if dtype == "float32" else 2**-8)
    each = np.split(wide[3], np.cumsum(sizes))[:-1]
    assert error_of(dbias, np.stack([part.sum(0) for part in each])) <= 1e-6


def test_a_bias_of_another_shape_or_dtype_is_refused():
    rows, matrices, sizes = jnp.zeros((4, 8)), jnp.zeros((2, 8, 6)), np.array([1, 2])
    with pytest.raises(KernelError, match=r"bias is float32 \(2, 6\), a row for each group, not float32 \(6,\)"):
        grouped_matmul(rows, matrices, sizes, bias=jnp.zeros(6))
    with pytest.raises(KernelError, match="sums of int8 are int32; add the bias after"):
        grouped_matmul(rows.astype("int8"), matrices.astype("int8"), sizes, bias=jnp.zeros((2, 6)))


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("feature", cases.SIZES)
@pytest.mark.parametrize("tile", [TILE, {"rows": 64, "k": 256, "n": 512}, {"rows": 1024, "k": 128, "n": 128}])
def test_every_distribution_is_as_exact_as_ordinary_products(feature, dtype, tile):
    check(feature, dtype, "mosaic_tpu", tile)


@pytest.mark.parametrize("feature", ["one has 90%", "nothing"])
def test_xla_is_as_exact_as_ordinary_products(feature):
    check(feature, "bfloat16", "xla", k=16, n=24)


def test_the_derivative_of_the_outer_product_is_right():
    rows, matrices, sizes, dy = cases.arrays("empty, and rows after", "float32", k=8, n=4, m=300)
    f = jax.jit(lambda a, b: jax.vjp(lambda a, b: grouped_outer(a, b, sizes), a, b)[1](matrices))
    wide = [np.asarray(a, np.float64) for a in (rows, dy, matrices)]
    for got, true in zip(
        f(rows, dy),
        (
            reference.matmul(wide[1], wide[2], sizes, transposed=True),
            reference.matmul(wide[0], wide[2], sizes),
        ),
        strict=True,
    ):
        assert error_of(got, true) < 1e-6


@pytest.mark.parametrize("outer", [False, True])
def test_steps_have_each_groups_tiles_in_order_and_none_for_what_is_empty(outer):
    random, (m, rows) = np.random.default_rng(0), (100, 16)
    drawn = [random.multinomial(random.integers(0, m + 1), random.dirichlet([0.3] * 5)) for _ in range(24)]
    drawn = np.asarray([*drawn, [0] * 5, [96, 0, 4, 0, 0], [0, 0, 0, 0, m]], np.int32)
    every = jax.jit(jax.vmap(lambda sizes: tpu.steps_of(sizes, m, rows, outer=outer)))(drawn)
    for i, sizes in enumerate(drawn):
        got, want, begin = jax.tree.map(lambda a, i=i: np.asarray(a[i]), every), [], 0
        for group, size in enumerate([*sizes, m - sizes.sum()]):
            if size and not (outer and group == len(sizes)):
                want += [(group, t) for t in range(begin // rows, (begin + size - 1) // rows + 1)]
            elif outer and group < len(sizes):
                want += [(group, min(begin // rows, m // rows))]
            begin += size
        count = int(got.steps)
        assert list(zip(got.group[:count], got.tile[:count], strict=True)) == want
        assert (np.diff(got.read) >= 0).all() and len(got.group) >= count


def test_multiplied_rows_exceed_a_groups_rows_by_less_than_two_parts():
    sizes = [1, 0, 300, 5, 2000, 128]
    rows = tpu.multiplied_rows(sizes, 4096, 512)
    assert sum(sizes) <= rows <= sum(s + 2 * tpu.PART - 2 for s in sizes if s)
    assert tpu.multiplied_rows([512, 512], 1024, 512) == 1024


@pytest.mark.parametrize(
    ("shapes", "dtypes", "words"),
    [
        (((4, 8), (2, 6, 8), (2,)), "ff", r"rows \(4, 8\) do not fit matrices \(2, 6, 8\); set transposed"),
        (((4, 8), (8, 6), (2,)), "ff", r"matrices \(groups, k, n\), not \(4, 8\) and \(8, 6\)"),
        (((4, 8), (2, 8, 6), (3,)), "ff", r"sizes are \(2,\), one for each matrix, not \(3,\)"),
        (((4, 8), (2, 8, 6), (2,)), "fb", "operands are of one dtype, not float32 and bfloat16; cast one"),
        (((4, 8), (2, 8, 6), (2,)), "cc", "operands are float64, .*, not complex64; cast them"),
    ],
)
def test_operands_that_do_not_fit_are_refused(shapes, dtypes, words):
    names = {"f": "float32", "b": "bfloat16", "c": "complex64"}
    rows, matrices = (jnp.zeros(s, names[d]) for s, d in zip(shapes, dtypes, strict=False))
    with pytest.raises(KernelError, match=words):
        jax.eval_shape(lambda r, w: grouped_matmul(r, w, np.zeros(shapes[2], np.int32)), rows, matrices)


@pytest.mark.parametrize(
    ("out", "words"), [("foo", "'foo' is no dtype; use float32"), ("int8", "float32 operands is not")]
)
def test_an_output_of_another_kind_is_refused(out, words):
    with pytest.raises(KernelError, match=words):
        grouped_matmul(jnp.zeros((4, 8)), jnp.zeros((2, 8, 6)), np.array([1, 2]), out_dtype=out)


def test_what_has_no_kernel_raises_with_the_reason():
    rows, matrices = jnp.zeros((4, 8), "float16"), jnp.zeros((2, 8, 6), "float16")
    with interpreted(), pytest.raises(KernelError, match="float32 and bfloat16, and float16 is left to XLA"):
        grouped_matmul(rows, matrices, np.array([1, 2]), implementation="mosaic_tpu")


@pytest.mark.tpu_aot
def test_the_kernel_compiles_without_a_temporary():
    name = "1000 rows float32 kernel gradient"
    _, fn, shapes = next(c for c in configurations("grouped_matmul", "tpu") if c[0] == name)
    made = compile_kernel(fn, *shapes, topology="v5e")
    assert "tpu_custom_call" in made.as_text()
    assert made.memory_analysis().temp_size_in_bytes < 2**20  # the steps' groups and tiles
