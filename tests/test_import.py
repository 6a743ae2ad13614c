"""What importing jaxscale loads, and which names it has."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

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


def test_no_function_hides_a_package():
    import types

    packages = (
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
    assert all(isinstance(getattr(js, package), types.ModuleType) for package in packages)


ROOT = Path(js.__file__).parents[1]


def _imported(node: ast.AST) -> Iterator[str]:
    """Modules that a file imports at any depth, except those imported for types only."""
    if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
        return
    if isinstance(node, ast.Import):
        yield from (a.name for a in node.names)
    if isinstance(node, ast.ImportFrom) and node.module:
        yield node.module
        yield from (f"{node.module}.{a.name}" for a in node.names)
    for child in ast.iter_child_nodes(node):
        yield from _imported(child)


def _imports() -> dict[str, set[str]]:
    """For each of our modules, which of our modules it imports; a package stands for its `__init__`."""
    files = {
        ".".join(p.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): p
        for package in ("jaxscale", "pallas_kernels")
        for p in (ROOT / package).rglob("*.py")
    }
    imports = {}
    for name, file in files.items():
        ours = {m for m in _imported(ast.parse(file.read_text())) if m in files} - {name}
        # `from a.b import c` depends on a.b itself only if c is not a module
        imports[name] = {m for m in ours if not any(o.startswith(f"{m}.") for o in ours)}
    return imports


def test_no_circle_of_imports_has_more_than_two_files():
    graph = _imports()
    assert len(graph) > 300

    def reached(start: str) -> set[str]:
        seen: set[str] = set()
        left = [start]
        while left:
            new = graph[left.pop()] - seen
            seen |= new
            left += new
        return seen

    ways = {name: reached(name) for name in graph}
    circles = {frozenset(b for b in ways[a] if a in ways[b]) for a in graph if a in ways[a]}
    assert not [sorted(c) for c in circles if len(c) > 2]
