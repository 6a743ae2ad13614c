"""Launchers: files with which clusters start and restart a run."""

from jaxscale.clusters.base import SCHEMES, Job, Launcher
from jaxscale.clusters.hosts import Hosts, hosts_of
from jaxscale.clusters.kubernetes import Kubernetes
from jaxscale.clusters.skypilot import SkyPilot
from jaxscale.clusters.slurm import Slurm
from jaxscale.clusters.xpk import Xpk

SYSTEMS: dict[str, Launcher] = {launcher.name: launcher for launcher in (Slurm(), Kubernetes(), Xpk(), SkyPilot())}
"""Launchers by the value of `--on`."""

__all__ = ["SCHEMES", "SYSTEMS", "Hosts", "Job", "Kubernetes", "Launcher", "SkyPilot", "Slurm", "Xpk", "hosts_of"]
