"""Checks that a chip multiplies numbers of the types of `Transformer.products`."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from jaxscale.errors import ConfigError
from jaxscale.hardware import chip_of

log = logging.getLogger("jaxscale")

_VALUES = {"int8": "@Int8()", "float8": "@Fp8()"}


def check_number_types(types: Sequence[str], device_kind: str) -> None:
    """Check that a chip multiplies numbers of these types; warn if it does so no faster than bfloat16.

    Args:
      types: names of types, as of `jaxscale.hardware.Chip.flops`.
      device_kind: JAX's name of the chip; one without a data sheet, such as a CPU, passes.

    Raises:
      ConfigError: the chip has no products of a type, and would widen its operands.
    """
    chip = chip_of(device_kind)
    for name in types if chip is not None and chip.platform != "cpu" else ():
        assert chip is not None
        usual = chip.flops["bfloat16"]
        faster = [v for t, v in _VALUES.items() if chip.flops.get(t, 0) > usual]
        instead = f"use Transformer.products = {' or '.join([*faster, 'None'])}"
        if name not in chip.flops:
            raise ConfigError(
                f"Transformer.products multiplies numbers of type {name}, which {chip.name} would widen; {instead}"
            )
        if chip.flops[name] <= usual:
            log.warning(
                "Transformer.products: %s multiplies %s no faster than bfloat16, so that only bytes are saved; for "
                "speed %s",
                chip.name,
                name,
                instead,
            )
