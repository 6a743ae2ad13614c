"""Comparing runs by their folders: pandas tables, HTML reports, pictures."""

from jaxscale.sweep.comparing.folders import Ran, read_run, read_runs
from jaxscale.sweep.comparing.table import curves, runs

__all__ = ["Ran", "curves", "read_run", "read_runs", "runs"]
