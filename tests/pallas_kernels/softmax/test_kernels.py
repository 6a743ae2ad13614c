"""The kernels in their interpreters, with race detection: values, gradients and edges."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import dispatch
from pallas_kernels.dispatch import JAX_VERSION, KernelError, interpreted
from pallas_kernels.softmax import gpu, gpu_rows, gpu_twice, logsumexp, softmax, tpu
from tests.pallas_kernels.softmax.cases import (
    OPS,
    assert_as_exact_as,
    assert_same,
    cotangent,
    edge_rows,
    gradient_truth,
    normal,
    truth,
    units,
    value_and_gradient,
)

ROUNDINGS = 2.0
"""Units in the last place allowed a kernel: exp2 of a rounded product, and a product with 1 / sum, round once more than
`exp` and a division do."""

needs_gpu_interpreter = pytest.mark.skipif(
    JAX_VERSION < (0, 11), reason="the Mosaic GPU interpreter came with jax 0.11"
)


@pytest.fixture
def one_block(monkeypatch):
    """Simulate a GPU so small that a block takes several rows and refills its slots."""
    monkeypatch.setattr(dispatch, "_INTERPRETED_CORES", 1)
    monkeypatch.setattr(gpu_rows, "_REGISTERS", 512)


@pytest.fixture
def short_vmem(monkeypatch):
    """Simulate VMEM so small that rows are read twice, in chunks."""
    monkeypatch.setattr(tpu, "WHOLE_ROWS", 0)
    monkeypatch.setattr(tpu, "_tile", lambda *_: {"block": 1, "chunk": 128})


def check(op: str, implementation: str, x: jax.Array) -> None:
    """Check value and gradient of a named, interpreted implementation against float64 and the plain ones."""
    f, plain = OPS[op]
    g = cotangent(op, x)
    with interpreted(races=True):
        y, dx = value_and_gradient(lambda x: f(x, implementation=implementation), x, g)
    theirs, plain_dx = value_and_gradient(plain, x, g)
    assert_as_exact_as(y, theirs, truth(op, x), "value", ROUNDINGS)
    assert_as_exact_as(dx, plain_dx, gradient_truth(op, x, g), "gradient", ROUNDINGS + units(op))


@pytest.mark.parametrize(
    ("op", "shape", "dtype"),
    [
        ("softmax", (11, 131), jnp.float32),
        ("log_softmax", (2, 9, 300), jnp.bfloat16),
        ("logsumexp", (3, 1), jnp.float32),
    ],
    ids=str,
)
def test_the_tpu_kernel_reads_ragged_rows_once(op, shape, dtype):
    check(op, "mosaic_tpu", normal(shape, dtype))


@pytest.mark.parametrize("op", OPS)
def test_the_tpu_kernel_reads_long_rows_twice(op, short_vmem):
    check(op, "mosaic_tpu", normal((17, 300)))


@pytest.mark.parametrize("op", OPS)
def test_the_tpu_kernel_answers_every_edge_as_jax_nn_does(op, short_vmem):
    f, plain = OPS[op]
    with interpreted():
        assert_same(f(edge_rows(130), implementation="mosaic_tpu"), plain(edge_rows(130)))


@needs_gpu_interpreter
@pytest.mark.parametrize(
    ("op", "shape", "dtype"),
    [
        ("softmax", (3, 128), jnp.float32),  # less than a tile
        ("softmax", (5, 2048 * 2 + 128), jnp.float32),  # a warpgroup without a last piece, which is not whole
        ("log_softmax", (3, 4096 + 256), jnp.bfloat16),
        ("log_softmax", (2, 2, 1024), jnp.float16),  # a piece of one tile
        ("logsumexp", (2, 2048 * 5 + 384), jnp.float32),
    ],
    ids=str,
)
def test_the_gpu_kernel_reads_rows_once_and_refills_their_slots(op, shape, dtype, one_block, monkeypatch):
    monkeypatch.setattr(gpu, "_once_tile", lambda *_: {"warpgroups": 2})
    monkeypatch.setattr(gpu, "_stream_tile", lambda *_: {"warpgroups": 2, "slots": 2, "splits": 2})
    check(op, "mosaic_gpu", normal(shape, dtype))


@needs_gpu_interpreter
@pytest.mark.parametrize(("op", "shape"), [("softmax", (3, 2048 * 5 + 128)), ("log_softmax", (2, 2048 * 2))], ids=str)
def test_the_gpu_kernel_reads_long_rows_forwards_and_backwards(op, shape, one_block, monkeypatch):
    monkeypatch.setattr(gpu, "most_columns", lambda *_: 0)
    monkeypatch.setattr(gpu, "_WARPGROUPS", 2)
    monkeypatch.setattr(gpu_twice, "SHARED_MEMORY", 0)  # two slots are the fewest
    check(op, "mosaic_gpu", normal(shape))


@needs_gpu_interpreter
@pytest.mark.parametrize("op", ["softmax", "log_softmax"])
def test_the_gpu_kernel_splits_a_few_long_rows_among_blocks(op, monkeypatch):
    monkeypatch.setattr(gpu, "most_columns", lambda *_: 0)
    f, plain = OPS[op]
    x = normal((2, 2048 + 128))
    with interpreted(races=True):
        assert_as_exact_as(f(x, implementation="mosaic_gpu"), plain(x), truth(op, x), units=ROUNDINGS)


@needs_gpu_interpreter
@pytest.mark.parametrize("op", OPS)
def test_the_gpu_kernel_answers_every_edge_as_jax_nn_does(op, one_block):
    f, plain = OPS[op]
    with interpreted():
        assert_same(f(edge_rows(128), implementation="mosaic_gpu"), plain(edge_rows(128)))


def test_rows_are_dealt_out_so_that_they_fit_and_fill_the_machine():
    for dtype, inputs, columns in (
        ("bfloat16", 1, 1024),
        ("bfloat16", 1, 50304),
        ("bfloat16", 1, 110592),
        ("bfloat16", 2, 53248),
        ("float32", 1, 55296),
        ("float32", 2, 128),
    ):
        assert columns <= gpu_rows.most_columns(dtype, inputs)
        plan = gpu_rows.Plan(10_000, gpu_rows.cut_for(columns, dtype, inputs, 4), inputs, 132)
        assert plan.depth * plan.row_bytes + gpu_rows.RESERVED <= gpu_rows.SHARED_MEMORY
        assert plan.resident * (plan.depth * plan.row_bytes + gpu_rows.RESERVED) <= gpu_rows._PER_SM
        assert plan.cut.pieces * plan.cut.lines >= plan.cut.total


@needs_gpu_interpreter
@pytest.mark.parametrize(
    ("columns", "words"),
    [(1000, "a multiple of 128 columns"), (128 * 217, "shared memory")],
    ids=["ragged", "backward"],
)
def test_the_gpu_kernel_refuses_an_unsupported_case_with_the_reason(columns, words):
    y = jnp.zeros((1, columns))
    with interpreted(), pytest.raises(KernelError, match=words):
        jax.grad(lambda y: softmax(y, implementation="mosaic_gpu").sum())(y)


@pytest.mark.parametrize("implementation", ["mosaic_tpu", pytest.param("mosaic_gpu", marks=needs_gpu_interpreter)])
def test_a_mask_is_left_to_xla(implementation):
    x = normal((3, 128))
    with interpreted(), pytest.raises(KernelError, match="a mask is left to XLA"):
        logsumexp(x, where=x > 0, implementation=implementation)
