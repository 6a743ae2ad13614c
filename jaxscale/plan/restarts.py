"""Time that failures and checkpoints add to a run, by the formulas of Young and of Daly."""

from __future__ import annotations

import dataclasses
import math

from jaxscale.errors import ConfigError

DEVICE_MTBF = 54 * 24 * 16384 / 419
"""Mean time between failures of one device in hours: 419 unexpected interruptions in 54 days on 16,384 H100s (Llama 3,
https://arxiv.org/abs/2407.21783, section 3.3.4). We know of no figure for other chips, and use it for all."""
WRITE_BANDWIDTH = 2e12 / 16384
"""Bytes/s per device at which checkpoints are written: 2 TB/s for 16,384 H100s (same source, section 3.3.1)."""
RESTART = 600.0
"""Seconds from a failure until training continues, checkpoint read and step compiled: an assumption."""


@dataclasses.dataclass(frozen=True)
class Restarts:
    """How often a run fails, and how it saves. Defaults are those of Llama 3's run; `restart_time` is an assumption.

    Args:
      device_mtbf: mean time between failures of one device, in hours; of n devices it is one n-th.
      write_bandwidth: bytes/s at which all devices together write a checkpoint; by default `WRITE_BANDWIDTH` each.
      save_every: seconds of training between checkpoints; by default `best_interval`.
      restart_time: seconds from a failure until training continues from the last checkpoint.

    Raises:
      ConfigError: a value is not above 0.
    """

    device_mtbf: float = DEVICE_MTBF
    write_bandwidth: float | None = None
    save_every: float | None = None
    restart_time: float = RESTART

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is not None and not (value > 0 and math.isfinite(value)):
                raise ConfigError(f"Restarts.{field.name} = {value:g}: must be above 0, and finite")

    def between(self, devices: int) -> float:
        """Seconds between failures of a run: the failure of any device stops all."""
        return self.device_mtbf * 3600 / devices

    def save(self, size: int, devices: int) -> float:
        """Seconds that a checkpoint of `size` bytes takes; training is assumed to wait for it."""
        return size / (WRITE_BANDWIDTH * devices if self.write_bandwidth is None else self.write_bandwidth)


def best_interval(save: float, between: float) -> float:
    """Seconds of training between checkpoints at which a run takes least.

    sqrt(2 d M) is Young's (1974); Daly's higher-order estimate ("A higher order estimate of the optimum checkpoint
    interval for restart dumps", 2006) corrects it where saving is not short beside the time between failures:
    sqrt(2 d M) (1 + sqrt(d / 2M) / 3 + d / 18M) - d, and M from d = 2M on.

    Args:
      save: seconds that a checkpoint takes (d).
      between: seconds between failures (M).
    """
    if save >= 2 * between:
        return between
    ratio = save / (2 * between)
    return math.sqrt(2 * save * between) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - save


def slowdown(every: float, save: float, between: float, restart: float) -> float:
    """Time that a run takes with failures and checkpoints, as a multiple of its time without.

    Failures come at random, independently of one another, while training, saving and restarting alike; one loses all
    since the last whole checkpoint. Then (Daly 2006) it is M exp(R/M) (exp((t + d)/M) - 1) / t.

    Args:
      every: seconds of training between checkpoints (t).
      save: seconds that a checkpoint takes (d).
      between: seconds between failures (M).
      restart: seconds from a failure until training continues (R).

    Raises:
      ConfigError: so many failures that a run hardly gets from one checkpoint to the next.
    """
    if (every + save + restart) / between > 20:
        raise ConfigError(
            f"the run fails every {between:,.0f} s, and trains {every:,.0f} s to a checkpoint that takes {save:,.0f} "
            f"s, after restarts of {restart:,.0f} s: it never reaches the next checkpoint; save more often or write "
            "faster"
        )
    return between * math.exp(restart / between) * math.expm1((every + save) / between) / every
