"""train.batching: micro-batches of several degrees, and rows on groups of devices, take the steps of one device."""

from __future__ import annotations

import dataclasses
import re

import jax
import numpy as np
import optax
import pytest

import jaxscale as js
from jaxscale.data.batching import HDP, FlexSP, SequenceCosts, Static
from jaxscale.errors import ConfigError, LayoutError
from jaxscale.nn import RingAttention, UlyssesAttention, flash_attention
from jaxscale.step import Histograms, NextToken
from jaxscale.step.by_degree import ByDegree, dealt, sequences_of
from jaxscale.step.by_group import ByGroup, plan_of, rows_of
from jaxscale.step.prepare import check, prepare
from tests.truth.compare import assert_leaves_agree
from tests.truth.errors import raises_saying
from tests.truth.runs import Bigram, assert_same_bits, losses

MODEL = js.models.TransformerConfig(depth=1, width=16, heads=2, hidden=32, vocab=256, attention=RingAttention())
STEPS = 3
GROUPS = HDP(degrees=(1, 2, 4))
OVER = dataclasses.replace(js.Layout("data=4").resolved_rules, params={"embed": "data"})


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


@pytest.fixture(scope="module")
def alone(config, tmp_path_factory):
    return on_one_device(config, tmp_path_factory.mktemp("alone") / "run")


def on_one_device(config, folder):
    return js.fit(dataclasses.replace(config, layout=None, batching=None), run=folder, quiet=True)


def test_steps_equal_those_of_one_device(run, alone):
    agree(run, alone)


def test_steps_of_groups_equal_those_of_one_device(config, alone, tmp_path):
    layout = js.Layout("data=4", "zero1")
    run = js.fit(dataclasses.replace(config, layout=layout, batching=GROUPS), run=tmp_path / "run", quiet=True)
    agree(run, alone)
    assert run.metrics()[0]["largest_degree"] == 4


@pytest.mark.long
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"layout": js.Layout("data=4,tensor=2"), "batching": GROUPS},
        {"layout": js.Layout("data=4"), "batching": HDP(degrees=(1, 4)), "optimizer": js.optim.AdamW()},
    ],
    ids=["FlexSP", "HDP with tensor", "HDP of two degrees"],
)
def test_steps_and_evaluations_of_a_ring_equal_those_of_one_device(tmp_path, changes):
    config = settings(tmp_path / "text", **changes)
    agree(js.fit(config, run=tmp_path / "run", quiet=True), on_one_device(config, tmp_path / "alone"))


def agree(run, alone):
    """Check losses, parameters and evaluations against a run on one device without batching."""
    assert_leaves_agree(losses(run), losses(alone))
    assert_leaves_agree(jax.tree.map(np.asarray, run.state.params), jax.tree.map(np.asarray, alone.state.params))
    if run.config.eval_batches:
        assert run.metrics()[-1]["eval_loss"] == pytest.approx(alone.metrics()[-1]["eval_loss"], rel=1e-5)


def test_micro_batches_of_one_step_have_several_degrees(run, config):
    by_degree, loader = ByDegree(config, *check(config)), prepare(config).loader
    plan = by_degree.plan(loader, 0)
    assert {g.degree for groups in plan.micro_batches for g in groups} == {1, 4}
    assert run.metrics()[0]["micro_batches"] == len(plan.micro_batches) and run.metrics()[0]["largest_degree"] == 4


@pytest.mark.long
@pytest.mark.parametrize("changes", [{}, {"batching": GROUPS, "layout": js.Layout("data=4", "zero1")}], ids=str)
def test_a_resumed_run_has_the_same_bits(config, tmp_path, changes):
    config = dataclasses.replace(config, **changes)
    whole = js.fit(config, run=tmp_path / "whole", quiet=True)
    js.fit(config, run=tmp_path / "run", until=2, quiet=True)
    assert_same_bits(js.fit(config, run=tmp_path / "run", resume=True, quiet=True).state, whole.state)


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


