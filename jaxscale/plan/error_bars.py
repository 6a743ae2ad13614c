"""Error bars of predicted memory and of predicted step times, from comparisons with steps of the same kind."""

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
"""Methods of prediction, and the sentence that gives the error bar of each."""
REGIMES = {
    "usual": "runs with AdamW, one micro-batch, and neither packing, adapters nor stored attention scores",
    "other": "runs with another optimizer, accumulation, packing or stored attention scores",
    "adapters": "runs with adapters",
    "gpus": "runs for GPUs",
}
"""Kinds of runs that differ in the error of predicted memory."""
TIME_REGIMES = {
    "dense": "runs of models without experts, at most 16k tokens long",
    "long": "runs with sequences of 16k tokens and more",
    "experts": "runs of mixtures of experts",
    "small": "runs of models below 3B parameters",
}
"""Kinds of runs that differ in the error of predicted step time."""
LONG = 16384
"""A run whose sequences have at least so many tokens counts as "long"."""
SMALL = 3e9
"""A model with fewer parameters counts as "small"."""


@dataclasses.dataclass(frozen=True)
class ErrorBar:
    """An interval for a measured value, relative to its prediction.

    Args:
      low, high: measured over predicted; nine of ten cases lie between them.
      regime: one of `REGIMES`; for times one of `TIME_REGIMES`.
      method: one of `METHODS`.
      cases: number of compiled steps or published runs that the factors come from.
      outside: how the run differs from all of these cases, in words; "" if it does not.
    """

    low: float
    high: float
    regime: str
    method: str
    cases: int
    outside: str = ""

    def bytes(self, predicted: int) -> tuple[int, int]:
        """Return the ends of the interval for a prediction in bytes."""
        return int(predicted * self.low), int(predicted * self.high)

    def __str__(self) -> str:
        sentence = METHODS[self.method].format(f"{self.low:.2f} to {self.high:.2f}")
        which = TIME_REGIMES[self.regime] if self.method == "time" else REGIMES[self.regime]
        which += ", compiled for TPUs" if self.method != "time" and self.regime != "gpus" else ""
        return f"nine of ten {sentence} ({self.cases} {which})" + (f"; {self.outside}" if self.outside else "")


def regime(config: TrainConfig, hardware: Topology) -> str:
    """Return which of `REGIMES` a run belongs to."""
    if hardware.chip.platform == "gpu":
        return "gpus"
    if config.adapters is not None:
        return "adapters"
    return "other" if unusual(config, hardware) else "usual"


def unusual(config: TrainConfig, hardware: Topology) -> list[str]:
    """Return the parts of a run that formulas of memory are not made for, in a few words each."""
    parts = {
        f"{hardware.chip.name} devices": hardware.chip.platform == "gpu",
        "adapters": config.adapters is not None,
        f"the optimizer {type(config.optimizer).__name__}": type(config.optimizer) is not AdamW,
        f"{config.accumulate} micro-batches": config.accumulate > 1,
        "packed sequences (train.segments)": config.segments,
        "attention that stores its scores": getattr(config.model, "attention", None) is dot_product_attention,
    }
    return [name for name, present in parts.items() if present]


def time_regime(config: TrainConfig) -> str:
    """Return which of `TIME_REGIMES` a run belongs to."""
    if isinstance(getattr(config.model, "mlp", None), MixtureOfExperts):
        return "experts"
    if config.seq_len >= LONG:
        return "long"
    return "small" if parameter_count(config) < SMALL else "dense"


def error_bar(config: TrainConfig, hardware: Topology, predicted: int, method: str = "formulas") -> ErrorBar:
    """Return the error bar of predicted memory.

    Args:
      config: the run's settings.
      hardware: the topology that it is planned for.
      predicted: predicted bytes on a device.
      method: method of the prediction, "formulas" or "traced".
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
    """Return the error bar of a predicted step time, from published times of other programs than jaxscale.

    Args:
      config: the run's settings.
      hardware: the topology that it is planned for.
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
    """Replace the error bars of some methods in the package's file.

    Args:
      bars: by method and regime, the values that `error_bar` reads: "low", "high", "cases", "smallest", "largest",
        "chips".
    """
    _FILE.write_text(json.dumps(_bars() | bars, indent=2) + "\n")
    _bars.cache_clear()


def factors(ratios: list[float], *, greatest: bool = False) -> tuple[float, float]:
    """Return the ends of an error bar: the order statistics number 0.05 (n + 1) and 0.95 (n + 1) of n ratios.

    Where there are too few ratios for these, the smallest and the largest. These are the quantiles of conformal
    prediction (Vovk, Gammerman & Shafer 2005, "Algorithmic Learning in a Random World").

    Args:
      ratios: measured over predicted.
      greatest: whether the upper end is the largest ratio, as for memory, where a step that takes more fails.
    """
    n, ordered = len(ratios), sorted(ratios)
    low = max(0, math.floor(0.05 * (n + 1)) - 1)
    high = n - 1 if greatest else min(n, math.ceil(0.95 * (n + 1))) - 1
    return round(ordered[low], 3), round(ordered[high], 3)
