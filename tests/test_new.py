"""`jaxscale new` writes an experiment that runs as it is."""

from __future__ import annotations

import importlib.util
import json
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from jaxscale import Layout
from jaxscale.cli import main
from jaxscale.commands.new import write
from jaxscale.errors import ConfigError
from jaxscale.testing import check_model, check_objective

DEVICES = 8


@pytest.mark.long
def test_the_written_script_trains_and_so_does_its_gin_file(tmp_path: pathlib.Path) -> None:
    script, config, _ = write(tmp_path / "my-study")
    assert script.name == "my_study.py"
    assert len(script.read_text().splitlines()) <= 300
    ran = subprocess.run(
        [sys.executable, script.name, "--steps", "2"], cwd=script.parent, capture_output=True, text=True, check=True
    )
    assert "step    1   loss" in ran.stdout
    arguments = ["train", config.name, "--devices", str(DEVICES), "--gin.train.steps=2", "--gin.train.eval_batches=1"]
    ran = subprocess.run(
        [sys.executable, "-m", "jaxscale", *arguments], cwd=script.parent, capture_output=True, text=True, check=True
    )
    assert "the run is in" in ran.stdout


@pytest.mark.long
def test_the_model_and_the_objective_keep_their_promises_on_every_layout(tmp_path: pathlib.Path) -> None:
    script, _, _ = write(tmp_path / "promises")
    spec = importlib.util.spec_from_file_location("promises", script)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["promises"] = module
    spec.loader.exec_module(module)
    small = module.Config(vocab=256, width=32, heads=2, depth=1)
    assert "LanguageModel" in check_model(small)
    objective = module.SmoothedNextToken(smoothing=0.1)
    options = dict(batch_size=8, seq_len=16)
    trainers = [
        module.Trainer(small, objective, Layout(mesh), **options) for mesh in ("data=1", "data=2,fsdp=2,tensor=2")
    ]
    losses = [trainer.train(2, log_every=99) for trainer in trainers]
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-5)
    check_objective(trainers[0].settings, trainers[0].loader.batch_at(0))


@pytest.mark.long
def test_the_written_notebook_runs(tmp_path: pathlib.Path) -> None:
    _, _, notebook = write(tmp_path / "pages")
    cells = [c for c in json.loads(notebook.read_text())["cells"] if c["cell_type"] == "code"]
    source = "import matplotlib; matplotlib.use('agg')\n" + "\n".join("".join(cell["source"]) for cell in cells)
    assert source.count("steps=40") == 2
    source = source.replace("steps=40", "steps=4")  # the other 36 take half of the time
    subprocess.run([sys.executable, "-c", source], cwd=notebook.parent, check=True, capture_output=True)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("2nd", "cannot name a Python module"),
        ("class", "cannot name a Python module"),
        ("json", "installed module, which it would hide; choose 'json_study'"),
    ],
)
def test_a_name_that_python_cannot_import_is_refused(tmp_path: pathlib.Path, name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        write(tmp_path / name)
    assert not (tmp_path / name).exists()


def test_names_with_the_templates_markers_and_folders_that_cannot_be_made(tmp_path: pathlib.Path) -> None:
    _, config, _ = write(tmp_path / "myCLASS")
    assert "import myCLASS\n" in config.read_text() and "@MyCLASSModel()" in config.read_text()
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="sub cannot be written: Not a directory"):
        write(tmp_path / "file" / "sub")


def test_nothing_is_overwritten(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["new", str(tmp_path / "mine")]) == 0
    assert "python mine.py" in capsys.readouterr().out
    (tmp_path / "mine" / "mine.py").write_text("x = 1\n")
    assert main(["new", str(tmp_path / "mine")]) == 2
    assert "mine.py exists already; name a new folder" in capsys.readouterr().err
    assert (tmp_path / "mine" / "mine.py").read_text() == "x = 1\n"
