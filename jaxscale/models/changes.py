"""Changes of a preset's fields."""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxscale.errors import ConfigError, near
from jaxscale.models.transformer_config import TransformerConfig


def changed(config: TransformerConfig, preset: str, changes: dict[str, Any]) -> TransformerConfig:
    """Return a preset with some fields changed.

    Args:
      config: the preset.
      preset: its name.
      changes: new values by field.

    Raises:
      ConfigError: there is no such field.
    """
    fields = {f.name for f in dataclasses.fields(config)}
    for name in changes:
        if name not in fields:
            raise ConfigError(f"{preset} has no field '{name}'{near(name, fields)}")
    return dataclasses.replace(config, **changes)
