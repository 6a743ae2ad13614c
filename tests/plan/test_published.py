"""The published record that the planner is held against: complete, and split before anything is fitted."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from jaxscale.layout import Layout
from jaxscale.layout.mesh import parse_mesh
from jaxscale.nn import MemoryPolicy

FOLDER = Path(__file__).parents[2] / "experiments" / "planner_accuracy" / "published"
FILES = {p.stem: json.loads(p.read_text()) for p in sorted(FOLDER.glob("*.json"))}
RUNS = {r["name"]: (f, r) for f in FILES.values() for r in f.get("runs", [])}


def test_every_run_is_either_fitted_on_or_held_out():
    split = FILES["split"]
    assert sorted(split["fit"] + split["held_out"]) == sorted(RUNS)
    assert len(split["held_out"]) > 2 * len(split["fit"])


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
    rows = math.prod(sizes.get(a, 1) for a in ("data", "fsdp")) * ours["accumulate"]
    microbatches = layout.schedule.microbatches if ours["pipeline"] else 1
    assert run["global_batch"] == run["micro_batch"] * rows * microbatches
