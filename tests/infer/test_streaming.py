"""Streamed layers: the same tokens as with the whole model on the device, and never more bytes than two layers."""

from __future__ import annotations

import jax
import numpy as np
import pytest

import jaxscale as js
from jaxscale.errors import ConfigError, LayoutError
from jaxscale.infer.cache import Paged
from jaxscale.infer.engine import Cached, Engine, Request
from jaxscale.infer.sampling import Sampling
from jaxscale.infer.streaming import Layers, OnHost, Streamed, stream_model
from jaxscale.step import describe_model, make_params
from tests.truth.errors import raises_saying
from tests.truth.long import short

CONFIG = js.models.Transformer.Config(depth=7, vocab=64, width=32, heads=4, kv_heads=2, hidden=64, windows=(4, None))
PROMPTS = (tuple(range(5, 25)), (7, 8))
SIZES = dict(rows=2, length=40, budget=16)


@pytest.fixture(scope="module")
def model():
    graphdef, infos = describe_model(CONFIG)
    params = jax.jit(make_params, static_argnums=(0, 1))(CONFIG, 0)
    params["head"]["weight"] = params["head"]["weight"] * 10  # a model that clearly prefers some tokens
    return graphdef, infos, params


@pytest.fixture(scope="module")
def arrays(model):
    _, infos, params = model
    return {i.path: np.array(x) for i, x in zip(jax.tree.leaves(infos), jax.tree.leaves(params), strict=True)}


def tokens(engine, **sampling):
    """The tokens that an engine generates for the prompts."""
    settings = Sampling(**{"max_tokens": 12, "temperature": 0.0} | sampling)
    for i, prompt in enumerate(PROMPTS):
        engine.submit(Request(prompt, settings, i))
    results = [[] for _ in PROMPTS]
    while engine.busy:
        for event in engine.step():
            results[event.id].append(event.token)
    return results


@pytest.fixture(scope="module")
def resident(model):
    graphdef, _, params = model
    return tokens(Engine(Cached(graphdef, params, cache=Paged(8), **SIZES)))


class Watched(OnHost):
    """Notes how many bytes of arrays there are whenever something is read."""

    def __init__(self, params):
        super().__init__(params)
        self.before, self.seen = {id(x) for x in jax.live_arrays()}, []

    def read(self, name, regions):
        self.seen.append(sum(x.nbytes for x in jax.live_arrays() if id(x) not in self.before))
        return super().read(name, regions)


@pytest.fixture(scope="module")
def streamed(model, arrays, resident):
    """An engine, the tokens it generated, and its source."""
    graphdef, infos, _ = model
    source = Watched(arrays)
    engine = Engine(Streamed(graphdef, Layers(infos, source), cache=Paged(8), **SIZES))
    del source.seen[:]
    return engine, tokens(engine), source


@pytest.mark.long
def test_the_likeliest_tokens_are_those_of_the_resident_model(streamed, resident):
    engine, results, _ = streamed
    assert len({run for run, _ in engine.stepper.layers.order}) == 2  # layers of two kinds, and some more of one
    assert results == resident


@pytest.mark.long
def test_scored_prompts_are_those_of_the_resident_model(model, arrays):
    graphdef, infos, params = model
    streaming = Engine(Streamed(graphdef, Layers(infos, OnHost(arrays)), cache=Paged(8), **SIZES))
    scores = []
    for engine in (Engine(Cached(graphdef, params, cache=Paged(8), **SIZES)), streaming):
        engine.submit(Request(PROMPTS[0], Sampling(max_tokens=1, logprobs=2), 0, scored=True))
        events = []
        while engine.busy:  # the prompt is longer than a step
            events += engine.step()
        scores.append(events[0].prompt)
    assert len(scores[0]) == len(PROMPTS[0]) - 1
    np.testing.assert_allclose(*([s.logprob for s in one] for one in scores), atol=1e-5)


