"""Reads run folders for comparison; trains nothing, builds no model and writes nothing.

A damaged folder is still a run: what is readable is read, and the rest is listed in its `problems`.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import glob
import math
import os
import re
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np

from jaxscale import reading
from jaxscale.bucket_files import matching_folders
from jaxscale.buckets import BucketError, failure, is_url, normalized
from jaxscale.config_text import LOST
from jaxscale.errors import AlteredFile, RunError, near
from jaxscale.seals import Lines
from jaxscale.sweep.base import RUNNING
from jaxscale.train import expert_load
from jaxscale.train.expert_load import Routing, read_experts
from jaxscale.train.files import altered_lines, read_gin, read_json
from jaxscale.train.goodput import COLUMNS, as_left
from jaxscale.train.metrics import Tail
from jaxscale.working_copy import as_named, local

Patterns = str | Path | Sequence[str | Path]

SEED = "train.seed"
INTERRUPTED = "interrupted"
"""The state of a run whose `run.json` has it running while no process on this machine locks its folder."""

UNKNOWN = "unknown"
"""The state of a run whose folder has no state."""

_OF_A_RUN = ("run.json", "config.gin", "metrics.jsonl", "outcome.json")
_OF_A_SWEEP = ("sweep.gin", "trials.jsonl")
_TEXT, _NUMBER, _OBJECT = (str, "text"), (int | float, "a number"), (dict, "an object")
_FIELDS: dict[str, dict[str, tuple[Any, str]]] = {
    "run.json": dict.fromkeys(("status", "error", "started", "updated"), _TEXT) | {"parameters": _NUMBER}
    | dict.fromkeys(("hardware", "layout", "data", "versions", "flags"), _OBJECT),
    "outcome.json": {"state": _TEXT, "error": _TEXT, "seconds": _NUMBER},
}  # fmt: skip
"""The fields that are read from each file, with the types they must have if present."""
_NO_METRIC = (
    *("step", "time", "host_seconds", "tokens_per_second", "rows_per_second", "model_flops_per_second"),
    *COLUMNS,
)


@dataclasses.dataclass(frozen=True)
class Ran:
    """The content of a run folder.

    Args:
      name: a short name, unique among the runs read with it.
      path: the folder.
      state: `finished`, `stopped`, `failed`, `running`, ... (see `jaxscale.sweep.base`), `interrupted` or `unknown`.
      error: why it failed, one sentence.
      bindings: every operative binding by its name in `config.gin`; literals as values, references as text.
      axes: the values its sweep bound, by binding; empty for a run outside of a sweep.
      info: the content of `run.json`.
      rows: the rows of `metrics.jsonl`, a dict per step.
      samples: `step`, `prompt` and `text` of each saved sample.
      seconds: wall time: its sweep's count, else from its start to its last update, pauses included.
      problems: what could not be read, a sentence each.
    """

    name: str
    path: Path
    state: str
    error: str | None
    bindings: dict[str, Any]
    axes: dict[str, Any]
    info: dict[str, Any]
    rows: list[dict[str, Any]]
    samples: list[dict[str, Any]]
    seconds: float | None
    problems: tuple[str, ...]

    @functools.cached_property
    def metrics(self) -> dict[str, list[tuple[int, float]]]:
        """The curve of every metric by name: (step, value), steps ascending; values may be NaN."""
        curves: dict[str, list[tuple[int, float]]] = {}
        for row in self.rows:
            for key, value in row.items():
                if key not in _NO_METRIC and _is_number(value):
                    curves.setdefault(key, []).append((row["step"], float(value)))
        return curves

    @property
    def steps(self) -> int:
        """The last step in `metrics.jsonl`; 0 without any."""
        return self.rows[-1]["step"] if self.rows else 0

    def median(self, key: str) -> float | None:
        """Return the median of a metric over all steps but the first, which compiles; `None` without values.

        Args:
          key: the metric's name.
        """
        values = [row[key] for row in self.rows[1:] if is_finite(row.get(key))]
        return float(np.median(values)) if values else None

    @property
    def tokens_per_step(self) -> int | None:
        """Batch rows times sequence length; `None` for a run that does not train on tokens."""
        if self.median("rows_per_second"):
            return None
        sizes = [self.bindings.get(name) for name in ("train.batch_size", "train.seq_len")]
        return math.prod(sizes) if all(isinstance(size, int) for size in sizes) else None  # type: ignore[arg-type]

    @functools.cached_property
    def experts(self) -> dict[int, dict[int, Routing]]:
        """How tokens were routed to experts, by step, then by layer; `{}` without experts."""
        try:
            return read_experts(self.path / expert_load.FILE)
        except RunError:  # it cannot be read, and a report is made of what can be
            return {}

    @functools.cached_property
    def goodput(self) -> dict[str, Any] | None:
        """Goodput and seconds of each part, until the last row of metrics; `None` in runs of earlier versions."""
        return as_left(self.info, self.rows)

    @property
    def step_seconds(self) -> float | None:
        """The median time of a step, in seconds; `None` if unknown."""
        if per_row := self.median("rows_per_second"):
            rows = self.bindings.get("train.batch_size")
            return rows / per_row if isinstance(rows, int) else None
        rate = self.median("tokens_per_second")
        return self.tokens_per_step / rate if rate and self.tokens_per_step else None


def read_runs(what: Patterns) -> list[Ran]:
    """Read the runs that paths and patterns name; a sweep's folder stands for its runs.

    Args:
      what: a pattern such as `"runs/*"`, a run folder, a sweep's folder, or a list of them.

    Raises:
      RunError: one names no run.
    """
    items = [what] if isinstance(what, str | Path) else list(what)
    paths = list(dict.fromkeys(path for item in items for path in _find(item)))
    if not paths:
        raise RunError("name at least one run, sweep or pattern, as runs/*")
    return [read_run(path, name) for path, name in zip(paths, _names(paths), strict=True)]


def read_run(path: Path, name: str | None = None) -> Ran:
    """Read a run folder; what cannot be read is listed in `problems`.

    Args:
      path: the folder.
      name: the run's name; by default the folder's.
    """
    problems: list[str] = []
    info = _info(path / "run.json", problems)
    outcome = _fields(path / "outcome.json", problems) if os.path.lexists(path / "outcome.json") else {}
    error = outcome.get("error") or info.get("error")
    tail = Tail(path / "metrics.jsonl")
    try:
        rows = [_plain(row) for row in tail.rows()]
    except RunError as e:
        rows = []
        problems.append(str(e))
    if tail.lines.damaged:
        problems.append(str(altered_lines(tail.path, tail.lines)))
    if tail.without_step:
        problems.append(f"{tail.path.name}: {tail.without_step} lines have no step that is a whole number")
    problems += _no_numbers(tail.path.name, rows)
    text = _gin(path / "config.gin", problems)
    state = outcome.get("state") or info.get("status") or UNKNOWN
    if info.get("status") == RUNNING:
        state = RUNNING if _is_held(path) else outcome.get("state") or INTERRUPTED
    return Ran(
        name=name or path.name,
        path=path,
        state=str(state),
        error=None if error is None else str(error),
        bindings=read_bindings(text),
        axes=_axes(path, problems),
        info=info,
        rows=rows,
        samples=_samples(path / "samples.jsonl", problems),
        seconds=_seconds(info, outcome),
        problems=tuple(problems),
    )


def read_bindings(text: str) -> dict[str, Any]:
    """Return the bindings of a `config.gin` by name, without importing or building anything."""
    bindings = {}
    for line in text.splitlines():
        name, equals, value = line.partition(" = ")
        if line.startswith("# "):  # a value that gin cannot express
            name, value = name.removeprefix("# "), value.removesuffix(f": {LOST}")
        if equals and re.fullmatch(r"[\w/.]+", name):
            bindings[name] = _value(value)
    return bindings


def _value(text: str) -> Any:
    try:
        value = ast.literal_eval(text)
        reading.check_depth(value)
        return _plain(value)
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return text


def _plain(value: Any) -> Any:
    """A value in which integers too large for a float are text."""
    if isinstance(value, dict):
        return {key: _plain(v) for key, v in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(_plain, value))
    return str(value) if isinstance(value, int) and abs(value) > reading.LARGEST else value


def _quoted(text: str) -> str:
    """Gin text with its references quoted as strings."""
    parts = r"""('(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")|([@%][\w/.]+(?:\(\))?)"""
    return re.sub(parts, lambda match: match[1] or repr(match[2]), text)


def is_finite(value: object) -> TypeGuard[float]:
    """Whether a value is a number, and neither NaN nor infinite."""
    return _is_number(value) and math.isfinite(value)


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


# --- finding ----------------------------------------------------------------------------------------------------------


def is_run(path: Path) -> bool:
    """Whether a folder holds any file of a run, and is not a sweep."""
    return not is_sweep(path) and any((path / name).is_file() for name in _OF_A_RUN)


def is_sweep(path: Path) -> bool:
    """Whether a folder is a sweep's."""
    return any((path / name).is_file() for name in _OF_A_SWEEP)


def _find(what: str | Path) -> list[Path]:
    if is_url(what) and glob.has_magic(str(what)):
        try:
            folders = [local(url) for url in matching_folders(what)]
        except BucketError as e:
            raise failure(RunError, e) from None
        paths = _runs_of(folders)
        if not paths:
            raise RunError(f"{normalized(what)} names no run; list the bucket, or name one folder")
        return paths
    item = local(what)
    if item.is_dir():
        paths = [item] if is_run(item) else _runs_in(item)
        if not paths:
            none = f"no {', '.join(_OF_A_RUN)} in it or one level down"
            raise RunError(f"{as_named(item)} is not a run and holds none: {none}")
        return paths
    folders = sorted(Path(p) for p in glob.glob(str(item)) if Path(p).is_dir())
    paths = _runs_of(folders)
    if not paths:
        siblings = [p for p in item.parent.glob("*") if p.is_dir()] if item.parent.is_dir() else []
        names = [as_named(p) for p in siblings] if len(siblings) <= 50 else []
        raise RunError(f"{as_named(item)} names no run{near(as_named(item), names)}")
    return paths


def _runs_of(folders: Sequence[Path]) -> list[Path]:
    return [path for folder in folders for path in ([folder] if is_run(folder) else _runs_in(folder))]


def _runs_in(folder: Path) -> list[Path]:
    return sorted(p for p in folder.iterdir() if p.is_dir() and is_run(p))


def _names(paths: Sequence[Path]) -> list[str]:
    """The shortest ends of the paths that are unique."""
    parts = [path.resolve().parts for path in paths]
    for count in range(1, max(map(len, parts)) + 1):
        names = ["/".join(p[-count:]) for p in parts]
        if len(set(names)) == len(names):
            break
    return names


# --- reading ----------------------------------------------------------------------------------------------------------


def _json(path: Path, problems: list[str]) -> dict[str, Any]:
    try:
        return _plain(read_json(path))
    except OSError as e:
        problems.append(f"{path.name}: {e.strerror}")
    except AlteredFile as e:
        problems.append(str(e))
    return {}


def _fields(path: Path, problems: list[str]) -> dict[str, Any]:
    """As `_json`, without fields of a wrong type."""
    info = _json(path, problems)
    for name, (kind, word) in _FIELDS[path.name].items():
        value = info.get(name)
        if value is not None and (not isinstance(value, kind) or isinstance(value, bool)):
            problems.append(f"{path.name}: {name} = {reading.clipped(repr(value), 60)} is not {word}")
            del info[name]
    return info


def _info(path: Path, problems: list[str]) -> dict[str, Any]:
    """`run.json`, without fields of a wrong type."""
    info = _fields(path, problems)
    if not isinstance((info.get("layout") or {}).get("mesh") or {}, dict):
        problems.append(f"{path.name}: layout.mesh is not an object")
        del info["layout"]
    return info


def _no_numbers(name: str, rows: Sequence[dict[str, Any]]) -> list[str]:
    """A sentence for each metric that is a number at some steps but not at others."""
    metrics = {key for row in rows for key, value in row.items() if _is_number(value)}
    strange = {key: row["step"] for row in rows for key in metrics & row.keys() if not _is_number(row[key])}
    return [f"{name}: {key} is not a number at step {step}" for key, step in sorted(strange.items())]


def _gin(path: Path, problems: list[str]) -> str:
    try:
        text = read_gin(path)
    except OSError as e:
        problems.append(f"{path.name}: {e.strerror}")
    except AlteredFile as e:
        problems.append(str(e))
    else:
        if not read_bindings(text):
            problems.append(f"{path.name}: it has no binding")
        return text
    return ""


def _samples(path: Path, problems: list[str]) -> list[dict[str, Any]]:
    lines = _lines(path, problems)
    samples = [line for line in lines if isinstance(line.get("text"), str)]
    if len(samples) < len(lines):
        problems.append(f"{path.name}: {len(lines) - len(samples)} lines have no text")
    return samples


def _lines(path: Path, problems: list[str]) -> list[dict[str, Any]]:
    """The JSON objects among a file's lines, without partial and damaged ones; none if the file does not exist."""
    lines = Lines()
    try:
        rows: list[dict[str, Any]] = _plain([*lines.feed(reading.read_bytes(path)), *lines.end()])
        if not lines.sealed:
            reading.check_own(path)
    except FileNotFoundError:
        return []
    except OSError as e:
        problems.append(f"{path.name}: {e.strerror}")
        return []
    if lines.damaged:
        problems.append(str(altered_lines(path, lines)))
    return rows


def _axes(path: Path, problems: list[str]) -> dict[str, Any]:
    """The values that a run's sweep bound, by single binding; adds to `problems` if they cannot be read."""
    if not path.name.isdecimal():
        return {}
    why: list[str] = []
    trials = [line for line in _lines(path.parent / "trials.jsonl", why) if line.get("id") == int(path.name)]
    job = _json(path.parent / "jobs" / f"{path.name}.json", []).get("trial")
    trials += [job] if isinstance(job, dict) else []
    bound = next((one["bindings"] for one in trials if isinstance(one.get("bindings"), dict)), None)
    if bound is None:
        in_sweep = any(os.path.lexists(path.parent / name) for name in _OF_A_SWEEP)
        problems += why or [f"{path.parent / 'trials.jsonl'} has no bindings of this trial"] * in_sweep
        return {}
    axes: dict[str, Any] = {}
    for name, text in bound.items():
        names = [part.strip() for part in name.split(",")]
        value = _value(_quoted(text) if len(names) > 1 else text) if isinstance(text, str) else text
        several = isinstance(value, list | tuple) and len(value) == len(names) > 1
        axes |= dict(zip(names, value if several else [value], strict=False))
    return axes


def _seconds(info: dict[str, Any], outcome: dict[str, Any]) -> float | None:
    seconds = outcome.get("seconds")
    if is_finite(seconds):
        return float(seconds)
    try:
        times = [datetime.strptime(info[key], "%Y-%m-%dT%H:%M:%S%z") for key in ("started", "updated")]
    except (KeyError, ValueError, TypeError):
        return None
    return (times[1] - times[0]).total_seconds()


def _is_held(path: Path) -> bool:
    """Whether a process has locked the run with `jaxscale.train.folders.lock`; tested without writing."""
    import fcntl

    try:
        with reading.open_file(path / ".lock") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False
