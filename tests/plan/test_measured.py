"""A profiled run's steps by term: of a run on eight simulated devices, and of accelerators by hand-written profiles."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
from jax.profiler import ProfileData

import jaxscale as js
from jaxscale.cli import main
from jaxscale.errors import RunError
from jaxscale.plan.collectives import Program, collectives
from jaxscale.plan.instruction_terms import UNNAMED, InstructionTerms
from jaxscale.plan.measured import measured
from jaxscale.plan.profile import Event, Execution, _field, _programs, read_profile
from jaxscale.plan.timeline import BETWEEN, WITHIN, _attributed, term_times
from jaxscale.plan.waterfall import ARITHMETIC, EXPOSED
from jaxscale.train.files import read_json, states, write_json
from tests.truth.errors import raises_saying
from tests.truth.runs import transformer, write_text

SIZES = {"data": 2, "fsdp": 2, "tensor": 2}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run whose steps 2 to 4 are in its profile."""
    root = tmp_path_factory.mktemp("profiled")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAXSCALE_CACHE", str(root / "cache"))
        config = transformer(write_text(root / "text"), eval_batches=0, steps=5)
        return js.fit(config, run=root / "run", quiet=True, profile=(2, 4))


@pytest.fixture(scope="module")
def profile(run):
    return read_profile(run.path)


@pytest.fixture(scope="module")
def result(run):
    return measured(run, "cpu:8")


@pytest.fixture
def copy(run, tmp_path):
    """A copy of the run, to be changed."""
    return js.Run(shutil.copytree(run.path, tmp_path / "copy"))


def edit(run, **fields):
    """Writes other fields into `run.json`, sealed."""
    write_json(run.path / "run.json", read_json(run.path / "run.json") | fields)
    return run


# --- a run that was profiled ------------------------------------------------------------------------------------------


@pytest.mark.long
def test_terms_add_up_to_what_the_clock_says_of_a_step(result, profile):
    spans = [e.end - e.start for executions in profile.devices for e in executions]
    gaps = [b.start - a.end for executions in profile.devices for a, b in zip(executions, executions[1:], strict=False)]
    assert len(spans) == 8 * 3 and len(gaps) == 8 * 2
    assert math.isclose(result.total, (np.mean(spans) + np.median(gaps)) / 1e9, rel_tol=1e-6)
    assert result.total == sum(result.terms.values()) and result.steps == (2, 3, 4) and result.devices == 8


@pytest.mark.long
def test_a_step_has_the_terms_of_a_plan_and_idle_time(result):
    assert {"products", "attention", "memory-bound", "optimizer", WITHIN, BETWEEN} <= result.terms.keys()
    assert all(time > 0 for time in result.terms.values())
    others = {name for name in result.terms if not name.startswith(EXPOSED)}
    assert others <= {*ARITHMETIC, WITHIN, BETWEEN}


def test_exposed_terms_are_along_the_axes_of_the_programs_collectives(result, profile):
    axes = {" × ".join(c.axes) for c in collectives(profile.program, SIZES) if c.devices > 1}
    assert {"fsdp", "tensor"} <= axes
    assert {name.removeprefix(EXPOSED) for name in result.terms if name.startswith(EXPOSED)} == axes


def test_no_moment_of_a_device_is_counted_twice(profile):
    terms = InstructionTerms(Program(profile.program, SIZES))
    for executions in profile.devices:
        for execution in executions:
            busy = sum(time for _, time in _attributed(execution.events, terms.of))
            assert 0 < busy <= (execution.end - execution.start) * (1 + 1e-9)
            assert busy < sum(e.end - e.start for e in execution.events)  # loops last as long as what they run


def test_every_operation_of_the_profile_is_an_instruction_of_its_program(profile):
    terms = InstructionTerms(Program(profile.program, SIZES))
    names = {e.name for executions in profile.devices for execution in executions for e in execution.events}
    assert UNNAMED not in {terms.of(name) for name in names}


def test_ratios_are_measured_over_predicted_on_hardware_of_the_same_kind(result):
    assert result.comparable and result.predicted == result.plan.terms
    assert any("are generic" in note and "jaxscale microbench" in note for note in result.notes)
    assert result.ratios["products"] == result.terms["products"] / result.plan.terms["products"]
    assert result.ratios["step"] == result.total / result.plan.best.total
    assert "ratio" in str(result) and all(name in str(result) for name in (*result.terms, *result.predicted))


