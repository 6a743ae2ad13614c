"""How far a prediction of memory is off: what compiled programs took of what was predicted for them, by regime."""

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
    """An interval for what a program takes of what is predicted.

    Args:
      low, high: factors; nine of ten compiled steps lie between them.
      regime: one of `REGIMES`.
      method: one of `METHODS`.
      cases: compiled steps that the factors are from.
      outside: a sentence where a run is unlike any of these, else "".
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
        return (
            f"nine of ten compiled steps took {self.low:.2f} to {self.high:.2f} of the memory predicted "
            f"{'from the traced step' if self.method == 'traced' else 'by formulas'} ({self.cases} "
            f"{REGIMES[self.regime]}, compiled for TPUs)" + (f"; {self.outside}" if self.outside else "")
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


def error_bar(config: TrainConfig, there: Topology, predicted: int, method: str = "formulas") -> ErrorBar:
    """The error bar of a prediction of memory.

    Args:
      config: the run's settings.
      there: the hardware.
      predicted: bytes on a device.
      method: how it was predicted, one of `METHODS`.
    """
    kind = regime(config)
    found = _bars()[method][kind]
    lowest, highest = found["smallest"], found["largest"]
    outside = ""
    if there.chip.platform != "tpu":
        outside = f"none of them for a {there.chip.name}, whose compiler orders and packs otherwise"
    elif not lowest <= predicted <= highest:
        outside = f"all of them between {human_bytes(lowest)} and {human_bytes(highest)}"
    return ErrorBar(found["low"], found["high"], kind, method, found["cases"], outside)


@functools.cache
def _bars() -> dict[str, dict[str, Any]]:
    return json.loads(_FILE.read_text())
