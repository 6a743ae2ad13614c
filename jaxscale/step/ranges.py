"""Checks that settings are numbers in a range."""

from __future__ import annotations

import math

from jaxscale.errors import ConfigError


def is_number(x: object) -> bool:
    """Return whether `x` is a finite number, and no bool.

    Args:
      x: the value of a setting.
    """
    return isinstance(x, int | float) and not isinstance(x, bool) and math.isfinite(x)


def check_number(part: object, name: str, *, above: float | None = None, least: float | None = None) -> None:
    """Check a field that is a finite number.

    Args:
      part: a dataclass.
      name: the field.
      above: the number must be larger than this.
      least: the number must be at least this.

    Raises:
      ConfigError: it is not.
    """
    value = getattr(part, name)
    if not is_number(value) or (above is not None and value <= above) or (least is not None and value < least):
        bound = f"above {above:g}" if above is not None else f"at least {least:g}"
        raise ConfigError(f"{type(part).__name__}.{name} = {value!r}: must be {bound} and finite")