def test_of_other_hardware_shares_are_shown_and_no_ratios(run):
    other = measured(run, "v5e:2x4", compile="never")
    assert not other.comparable and other.ratios == {} and other.predicted
    assert "ratio" not in str(other) and "not their times" in str(other)


def test_without_a_topology_of_a_cpu_nothing_is_predicted(run):
    alone = measured(run)
    assert alone.plan is None and alone.ratios == {} and "--topology" in " ".join(alone.notes)


@pytest.mark.parametrize(
    "device, count, topology, text",
    [("NVIDIA H100 80GB HBM3", 8, "h100:8", ""), ("TPU v5 lite", 8, None, "--topology v5e:2x4")],
)
def test_hardware_that_run_json_names_is_planned_for(copy, device, count, topology, text):
    hardware = copy.info["hardware"] | {"platform": "gpu", "device": device, "devices": count}
    other = measured(edit(copy, hardware=hardware), compile="never")
    assert (other.plan and other.plan.hardware.name) == topology and other.comparable == (topology is not None)
    assert text in " ".join(other.notes)


def test_steps_outside_of_the_profile_are_told_apart(run, result):
    rows = {row["step"]: row for row in run.metrics()}
    assert result.unprofiled == pytest.approx(8 * 16 / rows[5]["tokens_per_second"])


def test_a_profile_leaves_the_folder_as_it_was_sealed(run):
    assert [state.fault for state in states(run.path) if state.fault is not None] == []


# --- the command and the report ---------------------------------------------------------------------------------------


