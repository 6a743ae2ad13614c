"""Many machines at one sweep: each pulls trials from an Optuna storage, a journal file or a database.

A start of a trial is a trial of Optuna's study, so that Optuna's own tools show a sweep. Starts are claims: a machine
appends one, reads them all, and has the trial if of those that claim the same start its own came first. All machines
read the same order, so none needs a lock. While it runs, a counter grows; who sees it stand still for long enough
takes the machine for dead and claims the next start. What a machine that was only silent reports later is of a start
that is not the last any more, and counts for nothing.
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
from jaxscale.sweep.search.as_optuna import optuna, quietly, shown
from jaxscale.train.files import write_text

LOOK = 0.5
"""Seconds between two looks into the storage; an eighth of the patience where that is less."""


@register
@dataclasses.dataclass(frozen=True)
class Storage:
    """Where several machines agree on who runs what.

    Args:
      url: `journal:///path/file` on a disk that all of them see, or a database as SQLAlchemy names it, such as
        `postgresql://user@host/name`. What follows a `#` is the study's name.
      patience: seconds of silence after which a machine counts as dead and its trials are anybody's.
    """

    url: str
    patience: float = 60.0

    def __post_init__(self) -> None:
        if self.patience <= 0:
            raise ConfigError(f"Storage.patience = {self.patience}: seconds, above 0")

    def connect(self, text: str) -> Shared:
        """Opens the storage, and the study in it.

        Args:
          text: of the sweep; all machines have to have the same.

        Raises:
          ConfigError: it cannot be reached, or another sweep has the study.
        """
        url, _, study = self.url.partition("#")
        backend = _open(url)
        with quietly(), _reaching(url, ConfigError):
            return Shared(backend, url, study or "sweep", text, self.patience)

    def check(self, text: str) -> None:
        """Opens the storage, and makes no study in it; Optuna's own tables, or an empty journal, it may.

        Args:
          text: of the sweep.

        Raises:
          ConfigError: as `connect`.
        """
        url, _, study = self.url.partition("#")
        backend, study = _open(url), study or "sweep"
        with quietly(), _reaching(url, ConfigError):
            with contextlib.suppress(KeyError):  # there is none of that name yet
                _told(backend, backend.get_study_id_from_name(study), url, study, text)


class Shared:
    """A study that machines share."""

    def __init__(self, backend: Any, url: str, study: str, text: str, patience: float):
        self.backend, self.url, self.patience = backend, url, patience
        module = optuna("a storage")
        try:
            self.study = backend.create_new_study([module.study.StudyDirection.MINIMIZE], study)
            backend.set_study_user_attr(self.study, "sweep", text)
        except module.exceptions.DuplicatedStudyError:
            self.study = backend.get_study_id_from_name(study)
        if not _told(backend, self.study, url, study, text):
            backend.set_study_user_attr(self.study, "sweep", text)

    def ledger(self, journal: Journal, space: Mapping[str, Axis]) -> SharedLedger:
        """What this machine's coordinator talks to.

        Args:
          journal: of this machine's own folder.
          space: the axes.
        """
        return SharedLedger(self, journal, space)


@dataclasses.dataclass
class _Start:
    """A start of a trial that counts: the first claim of it."""

    number: int  # of Optuna's
    key: int  # Optuna's id of it
    trial: Trial
    told: Mapping[str, Any]
    values: Mapping[int, float]


class SharedLedger:
    """The storage as a `Ledger`; what this machine runs is in its journal as well.

    Args:
      shared: the study.
      journal: of this machine's folder.
      space: the axes, for how Optuna's tools show them.
    """

    def __init__(self, shared: Shared, journal: Journal, space: Mapping[str, Axis]):
        self.shared, self.journal = shared, journal
        self.machine = machine_of(journal.folder)
        self.shown = {name: shown(axis) for name, axis in space.items()}
        self._bindings: dict[int, dict[str, Any]] = {}
        self._heard: dict[int, tuple[int, float]] = {}  # the last count of each start, and since when it stands
        self._held: dict[int, _Start] = {}  # what this process runs
        self._read: tuple[float, dict[int, list[_Start]]] = (-math.inf, {})
        self._seen: dict[int, list[_Start]] = {}  # at the last look at the records
        self._again: dict[int, int] = {}  # trials that failed and are wanted once more, with the number of that start
        self._closed = threading.Event()
        self._beating = threading.Thread(target=self._beat, daemon=True, name="sweep-beat")
        with self._reach():
            self._settle()
        self._beating.start()

    def records(self) -> list[Record]:
        """See `Ledger`."""
        with self._reach():
            starts = self._seen = self._starts()
        mine = {r.trial.id: r for r in self.journal.records()}
        return [self._record(starts[id], mine.get(id)) for id in sorted(starts)]

    def claim(self, trial: Trial) -> Path | None:
        """See `Ledger`. A trial goes on in the folder of its last start where this machine sees it; else in its own."""
        with self._reach():
            before = self._seen.get(trial.id, [])  # what this was decided on: a claim of another since then is first
            folder = self._folder(trial, before)
            told = {
                "id": trial.id,
                "start": len(before),
                "until": trial.until,
                "bindings": {key: gin_config.text(value) for key, value in trial.bindings.items()},
                "machine": self.machine,
                "home": machine_in(folder.parent),
                "host": socket.gethostname(),
                "run": str(folder.resolve()),
            }
            key = self._append(trial, told)
            self._read = (-math.inf, {})
            starts = self._starts().get(trial.id, [])
            if len(starts) <= len(before) or starts[len(before)].key != key:
                self._end(key, "FAIL")
                return None
            if before and "end" not in before[-1].told:
                self._end(before[-1].key, "FAIL")  # of a machine that fell silent
            self._held[trial.id] = starts[len(before)]
        if self._again.pop(trial.id, None) is not None:
            try_again(folder)
        if folder.parent == self.journal.folder:
            self.journal.claim(trial)
        return folder

    def report(self, record: Record) -> bool:
        """See `Ledger`."""
        if record.run is not None and record.run.parent == self.journal.folder:
            self.journal.report(record)
        start = self._held.get(record.trial.id)
        if start is None:
            return False
        with self._reach():
            mine = self._starts()[record.trial.id][-1].key == start.key and self._tell(start, record)
        if not mine or record.state != RUNNING:
            del self._held[record.trial.id]
            self._read = (-math.inf, {})
        return mine

    def retry_failed(self) -> list[int]:
        """See `Ledger`; those of other machines as well. Who claims the next start first has it."""
        with self._reach():
            ends = {id: starts[-1] for id, starts in self._starts().items()}
        self._again = {id: s.number for id, s in ends.items() if s.told.get("end", {}).get("state") in BAD}
        return sorted(self._again)

    def close(self) -> None:
        """See `Ledger`."""
        self._closed.set()
        self._beating.join(timeout=5)
        self.journal.close()

    # --- reading ------------------------------------------------------------------------------------------------------

    def _starts(self) -> dict[int, list[_Start]]:
        """Every start that counts, by trial, in order."""
        when, starts = self._read
        if time.monotonic() - when < min(LOOK, self.shared.patience / 8):
            return starts
        starts = {}
        for found in self.shared.backend.get_all_trials(self.shared.study, deepcopy=False):
            told = found.user_attrs
            id, count = told.get("id"), told.get("start")
            if id is None or count != len(starts.get(id, [])) or (count == 0 and id != len(starts)):
                continue  # another claim came first
            if found.number not in self._bindings:
                bindings = {key: gin_config.parse(text) for key, text in told["bindings"].items()}
                self._bindings[found.number] = bindings
            trial = Trial(id, self._bindings[found.number], told["until"])
            starts.setdefault(id, []).append(
                _Start(found.number, found._trial_id, trial, told, found.intermediate_values)
            )
        self._read = (time.monotonic(), starts)
        return starts

    def _record(self, starts: Sequence[_Start], mine: Record | None) -> Record:
        """What became of a trial over all its starts; what this process runs is as its folder says."""
        last = starts[-1]
        curve = {step: value for start in starts for step, value in start.values.items()}
        if mine is not None and self._has(last) and last.told["home"] == self.machine:
            curve |= dict(mine.curve)  # one that began again has not yet been where others were judged
            return dataclasses.replace(mine, trial=last.trial, curve=sorted(curve.items()))
        record = Record(last.trial, curve=sorted(curve.items()), run=Path(last.told["run"]))
        ends = [start.told["end"] for start in starts if "end" in start.told]
        if ends:
            record.metrics, record.seconds = dict(ends[-1]["metrics"]), ends[-1]["seconds"]
        if "end" in last.told:
            record.state, record.error = last.told["end"]["state"], last.told["end"]["error"]
            if self._again.get(last.trial.id) == last.number:
                record.state, record.error = WAITING, None
        else:
            record.state = RUNNING if self._alive(last) else WAITING
        return record

    def _has(self, start: _Start) -> bool:
        """Whether this process runs it."""
        ours = self._held.get(start.trial.id)
        return ours is not None and ours.key == start.key

    def _alive(self, start: _Start) -> bool:
        if start.told.get("free"):
            return False
        if self._has(start):
            return True
        if start.told["machine"] == self.machine:  # of an earlier process, which only a worker can have outlived
            return held(Path(start.told["run"]).parent, start.trial.id)
        count, now = start.told.get("beat", 0), time.monotonic()
        before, since = self._heard.get(start.number, (-1, now))
        if before != count:
            self._heard[start.number] = (count, now)
            return True
        return now - since < self.shared.patience

    def _folder(self, trial: Trial, starts: Sequence[_Start]) -> Path:
        """That of its last start, if this machine sees it, or of the one before, ...; else one of its own."""
        for start in reversed(starts):
            folder = Path(start.told["run"])
            if start.told["home"] == self.machine:
                break
            if machine_in(folder.parent) == start.told["home"] and not held(folder.parent, trial.id):
                return folder
        return run_folder(self.journal.folder, trial.id)

    # --- writing ------------------------------------------------------------------------------------------------------

    def _append(self, trial: Trial, told: Mapping[str, Any]) -> int:
        """Claims a start; Optuna's id of it."""
        module = optuna("a storage")
        codes = {name: code for name, code in self.shown.items() if name in trial.bindings}
        template = module.trial.create_trial(
            state=module.trial.TrialState.RUNNING,
            params={name: code.encode(trial.bindings[name]) for name, code in codes.items()},
            distributions={name: code.distribution for name, code in codes.items()},
            user_attrs=dict(told),
        )
        return self.shared.backend.create_new_trial(self.shared.study, template_trial=template)

    def _tell(self, start: _Start, record: Record) -> bool:
        """Writes what is new of a trial that this machine runs; `False` where another has taken it meanwhile."""
        backend = self.shared.backend
        try:
            for step, value in record.curve:
                if step not in start.values:
                    backend.set_trial_intermediate_value(start.key, step, value)
            start.values = dict(record.curve)
            if record.state == WAITING:  # it has to be started again: anybody may
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
        """What Optuna's tools show as its end."""
        module = optuna("a storage")
        with contextlib.suppress(module.exceptions.UpdateFinishedTrialError):
            values = [value] if state == "COMPLETE" else None
            self.shared.backend.set_trial_state_values(key, module.trial.TrialState[state], values)

    def _settle(self) -> None:
        """Tells how trials of an earlier process in this folder ended, if it was killed before it could."""
        for starts in self._starts().values():
            last, folder = starts[-1], Path(starts[-1].told["run"])
            if last.told["machine"] == self.machine and "end" not in last.told:
                progress = Progress(last.trial, folder, self.journal.objective)
                record = progress.read(running=held(folder.parent, last.trial.id))
                if record.state not in (RUNNING, WAITING):
                    self._tell(last, record)
        self._read = (-math.inf, {})

    def _beat(self) -> None:
        """Counts, four times in the time that others are patient for."""
        count = 0
        while not self._closed.wait(self.shared.patience / 4):
            count += 1
            for start in list(self._held.values()):
                with contextlib.suppress(Exception):  # of a storage out of reach the coordinator tells
                    self.shared.backend.set_trial_user_attr(start.key, "beat", count)

    @contextlib.contextmanager
    def _reach(self) -> Iterator[None]:
        with _reaching(self.shared.url, RunError):
            yield