@pytest.mark.long
def test_no_more_than_two_layers_are_ever_on_the_device(streamed, arrays):
    engine, _, source = streamed
    now, peak, bound, whole = engine.stepper.resident
    stays = sum(x.nbytes for name, x in arrays.items() if not name.startswith("runs/"))
    group = sum(x[0].nbytes for name, x in arrays.items() if name.startswith("runs/0/"))
    assert bound == stays + 2 * group < whole == sum(x.nbytes for x in arrays.values())
    assert stays <= now <= peak <= bound  # the first layer of the next step is there, or on its way
    # all arrays of this process, of which the cache and a step's own few are no parameters
    cache = sum(x.nbytes for x in jax.tree.leaves(engine.stepper._states))
    assert stays + group <= max(source.seen) <= bound + cache + 16 * 1024


def test_a_window_of_more_layers_is_filled_and_never_exceeded(model, arrays):
    window = 3
    layers = Layers(model[1], OnHost(arrays), window=window)
    order, peaks = [], []
    for _ in range(2):
        for run, repeat, params in layers.each():
            order.append((run, repeat))
            jax.block_until_ready([coming.result() for _, coming in layers._coming])
            peaks.append(layers.resident.now)
            names = sorted(n for n in arrays if n.startswith(f"runs/{run}/"))
            for x, name in zip(jax.tree.leaves(params), names, strict=True):
                np.testing.assert_array_equal(x[0], arrays[name][repeat])
    assert order == 2 * layers.order and max(peaks) == layers.resident.peak <= layers.resident.bound
    two = Layers(model[1], OnHost(arrays))
    assert layers.resident.peak > two.resident.bound and len(layers._coming) == window - 1
    next(iter(layers.each()))  # abandoned: the next pass begins with the first layer again
    assert next(iter(layers.each()))[:2] == layers.order[0]
    layers.close()
    assert layers.resident.now == 0


def test_a_window_of_all_layers_is_refused(model, arrays):
    count = len(Layers(model[1], OnHost(arrays)).order)
    with raises_saying(ConfigError, f"a window of {count} streamed layers: must be 2 to {count - 1}", "parts"):
        Layers(model[1], OnHost(arrays), window=count)


def test_closing_deletes_all_parameters(model, arrays):
    layers = Layers(model[1], OnHost(arrays))
    next(iter(layers.each()))
    layers.close()
    assert layers.resident.now == 0


@pytest.mark.long
def test_a_layout_streams_the_same_tokens(model, arrays, resident):
    graphdef, infos, _ = model
    layout = js.Layout("tensor=2")
    layers = Layers(infos, OnHost(arrays), layout)
    assert tokens(Engine(Streamed(graphdef, layers, layout=layout, cache=Paged(8), **SIZES))) == resident


def test_stages_are_refused(model, arrays):
    graphdef, infos, _ = model
    with raises_saying(LayoutError, "pipeline"):
        Streamed(graphdef, Layers(infos, OnHost(arrays)), layout=js.Layout("pipeline=2"), **SIZES)


@pytest.mark.parametrize("source", short(1, ["host", "disk"]))
def test_a_run_is_streamed_from_memory_and_from_its_checkpoint(finished_run, source, caplog):
    run = js.load(finished_run.path)
    text = run.generate("def ", max_tokens=8, temperature=0, stream_layers=source).text
    assert "layers were streamed: at most 0.1 of 0.1 MiB" in caplog.text
    assert text == run.generate("def ", max_tokens=8, temperature=0).text


def test_a_draft_and_streamed_layers_cannot_be_combined(finished_run):
    run = js.load(finished_run.path)
    with raises_saying(ConfigError, "draft", "stream_layers"):
        run.generate("def ", draft=run, stream_layers="host")


def test_an_unknown_source_is_refused(finished_run):
    with raises_saying(ConfigError, "stream_layers = 'dsk'", "'disk'"):
        stream_model(js.load(finished_run.path), "dsk")
    with raises_saying(ConfigError, "stream_layers = 'host:all'", "'host:4'"):
        stream_model(js.load(finished_run.path), "host:all")
