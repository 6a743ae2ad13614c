"""One block of `Transformer.blocks`, the repeating pattern of a stack of different layers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

from jaxscale.config import register
from jaxscale.nn import Experts, FeedForward, Mixer


@register(name="Block")
@dataclasses.dataclass(frozen=True)
class BlockConfig:
    """The two sub-layers of a block (`Block` in gin).

    For example, three recurrent layers for each attention layer:

        Transformer.blocks = (@recurrent/Block(), @recurrent/Block(), @recurrent/Block(), @Block())
        recurrent/Block.mixer = @MyRecurrence()

    Args:
      mixer: makes the layer that mixes tokens; `None` is `Transformer.attention_layer`.
      mlp: makes the feed-forward layer; `None` is `Transformer.mlp`.
      window: the attention window in tokens; `None` is the whole sequence.
      rotary: rotate queries and keys by the model's rotary positions; `False` is attention without positions (NoPE,
        Kazemnejad et al. 2023).
    """

    mixer: Mixer | None = None
    mlp: Callable[..., FeedForward | Experts] | None = None
    window: int | None = None
    rotary: bool = True


class LayerSpec(NamedTuple):
    """The parts of one layer: the fields of `BlockConfig` with defaults filled in."""

    mixer: Mixer
    mlp: Callable[..., FeedForward | Experts]
    window: int | None
    rotary: bool = True
