"""Peak rates of known accelerators, for the share of peak that a step reaches."""

from __future__ import annotations

import jax

# bf16 dense FLOP/s of one JAX device, from the vendors' datasheets (a v5p or v4 chip is one device, a tpu7x chip two)
_PEAKS = {
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5e": 197e12,
    "TPU v5": 459e12,
    "TPU v5p": 459e12,
    "TPU v6 lite": 918e12,
    "TPU v6e": 918e12,
    "TPU7x": 1153.5e12,
    "NVIDIA A100": 312e12,
    "NVIDIA H100": 989e12,
    "NVIDIA H200": 989e12,
    "NVIDIA B200": 2250e12,
}


def peak_flops(device: jax.Device) -> float | None:
    """The device's datasheet bf16 FLOP/s, or `None` where it is not known (a CPU)."""
    kind = device.device_kind
    names = [name for name in _PEAKS if kind.startswith(name)]
    return _PEAKS[max(names, key=len)] if names else None
