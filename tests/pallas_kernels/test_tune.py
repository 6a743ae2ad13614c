"""The tuner, with a made-up op on this machine's device."""

from __future__ import annotations

import json
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import trials, tune

pytestmark = pytest.mark.once
KEY = {"columns": 8}
LOG_LINE = {"op": "made_up", "device": "cpu", "key": KEY, "source": "measured"}


@pytest.fixture
def made_up(monkeypatch):
    """Make an op with a slow tile, a wrong and fast one, one that does not run, and a fast one."""

    def build(platform, key, tile):
        def fn(x):
            if tile["kind"] == "broken":
                raise ValueError("no such tile")
            y = jax.lax.fori_loop(0, 1 if "fast" in tile["kind"] else 20_000, lambda i, y: y + x * (i == 0), x)
            return -y if "wrong" in tile["kind"] else y

        return fn, (jax.ShapeDtypeStruct((8,), jnp.float32),)

    op = types.SimpleNamespace(
        keys=lambda platform: iter([KEY]),
        candidates=lambda platform, key: ({"kind": k} for k in ("slow", "wrong and fast", "broken", "fast")),
        build=build,
    )
    monkeypatch.setattr(trials, "tuning", lambda name: op)
    monkeypatch.setattr(trials, "kind_of", lambda topology: jax.devices()[0].device_kind)
    return op


def test_the_fastest_tile_with_the_first_ones_result_is_used(made_up):
    lines = []
    (entry,) = trials.tune("made_up", "v5e", say=lines.append)
    assert entry["tile"] == {"kind": "fast"} and entry["from"].startswith("measured")
    assert "'wrong and fast'}: its result is 2 from that of the first tile" in lines[1]
    assert "'broken'}: does not run: no such tile" in lines[2]


def test_known_tiles_are_not_tried_again(made_up):
    known = [{"kind": "slow"}, {"kind": "broken"}]
    tried = trials.attempts("made_up", "v5e", KEY, known=known, say=lambda line: None)
    assert [a.tile["kind"] for a in tried] == ["wrong and fast", "fast"]


def state(tile, what="begun", worker=0):
    return {"state": what, "at": 9e9, "worker": worker, "device": "cpu", "op": "made_up", "key": KEY, "tile": tile}


def test_a_log_returns_attempts_and_candidates_in_progress(tmp_path):
    log = tune.Log(tmp_path / "tried.jsonl")
    lost, done = {"kind": "slow"}, {"kind": "fast"}
    for tile in (lost, done):
        log.add(state(tile))
    log.add(state(lost, "timing"))
    log.add(trials.Attempt(**LOG_LINE, tile=done, seconds=1.0, problem=None))
    tried, under_way = log.read()
    assert [a.tile for a in tried] == [done]
    assert [(u["tile"], u["state"], u["times"]) for u in under_way] == [(lost, "timing", 1)]


def test_a_log_of_an_older_version_is_read(tmp_path):
    log = tune.Log(tmp_path / "tried.jsonl")
    log.add({"op": "made_up", "device": "cpu", "key": KEY, "tile": {}, "seconds": 1.0, "problem": None, "how": "x"})
    assert [a.source for a in log.read()[0]] == ["x"]


def test_candidates_in_progress_when_time_ran_out_are_tried_again(tmp_path):
    log = tune.Log(tmp_path / "tried.jsonl")
    log.add(state({"kind": "slow"}))
    log.add({"over": 0.0})
    assert log.read() == ([], [])


@pytest.fixture
def processes(tmp_path, monkeypatch):
    """Run the tuner's parent process over child processes, each of which writes its lines and then runs `then`."""

    def run(*of_each, then=""):
        out = tmp_path / "tried.jsonl"
        texts = ["".join(f"{json.dumps(line)}\n" for line in lines) for lines in of_each]
        popen, write = subprocess.Popen, f"import sys, time; open(sys.argv[1], 'a').write(sys.argv[2]); {then}"
        monkeypatch.setattr(
            subprocess, "Popen", lambda *_, **__: popen([sys.executable, "-c", write, str(out), texts.pop(0)])
        )
        went = tune._several(types.SimpleNamespace(jobs=1, seconds=30.0, device=None), [], tune.Log(out))
        return went, tune.Log(out).read()[0], texts

    return run


