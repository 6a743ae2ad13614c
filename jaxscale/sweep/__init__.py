"""Sweeps: a space of bindings, runs of it, a table of results."""

from jaxscale.sweep.base import Axis, Handle, Job, Ledger, Record, Runner, Search, Trial

__all__ = ["Axis", "Handle", "Job", "Ledger", "Record", "Runner", "Search", "Trial"]
