"""Mixers with a state of fixed size pass the checks of mixers: documents, layouts, decoding with a cache."""

from __future__ import annotations

import pytest

from jaxscale.errors import ConfigError
from jaxscale.models import BlockConfig, TransformerConfig
from jaxscale.nn.mixers import (
    MLGRU,
    GatedDeltaNet,
    GatedLinearAttention,
    KimiDeltaAttention,
    LinearAttention,
    Mamba2,
    RetNet,
)
from jaxscale.testing import check_mixer


@pytest.mark.parametrize(
    "mixer",
    [
        GatedDeltaNet(key_heads=2, value_dim=4, taps=3),
        *(
            pytest.param(m, marks=pytest.mark.long)
            for m in (
                KimiDeltaAttention(value_dim=4, rank=3),
                Mamba2(groups=2, state=4),
                LinearAttention(key_dim=4),
                GatedLinearAttention(rank=2),
                RetNet(value_dim=4),
                MLGRU(channels=24),
            )
        ),
    ],
    ids=lambda m: type(m).__name__,
)
def test_mixers_keep_documents_apart_and_decode_on_every_layout(mixer):
    check_mixer(mixer)


@pytest.mark.parametrize(
    "mixer,message",
    [
        (GatedDeltaNet(heads=4, key_heads=3), "GatedDeltaNet has 3 key_heads, which must divide its 4 heads"),
        (Mamba2(heads=4, groups=3), "Mamba2 has 3 groups, which must divide its 4 heads"),
    ],
)
def test_heads_that_do_not_divide_are_refused(mixer, message):
    with pytest.raises(ConfigError, match=message):
        TransformerConfig(width=16, heads=2, blocks=(BlockConfig(mixer=mixer),)).validate()


def test_flops_are_those_of_the_products():
    config = TransformerConfig(width=16, heads=2, head_dim=8)
    got = KimiDeltaAttention(rank=4).products(config, 3, 5, None)
    assert got["residual_mid"] == 2 * 15 * 16 * 16
    assert got["qkv"] == 2 * 15 * (16 * (3 * 16 + 2) + 2 * 16 * 4 + 2 * 4 * 16)