def test_plan_measured_prints_json(run, result, capsys):
    assert main(["plan", str(run.path), "--measured", "--topology", "cpu:8", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["measured"] == result.terms and printed["ratios"] == result.ratios
    assert printed["steps"] == [2, 3, 4]


@pytest.mark.parametrize(
    "options, word",
    [(["--mesh", "data=8"], "--mesh"), (["--gin.train.lr=1"], "--gin.train.lr"), (["--fit-on", "v5p"], "--fit-on")],
)
def test_plan_measured_refuses_what_would_change_the_run(run, capsys, options, word):
    assert main(["plan", str(run.path), "--measured", *options]) == 2
    assert f"leave out {word}" in capsys.readouterr().err


def test_plan_measured_of_a_gin_file_asks_for_a_run(tmp_path, capsys):
    (tmp_path / "a.gin").touch()
    assert main(["plan", str(tmp_path / "a.gin"), "--measured"]) == 2
    assert "name its folder" in capsys.readouterr().err


def test_a_report_has_the_waterfall_of_a_profiled_run(run, tmp_path, capsys):
    assert main(["report", str(run.path), "--out", str(tmp_path / "out")]) == 0
    page = (tmp_path / "out" / "report.html").read_text()
    assert "A step&#x27;s time" in page and "exposed, fsdp" in page and BETWEEN in page


def test_a_report_says_why_a_profile_is_not_shown(copy, tmp_path, capsys):
    next((copy.path / "profile").rglob("*.xplane.pb")).write_bytes(b"no")
    assert main(["report", str(copy.path), "--out", str(tmp_path / "out")]) == 0
    assert "are left out" in capsys.readouterr().err


# --- what there is nothing to measure of ------------------------------------------------------------------------------


def test_what_is_no_run_is_said(tmp_path):
    with raises_saying(RunError, str(tmp_path), "not a run folder"):
        measured(js.Run(tmp_path))


def test_a_run_without_a_profile_is_told_how_to_get_one(copy):
    shutil.rmtree(copy.path / "profile")
    with raises_saying(RunError, "has no profile", "--profile 5:7"):
        measured(copy)


def trace(run: js.Run) -> Path:
    return next((run.path / "profile").rglob("*.xplane.pb"))


def test_a_profile_that_a_kill_cut_off_is_told_from_none(copy):
    trace(copy).unlink()
    with raises_saying(RunError, "without a complete trace", "--profile 5:7"):
        measured(copy)


def test_a_damaged_profile_is_said_to_be(copy):
    trace(copy).write_bytes(trace(copy).read_bytes()[:-100])
    with raises_saying(RunError, "is damaged", "--profile 5:7"):
        measured(copy)


def test_a_program_that_cannot_be_read_is_said_to_be_damaged(copy, monkeypatch):
    monkeypatch.setattr("jaxscale.plan.profile._programs", lambda data: dict.fromkeys(_programs(data), b"\xff" * 9))
    with raises_saying(RunError, "the program in the profile", "is damaged", "--profile 5:7"):
        measured(copy)


def test_a_path_is_no_run(copy):
    with raises_saying(RunError, "takes a Run, as js.Run("):
        measured(str(copy.path))


def test_a_profile_of_steps_that_were_not_taken_is_said_to_hold_none(copy):
    trace(copy).write_bytes(ProfileData.text_proto_to_serialized_xspace('planes { name: "/host:CPU" }'))
    with raises_saying(RunError, "no operations of a training step", "--profile 5:7"):
        measured(copy)


def test_a_profile_without_its_program_is_said_to_lack_it(copy):
    trace(copy).write_bytes(xspace(TPU.format(module="jit_step(2)", product="a", sum="b")))
    with raises_saying(RunError, "lacks the compiled program", "--profile 5:7"):
        measured(copy)


def test_a_run_json_without_hardware_is_said_to_lack_it(copy):
    with raises_saying(RunError, "run.json", "does not name the run's devices"):
        measured(edit(copy, hardware={}))


# --- profiles of accelerators, and moments by hand --------------------------------------------------------------------

TPU = """
planes {{ name: "/device:TPU:0"
  lines {{ name: "Steps" events {{ metadata_id: 3 offset_ps: 0 duration_ps: 50000000000 }} }}
  lines {{ name: "XLA Modules"
    events {{ metadata_id: 3 offset_ps: 0 duration_ps: 9000000000 }}
    events {{ metadata_id: 3 offset_ps: 10000000000 duration_ps: 9000000000 }} }}
  lines {{ name: "XLA Ops"
    events {{ metadata_id: 1 offset_ps: 0 duration_ps: 2000000000 }}
    events {{ metadata_id: 2 offset_ps: 3000000000 duration_ps: 6000000000 }}
    events {{ metadata_id: 1 offset_ps: 10000000000 duration_ps: 2000000000 }}
    events {{ metadata_id: 2 offset_ps: 13000000000 duration_ps: 6000000000 }} }}
  lines {{ name: "Async XLA Ops" events {{ metadata_id: 2 offset_ps: 0 duration_ps: 9000000000 }} }}
  event_metadata {{ key: 1 value {{ id: 1 name: "%{product} = f32[2]{{0}} fusion(%x)" }} }}
  event_metadata {{ key: 2 value {{ id: 2 name: "{sum}" }} }}
  event_metadata {{ key: 3 value {{ id: 3 name: "{module}" }} }} }}
"""
GPU = """
planes {{ name: "/device:GPU:0"
  lines {{ id: 1 name: "Stream #1(Compute)"
    events {{ metadata_id: 1 offset_ps: 0 duration_ps: 2000000000 {product_stats} }}
    events {{ metadata_id: 1 offset_ps: 10000000000 duration_ps: 2000000000 {product_stats} }} }}
  lines {{ id: 2 name: "Stream #2(Collectives)"
    events {{ metadata_id: 2 offset_ps: 1000000000 duration_ps: 8000000000 {sum_stats} }}
    events {{ metadata_id: 2 offset_ps: 11000000000 duration_ps: 8000000000 {sum_stats} }} }}
  event_metadata {{ key: 1 value {{ id: 1 name: "nvjet_tst_128" }} }}
  event_metadata {{ key: 2 value {{ id: 2 name: "ncclDevKernel_AllReduce" }} }}
  stat_metadata {{ key: 1 value {{ id: 1 name: "hlo_op" }} }}
  stat_metadata {{ key: 2 value {{ id: 2 name: "hlo_module" }} }}
  stat_metadata {{ key: 3 value {{ id: 3 name: "program_id" }} }} }}
"""
STATS = (
    'stats {{ metadata_id: 1 str_value: "{op}" }} stats {{ metadata_id: 2 str_value: "jit_step" }} '
    "stats {{ metadata_id: 3 int64_value: {number} }}"
)


INSTRUCTIONS = """\
HloModule jit_step

%gathered (p: f32[2]) -> f32[4] {
  %p = f32[2] parameter(0)
  %gather.1 = f32[4] all-gather(%p), replica_groups={{0,2},{1,3},{4,6},{5,7}}, dimensions={0}
  ROOT %AsyncCollectiveDone = f32[4] custom-call(%gather.1), custom_call_target="AsyncCollectiveDone"
}

%multiplied (q: f32[2]) -> f32[4] {
  %q = f32[2] parameter(0)
  %gather.2 = f32[4] all-gather(%q), replica_groups={{0,2},{1,3},{4,6},{5,7}}, dimensions={0}
  ROOT %conv = f32[4] convolution(%gather.2, %gather.2), dim_labels=bf_io->bf
}

ENTRY %main (a: f32[2]) -> f32[4] {
  %a = f32[2] parameter(0)
  %sum-start = f32[2] all-reduce-start(%a), replica_groups={{0,1},{2,3},{4,5},{6,7}}, to_apply=%add
  %sum-done = f32[2] all-reduce-done(%sum-start)
  %alone = f32[2] all-reduce(%a), replica_groups={{0},{1},{2},{3},{4},{5},{6},{7}}, to_apply=%add
  %async-collective-done = f32[4] fusion(%a), kind=kCustom, calls=%gathered
  %behind = f32[4] fusion(%a), kind=kOutput, calls=%multiplied, metadata={op_name="jit(step)/jvp(mlp)/up/dot_general"}
  %routed = f32[4] fusion(%a), calls=%multiplied, metadata={op_name="jit(step)/jvp(mlp)/experts/dot_general"}
  %muon = f32[4] fusion(%a), calls=%multiplied, metadata={op_name="jit(step)/optimizer/dot_general"}
  %flash = f32[4] custom-call(%a), custom_call_target="mosaic_gpu", metadata={op_name="jit(step)/attn/mix/pallas_call"}
  %cross = f32[4] custom-call(%a), custom_call_target="mosaic_gpu", metadata={op_name="jit(step)/loss/pallas_call"}
  %gemm = f32[4] custom-call(%a), custom_call_target="__cublas$lt$matmul"
  %away-start = (f32[2]{0:S(5)}, f32[2], u32[]) copy-start(%a)
  %away = f32[2]{0:S(5)} copy-done(%away-start)
  %near = f32[2] copy(%a)
  ROOT %loop = f32[4] while(%gemm), condition=%c, body=%b
}
"""


@pytest.mark.parametrize(
    "name, term",
    [
        ("sum-start", f"{EXPOSED}tensor"),
        ("sum-done", f"{EXPOSED}tensor"),
        ("alone", "memory-bound"),
        ("async-collective-done", f"{EXPOSED}fsdp"),
        ("behind", "products"),
        ("routed", "experts"),
        ("muon", "optimizer"),
        ("flash", "attention"),
        ("cross", "products"),
        ("gemm", "products"),
        ("away", "host"),
        ("near", "memory-bound"),
        ("loop", None),
        ("nvjet_tst_128", UNNAMED),
    ],
)
def test_instructions_of_accelerators_have_the_terms_of_a_plan(name, term):
    assert InstructionTerms(Program(INSTRUCTIONS, SIZES)).of(name) == term


def xspace(text: str, like: bytes = b"") -> bytes:
    """An XSpace of hand-written planes, and the plane of another one that holds its programs."""
    made = ProfileData.text_proto_to_serialized_xspace(text)
    for plane in _field(memoryview(like), 1):
        if next(_field(plane, 2), b"") == b"/host:metadata":
            size, length = len(plane), b""
            while size >= 128:
                length, size = length + bytes([size & 127 | 128]), size >> 7
            made += b"\n" + length + bytes([size]) + bytes(plane)
    return made


@pytest.mark.parametrize("form", ["tpu", "gpu"])
def test_accelerators_profiles_give_the_terms_that_they_were_written_with(copy, profile, form):
    terms = InstructionTerms(Program(profile.program, SIZES))
    names = {e.name for e in profile.devices[0][0].events}
    product = next(name for name in names if terms.of(name) == "products")
    sum_ = next(name for name in names if terms.of(name) == f"{EXPOSED}fsdp")
    like, module = trace(copy).read_bytes(), profile.devices[0][0].events[0].module
    number = module.removeprefix("jit_step(").removesuffix(")")
    stats = {f"{what}_stats": STATS.format(op=op, number=number) for what, op in (("product", product), ("sum", sum_))}
    text = TPU.format(module=module, product=product, sum=sum_) if form == "tpu" else GPU.format(**stats)
    trace(copy).write_bytes(xspace(text, like))
    result = measured(copy)
    # on the GPU, a millisecond of the sum is behind the product; on the TPU, a millisecond lies between them
    want = {"products": 2e-3, f"{EXPOSED}fsdp": 7e-3, BETWEEN: 1e-3}
    want |= {f"{EXPOSED}fsdp": 6e-3, WITHIN: 1e-3} if form == "tpu" else {}
    assert result.terms == pytest.approx(want) and result.devices == 1 and result.total == pytest.approx(10e-3)


def test_the_end_of_the_step_before_a_profile_is_no_step_of_it(copy, profile):
    terms = InstructionTerms(Program(profile.program, SIZES))
    product = next(e.name for e in profile.devices[0][0].events if terms.of(e.name) == "products")
    like, module = trace(copy).read_bytes(), profile.devices[0][0].events[0].module
    number = module.removeprefix("jit_step(").removesuffix(")")
    train = "".join(
        f"events {{ metadata_id: 2 offset_ps: {at}000000 stats {{ metadata_id: 5 int64_value: {step} }} }} "
        for step, at in ((7, 10), (8, 30))
    )
    ops = "".join(
        f"events {{ metadata_id: 1 offset_ps: {at}000000 duration_ps: {length}000000 "
        f"{STATS.format(op=product, number=number)} stats {{ metadata_id: 4 int64_value: {at} }} }} "
        for at, length in ((0, 1), (11, 8), (31, 8))
    )
    names = ("hlo_op", "hlo_module", "program_id", "run_id", "step_num")
    stats = "".join(
        f'stat_metadata {{ key: {i} value {{ id: {i} name: "{name}" }} }} ' for i, name in enumerate(names, 1)
    )
    text = (
        f'planes {{ name: "/host:CPU" lines {{ {train} }} lines {{ {ops} }} {stats}'
        f'event_metadata {{ key: 1 value {{ id: 1 name: "{product}" }} }} '
        'event_metadata { key: 2 value { id: 2 name: "train" } } }'
    )
    trace(copy).write_bytes(xspace(text, like))
    result = measured(copy)
    assert result.steps == (7, 8) and result.terms == pytest.approx({"products": 8e-6, BETWEEN: 12e-6})


def event(name, line, start, end):
    return Event(name, line, start, end, "jit_step(1)", "1")


def test_a_loop_counts_as_what_runs_within_it_and_what_runs_beside_hides_a_collective():
    terms = {"dot": "products", "norm": "memory-bound", "sum": f"{EXPOSED}data", "loop": None}
    events = (
        event("loop", "a", 0, 100),
        event("dot", "a", 10, 40),
        event("norm", "a", 20, 30),  # within the product's own event
        event("dot", "a", 50, 60),
        event("sum", "b", 30, 90),
        event("norm", "c", 50, 60),  # beside a product on another thread
    )
    result = term_times([[Execution(0, 100, events), Execution(120, 130, (event("dot", "a", 120, 130),))]], terms.get)
    want = {"products": 20 + 5 + 10, "memory-bound": 10 + 5, f"{EXPOSED}data": 10 + 30, WITHIN: 10 + 10}
    assert result == pytest.approx({name: time / 2 / 1e9 for name, time in want.items()} | {BETWEEN: 20e-9})


def test_an_evaluation_between_two_steps_is_no_part_of_a_step():
    starts = (0, 20, 40, 1000)
    steps = [Execution(at, at + 10, (event("dot", "a", at, at + 10),)) for at in starts]
    assert term_times([steps], lambda name: "products")[BETWEEN] == pytest.approx(10e-9)
