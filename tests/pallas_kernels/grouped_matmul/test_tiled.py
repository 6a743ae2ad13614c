"""Grouped products in a loop over tiles of rows: against float64, batched and sharded; where chosen; their memory."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxscale.testing.ops import allowed, error_of
from pallas_kernels import grouped_matmul as op
from pallas_kernels.aot import compile_kernel
from pallas_kernels.dispatch import JAX_VERSION, best, interpreted, on_device
from pallas_kernels.grouped_matmul import examples, grouped_matmul, grouped_outer, reference, tiled
from pallas_kernels.grouped_matmul.inputs import Facts
from tests.pallas_kernels.grouped_matmul import cases
from tests.truth.long import short

NAMES = ("empty, and rows after", "one has 90%", "even", "nothing")


@pytest.mark.parametrize(
    ("feature", "dtype"), short(1, [(f, d) for d in ("float32", "bfloat16", "float16") for f in NAMES])
)
def test_products_and_gradients_are_as_exact_as_ordinary_products_and_other_rows_count_for_nothing(feature, dtype):
    m = 300 if feature in ("empty, and rows after", "nothing") else 512
    rows, matrices, sizes, dy = cases.arrays(feature, dtype, k=16, n=24, m=m)
    after = jnp.arange(m)[:, None] >= sizes.sum()
    with interpreted():
        ours = jax.jit(cases.three(sizes, "xla_tiles"))(
            jnp.where(after, jnp.inf, rows), matrices, jnp.where(after, jnp.nan, dy)
        )
    plain = jax.jit(lambda *a: cases.plain(*a, sizes))(rows, matrices, dy)
    for part, got, other, true in zip(cases.PARTS, ours, plain, cases.truth(rows, matrices, sizes, dy), strict=True):
        assert got.shape == true.shape and got.dtype == dtype
        few = 4 * float(jnp.finfo(jnp.float32).eps)  # processors sum in different orders, each of the two in its own
        assert error_of(got, true) <= max(few, allowed(error_of(other, true), got.dtype)), part
    assert not np.asarray(ours[0], np.float32)[sizes.sum() :].any()


@pytest.mark.parametrize(("dtype", "out"), short(1, [("int8", "int32"), ("float8_e4m3fn", "float32")]))
def test_operands_of_8_bits_are_summed_in_32(dtype, out):
    random, sizes = np.random.default_rng(0), np.array([130, 0, 127, 43], np.int32)
    draw = lambda *shape: jnp.asarray(random.integers(-8, 9, shape), dtype)  # noqa: E731
    rows, matrices, dy = draw(320, 16), draw(4, 24, 16), draw(320, 24)
    with interpreted():
        y = grouped_matmul(rows, matrices, sizes, transposed=True, implementation="xla_tiles")
        dw = grouped_outer(rows, dy, sizes, implementation="xla_tiles")
    wide = [np.asarray(a.astype(jnp.float32), np.float64) for a in (rows, matrices, dy)]
    np.testing.assert_array_equal(y, reference.matmul(wide[0], wide[1], sizes, transposed=True))
    np.testing.assert_array_equal(dw, reference.outer(wide[0], wide[2], sizes))
    assert y.dtype == dw.dtype == out


@pytest.mark.parametrize("mapped", ["sharded", pytest.param("batched", marks=pytest.mark.long)])
def test_batched_and_sharded_products_are_those_of_each_part(mapped):
    random, sizes = np.random.default_rng(0), np.asarray([[100, 0, 157, 20], [0, 3, 0, 290]], np.int32)
    shapes = (2, 300, 8), (2, 4, 8, 6), (2, 300, 6)
    rows, matrices, dy = (jnp.asarray(random.normal(size=shape), jnp.float32) for shape in shapes)

    def part(rows, matrices, dy, sizes):
        return cases.three(sizes, "xla_tiles")(rows, matrices, dy)

    def local(*arrays):
        return jax.tree.map(lambda x: x[None], part(*(x[0] for x in arrays)))

    mesh = jax.make_mesh((2,), ("part",), axis_types=(jax.sharding.AxisType.Auto,))
    sharded = jax.shard_map(local, mesh=mesh, in_specs=P("part"), out_specs=P("part"), check_vma=False)
    with interpreted():
        got = jax.jit(sharded if mapped == "sharded" else jax.vmap(part))(rows, matrices, dy, jnp.asarray(sizes))
    for i in range(2):
        for y, true in zip(got, cases.truth(rows[i], matrices[i], sizes[i], dy[i]), strict=True):
            assert error_of(y[i], true) < 1e-6


def test_tiles_have_every_row_of_a_group_once():
    random, m, groups = np.random.default_rng(0), 1000, 7
    drawn = [random.multinomial(random.integers(0, m + 1), random.dirichlet([0.3] * groups)) for _ in range(24)]
    drawn = np.asarray(
        [*drawn, [0] * groups, [1] * groups, [0] * (groups - 1) + [m], [m, *[0] * (groups - 1)]], np.int32
    )
    for rows in (64, 1000):
        every = jax.jit(jax.vmap(functools.partial(tiled.tiles_of, m=m, rows=rows)))(drawn)
        for i, sizes in enumerate(drawn):
            group, seen = np.repeat(np.arange(groups), sizes), np.zeros(m, int)
            for at, first, end, g in zip(*(np.asarray(a[i]) for a in every), strict=True):
                assert 0 <= at <= m - rows and (end == first or at <= first < end <= at + rows)
                assert (group[first:end] == g).all()
                seen[first:end] += 1
            assert (seen == (np.arange(m) < sizes.sum())).all()


@pytest.mark.parametrize(
    ("kind", "facts", "chosen", "why"),
    [
        ("NVIDIA B200", (8, 8192), "xla_tiles", "written for Hopper"),
        ("NVIDIA A100-SXM4-80GB", (8, 8192), "xla_tiles", "written for Hopper"),
        ("AMD Instinct MI300X", (8, 8192), "xla_tiles", "for NVIDIA GPUs"),
        ("NVIDIA B200", (1, 8192), "xla", "with one group `ragged_dot` is one product"),
        ("NVIDIA B200", (8, 256), "xla", "256 or fewer rows by all matrices"),
        ("cpu", (8, 8192), "xla_tiles", None),
        ("cpu", (8, 256), "xla", "256 or fewer rows by all matrices"),
        ("TPU v5 lite", (8, 8192), "mosaic_tpu", None),
    ],
)
def test_devices_without_a_kernel_take_tiles_where_ragged_dot_would_be_dense(kind, facts, chosen, why):
    groups, m = facts
    made = Facts("matmul", groups, m, 2048, 7168, "bfloat16", "bfloat16", "bfloat16")
    with on_device(kind, "cpu" if kind == "cpu" else None):
        choice = best("grouped_matmul", op.IMPLEMENTATIONS, {"facts": made})
    assert choice.implementation == chosen
    assert (why is None) == (not choice.why_not) and (why is None or why in choice.why_not[-1][1])


@pytest.mark.skipif(JAX_VERSION < (0, 11), reason="compiling for GPUs needs jax 0.11")
@pytest.mark.gpu_aot
@pytest.mark.parametrize("topology", ["b200", "a100"])
def test_a_compiled_product_and_its_gradients_hold_no_dense_copy(topology):
    m, groups, k, n = examples.MODELS["gpt-oss"]
    like, dtype = jax.ShapeDtypeStruct, "bfloat16"

    def step(rows, matrices, sizes, dy):
        y, pull = jax.vjp(lambda r, w: grouped_matmul(r, w, sizes), rows, matrices)
        return y, *pull(dy)

    shapes = like((m, k), dtype), like((groups, k, n), dtype), like((groups,), "int32"), like((m, n), dtype)
    memory = compile_kernel(step, *shapes, topology=topology).memory_analysis()
    # two sums of the outer product in float32, a tile of rows each; dense copies are 32 times the rows (3 GB)
    assert memory.temp_size_in_bytes <= 2 * 4 * k * n + 4 * 1024 * (k + n)
