"""The parity table: every backend is as exact as a plain implementation, and the committed table shows it."""

from __future__ import annotations

import pytest

from pallas_kernels import dispatch, parity
from tests.pallas_kernels.comparison import Case
from tests.pallas_kernels.parity import BACKENDS, backends, cases, committed, measure
from tests.truth.long import short

CASES = {c.name: c for c in cases()}
HERE = tuple(b for b in BACKENDS if b != "mosaic_gpu" or dispatch.JAX_VERSION >= (0, 11))


def _sample(dtype: str) -> list[Case]:
    """Return the fast cases: without float16, large arrays, and ops that have such tests of their own."""
    slow = (
        "flash_attention",
        "chunked_recurrence",
        "fftconv",
        "grouped_experts",
        "grouped_matmul",
        "grouped_stored_matmul",
        "routed_experts",
    )
    return [c for c in CASES.values() if c.dtype == dtype and "large" not in c.feature and c.op not in slow]


@pytest.mark.parametrize(
    ("backend", "dtype"),
    short(0, [*((backend, "float32") for backend in HERE), pytest.param("xla", "bfloat16", marks=pytest.mark.long)]),
)
def test_no_error_is_more_than_twice_a_plain_implementations(backend, dtype):
    rows = [measure(case, backend) for case in _sample(dtype)]
    wrong = [row.cells for row in rows if row.verdict == "WRONG"]
    assert not wrong
    assert any(row.error is not None for row in rows)


def test_the_committed_table_has_every_row():
    have = committed()
    want = {(c.op, c.feature, c.dtype, c.direction, b) for c in CASES.values() for b in backends(c.op)}
    assert set(have) == want, "run python -m tests.pallas_kernels.parity on jax 0.11 or newer"


def test_the_committed_table_holds_nothing_wrong():
    assert {cells[-1].partition(":")[0] for cells in committed().values()} == {"ok", "not supported"}


def test_the_table_can_be_queried():
    rows = parity(op="blockwise", backend="mosaic_tpu", dtype="bfloat16")
    assert rows and {r["backend"] for r in rows} == {"mosaic_tpu"} and {r["dtype"] for r in rows} == {"bfloat16"}
    assert all(float(r["error"]) >= 0 for r in rows if r["verdict"] == "ok")


def test_a_question_about_no_column_is_refused():
    with pytest.raises(dispatch.KernelError, match="no column 'ops'.*'op'"):
        parity(ops="softmax")
    with pytest.raises(dispatch.KernelError, match="no op 'sofmax'.*did you mean 'softmax'"):
        parity(op="sofmax")
