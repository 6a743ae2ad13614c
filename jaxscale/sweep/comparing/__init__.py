"""Comparing runs from their folders: tables, pages, pictures."""

from jaxscale.sweep.comparing.folders import Ran, read_run, read_runs
from jaxscale.sweep.comparing.table import curves, runs

__all__ = ["Ran", "curves", "read_run", "read_runs", "runs"]
