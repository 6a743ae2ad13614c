"""`jaxscale plan`: one settings file on hardware that is not here, by arithmetic, and compiled where that can be."""

from __future__ import annotations

import dataclasses
import json
import math
import random
import re
from pathlib import Path

import jax
import pytest

import jaxscale as js
from jaxscale.cli import main
from jaxscale.errors import ConfigError, LayoutError
from jaxscale.hardware import topology
from jaxscale.nn import MixtureOfExperts, RingAttention, UlyssesAttention, flash_attention
from jaxscale.optim import AdamW8bit, Lion
from jaxscale.plan import Restarts, compare, estimate, plan_for
from jaxscale.plan.by_tracing import memory_of
from jaxscale.plan.planner import Compiled, _assumed, _compared_with_compiled, count_of, groups
from jaxscale.plan.restarts import best_interval, slowdown
from jaxscale.step import blueprint_of, check
from jaxscale.units import human_bytes
from tests.truth.errors import raises_saying

EXPERIMENTS = Path(__file__).parents[2] / "experiments"
TINY = js.TrainConfig(
    model=js.models.TransformerConfig(depth=4, width=32, heads=2, vocab=64, attention=flash_attention),
    layout=js.Layout("fsdp=4,tensor=2"),
    batch_size=16,
    seq_len=32,
)


def plan(config=TINY, hardware="h100:8", **more):
    return plan_for(config, hardware, compile="never", **more)


def test_bytes_are_the_estimates_and_their_groups_add_up_to_it():
    result = plan()
    memory, _ = memory_of(TINY, topology("h100:8"))
    assert result.bytes == memory.device == sum(groups(result.memory).values())
    assert result.fits and result.hardware.chip.capacity == topology("h100:8").chip.capacity


def test_a_number_of_tokens_takes_days_energy_and_money():
    result = plan(tokens=3e9, price=2.0, watts=500)
    seconds = 3e9 / result.step.tokens_per_second
    assert math.isclose(result.budget.ideal_days, seconds / 86400) and result.budget.days > result.budget.ideal_days
    assert math.isclose(result.budget.device_hours, result.budget.days * 24 * 8)
    assert math.isclose(result.budget.kilowatt_hours, result.budget.device_hours / 2)
    assert math.isclose(result.budget.cost, result.budget.device_hours * 2)
    own = plan(tokens=3e9).budget
    assert own.cost is None and math.isclose(own.kilowatt_hours, own.device_hours * 0.7)
    assert plan(hardware="v5p:2x2x2", tokens=3e9).budget.kilowatt_hours is None  # nobody says what one takes


def test_a_plan_says_that_it_fits_what_it_assumes_and_why_energy_is_left_out():
    result = plan(hardware="v5p:2x2x2", tokens=3e9)
    upper, capacity = human_bytes(result.bytes_range[1]), human_bytes(result.hardware.chip.capacity)
    lines = re.sub(r"\s+", " ", str(result))
    assert f"fits: at most {upper} of {capacity} a device in nine of ten cases" in lines
    assert "assumed: products with weights reach 82% of the data sheet's rate" in lines
    left_out = "energy is left out: v5p has no power figure; give --watts"
    assert left_out in lines
    assert "energy is left out" not in str(plan(hardware="v5p:2x2x2", tokens=3e9, watts=500))
    assert "energy is left out" not in str(plan(hardware="v5p:2x2x2"))
    done = dataclasses.replace(result, compiled=Compiled(2**20, None, 1.0))
    assert f"fits: 1 MiB of {capacity} a device, as compiled" in re.sub(r"\s+", " ", str(done))
    shares = {"matmul": 0.5, "attention": 0.2, "nvlink": 0.7, "overlap": 0.9}
    assert _assumed(shares) == (
        "assumed: products with weights reach 50%, attention's products reach 20%, nvlink reaches 70% of the data "
        "sheet's rates; communication can overlap with 90% of the arithmetic"
    )


