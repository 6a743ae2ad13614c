"""train.batching = FlexSP(): micro-batches of several degrees take the same steps as one device."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import optax
import pytest

import jaxscale as js
from jaxscale.data.batching import HDP, FlexSP, SequenceCosts, Static
from jaxscale.errors import ConfigError, LayoutError
from jaxscale.nn import RingAttention, UlyssesAttention
from jaxscale.step import Histograms, NextToken
from jaxscale.step.by_degree import ByDegree, dealt, sequences_of
from jaxscale.step.prepare import check, prepare
from tests.truth.compare import assert_leaves_agree
from tests.truth.errors import raises_saying
from tests.truth.runs import Bigram, assert_same_bits, losses

MODEL = js.models.TransformerConfig(depth=1, width=16, heads=2, hidden=32, vocab=256, attention=RingAttention())
STEPS = 3


class Other(NextToken):
    """Another objective."""


def settings(folder, **changes) -> js.TrainConfig:
    """A run over documents of 2 to 60 tokens, most of them short, of which a device holds 16."""
    random = np.random.default_rng(0)
    folder.mkdir(exist_ok=True)
    for i in range(120):
        length = 59 if i % 8 == 0 else int(random.integers(1, 15))
        (folder / f"{i}.txt").write_text("".join(random.choice(list("abcd "), length)))
    plain = dict(
        model=MODEL, layout=js.Layout("fsdp=4"), batching=FlexSP(degrees=(1, 4)), seq_len=64, batch_size=4, steps=STEPS,
        packing="fit", eval_batches=1, optimizer=optax.sgd(0.3), checkpoint_every=2, prompt=None,
        data=js.data.text_files(str(folder / "*.txt")),
    )  # fmt: skip
    return js.TrainConfig(**{**plain, **changes})


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    return settings(tmp_path_factory.mktemp("text"), model=Bigram(vocab=256, width=16), eval_batches=0)


@pytest.fixture(scope="module")
def run(config, tmp_path_factory):
    return js.fit(config, run=tmp_path_factory.mktemp("by_degree") / "run", quiet=True)


def test_steps_equal_those_of_one_device(run, config, tmp_path):
    agree_with_one_device(run, config, tmp_path)


@pytest.mark.long
def test_steps_and_evaluations_of_a_ring_equal_those_of_one_device(tmp_path):
    config = settings(tmp_path / "text")
    agree_with_one_device(js.fit(config, run=tmp_path / "run", quiet=True), config, tmp_path)


def agree_with_one_device(run, config, folder):
    """Check losses, parameters and evaluations against a run on one device without batching."""
    alone = js.fit(dataclasses.replace(config, layout=None, batching=None), run=folder / "alone", quiet=True)
    assert_leaves_agree(losses(run), losses(alone))
    assert_leaves_agree(jax.tree.map(np.asarray, run.state.params), jax.tree.map(np.asarray, alone.state.params))
    if config.eval_batches:
        assert run.metrics()[-1]["eval_loss"] == pytest.approx(alone.metrics()[-1]["eval_loss"], rel=1e-5)


def test_micro_batches_of_one_step_have_several_degrees(run, config):
    by_degree, loader = ByDegree(config, *check(config)), prepare(config).loader
    plan = by_degree.plan(loader, 0)
    assert {g.degree for groups in plan.micro_batches for g in groups} == {1, 4}
    assert run.metrics()[0]["micro_batches"] == len(plan.micro_batches) and run.metrics()[0]["largest_degree"] == 4


@pytest.mark.long
def test_a_resumed_run_has_the_same_bits(run, config, tmp_path):
    js.fit(config, run=tmp_path / "run", until=2, quiet=True)
    assert_same_bits(js.fit(config, run=tmp_path / "run", resume=True, quiet=True).state, run.state)


@pytest.mark.long
def test_a_row_on_one_device_is_sent_to_no_other(tmp_path):
    config = settings(tmp_path / "text")
    by_degree, prepared = ByDegree(config, *check(config)), prepare(config)
    state, (weights, parts) = prepared.blueprint.abstract_state(), by_degree.place(prepared.loader, 0)
    sums, key = jax.eval_shape(by_degree.zeros(), state.rng, state.step)
    permutes = {}
    for degree, batch in dict(parts).items():
        arguments = (sums, state.params, state.frozen, key, batch, np.int32(0), weights)
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(np.shape(x), x.dtype), arguments)
        with by_degree.settings[degree].layout:
            text = by_degree.adding(degree).lower(*shapes).compile().as_text()
        permutes[degree] = sum(text.count(f"collective-permute{end}(") for end in ("", "-start"))
    assert permutes[1] == 0 < permutes[4]


def test_documents_are_dealt_whole_and_once(config):
    by_degree, loader = ByDegree(config, *check(config)), prepare(config).loader
    rows = loader.batch_at(1)
    sequences = sequences_of(rows["segment_ids"])
    assert sequences[:, 1].sum() == (rows["segment_ids"] > 0).sum()
    pairs = []
    for groups in by_degree.plan(loader, 1).micro_batches:
        one = by_degree.settings[groups[0].degree]
        batch = dealt(rows, sequences, groups, one.batch_size, one.seq_len)
        for begin, length in sequences_of(batch["segment_ids"]):
            tokens, positions = (batch[k].reshape(-1)[begin : begin + length] for k in ("tokens", "positions"))
            assert positions.tolist() == list(range(length))
            pairs.append(tokens.tolist())
    flat = rows["tokens"].reshape(-1)
    assert sorted(pairs) == sorted(flat[begin : begin + length].tolist() for begin, length in sequences)


def test_a_plan_says_that_it_is_of_one_layout(tmp_path):
    plan = js.plan.plan_for(settings(tmp_path), "h100:4", compile="never")
    assert any("train.batching is not planned: this is a step whose rows are all on fsdp=4" in n for n in plan.notes)


@pytest.mark.parametrize(
    "changes, error, message",
    [
        ({"batching": HDP()}, ConfigError, "FlexSP(), the batch planner that trains"),
        ({"batching": Static(2)}, ConfigError, "give the mesh that size of 'context'"),
        ({"layout": None}, ConfigError, "train.layout is None"),
        ({"layout": js.Layout("fsdp=2,context=2")}, LayoutError, "does not work with context=2"),
        ({"layout": js.Layout("data=2,pipeline=2")}, LayoutError, "does not work with pipeline=2"),
        ({"layout": js.Layout("tensor=2")}, LayoutError, "neither"),
        ({"algorithm": js.step.MeZO()}, ConfigError, "trains by Backprop(), not MeZO"),
        ({"objective": Other()}, ConfigError, "not Other"),
        ({"segments": False}, ConfigError, "train.segments = True"),
        ({"accumulate": 2}, ConfigError, "leave out train.accumulate = 2"),
        ({"histograms": Histograms()}, ConfigError, "no histograms"),
        ({"batching": FlexSP(degrees=(1, 3))}, LayoutError, "groups of 3 devices do not divide"),
        ({"batching": FlexSP(capacity=15)}, ConfigError, "the nearest that works is 16"),
        ({"batching": FlexSP(costs=SequenceCosts(1.0, 0.1, {1: 0.0, 2: 0.1}, 16))}, ConfigError, "at most 32"),
        ({"model": dataclasses.replace(MODEL, attention=UlyssesAttention())}, LayoutError, "heads"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else None,
)
def test_what_does_not_work_is_refused(tmp_path, changes, error, message):
    with raises_saying(error, message):
        check(settings(tmp_path, **changes))
