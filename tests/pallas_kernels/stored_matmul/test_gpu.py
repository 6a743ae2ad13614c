"""The Hopper kernel: interpreted, against float64 and a plain product in bfloat16; compiling without spills."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.dispatch import JAX_VERSION, KernelError, Target, interpreted
from pallas_kernels.gate import gate_gpu
from pallas_kernels.stored_matmul import Integers, gpu, stored_matmul
from pallas_kernels.stored_matmul.examples import FORMATS, case, shapes
from pallas_kernels.stored_matmul.inputs import checked
from tests.pallas_kernels.stored_matmul.test_kernels import check

NEW = pytest.mark.skipif(JAX_VERSION < (0, 11), reason="kernels for GPUs need jax 0.11")
HOPPER = Target("NVIDIA H200", "cuda")
SERVED = [
    name
    for name, options in FORMATS.items()
    if JAX_VERSION >= (0, 11)
    and gpu.supported(HOPPER, facts=checked(*case(None, shapes(1024, 256, **options), 16)[1], False, None)) is None
]


@NEW
@pytest.mark.parametrize(
    ("name", "m"),
    [
        ("int4, groups of 128", 7),
        *(pytest.param("int4, groups of 128", m, marks=pytest.mark.long) for m in (1, 16, 128)),
        *(pytest.param(name, 16, marks=pytest.mark.long) for name in SERVED),
    ],
)
def test_the_product_is_as_exact_as_a_plain_one(name, m, capsys):
    check(name, m, False, implementation="mosaic_gpu")
    assert "RACE" not in capsys.readouterr().out


@NEW
@pytest.mark.gpu_aot
@pytest.mark.parametrize(
    "name", [SERVED[0], *(pytest.param(n, marks=pytest.mark.long) for n in SERVED[1:])] if SERVED else []
)
def test_the_kernel_compiles_without_spills(name):
    reports, problem = gate_gpu(*case(gpu.run, shapes(4096, 14336, **FORMATS[name]), 16), "h200")
    assert reports and problem is None


@NEW
@pytest.mark.parametrize(
    ("options", "dtype", "words"),
    [
        ({}, "float32", "float32 is left to XLA"),
        ({"word": "uint32"}, "bfloat16", "packed in uint8, not uint32"),
        ({"group": 4}, "bfloat16", "scales for 4 rows each are not 1 to 4 of a tile of 128 rows"),
        ({"numbers": Integers(3)}, "bfloat16", "takes codes of 4 or 8 bits; those of 3 are left to XLA"),
    ],
    ids=["float32", "words", "group", "bits"],
)
def test_what_has_no_kernel_raises_with_the_reason(options, dtype, words):
    weight = shapes(1024, 256, **FORMATS["int4, groups of 128"] | options)
    with interpreted(), pytest.raises(KernelError, match=words):
        jax.eval_shape(
            lambda x, w: stored_matmul(x, w, implementation="mosaic_gpu"),
            jax.ShapeDtypeStruct((4, 1024), dtype),
            weight,
        )
    assert jax.eval_shape(stored_matmul, jax.ShapeDtypeStruct((4, 1024), jnp.bfloat16), weight).shape == (4, 256)


@pytest.mark.parametrize(
    ("blocks", "tiles", "splits"), [(112, 32, 2), (32, 32, 8), (300, 32, 1), (16, 86, 2), (1, 4, 1), (2, 8, 2)]
)
def test_blocks_share_the_rows_of_a_matrix_where_they_would_leave_multiprocessors_idle(blocks, tiles, splits):
    assert gpu.splits_of(132, blocks, tiles) == splits
