"""Sweeps shared by several machines: each pulls trials from an Optuna storage (a journal file or a database).

Each start of a trial is a trial of Optuna's study, so that Optuna's own tools display a sweep. To claim a start, a
machine appends it, reads all starts, and has the trial if its own is the first claim of that start. All machines read
the same order, so no lock is needed. While a trial runs, its machine increments a counter; when another machine sees
it unchanged for `patience` seconds, it counts the first as dead and claims the next start. Later reports of the first
machine are ignored, since its start is no longer the trial's last.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import socket
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxscale import config as gin_config
from jaxscale.config import register
from jaxscale.errors import ConfigError, RunError
from jaxscale.sweep.base import BAD, FINISHED, RUNNING, WAITING, Axis, Record, Trial
from jaxscale.sweep.configs import differences
from jaxscale.sweep.journal import Journal, held, run_folder, try_again
from jaxscale.sweep.outcomes import Progress
from jaxscale.sweep.search.as_optuna import display_code, optuna, quietly
from jaxscale.train.files import write_text

LOOK = 0.5
"""Seconds between two reads of the storage; an eighth of the patience if that is less."""


@register
@dataclasses.dataclass(frozen=True)
class Storage:
    """The storage through which several machines agree on who runs which trial.

    Args:
      url: `journal:///path/file` on a disk that all machines share, or a database URL of SQLAlchemy, such as
        `postgresql://user@host/name`. After a `#`, the study's name.
      patience: seconds without a sign of life after which a machine counts as dead and others take its trials.
    """

    url: str
    patience: float = 60.0

    def __post_init__(self) -> None:
        if self.patience <= 0:
            raise ConfigError(f"Storage.patience = {self.patience}: must be above 0 seconds")

    def connect(self, text: str) -> Shared:
        """Open the storage, and open or create the study in it.

        Args:
          text: the sweep's gin text, which must be the same on all machines.

        Raises:
          ConfigError: the storage cannot be reached, or the study belongs to another sweep.
        """
        url, _, study = self.url.partition("#")
        backend = _open(url)
        with quietly(), _reaching(url, ConfigError):
            return Shared(backend, url, study or "sweep", text, self.patience)

    def check(self, text: str) -> None:
        """Check that the storage can be opened for this sweep. Creates no study, but may create Optuna's tables.

        Args:
          text: the sweep's gin text.

        Raises:
          ConfigError: as `connect`.
        """
        url, _, study = self.url.partition("#")
        backend, study = _open(url), study or "sweep"
        with quietly(), _reaching(url, ConfigError):
            with contextlib.suppress(KeyError):  # no study of that name yet
                _holds_sweep(backend, backend.get_study_id_from_name(study), url, study, text)


class Shared:
    """A study that several machines share.

    Args:
      backend: Optuna's storage.
      url: where it is.
      study: the study's name.
      text: the sweep's gin text.
      patience: as in `Storage`.
    """

    def __init__(self, backend: Any, url: str, study: str, text: str, patience: float):
        self.backend, self.url, self.patience = backend, url, patience
        module = optuna("a storage")
        try:
            self.study = backend.create_new_study([module.study.StudyDirection.MINIMIZE], study)
            backend.set_study_user_attr(self.study, "sweep", text)
        except module.exceptions.DuplicatedStudyError:
            self.study = backend.get_study_id_from_name(study)
        if not _holds_sweep(backend, self.study, url, study, text):
            backend.set_study_user_attr(self.study, "sweep", text)

    def ledger(self, journal: Journal, space: Mapping[str, Axis]) -> SharedLedger:
        """Return the ledger for this machine's coordinator.

        Args:
          journal: the journal of this machine's folder.
          space: the axes by binding.
        """
        return SharedLedger(self, journal, space)


@dataclasses.dataclass
class _Start:
    """A valid start of a trial: the first claim of it."""

    number: int  # Optuna's number in the study
    key: int  # Optuna's id in the storage
    trial: Trial
    fields: Mapping[str, Any]  # what the machine that claimed it wrote about it
    values: Mapping[int, float]  # the objective by step


class SharedLedger:
    """The storage as a `Ledger`; this machine's own trials are in its journal as well.

    Args:
      shared: the study.
      journal: the journal of this machine's folder.
      space: the axes by binding, for Optuna's tools to display.
    """

    def __init__(self, shared: Shared, journal: Journal, space: Mapping[str, Axis]):
        self.shared, self.journal = shared, journal
        self.machine = machine_of(journal.folder)
        self.codes = {name: display_code(axis) for name, axis in space.items()}
        self._bindings: dict[int, dict[str, Any]] = {}
        self._heard: dict[int, tuple[int, float]] = {}  # the last counter value of each start, and when it last changed
        self._held: dict[int, _Start] = {}  # what this process runs
        self._read: tuple[float, dict[int, list[_Start]]] = (-math.inf, {})
        self._seen: dict[int, list[_Start]] = {}  # as of the last call of `records`
        self._again: dict[int, int] = {}  # failed trials to retry -> the number of their failed start
        self._closed = threading.Event()
        self._beating = threading.Thread(target=self._beat, daemon=True, name="sweep-beat")
        with self._reach():
            self._settle()
        self._beating.start()

    def records(self) -> list[Record]:
        """Return all machines' trials by id."""
        with self._reach():
            starts = self._seen = self._starts()
        mine = {r.trial.id: r for r in self.journal.records()}
        return [self._record(starts[id], mine.get(id)) for id in sorted(starts)]

    def claim(self, trial: Trial) -> Path | None:
        """Claim a trial. It runs in the folder of its last start if this machine sees that, else in a new one."""
        with self._reach():
            before = self._seen.get(trial.id, [])  # the starts this claim is based on; a claim made since then wins
            folder = self._folder(trial, before)
            fields = {
                "id": trial.id,
                "start": len(before),
                "until": trial.until,
                "bindings": {key: gin_config.text(value) for key, value in trial.bindings.items()},
                "machine": self.machine,
                "home": machine_in(folder.parent),
                "host": socket.gethostname(),
                "run": str(folder.resolve()),
            }
            key = self._append(trial, fields)
            self._read = (-math.inf, {})
            starts = self._starts().get(trial.id, [])
            if len(starts) <= len(before) or starts[len(before)].key != key:
                self._end(key, "FAIL")
                return None
            if before and "end" not in before[-1].fields:
                self._end(before[-1].key, "FAIL")  # the previous machine is dead
            self._held[trial.id] = starts[len(before)]
        if self._again.pop(trial.id, None) is not None:
            try_again(folder)
        if folder.parent == self.journal.folder:
            self.journal.claim(trial)
        return folder

    def report(self, record: Record) -> bool:
        """Store a record; `False` if another machine has claimed the trial since."""
        if record.run is not None and record.run.parent == self.journal.folder:
            self.journal.report(record)
        start = self._held.get(record.trial.id)
        if start is None:
            return False
        with self._reach():
            mine = self._starts()[record.trial.id][-1].key == start.key and self._store(start, record)
        if not mine or record.state != RUNNING:
            del self._held[record.trial.id]
            self._read = (-math.inf, {})
        return mine

    def retry_failed(self) -> list[int]:
        """Set failed trials of all machines to waiting; the first machine to claim one runs it."""
        with self._reach():
            ends = {id: starts[-1] for id, starts in self._starts().items()}
        self._again = {id: s.number for id, s in ends.items() if s.fields.get("end", {}).get("state") in BAD}
        return sorted(self._again)

    def close(self) -> None:
        """Stop the counter and close the journal."""
        self._closed.set()
        self._beating.join(timeout=5)
        self.journal.close()

    # --- reading ------------------------------------------------------------------------------------------------------

    def _starts(self) -> dict[int, list[_Start]]:
        """Every valid start, by trial, in order."""
        when, starts = self._read
        if time.monotonic() - when < min(LOOK, self.shared.patience / 8):
            return starts
        starts = {}
        for claim in self.shared.backend.get_all_trials(self.shared.study, deepcopy=False):
            fields = claim.user_attrs
            id, count = fields.get("id"), fields.get("start")
            if id is None or count != len(starts.get(id, [])) or (count == 0 and id != len(starts)):
                continue  # another claim came first
            if claim.number not in self._bindings:
                bindings = {key: gin_config.parse(text) for key, text in fields["bindings"].items()}
                self._bindings[claim.number] = bindings
            trial = Trial(id, self._bindings[claim.number], fields["until"])
            starts.setdefault(id, []).append(
                _Start(claim.number, claim._trial_id, trial, fields, claim.intermediate_values)
            )
        self._read = (time.monotonic(), starts)
        return starts

    def _record(self, starts: Sequence[_Start], mine: Record | None) -> Record:
        """The record of a trial over all its starts; for one that this process runs, as read from its folder."""
        last = starts[-1]
        curve = {step: value for start in starts for step, value in start.values.items()}
        if mine is not None and self._has(last) and last.fields["home"] == self.machine:
            curve |= dict(mine.curve)  # a restarted trial keeps the values of its earlier starts
            return dataclasses.replace(mine, trial=last.trial, curve=sorted(curve.items()))
        record = Record(last.trial, curve=sorted(curve.items()), run=Path(last.fields["run"]))
        ends = [start.fields["end"] for start in starts if "end" in start.fields]
        if ends:
            record.metrics, record.seconds = dict(ends[-1]["metrics"]), ends[-1]["seconds"]
        if "end" in last.fields:
            record.state, record.error = last.fields["end"]["state"], last.fields["end"]["error"]
            if self._again.get(last.trial.id) == last.number:
                record.state, record.error = WAITING, None
        else:
            record.state = RUNNING if self._alive(last) else WAITING
        return record

    def _has(self, start: _Start) -> bool:
        """Whether this process runs a start."""
        ours = self._held.get(start.trial.id)
        return ours is not None and ours.key == start.key

    def _alive(self, start: _Start) -> bool:
        if start.fields.get("free"):
            return False
        if self._has(start):
            return True
        if start.fields["machine"] == self.machine:  # started by an earlier process; its worker may still run
            return held(Path(start.fields["run"]).parent, start.trial.id)
        count, now = start.fields.get("beat", 0), time.monotonic()
        before, since = self._heard.get(start.number, (-1, now))
        if before != count:
            self._heard[start.number] = (count, now)
            return True
        return now - since < self.shared.patience

    def _folder(self, trial: Trial, starts: Sequence[_Start]) -> Path:
        """The folder of the latest start that this machine sees and no process uses; else one in its own folder."""
        for start in reversed(starts):
            folder = Path(start.fields["run"])
            if start.fields["home"] == self.machine:
                break
            if machine_in(folder.parent) == start.fields["home"] and not held(folder.parent, trial.id):
                return folder
        return run_folder(self.journal.folder, trial.id)

    # --- writing ------------------------------------------------------------------------------------------------------

    def _append(self, trial: Trial, fields: Mapping[str, Any]) -> int:
        """Append a claim, and return Optuna's id of it."""
        module = optuna("a storage")
        codes = {name: code for name, code in self.codes.items() if name in trial.bindings}
        template = module.trial.create_trial(
            state=module.trial.TrialState.RUNNING,
            params={name: code.encode(trial.bindings[name]) for name, code in codes.items()},
            distributions={name: code.distribution for name, code in codes.items()},
            user_attrs=dict(fields),
        )
        return self.shared.backend.create_new_trial(self.shared.study, template_trial=template)

    def _store(self, start: _Start, record: Record) -> bool:
        """Write what is new in a record of this machine; `False` if another machine has claimed the trial since."""
        backend = self.shared.backend
        try:
            for step, value in record.curve:
                if step not in start.values:
                    backend.set_trial_intermediate_value(start.key, step, value)
            start.values = dict(record.curve)
            if record.state == WAITING:  # its process died: any machine may start it again
                backend.set_trial_user_attr(start.key, "free", True)
            elif record.state != RUNNING:
                fields = ("state", "error", "metrics", "seconds")
                backend.set_trial_user_attr(start.key, "end", {name: getattr(record, name) for name in fields})
                last = record.curve[-1][1] if record.curve else math.nan
                bad = record.state in BAD or (record.state == FINISHED and math.isnan(last))
                self._end(start.key, "FAIL" if bad else "COMPLETE" if record.state == FINISHED else "PRUNED", last)
        except optuna("a storage").exceptions.UpdateFinishedTrialError:
            return False
        return True

    def _end(self, key: int, state: str, value: float = math.nan) -> None:
        """Set the final state that Optuna's tools display."""
        module = optuna("a storage")
        with contextlib.suppress(module.exceptions.UpdateFinishedTrialError):
            values = [value] if state == "COMPLETE" else None
            self.shared.backend.set_trial_state_values(key, module.trial.TrialState[state], values)

    def _settle(self) -> None:
        """Store the results of trials that ended in this folder after an earlier process of the sweep was killed."""
        for starts in self._starts().values():
            last, folder = starts[-1], Path(starts[-1].fields["run"])
            if last.fields["machine"] == self.machine and "end" not in last.fields:
                progress = Progress(last.trial, folder, self.journal.objective)
                record = progress.read(running=held(folder.parent, last.trial.id))
                if record.state not in (RUNNING, WAITING):
                    self._store(last, record)
        self._read = (-math.inf, {})

    def _beat(self) -> None:
        """Increment the counter of this machine's trials four times per `patience`."""
        count = 0
        while not self._closed.wait(self.shared.patience / 4):
            count += 1
            for start in list(self._held.values()):
                with contextlib.suppress(Exception):  # the coordinator reports a storage that cannot be reached
                    self.shared.backend.set_trial_user_attr(start.key, "beat", count)

    @contextlib.contextmanager
    def _reach(self) -> Iterator[None]:
        with _reaching(self.shared.url, RunError):
            yield


