"""Where the runs of a sweep go."""

from jaxscale.sweep.runners.here import Here
from jaxscale.sweep.runners.pool import Pool

__all__ = ["Here", "Pool"]
