"""Which models the planner's formulas cover; any other is planned from its compiled step."""

from __future__ import annotations

from typing import Any

from jaxscale.errors import ConfigError
from jaxscale.nn import MixtureOfExperts


def not_covered(model: Any) -> str | None:
    """Which layer of a `TransformerConfig` the formulas do not cover, as a sentence; `None` where they cover all.

    They know one kind of attention and, besides `Transformer.mlp`, one kind of dense feed-forward layer.
    """
    names = " and ".join(dict.fromkeys(type(m).__name__ for m in getattr(model, "other_mixers", ())))
    if names:
        return f"no formula knows the arithmetic and memory of {names}"
    others = dict.fromkeys(b.mlp for b in getattr(model, "blocks", ()) if b.mlp not in (None, model.mlp))
    if len(others) > 1 or any(isinstance(mlp, MixtureOfExperts) for mlp in others):
        return "no formula knows blocks whose feed-forward layers are of several kinds besides Transformer.mlp"
    return None


def check_covered(model: Any) -> None:
    """That the formulas cover a model.

    Raises:
      ConfigError: they do not.
    """
    if (why := not_covered(model)) is not None:
        raise ConfigError(
            f"{why}; `jaxscale plan` reads them off the compiled step, where the hardware can be compiled for"
        )
