"""Runners, which run the trials of a sweep."""

from jaxscale.sweep.runners.here import Here
from jaxscale.sweep.runners.pool import Pool
from jaxscale.sweep.runners.slurm import Slurm
from jaxscale.sweep.runners.submeshes import SubMeshes
from jaxscale.sweep.runners.vmapped import Vmapped

__all__ = ["Here", "Pool", "Slurm", "SubMeshes", "Vmapped"]
