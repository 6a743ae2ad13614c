"""Sweeps: a space of bindings, runs of it, a table of results."""

from jaxscale.sweep.axes import Choice, Integers, LogIntegers, LogUniform, Uniform, Values
from jaxscale.sweep.base import Axis, Handle, Job, Ledger, Record, Runner, Search, Trial
from jaxscale.sweep.jobs import run_job
from jaxscale.sweep.runners import Here, Pool
from jaxscale.sweep.search import Grid
from jaxscale.sweep.sweep import Prepared, Sweep, sweep_of
from jaxscale.sweep.table import Result

__all__ = [
    "Axis",
    "Choice",
    "Grid",
    "Handle",
    "Here",
    "Integers",
    "Job",
    "Ledger",
    "LogIntegers",
    "LogUniform",
    "Pool",
    "Prepared",
    "Record",
    "Result",
    "Runner",
    "Search",
    "Sweep",
    "Trial",
    "Uniform",
    "Values",
    "run_job",
    "sweep_of",
]
