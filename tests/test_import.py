"""What importing jaxscale costs, and what it shows."""

from __future__ import annotations

import subprocess
import sys

import pytest

import jaxscale as js
from tests.truth.runs import environment


def test_importing_loads_nothing_heavy():
    script = "import sys, jaxscale; print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", script], env=environment(), capture_output=True, text=True, timeout=60)
    loaded = {name.split(".")[0] for name in run.stdout.split()}
    assert "jaxscale" in loaded, run.stderr
    assert not loaded & {"jax", "jaxlib", "flax", "optax", "orbax", "numpy", "gin", "matplotlib", "rich"}


def test_the_help_of_the_command_loads_no_jax():
    script = "import sys; from jaxscale.cli import main\ntry: main(['--help'])\nfinally: print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", script], env=environment(), capture_output=True, text=True, timeout=60)
    assert "usage: jaxscale" in run.stdout, run.stderr
    assert not {"jax", "flax", "orbax"} & set(run.stdout.splitlines()[-1].split())


def test_dir_lists_what_there_is():
    assert dir(js) == sorted(js.__all__)
    assert {"fit", "Layout", "load", "explain", "simulate_devices", "models", "data"} <= set(dir(js))


@pytest.mark.parametrize("name", js.__all__)
def test_every_listed_name_is_there(name):
    assert getattr(js, name) is not None


def test_a_name_that_is_not_there_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'jaxscale' has no attribute 'train_model'"):
        js.train_model  # noqa: B018


def test_no_function_hides_a_room():
    import types

    rooms = (
        "config",
        "data",
        "errors",
        "hardware",
        "infer",
        "layout",
        "models",
        "nn",
        "optim",
        "parallel",
        "plan",
        "testing",
        "train",
    )
    assert all(isinstance(getattr(js, room), types.ModuleType) for room in rooms)
