"""Where Python looks for modules: the current folder may be somebody else's, and its `xxhash.py` is then not ours."""

from __future__ import annotations

import os
import sys
from pathlib import Path

ROOT = str(Path(__file__).resolve().parents[1])
"""The folder that holds the packages `jaxscale` and `pallas_kernels`."""


def drop_current_folder() -> None:
    """Takes the current folder from before the standard library, where `python -m` or an empty PYTHONPATH entry put it.

    It stays where PYTHONPATH names it, and where it is the checkout that is running.
    """
    here = os.getcwd()
    if here == ROOT or here in map(os.path.abspath, _entries()):
        return
    library = os.path.dirname(os.__file__)
    end = sys.path.index(library) if library in sys.path else len(sys.path)
    sys.path[:end] = [path for path in sys.path[:end] if os.path.abspath(path) != here]


def append_current_folder() -> None:
    """Lets modules of the current folder be imported, after everything that is installed."""
    here = os.getcwd()
    if here not in map(os.path.abspath, sys.path):
        sys.path.append(here)


def python_path() -> str:
    """PYTHONPATH of a child process: our packages first, and no empty entry, which would be the current folder."""
    return os.pathsep.join([ROOT, *_entries()])


def _entries() -> list[str]:
    return [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
