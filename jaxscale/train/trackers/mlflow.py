"""MLflow."""

from __future__ import annotations

import dataclasses
import math
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from jaxscale.config import register
from jaxscale.errors import ConfigError
from jaxscale.step.trackers import TrackedRun, Tracker, Tracking, check_text
from jaxscale.working_copy import as_named

_BATCH = 100  # parameters of one request at most: https://mlflow.org/docs/latest/rest-api.html
_LENGTH = 500  # characters of a parameter's value that every store takes
_PASSWORD = re.compile(r"://[^:/]*:[^@]+@|[?&]password=")

_TRAINING = {"mlflow.experimentKind": "custom_model_development"}  # the kind that MLflow 3 has for training


@register
@dataclasses.dataclass(frozen=True)
class MLflow(Tracker):
    """MLflow tracking (https://mlflow.org/docs/latest/ml/tracking).

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
        """Create a run, or continue the one whose id is stored; a sweep's trials have the tag `sweep`."""
        from mlflow import MlflowClient
        from mlflow.entities import Param
        from mlflow.exceptions import MlflowException

        client = MlflowClient(tracking_uri=self.uri)
        if "run_id" in run.stored:
            client.update_run(run.stored["run_id"], status="RUNNING")
            return _Run(client, run.stored["run_id"])
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
        tags |= {} if run.group is None else {"sweep": run.group}
        tracked = client.create_run(id, run_name=run.name, tags=tags).info.run_id
        params = [Param(_name(key), str(value)[:_LENGTH]) for key, value in run.settings.items()]
        for i in range(0, len(params), _BATCH):
            client.log_batch(tracked, params=params[i : i + _BATCH])
        return _Run(client, tracked)


class _Run(Tracking):
    def __init__(self, client: Any, id: str):
        self._client, self._id, self.stored = client, id, {"run_id": id}

    def log(self, step: int, row: Mapping[str, float]) -> None:
        """Log numbers in one request."""
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        numbers = [Metric(_name(k), float(v), now, step) for k, v in row.items() if not math.isnan(v)]
        self._client.log_batch(self._id, metrics=numbers)

    def artifact(self, path: Path, step: int) -> None:
        """Upload the file."""
        self._client.log_artifact(self._id, str(path))

    def finish(self, status: str) -> None:
        """Set the run's status."""
        ended = {"finished": "FINISHED", "failed": "FAILED"}.get(status, "KILLED")
        self._client.set_terminated(self._id, ended)


def _name(name: str) -> str:
    """A name with the characters that MLflow allows."""
    return "".join(c if c.isalnum() or c in "_-. /" else "_" for c in name)
