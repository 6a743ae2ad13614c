"""What a `Transformer` takes as a block's mixer: it makes the layer that mixes tokens (attention, a recurrence)."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar, Protocol

from flax import nnx

MADE_WITH = (
    "kernel", "rotary", "window", "softcap", "scale", "qk_norm", "bias", "out_bias", "out_scale", "norm_eps", "overlap",
    "rngs", "dtype", "param_dtype",
)  # fmt: skip
"""The keywords that every mixer is called with."""


class Mixer(Protocol):
    """Makes a layer `layer(x, context)` that mixes a text's tokens; `jaxscale.nn.Context` is what a pass shares.

    A layer keeps documents of one row apart (`Context.segment_ids`, 0 is padding). One that is to generate says what
    it keeps of a text in an attribute `decode_state`: a `KeyValues` or a `RecurrentState`.

    Attributes:
      widens: its sizes follow the model's width, so that µP and `TransformerConfig.at_width` know them.
      windowed: it takes a window.
      any_order: it takes a row's tokens in the order of `Context.order`, as attention and `recurrence` do; else it
        needs them in their natural one.
      in_formulas: the planner's formulas know its arithmetic and memory; else a run is planned by compiling.
    """

    widens: ClassVar[bool] = False
    windowed: ClassVar[bool] = False
    any_order: ClassVar[bool] = False
    in_formulas: ClassVar[bool] = False

    def check(self, config: Any) -> None:
        """Raises `ConfigError` for fields of a `TransformerConfig` that do not go with it."""

    @abstractmethod
    def products(self, config: Any, batch: int, seq: int, window: int | None) -> dict[str, int]:
        """Matrix-multiplication FLOPs of one layer's forward pass, by a name for each product.

        Args:
          config: the `TransformerConfig`.
          batch, seq: rows, and tokens of each.
          window: the block's.
        """
        ...

    @abstractmethod
    def __call__(self, width: int, heads: int, kv_heads: int, head_dim: int, **options: Any) -> nnx.Module:
        """The layer; `options` are those of `MADE_WITH`, of which it takes what it has a use for."""
        ...