def test_a_group_of_one_device_sends_nothing_and_others_a_ring(config):
    config = dataclasses.replace(config, layout=js.Layout("data=4"), batching=GROUPS)
    by_group, prepared = ByGroup(config, *check(config)), prepare(config)
    state, (weights, parts) = prepared.blueprint.abstract_state(), by_group.place(prepared.loader, 0)
    (grads, terms), key = jax.eval_shape(by_group.zeros_of_devices(), state.rng, state.step)
    of_degree = {row.degree: (row, batch) for row, batch in parts}
    for degree, (row, batch) in of_degree.items():
        sums = jax.tree.map(lambda x, d=degree: jax.ShapeDtypeStruct((d, *x.shape[1:]), x.dtype), (grads, terms))
        arguments = (sums, state.params, state.frozen, key, batch, np.int32(0), weights)
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(np.shape(x), x.dtype), arguments)
        with by_group.layout_of(row.first, degree):
            text = by_group.adding_row(row.first, degree).lower(*shapes).compile().as_text()
        assert bool(re.search(r"all-reduce|all-gather|permute|all-to-all|reduce-scatter", text)) == (degree > 1)
    assert set(of_degree) == {1, 4}


def test_rows_of_groups_have_each_document_once_and_take_turns():
    lengths = np.array([3, 59, 4, 2, 16, 30, 1, 9, 9, 9, 60])
    costs = SequenceCosts(1.0, 0.01, {1: 0.0, 2: 0.1, 4: 0.1}, 16)
    rows = rows_of(lengths, GROUPS, 4, 4, costs)
    assert sorted(i for row in rows for i in row.sequences) == list(range(len(lengths)))
    assert [row.number for row in rows] == list(range(len(rows)))
    assert [row.degree for row in rows] == sorted((row.degree for row in rows), reverse=True)
    for row in rows:
        assert row.first % row.degree == 0 and row.tokens in (4, 8, 12, 16)
        assert (row.tokens - 4) * row.degree < lengths[list(row.sequences)].sum() <= row.tokens * row.degree
    plan = plan_of(rows, lengths, 4, costs)
    plan.check(lengths, costs)
    assert plan.seconds < plan_of(rows_of(lengths, GROUPS, 4, 16, costs), lengths, 4, costs).seconds


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


@pytest.mark.parametrize(
    "changes",
    [{}, pytest.param({"layout": js.Layout("data=4"), "batching": GROUPS}, marks=pytest.mark.long)],
    ids=["FlexSP", "HDP"],
)
def test_evaluations_of_an_odd_length_equal_those_of_one_device(config, tmp_path, changes):
    odd = dataclasses.replace(config, seq_len=61, eval_batches=2, steps=1, **changes)
    agree(js.fit(odd, run=tmp_path / "run", quiet=True), on_one_device(odd, tmp_path / "alone"))


def test_a_plan_says_that_it_is_of_one_layout(tmp_path):
    plan = js.plan.plan_for(settings(tmp_path), "h100:4", compile="never")
    assert any("train.batching is not planned: this is a step whose rows are all on fsdp=4" in n for n in plan.notes)


@pytest.mark.parametrize(
    "changes, error, message",
    [
        ({"batching": HDP()}, LayoutError, "use data=4, or FlexSP()"),
        ({"batching": HDP(offload=True)}, ConfigError, "HDP.offload = True is planned, not trained"),
        (
            {"batching": HDP(), "layout": js.Layout("data=4", OVER)},
            LayoutError,
            "rules that shard states alone",
        ),
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
        (
            {"model": dataclasses.replace(MODEL, attention=flash_attention)},
            ConfigError,
            "set Transformer.attention = @RingAttention(), or FlexSP.degrees = (1,)",
        ),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else None,
)
def test_what_does_not_work_is_refused(tmp_path, changes, error, message):
    with raises_saying(error, message):
        check(settings(tmp_path, **changes))


def test_groups_of_one_device_compute_flash_attention(tmp_path):
    check(settings(tmp_path, model=dataclasses.replace(MODEL, attention=flash_attention), batching=FlexSP((1,))))
