"""Sparse attention that continues from a dense step, against float64 NumPy."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from jaxscale.errors import ConfigError
from jaxscale.nn.rettention import dense_attention, neighbours, sparse_attention


def weights(q, k):
    scores = np.exp(np.einsum("bshd,bthd->bhst", np.float64(q), np.float64(k)) / np.sqrt(q.shape[-1]))
    return scores, scores.sum(-1, keepdims=True)


def test_a_sparse_step_equals_the_papers_formulas_and_at_the_dense_steps_inputs_the_dense_step():
    generator = np.random.default_rng(0)
    early, late = (generator.normal(size=(3, 2, 9, 2, 4)).astype(np.float32) for _ in range(2))
    columns = neighbours(9, 3, 1)

    def run(early, late):
        out, history = dense_attention(*early, columns)
        return out, sparse_attention(*early, columns, history), sparse_attention(*late, columns, history)

    dense, same, later = jax.jit(run)(early, late)
    reads = np.zeros((9, 9))
    np.put_along_axis(reads, columns, 1, 1)
    powers, total = weights(*early[:2])
    full = np.einsum("bhst,bthd->bshd", powers / total, early[2])
    share = (powers * reads).sum(-1, keepdims=True) / total
    residual = full - np.einsum("bhst,bthd->bshd", powers * reads / total, early[2])
    np.testing.assert_allclose(dense, full, atol=1e-5)
    np.testing.assert_allclose(same, full, atol=1e-5)
    powers, _ = weights(*late[:2])
    sparse = powers * reads / (powers * reads).sum(-1, keepdims=True)
    want = np.einsum("bhst,bthd->bshd", share * sparse, late[2]) + residual
    np.testing.assert_allclose(later, want, atol=1e-5)


def test_every_query_reads_as_many_keys_and_no_key_twice():
    columns = neighbours(7, 3, 2)
    assert columns.tolist()[0] == [0, 1, 2, 3, 4] and columns.tolist()[6] == [0, 1, 4, 5, 6]
    assert all(len(set(row)) == 5 for row in columns.tolist())
    with pytest.raises(ConfigError, match="a window of 6 and 2 sinks in a sequence of 7 tokens"):
        neighbours(7, 6, 2)
