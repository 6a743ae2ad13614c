"""Write a run's settings as a gin file that `jaxscale train` reads."""

from __future__ import annotations

from jaxscale import config as gin_config
from jaxscale.errors import ConfigError
from jaxscale.step import TrainConfig


def as_gin(config: TrainConfig, about: str = "") -> str:
    """Return the text of a gin file that reproduces a run's settings.

    Args:
      config: a run's settings.
      about: a comment for the top of the file; may have several lines.

    Raises:
      ConfigError: a value of the settings was passed from Python and has no name in gin.
    """
    text = gin_config.dumps("train", config.values())
    if lost := gin_config.lost(text):
        raise ConfigError(
            f"{', '.join(lost)} cannot be written as gin, since it came from Python; register it with "
            "jaxscale.config.register"
        )
    return "".join(f"# {line}\n" for line in about.splitlines()) + text
