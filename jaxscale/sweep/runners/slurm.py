"""Runs as jobs of a SLURM cluster, which outlive the sweep that submitted them."""

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

    Use it from a login node of a cluster. The sweep's folder has to be on a disk that all machines share. Jobs go on
    when the sweep ends or is killed: started again, it finds them by their ids (`jobs/007.slurm.json`) and submits
    none twice. A job whose time is up writes a checkpoint, and is submitted again.

    Args:
      partition: of the cluster; its default one by default.
      gpus: of each job.
      cpus: of each job.
      memory: of each job, GB.
      time: of each job, minutes.
      options: further `#SBATCH` options by name, as {"account": "abc", "constraint": "h200"}.
      setup: lines of shell before each job, as "module load cuda".
      jobs: how many may be submitted at once.
      cluster: "slurm", or "local" for processes of this machine that are told the same.

    Raises:
      ConfigError: a setting out of its range; or, when asked for slots, submitit or SLURM is not there.
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
        """See `Runner`."""
        _submitit()
        return self.jobs

    def together(self, jobs: Sequence[Job]) -> Sequence[Sequence[Job]]:
        """See `Runner`: each alone."""
        return [[job] for job in jobs]

    def start(self, jobs: Sequence[Job]) -> Submitted:
        """See `Runner`; a job that is still there is not submitted again."""
        [job] = jobs
        note = job_file(job.folder, "slurm.json")
        there = self._find(note, job)
        if there is not None:
            return there
        file = write_job(job)
        _stop_file(file).unlink(missing_ok=True)
        executor = self._executor(file.parent / "slurm", job.folder.name)
        try:
            submitted = executor.submit(carry_out, str(file))
        except RuntimeError as e:  # of sbatch; runs submitted before go on, and are found by the next start
            raise RunError(f"SLURM did not take the run {job.folder.name}: {sentence(e)}") from e
        told = {"id": submitted.job_id, "cluster": self.cluster, "until": job.trial.until}
        write_json(note, told, None)
        return Submitted(submitted, file, _ALIVE[self.cluster])

    def close(self) -> None:
        """See `Runner`; jobs go on, but for those that were stopped."""

    def _find(self, note: Path, job: Job) -> Submitted | None:
        """The trial's own job, where it is still there."""
        try:
            told = read_json(note)
        except FileNotFoundError:
            return None
        if (told["cluster"], told["until"]) != (self.cluster, job.trial.until):
            return None
        submitit = _submitit()
        kind = {"slurm": submitit.SlurmJob, "local": submitit.LocalJob}[self.cluster]
        found = Submitted(kind(note.parent / "slurm", told["id"]), job_file(job.folder, "json"), _ALIVE[self.cluster])
        return found if found.alive() else None

    def _executor(self, folder: Path, name: str) -> submitit.AutoExecutor:
        try:
            executor = _submitit().AutoExecutor(folder=folder, cluster=self.cluster)
        except RuntimeError as e:
            raise ConfigError(
                f"this machine is none of a SLURM cluster ({e}); start the sweep on a login node, or take Pool()"
            ) from None
        given = {"slurm_partition": self.partition, "gpus_per_node": self.gpus, "cpus_per_task": self.cpus}
        executor.update_parameters(
            **{name: value for name, value in given.items() if value is not None},
            **({} if self.memory is None else {"mem_gb": self.memory}),
            name=f"sweep-{name}",
            timeout_min=self.time,
            slurm_additional_parameters=dict(self.options),
            **{f"{self.cluster}_setup": [_find_us(), *self.setup]},
        )
        return executor


class Submitted:
    """A handle on a job of the cluster.

    Args:
      job: submitit's.
      file: the job's, see `write_job`.
      is_alive: whether it is queued or runs.
    """

    def __init__(self, job: Any, file: Path, is_alive: Callable[[Any], bool]):
        self.job, self.file, self._is_alive = job, file, is_alive

    def alive(self) -> bool:
        """See `Handle`."""
        return not self.job.paths.result_pickle.exists() and self._is_alive(self.job)

    def stop(self, id: int) -> None:
        """See `Handle`. A file says so, since a signal would have to find the machine."""
        _stop_file(self.file).touch()
        if self.job.state == "PENDING":
            self.job.cancel(check=False)

    def why(self) -> str:
        """See `Handle`."""
        return f"ended as {self.job.state} (its log is {self.job.paths.stderr})"


def carry_out(file: str) -> None:
    """What a job does.

    Args:
      file: see `write_job`.
    """
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    append_current_folder()
    asked, path = threading.Event(), Path(file)
    signal.signal(signal.SIGUSR2, lambda *_: asked.set())  # sent by SLURM a little before the time is up
    run_job(read_job(path), stop=lambda: asked.is_set() or _stop_file(path).exists())


def _stop_file(file: Path) -> Path:
    return file.with_suffix(".stop")


def _submitit() -> Any:
    try:
        import submitit
    except ImportError:
        raise ConfigError("Slurm() submits jobs through submitit: pip install 'jaxscale[slurm]'") from None
    return submitit


def _find_us() -> str:
    """A line of shell by which a job finds the package that submitted it."""
    # an empty entry would be the current folder, as would be that of `python -m`, before everything installed
    return f'export PYTHONSAFEPATH=1 PYTHONPATH="{ROOT}${{PYTHONPATH:+:$PYTHONPATH}}"'


def _alive_on_cluster(job: Any) -> bool:
    return not job.done()


def _alive_here(job: Any) -> bool:
    if job._process is not None:  # started by this process, which has to ask how it ended
        return job.state == "RUNNING"
    try:
        return b"submitit" in Path(f"/proc/{job.job_id}/cmdline").read_bytes()
    except OSError:
        return False


_ALIVE: Mapping[str, Callable[[Any], bool]] = {"slurm": _alive_on_cluster, "local": _alive_here}
