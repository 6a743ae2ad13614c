"""Every notebook runs top to bottom, and is the same text as its paired script."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).resolve().parents[1] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
LARGEST = 300_000  # bytes, outputs included


def _cells(notebook: Path) -> list[dict[str, Any]]:
    return json.loads(notebook.read_text())["cells"]


def test_there_are_notebooks_and_each_script_has_its_pair():
    assert NOTEBOOKS
    assert {p.stem for p in NOTEBOOKS} == {p.stem for p in FOLDER.glob("*.py")}


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda p: p.stem)
def test_a_notebook_and_its_script_are_the_same_text(notebook: Path):
    import jupytext

    script = jupytext.read(notebook.with_suffix(".py"))
    expected = [(c.cell_type, c.source) for c in script.cells]
    actual = [(c["cell_type"], "".join(c["source"])) for c in _cells(notebook)]
    assert actual == expected, f"run: jupytext --sync notebooks/{notebook.name}, then execute it again"


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda p: p.stem)
def test_a_notebook_keeps_small_outputs_and_no_errors(notebook: Path):
    assert notebook.stat().st_size < LARGEST
    code = [c for c in _cells(notebook) if c["cell_type"] == "code"]
    outputs = [o for c in code for o in c["outputs"]]
    assert any("image/png" in o.get("data", {}) for o in outputs)
    assert not [o for o in outputs if o["output_type"] == "error" or o.get("name") == "stderr"]
    assert [c["execution_count"] for c in code] == list(range(1, len(code) + 1)), "not executed top to bottom"


@pytest.mark.long
@pytest.mark.once
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda p: p.stem)
def test_a_notebook_runs_top_to_bottom(notebook: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    import matplotlib

    monkeypatch.chdir(tmp_path)  # for files that it writes to the current folder
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    matplotlib.use("agg")
    names: dict[str, Any] = {"__name__": "__main__", "display": lambda *_, **__: None}
    for i, cell in enumerate(_cells(notebook)):
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), f"{notebook.name}, cell {i}", "exec"), names)
    import matplotlib.pyplot as plt

    plt.close("all")