def machine_of(folder: Path) -> str:
    """Return a sweep folder's unique name among all machines; create it if there is none."""
    if machine_in(folder) is None:
        write_text(folder / "machine", uuid.uuid4().hex + "\n")
    return machine_in(folder) or ""


def machine_in(folder: Path) -> str | None:
    """Return a sweep folder's unique name; `None` if this machine does not see the folder."""
    try:
        return (folder / "machine").read_text().strip()
    except OSError:
        return None


def _open(url: str) -> Any:
    """Open Optuna's storage at a URL."""
    storages = optuna(f"the storage {_safe(url)}").storages
    scheme, _, path = url.partition("://")
    if not path:
        raise ConfigError(f"'{url}' is not a storage URL; use journal:///path/file, or postgresql://user@host/name")
    with quietly(), _reaching(url, ConfigError):
        if scheme == "journal":
            file = Path(path)
            if not file.parent.is_dir():
                raise ConfigError(f"{url} cannot be opened: the folder {file.parent} does not exist")
            file.open("a").close()
            return storages.JournalStorage(storages.journal.JournalFileBackend(path))
        arguments = {"connect_timeout": 10} if scheme.startswith("postgresql") else {}
        engine = {"connect_args": arguments, "pool_pre_ping": True}
        from sqlalchemy.exc import IntegrityError, ProgrammingError

        try:
            database = storages.RDBStorage(url, engine_kwargs=engine)
        except (IntegrityError, ProgrammingError):  # another machine is creating the tables in an empty database
            time.sleep(5)
            database = storages.RDBStorage(url, engine_kwargs=engine)
        return storages.get_storage(database)  # caches trials that are finished