def test_failures_and_checkpoints_take_what_a_simulated_run_loses():
    """Daly's expectation against runs whose failures are drawn; a step is a stretch of training and its checkpoint."""
    draw, mean, restart = random.Random(0), 1000.0, 50.0
    for every, save in ((200.0, 30.0), (600.0, 100.0)):
        clock, segments = 0.0, 20_000
        for _ in range(segments):
            left, need = draw.expovariate(1 / mean), every + save
            while left < need:  # a failure, while training, saving or restarting
                clock += left
                left, need = draw.expovariate(1 / mean), restart + every + save
            clock += need
        assert slowdown(every, save, mean, restart) == pytest.approx(clock / segments / every, rel=0.02)


def test_the_best_interval_loses_least():
    for save, between in ((1.0, 1e4), (30.0, 1000.0), (300.0, 1000.0)):
        best = best_interval(save, between)
        least = min(slowdown(best * f, save, between, 60.0) for f in (0.5, 0.7, 0.8, 1.25, 1.5, 2.0))
        assert slowdown(best, save, between, 60.0) < least
    assert best_interval(1.0, 1e6) == pytest.approx(math.sqrt(2e6), rel=2e-3)  # Young's, where saving is short


def test_a_run_with_restarts_is_as_worked_out_by_hand():
    # 8 devices that fail every 80 hours each, a run every 10; saved hourly at 1 kB/s; training goes on after 6 minutes
    result = plan(tokens=3e12, price=2.0, restarts=Restarts(80, 1000, 3600, 360)).budget
    weights = sum(math.prod(x.shape) for x in jax.tree.leaves(blueprint_of(TINY)[0].infos))
    assert result.checkpoint == pytest.approx(3 * 4 * weights, abs=64)  # float32, AdamW's two moments, and counters
    d, t, m, r = result.checkpoint / 1000, 3600, 36000, 360
    assert (result.save, result.every, result.between, result.restart) == (d, t, m, r)
    factor = m * math.exp(r / m) * (math.exp((t + d) / m) - 1) / t
    assert result.days == pytest.approx(result.ideal_days * factor) and factor > 1 + d / t
    assert result.failures == pytest.approx(result.days * 2.4)
    assert result.cost == pytest.approx(result.days * 24 * 8 * 2)
    words = str(plan(tokens=3e12, restarts=Restarts(80, 1000, 3600, 360)))
    assert "if nothing fails" in words and "a failure every 10.0 hours" in words and "every 60.0 minutes" in words


def test_more_devices_fail_more_often_and_llama_3s_run_as_often_as_it_did():
    assert Restarts().between(16384) == pytest.approx(54 * 86400 / 419)
    assert Restarts().between(8) == 2048 * Restarts().between(16384)
    with raises_saying(ConfigError, "fails every 4 s", "save more often"):
        plan(tokens=1e9, restarts=Restarts(device_mtbf=0.01))
    with raises_saying(ConfigError, "Restarts.restart_time", "above 0"):
        Restarts(restart_time=-1)


@pytest.mark.parametrize("name", ["gb200:72", "b300:8", "mi355x:8x4"])
def test_a_gpu_that_nothing_can_be_compiled_for_is_planned_by_arithmetic(name):
    result = plan_for(dataclasses.replace(TINY, batch_size=72), name)
    assert result.compiled is None and result.basis.startswith("analytic: XLA's compiler has no description of ")
    assert result.fits and 0 < result.step.mfu < 1


@pytest.mark.parametrize("text, count", [("300B", 3e11), ("1.5T", 1.5e12), ("2e12", 2e12), ("512", 512), ("10m", 1e7)])
def test_tokens_are_counted_as_people_write_them(text, count):
    assert count_of(text) == count


@pytest.mark.parametrize(
    "n, words",
    [(0, "0 B"), (1000, "1000 B"), (2**20 - 1, "1 MiB"), (1000 * 2**20, "1000 MiB"), (1023 * 2**20, "1023 MiB")]
    + [(2**30 - 2**18, "1 GiB"), (round(15.75 * 2**30), "15.8 GiB"), (3 * 2**39, "1.5 TiB"), (2**52, "4096 TiB")],
)
def test_bytes_are_three_digits_without_an_exponent(n, words):
    assert human_bytes(n) == words


