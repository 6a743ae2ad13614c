"""Error bars of predicted memory and of predicted times of a step, from other steps of the same kind."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from pathlib import Path
from typing import Any

from jaxscale.hardware import Topology
from jaxscale.nn import MixtureOfExperts, dot_product_attention
from jaxscale.optim import AdamW
from jaxscale.step import TrainConfig
from jaxscale.step.rates import parameter_count
from jaxscale.units import human_bytes

_FILE = Path(__file__).with_name("error_bars.json")
METHODS = {
    "formulas": "compiled steps took {} times the memory predicted by formulas",
    "traced": "compiled steps took {} times the memory predicted from the traced step",
    "time": "published runs took {} times the step time predicted",
}
"""How a quantity was predicted, and what its error bar says."""
REGIMES = {
    "usual": "runs with AdamW, one micro-batch, and neither packing, adapters nor stored attention scores",
    "other": "runs with another optimizer, accumulation, packing or stored attention scores",
    "adapters": "runs with adapters",
    "gpus": "runs for GPUs",
}
"""Kinds of runs, by what predictions of memory are known to be off."""
TIME_REGIMES = {
    "dense": "runs of models without experts, at most 16k tokens long",
    "long": "runs with sequences of 16k tokens and more",
    "experts": "runs of mixtures of experts",
    "small": "runs of models below 3B parameters",
}
"""Kinds of runs, by what predictions of time are known to be off."""
LONG = 16384
"""Tokens of a sequence from which on a run counts as long."""
SMALL = 3e9
"""Parameters below which a model counts as small."""


@dataclasses.dataclass(frozen=True)
class ErrorBar:
    """An interval for what is measured, relative to a prediction.

    Args:
      low, high: measured over predicted; nine of ten cases lie between them.
      regime: one of `REGIMES`, of times one of `TIME_REGIMES`.
      method: one of `METHODS`.
      cases: the number of compiled steps or published runs that the factors come from.
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
        said = METHODS[self.method].format(f"{self.low:.2f} to {self.high:.2f}")
        which = TIME_REGIMES[self.regime] if self.method == "time" else REGIMES[self.regime]
        which += ", compiled for TPUs" if self.method != "time" and self.regime != "gpus" else ""
        return f"nine of ten {said} ({self.cases} {which})" + (f"; {self.outside}" if self.outside else "")


def regime(config: TrainConfig, hardware: Topology) -> str:
    """Which of `REGIMES` a run is of."""
    if hardware.chip.platform == "gpu":
        return "gpus"
    if config.adapters is not None:
        return "adapters"
    return "other" if unusual(config, hardware) else "usual"


def unusual(config: TrainConfig, hardware: Topology) -> list[str]:
    """What a run has that formulas were not made for, in a few words each."""
    parts = {
        f"{hardware.chip.name} devices": hardware.chip.platform == "gpu",
        "adapters": config.adapters is not None,
        f"the optimizer {type(config.optimizer).__name__}": type(config.optimizer) is not AdamW,
        f"{config.accumulate} micro-batches": config.accumulate > 1,
        "packed sequences (train.segments)": config.segments,
        "attention that stores its scores": getattr(config.model, "attention", None) is dot_product_attention,
    }
    return [what for what, has_it in parts.items() if has_it]


def time_regime(config: TrainConfig) -> str:
    """Which of `TIME_REGIMES` a run is of."""
    if isinstance(getattr(config.model, "mlp", None), MixtureOfExperts):
        return "experts"
    if config.seq_len >= LONG:
        return "long"
    return "small" if parameter_count(config) < SMALL else "dense"


def error_bar(config: TrainConfig, hardware: Topology, predicted: int, method: str = "formulas") -> ErrorBar:
    """The error bar of a prediction of memory.

    Args:
      config: the run's settings.
      hardware: what it is planned for.
      predicted: bytes on a device.
      method: how it was predicted, "formulas" or "traced".
    """
    kind = regime(config, hardware)
    bar = _bars()[method][kind]
    smallest, largest = bar["smallest"], bar["largest"]
    outside = ""
    if hardware.chip.name not in bar["chips"]:
        outside = f"no step compiled for a {hardware.chip.name} was compared, and its compiler allocates otherwise"
    elif kind == "gpus" and config.adapters is not None:
        outside = "none of them had adapters"
    elif not smallest <= predicted <= largest:
        outside = f"these were predicted to take between {human_bytes(smallest)} and {human_bytes(largest)}"
    return ErrorBar(bar["low"], bar["high"], kind, method, bar["cases"], outside)


def time_error_bar(config: TrainConfig, hardware: Topology) -> ErrorBar:
    """The error bar of a prediction of a step's time: published over predicted, of other people's programs.

    Args:
      config: the run's settings.
      hardware: what it is planned for.
    """
    kind = time_regime(config)
    bar = _bars()["time"][kind]
    outside = []
    if hardware.chip.name not in bar["chips"]:
        outside.append(f"none of them was on {hardware.chip.name}")
    if type(config.optimizer) is not AdamW or config.adapters is not None:
        outside.append("all of them had AdamW and no adapters")
    count = parameter_count(config)
    if not bar["smallest"] <= count <= bar["largest"]:
        outside.append(f"they had {bar['smallest']:.2g} to {bar['largest']:.2g} parameters, this model has {count:.2g}")
    return ErrorBar(bar["low"], bar["high"], kind, "time", bar["cases"], ", ".join(outside))


@functools.cache
def _bars() -> dict[str, dict[str, Any]]:
    return json.loads(_FILE.read_text())


def write_bars(bars: dict[str, dict[str, Any]]) -> None:
    """Replaces the error bars of some methods in the package's file."""
    _FILE.write_text(json.dumps(_bars() | bars, indent=2) + "\n")
    _bars.cache_clear()


def factors(ratios: list[float], *, greatest: bool = False) -> tuple[float, float]:
    """The ends of an error bar: of n ratios the one at 0.05 and at 0.95 of n + 1, else the least and the greatest.

    Order statistics of conformal prediction (Vovk, Gammerman & Shafer 2005, "Algorithmic Learning in a Random World").

    Args:
      ratios: measured over predicted.
      greatest: the upper end is the greatest, as for memory, where a step that takes more than it does fails.
    """
    n, known = len(ratios), sorted(ratios)
    low = max(0, math.floor(0.05 * (n + 1)) - 1)
    high = n - 1 if greatest else min(n, math.ceil(0.95 * (n + 1))) - 1
    return round(known[low], 3), round(known[high], 3)
