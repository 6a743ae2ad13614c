"""Grouped products with stored matrices: against float64; one group's dense matrix at a time; what is refused."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxscale.testing.ops import allowed, error_of
from pallas_kernels import tiles
from pallas_kernels.aot import compile_kernel
from pallas_kernels.dispatch import KernelError, interpreted
from pallas_kernels.gate import configurations
from pallas_kernels.grouped_matmul import reference
from pallas_kernels.grouped_stored_matmul import examples, grouped_stored_matmul, xla
from pallas_kernels.grouped_stored_matmul.inputs import checked
from tests.pallas_kernels.grouped_stored_matmul.cases import arrays
from tests.truth.long import short

TILE = {"rows": 128, "columns": 128}


def check(form, implementation, k, n, m=180, transposed=False, dtype="float32", races=False):
    rows, weight, sizes, matrices = arrays(form, k, n, m, transposed, dtype)
    with interpreted(races=races), tiles.trying("grouped_stored_matmul", TILE):
        got = jax.jit(
            lambda r, w: grouped_stored_matmul(r, w, sizes, transposed=transposed, implementation=implementation)
        )(rows, weight)
    wide = np.asarray(rows.astype(jnp.float32), np.float64)
    want = reference.matmul(wide, matrices, sizes, transposed=transposed)
    assert got.dtype == dtype and got.shape == want.shape
    # beside it the same product with float64's matrices rounded to the rows' dtype
    plain = reference.matmul(wide, np.asarray(jnp.asarray(matrices).astype(dtype), np.float64), sizes,
                             transposed=transposed)  # fmt: skip
    plain = np.asarray(jnp.asarray(plain).astype(dtype), np.float64)
    assert error_of(got, want) <= max(allowed(error_of(plain, want), jnp.dtype(dtype)), 1e-6)


@pytest.mark.parametrize(("form", "transposed"), [("mxfp4", False), ("int8", True), ("nf4", False)])
def test_xla_multiplies_each_row_with_its_groups_matrix(form, transposed):
    check(form, "xla", 64, 24, transposed=transposed)


CASES = short(
    2,
    [
        ("mxfp4", 128, 128, False, "float32"),
        ("int4, groups of 128", 256, 256, True, "float32"),
        ("int8", 128, 200, False, "bfloat16"),
        ("mxfp4", 320, 160, False, "bfloat16"),  # planes of 40 rows
        ("mxfp4", 320, 256, True, "bfloat16"),
        ("uint4, zero points", 256, 128, False, "bfloat16"),
        ("int3, groups of 64", 512, 128, False, "float32"),
        ("kmeans3", 512, 128, True, "float32"),
        ("nvfp4", 128, 128, False, "bfloat16"),
    ],
)


@pytest.mark.parametrize(("form", "k", "n", "transposed", "dtype"), CASES)
def test_the_tpu_s_kernel_multiplies_each_row_with_its_groups_matrix(form, k, n, transposed, dtype, capsys):
    check(form, "mosaic_tpu", k, n, transposed=transposed, dtype=dtype, races=True)
    assert "RACE" not in capsys.readouterr().out


@pytest.mark.long
def test_a_sum_of_several_tiles_is_right(monkeypatch):
    monkeypatch.setattr("pallas_kernels.grouped_stored_matmul.tpu.VMEM", 3 * 2**20)
    check("mxfp4", "mosaic_tpu", 512, 128, races=True)
    check("mxfp4", "mosaic_tpu", 512, 128, transposed=True)


def test_the_gradient_of_rows_is_the_product_with_the_transposes():
    rows, weight, sizes, matrices = arrays("mxfp4", 64, 24, 180)
    dy = jnp.asarray(np.random.default_rng(1).normal(size=(180, 24)), jnp.float32)
    got = jax.jit(lambda r: jax.vjp(lambda r: grouped_stored_matmul(r, weight, sizes), r)[1](dy)[0])(rows)
    assert error_of(got, reference.matmul(np.asarray(dy, np.float64), matrices, sizes, transposed=True)) < 1e-6


def test_xla_holds_one_group_s_matrix_at_a_time():
    m, groups, k, n = 256, 64, 256, 512
    weight = examples.weight_of(groups, k, n, "mxfp4")
    like = jax.ShapeDtypeStruct
    compiled = jax.jit(grouped_stored_matmul).lower(like((m, k), "float32"), weight, like((groups,), "int32")).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < groups * k * n  # a quarter of all matrices in float32


def test_xla_runs_where_jax_checks_what_differs_between_devices():
    rows, weight, sizes, _ = arrays("int8", 64, 24, 180)
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    product = lambda r: grouped_stored_matmul(r, weight, sizes, implementation="xla")  # noqa: E731
    got = jax.jit(jax.shard_map(product, mesh=mesh, in_specs=P("x"), out_specs=P("x")))(jnp.tile(rows, (2, 1)))
    np.testing.assert_array_equal(got, jnp.tile(jax.jit(product)(rows), (2, 1)))


def test_a_tile_of_xla_has_about_twice_a_group_s_rows():
    weight = examples.weight_of(32, 64, 64, "int8")
    for m, rows in ((1, 8), (256, 32), (1000, 64), (10**6, 512)):
        facts, _ = checked(jnp.zeros((m, 64)), weight, np.zeros(32, np.int32), False, None)
        assert xla.tile_of(facts) == rows


@pytest.mark.parametrize(
    ("groups", "sizes", "width", "words"),
    [
        (2, (3,), 64, r"sizes are \(2,\), one for each matrix, not \(3,\)"),
        (2, (2,), 32, r"x is \(rows, 64\) for a matrix \(64, 64\), not \(4, 32\)"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(groups, sizes, width, words):
    weight = examples.weight_of(groups, 64, 64, "int8")
    with pytest.raises(KernelError, match=words):
        jax.eval_shape(
            lambda r, w: grouped_stored_matmul(r, w, np.zeros(sizes, np.int32)), jnp.zeros((4, width)), weight
        )


def test_a_weight_without_groups_is_refused():
    weight = jax.tree.map(lambda a: jnp.zeros(a.shape[1:], a.dtype), examples.weight_of(2, 64, 64, "int8"))
    with pytest.raises(KernelError, match="has a first dimension of groups"):
        grouped_stored_matmul(jnp.zeros((4, 64)), weight, np.zeros(2, np.int32))


def test_what_has_no_kernel_raises_with_the_reason():
    weight = examples.weight_of(2, 72, 128, "int8")
    with interpreted(), pytest.raises(KernelError, match="of 8 bits a kernel takes a multiple of 32 rows, not 72"):
        jax.eval_shape(
            lambda r, w: grouped_stored_matmul(r, w, np.zeros(2, np.int32), implementation="mosaic_tpu"),
            jnp.zeros((4, 72)),
            weight,
        )


@pytest.mark.tpu_aot
def test_a_compiled_product_for_a_tpu_holds_no_dense_copy():
    name = "qwen3 mxfp4"
    fn, shapes = next((f, s) for n, f, s in configurations("grouped_stored_matmul", "tpu") if n == name)
    memory = compile_kernel(fn, *shapes, topology="v5e").memory_analysis()
    _, groups, k, n = examples.MODELS["qwen3"]
    assert memory.temp_size_in_bytes < groups * k * n // 10
