"""Python's module search path. Modules of the current folder must not replace installed ones, such as `xxhash`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

ROOT = str(Path(__file__).resolve().parents[1])
"""The folder that holds the packages `jaxscale` and `pallas_kernels`."""


def drop_current_folder() -> None:
    """Remove the current folder from `sys.path`, where `python -m` or an empty PYTHONPATH entry put it first.

    It stays if PYTHONPATH names it, or if it is the checkout that is running.
    """
    current = os.getcwd()
    if current == ROOT or current in map(os.path.abspath, _entries()):
        return
    library = os.path.dirname(os.__file__)
    end = sys.path.index(library) if library in sys.path else len(sys.path)
    sys.path[:end] = [path for path in sys.path[:end] if os.path.abspath(path) != current]


def append_current_folder() -> None:
    """Append the current folder to `sys.path`, after everything that is installed."""
    current = os.getcwd()
    if current not in map(os.path.abspath, sys.path):
        sys.path.append(current)


def python_path() -> str:
    """PYTHONPATH for a child process: our packages first, and no empty entry, which means the current folder."""
    return os.pathsep.join([ROOT, *_entries()])


def _entries() -> list[str]:
    return [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
