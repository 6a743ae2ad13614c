"""The resolved config of every gin file of the repository, as text, so that a changed setting shows in a review.

python -m tests.truth.golden    # rewrite tests/golden/gin, and print what changed
"""

from __future__ import annotations

import dataclasses
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import cast

from jaxscale import config
from jaxscale.step import TrainConfig
from jaxscale.sweep import Sweep, sweep_of
from jaxscale.sweep.axes import space_of
from jaxscale.sweep.configs import Base

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "tests" / "golden" / "gin"
COMMAND = "python -m tests.truth.golden"


def gin_files() -> list[Path]:
    """Return every gin file of the repository, except those of tests; relative to its root, sorted."""
    listing = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.gin"]
    listed = subprocess.run(listing, cwd=ROOT, capture_output=True, text=True)
    # an unpacked archive has no git, and its experiments have no files but the repository's
    names = listed.stdout.split() if listed.returncode == 0 else [str(p.relative_to(ROOT)) for p in _walked()]
    return sorted(Path(n) for n in names if not n.startswith("tests/") and (ROOT / n).is_file())


def _walked() -> Iterator[Path]:
    return (p for p in ROOT.rglob("*.gin") if not {"runs", "tests"} & {*p.relative_to(ROOT).parts[:1]})


def load(file: Path) -> tuple[TrainConfig, Sweep | None, str]:
    """Load the run of a gin file, and the sweep if it has one, and check every name and type.

    Returns:
      The run, the sweep or `None`, and the loaded gin text.

    Raises:
      ConfigError: the file has a mistake.
      AssertionError: nothing reads one of its bindings.
    """
    text = config.load([ROOT / file])
    run = cast(TrainConfig, config.call("train"))
    sweep = None
    if any(name.startswith("sweep.") for name in config.unused()):
        config.call("sweep", axes={})  # reads the other bindings; references in axes stay as they are written
        sweep = sweep_of(text)
    unread = sorted({*config.unused()} - {"sweep.axes"} - _of_axes(text, sweep))
    assert not unread, f"{file}: nothing reads {', '.join(unread)}"
    return run, sweep, text


def _of_axes(text: str, sweep: Sweep | None) -> set[str]:
    """Return the bindings of a gin text whose objects an axis refers to, itself or through another binding.

    `@momentum/SGD()` refers to that of `momentum/SGD.momentum`.
    """
    bindings = dict(line.split(" = ", 1) for line in text.splitlines() if " = " in line)
    referred, names = "" if sweep is None else str(sweep.axes), set[str]()
    while more := {name for name in bindings if f"@{name.rpartition('.')[0]}" in referred} - names:
        names |= more
        referred += "".join(bindings[name] for name in more)
    return names


def trials(sweep: Sweep, text: str) -> list[TrainConfig]:
    """Return runs of a sweep that cover each value of each axis (both ends of a range); the last has all last values.

    Raises:
      ConfigError: a binding is unknown, or a value is of the wrong type.
    """
    space, base = space_of(sweep.axes, sweep.seeds), Base(text)
    values = {key: axis.grid() or [axis.at(0.0), axis.at(1 - 1e-9)] for key, axis in space.items()}
    first = {key: some[0] for key, some in values.items()}
    points = [{**first, key: value} for key, some in values.items() for value in some]
    runs = []
    for point in [*points, {key: some[-1] for key, some in values.items()}]:
        run, unread = base.bind(point)
        assert not unread, f"nothing reads {', '.join(unread)}"
        runs.append(run)
    return runs


def resolved(file: Path) -> str:
    """Return a file's resolved form: every setting, defaults included."""
    run, sweep, loaded = load(file)
    text = config.dumps("train", run.values())
    if sweep is None:
        return text
    of_axes = _of_axes(loaded, sweep)
    text += "".join(line for line in loaded.splitlines(True) if line.partition(" = ")[0] in of_axes)
    return text + config.dumps("sweep", {f.name: getattr(sweep, f.name) for f in dataclasses.fields(sweep)})


def changes(was: str, now: str) -> list[str]:
    """Return the settings in which two resolved forms differ, a line each."""
    a, b = _settings(was), _settings(now)
    differ = [key for key in sorted(a.keys() | b.keys()) if a.get(key) != b.get(key)]
    return [f"{key}: {a.get(key, 'not there')} -> {b.get(key, 'not there')}" for key in differ]


def _settings(text: str) -> dict[str, str]:
    return dict(line.split(" = ", 1) for line in text.splitlines() if line.strip())


def main() -> None:
    """Rewrite the golden files and print what changed."""
    current = {file: resolved(file) for file in gin_files()}
    for path in sorted(GOLDEN.rglob("*.gin")):
        if path.relative_to(GOLDEN) not in current:
            path.unlink()
            print(f"{path.relative_to(GOLDEN)}: gone")
    for file, text in current.items():
        path = GOLDEN / file
        was = path.read_text() if path.exists() else ""
        for line in changes(was, text) if was else ["new"] * (was != text):
            print(f"{file}: {line}")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


if __name__ == "__main__":
    main()
