"""The table of choices is what dispatch chooses."""

from __future__ import annotations

import pytest

from pallas_kernels.dispatch import JAX_VERSION
from tests.pallas_kernels import choices
from tests.truth.long import short

OPS = ["fftconv", *dict.fromkeys(case.op for case in choices.cases() if case.op != "fftconv")]


@pytest.mark.skipif(JAX_VERSION < (0, 11), reason="kernels for GPUs need jax 0.11")
@pytest.mark.parametrize("op", short(1, OPS))
def test_an_ops_table_is_what_dispatch_chooses(op):
    assert choices.section(op) in choices.TABLE.read_text(encoding="utf-8")
