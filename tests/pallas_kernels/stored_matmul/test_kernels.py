"""The kernels: interpreted, against float64 and a plain product in bfloat16; compiling without a dense matrix."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import tiles
from pallas_kernels.aot import compile_kernel
from pallas_kernels.dispatch import KernelError, interpreted
from pallas_kernels.gate import configurations
from pallas_kernels.stored_matmul import Integers, Packed, stored_matmul
from pallas_kernels.stored_matmul.examples import FORMATS, shapes
from tests.pallas_kernels.stored_matmul.cases import error, make

GATE = {name: (fn, shapes) for name, fn, shapes in configurations("stored_matmul", "tpu")}
TILE = {"rows": 512, "columns": 128}  # two tiles each way
QUICK = [("int4, groups of 128", 7, False), ("int6, groups of 128", 1, False), ("mxfp4", 16, True)]
LONG = [("int4, groups of 128", 1, False), ("nf4", 7, True), ("int3, groups of 64", 128, True)]
LONG += [(name, 16, False) for name in FORMATS]


def check(name, m, transposed, dtype="bfloat16", implementation="mosaic_tpu"):
    """Compare a product with float64, and its error with that of a product of arrays in the same dtype."""
    weight, matrix = make(name, 1024, 256)
    w = matrix.T if transposed else matrix
    x = jnp.asarray(np.random.default_rng(1).normal(size=(m, w.shape[0])), dtype)
    right = np.asarray(x, np.float64) @ w
    plain = jnp.dot(x, jnp.asarray(w, dtype), precision="highest", preferred_element_type=jnp.float32)
    with interpreted(races=True), tiles.trying("stored_matmul", TILE):
        got = jax.jit(
            lambda x, weight: stored_matmul(
                x, weight, transposed=transposed, out_dtype="float32", implementation=implementation
            )
        )(x, weight)
    assert got.shape == right.shape
    assert error(got, right) <= 2 * error(plain, right) + 2e-7


@pytest.mark.parametrize(("name", "m", "transposed"), QUICK)
def test_the_product_is_as_exact_as_a_plain_one_and_has_no_races(name, m, transposed, capsys):
    check(name, m, transposed)
    assert "RACE" not in capsys.readouterr().out


@pytest.mark.long
@pytest.mark.parametrize(("name", "m", "transposed"), LONG)
def test_every_format_and_batch_is_as_exact_as_a_plain_product(name, m, transposed):
    check(name, m, transposed)


@pytest.mark.long
def test_float32_is_as_exact_as_a_plain_product():
    check("int4, groups of 128", 7, False, "float32")


def test_the_gradient_is_the_product_with_the_transpose():
    weight, matrix = make("int4, groups of 128", 256, 128)
    x = jnp.asarray(np.random.default_rng(1).normal(size=(3, 256)), jnp.float32)
    dy = np.random.default_rng(2).normal(size=(3, 128)).astype(np.float32)
    with interpreted():
        f = lambda x: stored_matmul(x, weight, implementation="mosaic_tpu")  # noqa: E731
        (dx,) = jax.jit(lambda x: jax.vjp(f, x)[1](dy))(x)
    assert error(dx, dy.astype(np.float64) @ matrix.T) < 1e-6


@pytest.mark.parametrize(
    ("k", "n", "options", "dtype", "words"),
    [
        (1024, 256, {}, "float16", "TPUs compute in float32 and bfloat16, not float16"),
        (1000, 256, {"group": None}, "bfloat16", "of 4 bits a kernel takes a multiple of 128 rows, not 1000"),
        (1024, 64, {}, "bfloat16", "a kernel takes 128 columns or more, not 64"),
        (1152, 256, {"group": 9}, "bfloat16", "scales for 9 rows each neither divide nor fill units of 8 codes"),
    ],
)
def test_what_has_no_kernel_raises_with_the_reason(k, n, options, dtype, words):
    weight = shapes(k, n, **{"numbers": Integers(4), "group": 128} | options)
    x = jax.ShapeDtypeStruct((4, k), dtype)
    with interpreted(), pytest.raises(KernelError, match=words):
        jax.eval_shape(lambda x, w: stored_matmul(x, w, implementation="mosaic_tpu"), x, weight)


def test_shapes_that_do_not_fit_are_refused():
    weight = shapes(1024, 256, numbers=Integers(4), group=128)
    x = jax.ShapeDtypeStruct((4, 1000), jnp.bfloat16)
    with pytest.raises(KernelError, match=r"x is \(rows, 1024\) for a matrix \(1024, 256\), not \(4, 1000\)"):
        jax.eval_shape(stored_matmul, x, weight)
    bad = Packed(weight.codes, jax.ShapeDtypeStruct((3, 256), jnp.float32))
    with pytest.raises(KernelError, match="scale of a matrix .* with S a divisor of 1024"):
        jax.eval_shape(stored_matmul, jax.ShapeDtypeStruct((4, 1024), jnp.bfloat16), bad)


@pytest.mark.tpu_aot
@pytest.mark.parametrize(
    ("name", "topology"),
    [
        ("int4, groups of 128", "v5e"),
        ("int3, groups of 64", "v5p"),
        ("mxfp4", "v6e"),
        ("int4, groups of 128 transposed", "v5e"),
    ],
)
def test_the_kernel_compiles_and_no_dense_matrix_is_in_memory(name, topology):
    fn, arrays = GATE[name]
    made = compile_kernel(fn, *arrays, topology=topology)
    text = made.as_text()
    assert "tpu_custom_call" in text
    k, n = arrays[1].shape
    assert not [line for line in text.splitlines() if f"[{k},{n}]" in line]
    assert made.memory_analysis().temp_size_in_bytes < 2048 * 512 * 2  # a tile in bfloat16