def machine_of(folder: Path) -> str:
    """The name of a sweep's folder among all machines; made when there is none."""
    if machine_in(folder) is None:
        write_text(folder / "machine", uuid.uuid4().hex + "\n")
    return machine_in(folder) or ""


def machine_in(folder: Path) -> str | None:
    """The name of a folder that this machine sees."""
    try:
        return (folder / "machine").read_text().strip()
    except OSError:
        return None


def _open(url: str) -> Any:
    """Optuna's storage of a URL."""
    storages = optuna(f"the storage {_safe(url)}").storages
    scheme, _, path = url.partition("://")
    if not path:
        raise ConfigError(f"'{url}' names no storage; give journal:///path/file, or postgresql://user@host/name")
    with quietly(), _reaching(url, ConfigError):
        if scheme == "journal":
            file = Path(path)
            if not file.parent.is_dir():
                raise ConfigError(f"{url} cannot be opened: there is no folder {file.parent}")
            file.open("a").close()
            return storages.JournalStorage(storages.journal.JournalFileBackend(path))
        arguments = {"connect_timeout": 10} if scheme.startswith("postgresql") else {}
        how = {"connect_args": arguments, "pool_pre_ping": True}
        from sqlalchemy.exc import IntegrityError, ProgrammingError

        try:
            database = storages.RDBStorage(url, engine_kwargs=how)
        except (IntegrityError, ProgrammingError):  # another machine makes the tables of an empty database just now
            time.sleep(5)
            database = storages.RDBStorage(url, engine_kwargs=how)
        return storages.get_storage(database)  # remembers what cannot change any more


