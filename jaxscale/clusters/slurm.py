"""SLURM: a file for sbatch (https://slurm.schedmd.com/sbatch.html)."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

from jaxscale.clusters.base import Job, lines_of
from jaxscale.errors import ConfigError

NOTICE = 300
"""Seconds before the time limit at which a job is asked to save a checkpoint and end."""

OURS = ("job-name", "nodes", "ntasks-per-node", "gpus-per-node", "time", "signal", "requeue", "open-mode")
"""Options that the launcher writes itself."""

_END = """\

# A job that reaches its time limit gets USR1 {notice} s before: it saves a checkpoint, and is queued again.
timeup= stopped=
trap 'signal=1; timeup=1; scancel --signal=TERM "$SLURM_JOB_ID"' USR1
trap 'signal=1; stopped=1' TERM

{run} &
step=$!
signal=1
while [ -n "$signal" ]; do  # a signal interrupts `wait`, whose code is then the signal's and not the step's
    signal= code=0
    wait "$step" || code=$?
done

# 0: done. 2: a mistake in the settings, which a restart would repeat. 130, 143: Ctrl-C; the time limit, or scancel.
case $code in
0 | 2 | 130) ;;
143) if [ -n "$timeup" ]; then scontrol requeue "$SLURM_JOB_ID"; fi ;;
*)
    if [ -z "$stopped" ] && [ "${{SLURM_RESTART_COUNT:-0}}" -lt {restarts} ]; then
        scontrol requeue "$SLURM_JOB_ID"
    fi
    ;;
esac
exit "$code"
"""


class Slurm:
    """Writes an sbatch file: a task for each GPU, which is what JAX expects on SLURM, or one on a single host."""

    name = "slurm"
    suffix = ".sbatch"
    tool = "sbatch"
    environment = True

    def check(self, job: Job) -> None:
        """Refuse TPUs, options that the launcher writes itself, and what only Kubernetes has.

        Args:
          job: the job.

        Raises:
          ConfigError: the job has one of them.
        """
        if job.hardware.chip.platform == "tpu":
            raise ConfigError(
                f"--on slurm: {job.hardware.name} are TPUs, which SLURM does not start; use --on kubernetes, xpk or "
                "skypilot, or GPUs such as --topology h100:16"
            )
        if job.volumes:
            raise ConfigError("--volume is for --on kubernetes; hosts of SLURM share their disks already")
        if job.minutes is not None and job.minutes * 60 <= 2 * NOTICE:
            raise ConfigError(
                f"--time {job.minutes}m: a job is asked to end {NOTICE // 60} minutes before its limit, so that it "
                f"needs at least {2 * NOTICE // 60 + 1}m"
            )
        for name in job.options:
            if name in OURS:
                raise ConfigError(f"--option {name}: jaxscale launch writes #SBATCH --{name} itself; leave it out")

    def text(self, job: Job) -> str:
        """Return the sbatch file.

        Args:
          job: the job.
        """
        distributed = job.hosts.count > 1
        settings: dict[str, str | int | None] = {
            "job-name": job.name,
            "nodes": job.hosts.count,
            "ntasks-per-node": job.hosts.chips if distributed else 1,
            "chdir": os.getcwd(),
        }
        if job.hosts.chips:
            settings["gpus-per-node"] = job.hosts.chips
        if job.minutes is not None:
            days, rest = divmod(job.minutes, 24 * 60)
            settings |= {"time": f"{days}-{rest // 60:02}:{rest % 60:02}:00", "signal": f"B:USR1@{NOTICE}"}
        settings |= {"output": f"{job.name}-%j.log", "open-mode": "append", "requeue": None, **job.options}
        lines = ["#!/bin/bash"]
        lines += [
            f"#SBATCH --{name}" + ("" if value in (None, "") else f"={value}") for name, value in settings.items()
        ]
        lines += ["", f"# {job.hardware.name}: {job.hosts.count} host{'s' * distributed}"]
        lines += [f"export {name}={shlex.quote(value)}" for name, value in job.env.items()]
        lines += [f': "${{{name}:?export it before sbatch, which passes it on}}"' for name in job.secrets]
        lines += job.setup
        return "\n".join(lines) + "\n" + _END.format(notice=NOTICE, run=self._srun(job), restarts=job.limit)

    def _srun(self, job: Job) -> str:
        # The others end by themselves when one is lost, with an exit code that says so; killed, they would hide it.
        words = f"srun --kill-on-bad-exit=0 --wait={NOTICE}"
        if job.image is not None:  # the options of pyxis, NVIDIA's plugin for containers
            words += (
                f' --container-image={shlex.quote(job.image)} --container-mounts="$PWD:$PWD" --container-workdir="$PWD"'
            )
        train = job.command(config=job.config, distributed=job.hosts.count > 1)
        return f"{words} \\\n    {lines_of(train)}"

    def submit(self, job: Job, file: Path) -> list[str]:
        """Return the sbatch command.

        Args:
          job: the job.
          file: the sbatch file.
        """
        return ["sbatch", str(file)]

    def shares(self, job: Job, path: str) -> bool | None:
        """Return `None`: the hosts share some of their disks.

        Args:
          job: the job.
          path: the folder.
        """
        return None
