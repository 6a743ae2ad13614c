"""`jaxscale plan --search`: what it finds is the best there is, by trying all of it, and trains as it is."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import math

import pytest

import jaxscale as js
from jaxscale.cli import main
from jaxscale.commands.plan import progress
from jaxscale.errors import ConfigError, LayoutError
from jaxscale.hardware import Topology, topology
from jaxscale.layout import Pipeline
from jaxscale.layout.mesh import parse_mesh
from jaxscale.nn import MixtureOfExperts, RingAttention, UlyssesAttention, flash_attention
from jaxscale.plan import Space, plan_for, search
from jaxscale.plan.error_bars import error_bar
from jaxscale.plan.planner import Compiled
from jaxscale.plan.search_formulas import walk_formulas
from jaxscale.plan.space import axes_of, candidates, meshes
from tests.truth.errors import raises_saying
from tests.truth.runs import Bigram, write_gin
from tests.truth.traces import traced_once

pytestmark = pytest.mark.once

searching = importlib.import_module("jaxscale.plan.search")
MODEL = js.models.TransformerConfig(depth=4, width=64, heads=4, vocab=256, attention=flash_attention)
CONFIG = js.TrainConfig(model=MODEL, batch_size=16, seq_len=64)
SMALL = Space(policies=("none", "full"), accumulate=(1, 2), schedules=("1f1b",), per_stage=(1,))
once = pytest.fixture(traced_once, scope="module", autouse=True)


def devices_of(memory: int, count: int = 4) -> Topology:
    """H100s with little memory, and as slow as the model is small."""
    slow = {"float32": 1e11, "bfloat16": 1e11}
    chip = dataclasses.replace(topology("h100:8").chip, memory=memory, usable=None, flops=slow)
    return Topology(f"h100:{count}", chip, (count,))


@pytest.fixture(scope="module")
def every():
    """Seconds and bytes of every candidate, worked out one by one."""
    target, result = devices_of(2**40, 2), []
    for c in candidates(CONFIG, target.devices, SMALL):
        with contextlib.suppress(LayoutError):
            plan = plan_for(c.config, target, compile="never")
            result.append((plan.step.total, plan.bytes))
    return sorted(result)


def test_meshes_are_all_factorings():
    result = [tuple(m.values()) for m in meshes(64, ("data", "fsdp", "tensor"))]
    assert len(result) == len(set(result)) == math.comb(6 + 2, 2) and all(math.prod(m) == 64 for m in result)


def test_axes_are_those_that_the_model_can_be_cut_along():
    of = lambda **changes: set(axes_of(dataclasses.replace(CONFIG, model=dataclasses.replace(MODEL, **changes))))  # noqa: E731
    assert of() == {"pipeline", "data", "fsdp", "tensor"}
    assert of(attention=RingAttention()) - of() == {"context"}
    assert of(mlp=MixtureOfExperts()) - of() == {"expert"}


@pytest.mark.long
@pytest.mark.parametrize("share", [1.0, 0.5, 0.1])
def test_what_is_found_is_the_best_of_all(every, share):
    """Where all of them fit, half of them, a few."""
    sizes = sorted(size for _, size in every)
    memory = sizes[int(share * (len(sizes) - 1))]
    fitting = [(t, size) for t, size in every if size <= memory]
    upper = error_bar(CONFIG, devices_of(memory, 2), memory).bytes(memory)[1]
    result = search(CONFIG, devices_of(upper, 2), space=SMALL, compile="never", within=1.5, more=99)
    assert result.winner.step.total == fitting[0][0] and result.winner.fits
    near = [(t, size) for t, size in fitting if t <= 1.5 * fitting[0][0]]
    front = [(t, size) for i, (t, size) in enumerate(near) if all(size < other for _, other in near[:i])]
    assert [(f.step.total, f.bytes) for f in result.front] == front


@pytest.mark.long
def test_what_cannot_be_the_fastest_is_not_worked_out(every):
    result = search(CONFIG, devices_of(2**40, 2), space=SMALL, compile="never", within=1)
    assert result.winner.step.total == every[0][0] and result.worked_out < result.considered == len(every)


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "axes", "experts"),
    [
        ("v5p:2x2x1", ("fsdp", "tensor"), None),
        ("h100:4", ("fsdp", "tensor"), None),
        ("v5e:2x1*2", ("pipeline", "data", "fsdp"), None),
        ("v5e:2x2", ("data", "expert"), MixtureOfExperts(experts=4, top_k=2)),
    ],
)
def test_the_winner_is_that_of_an_exhaustive_search(name, axes, experts):
    model = MODEL if experts is None else dataclasses.replace(MODEL, mlp=experts)
    config, space = dataclasses.replace(CONFIG, model=model), dataclasses.replace(SMALL, axes=axes, accumulate=(1, 4))
    target = topology(name)
    plans = []
    for c in candidates(config, target.devices, space, target.slices):
        with contextlib.suppress(LayoutError, ConfigError):
            plans.append(plan_for(c.config, target, compile="never"))
    upper = sorted(plan.bytes_range[1] for plan in plans)[len(plans) // 3]
    small = dataclasses.replace(target, chip=dataclasses.replace(target.chip, memory=upper, usable=None))
    best = min(plan.step.total for plan in plans if plan.bytes_range[1] <= small.chip.capacity)
    result = search(config, small, space=space, compile="never")
    assert result.winner.step.total == best and result.winner.fits


@pytest.fixture
def compiled(monkeypatch):
    """The plans for a compiler whose programs take half as long again, the first of which does not fit."""
    calls = []

    def pretend(config, target, *, compile, **_):
        plan = plan_for(config, target, compile="never")
        if compile == "never":
            return plan
        calls.append(plan)
        slow = dataclasses.replace(plan.step, compute=plan.step.compute * 1.5)
        size = plan.bytes if len(calls) > 1 else target.chip.memory + 1
        return dataclasses.replace(plan, compiled=Compiled(size, slow, 0.0), basis="compiled")

    monkeypatch.setattr(searching, "plan_for", pretend)
    monkeypatch.setattr(searching, "why_not_compiled", lambda target: None)
    return calls


@pytest.mark.long
def test_at_most_four_are_compiled_and_the_fastest_of_those_that_fit_wins(compiled):
    result = search(CONFIG, devices_of(2**30), space=SMALL, within=2)
    assert 1 < result.compiled == len(compiled) <= 4
    assert result.winner.compiled is not None and result.winner.bytes == compiled[1].bytes
    assert "does not fit" in str(result)


@pytest.mark.long
def test_candidates_that_were_left_out_are_traced_if_none_that_was_compiled_fits(compiled, monkeypatch):
    walks = []

    def walk(*arguments):
        walks.append(walk_formulas(*arguments))
        return walks[-1]

    monkeypatch.setattr(searching, "walk_formulas", walk)
    result = search(CONFIG, devices_of(2**30), space=SMALL, within=2, more=0, compiles=1)
    assert [one.left > 0 for one in walks] == [True, False] and len(walks[1].candidates) > len(walks[0].candidates)
    assert result.winner.fits and len(compiled) == 2


def test_ctrl_c_prints_the_best_so_far(capfd):
    with pytest.raises(KeyboardInterrupt), progress() as tell:
        tell("evaluating", 1, 9, "fsdp=8, 2 s a step")
        raise KeyboardInterrupt
    assert "the best so far: fsdp=8, 2 s a step; no file was written" in capfd.readouterr().err


def test_where_nothing_fits_the_closest_is_named():
    with raises_saying(ConfigError, "nothing fits", "97.7 KiB", "the closest", "times as many devices"):
        search(CONFIG, devices_of(100_000), space=SMALL, compile="never")
    odd = dataclasses.replace(CONFIG, batch_size=3)
    with raises_saying(ConfigError, "no mesh of 7 devices"):
        search(odd, devices_of(2**30, 7), space=SMALL, compile="never")


@pytest.mark.long
def test_layouts_that_training_refuses_are_counted_and_not_chosen():
    model = dataclasses.replace(MODEL, kv_heads=2, attention=UlyssesAttention())
    space = Space(axes=("data", "context"), policies=("none", "full"), accumulate=(1,))
    result = search(dataclasses.replace(CONFIG, model=model), devices_of(2**40), space=space, compile="never", within=9)
    assert result.refused == 2 and result.considered == 6  # context=4, of 2 key heads, with either policy
    assert "2 that training refuses" in str(result) and result.to_json()["refused"] == 2
    assert not [f for f in result.front if "context=4" in f.candidate.config.layout.mesh]
    short = dataclasses.replace(MODEL, positions=js.models.Learned(16))
    with raises_saying(ConfigError, "64 tokens", "16 learned positions"):
        search(dataclasses.replace(CONFIG, model=short), devices_of(2**40), space=space, compile="never")


@pytest.mark.long
def test_the_winner_is_written_as_a_file_that_trains_as_it_is(tmp_path, capfd, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(searching, "Space", lambda: SMALL)
    gin = write_gin(tmp_path / "small.gin")
    bindings = [
        "--gin.Transformer.depth=2",
        "--gin.Transformer.vocab=256",
        "--gin.train.steps=1",
        "--gin.train.batch_size=4",
    ]
    command = ["plan", str(gin), "--topology", "cpu:2", "--search", "--json", "--write", "winner.gin"]
    assert main([*command, *bindings]) == 0
    out, err = capfd.readouterr()
    data = json.loads(out)
    assert "bounding" in err and "evaluating" in err
    assert data["how"].startswith("analytic") and data["front"][0]["mesh"] == data["winner"]["mesh"]
    assert main(["train", "winner.gin", "--run", "run", "--quiet"]) == 0
    run = js.Run(tmp_path / "run")
    assert run.config.layout.mesh == data["winner"]["mesh"] and len(run.metrics()) == 1
    assert run.config.model.memory == data["front"][0]["memory"]


@pytest.mark.long
def test_the_axis_over_slices_is_chosen():
    space = dataclasses.replace(SMALL, axes=("data", "fsdp"), policies=("none",), accumulate=(1,))
    chosen = search(CONFIG, "v5p:2x2x1*2", space=space, compile="never")
    alone = {}
    for across in space.axes:
        config = dataclasses.replace(CONFIG, layout=js.Layout("data=-1", across=across))
        alone[across] = search(config, "v5p:2x2x1*2", space=space, compile="never")
        assert alone[across].winner.config.layout.across == across
    best = min(alone.values(), key=lambda result: result.winner.step.total)
    assert chosen.winner.config.layout == best.winner.config.layout
    assert chosen.considered == sum(result.considered for result in alone.values())


def test_layouts_over_slices_divide_one_axis():
    layouts = {c.config.layout for c in candidates(CONFIG, 8, SMALL, slices=2)}
    assert {one.across for one in layouts} == {"pipeline", "data", "fsdp"}
    assert all(parse_mesh(one.mesh)[one.across] % 2 == 0 for one in layouts)


def test_candidates_gather_and_cut_the_vocabulary_as_the_run():
    of_run = dataclasses.replace(CONFIG.layout, pipeline=Pipeline("1f1b", gather="step", vocabulary="whole"))
    config = dataclasses.replace(CONFIG, layout=of_run)
    schedules = {c.config.layout.schedule for c in candidates(config, 8, SMALL) if c.config.layout.stages > 1}
    assert schedules and {(one.gather, one.vocabulary) for one in schedules} == {("step", "whole")}


def test_what_cannot_be_searched_is_one_sentence():
    with raises_saying(ConfigError, "compiles = 0", "--analytic"):
        search(CONFIG, "h100:8", compiles=0)


OTHER = dataclasses.replace(CONFIG, model=Bigram(vocab=512, width=64))


def test_a_model_without_formulas_is_searched_by_tracing_its_steps():
    space = Space(axes=("data", "fsdp"), accumulate=(1, 2))
    result = search(OTHER, devices_of(2**40), space=space, compile="never", within=99)
    plans = [plan_for(c.config, devices_of(2**40), compile="never") for c in candidates(OTHER, 4, space)]
    assert result.considered == result.worked_out == result.fitting == len(plans) == 6
    assert any("of the traced step" in note for note in result.winner.notes)
    assert result.winner.step.total == min(p.step.total for p in plans)
    least = min(plans, key=lambda p: p.bytes)
    assert result.front[-1].bytes == least.bytes
    text = " ".join(str(result).split())
    assert "Bigram: 6 steps were traced in" in text and "its own" in text and "were not traced" not in text
    assert result.to_json()["tracing"] == result.tracing > 0
    upper = least.bytes_range[1]  # fits at the upper end of the error bar, and so does nothing larger
    assert {f.bytes for f in search(OTHER, devices_of(upper), space=space, compile="never").front} == {least.bytes}
    with raises_saying(ConfigError, "nothing fits", "the closest", "may take"):
        search(OTHER, devices_of(upper - 1), space=space, compile="never")


def test_tracing_ends_when_its_time_is_over_and_what_was_left_out_is_said():
    space = Space(axes=("data", "fsdp"), accumulate=(1, 2))
    result = search(OTHER, devices_of(2**40), space=space, compile="never", tracing=0)
    assert result.worked_out == 1 and result.winner.config.accumulate == 1
    assert "5 candidates were not traced, and a faster one may be among them" in " ".join(str(result).split())


def test_nothing_is_written_unless_a_file_is_named(tmp_path, capfd, monkeypatch):
    monkeypatch.chdir(tmp_path)
    space = Space(axes=("data",), policies=("none",), accumulate=(1,))
    monkeypatch.setattr(searching, "Space", lambda: space)
    gin = write_gin(tmp_path / "small.gin")
    before = sorted(tmp_path.iterdir())
    command = ["plan", str(gin), "--topology", "cpu:2", "--search", "--analytic", "--gin.train.batch_size=4"]
    assert main(command) == 0
    assert sorted(tmp_path.iterdir()) == before and "add --write winner.gin" in capfd.readouterr().out
    assert main([*command, "--write", "winner.gin"]) == 0
    assert (tmp_path / "winner.gin").is_file() and "written to winner.gin" in capfd.readouterr().out


def test_the_planned_file_is_not_overwritten(tmp_path, capfd):
    gin = write_gin(tmp_path / "small.gin")
    before = gin.read_text()
    assert main(["plan", str(gin), "--topology", "cpu:8", "--search", "--write", str(gin)]) == 2
    assert gin.read_text() == before and "choose another" in capfd.readouterr().err
    assert main(["plan", str(gin), "--topology", "cpu:8", "--search", "--write", str(tmp_path / "no" / "w.gin")]) == 2
    assert "there is no folder" in capfd.readouterr().err


@pytest.mark.long
def test_the_last_compilation_is_for_the_smallest_and_what_a_compiler_refuses_is_passed_over(monkeypatch):
    target, quiet = devices_of(2**40), lambda *_: None
    result = searching.front(
        walk_formulas(list(candidates(CONFIG, 4, SMALL)), target, 99.0, quiet, None, 99).candidates
    )
    assert len(result) > 3
    calls = []

    def plan(config, target, **_):
        calls.append(config)
        if len(calls) == 1:
            raise LayoutError("the compiler does not like it")
        planned = plan_for(config, target, compile="never")
        return dataclasses.replace(planned, compiled=Compiled(target.chip.capacity + 1, None, 0.0))

    monkeypatch.setattr(searching, "plan_for", plan)
    _, done, refused = searching._compiled(result, target, 3, quiet, None)
    assert calls == [result[0].candidate.config, result[1].candidate.config, result[-1].candidate.config]
    assert sorted(done) == [1, len(result) - 1] and "does not like it" in refused[0]


def test_a_misspelt_option_is_named_before_the_one_that_is_missing(tmp_path, capfd):
    gin = str(write_gin(tmp_path / "small.gin"))
    assert main(["plan", gin, "--topolgy", "cpu:8"]) == 2
    assert "--topolgy" in capfd.readouterr().err
    assert main(["plan", gin]) == 2
    assert "--topology v5p" in capfd.readouterr().err
