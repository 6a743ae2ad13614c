"""Sampling: the same choice from the same seed, and the model's own likeliest tokens at temperature 0."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from flax import nnx

import jaxscale as js
from jaxscale.errors import ConfigError, DataError, RunError
from jaxscale.infer import sample, sample_text
from jaxscale.train import describe_model, make_params
from tests.truth.errors import raises_saying
from tests.truth.layouts import in_force
from tests.truth.runs import STEPS, bigram

CONFIG = js.models.Transformer.Config(depth=1, vocab=64, width=32, heads=2, hidden=64)
WINDOW = 8


@pytest.fixture(scope="module")
def model():
    graphdef, _ = describe_model(CONFIG)
    # a head ten times as large: this model has likings of its own, without being trained
    params = jax.jit(make_params, static_argnums=(0, 1))(CONFIG, 0)
    params["head"]["weight"] = params["head"]["weight"] * 10
    return graphdef, params


@pytest.fixture(scope="module")
def stored(finished_run):
    """The finished run as another process finds it."""
    return js.load(finished_run.path)


def draw(model, tokens=12, prompt=(1, 2, 3), **options):
    return sample(*model, np.asarray(prompt), tokens, window=WINDOW, **options).tolist()


def test_the_same_seed_draws_the_same(model):
    assert draw(model, seed=3) == draw(model, seed=3)


def test_another_seed_draws_another(model):
    assert draw(model, seed=3) != draw(model, seed=4)


def test_no_temperature_needs_no_seed(model):
    assert draw(model, temperature=0, seed=3) == draw(model, temperature=0, seed=4)


def test_no_temperature_takes_the_likeliest_token_of_a_forward_pass(model):
    forward = jax.jit(lambda params, ids: nnx.merge(model[0], params)(ids))
    context = [1, 2, 3]
    while len(context) < WINDOW:
        seen = np.zeros((1, WINDOW), np.int32)
        seen[0, : len(context)] = context  # what follows is not seen: attention is causal
        context.append(int(np.argmax(forward(model[1], seen)[0, len(context) - 1])))
    for _ in range(7):
        context.append(int(np.argmax(forward(model[1], np.asarray([context[-WINDOW:]], np.int32))[0, -1])))
    assert context[3:] == draw(model, temperature=0)


def test_one_likeliest_token_is_no_choice(model):
    assert draw(model, top_k=1, seed=5) == draw(model, temperature=0)


def test_as_many_likeliest_tokens_as_there_are_is_every_token(model):
    assert draw(model, top_k=1000) == draw(model)


def test_a_longer_draw_begins_like_a_shorter_one(model):
    assert draw(model, tokens=12)[:4] == draw(model, tokens=4)


def test_a_prompt_longer_than_the_window_is_its_end(model):
    assert draw(model, prompt=range(20)) == draw(model, prompt=range(12, 20))


def test_a_layout_does_not_change_the_likeliest_tokens(model):
    layout = js.Layout("data=2,fsdp=2,tensor=2")
    _, infos = describe_model(CONFIG)
    with in_force(layout):
        params = jax.device_put(model[1], js.layout.shardings_of(infos, layout))
    assert draw((model[0], params), temperature=0, layout=layout) == draw(model, temperature=0)


@pytest.mark.parametrize(
    "option, words",
    [
        ({"tokens": 0}, ["tokens = 0", "at least 1"]),
        ({"temperature": -0.1}, ["temperature = -0.1", "0 takes the likeliest"]),
        ({"temperature": float("nan")}, ["temperature = nan"]),
        ({"top_k": 0}, ["top_k = 0", "left out"]),
        ({"seed": -1}, ["seed = -1", "from 0"]),
        ({"seed": 2**32}, [f"seed = {2**32}", "from 0"]),
    ],
)
def test_what_cannot_be_drawn_is_said(model, option, words):
    with raises_saying(ConfigError, *words):
        draw(model, **option)


def test_a_sample_begins_with_its_prompt(finished_run):
    assert finished_run.sample("def f", 8).startswith("def f")


def test_an_empty_prompt_starts_a_document(finished_run):
    assert isinstance(finished_run.sample("", 8), str)


def test_a_run_in_memory_and_its_checkpoint_say_the_same(finished_run, stored):
    assert stored.sample("def ", 8, temperature=0) == finished_run.sample("def ", 8, temperature=0)


def test_a_run_and_the_function_are_the_same_sample(stored):
    assert stored.sample("def ", 8, temperature=0.5, seed=2) == sample_text(stored, "def ", 8, temperature=0.5, seed=2)


def test_a_prompt_that_no_id_stands_for_is_refused(stored):
    with raises_saying(DataError, "NUL"):
        stored.sample("\0", 8)


def test_a_model_of_no_text_cannot_continue_one(tmp_path):
    run = js.fit(js.TrainConfig(**bigram(steps=1)), run=tmp_path / "run", quiet=True)
    with raises_saying(ConfigError, "token id 102", "below 32", "not text"):
        run.sample("def ", 8)


def test_a_run_without_a_checkpoint_cannot_be_sampled(stored, tmp_path):
    (tmp_path / "config.gin").write_text((stored.path / "config.gin").read_text())
    with raises_saying(RunError, str(tmp_path), "no finished checkpoint"):
        js.Run(tmp_path).sample("def ")


def test_an_earlier_checkpoint_can_be_read_for_sampling(stored):
    assert stored.params(STEPS)["embed"]["weight"].shape == (256, 32)
