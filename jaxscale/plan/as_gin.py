"""Settings as a gin file that `jaxscale train` takes as it is."""

from __future__ import annotations

from jaxscale import config as gin_config
from jaxscale.errors import ConfigError
from jaxscale.step import TrainConfig


def as_gin(config: TrainConfig, about: str = "") -> str:
    """The text of a gin file that makes these settings.

    Args:
      config: a run's settings.
      about: what to say of them, a comment at the top.

    Raises:
      ConfigError: a part of them that came from Python and has no name in gin.
    """
    text = gin_config.dumps("train", config.values())
    if lost := gin_config.lost(text):
        raise ConfigError(
            f"{', '.join(lost)} cannot be written as gin, since it came from Python; register it with "
            "jaxscale.config.register"
        )
    return "".join(f"# {line}\n" for line in about.splitlines()) + text
