"""One block of `Transformer.blocks`, the repeating pattern of a stack of unlike layers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

from jaxscale.config import register
from jaxscale.nn import Experts, FeedForward, Mixer


@register(name="Block")
@dataclasses.dataclass(frozen=True)
class BlockConfig:
    """A block's two sub-layers (`Block` in gin); three recurrent layers to one of attention are

        Transformer.blocks = (@recurrent/Block(), @recurrent/Block(), @recurrent/Block(), @Block())
        recurrent/Block.mixer = @MyRecurrence()

    Args:
      mixer: makes the layer that mixes tokens; `None` is `Transformer.attention_layer`.
      mlp: makes the feed-forward layer; `None` is `Transformer.mlp`.
      window: of attention, in tokens; `None` is the whole text.
    """

    mixer: Mixer | None = None
    mlp: Callable[..., FeedForward | Experts] | None = None
    window: int | None = None


class LayerSpec(NamedTuple):
    """What one layer is made of, nothing left open; fields as those of `BlockConfig`."""

    mixer: Mixer
    mlp: Callable[..., FeedForward | Experts]
    window: int | None
