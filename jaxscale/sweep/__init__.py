"""Sweeps: many runs that differ in some bindings, and a table of their results."""

from jaxscale.sweep.axes import Choice, Integers, LogIntegers, LogUniform, Uniform, Values
from jaxscale.sweep.base import Axis, Handle, Job, Ledger, Record, Runner, Search, Trial
from jaxscale.sweep.jobs import run_job
from jaxscale.sweep.runners import Here, Pool, Slurm, SubMeshes, Vmapped
from jaxscale.sweep.search import (
    ASHA,
    BOHB,
    KDE,
    Extrapolated,
    Grid,
    Hyperband,
    OptunaSearch,
    QuasiRandom,
    Random,
    SuccessiveHalving,
)
from jaxscale.sweep.storage import Storage
from jaxscale.sweep.sweep import Prepared, Sweep, sweep_of
from jaxscale.sweep.table import Result

__all__ = [
    "ASHA",
    "BOHB",
    "KDE",
    "Axis",
    "Choice",
    "Extrapolated",
    "Grid",
    "Handle",
    "Here",
    "Hyperband",
    "Integers",
    "Job",
    "Ledger",
    "LogIntegers",
    "LogUniform",
    "OptunaSearch",
    "Pool",
    "Prepared",
    "QuasiRandom",
    "Random",
    "Record",
    "Result",
    "Runner",
    "Search",
    "Slurm",
    "Storage",
    "SubMeshes",
    "SuccessiveHalving",
    "Sweep",
    "Trial",
    "Uniform",
    "Values",
    "Vmapped",
    "run_job",
    "sweep_of",
]
