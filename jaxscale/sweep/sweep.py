"""The `sweep` config: axes, a search, a runner; and running it."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from jaxscale import config as gin_config
from jaxscale.config import register
from jaxscale.errors import ConfigError, RunError
from jaxscale.step import TrainConfig
from jaxscale.sweep.axes import space_of
from jaxscale.sweep.base import RUNNING, Record, Runner, Search
from jaxscale.sweep.checks import check
from jaxscale.sweep.configs import Base, differences, loaded
from jaxscale.sweep.coordinator import Coordinator
from jaxscale.sweep.journal import Journal
from jaxscale.sweep.live import Live
from jaxscale.sweep.runners import Here
from jaxscale.sweep.search import Grid
from jaxscale.sweep.storage import Storage
from jaxscale.sweep.table import Result, write_results
from jaxscale.train.files import read_gin, write_gin
from jaxscale.train.folders import is_new, new_folder
from jaxscale.train.signals import stop_signals
from jaxscale.working_copy import Mirror, NoMirror, as_named, local, mirrored

_OWN = ("runner", "runs", "storage")
"""Fields that may change when a sweep is continued, and may differ between machines."""


BETWEEN = 2.0
"""Seconds between two writes of the table while no state changes."""


@register(name="sweep")
@dataclasses.dataclass(frozen=True)
class Sweep:
    """Runs that differ in some bindings; in gin `sweep.axes = {"train.lr": [1e-3, 3e-3]}`.

    Args:
      axes: the values to try for each binding: a list, or a distribution such as `@log_uniform()`. Several bindings
        joined by commas take tuples. A binding may be a macro. In gin, references in a list stay text; in Python,
        give objects or `config.Text("@Lion()")`.
      search: chooses the trials, as `Grid()`.
      objective: the metric to minimise.
      runs: at most this many trials.
      seeds: short for an axis `train.seed` with values 0, 1, ..., `seeds` - 1.
      runner: where trials run, as `Here()` or `Pool(workers=2)`.
      storage: where several machines pull trials from: a URL such as `journal:///path/file`, or a `Storage()`.
    """

    axes: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    search: Search = Grid()
    objective: str = "eval_loss"
    runs: int | None = None
    seeds: int | None = None
    runner: Runner = Here()
    storage: str | Storage | None = None

    def run(
        self,
        folder: str | Path | None = None,
        base: TrainConfig | str | None = None,
        *,
        name: str = "sweep",
        quiet: bool = False,
        imports: Sequence[str] = (),
        retry_failed: bool = False,
    ) -> Result:
        """Run the sweep, or continue the one in `folder`.

        Args:
          folder: the sweep's folder; by default a new one, `runs/<name>-<n>`.
          base: the config that the axes change, as settings or gin text.
          name: name of a new folder.
          quiet: print nothing.
          imports: modules for the processes of the runs to import, besides those that gin text imports itself.
          retry_failed: restart failed runs from their newest checkpoints; their errors are saved in `jobs/`.

        Returns:
          the results; for a shared sweep, those of all machines.

        Raises:
          JaxscaleError: a setting is wrong; raised before anything starts.
        """
        prepared = Prepared(self, base)
        return prepared.run(folder, name=name, quiet=quiet, imports=tuple(imports), retry_failed=retry_failed)


def sweep_of(text: str) -> Sweep:
    """Return the sweep in gin text; references in its axes stay text.

    Args:
      text: gin text, such as a snapshot of `config.load`.

    Raises:
      ConfigError: the text binds no axes, or its values are wrong.
    """
    with loaded([text]):
        try:
            axes = gin_config.raw("sweep.axes")
        except ConfigError:
            raise ConfigError("sweep.axes is not set; give values to try, as {'train.lr': [1e-3, 3e-3]}") from None
        if not isinstance(axes, dict) or not all(isinstance(key, str) for key in axes):
            raise ConfigError(f"sweep.axes must be a dict of lists by binding, not {axes!r}")
        axes = {k: gin_config.resolve(v) if isinstance(v, gin_config.Text) else v for k, v in axes.items()}
        return cast(Sweep, gin_config.call("sweep", axes=axes))


class Prepared:
    """A sweep that has passed its checks.

    Args:
      sweep: the sweep.
      base: as in `Sweep.run`.

    Raises:
      JaxscaleError: a setting is wrong.
    """

    def __init__(self, sweep: Sweep, base: TrainConfig | str | None):
        base = TrainConfig() if base is None else base
        run = base if isinstance(base, str) else gin_config.dumps("train", base.values())
        own = {f.name: getattr(sweep, f.name) for f in dataclasses.fields(sweep) if f.name not in _OWN}
        self.sweep = sweep
        self.text = _without_sweep(run) + gin_config.dumps("sweep", own)
        lost = [name for name in gin_config.lost(self.text) if name.startswith("sweep.axes")]
        if lost:
            raise ConfigError(f"{lost[0]} has a value that gin cannot express; write it as config.Text('@Name()')")
        # Python objects got gin scopes of their own: from here on, use the axes as the text has them
        axes = sweep_of(self.text).axes
        self.base = Base(self.text)
        self.space = space_of(axes, sweep.seeds)
        self.steps = check(sweep, self.space, self.base)

    def storage(self) -> Storage | None:
        """Return the storage that several machines share; `None` for a sweep on one machine."""
        storage = self.sweep.storage
        return Storage(storage) if isinstance(storage, str) else storage

    def run(
        self,
        folder: str | Path | None,
        *,
        name: str,
        quiet: bool,
        imports: tuple[str, ...],
        retry_failed: bool = False,
    ) -> Result:
        """Run the sweep; see `Sweep.run`.

        Args:
          folder: as in `Sweep.run`.
          name: as in `Sweep.run`.
          quiet: as in `Sweep.run`.
          imports: as in `Sweep.run`.
          retry_failed: as in `Sweep.run`.
        """
        storage = self.storage()
        shared = None if storage is None else storage.connect(self.text)
        path = open_folder(None if folder is None else local(folder), self.text, name)
        journal = Journal(path, self.sweep.objective, shared=shared is not None)
        ledger = journal if shared is None else shared.ledger(journal, self.space)
        live = Live(path, self.sweep, self.space, self.steps, fresh=not journal.records(), quiet=quiet)
        results = _Results(path, live.show)
        with mirrored(path) as mirror, contextlib.closing(ledger), stop_signals() as signals, live:
            results.mirror = mirror
            if retry_failed:
                live.retried(ledger.retry_failed())
            Coordinator(
                self.space,
                self.steps,
                self.sweep.search,
                self.sweep.runner,
                ledger,
                self.base,
                self.sweep.objective,
                self.sweep.runs,
                imports,
                lambda: bool(signals),
                results.changed,
            ).run()
        result = Result(path, self.sweep.objective, None if shared is None else results.records)
        result.stopped_by = signals.get("signal")
        return result


class _Results:
    """Prints records, and writes the table when they change."""

    def __init__(self, folder: Path, show: Callable[[Sequence[Record]], None]):
        self.folder, self.show = folder, show
        self.records: Sequence[Record] = ()
        self.states: list[str] = []
        self.written = 0.0
        self.mirror: Mirror | NoMirror = NoMirror()

    def changed(self, records: Sequence[Record]) -> None:
        """Show records; write them at once if a state changed, else every `BETWEEN` seconds while trials run."""
        self.mirror.check()
        self.show(records)
        self.records, before, self.states = records, self.states, [r.state for r in records]
        if self.states != before or RUNNING in self.states and time.monotonic() > self.written + BETWEEN:
            self.write()

    def write(self) -> None:
        """Write the table."""
        write_results(self.folder, self.records)
        self.written = time.monotonic()


def open_folder(path: Path | None, text: str, name: str) -> Path:
    """Create the folder of a sweep, or check that an existing one holds the same sweep.

    Args:
      path: the folder; `None` for a new one in `runs/`.
      text: the sweep's gin text.
      name: name of a new folder.

    Raises:
      RunError: it holds something else.
    """
    if path is None or not path.exists() or is_new(path):
        path = new_folder(path, name)
        write_gin(path / "sweep.gin", text)
        return path
    try:
        before = read_gin(path / "sweep.gin")
    except OSError:
        raise RunError(f"{as_named(path)} already exists and holds no sweep; name another folder") from None
    if before != text:
        place = as_named(path)
        raise RunError(f"{place} holds another sweep: {differences(before, text)}; undo that, or name a new folder")
    return path


def _without_sweep(text: str) -> str:
    """Return gin text without the bindings of `sweep`, of storages and of runners."""
    registered = gin_config.registered()

    def belongs(line: str) -> bool:
        name = line.partition(" = ")[0].rpartition(".")[0].rpartition("/")[2]
        return name in ("sweep", "Storage") or hasattr(registered.get(name), "together")

    return "".join(f"{line}\n" for line in text.splitlines() if line and not belongs(line))
