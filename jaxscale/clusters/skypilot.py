"""SkyPilot: a task file for `sky jobs launch` (https://docs.skypilot.co/en/latest/reference/yaml-spec.html)."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import yaml

from jaxscale.clusters.base import Job, check_options, dump, lines_of
from jaxscale.clusters.kubernetes import PORT
from jaxscale.errors import LOST, ConfigError, near

GPUS = {"a100": "A100-80GB", "h100": "H100", "h200": "H200", "b200": "B200", "mi300x": "MI300X"}
"""SkyPilot's names of GPUs."""

TPUS = {"v4": ("tpu-v4", 2), "v5e": ("tpu-v5litepod", 1), "v5p": ("tpu-v5p", 2), "v6e": ("tpu-v6e", 1)}
"""SkyPilot's names of TPUs, and what their number counts: chips, or cores of which a chip has two."""

OPTIONS = ("cloud", "region", "zone", "infra", "use_spot", "cpus", "memory", "disk_size", "instance_type", "priority")
"""Names of `--option`: fields of `resources`."""

# SkyPilot kills the processes of all hosts when that of one ends, so that their codes say nothing.
_END = f"""\
 || code=$?
case $code in
130 | 143) ;;  # Ctrl-C, SIGTERM
129 | 13[0-9] | 1[4-9][0-9] | 2[0-9][0-9]) code={LOST} ;;  # a killed process is restarted like a lost one
esac
exit "$code"
"""


class SkyPilot:
    """Writes a managed job, whose machines SkyPilot finds in a cloud, and finds again after a preemption."""

    name = "skypilot"
    suffix = ".sky.yaml"
    tool = "sky"
    environment = False

    def check(self, job: Job) -> None:
        """Refuse hardware that SkyPilot has no name for, and a job that cannot find jaxscale or its config.

        Args:
          job: the job.

        Raises:
          ConfigError: the job is one of them.
        """
        chip = job.hardware.chip
        if chip.platform != "cpu" and chip.name not in (*GPUS, *TPUS):
            raise ConfigError(f"--on skypilot has no name for {chip.name}{near(chip.name, [*GPUS, *TPUS])}")
        if job.hosts.slices > 1:
            raise ConfigError("--on skypilot starts one slice; use --on kubernetes or xpk for several")
        if job.volumes or job.minutes is not None:
            raise ConfigError("SkyPilot's jobs have no --volume and no --time; leave them out")
        if job.restarts:
            raise ConfigError(
                f"--restarts {job.restarts}: SkyPilot does not count restarts that depend on the exit code; leave the "
                "option out, or write --restarts 0 for none"
            )
        if job.image is None and not job.setup:
            raise ConfigError(
                "--on skypilot: new machines do not have jaxscale; name an --image that has it, or give the line that "
                "installs it, such as --setup \"pip install -e '.[gpu]'\""
            )
        if os.path.relpath(job.config).startswith(".."):
            raise ConfigError(
                f"--on skypilot copies the current folder to its machines, and {job.config} is not in it; change into "
                "the folder that has it"
            )
        check_options(job, OPTIONS, self.name)

    def text(self, job: Job) -> str:
        """Return the task file.

        Args:
          job: the job.
        """
        tpu = job.hardware.chip.platform == "tpu"
        resources: dict[str, Any] = {}
        if tpu:
            kind, count = TPUS[job.hardware.chip.name]
            resources["accelerators"] = f"{kind}-{math.prod(job.hardware.shape) * count}"
        elif job.hosts.chips:
            resources["accelerators"] = f"{GPUS[job.hardware.chip.name]}:{job.hosts.chips}"
        if job.image is not None:
            resources["image_id"] = f"docker:{job.image}"
        if job.restarts is None:
            resources["job_recovery"] = {"max_restarts_on_errors": 0, "recover_on_exit_codes": [LOST]}
        resources |= {name: yaml.safe_load(value) for name, value in job.options.items()}
        several = job.hosts.count > 1
        lines = []
        if several and not tpu:  # JAX recognises Cloud TPU
            lines = [
                f'export JAXSCALE_COORDINATOR="$(echo "$SKYPILOT_NODE_IPS" | head -n 1):{PORT}"',
                'export JAXSCALE_PROCESSES="$SKYPILOT_NUM_NODES" JAXSCALE_PROCESS="$SKYPILOT_NODE_RANK"',
            ]
        train = job.command(config=os.path.relpath(job.config), distributed=several, installed=True)
        task: dict[str, Any] = {
            "name": job.name,
            "num_nodes": 1 if tpu else job.hosts.count,
            "resources": resources,
            "workdir": ".",
        }
        if job.env:
            task["envs"] = dict(job.env)
        if job.secrets:
            task["secrets"] = dict.fromkeys(job.secrets)
        if job.setup:
            task["setup"] = "\n".join(job.setup) + "\n"
        task["run"] = "\n".join([*lines, "code=0", lines_of(train)]) + _END
        start = " ".join(self.submit(job, Path("FILE")))
        head = f"# {job.hardware.name}. Start it in the folder that has {os.path.relpath(job.config)}: {start}\n"
        return head + dump(task)

    def submit(self, job: Job, file: Path) -> list[str]:
        """Return the sky command; it takes secrets from the environment.

        Args:
          job: the job.
          file: the task file.
        """
        secrets = [word for name in job.secrets for word in ("--secret", name)]
        return ["sky", "jobs", "launch", *secrets, str(file)]

    def shares(self, job: Job, path: str) -> bool | None:
        """Return False: a machine's disk ends with it.

        Args:
          job: the job.
          path: the folder.
        """
        return False
