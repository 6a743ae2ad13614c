"""Scaling laws: predict large runs from a table of small ones, with intervals and with errors on held-out runs.

    table = read_table("runs/scaling")
    fit = Chinchilla().fit(table)
    fit.predict(parameters=1e9, tokens=2e10); optimum(fit, 1e21)

A law reads a table, from a sweep or elsewhere. To add a law, write its file and list it in `LAWS`.
"""

from jaxscale.plan.laws.base import Fit, HeldOut, Interval, Law, held_out
from jaxscale.plan.laws.base import load_fit as _load_fit
from jaxscale.plan.laws.chinchilla import Chinchilla
from jaxscale.plan.laws.cost import Cost, cost_of
from jaxscale.plan.laws.farseer import Farseer
from jaxscale.plan.laws.front import Optimum, optimum
from jaxscale.plan.laws.isoflop import IsoFLOP
from jaxscale.plan.laws.ood import OutOfDistribution
from jaxscale.plan.laws.steplaw import StepLaw
from jaxscale.plan.laws.table import BODY, Table, parameters_without_embeddings, read_rows, read_table, write_rows

LAWS: dict[str, type[Law]] = {law.name: law for law in (Chinchilla, IsoFLOP, Farseer, StepLaw, OutOfDistribution)}
"""Every law by name."""


def load_fit(path: str) -> Fit:
    """Return a fit from a file that `Fit.write` wrote.

    Args:
      path: the file.

    Raises:
      ConfigError: it cannot be read, or is no fit of one of `LAWS`.
    """
    return _load_fit(path, LAWS)


__all__ = [
    "BODY",
    "LAWS",
    "Chinchilla",
    "Cost",
    "Farseer",
    "Fit",
    "HeldOut",
    "Interval",
    "IsoFLOP",
    "Law",
    "Optimum",
    "OutOfDistribution",
    "StepLaw",
    "Table",
    "cost_of",
    "held_out",
    "load_fit",
    "optimum",
    "parameters_without_embeddings",
    "read_rows",
    "read_table",
    "write_rows",
]