def _told(backend: Any, key: int, url: str, study: str, text: str) -> bool:
    """Whether a study has been told its sweep, which has to be this one."""
    told = backend.get_study_user_attrs(key)
    if "sweep" not in told:
        if backend.get_all_trials(key, deepcopy=False):
            raise ConfigError(f"{_safe(url)} has a study '{study}' that is no sweep of ours; append #another_name")
        return False
    if told["sweep"] != text:
        raise ConfigError(
            f"{_safe(url)} holds another sweep as '{study}': {differences(told['sweep'], text)}; take that back, "
            "or append #another_name to the URL"
        )
    return True


@contextlib.contextmanager
def _reaching(url: str, kind: type[ConfigError] | type[RunError]) -> Iterator[None]:
    """Whatever a storage raises inside, as one sentence."""
    try:
        yield
    except (ConfigError, RunError):
        raise
    except ImportError as e:
        name = e.name or getattr(e.__cause__, "name", None) or "a driver"  # Optuna raises one of its own, from that
        raise kind(f"the storage {_safe(url)} needs {name}, which is not installed: {_remedy(url, name)}") from None
    except Exception as e:  # of the storage's driver, of SQLAlchemy, of Optuna, of the file system
        words = " ".join(str(e.__cause__ or e).split("\n(Background")[0].split())
        raise kind(f"the storage {_safe(url)} cannot be reached: {words}") from e


def _remedy(url: str, driver: str) -> str:
    """How to come by a database's driver; a plain postgresql:// means another one with SQLAlchemy 2.0 than with 2.1."""
    scheme, _, rest = _safe(url).partition("://")
    if not scheme.startswith("postgresql"):
        return f"pip install {driver}"
    again = "" if driver == "psycopg" else f" and write postgresql+psycopg://{rest}"
    return f'pip install "psycopg[binary]"{again}'


def _safe(url: str) -> str:
    """A URL without its password."""
    scheme, mark, rest = url.partition("://")
    login, at, place = rest.rpartition("@")
    return f"{scheme}{mark}{login.partition(':')[0]}{at}{place}"