def _holds_sweep(backend: Any, key: int, url: str, study: str, text: str) -> bool:
    """Whether a study already has the text of this sweep; raises if it is another's."""
    attributes = backend.get_study_user_attrs(key)
    if "sweep" not in attributes:
        if backend.get_all_trials(key, deepcopy=False):
            raise ConfigError(
                f"{_safe(url)} has a study '{study}' that jaxscale did not create; append #another_name to the URL"
            )
        return False
    if attributes["sweep"] != text:
        raise ConfigError(
            f"{_safe(url)} holds another sweep as '{study}': {differences(attributes['sweep'], text)}; undo that, "
            "or append #another_name to the URL"
        )
    return True


@contextlib.contextmanager
def _reaching(url: str, kind: type[ConfigError] | type[RunError]) -> Iterator[None]:
    """Context that turns any error of a storage into one sentence."""
    try:
        yield
    except (ConfigError, RunError):
        raise
    except ImportError as e:
        name = e.name or getattr(e.__cause__, "name", None) or "a driver"  # Optuna raises its own error from the cause
        raise kind(f"the storage {_safe(url)} needs {name}, which is not installed: {_remedy(url, name)}") from None
    except Exception as e:  # errors of the driver, SQLAlchemy, Optuna or the file system
        words = " ".join(str(e.__cause__ or e).split("\n(Background")[0].split())
        raise kind(f"the storage {_safe(url)} cannot be reached: {words}") from e


def _remedy(url: str, driver: str) -> str:
    """How to install a database driver; SQLAlchemy 2.0 and 2.1 use different ones for a plain postgresql://."""
    scheme, _, rest = _safe(url).partition("://")
    if not scheme.startswith("postgresql"):
        return f"pip install {driver}"
    again = "" if driver == "psycopg" else f" and write postgresql+psycopg://{rest}"
    return f'pip install "psycopg[binary]"{again}'


def _safe(url: str) -> str:
    """Return a URL without its password."""
    scheme, mark, rest = url.partition("://")
    login, at, place = rest.rpartition("@")
    return f"{scheme}{mark}{login.partition(':')[0]}{at}{place}"
