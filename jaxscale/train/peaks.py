"""The peak rate of the device at hand, for the share of peak that a step reaches."""

from __future__ import annotations

import jax

from jaxscale.hardware import chip_of


def peak_flops(device: jax.Device) -> float | None:
    """The device's datasheet bf16 FLOP/s, or `None` where it is not known (a CPU)."""
    chip = chip_of(device.device_kind)
    return None if chip is None else chip.flops["bfloat16"]
