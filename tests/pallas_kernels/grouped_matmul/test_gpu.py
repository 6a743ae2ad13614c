"""The Hopper kernels: interpreted, against float64; their tiles; what they compile to."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import tiles
from pallas_kernels.aot import SHARED_MEMORY, compile_kernel
from pallas_kernels.dispatch import JAX_VERSION, KernelError, interpreted
from pallas_kernels.gate import configurations, gate_gpu
from pallas_kernels.grouped_matmul import examples, gpu, grouped_matmul, grouped_outer, reference
from pallas_kernels.grouped_matmul.inputs import Facts
from tests.truth.long import short

NEW = pytest.mark.skipif(JAX_VERSION < (0, 11), reason="kernels for GPUs need jax 0.11")
SIZES = {
    "empty, small and split": (37, 0, 70, 3, 4),
    "one has all": (0, 133, 0),
    "nothing": (0, 0),
    "after the last": (8, 64),
}
"""A name -> rows of each group, of 133."""


@NEW
@pytest.mark.parametrize("product", ["matmul", "with a bias", "transposed", "outer"])
@pytest.mark.parametrize(
    ("name", "columns", "out"),
    short(1, [(n, *c) for n in SIZES for c in ((128, "bfloat16"), (192, "float32"))]),
)
def test_products_are_those_of_float64_and_other_rows_count_for_nothing(product, name, columns, out, capsys):
    random, sizes = np.random.default_rng(0), np.asarray(SIZES[name], np.int32)
    draw = lambda *shape: jnp.asarray(random.normal(size=shape), jnp.bfloat16)  # noqa: E731
    m, k, n = 133, 64, 192
    after = jnp.arange(m)[:, None] >= sizes.sum()
    left = jnp.where(after, jnp.inf, draw(m, k))
    options = {"out_dtype": out, "implementation": "mosaic_gpu"}
    tile = {"columns": columns, "slots": 2, "buffers": 2}
    with interpreted(races=True), tiles.trying("grouped_matmul", tile):
        if product == "outer":
            right = jnp.where(after, jnp.inf, draw(m, n))
            got = grouped_outer(left, right, sizes, **options)
            want = reference.outer(*_float64(left, right), sizes)
        else:
            right = draw(len(sizes), *((n, k) if product == "transposed" else (k, n)))
            bias = draw(len(sizes), n).astype("float32") if product == "with a bias" else None
            got = grouped_matmul(left, right, sizes, bias=bias, transposed=product == "transposed", **options)
            add = None if bias is None else np.asarray(bias, np.float64)
            want = reference.matmul(*_float64(left, right), sizes, bias=add, transposed=product == "transposed")
    eps = 2.0**-8 if out == "bfloat16" else 2.0**-20
    np.testing.assert_allclose(np.asarray(got, np.float64), want, rtol=eps, atol=eps * (np.abs(want).max() + 1e-30))
    assert "RACE" not in capsys.readouterr().out


def _float64(*arrays):
    return [np.asarray(a.astype(jnp.float32), np.float64) for a in arrays]


def test_tiles_have_every_row_once_and_join_no_groups():
    random, m, groups = np.random.default_rng(0), 1200, 9
    drawn = [random.multinomial(random.integers(0, m + 1), random.dirichlet([0.3] * groups)) for _ in range(24)]
    drawn = np.asarray([*drawn, [0] * groups, [1] * groups, [0] * (groups - 1) + [m]], np.int32)
    every = np.asarray(jax.jit(jax.vmap(functools.partial(gpu.tiles_of, m=m)))(drawn))
    for table, sizes in zip(every, drawn, strict=True):
        total = table[0, 4]
        group, seen = np.repeat(np.arange(groups + 1), np.append(sizes, m - sizes.sum())), np.zeros(m, int)
        assert total <= len(table)
        for first, begin, end, g, _ in table[:total]:
            assert first % 8 == 0 and 0 <= begin < end <= gpu.TILE
            assert (group[first + begin : first + end] == g).all()
            seen[first + begin : first + end] += 1
        assert (seen == 1).all()
        # what is multiplied, beyond the groups' rows, is less than a warpgroup's rows and a strip for each group
        of_groups = table[:total][table[:total, 3] < groups]
        halves = [h for _, begin, end, *_ in of_groups for h in (0, gpu.ROWS) if begin < h + gpu.ROWS and end > h]
        assert gpu.ROWS * len(halves) == gpu.multiplied_rows(sizes, m)
        assert gpu.ROWS * len(halves) <= sizes.sum() + np.count_nonzero(sizes) * (gpu.ROWS + 6)


@pytest.mark.parametrize(
    ("shape", "dtype", "words"),
    [
        ((64, 128, 192), "float32", "float32 is left to XLA"),
        ((64, 100, 192), "bfloat16", "multiples of 64 for k, not 100; the nearest is 128"),
        ((64, 128, 160), "bfloat16", "multiples of 64 for n, not 160; the nearest is 128"),
        ((0, 128, 192), "bfloat16", "there are no rows"),
    ],
    ids=["float32", "k", "n", "rows"],
)
def test_what_has_no_kernel_raises_with_the_reason(shape, dtype, words):
    words = words if JAX_VERSION >= (0, 11) else "kernels for GPUs need jax 0.11"
    m, k, n = shape
    like = jax.ShapeDtypeStruct
    with interpreted(), pytest.raises(KernelError, match=words):
        jax.eval_shape(
            lambda *a: grouped_matmul(*a, implementation="mosaic_gpu"),
            like((m, k), dtype),
            like((2, k, n), dtype),
            like((2,), "int32"),
        )


def test_the_operands_and_the_output_of_every_tile_fit_in_shared_memory():
    for entry in tiles.entries("grouped_matmul"):
        if entry["device"].startswith("NVIDIA"):
            tile, outer = entry["tile"], entry["key"]["product"] == "outer"
            chunks = tile["slots"] * gpu.CHUNK * (gpu.TILE + tile["columns"]) * 2
            assert chunks + (tile["buffers"] + (not outer)) * gpu.TILE * 128 + 1024 <= SHARED_MEMORY
            assert tile["columns"] % gpu.CHUNK == 0


@NEW
@pytest.mark.gpu_aot
@pytest.mark.parametrize("name", [*(f"qwen3 {p}" for p in examples.PRODUCTS), "gpt-oss forward with a bias"])
def test_the_kernels_compile_without_spills(name):
    cases = {name: (fn, shapes) for name, fn, shapes in configurations("grouped_matmul", "gpu")}
    reports, problem = gate_gpu(*cases[name], "h200")
    assert reports and problem is None


@NEW
@pytest.mark.gpu_aot
def test_a_compiled_product_and_its_gradients_hold_nothing_but_their_outputs():
    m, groups, k, n = examples.MODELS["mixtral"]
    like = jax.ShapeDtypeStruct

    def step(rows, matrices, sizes, dy):
        y, pull = jax.vjp(lambda r, w: grouped_matmul(r, w, sizes), rows, matrices)
        return y, *pull(dy)

    shapes = (
        like((m, k), "bfloat16"),
        like((groups, k, n), "bfloat16"),
        like((groups,), "int32"),
        like((m, n), "bfloat16"),
    )
    compiled = compile_kernel(step, *shapes, topology="h200")
    assert compiled.as_text().count("mosaic_gpu") >= 3
    memory = compiled.memory_analysis()
    assert memory.temp_size_in_bytes < 2**20 < memory.output_size_in_bytes


def test_keys_name_the_product_and_the_sum_s_length():
    facts = Facts("outer", 16, 4096, 64, 2880, "bfloat16", "bfloat16", "bfloat16")
    assert gpu.key_of(facts) == {"product": "outer", "depth": 256, "even": False}
