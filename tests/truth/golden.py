"""What every gin file of the repository resolves to, kept as text: a setting that changes shows in a review.

python -m tests.truth.golden    # writes tests/golden/gin anew, and says what changed
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import cast

from jaxscale import config
from jaxscale.train import TrainConfig

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "tests" / "golden" / "gin"
COMMAND = "python -m tests.truth.golden"


def gin_files() -> list[Path]:
    """Every gin file of the repository, its tests' own left out; relative to its root, sorted."""
    listing = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.gin"]
    found = subprocess.run(listing, cwd=ROOT, capture_output=True, text=True)
    # an unpacked archive has no git, and nothing in its experiments that is not the repository's
    names = found.stdout.split() if found.returncode == 0 else [str(p.relative_to(ROOT)) for p in _walked()]
    return sorted(Path(n) for n in names if not n.startswith("tests/") and (ROOT / n).is_file())


def _walked() -> Iterator[Path]:
    return (p for p in ROOT.rglob("*.gin") if not {"runs", "tests"} & {*p.relative_to(ROOT).parts[:1]})


def load(file: Path) -> TrainConfig:
    """The run that a gin file describes, every name and type in it checked.

    Raises:
      ConfigError: what is wrong with it.
      AssertionError: it binds what nothing reads.
    """
    config.load([ROOT / file])
    found = cast(TrainConfig, config.call("train"))
    assert not config.unused(), f"{file}: nothing reads {', '.join(config.unused())}"
    return found


def resolved(file: Path) -> str:
    """A file's resolved form: every setting spelled out, those that it leaves to defaults included."""
    return config.dumps("train", load(file).values())


def changes(was: str, now: str) -> list[str]:
    """The settings in which two resolved forms differ, a line each."""
    a, b = _settings(was), _settings(now)
    differ = [key for key in sorted(a.keys() | b.keys()) if a.get(key) != b.get(key)]
    return [f"{key}: {a.get(key, 'not there')} -> {b.get(key, 'not there')}" for key in differ]


def _settings(text: str) -> dict[str, str]:
    return dict(line.split(" = ", 1) for line in text.splitlines() if line.strip())


def main() -> None:
    wanted = {file: resolved(file) for file in gin_files()}
    for path in sorted(GOLDEN.rglob("*.gin")):
        if path.relative_to(GOLDEN) not in wanted:
            path.unlink()
            print(f"{path.relative_to(GOLDEN)}: gone")
    for file, text in wanted.items():
        path = GOLDEN / file
        was = path.read_text() if path.exists() else ""
        for line in changes(was, text) if was else ["new"] * (was != text):
            print(f"{file}: {line}")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


if __name__ == "__main__":
    main()