def test_a_process_that_ends_costs_the_candidate_it_was_at(processes):
    done = {**LOG_LINE, "tile": {"kind": "fast"}, "seconds": 1.0, "problem": None}
    _, tried, left = processes([state({"kind": "slow"})], [done])
    assert not left
    assert [(a.tile["kind"], a.problem) for a in tried] == [("slow", "its process ended or hung"), ("fast", None)]


def test_a_kernel_that_never_ends_is_ended(processes, monkeypatch):
    monkeypatch.setitem(tune.LIMITS, "timing", -1e12)  # however long it has taken
    _, tried, _ = processes([state({"kind": "slow"}, "timing")], [], then="time.sleep(60 * (sys.argv[2] != ''))")
    assert [a.problem for a in tried] == ["its process ended or hung"]


def test_where_one_process_cannot_work_none_is_started_again(processes):
    went, tried, left = processes([], ["never started"], then=f"sys.exit({tune.REFUSED})")
    assert (went, tried, len(left)) == (False, [], 1)


def test_a_tile_that_only_compiled_does_not_replace_a_measured_one(monkeypatch, capsys):
    entry = {"device": "cpu", "key": KEY, "tile": {"kind": "fast"}}
    monkeypatch.setattr(tune.tiles, "entries", lambda op: (entry | {"from": "measured 2026-11-22, jax 0.11.2"},))
    monkeypatch.setattr(tune.tiles, "write", lambda op, new: pytest.fail(f"{new} written"))
    tune._written({"made_up": [entry | {"from": "compiled"}]})
    assert "kept 1 measured entries" in capsys.readouterr().out


def test_a_cut_last_line_is_no_line_and_another_file_is_named(tmp_path, capsys):
    file = tmp_path / "tried.jsonl"
    file.write_text(json.dumps(state({"kind": "slow"})) + '\n{"op": "made')
    assert len(tune.Log(file).read()[1]) == 1
    file.write_text("# A README\n")
    assert tune.main(["--take", str(file)]) == tune.REFUSED
    assert "is not a file of attempts written by --out" in capsys.readouterr().err


@pytest.mark.parametrize("where", ["nonsense", "nonsense=1", "columns=nosuch"])
def test_unknown_keys_are_named(where, capsys):
    with pytest.raises(SystemExit):
        tune.main(["softmax", "--where", where])
    assert f"--where {where}: " in capsys.readouterr().err


def test_an_op_without_a_kernel_for_a_device_is_refused_and_one_of_those_named_is_tuned(monkeypatch, capsys):
    with pytest.raises(SystemExit):
        tune.main(["flash_attention", "--device", "b200"])
    message = capsys.readouterr().err
    assert "flash_attention has no kernel with tiles for b200, only " in message
    tuned: list[tuple[str, str]] = []
    monkeypatch.setattr(tune, "attempts", lambda op, topology, *_: tuned.append((op, topology)) or [])
    named = message.strip().partition(" only ")[2].split(", ")
    tune.main([*named, "--device", "b200"])
    assert {op for op, _ in tuned} == set(named) and {to for _, to in tuned} == {"b200"}
    tuned.clear()
    tune.main(["--device", "b200"])
    assert {op for op, _ in tuned} == set(named)


@pytest.mark.gpu_aot
def test_softmax_and_8_bit_updates_have_tiles_that_compile_for_a_b200():
    for argv in ("softmax --where kernel=row_sums --where dtype=float32", "blockwise --where param=bfloat16"):
        # In a process of its own, which compiles kernels for one architecture.
        words = [sys.executable, "-m", "pallas_kernels.tune", *argv.split(), "--device", "b200"]
        lines = subprocess.run(words, capture_output=True, text=True, check=True).stdout.splitlines()
        assert lines and all(line.endswith(": compiles") for line in lines)
