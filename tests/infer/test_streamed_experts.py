"""Experts outside the device: the tokens of the whole model with any cache, and counts that add up."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest

import jaxscale as js
from jaxscale.errors import ConfigError
from jaxscale.infer.cache import Paged
from jaxscale.infer.engine import Cached, Engine
from jaxscale.infer.streaming import ExpertLayers, LeastRecent, OnHost, RecentScores, Streamed
from jaxscale.nn import MixtureOfExperts
from jaxscale.nn.formats import NestedBits
from jaxscale.step import describe_model, make_params
from tests.infer.test_streaming import SIZES, tokens
from tests.truth.errors import raises_saying
from tests.truth.long import short

CONFIG = js.models.Transformer.Config(
    depth=4, vocab=64, width=32, heads=4, hidden=32, dense_layers=1, mlp=MixtureOfExperts(experts=8, hidden=16)
)
EARLY = dataclasses.replace(CONFIG, mlp=dataclasses.replace(CONFIG.mlp, before_attention=True))


class Counted(OnHost):
    """Counts the bytes of experts that are read."""

    bytes = 0

    def read(self, name, regions):
        out = super().read(name, regions)
        self.bytes += sum(x.nbytes for x in out.values() if name.rpartition("/")[2] in ("gate", "up", "down"))
        return out


class Zeros:
    """Arrays of zeros."""

    def __init__(self, infos):
        self.types = {i.path: i.dtype for i in jax.tree.leaves(infos)}

    def read(self, name, regions):
        return {r: np.zeros([end - begin for begin, end in r], self.types[name]) for r in regions}


def of(config):
    graphdef, infos = describe_model(config)
    params = jax.jit(make_params, static_argnums=(0, 1))(config, 0)
    params["head"]["weight"] = params["head"]["weight"] * 10  # a model that clearly prefers some tokens
    arrays = {i.path: np.array(x) for i, x in zip(jax.tree.leaves(infos), jax.tree.leaves(params), strict=True)}
    return graphdef, infos, params, arrays


@pytest.mark.long
@pytest.mark.parametrize(
    ("config", "eviction", "guess"),
    short(1, [(EARLY, RecentScores(), True), (CONFIG, LeastRecent(), True), (CONFIG, RecentScores(), False)]),
)
def test_tokens_are_those_of_the_resident_model_and_every_choice_is_counted(config, eviction, guess):
    graphdef, infos, params, arrays = of(config)
    want = tokens(Engine(Cached(graphdef, params, cache=Paged(8), **SIZES)))
    source = Counted({k: v for k, v in arrays.items() if not k.endswith("dense")})
    layers = ExpertLayers(infos, source, 12, eviction, guess)
    source.bytes = 0
    engine = Engine(Streamed(graphdef, layers, cache=Paged(8), **SIZES))
    assert tokens(engine) == want
    hits, one = layers.hits, 3 * 32 * 16 * 4
    assert hits.bytes == one * (hits.guessed + hits.missed + hits.wasted) and hits.cached > 0
    assert source.bytes - hits.bytes == (source.bytes - hits.bytes) // (3 * 32 * 32 * 4) * 3 * 32 * 32 * 4
    assert (hits.missed == 0) == (config is EARLY), "a router before attention is never wrong about its own choice"
    assert (hits.guessed > 0) == guess and (hits.wasted == 0 or config is CONFIG)
    peak, bound, whole = (getattr(engine.stepper.resident, k) for k in ("peak", "bound", "whole"))
    assert peak <= bound < whole
    layers.close()
    assert layers.resident.now == 0


def test_the_least_recent_and_the_least_scored_expert_leave():
    recent, scores, layer = LeastRecent(), RecentScores(rate=0.5, best=2), (0, 0, 0)
    for chosen, router in (
        ((0, 1), (0.4, 0.3, 0.2, 0.1)),
        ((2, 3), (0.1, 0.0, 0.5, 0.4)),
        ((3, 1), (0.0, 0.2, 0.1, 0.7)),
    ):
        for policy in (recent, scores):
            policy.saw(layer, np.array(chosen), np.array(router))
    assert sorted(range(4), key=lambda e: recent.worth((layer, e))) == [0, 2, 1, 3]
    want = [0.125 * 0.4, 0.125 * 0.3 + 0.5 * 0.2, 0.25 * 0.5, 0.25 * 0.4 + 0.5 * 0.7]
    assert [scores.worth((layer, e)) for e in range(4)] == pytest.approx(want)


def test_the_bound_counts_every_array_of_an_expert_in_few_bits():
    _, infos = describe_model(CONFIG)
    for form in (None, NestedBits(group=16)):
        stored = infos if form is None else form.infos(infos)
        run = list(stored["runs"].values())[-1]
        arrays = jax.tree.leaves([run["blocks"][0]["mlp"][name] for name in ("gate", "up", "down")])
        one = sum(i.nbytes for i in arrays) // (3 * 8)
        small, large = (ExpertLayers(stored, Zeros(stored), capacity).resident.bound for capacity in (8, 9))
        assert large - small == one


def test_what_cannot_be_cached_is_one_sentence():
    _, infos = describe_model(CONFIG)
    with raises_saying(ConfigError, "capacity = 4 experts", "set at least 8"):
        ExpertLayers(infos, OnHost({}), 4)
    with raises_saying(ConfigError, "no experts", "stream whole layers"):
        ExpertLayers(describe_model(dataclasses.replace(CONFIG, mlp=js.nn.SwiGLU, dense_layers=0))[1], OnHost({}), 4)