def test_a_mesh_need_not_take_all_devices():
    rest = plan(dataclasses.replace(TINY, layout=js.Layout("fsdp=-1,tensor=2")), "h100:8x4")
    assert rest.config.layout.mesh == "fsdp=16,tensor=2" and rest.config.layout.devices == 32
    less = plan(TINY, "h100:8x4")
    assert less.step.total == plan().step.total and "uses 8 of the 32 devices" in " ".join(less.notes)


def test_more_devices_take_less_time_and_the_slower_network_shows():
    config = dataclasses.replace(TINY, batch_size=1024, layout=js.Layout("fsdp=-1"))
    one, many = plan(config, "h100:8"), plan(config, "h100:8x4")
    assert math.isclose(many.step.compute * 4, one.step.compute)
    assert [t.link for t in one.step.traffic] == ["nvlink"] and many.step.traffic[0].link == "infiniband"


def test_slices_are_crossed_by_the_axis_that_the_layout_names():
    layout = js.Layout("data=2,fsdp=8", across="data")
    result = plan(dataclasses.replace(TINY, layout=layout, batch_size=32), "v5p:2x2x2*2")
    assert {t.axes: t.link for t in result.step.traffic}[("data",)] == "dcn"
    assert {t.axes: t.link for t in result.step.traffic}[("fsdp",)] == "ici"


def test_a_hardware_file_of_ones_own_plans(tmp_path):
    fields = topology("h100:8").chip.to_json() | {"name": "mine", "memory": 1000, "usable": None}
    (tmp_path / "mine.json").write_text(json.dumps(fields))
    result = plan(hardware=f"{tmp_path / 'mine.json'}:8")
    assert not result.fits and "does not fit" in str(result)
    assert plan_for(TINY, f"{tmp_path / 'mine.json'}:8").basis.startswith("analytic: ")


def test_a_plan_prints_as_tables_html_and_json():
    result = plan(tokens=1e9, price=1.0)
    words = ("memory of a device", "a step's time", "sent by a device", "fsdp", "tensor", "MFU", "device-hours")
    assert not [w for w in words if w not in str(result)]
    assert "<pre" in result._repr_mimebundle_()["text/html"]
    data = json.loads(json.dumps(result.to_json()))
    assert data["how"].startswith("analytic") and data["step"]["total"] == result.step.total
    assert sum(data["memory"].values()) - data["memory"]["host"] == data["bytes"]


def test_the_command_takes_failures_and_checkpoints_and_says_what_it_assumes(capfd):
    command = [
        "plan",
        str(EXPERIMENTS / "demo.gin"),
        "--topology",
        "h100:8",
        "--analytic",
        "--gin.Layout.mesh='data=8'",
    ]
    options = ["--device-mtbf", "800", "--restart-time", "5", "--write-speed", "0.5", "--save-every", "20"]
    assert main([*command, "--json", "--tokens", "1T", *options]) == 0
    budget = json.loads(capfd.readouterr().out)["budget"]
    assert (budget["between"], budget["restart"], budget["every"]) == (360_000, 300, 1200)
    assert budget["save"] == budget["checkpoint"] / 0.5e9 and budget["days"] > budget["ideal_days"]
    assert main([*command, *options]) == 2
    assert "--device-mtbf changes the time to train on a number of tokens; give --tokens" in capfd.readouterr().err


def test_the_command_prints_json(capfd):
    gin = EXPERIMENTS / "llama3_8b.gin"
    assert main(["plan", str(gin), "--topology", "v5p:4x4x4", "--analytic", "--json", "--tokens", "1T"]) == 0
    data = json.loads(capfd.readouterr().out)
    assert data["devices"] == 64 and data["fits"] and data["budget"]["tokens"] == 1e12


