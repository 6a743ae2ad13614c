"""Pipeline schedules: their bubbles against the papers' formulas, what makes a table invalid, files, and names."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from jaxscale.errors import LayoutError
from jaxscale.layout import SCHEDULES, Layout, Pipeline, Table, simulate
from jaxscale.layout.schedules import forward_only, from_csv, gpipe, interleaved, one_f_one_b, place
from jaxscale.layout.table import B, F, W, draw_figure, draw_text, to_csv, validate
from tests.truth.errors import raises_saying
from tests.truth.schedules import random_table

SIZES = [(2, 2), (2, 8), (4, 4), (4, 8), (8, 16)]


def _share(idle: float, work: float) -> float:
    return idle / (idle + work)


# Idle time of a stage over the time of its work, in forwards of a chunk; a backward is two forwards.
BUBBLES = {
    "gpipe": lambda k, m: _share(3 * (k - 1), 3 * m),  # Huang et al. 2019: (K - 1) / (M + K - 1)
    "1f1b": lambda k, m: _share(3 * (k - 1), 3 * m),
    "interleaved": lambda k, m: _share(3 * (k - 1), 3 * 2 * m),  # Narayanan et al. 2021: divided by the chunks
    "zb-h1": lambda k, m: _share(k - 1, 3 * m),  # Qi et al. 2024: (K - 1) (F + B - W), all 1
    # as long as it takes a chunk to get from the first stage to the last, and more with too few micro-batches
    "zb-v": lambda k, m: _share(k - 1 + max(0, 2 * k - 1 - m), 6 * m),
    "dualpipe-v": lambda k, m: _share(k - 1 + max(0, 2 * k - 1 - m), 6 * m),
    "lockstep": lambda k, m: _share(3 * (k - 1), 3 * m),
    "lockstep-zb": lambda k, m: _share(k - 1, 3 * m),
}


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("stages,microbatches", SIZES, ids=lambda n: str(n))
def test_a_schedules_bubble_is_its_closed_form(name, stages, microbatches):
    result = simulate(SCHEDULES[name](stages, microbatches))
    assert result.bubble == pytest.approx(BUBBLES[name](stages, microbatches))


@pytest.mark.parametrize("name,bubble", [("gpipe", 3 / 11), ("lockstep", 3 / 11), ("lockstep-zb", 6 / 30)])
def test_what_is_made_for_lockstep_idles_no_more_in_lockstep(name, bubble):
    assert simulate(SCHEDULES[name](4, 8)).lockstep_bubble == pytest.approx(bubble)


def test_a_classical_table_idles_more_in_lockstep():
    # 7 ticks with a forward and 8 with a backward of any stage; each stage has 4 of each.
    result = simulate(one_f_one_b(2, 4))
    assert result.entered == (7, 8, 0)
    assert result.lockstep_bubble == pytest.approx(1 - 4 * 3 / (7 + 2 * 8))


@pytest.mark.parametrize(
    "name,stash",
    [
        ("gpipe", (8, 8, 8, 8)),
        ("1f1b", (4, 3, 2, 1)),
        ("zb-h1", (4, 4, 4, 4)),
        ("lockstep", (7, 5, 3, 1)),
        ("zb-v", (8, 8, 8, 8)),  # chunks of half a stage: as much as 1F1B's first stage, on all stages
        ("dualpipe-v", (9, 9, 9, 9)),  # DeepSeek-AI 2024: one more than twice the stages
        ("interleaved", (11, 9, 7, 5)),  # chunks of half a stage each: 2 (K - 1 - s) + (V - 1) K + 1
    ],
)
def test_a_schedules_stash_is_its_papers(name, stash):
    assert simulate(SCHEDULES[name](4, 8)).stash == stash


def _clock(table: Table, stage: int, joint: bool = False) -> tuple[float, float]:
    """When a stage begins its first op, and how long it is idle after that, in forwards of a chunk.

    Ops of one tick end one after the other, or `joint`, as DualPipe's.
    """
    when, ends = validate(table), {}
    clock, begin, idle = np.zeros(table.stages), np.full(table.stages, -1.0), np.zeros(table.stages)
    for tick, s in sorted({(tick, op[1]) for op, tick in when.items()}):
        ops = [(p, s, int(k)) for p, k in enumerate(table.slots[tick, s]) if k >= 0]
        for group in [ops] if joint else [[op] for op in ops]:
            ready = max([ends[b] for op in group for b, _ in table.needs(op) if b not in group], default=0.0)
            start = max(clock[s], ready)
            idle[s] += start - clock[s] if joint or begin[s] >= 0 else 0
            begin[s] = start if begin[s] < 0 else begin[s]
            clock[s] = start + len(group)
            ends |= dict.fromkeys(group, clock[s])
    return begin[stage], idle[stage] + (clock.max() - clock[stage] if joint else 0)


@pytest.mark.parametrize("stages,microbatches", [(2, 3), (4, 7), (4, 16), (8, 16)])
def test_stages_of_zb_v_are_never_idle_between_their_first_op_and_their_last(stages, microbatches):
    table = SCHEDULES["zb-v"](stages, microbatches)
    assert [_clock(table, s) for s in range(stages)] == [(s, 0) for s in range(stages)]


@pytest.mark.parametrize("stages,microbatches", [(2, 4), (4, 8), (8, 32)])
def test_dualpipe_v_has_the_bubble_of_its_authors(stages, microbatches):
    # DeepSeek-AI 2024: (PP / 2 - 1) (F&B + B - 3 W), with two of PP chunks on a device, here of F&B = 3, B = 2, W = 1
    table = SCHEDULES["dualpipe-v"](stages, microbatches)
    assert [_clock(table, s, joint=True)[1] for s in range(stages)] == [(stages - 1) * (3 + 2 - 3)] * stages


def test_the_first_stage_of_a_v_has_both_ends():
    for name in ("zb-v", "dualpipe-v"):
        table = SCHEDULES[name](3, 6)
        assert table.needs((F, 0, 6)) == [((F, 1, 6), 1)] and table.needs((F, 2, 6)) == [((F, 2, 0), 1)]
        assert table.needs((B, 0, 6)) == [((F, 0, 6), 0)]


def _broken(change) -> Table:
    table = gpipe(2, 2)
    slots = table.slots.copy()
    change(slots)
    return dataclasses.replace(table, slots=slots)


def _drop(slots):
    slots[slots[:, 1, B] == 1, 1, B] = -1


def _double(slots):
    slots[0, 1, F] = 0


def _reorder(slots):
    slots[[0, 1]] = slots[[1, 0]]


def _foreign(slots):
    slots[0, 0, F] = 7


def _weights(slots):
    slots[-1, 0, W] = 0


@pytest.mark.parametrize(
    "change,words",
    [
        (_drop, ["never runs B1 on stage 1"]),
        (_double, ["runs F0 on stage 1 twice, at ticks 0 and 1"]),
        (_reorder, ["runs F0 on stage 1 at tick 0, and it needs F0 on stage 0, which runs at tick 1", "is tick 2"]),
        (_foreign, ["at tick 0, which is outside of its 2 micro-batches"]),
        (_weights, ["has W0 on stage 0", "phases F, B"]),
    ],
    ids=lambda x: getattr(x, "__name__", "")[1:],
)
def test_a_wrong_table_is_refused_by_its_first_wrong_op(change, words):
    with raises_saying(LayoutError, "'gpipe'", *words):
        validate(_broken(change))


def test_an_order_that_deadlocks_is_refused():
    orders = [[(F, 0), (B, 0), (F, 1), (B, 1)], [(F, 1), (F, 0), (B, 0), (B, 1)]]  # stage 1 waits for 1, 0 for 0's B
    with raises_saying(LayoutError, "'mine' deadlocks", "tick 1", "F1 on stage 0"):
        place("mine", 2, 2, 1, 2, lambda s, p, k, done: 0 if orders[s][done.sum()] == (p, k) else None)


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_table_survives_a_file(name, tmp_path):
    table = SCHEDULES[name](2, 4)
    (tmp_path / "t.csv").write_text(to_csv(table))
    read = from_csv(tmp_path / "t.csv")
    assert (read.slots == table.slots).all()
    for size in ("stages", "microbatches", "chunks", "phases", "placement"):
        assert getattr(read, size) == getattr(table, size)


@pytest.mark.parametrize(
    "text,words",
    [
        ("F0,\n,G0\n", ["line 2", "'G0'", "as F0"]),
        ("F0 F1,\n", ["line 1", "stage 0 has two F"]),
        ("F0,\n,F0\n,B0\n", ["never runs B0 on stage 0"]),
        ("", ["no ops"]),
        ("placement w\nF0,\n", ["line 1", "placement 'w'", "ring or v"]),
    ],
    ids=["letter", "twice", "skipped", "empty", "placement"],
)
def test_a_file_that_is_no_table_is_refused(text, words, tmp_path):
    (tmp_path / "t.csv").write_text(text)
    with raises_saying(LayoutError, "t.csv", *words):
        from_csv(tmp_path / "t.csv")


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("phases", [2, 3])
def test_tables_drawn_at_random_are_valid(seed, phases):
    table = random_table(3, 4, chunks=2, phases=phases, seed=seed)
    assert len(validate(table)) == 3 * 4 * 2 * phases


def test_the_forward_phases_alone_are_a_table():
    table = forward_only(interleaved(2, 4))
    assert len(validate(table)) == 2 * 4 * 2
    assert (table.slots[..., B] < 0).all() and len(table.slots) == 9


def test_a_picture_has_a_line_per_stage():
    assert draw_text(gpipe(2, 2)) == "stage 0  F0 F1 .  .  B0 B1\nstage 1  .  F0 F1 B0 B1 ."
    assert "F1.1" in draw_text(interleaved(2, 2))
    assert draw_figure(interleaved(2, 2)).axes[0].get_title() == "interleaved: 2 stages, 2 micro-batches"


# --- names and numbers


def test_a_pipeline_is_written_in_a_word():
    assert Pipeline.of("1f1b:8") == Pipeline("1f1b", 8)
    assert Pipeline.of("interleaved:8:4") == Pipeline("interleaved", 8, 4)
    assert Layout("pipeline=2", pipeline="gpipe").schedule == Pipeline("gpipe")
    assert Layout("pipeline=2").schedule == Pipeline("lockstep")
    assert str(Layout("pipeline=2,data=4", pipeline="gpipe:8")) == "pipeline=2,data=4 (fsdp_tensor, gpipe)"


@pytest.mark.parametrize(
    "text,words",
    [
        ("1f1bb", ["'1f1bb'", "did you mean '1f1b'"]),
        ("gpipe:0", ["microbatches = 0", "at least 1"]),
        ("gpipe:4:2", ["'gpipe' has 1 chunk", "interleaved"]),
        ("zb-v:4:3", ["'zb-v' has 2 chunks", "interleaved"]),
        ("dualpipe:4", ["'dualpipe'", "parameters on two devices", "use 'dualpipe-v'"]),
        (3, ["is a string", "3"]),
    ],
    ids=str,
)
def test_a_pipeline_that_is_none_is_refused(text, words):
    with raises_saying(LayoutError, *words):
        Layout("pipeline=2", pipeline=text)


def test_a_schedule_that_is_no_function_of_stages_and_micro_batches_is_refused():
    for schedule in (lambda stages: None, 3):
        with raises_saying(LayoutError, "Pipeline.schedule", "(stages, microbatches)"):
            Pipeline(schedule)


@pytest.mark.parametrize(
    "pipeline,stages,rows,split,expected",
    [
        ("lockstep", 2, 64, 1, 8),  # at most 4 a stage
        ("lockstep", 4, 24, 2, 12),
        ("lockstep", 2, 6, 4, None),
        ("1f1b:4", 2, 8, 2, 4),
        ("interleaved", 4, 24, 2, 12),
        ("interleaved", 3, 16, 1, None),
    ],
)
def test_micro_batches_are_as_many_as_fit(pipeline, stages, rows, split, expected):
    pipeline = Pipeline.of(pipeline)
    if expected is not None:
        assert pipeline.microbatches_of(stages, rows, split) == expected
    else:
        with raises_saying(LayoutError, f"{rows} rows", f"'{pipeline.name}'", "nearest batch"):
            pipeline.microbatches_of(stages, rows, split)


def test_micro_batches_that_do_not_divide_the_batch_are_refused_with_the_nearest():
    with raises_saying(LayoutError, "5 micro-batches", "8 rows over 2", "the nearest number that does is 4"):
        Pipeline("1f1b", 5).microbatches_of(2, 8, 2)
    with raises_saying(LayoutError, "6 micro-batches", "multiple of 4", "is 4"):
        Pipeline("interleaved", 6).microbatches_of(4, 48, 2)


def test_parameters_are_gathered_by_layer_or_by_step():
    with raises_saying(LayoutError, "Pipeline.gather = 'stage'", "'layer' or 'step'"):
        Pipeline(gather="stage")
    with raises_saying(LayoutError, "Pipeline.vocabulary = 'cut'", "'sharded' or 'whole'"):
        Pipeline(vocabulary="cut")


def test_micro_batches_that_are_no_multiple_of_the_stages_are_refused_with_the_nearest():
    with raises_saying(LayoutError, "'interleaved'", "groups of 4", "6", "is 8"):
        interleaved(4, 6)


def test_a_table_for_other_sizes_is_refused(tmp_path):
    (tmp_path / "t.csv").write_text(to_csv(gpipe(2, 4)))
    own = Pipeline(str(tmp_path / "t.csv"))
    assert own.microbatches_of(2, 8, 1) == 4
    with raises_saying(LayoutError, "t.csv", "2 stages, 4 micro-batches and 1 chunk", "has 4, 4 and 1", "pipeline=2"):
        own.table(4, 4)
    with raises_saying(LayoutError, "2 chunk(s)", "has 2, 4 and 1", "chunks=2"):
        Pipeline(lambda stages, micro: interleaved(stages, micro)).table(2, 4)
    with raises_saying(LayoutError, "placement 'v'", "attribute 'placement'"):
        Pipeline(lambda stages, micro, chunks=2: SCHEDULES["zb-v"](stages, micro), chunks=2).table(2, 4)
    with raises_saying(LayoutError, "returned ndarray"):
        Pipeline(lambda stages, micro: np.zeros((stages, micro))).table(2, 4)


def test_a_file_that_was_changes_is_read_again(tmp_path):
    for table in (gpipe(2, 4), one_f_one_b(2, 4)):
        (tmp_path / "t.csv").write_text(to_csv(table))
        assert draw_text(Pipeline(str(tmp_path / "t.csv")).table(2, 4)) == draw_text(table)


def test_a_stack_that_stages_or_chunks_do_not_divide_is_sharded_along_its_width():
    names = ("layers", "embed", "mlp")
    spec = lambda pipeline, layers: tuple(  # noqa: E731
        Layout("pipeline=2,fsdp=2,tensor=2", pipeline=pipeline).spec(names, (layers, 16, 32))
    )
    assert spec("gpipe", 6) == spec("interleaved", 4) == ("pipeline", "fsdp", "tensor")
    assert spec("gpipe", 5) == spec("interleaved", 6) == (None, ("fsdp", "pipeline"), "tensor")
    with raises_saying(LayoutError, "'layers'", "shards 5 over 2"):
        Layout("pipeline=2").spec(("layers", "norm"), (5, 7))
