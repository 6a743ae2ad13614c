"""The walk over chunks of groups on Hopper: interpreted, against float64; what it serves; what it compiles to."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxscale.testing.ops import allowed, error_of
from pallas_kernels import tiles
from pallas_kernels.aot import compile_kernel
from pallas_kernels.dispatch import JAX_VERSION, Target, interpreted
from pallas_kernels.gate import configurations
from pallas_kernels.grouped_matmul import reference
from pallas_kernels.grouped_stored_matmul import examples, gpu, grouped_stored_matmul
from pallas_kernels.grouped_stored_matmul.inputs import Facts, checked
from tests.pallas_kernels.grouped_stored_matmul.cases import SIZES, arrays
from tests.truth.long import short

NEW = pytest.mark.skipif(JAX_VERSION < (0, 11), reason="kernels for GPUs need jax 0.11")
H200 = Target("NVIDIA H200", "cuda")
ROWS = sum(SIZES)


def facts_of(m: int, groups: int, k: int, n: int, transposed: bool = False) -> Facts:
    weight = examples.weight_of(groups, k, n, "int8")
    rows = jnp.zeros((m, n if transposed else k), jnp.bfloat16)
    return checked(rows, weight, np.zeros(groups, np.int32), transposed, None)[0]


@NEW
@pytest.mark.parametrize(
    ("form", "sizes", "rows", "transposed", "matrices"),
    short(
        2,
        [
            ("mxfp4", SIZES, ROWS + 10, False, 2),  # an empty group, rows after the last one, chunks of 2, 2 and 1
            ("int8", (0, 0, 3, 0, 1), 4, True, 9),  # fewer rows than groups: one is left out
            ("int8", (0, 0, 0, 180, 0), 180, False, 1),
            ("int3, groups of 64", SIZES, ROWS, True, 2),
            ("uint4, zero points", SIZES, ROWS + 1, False, 9),
            ("nvfp4", (0, 0, 0, 0, 0), 7, False, 2),
            ("kmeans3", SIZES, ROWS, False, 9),
        ],
    ),
)
def test_each_row_is_multiplied_with_its_groups_matrix(form, sizes, rows, transposed, matrices, monkeypatch, capsys):
    k, n = 128, 64
    monkeypatch.setattr(gpu, "MOST", matrices * k * n * 2)
    x, weight, _, dense = arrays(form, k, n, rows, transposed, "bfloat16")
    x = jnp.where(jnp.arange(rows)[:, None] < sum(sizes), x, jnp.inf)
    options = {"transposed": transposed, "implementation": "xla_chunks"}
    with interpreted(races=True), tiles.trying("grouped_matmul", {"columns": 64, "slots": 2, "buffers": 2}):
        got = jax.jit(lambda x, w, s: grouped_stored_matmul(x, w, s, **options))(x, weight, np.asarray(sizes, np.int32))
    wide = np.asarray(x.astype(jnp.float32), np.float64)
    want = reference.matmul(wide, dense, np.asarray(sizes), transposed=transposed)
    rounded = np.asarray(jnp.asarray(dense).astype(jnp.bfloat16), np.float64)
    plain = reference.matmul(wide, rounded, np.asarray(sizes), transposed=transposed)
    plain = np.asarray(jnp.asarray(plain).astype(jnp.bfloat16), np.float64)
    assert not np.asarray(got, np.float64)[sum(sizes) :].any()
    assert error_of(got, want) <= allowed(error_of(plain, want), jnp.dtype(jnp.bfloat16))
    assert "RACE" not in capsys.readouterr().out


def test_chunks_have_as_many_groups_as_rows_could_reach_and_their_matrices_at_most_so_many_bytes():
    for model, chunks in (("gpt-oss", (4, 8)), ("qwen3", (3, 43)), ("mixtral down", (8, 1))):
        facts = facts_of(*examples.MODELS[model])
        assert gpu.chunks_of(facts) == chunks and chunks[1] * facts.each.k * facts.each.n * 2 <= gpu.MOST
    assert gpu.chunks_of(facts_of(8, 128, 2048, 768)) == (1, 8)
    assert gpu.chunks_of(facts_of(8, 2, 8192, 16384)) == (2, 1)  # a matrix has more bytes than that


@NEW
def test_what_does_not_fill_the_device_or_has_no_kernel_is_left_to_xla():
    assert gpu.supported(H200, facts=facts_of(*examples.MODELS["qwen3"])) is None
    assert "whose 16 tiles leave most of 132" in gpu.supported(H200, facts=facts_of(*examples.MODELS["mixtral down"]))
    assert gpu.supported(H200, facts=facts_of(8192, *examples.MODELS["mixtral down"][1:])) is None
    assert "multiples of 64 for n, not 72" in gpu.supported(H200, facts=facts_of(8, 2, 128, 72))


@NEW
@pytest.mark.gpu_aot
@pytest.mark.parametrize("name", ["qwen3 int8", "gpt-oss mxfp4"])
def test_a_compiled_product_for_hopper_holds_a_chunk_of_dense_matrices(name):
    fn, shapes = {name: rest for name, *rest in configurations("grouped_stored_matmul", "gpu")}[name]
    compiled = compile_kernel(fn, *shapes, topology="h200")
    m, groups, k, n = examples.MODELS[name.split()[0]]
    chunks, each = gpu.chunks_of(facts_of(m, groups, k, n))
    assert compiled.memory_analysis().temp_size_in_bytes < each * k * n * 2 * 1.05 < groups * k * n
    text = compiled.as_text()
    assert text.count('custom_call_target="mosaic_gpu') == 1 and f'"known_trip_count":{{"n":"{chunks}"}}' in text
