"""The check of a device: every verdict occurs, no process stops the others, and faults withdraw kernels."""

from __future__ import annotations

import json
import os
import queue
import signal
import sys
import time

import jax
import pytest

from pallas_kernels import dispatch, withdrawn
from tests.pallas_kernels import comparison, device_check, device_rows, misbehaving, on_device, parity, works
from tests.pallas_kernels.misbehaving import half_written, one_row_wrong, program, raises, refused, right, unlike, wrong
from tests.pallas_kernels.on_device import Process, Task, Worker

RUN = {"device": "cpu", "interpreted": False, "commit": "0123456789ab", "jax": "0.11.2", "date": "2026-11-30"}


@pytest.mark.parametrize(
    "f, verdict",
    [
        (right, "ok"),
        (wrong, "WRONG"),
        (one_row_wrong, "WRONG"),
        (unlike, "NOT THE SAME TWICE"),
        (half_written, "UNWRITTEN"),
        (refused, "not supported: it is too odd"),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_a_verdict_occurs(f, verdict, monkeypatch):
    monkeypatch.setattr(misbehaving, "_garbage", misbehaving._garbage)
    (row,) = device_check.check(misbehaving.work(f), "xla", program(f, 3), poison=misbehaving.poison)
    assert row["verdict"] == verdict


def test_results_that_may_vary_are_ok_and_have_a_spread(monkeypatch):
    monkeypatch.setattr(device_check, "may_vary", lambda work, backend, part: True)
    (row,) = device_check.check(misbehaving.work(unlike), "xla", program(unlike, 3), poison=misbehaving.poison)
    assert row["verdict"] == "ok" and not row["same"] and 0 < row["spread"] < 1e-6


def test_only_a_gradient_that_hopper_adds_up_in_any_order_may_vary():
    every = device_check.works("cpu")
    vary = {
        (w.op, b, p) for w in every for b in parity.BACKENDS for p in w.parts if device_check.may_vary(w, b, p)
    }  # fmt: skip
    assert vary == {("flash_attention", "mosaic_gpu", "dq")}
    assert not any(device_check.may_vary(w, "mosaic_gpu", "dq") for w in every if "deterministic" in w.name)


def test_an_error_of_a_run_is_fatal_and_has_its_first_line():
    with pytest.raises(device_check.Crash, match="crashed: run: ") as caught:
        device_check.check(misbehaving.work(raises), "xla", program(raises, 3))
    assert caught.value.fatal and "\n" not in str(caught.value)


def test_memory_is_filled_with_nan():
    assert device_check.fill_free_memory() is None  # a CPU does not say how much is free
    assert jax.numpy.isnan(device_check._fill(256)().view("bfloat16")).all()


def test_other_seeds_draw_other_data_and_the_tables_stay():
    work = next(w for w in works.works() if w.op == "decode_attention")
    key = lambda seed: str(jax.tree.leaves(work.make(seed).arrays)[0])  # noqa: E731
    assert len({key(None), key(1), key(2)}) == 3 and key(1) == key(1)
    assert comparison.draws(2, None) == 2


def test_every_op_makes_its_arrays_from_a_seed():
    first = {work.op: work for work in reversed(list(works.works()))}
    for work in first.values():
        assert jax.tree.leaves(work.make(7).arrays), work.op


# processes ---------------------------------------------------------------------------------------------------------

STUB = """
import json, os, signal, sys, time
answers = os.fdopen(int(sys.argv[-1]), "w")
say = lambda x: (answers.write(json.dumps(x) + "\\n"), answers.flush())
say({})
for line in sys.stdin:
    what = json.loads(line)["work"]
    if what == 1:
        print("Check failed: something", flush=True)
        os.kill(os.getpid(), signal.SIGABRT)
    if what == 2:
        time.sleep(60)
    if what == 99:
        os.kill(os.getpid(), signal.SIGKILL)
    names = {"op": "toy", "feature": str(what), "dtype": "float32", "part": "y", "backend": "xla"}
    say({"rows": [names | {"verdict": "ok"}], "last": what == 3})
    if what == 3:
        sys.exit(0)
"""
"""A stand-in for `device_check` without JAX: task 1 dies, 2 hangs, 3 is the process' last, 99 kills it."""


def _verdicts(count, *, limit=0.5, deadline=30.0, code=STUB):
    """Return the verdicts of `count` tasks."""
    tasks, rows = queue.SimpleQueue(), []
    for i in range(count):
        tasks.put(Task(i, {"op": "toy", "feature": str(i), "dtype": "float32", "large": False}, ("y",), ("xla",)))
    start = lambda: Process([sys.executable, "-S", "-c", code], os.environ)  # noqa: E731
    worker = Worker(tasks, start, rows.extend, limit, time.monotonic() + deadline)
    worker.thread.join(30)
    assert not worker.thread.is_alive()
    return [row["verdict"] for row in rows]


def test_a_process_that_dies_or_hangs_loses_the_case_it_was_in():
    first, dies, hangs, *others = _verdicts(6)
    assert (first, *others) == ("ok",) * 4
    assert dies == "crashed: the process died of SIGABRT: Check failed: something"
    assert hangs.startswith("crashed: hung: no answer in")


def test_tasks_left_at_the_deadline_have_no_time():
    assert _verdicts(4, limit=60, deadline=1.0)[2:] == ["no time", "no time"]


NOISE = """ERROR:2026-11-22:jax._src.xla_bridge:487: Jax plugin configuration error: Exception when calling it
Traceback (most recent call last):
  File "xla_bridge.py", line 485, in discover_pjrt_plugins
    plugin_module.initialize()
    ~~~~~~~~~~~~~~~~~~~~~~~~^^
RuntimeError: Unable to load cuDNN. Is it installed?"""


@pytest.mark.parametrize(
    "before, after, why",
    [("", "", ""), ("it begins", "", ": it begins"), ("", "RuntimeError: mine", ": RuntimeError: mine")],
)
def test_the_reason_of_a_death_is_not_what_jax_says_on_starting(before, after, why):
    code = f"print({before!r}); print({NOISE!r}); print({after!r}, flush=True)\n{STUB}"
    process = Process([sys.executable, "-S", "-c", code], os.environ)
    process.answer(30)
    process.tell({"work": 99})
    with pytest.raises(on_device.Ended, match=f"^the process died of SIGKILL{why}$"):
        process.answer(30)


def test_tasks_in_progress_when_workers_stop_have_no_time():
    tasks, rows = queue.SimpleQueue(), []
    tasks.put(Task(2, {"op": "toy", "feature": "2", "dtype": "float32", "large": False}, ("y",), ("xla",)))
    process = Process([sys.executable, "-S", "-c", STUB], os.environ)
    process.answer(30)
    worker = Worker(tasks, lambda: process, rows.extend, 60, time.monotonic() + 60, process)
    while not tasks.empty():
        time.sleep(0.01)
    time.sleep(0.1)
    worker.stop()
    worker.thread.join(30)
    assert [row["verdict"] for row in rows] == ["no time"]


def test_a_lane_whose_processes_do_not_start_gives_up():
    assert _verdicts(9, code="raise SystemExit('no device')") == [
        "crashed: the process ended with status 1: no device"
    ] * 3  # fmt: skip


@pytest.mark.long
@pytest.mark.once
def test_the_command_writes_every_row_and_fails_when_one_is_wrong(tmp_path, capsys):
    out = tmp_path / "rows.jsonl"
    status = on_device.main(["--out", str(out), "--seed", "5", "--works", misbehaving.__name__, "--jobs", "1"])
    first, *rows, last = map(json.loads, out.read_text().splitlines())
    assert status == 1 and first["run"]["seed"] == 5 and last["summary"]["WRONG"] == 1
    verdicts = {row["feature"]: row["verdict"].partition(":")[0] for row in rows}
    assert verdicts == {"wrong": "WRONG", "right": "ok"}
    assert "toy wrong float32 double xla: WRONG (error 5.0e-03" in capsys.readouterr().out


WORK = [["toy", str(i), "float32", ["y"], False] for i in range(3)]
ABOUT = {"platform": "cpu", "device": "cpu", "jax": "0.11.2", "memory": None, "backends": ["xla"], "works": WORK}
HANGS_AT_1 = STUB.replace("say({})", f"say(json.loads({json.dumps(ABOUT)!r}))").replace("what == 1", "False").replace(
    "what == 2", "what == 1"
)  # fmt: skip


@pytest.fixture
def stub(monkeypatch):
    """Replace the command's processes by stubs, which hang in the second of three cases."""
    made = lambda *_: Process([sys.executable, "-S", "-c", HANGS_AT_1], os.environ)  # noqa: E731
    monkeypatch.setattr(on_device, "Process", made)


def test_rows_that_were_not_reached_are_a_status_of_their_own(stub, tmp_path, capsys):
    out = tmp_path / "rows.jsonl"
    assert on_device.main(["--out", str(out), "--jobs", "1", "--seconds", "2"]) == 3
    assert capsys.readouterr().out.endswith("not reached: 2 of 3 rows (give it more --seconds)\n")
    assert on_device.main(["--withdraw", str(out)]) == 0
    assert "not reached: 2 of 3 rows; nothing is known of them" in capsys.readouterr().out


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_has_no_rows_of_unfinished_tasks(stub, number, tmp_path, capsys, monkeypatch):
    out = tmp_path / "rows.jsonl"
    record = on_device.Journal.record

    def recorded(journal, rows):
        record(journal, rows)
        if rows[0]["feature"] == "0":
            os.kill(os.getpid(), number)

    monkeypatch.setattr(on_device.Journal, "record", recorded)
    before = signal.getsignal(number)
    assert on_device.main(["--out", str(out), "--jobs", "1"]) == 128 + number
    assert capsys.readouterr().err == f"on_device: interrupted, with 1 of 3 rows in {out}\n"
    _, row, last = map(json.loads, out.read_text().splitlines())
    assert row["verdict"] == "ok" and last == {"summary": {"ok": 1, "interrupted": True}}
    assert signal.getsignal(number) is before


def test_a_mistyped_backend_starts_nothing(stub, tmp_path, capsys, monkeypatch):
    assert set(on_device.INTERPRETED) == set(parity.BACKENDS)
    monkeypatch.delattr(on_device, "Process")
    assert on_device.main(["--out", str(tmp_path / "rows"), "--interpret", "mosaic_gp"]) == 2
    assert capsys.readouterr().err.endswith("did you mean 'mosaic_gpu'?\n")


# withdrawing -------------------------------------------------------------------------------------------------------


@pytest.fixture
def table(tmp_path, monkeypatch):
    monkeypatch.setattr(withdrawn, "FILE", tmp_path / "withdrawn.json")
    withdrawn.FILE.write_text("[]")
    return withdrawn.FILE


def test_every_row_has_an_entry_that_withdraws_what_it_ran(table):
    """Uses the ops' own static cases, so that names in an entry exist."""
    once = {(w.op, *w.parts): w for w in works.works() if w.dtype == "bfloat16"}
    for work in once.values():
        made = work.make(None)
        with dispatch.choosing() as ran:
            jax.eval_shape(made.ours("xla"), *made.arrays)
        for part in work.parts:
            row = device_check._row(work, "xla", part, "WRONG")
            table.write_text(json.dumps(device_rows.withdrawals([row], RUN)))
            withdrawn._read.cache_clear()
            hit = [c for c in ran.values() if withdrawn.why(c.op, "xla", "cpu", dict(c.case))]
            assert hit, (work.name, part)
            assert not any(withdrawn.why(c.op, "xla", "NVIDIA H200", dict(c.case)) for c in hit)


def _row(verdict, part="dq", backend="mosaic_gpu"):
    names = {"op": "flash_attention", "feature": "causal", "dtype": "bfloat16", "part": part, "backend": backend}
    return names | {"verdict": verdict}


def test_withdrawing_prints_its_entries_and_leaves_the_rest(table, tmp_path, capsys):
    rows = [_row("WRONG"), _row("UNWRITTEN", "dk"), _row("ok", "out"), _row("WRONG", backend="xla")]
    rows += [_row("crashed: run", "out"), _row("no time", "lse")]
    out = tmp_path / "rows.jsonl"
    run = {"run": RUN | {"device": "NVIDIA H100 80GB HBM3"}}
    out.write_text("\n".join(map(json.dumps, [run, *rows, {"summary": {}}])))
    assert on_device.main(["--withdraw", str(out)]) == 0
    (entry,) = withdrawn.entries()
    assert entry["device"] == "NVIDIA H" and entry["case"] == {"direction": "backward", "dtype": "bfloat16"}
    assert entry["why"] == "flash_attention causal bfloat16 dq mosaic_gpu: WRONG, 2 such"
    output = capsys.readouterr().out
    assert output.endswith(f"rows that were not right: 3; entries written to {table}: 1\n")
    assert "cannot be withdrawn" in output and "left alone: 1; --crashed" in output
    assert "every H100 and H200" in output and "an NVIDIA H100 80GB HBM3" in output
    on_device.main(["--withdraw", str(out), "--crashed"])
    assert capsys.readouterr().out.endswith("1, and there already: 1\n")
    assert [e["case"]["direction"] for e in withdrawn.entries()] == ["backward", "forward"]


@pytest.mark.parametrize(
    "content, message",
    [
        (None, "cannot be read: No such file"),
        ("", "it is empty"),
        ("# A readme\n", "line 1 is no JSON"),
        ('{"op": "toy"}\n', "its first line does not say what was run"),
        (f'{json.dumps({"run": RUN})}\n{{"op"\n{{}}\n', "line 2 is no JSON"),
    ],
)
def test_withdrawing_refuses_a_file_of_another_kind(content, message, table, tmp_path, capsys):
    out = tmp_path / "rows.jsonl"
    if content is not None:
        out.write_text(content)
    assert on_device.main(["--withdraw", str(out)]) == 2
    output = capsys.readouterr()
    assert not output.out and message in output.err and output.err.count("\n") == 1
    assert on_device.main(["--withdraw", str(tmp_path)]) == 2 and "Is a directory" in capsys.readouterr().err


def test_a_last_line_that_is_cut_is_left_out(table, tmp_path, capsys):
    out = tmp_path / "rows.jsonl"
    out.write_text("\n".join(map(json.dumps, [{"run": RUN | {"rows": 9}}, _row("WRONG"), _row("WRONG", "dk")]))[:-9])
    assert on_device.main(["--withdraw", str(out)]) == 0
    output = capsys.readouterr().out
    assert "is cut" in output and "not reached: 8 of 9 rows" in output and "not right: 1; entries" in output
