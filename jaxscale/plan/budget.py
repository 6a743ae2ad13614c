"""The budget of a run: its time, energy and cost, with failures and checkpoints."""

from __future__ import annotations

import dataclasses

import jax

from jaxscale.errors import ConfigError
from jaxscale.hardware import Topology
from jaxscale.plan.restarts import Restarts, best_interval, slowdown
from jaxscale.step import TrainConfig, blueprint_of
from jaxscale.units import human_bytes


@dataclasses.dataclass(frozen=True)
class Budget:
    """Time, energy and cost of training on a number of tokens.

    Args:
      tokens: tokens to train on.
      ideal_days: days of wall-clock time without failures and checkpoints.
      days: expected days with failures and checkpoints.
      failures: expected number of failures.
      checkpoint: bytes of a checkpoint.
      save: seconds to save a checkpoint.
      every: seconds of training between checkpoints.
      between: mean seconds between failures.
      restart: seconds from a failure until training continues.
      device_hours: hours of all devices of the hardware for `days`, including idle ones.
      kilowatt_hours: energy at the devices' full power, without hosts, network and cooling; `None` if unknown.
      cost: device-hours times their price; `None` without a price.
    """

    tokens: float
    ideal_days: float
    days: float
    failures: float
    checkpoint: int
    save: float
    every: float
    between: float
    restart: float
    device_hours: float
    kilowatt_hours: float | None
    cost: float | None


def budget_of(
    config: TrainConfig,
    hardware: Topology,
    devices: int,
    rate: float,
    tokens: float,
    price: float | None = None,
    watts: float | None = None,
    restarts: Restarts | None = None,
) -> Budget:
    """Return the budget of training on a number of tokens.

    Args:
      config: the run's settings.
      hardware: the hardware.
      devices: how many of its devices the run uses.
      rate: tokens per second without failures and checkpoints.
      tokens: tokens to train on.
      price: of a device-hour.
      watts: of a device; by default the chip's.
      restarts: how often devices fail, and how fast checkpoints are written.

    Raises:
      ConfigError: checkpoints take longer than the time between them, or the run fails too often to get from one to the
        next.
    """
    restarts = restarts or Restarts()
    size, between = checkpoint_bytes(config), restarts.between(devices)
    save = restarts.save(size, devices)
    every = best_interval(save, between) if restarts.save_every is None else restarts.save_every
    if restarts.save_every is not None and every < save:
        raise ConfigError(
            f"save_every = {every:g} s is less than the {save:g} s that a checkpoint of {human_bytes(size)} takes; "
            "save more rarely, or write faster (--write-speed)"
        )
    ideal = tokens / rate
    seconds = ideal * slowdown(every, save, between, restarts.restart_time)
    hours = seconds / 3600 * hardware.devices  # devices that the mesh leaves idle are paid for as well
    power = hardware.chip.watts if watts is None else watts
    return Budget(
        tokens,
        ideal / 86400,
        seconds / 86400,
        seconds / between,
        size,
        save,
        every,
        between,
        restarts.restart_time,
        hours,
        None if power is None else hours * power / 1000,
        None if price is None else hours * price,
    )


def checkpoint_bytes(config: TrainConfig) -> int:
    """Return the bytes of a checkpoint: trained parameters and optimizer state, each tensor once."""
    assert config.layout is not None
    blueprint, _ = blueprint_of(dataclasses.replace(config, layout=config.layout.abstract()))
    return sum(info.nbytes for info in jax.tree.leaves(blueprint.algorithm.infos(blueprint)))
