"""A command imports nothing from the current folder, unless requested."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from jaxscale import import_path
from jaxscale.cli import OWN_MODULES, main
from jaxscale.sweep import programs
from jaxscale.sweep.runners.pool import Worker
from jaxscale.sweep.runners.slurm import _path_line
from tests.truth.runs import environment

PLANTED = ("xxhash", "matplotlib", "rich", "argparse")
"""Names of modules that a folder may shadow: installed ones, and one of the standard library."""

COMMANDS = """
import sys
from jaxscale.cli import main
for words in (["checkpoint", "list", "."], ["report", "."]):
    sys.argv[1:] = words
    main()
import xxhash, matplotlib, rich
"""


@pytest.fixture
def folder(tmp_path):
    """A folder with such modules; `tmp_path/ran` names each that was run."""
    before = list(sys.path)
    extra = tmp_path / "given"
    extra.mkdir()
    for name in (*PLANTED, "mine"):
        (extra / f"{name}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'a').write({name + ' '!r})\n")
    yield extra
    sys.path[:] = before  # commands append the folder, which other tests must not see
    sys.modules.pop("mine", None)


def ran(folder):
    file = folder.parent / "ran"
    return file.read_text().split() if file.exists() else []


@pytest.mark.parametrize(
    "argv", [["-c", COMMANDS], ["-m", "jaxscale", "--version"]], ids=["checkpoint and report", "python -m"]
)
def test_a_command_runs_no_module_of_the_folder_it_looks_at(folder, argv):
    if argv[0] == "-c":
        (folder / "argparse.py").unlink()  # the script itself imports it before the command starts
    env = environment(PYTHONPATH=os.pathsep)  # an empty entry is the current folder, as Python reads it
    done = subprocess.run([sys.executable, *argv], cwd=folder, env=env, capture_output=True, text=True)
    assert "Traceback" not in done.stderr, done.stderr
    assert ran(folder) == []


def test_a_folder_named_by_pythonpath_is_left_where_it_is(folder, monkeypatch):
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PYTHONPATH", str(folder))
    monkeypatch.setattr(sys, "path", [str(folder), *sys.path])
    import_path.drop_current_folder()
    assert sys.path[0] == str(folder)


def test_the_current_folder_comes_after_everything_installed_where_it_is_wanted(folder, monkeypatch):
    monkeypatch.chdir(folder)
    for argv, added in (
        (["train", "none.gin"], True),
        (["sweep", "none.gin"], True),
        (["rl", "none.gin"], True),
        (["explain", "none.gin"], False),
        (["explain", "none.gin", "--import", "mine"], True),
        (["report", "."], False),
    ):
        before = list(sys.path)
        monkeypatch.setattr(sys, "path", list(before))
        sys.modules.pop("mine", None)
        main(argv)
        assert sys.path == before + [str(folder)] * added, argv
        monkeypatch.undo()
        monkeypatch.chdir(folder)
    assert OWN_MODULES == ("train", "sweep", "rl") and ran(folder) == ["mine"]


def test_a_gin_file_that_imports_a_module_of_the_folder_names_the_option(folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    Path("own.gin").write_text("import mine\n")
    sys.modules.pop("mine", None)
    assert main(["explain", "own.gin"]) == 2
    assert "add --import mine" in capsys.readouterr().err and ran(folder) == []
    main(["explain", "own.gin", "--import", "mine", "--gin.train.steps=0"])
    assert ran(folder) == ["mine"]


def test_processes_of_a_sweep_get_no_empty_entry(monkeypatch):
    for path in ("", os.pathsep, f"{os.pathsep}/a{os.pathsep}"):
        monkeypatch.setenv("PYTHONPATH", path)
        for entries in (programs.environment()["PYTHONPATH"], import_path.python_path()):
            assert entries.split(os.pathsep)[0] == import_path.ROOT and "" not in entries.split(os.pathsep)


@pytest.mark.parametrize("path", [None, "", "/a"])
def test_a_job_of_a_cluster_gets_no_empty_entry(path):
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    env |= {} if path is None else {"PYTHONPATH": path}
    shell = subprocess.run(["sh", "-c", f'{_path_line()}; echo "$PYTHONPATH"'], env=env, capture_output=True, text=True)
    assert shell.stdout.strip().split(os.pathsep) == [import_path.ROOT, *filter(None, [path])]


def test_processes_that_are_started_are_not_given_the_current_folder_first(monkeypatch):
    started = []

    class Popen(subprocess.Popen):
        def __init__(self, command, **options):
            started.append((command, options["env"]["PYTHONPATH"]))
            super().__init__([sys.executable, "-c", ""], **options)

    monkeypatch.setattr(subprocess, "Popen", Popen)
    Worker().process.wait()
    assert main(["launch", "--nproc", "1", "--restarts", "0", "--", "train"]) == 0
    assert [command[1:3] for command, _ in started] == [["-P", "-m"]] * 2
    assert all(path.split(os.pathsep)[0] == import_path.ROOT for _, path in started)