@pytest.mark.parametrize(
    "name, hardware", [("llama3_8b", "v5p:4x4x4"), ("llama3_70b", "v5p:8x8x8"), ("llama3_405b", "v5p:8x8x16")]
)
def test_the_flagships_fit_the_pods_they_are_written_for(name, hardware, capfd):
    assert main(["plan", str(EXPERIMENTS / f"{name}.gin"), "--topology", hardware, "--analytic", "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["fits"]


@pytest.mark.parametrize(
    "change, hardware, words",
    [
        ({}, "h1000:8", ("h1000", "h100")),
        ({"layout": js.Layout("pipeline=8")}, "h100:8", ("8 stages", "4 layers", "pipeline=4")),
        ({"layout": js.Layout("fsdp=16")}, "h100:8", ("fsdp=16", "h100:8 has 8")),
        ({"layout": js.Layout("fsdp=8"), "batch_size": 12}, "h100:8", ("batch", "12", "8")),
        ({"layout": js.Layout("tensor=8")}, "h100:8", ("heads", "tensor")),
    ],
    ids=[
        "unknown hardware",
        "more stages than layers",
        "too few devices",
        "a batch too small",
        "heads that do not divide",
    ],
)
def test_what_cannot_be_planned_is_one_sentence(change, hardware, words):
    with raises_saying(LayoutError, *words):
        plan(dataclasses.replace(TINY, **change), hardware)


UNTRAINABLE = {
    "positions beyond the table": dict(positions=js.models.Learned(16)),
    "fewer key heads than devices": dict(heads=4, kv_heads=2, attention=UlyssesAttention(), layout="context=4"),
    "groups that no ring divides": dict(attention=UlyssesAttention(ring=3), layout="context=4"),
    "a zigzag that does not divide": dict(attention=RingAttention(), layout="context=4", seq_len=36),
    "whole sequences, cut": dict(layout="context=4"),
    "experts' groups that do not divide": dict(mlp=MixtureOfExperts(group=5, capacity=1.0), layout="data=4"),
    "experts' groups torn apart": dict(
        attention=RingAttention(), mlp=MixtureOfExperts(capacity=1.0), layout="context=4"
    ),
    "an axis that splits nothing": dict(layout=js.Layout("data=4,tensor=2", rules="fsdp")),
    "tiles that are cut": dict(layout="fsdp=8", optimizer=AdamW8bit()),
}


@pytest.mark.parametrize("case", UNTRAINABLE)
def test_what_training_refuses_is_refused_in_its_words(case):
    changes = {"layout": "fsdp=4", **UNTRAINABLE[case]}
    layout = changes["layout"] if isinstance(changes["layout"], js.Layout) else js.Layout(changes["layout"])
    of_run = {name: changes.pop(name) for name in ("optimizer", "seq_len") if name in changes} | {"layout": layout}
    del changes["layout"]
    config = dataclasses.replace(TINY, model=dataclasses.replace(TINY.model, **changes), **of_run)
    with pytest.raises((ConfigError, LayoutError)) as trained:
        check(dataclasses.replace(config, layout=layout.abstract()))
    with pytest.raises(type(trained.value), match=re.escape(str(trained.value))):
        plan(config, "v5p:2x2x2")


def test_a_missing_compiler_is_named_with_the_command_that_installs_it(monkeypatch):
    monkeypatch.setattr("jaxscale.plan.planner.why_no_tpu", lambda: "needs libtpu: make install EXTRAS=plot,tpu")
    assert "make install EXTRAS=plot,tpu" in plan_for(TINY, "v5p:2x2x2").basis
    with raises_saying(LayoutError, "v5p:2x2x2", "make install EXTRAS=plot,tpu"):
        plan_for(TINY, "v5p:2x2x2", compile="always")


def test_odd_arguments_are_refused():
    with raises_saying(ConfigError, "sometimes", "auto"):
        plan_for(TINY, "h100:8", compile="sometimes")
    with raises_saying(ConfigError, "price", "-1"):
        plan(tokens=1, price=-1)
    with raises_saying(ConfigError, "many", "300B"):
        count_of("many")
    with raises_saying(ConfigError, "layout=None"):
        plan(dataclasses.replace(TINY, layout=None))


def test_terms_of_two_plans_add_up_and_name_what_only_one_has():
    other = dataclasses.replace(TINY, layout=js.Layout("fsdp=8"))
    result = compare(TINY, other, "h100:8", compile="never")
    terms = result.to_json()["terms"]
    for key, plan_ in (("a", result.a), ("b", result.b)):
        spent = {name: t[key] for name, t in terms["seconds"].items()}
        assert math.isclose(spent.pop("total"), sum(spent.values())) and spent["products"] and spent["attention"]
        held = {name: t[key] for name, t in terms["memory"].items()}
        assert not held.pop("in host memory") and held.pop("on a device") == sum(held.values()) == plan_.bytes
        assert terms["throughput"]["tokens/s"][key] == plan_.step.tokens_per_second
    assert terms["seconds"]["exposed, tensor"]["a"] > 0 == terms["seconds"]["exposed, tensor"]["b"]
    assert "exposed, tensor" in str(result)
    same = compare(TINY, TINY, "h100:8", compile="never")
    assert all(t.a == t.b for t in same.terms)


@pytest.mark.long
def test_the_command_compares_two_gin_files_and_neither_takes_the_bindings_of_the_other(capfd, tmp_path):
    gin, mine = EXPERIMENTS / "llama3_8b.gin", tmp_path / "mine.gin"
    mine.write_text(f"include '{gin}'\ntrain.seq_len = 4096\ntrain.optimizer = @Lion()\n")
    command = ["plan", str(mine), "--topology", "v5p:4x4x4", "--analytic", "--json"]
    assert main([*command, "--compare", str(gin)]) == 0
    data = json.loads(capfd.readouterr().out)
    tokens = data["terms"]["throughput"]["tokens a step"]
    assert tokens["b"] == 2 * tokens["a"] and data["names"] == [str(mine), str(gin)]
    assert main(["plan", str(gin), *command[2:]]) == 0
    assert data["b"] == json.loads(capfd.readouterr().out)
    assert main([*command, "--compare", str(gin), "--search"]) != 0
    assert "leave out --search" in capfd.readouterr().err


def test_memory_is_by_formulas_where_they_were_made_for_the_run_and_else_from_its_traced_step():
    """Runs with AdamW, one micro-batch and no packing, on TPUs; any other is closer to what was compiled if traced."""
    model = js.models.TransformerConfig(depth=2, width=32, heads=2, vocab=64, attention=flash_attention)
    usual = js.TrainConfig(model=model, layout=js.Layout("fsdp=8"), batch_size=16, seq_len=32, segments=False)
    for changed, hardware, method in (
        ({}, "v5e:2x4", "formulas"),
        ({"segments": True}, "v5e:2x4", "traced"),
        ({"accumulate": 2}, "v5e:2x4", "traced"),
        ({"optimizer": Lion()}, "v5e:2x4", "traced"),
        ({}, "h100:8", "traced"),
    ):
        config = dataclasses.replace(usual, **changed)
        plan = plan_for(config, hardware, compile="never")
        by_formulas = estimate(plan.config, hardware)
        assert plan.error_bar.method == method and (plan.memory == by_formulas) == (method == "formulas")
        assert plan.memory.host == by_formulas.host


def test_what_is_no_config_and_numbers_that_are_not_finite_are_one_sentence():
    with raises_saying(ConfigError, "takes a TrainConfig, not 'demo.gin'", "jaxscale plan FILE"):
        plan_for("demo.gin", "h100:8")
    with raises_saying(ConfigError, "tokens = inf", "finite"):
        plan(tokens=math.inf)
    with raises_saying(ConfigError, "save_every", "save more rarely"):
        plan(tokens=3e9, restarts=Restarts(save_every=1e-9))


def test_a_plan_says_why_memory_is_traced_and_how_the_compiled_step_stands_to_its_bar():
    result = plan(tokens=None)
    assert any("the traced step, as for all runs with h100 devices" in note for note in result.notes)
    ratio = result.error_bar.high + 1
    compiled = Compiled(round(result.memory.device * ratio), None, 0.0)
    note = _compared_with_compiled(compiled, result.memory, result.error_bar, result.hardware)
    assert f"{ratio:.2f} times the predicted memory, outside the error bar" in note
