"""What fits some hardware, and the cheapest hardware for a run, against neighbouring values and by hand."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

import jaxscale as js
from jaxscale.cli import main
from jaxscale.errors import ConfigError, LayoutError
from jaxscale.models.presets import gpt2
from jaxscale.nn import RingAttention, flash_attention
from jaxscale.plan import Restarts, cheapest, fit_on, plan_for
from tests.truth.errors import raises_saying
from tests.truth.traces import traced_once

MODEL = js.models.TransformerConfig(depth=4, width=512, heads=8, kv_heads=4, vocab=1024, attention=flash_attention)
# without segments, so that plans are by formulas: bisection makes many
RUN = js.TrainConfig(model=MODEL, layout=js.Layout("fsdp=8"), batch_size=16, seq_len=512, segments=False)
once = pytest.fixture(traced_once, scope="module", autouse=True)


def _with(name, n):
    heads = n // 64
    models = {"layers": dict(depth=n), "width": dict(width=n, heads=heads, kv_heads=heads // 2, hidden=heads * 176)}
    if name in models:
        return dataclasses.replace(RUN, model=dataclasses.replace(MODEL, **models[name]))
    return dataclasses.replace(RUN, **{{"sequence length": "seq_len", "batch size": "batch_size"}[name]: n})


@pytest.mark.long
def test_the_largest_that_fits_fits_and_the_next_does_not():
    assert MODEL.sizes.hidden == 8 * 176
    limits = fit_on(RUN, "v5e:2x4")
    steps = {"layers": 1, "width": 128, "sequence length": 512, "batch size": 8}
    assert [limit.name for limit in limits.limits] == [*steps]
    for limit in limits.limits:
        assert limit.now in (4, 512, 16) and limit.largest > limit.now and limit.largest % steps[limit.name] == 0
        here, beyond = (
            plan_for(_with(limit.name, limit.largest + more), "v5e:2x4", compile="never")
            for more in (0, steps[limit.name])
        )
        assert here.fits and not beyond.fits and limit.plan.bytes == here.bytes
        assert limit.name in str(limits) and f"{limit.largest + steps[limit.name]:,}: predicted to take" in limit.why
    assert limits.to_json()["limits"]["layers"]["largest"] == limits.limits[0].largest


@pytest.mark.long
def test_what_does_not_fit_is_made_smaller_and_what_training_refuses_ends_the_search():
    large = js.TrainConfig(
        model=gpt2(depth=48, memory="none"), layout=js.Layout("data=4", rules="replicated"),
        batch_size=32, seq_len=1024, segments=False,
    )  # fmt: skip
    layers, seq = fit_on(large, "v5e:2x2", only=("layers", "sequence length")).limits
    assert 0 < layers.largest < 48 and seq.largest < 1024
    small = dataclasses.replace(large, model=gpt2(depth=2, memory="full"), batch_size=4)
    (seq,) = fit_on(small, "v5e:2x2", only=["sequence length"]).limits
    assert seq.largest == 1024 and "2,048" in seq.why and "positions" in seq.why
    huge = dataclasses.replace(large, model=gpt2(depth=4, width=32768, heads=256, hidden=131072))
    nothing = fit_on(huge, "v5e:2x2", only=["layers"])
    assert nothing.limits[0].plan is None and "nothing" in str(nothing)
    with raises_saying(ConfigError, "'layer'", "'layers'"):
        fit_on(small, "v5e:2x2", only=["layer"])


SCALED = dataclasses.replace(RUN, layout=js.Layout("fsdp=-1"), batch_size=64)


@pytest.mark.long
def test_the_cheapest_in_time_and_the_fastest_within_a_budget_are_those_of_all_plans():
    prices = {"v5e": 1.2, "v5p": 4.2}
    deadline = cheapest(SCALED, ["v5e", "v5p"], 1e11, days=0.1, prices=prices)
    names = [plan.hardware.name for plan in deadline.plans]
    assert names == [*(f"v5e:{s}" for s in ("2x2", "2x4", "4x4", "4x8", "8x8"))] + [
        *(f"v5p:{s}" for s in ("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4"))
    ]
    assert [*deadline.refused] == ["v5e:8x16", "v5p:4x4x8"] and "batch" in deadline.refused["v5e:8x16"]
    in_time = [plan for plan in deadline.plans if plan.fits and plan.days_range[1] <= 0.1]
    assert 0 < len(in_time) < len(names)
    assert deadline.best.budget.cost == min(plan.budget.cost for plan in in_time)
    assert "chosen" in str(deadline) and deadline.to_json()["best"] == deadline.best.hardware.name

    budget = deadline.best.budget.cost * 1.3
    fastest = cheapest(SCALED, ["v5e", "v5p"], 1e11, budget=budget, prices=prices).best
    slow = fastest.seconds_range[1] / fastest.best.total
    assert fastest.budget.cost * slow <= budget
    for plan in deadline.plans:
        if plan.fits and plan.budget.cost * slow <= budget:
            assert plan.budget.days >= fastest.budget.days
    nothing = cheapest(SCALED, ["v5e"], 1e11, days=0.001)
    assert nothing.best is None and "No topology meets this" in str(nothing)


@pytest.mark.parametrize(
    "options, words",
    [
        (dict(days=1, budget=1), "either a deadline"),
        (dict(budget=1), "v5e has no price of a device for an hour"),
        (dict(days=1, prices={"v5p": 1}), "'v5p' has a price, but is not one of the chips"),
        (dict(days=1, prices={"v5e": 1, "v5o": 1}), "'v5o'"),
        (dict(days=0), "days is 0: must be a finite number above 0"),
        (dict(days=float("nan")), "days is nan"),
        (dict(budget=-1, prices={"v5e": 1}), "budget is -1"),
        (dict(days=1, prices={"v5e": -1}), "'v5e' is -1"),
    ],
)
def test_what_cannot_be_compared_is_refused(options, words):
    with raises_saying(ConfigError, words):
        cheapest(SCALED, ["v5e"], 1e9, **options)


def test_a_mesh_that_does_not_grow_is_refused_and_so_is_unknown_hardware():
    with raises_saying(ConfigError, "-1", "--mesh"):
        cheapest(RUN, ["v5e"], 1e9, days=1)
    for chips in (["v5x"], ["v5e", "v5x"], ["v5e", "v5x:2x2"]):
        with raises_saying(LayoutError, "no hardware 'v5x'", "v5e"):
            cheapest(SCALED, chips, 1e9, days=1)


@pytest.mark.long
def test_a_hardware_file_has_its_price_and_a_run_that_fails_too_often_is_refused(tmp_path):
    file = tmp_path / "mine.json"
    file.write_text((Path(js.hardware.__file__).parent / "chips" / "h100.json").read_text())
    named = cheapest(SCALED, [str(file)], 1e11, days=10, prices={str(file): 3.0})
    assert named.best.hardware.name.startswith(f"{file}:")
    assert named.best.budget.cost == 3.0 * named.best.budget.device_hours
    shape = cheapest(SCALED, [f"{file}:8"], 1e11, days=10, prices={str(file): 3.0})
    assert shape.best.budget.cost == 3.0 * shape.best.budget.device_hours
    rare = cheapest(SCALED, [str(file)], 1e11, days=1e4, restarts=Restarts(device_mtbf=1.0, save_every=600.0))
    assert rare.plans and any("never reaches the next checkpoint" in why for why in rare.refused.values())
    assert "larger topologies were not tried" in " ".join(str(rare).split())


def test_sizes_that_the_mesh_does_not_divide_are_not_tried():
    wide = dataclasses.replace(RUN, layout=js.Layout("fsdp=2,tensor=4"))
    (width,) = fit_on(wide, "v5e:2x4", only=["width"]).limits
    assert width.largest % (4 * 64) == 0 and "predicted to take" in width.why


@pytest.mark.long
def test_lengths_that_a_ring_does_not_divide_are_not_tried():
    ring = dataclasses.replace(MODEL, attention=RingAttention())
    long = dataclasses.replace(RUN, model=ring, seq_len=1536, layout=js.Layout("fsdp=2,context=3"), batch_size=2)
    (seq,) = fit_on(long, "h100:6", only=["sequence length"]).limits
    assert seq.largest % 3 == 0 and "predicted to take" in seq.why


# of an attention whose plans are by formulas
CONFIG = """
train.model = @Transformer()
Transformer.depth = 2
Transformer.attention = @flash_attention
train.layout = @Layout()
Layout.mesh = 'fsdp=-1'
"""


@pytest.mark.long
def test_the_command_prints_limits_and_chooses_hardware(capfd, tmp_path):
    gin = tmp_path / "run.gin"
    gin.write_text(CONFIG + "train.batch_size = 8\ntrain.seq_len = 64\ntrain.segments = False\n")
    assert main(["plan", str(gin), "--fit-on", "v5e:2x2", "--json"]) == 0
    result = json.loads(capfd.readouterr().out)
    assert result["limits"]["layers"]["largest"] > 2
    choose = ["plan", str(gin), "--fit-on", "v5e:2x2,v5p:2x2x1", "--tokens", "1B", "--price", "v5e=1,v5p=100"]
    assert main([*choose, "--days", "100"]) == 0
    out = capfd.readouterr().out
    assert "chosen" in next(line for line in out.splitlines() if line.strip().startswith("v5e:2x2"))
    for more, words in (
        ([], "--days or --budget"),
        (["--days", "1", "--search"], "leave out --search"),
        (["--days", "1", "--compiles", "3"], "leave out --compiles"),
        (["--days", "1", "--write", "best.gin"], "leave out --write"),
        (["--days", "0"], "days is 0"),
        (["--days", "1", "--topology", "v5e:2x2"], "leave out --topology"),
    ):
        assert main([*choose, *more]) != 0
        assert words in capfd.readouterr().err
    assert main(["plan", str(gin), "--fit-on", "v5e,v5p"]) != 0
    assert "several chips, give --tokens and --days or --budget" in capfd.readouterr().err
    assert main(["plan", str(gin), "--topology", "v5e:2x2", "--days", "1"]) != 0
    assert "--fit-on" in capfd.readouterr().err
    assert main(["plan", str(gin), "--topology", "v5e:2x2", "--tokens", "1B", "--price", "cheap"]) != 0
    assert "--price cheap" in capfd.readouterr().err
