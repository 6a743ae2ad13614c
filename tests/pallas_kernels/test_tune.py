"""The tuner, with a made-up op on the device that is here."""

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
LOG_LINE = {"op": "made_up", "device": "cpu", "key": KEY, "how": "measured"}


@pytest.fixture
def made_up(monkeypatch):
    """An op whose tiles are: right and slow, right and fast, wrong and fast, one that does not run."""

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


def test_the_fastest_tile_with_the_first_ones_result_is_taken(made_up):
    said = []
    (entry,) = trials.tune("made_up", "v5e", say=said.append)
    assert entry["tile"] == {"kind": "fast"} and entry["from"].startswith("measured")
    assert "'wrong and fast'}: its result is 2 from that of the first tile" in said[1]
    assert "'broken'}: does not run: no such tile" in said[2]


def test_what_was_tried_is_not_tried_again(made_up):
    known = [{"kind": "slow"}, {"kind": "broken"}]
    tried = trials.attempts("made_up", "v5e", KEY, known=known, say=lambda line: None)
    assert [a.tile["kind"] for a in tried] == ["wrong and fast", "fast"]


def test_a_log_knows_what_was_begun_and_not_finished(tmp_path):
    log = tune.Log(tmp_path / "tried.jsonl")
    lost, done = {"kind": "slow"}, {"kind": "fast"}
    for tile in (lost, done):
        log.add({"begun": 0.0, "worker": 0, "op": "made_up", "key": KEY, "tile": tile})
    log.add(trials.Attempt(**LOG_LINE, tile=done, seconds=1.0, problem=None))
    tried, begun = log.read()
    assert ([a.tile for a in tried], [b["tile"] for b in begun]) == ([done], [lost])


def test_a_process_that_ends_costs_the_candidate_it_was_at(tmp_path, monkeypatch, made_up):
    """The first process begins a tile and dies, the next one finishes another."""
    out = tmp_path / "tried.jsonl"
    begun = {"begun": 9e9, "worker": 0, "op": "made_up", "key": KEY, "tile": {"kind": "slow"}}
    done = {**LOG_LINE, "tile": {"kind": "fast"}, "seconds": 1.0, "problem": None}
    texts = [f"{json.dumps(line)}\n" for line in (begun, done)]
    popen = subprocess.Popen
    write = "import sys; open(sys.argv[1], 'a').write(sys.argv[2])"
    monkeypatch.setattr(
        subprocess, "Popen", lambda *_, **__: popen([sys.executable, "-c", write, str(out), texts.pop(0)])
    )
    monkeypatch.setattr(tune, "kind_of", trials.kind_of)
    args = types.SimpleNamespace(jobs=1, seconds=30.0, device="v5e")
    tune._several(args, [], tune.Log(out))
    tried, left = tune.Log(out).read()
    assert not left and not texts
    assert [(a.tile["kind"], a.problem) for a in tried] == [("slow", "its process ended or hung"), ("fast", None)]
