"""Runs trials as jobs of a SLURM cluster, which continue when the sweep that submitted them ends."""

from __future__ import annotations

import dataclasses
import logging
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxscale.config import register
from jaxscale.errors import ConfigError, RunError, near
from jaxscale.import_path import ROOT, append_current_folder
from jaxscale.sweep.base import Job
from jaxscale.sweep.jobs import read_job, run_job, sentence, write_job
from jaxscale.sweep.journal import job_file
from jaxscale.train.files import read_json, write_json

if TYPE_CHECKING:
    import submitit


@register
@dataclasses.dataclass(frozen=True)
class Slurm:
    """Submits each run as a job, through submitit (`pip install 'jaxscale[slurm]'`).

    Use it on a login node of a cluster. The sweep's folder has to be on a disk that all machines share. Jobs continue
    when the sweep ends or is killed; the same sweep, started again, finds them by their ids (`jobs/007.slurm.json`)
    and submits none twice. A job that reaches its time limit writes a checkpoint, and is submitted again.

    Args:
      partition: partition of the cluster; by default the cluster's default.
      gpus: GPUs per job.
      cpus: CPU cores per job.
      memory: memory per job, GB.
      time: time limit of a job, minutes.
      options: further `#SBATCH` options by name, as {"account": "abc", "constraint": "h200"}.
      setup: shell lines to run before each job, as "module load cuda".
      jobs: maximum number of submitted jobs.
      cluster: "slurm", or "local" to run the jobs as processes on this machine.

    Raises:
      ConfigError: a setting is out of its range; or, when the sweep starts, submitit or SLURM is missing.
    """

    partition: str | None = None
    gpus: int | None = None
    cpus: int | None = None
    memory: float | None = None
    time: int = 60
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    setup: Sequence[str] = ()
    jobs: int = 16
    cluster: str = "slurm"

    def __post_init__(self) -> None:
        for name in ("gpus", "cpus", "memory", "time", "jobs"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"Slurm.{name} = {value}: must be above 0")
        if self.cluster not in _ALIVE:
            raise ConfigError(f"Slurm.cluster = {self.cluster!r} does not exist{near(self.cluster, _ALIVE)}")

    def slots(self) -> int:
        """Return the maximum number of submitted jobs."""
        _submitit()
        return self.jobs

    def together(self, jobs: Sequence[Job]) -> Sequence[Sequence[Job]]:
        """Return each job as a group of its own."""
        return [[job] for job in jobs]

    def start(self, jobs: Sequence[Job]) -> Submitted:
        """Submit a job, or return the one that is still queued or running."""
        [job] = jobs
        note = job_file(job.folder, "slurm.json")
        existing = self._find(note, job)
        if existing is not None:
            return existing
        file = write_job(job)
        _stop_file(file).unlink(missing_ok=True)
        executor = self._executor(file.parent / "slurm", job.folder.name)
        try:
            submitted = executor.submit(carry_out, str(file))
        except RuntimeError as e:  # sbatch failed; jobs submitted before continue, and the next start finds them
            raise RunError(f"SLURM did not accept the run {job.folder.name}: {sentence(e)}") from e
        fields = {"id": submitted.job_id, "cluster": self.cluster, "until": job.trial.until}
        write_json(note, fields, None)
        return Submitted(submitted, file, _ALIVE[self.cluster])

    def close(self) -> None:
        """Do nothing: jobs continue on the cluster."""

    def _find(self, note: Path, job: Job) -> Submitted | None:
        """The trial's job if it is still queued or running."""
        try:
            fields = read_json(note)
        except FileNotFoundError:
            return None
        if (fields["cluster"], fields["until"]) != (self.cluster, job.trial.until):
            return None
        submitit = _submitit()
        kind = {"slurm": submitit.SlurmJob, "local": submitit.LocalJob}[self.cluster]
        handle = Submitted(
            kind(note.parent / "slurm", fields["id"]), job_file(job.folder, "json"), _ALIVE[self.cluster]
        )
        return handle if handle.alive() else None

    def _executor(self, folder: Path, name: str) -> submitit.AutoExecutor:
        try:
            executor = _submitit().AutoExecutor(folder=folder, cluster=self.cluster)
        except RuntimeError as e:
            raise ConfigError(
                f"this machine is not part of a SLURM cluster ({e}); start the sweep on a login node, or use Pool()"
            ) from None
        options = {"slurm_partition": self.partition, "gpus_per_node": self.gpus, "cpus_per_task": self.cpus}
        executor.update_parameters(
            **{name: value for name, value in options.items() if value is not None},
            **({} if self.memory is None else {"mem_gb": self.memory}),
            name=f"sweep-{name}",
            timeout_min=self.time,
            slurm_additional_parameters=dict(self.options),
            **{f"{self.cluster}_setup": [_path_line(), *self.setup]},
        )
        return executor


class Submitted:
    """A handle on a job of the cluster.

    Args:
      job: submitit's job.
      file: the job's file; see `write_job`.
      is_alive: whether submitit's job is queued or running.
    """

    def __init__(self, job: Any, file: Path, is_alive: Callable[[Any], bool]):
        self.job, self.file, self._is_alive = job, file, is_alive

    def alive(self) -> bool:
        """Whether the job is queued or running."""
        return not self.job.paths.result_pickle.exists() and self._is_alive(self.job)

    def stop(self, id: int) -> None:
        """Stop the job through a file that it polls, since a signal would have to know the machine."""
        _stop_file(self.file).touch()
        if self.job.state == "PENDING":
            self.job.cancel(check=False)

    def why(self) -> str:
        """SLURM's state of the job, and its log."""
        return f"ended as {self.job.state} (its log is {self.job.paths.stderr})"


def carry_out(file: str) -> None:
    """Run a job; called by submitit on the cluster.

    Args:
      file: the job's file; see `write_job`.
    """
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    append_current_folder()
    time_up, path = threading.Event(), Path(file)
    signal.signal(signal.SIGUSR2, lambda *_: time_up.set())  # sent by SLURM shortly before the time limit
    run_job(read_job(path), stop=lambda: time_up.is_set() or _stop_file(path).exists())


def _stop_file(file: Path) -> Path:
    return file.with_suffix(".stop")


def _submitit() -> Any:
    try:
        import submitit
    except ImportError:
        raise ConfigError("Slurm() submits jobs through submitit: pip install 'jaxscale[slurm]'") from None
    return submitit


def _path_line() -> str:
    """A shell line that puts the package which submits the job on the job's PYTHONPATH."""
    # `python -m` and an empty entry would put the current folder before installed packages
    return f'export PYTHONSAFEPATH=1 PYTHONPATH="{ROOT}${{PYTHONPATH:+:$PYTHONPATH}}"'


def _alive_on_cluster(job: Any) -> bool:
    return not job.done()


def _alive_here(job: Any) -> bool:
    if job._process is not None:  # a child of this process, so its state can be polled
        return job.state == "RUNNING"
    try:
        return b"submitit" in Path(f"/proc/{job.job_id}/cmdline").read_bytes()
    except OSError:
        return False


_ALIVE: Mapping[str, Callable[[Any], bool]] = {"slurm": _alive_on_cluster, "local": _alive_here}
