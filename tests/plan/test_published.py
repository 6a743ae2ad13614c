"""The published record that the planner is held against: complete, and split before anything is fitted."""

from __future__ import annotations

import hashlib
import importlib
import json
import math
import re
from pathlib import Path

import pytest

from jaxscale.hardware import chip, chips, topology
from jaxscale.layout import Layout
from jaxscale.layout.mesh import parse_mesh
from jaxscale.nn import MemoryPolicy
from tests.truth.long import short

FOLDER = Path(__file__).parents[2] / "experiments" / "planner_accuracy" / "published"
FILES = {p.stem: json.loads(p.read_text()) for p in sorted(FOLDER.glob("*.json"))}
RUNS = {r["name"]: (f, r) for f in FILES.values() for r in f.get("runs", [])}


def test_every_run_is_either_fitted_on_or_held_out():
    split = FILES["split"]
    assert sorted(split["fit"] + split["held_out"]) == sorted(RUNS)
    assert len(split["held_out"]) > len(split["fit"])


@pytest.mark.parametrize(("part", "parity"), [("fit", 0), ("held_out", 1)])
def test_runs_that_were_not_drawn_by_hand_are_split_by_a_hash_of_their_name(part, parity):
    names = FILES["split"][part][FILES["split"]["drawn"][part] :]
    assert names
    assert {hashlib.sha256(name.encode()).digest()[0] % 2 for name in names} == {parity}


@pytest.mark.parametrize("name", RUNS)
def test_a_run_names_its_source_its_model_and_a_layout_of_ours(name):
    file, run = RUNS[name]
    assert run["source"] in file["sources"]
    assert run["model"] in file["models"]
    ours = run["ours"]
    layout = Layout(ours["mesh"], ours["rules"], ours["sequence_sharded"], ours["pipeline"])
    memory = ours["memory"]
    MemoryPolicy.of(memory if isinstance(memory, str) else MemoryPolicy(**memory))
    sizes = parse_mesh(layout.mesh)
    rows = math.prod(sizes.get(a, 1) for a in ("data", "fsdp", "expert")) * ours["accumulate"]
    microbatches = layout.schedule.microbatches if ours["pipeline"] else 1
    assert run["global_batch"] == run["micro_batch"] * rows * microbatches
    assert math.prod(sizes.values()) == topology(run["topology"]).devices


@pytest.mark.parametrize("name", chips())
def test_constants_are_fitted_on_runs_for_fitting_alone(name):
    source = chip(name).sources.get("efficiency", "")
    assert bool(source) == bool(chip(name).efficiency)
    runs = re.findall(r"[a-z]+(?:-[a-z0-9]+){3,}", source)
    assert set(runs) <= set(FILES["split"]["fit"])
    assert all(RUNS[run][1]["topology"].startswith(name + ":") for run in runs)
    long = [run for run in runs if RUNS[run][1]["sequence"] >= 16384]
    assert ("attention" in chip(name).efficiency) == (len(long) >= 3) == bool(long)


def test_the_committed_ratios_say_each_runs_regime_and_split():
    rows = json.loads((FOLDER.parent / "throughput.json").read_text())["runs"]
    assert sorted(row["name"] for row in rows) == sorted(RUNS)
    for row in rows:
        file, run = RUNS[row["name"]]
        assert row["name"] in FILES["split"][row["split"]]
        assert (row["regime"] == "experts") == ("experts" in file["models"][run["model"]])
        assert (row["regime"] == "long") == (run["sequence"] >= 16384 and row["regime"] != "experts")
        assert row["chip"] == run["topology"].split(":")[0] and row["ratio"] > 0


@pytest.mark.parametrize(
    "name",
    short(
        2,
        [
            "maxtext-v5p-64b-1x128",
            "maxtext-tpu7x-llama3-8b-1048576-64",
            "maxtext-v6e-mixtral-8x22b-256",
            "mpt-a100-7b-32768-8",
            "nemo-h100-llama3-70b-64",
            "torchtitan-a100-llama3-70b-64",
        ],
    ),
)
def test_a_held_out_run_is_predicted_from_its_configuration(name, monkeypatch):
    """Within a quarter: the experiment's tables say how closely; here, that nothing between is broken."""
    monkeypatch.syspath_prepend(str(FOLDER.parent))
    file, run = RUNS[name]
    assert name in FILES["split"]["held_out"]
    assert 0.75 < importlib.import_module("throughput").run_of(run, file["models"][run["model"]]).ratio() < 1.25
