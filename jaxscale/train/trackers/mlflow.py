"""MLflow."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import math
import re
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

from jaxscale.config import register
from jaxscale.errors import ConfigError
from jaxscale.step.trackers import Histogram, TrackedRun, Tracker, Tracking, check_text, nonfinite
from jaxscale.train.files import TRACKERS, read_json, write_json
from jaxscale.train.plot import plot_histograms
from jaxscale.working_copy import as_named

_BATCH = 100  # parameters of one request at most: https://mlflow.org/docs/latest/rest-api.html
_LENGTH = 500  # characters of a parameter's value that every store takes
_PARENT = "mlflow.parentRunId"  # https://mlflow.org/docs/latest/ml/tracking/tracking-api
_PASSWORD = re.compile(r"://[^:/]*:[^@]+@|[?&]password=")

_TRAINING = {"mlflow.experimentKind": "custom_model_development"}  # the kind that MLflow 3 has for training


@register
@dataclasses.dataclass(frozen=True)
class MLflow(Tracker):
    """MLflow tracking (https://mlflow.org/docs/latest/ml/tracking).

    The trials of a sweep are nested runs of a run with the sweep's name.

    Args:
      experiment: name of the experiment, made if it does not exist.
      uri: the tracking server or store, such as "sqlite:///mlflow.db" or "http://host:5000"; `None` as
        MLFLOW_TRACKING_URI says, else MLflow's default. Credentials are taken from MLflow's environment variables.

    Raises:
      ConfigError: a setting is not text, or the URI contains a password, which `config.gin` would keep.
    """

    experiment: str = "jaxscale"
    uri: str | None = None
    package: ClassVar[str] = "mlflow"
    extra: ClassVar[str] = "mlflow"

    def __post_init__(self) -> None:
        check_text(self, "uri")
        if self.uri is not None and _PASSWORD.search(self.uri):
            raise ConfigError(
                "MLflow.uri contains a password, which config.gin would keep; leave MLflow.uri out and set the "
                "environment variable MLFLOW_TRACKING_URI"
            )

    def variables(self) -> tuple[str, ...]:
        """Return the variable of the address, unless `uri` is set."""
        return () if self.uri else ("MLFLOW_TRACKING_URI",)

    def start(self, run: TrackedRun) -> Tracking:
        """Create a run, or continue the one whose id is stored; a sweep's trials have a parent, and the tag `sweep`."""
        from mlflow import MlflowClient
        from mlflow.entities import Param
        from mlflow.exceptions import MlflowException

        client = MlflowClient(tracking_uri=self.uri)
        if "run_id" in run.stored:
            for one in ("run_id", "parent"):
                if one in run.stored:
                    client.update_run(run.stored[one], status="RUNNING")
            return _Run(client, run.stored)
        experiment = client.get_experiment_by_name(self.experiment)
        if experiment is None:
            try:
                id = client.create_experiment(self.experiment, tags=_TRAINING)
            except MlflowException:  # another trial made it meanwhile
                experiment = client.get_experiment_by_name(self.experiment)
                if experiment is None:
                    raise
        id = id if experiment is None else experiment.experiment_id
        tags = {"jaxscale.id": run.id, "jaxscale.folder": as_named(run.folder)}
        stored = {}
        if run.group is not None:
            stored = {"parent": _parent(client, id, run.group, run.folder.parent)}
            tags |= {"sweep": run.group, _PARENT: stored["parent"]}
        stored["run_id"] = tracked = client.create_run(id, run_name=run.name, tags=tags).info.run_id
        params = [Param(_name(key), str(value)[:_LENGTH]) for key, value in run.settings.items()]
        for i in range(0, len(params), _BATCH):
            client.log_batch(tracked, params=params[i : i + _BATCH])
        return _Run(client, stored)


def _parent(client: Any, experiment: str, group: str, sweep: Path) -> str:
    """Return the id of a sweep's run, which the first trial makes; it is in `trackers.json` of the sweep's folder."""
    from mlflow.exceptions import MlflowException

    with _alone(sweep):
        stored = read_json(sweep / TRACKERS) if (sweep / TRACKERS).exists() else {}
        key = f"MLflow {experiment}"
        try:
            id = str(stored[key]["run_id"])
            client.update_run(id, status="RUNNING")
        except (KeyError, TypeError, MlflowException):  # there is none yet, or it is in another store
            id = client.create_run(experiment, run_name=group, tags={"jaxscale.folder": as_named(sweep)}).info.run_id
            write_json(sweep / TRACKERS, {**stored, key: {"run_id": id}})
    return id


@contextlib.contextmanager
def _alone(sweep: Path) -> Iterator[None]:
    """Context for one trial of a sweep at a time, in any process."""
    with (sweep / ".mlflow.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


class _Run(Tracking):
    def __init__(self, client: Any, stored: Mapping[str, str]):
        self._client, self._id, self.stored = client, stored["run_id"], stored

    def log(self, step: int, row: Mapping[str, float]) -> None:
        """Log numbers in one request."""
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        numbers = [Metric(_name(k), float(v), now, step) for k, v in row.items() if not math.isnan(v)]
        self._client.log_batch(self._id, metrics=numbers)

    def histograms(self, step: int, histograms: Mapping[str, Histogram]) -> None:
        """Upload a picture of all histograms, since MLflow has none; its page of the run has a slider over steps."""
        self._client.log_image(self._id, plot_histograms(histograms, f"step {step}"), key="histograms", step=step)
        if numbers := nonfinite(histograms):
            self.log(step, numbers)

    def artifact(self, path: Path, step: int) -> None:
        """Upload the file."""
        self._client.log_artifact(self._id, str(path))

    def finish(self, status: str) -> None:
        """Set the run's status, and end its parent if no other trial is running."""
        ended = {"finished": "FINISHED", "failed": "FAILED"}.get(status, "KILLED")
        self._client.set_terminated(self._id, ended)
        if "parent" in self.stored:
            trial = self._client.get_run(self._id)
            running = f"tags.`{_PARENT}` = '{self.stored['parent']}' and attributes.status = 'RUNNING'"
            if not self._client.search_runs([trial.info.experiment_id], running, max_results=1):
                self._client.set_terminated(self.stored["parent"])


def _name(name: str) -> str:
    """A name with the characters that MLflow allows."""
    return "".join(c if c.isalnum() or c in "_-. /" else "_" for c in name)
