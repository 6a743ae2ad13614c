"""Error bars of predicted memory: compiled over predicted bytes of a set of steps, by kind of run."""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

from jaxscale.hardware import Topology
from jaxscale.nn import dot_product_attention
from jaxscale.optim import AdamW
from jaxscale.step import TrainConfig
from jaxscale.units import human_bytes

_FILE = Path(__file__).with_name("error_bars.json")
METHODS = ("formulas", "traced")
REGIMES = {
    "usual": "runs with AdamW, one micro-batch, and neither packing, adapters nor stored attention scores",
    "other": "runs with another optimizer, accumulation, packing or stored attention scores",
    "adapters": "runs with adapters",
}
"""Kinds of runs, by what predictions are known to be off."""


@dataclasses.dataclass(frozen=True)
class ErrorBar:
    """An interval for the memory of a compiled step, relative to a prediction.

    Args:
      low, high: compiled over predicted bytes; nine of ten compiled steps lie between them.
      regime: one of `REGIMES`.
      method: one of `METHODS`.
      cases: the number of compiled steps that the factors come from.
      outside: a sentence if the run is unlike all of these, else "".
    """

    low: float
    high: float
    regime: str
    method: str
    cases: int
    outside: str = ""

    def bytes(self, predicted: int) -> tuple[int, int]:
        """The interval for a prediction in bytes."""
        return int(predicted * self.low), int(predicted * self.high)

    def __str__(self) -> str:
        method = "from the traced step" if self.method == "traced" else "by formulas"
        return (
            f"nine of ten compiled steps took {self.low:.2f} to {self.high:.2f} times the memory predicted {method} "
            f"({self.cases} {REGIMES[self.regime]}, compiled for TPUs)" + (f"; {self.outside}" if self.outside else "")
        )


def regime(config: TrainConfig) -> str:
    """Which of `REGIMES` a run is of."""
    if config.adapters is not None:
        return "adapters"
    usual = (
        type(config.optimizer) is AdamW
        and config.accumulate == 1
        and not config.segments
        and getattr(config.model, "attention", None) is not dot_product_attention
    )
    return "usual" if usual else "other"


def error_bar(config: TrainConfig, hardware: Topology, predicted: int, method: str = "formulas") -> ErrorBar:
    """The error bar of a prediction of memory.

    Args:
      config: the run's settings.
      hardware: what it is planned for.
      predicted: bytes on a device.
      method: how it was predicted, one of `METHODS`.
    """
    kind = regime(config)
    bar = _bars()[method][kind]
    smallest, largest = bar["smallest"], bar["largest"]
    outside = ""
    if hardware.chip.platform != "tpu":
        outside = f"no step compiled for a {hardware.chip.name} was compared, and its compiler allocates otherwise"
    elif not smallest <= predicted <= largest:
        outside = f"these were predicted to take between {human_bytes(smallest)} and {human_bytes(largest)}"
    return ErrorBar(bar["low"], bar["high"], kind, method, bar["cases"], outside)


@functools.cache
def _bars() -> dict[str, dict[str, Any]]:
    return json.loads(_FILE.read_text())
