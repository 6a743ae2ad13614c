"""Integers that do not fit in int32, positions at its limits, and arguments that are not numbers."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.cut_cross_entropy import linear_cross_entropy
from pallas_kernels.decode_attention import decode_attention
from pallas_kernels.errors import KernelError
from pallas_kernels.flash_attention import flash_attention
from pallas_kernels.flash_attention.masks import PARTIAL, SKIP, Mask, Tokens, tile_table, visible
from tests.truth.long import short

X = np.ones((1, 2, 1, 4), np.float32)
ENDS = np.array([[-(2**31), -(2**31) + 1, 0, 2**31 - 2, 2**31 - 1]])


@pytest.mark.parametrize(
    "call",
    [
        lambda wide: flash_attention(X, X, X, segment_ids=wide),
        lambda wide: flash_attention(X, X, X, positions=wide, causal=True),
        lambda wide: decode_attention(X, X, X, positions=wide),
        lambda wide: decode_attention(X, X, X, positions=np.zeros((1, 2), np.int32), tables=wide),
        lambda wide: linear_cross_entropy(X[0, :, 0], np.ones((9, 4), np.float32), wide[0]),
    ],
)
def test_an_integer_that_int32_does_not_hold_is_named(call):
    with pytest.raises(KernelError, match=r"holds 4294967297, .*2147483647"):
        call(np.array([[0, 2**32 + 1]]))


def test_a_traced_type_wider_than_int32_is_converted_by_its_owner():
    ids = jnp.ones((1, 2), jnp.uint32)
    with pytest.raises(KernelError, match=r"segment_ids is uint32.*segment_ids\.astype\('int32'\)"):
        jax.eval_shape(lambda ids: flash_attention(X, X, X, segment_ids=ids), ids)
    jax.eval_shape(lambda ids: flash_attention(X, X, X, segment_ids=ids.astype("int32")), ids)


@pytest.mark.parametrize("causal, window", [(True, None), (True, 3), (False, 2), (True, 2**31 - 1), (False, 2**31 - 1)])
def test_masks_are_right_at_both_ends_of_int32(causal, window):
    rows = jnp.asarray(ENDS, jnp.int32)
    behind = ENDS[:, :, None] - ENDS[:, None, :]
    want = (behind >= 0) if causal else np.ones_like(behind, bool)
    if window is not None:
        want &= abs(behind) < window
    mask, tokens, n = Mask(causal, window), Tokens(None, None, rows, rows), ENDS.shape[1]
    assert np.array_equal(visible(mask, tokens, jnp.arange(n), jnp.arange(n), s=n, t=n), want)
    table = np.asarray(tile_table(mask, tokens, s=n, t=n, q_tile=1, k_tile=1))
    assert np.array_equal(table > PARTIAL, want[0]) and np.array_equal(table > SKIP, want[0])


@pytest.mark.parametrize("name, value", [(n, v) for n in ("scale", "softcap") for v in (np.nan, np.inf, -1.0)])
@pytest.mark.parametrize("op", [flash_attention, decode_attention])
def test_a_scale_or_a_cap_is_a_finite_number(op, name, value):
    more = {} if op is flash_attention else {"positions": np.zeros((1, 2), np.int32)}
    with pytest.raises(KernelError, match=f"{name} has to be finite .*{value}"):
        op(X, X, X, **{name: value}, **more)


@pytest.mark.parametrize("implementation", short(1, ["xla", "dense"]))
def test_a_query_that_is_no_number_has_a_log_sum_exp_that_is_none(implementation):
    q = jnp.asarray(X).at[0, 0].set(jnp.nan)
    out, lse = flash_attention(q, X, X, return_lse=True, implementation=implementation)
    assert np.isnan(lse[0, 0]).all() and np.isnan(out[0, 0]).all() and np.isfinite(lse[0, 1]).all()
    out, lse = decode_attention(q, X, X, positions=np.array([[1, 1]]), implementation=implementation)
    assert np.isnan(lse[0, 0]).all() and np.isnan(out[0, 0]).all() and np.isfinite(lse[0, 1]).all()


def test_a_window_of_positions_that_differ_between_examples_has_a_table_of_each():
    positions = np.stack([np.arange(8), np.arange(8)[::-1]]).astype(np.int32)
    table = tile_table(
        Mask(window=3), Tokens(None, None, positions, positions), s=8, t=8, q_tile=2, k_tile=2, each=True
    )
    assert table.shape == (2, 4, 4) and (table[0] == table[1]).all() and table[0, 0, 3] == SKIP
