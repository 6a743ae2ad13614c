"""Time that failures and checkpoints add to a run, by the formulas of Young and of Daly."""

from __future__ import annotations

import dataclasses
import math

from jaxscale.errors import ConfigError

DEVICE_MTBF = 54 * 24 * 16384 / 419
"""Mean time between failures of one device in hours: 419 unexpected interruptions in 54 days on 16,384 H100s (Llama 3,
https://arxiv.org/abs/2407.21783, section 3.3.4). We found no figure for other chips and use it for all."""
WRITE_BANDWIDTH = 2e12 / 16384
"""Bytes/s per device at which checkpoints are written: 2 TB/s for 16,384 H100s (same source, section 3.3.1)."""
RESTART = 600.0
"""Seconds from a failure until the checkpoint is read, the step is compiled and training continues: an assumption."""


@dataclasses.dataclass(frozen=True)
class Restarts:
    """Rate of failures and speed of checkpoints. Defaults are those of Llama 3's run; `restart_time` is an assumption.

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
        """Mean seconds between failures of a run; the failure of any device stops it.

        Args:
          devices: number of devices of the run.
        """
        return self.device_mtbf * 3600 / devices

    def save(self, size: int, devices: int) -> float:
        """Seconds to save a checkpoint; training is assumed to wait for it.

        Args:
          size: bytes of the checkpoint.
          devices: number of devices that write it.
        """
        return size / (WRITE_BANDWIDTH * devices if self.write_bandwidth is None else self.write_bandwidth)


def best_interval(save: float, between: float) -> float:
    """Seconds of training between checkpoints that minimise a run's time.

    Young's (1974) estimate is sqrt(2 d M). Daly's higher-order estimate ("A higher order estimate of the optimum
    checkpoint interval for restart dumps", 2006) corrects it for slow checkpoints:
    sqrt(2 d M) (1 + sqrt(d / 2M) / 3 + d / 18M) - d, and M if d >= 2M.

    Args:
      save: seconds to save a checkpoint (d).
      between: mean seconds between failures (M).
    """
    if save >= 2 * between:
        return between
    ratio = save / (2 * between)
    return math.sqrt(2 * save * between) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - save


def slowdown(every: float, save: float, between: float, restart: float) -> float:
    """Time of a run with failures and checkpoints, as a multiple of its time without them.

    Failures are random and independent, and happen while training, saving and restarting alike. A failure loses all
    work since the last complete checkpoint. The result is M exp(R/M) (exp((t + d)/M) - 1) / t (Daly 2006).

    Args:
      every: seconds of training between checkpoints (t).
      save: seconds to save a checkpoint (d).
      between: mean seconds between failures (M).
      restart: seconds from a failure until training continues (R).

    Raises:
      ConfigError: failures are so frequent that the run hardly ever reaches the next checkpoint.
    """
    if (every + save + restart) / between > 20:
        raise ConfigError(
            f"the run fails every {between:,.0f} s, but a restart takes {restart:,.0f} s, training to a checkpoint "
            f"{every:,.0f} s and saving it {save:,.0f} s: it never reaches the next checkpoint; save more often or "
            "write faster"
        )
    return between * math.exp(restart / between) * math.expm1((every + save) / between) / every
