"""`Mixer`: makes the layer of a block that mixes tokens (attention, a recurrence)."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar, Protocol

import numpy as np
from flax import nnx

from jaxscale import errors
from jaxscale.errors import ConfigError
from jaxscale.layout import Layout

MADE_WITH = (
    "kernel", "rotary", "window", "softcap", "scale", "qk_norm", "bias", "out_bias", "out_scale", "norm_eps", "overlap",
    "rngs", "dtype", "param_dtype",
)  # fmt: skip
"""The keyword arguments that every mixer is called with; one that `drops` also with `dropout`, where it is not 0."""


class Mixer(Protocol):
    """Makes a layer `layer(x, context)` that mixes the tokens of a sequence; `context` is a `jaxscale.nn.Context`.

    The layer must not mix documents of one row (`Context.segment_ids`, 0 is padding). To generate, it needs an
    attribute `decode_state` for what it stores of a sequence: a `KeyValues` or a `RecurrentState`. With an attribute
    `reports` it returns its output and statistics, which training logs, "loss" among them (see `jaxscale.nn.stats`).

    Attributes:
      widens: its sizes are proportional to the model's width, as µP and `TransformerConfig.at_width` need.
      windowed: it supports a window.
      any_order: it supports columns in the order of `Context.order`, as attention and `recurrence` do; else it needs
        them in their natural order.
      softmax: it weights values by a softmax, as attention does.
      drops: its softmax's weights can be dropped: it is called with `dropout` if the model sets it.
      gives: what its layer hands to later layers of the pattern by `Context.share`: "memory", "keys", or nothing.
      in_formulas: the planner has formulas for its FLOPs and memory; else a run is planned by compiling.
    """

    widens: ClassVar[bool] = False
    windowed: ClassVar[bool] = False
    any_order: ClassVar[bool] = False
    softmax: ClassVar[bool] = False
    drops: ClassVar[bool] = False
    gives: ClassVar[tuple[str, ...]] = ()
    in_formulas: ClassVar[bool] = False

    def check(self, config: Any) -> None:
        """Check the model's config.

        Args:
          config: the `TransformerConfig`.

        Raises:
          ConfigError: a field that the mixer does not support.
        """

    def check_layout(self, config: Any, layout: Layout) -> None:
        """Check the layout, before any tensor is sharded.

        Args:
          config: the `TransformerConfig`.
          layout: the layout in force.

        Raises:
          LayoutError: a size of the mixer that the layout does not divide; others are named by their tensors.
        """
        return

    def check_documents(self, segment_ids: np.ndarray) -> None:
        """Check the documents of packed rows, in host memory.

        Args:
          segment_ids: the document of each token from 1, 0 for padding, (B, S).

        Raises:
          DataError: a row whose documents the mixer does not support.
        """
        return

    @abstractmethod
    def products(self, config: Any, batch: int, seq: int, window: int | None) -> dict[str, int]:
        """Return the FLOPs of the matrix products in a layer's forward pass, by the product's name.

        Args:
          config: the `TransformerConfig`.
          batch: number of rows.
          seq: tokens per row.
          window: the block's window, or `None`.
        """
        ...

    @abstractmethod
    def __call__(self, width: int, heads: int, kv_heads: int, head_dim: int, **options: Any) -> nnx.Module:
        """Make the layer; `options` are those of `MADE_WITH`, of which a mixer may ignore some."""
        ...


def chosen(options: dict[str, Any], *names: str) -> dict[str, Any]:
    """Return the options of `MADE_WITH` that every layer takes (its dtypes, scale and random streams), and some more.

    Args:
      options: those that a mixer is called with.
      *names: of the others that its layer takes.
    """
    return {name: options[name] for name in (*names, "out_scale", "dtype", "param_dtype", "rngs")}


def check_whole(part: object, *names: str, optional: tuple[str, ...] = ()) -> None:
    """Check that fields of a config are whole numbers of at least 1.

    Args:
      part: the config.
      *names: its fields.
      optional: its fields that may be `None`.

    Raises:
      ConfigError: one is not.
    """
    for name in (*names, *optional):
        errors.check_whole(f"{type(part).__name__}.{name}", getattr(part, name), optional=name in optional)


def check_causal(mixer: Mixer, config: Any) -> None:
    """Check that a causal mixer is in a causal model.

    Args:
      mixer: the mixer.
      config: the `TransformerConfig`.

    Raises:
      ConfigError: it is not.
    """
    if not config.causal:
        raise ConfigError(
            f"{type(mixer).__name__} is causal, and Transformer.attention is not; use another Transformer.attention, "
            "or BlockLinear(block=None) in its place"
        )
