"""The four costs of a long context, against the example of Fu 2024: a 34B model of 50K tokens on an A100."""

from __future__ import annotations

import dataclasses

import pytest

from experiments.calculators.long_context import cache_bytes, costs
from jaxscale.errors import ConfigError
from jaxscale.hardware import chip
from jaxscale.models import TransformerConfig
from tests.truth.errors import raises_saying

YI_34B = TransformerConfig(depth=60, vocab=64000, width=7168, heads=56, kv_heads=8, head_dim=128, hidden=20480)
A100 = dataclasses.replace(chip("a100"), bandwidth=2e12, host_bandwidth=2e10)  # the round figures of the example
LONG, SHORT = 50_000, 4_000


def test_the_cache_is_counted_by_hand():
    assert cache_bytes(YI_34B, LONG) == 2 * 60 * 8 * 128 * 2 * 50_000 == 12_288_000_000
    windowed = dataclasses.replace(YI_34B, windows=(1000, None))
    assert cache_bytes(windowed, LONG) == 2 * 30 * (1000 + 50_000) * 8 * 128 * 2


def test_one_user_of_the_long_context_fits_where_some_twenty_of_the_short_one_do():
    """The paper: 1 at 50K, about 20 at 4K on 80 GB."""
    assert costs(YI_34B, A100, LONG).concurrency == 1
    assert costs(YI_34B, A100, SHORT).concurrency == 16


def test_an_answer_of_250_tokens_takes_the_papers_ten_seconds():
    """The paper: 9.8 s at 50K and 8.5 s at 4K."""
    long, short = (costs(YI_34B, A100, context).decode for context in (LONG, SHORT))
    assert long == pytest.approx(9.8, rel=0.04)
    assert short == pytest.approx(8.5, rel=0.04)
    assert long - short == pytest.approx(250 * 2 * 60 * 8 * 128 * 2 * 46_000 / 2e12)


def test_prefill_is_the_forward_pass_at_peak():
    """By hand, with 34.16e9 parameters in products. The paper: 14.1 s and 0.89 s, with attention counted at half."""
    products = 2 * 60 * (7168 * 128 * (2 * 56 + 2 * 8) + 3 * 7168 * 20480) + 2 * 7168 * 64000
    attention = 60 * 2 * 2 * 56 * 128 * (LONG + 1) / 2
    assert costs(YI_34B, A100, LONG).prefill == pytest.approx(LONG * (products + attention) / 312e12)
    assert LONG * (products + attention / 2) / 312e12 == pytest.approx(14.1, rel=0.02)
    assert costs(YI_34B, A100, SHORT).prefill == pytest.approx(0.89, rel=0.03)


def test_a_swap_goes_both_ways_and_devices_share_it():
    assert costs(YI_34B, A100, LONG).swap == pytest.approx(2 * 12.288 / 20)
    assert costs(YI_34B, A100, LONG, devices=4).swap == pytest.approx(2 * 12.288 / 80)


def test_more_devices_hold_more_than_their_share_of_users():
    one, four = (costs(YI_34B, A100, LONG, devices=n) for n in (1, 4))
    assert four.concurrency == 22
    assert four.decode == one.decode / 4


def test_weights_that_do_not_fit_say_how_many_devices_do():
    with raises_saying(ConfigError, "69 GB", "at least 2 devices"):
        costs(YI_34B, dataclasses.replace(A100, memory=40 * 10**9), LONG)
    with raises_saying(ConfigError, "context = 0"):
        costs(YI_34B, A100, 0)
