"""xpk: the command that creates a workload on GKE's TPUs (https://github.com/AI-Hypercomputer/xpk)."""

from __future__ import annotations

import math
import shlex
from pathlib import Path

from jaxscale.clusters.base import Job, lines_of
from jaxscale.clusters.hosts import TPU_HOST
from jaxscale.errors import LOST, ConfigError, near
from jaxscale.hardware import Topology

TYPES = {"v4": "v4", "v5e": "v5litepod", "v5p": "v5p", "v6e": "v6e", "tpu7x": "tpu7x"}
"""xpk's names of TPUs; the shape follows."""

_FLAT = ("2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
_SMALL = ("2x2x1", "2x2x2", "2x2x4", "2x4x4")

SHAPES = {"v4": _SMALL, "v5e": _FLAT, "v5p": _SMALL, "v6e": ("1x1", "2x2", *_FLAT), "tpu7x": ("1x1x1", *_SMALL)}
"""The shapes that xpk knows, without those of cubes (xpk 1.16, src/xpk/core/system_characteristics.py)."""

CUBES = {"v4": 64, "v5p": 140, "tpu7x": 144}
"""How many cubes of 4x4x4 chips a slice may have in xpk; their sizes must ascend, except on v4 (same file)."""


class Xpk:
    """Writes a shell script with one `xpk workload create`; xpk makes the JobSet."""

    name = "xpk"
    suffix = ".xpk.sh"
    tool = "xpk"
    environment = False

    def check(self, job: Job) -> None:
        """Refuse other hardware than TPUs, and a job without cluster or image.

        Args:
          job: the job.

        Raises:
          ConfigError: the job is one of them.
        """
        if job.hardware.chip.platform != "tpu":
            raise ConfigError(
                f"--on xpk is for TPUs; start {job.hardware.name} with --on kubernetes, slurm or skypilot"
            )
        if job.image is None:
            raise ConfigError(
                "--on xpk: a workload runs an image; name one that has jaxscale and the config with --image"
            )
        check_shape(job.hardware)
        if "cluster" not in job.options:
            raise ConfigError("--on xpk needs the name of the cluster: --option cluster=NAME")
        if job.volumes or job.minutes is not None:
            raise ConfigError("xpk's workloads have no --volume and no --time; leave them out")

    def text(self, job: Job) -> str:
        """Return the script.

        Args:
          job: the job.
        """
        kind, shape = TYPES[job.hardware.chip.name], job.hardware.shape
        size = "x".join(map(str, shape))
        several = job.hosts.slices * math.prod(shape) > TPU_HOST  # xpk has no hosts of 8 chips
        train = job.command(config=job.config, distributed=several)
        words = [
            *("xpk", "workload", "create"),
            f"--workload={job.name}",
            f"--tpu-type={kind}-{size}",
            f"--num-slices={job.hosts.slices}",
            f"--docker-image={job.image}",
            f"--max-restarts={job.limit}",
            # xpk restarts on 127 to 255 by itself; 1 is a crash, and 2 a mistake, which a restart would repeat.
            f"--restart-on-exit-codes=1,{LOST}",
            *(f"--{name}={value}" for name, value in job.options.items()),
        ]
        command = lines_of([*words, f"--command={' && '.join([*job.setup, shlex.join(train)])}"])
        lines = ["#!/bin/bash", f"# {job.hardware.name}", "set -eu"]
        lines += [f': "${{{name}:?export it first}}"' for name in job.secrets]
        if job.env or job.secrets:  # of a name alone xpk takes the value from the environment
            entries = [*(f"{name}={value}" for name, value in job.env.items()), *job.secrets]
            command += f" \\\n    --env-file=<(printf '%s\\n' {shlex.join(entries)})"
        return "\n".join([*lines, command]) + "\n"

    def submit(self, job: Job, file: Path) -> list[str]:
        """Return the command that runs the script.

        Args:
          job: the job.
          file: the script.
        """
        return ["bash", str(file)]

    def shares(self, job: Job, path: str) -> bool | None:
        """Return False: a pod's disk ends with it.

        Args:
          job: the job.
          path: the folder.
        """
        return False


def check_shape(hardware: Topology) -> None:
    """Check that xpk has a name for the shape of a slice.

    Args:
      hardware: the topology.

    Raises:
      ConfigError: it has none.
    """
    kind, shape = hardware.chip.name, hardware.shape
    if kind not in TYPES:
        raise ConfigError(f"--on xpk has no name for {kind}{near(kind, TYPES)}")
    most = CUBES.get(kind, 0)
    if "x".join(map(str, shape)) in SHAPES[kind]:
        return
    cubes = len(shape) == 3 and all(size % 4 == 0 for size in shape) and math.prod(shape) <= 64 * most
    ascends = kind == "v4" or list(shape) == sorted(shape)
    if cubes and ascends:
        return
    if cubes:
        ascending = "x".join(map(str, sorted(shape))) + f"*{hardware.slices}" * (hardware.slices > 1)
        advice = f"the sizes must ascend: --topology {kind}:{ascending}"
    else:
        larger = f" and multiples of 4x4x4 of up to {64 * most} chips" if most else ""
        advice = f"it has {', '.join(SHAPES[kind])}{larger}; take one of them, or --on kubernetes"
    raise ConfigError(f"--on xpk: xpk has no {hardware.name}; {advice}")
