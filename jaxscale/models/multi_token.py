"""Modules of multi-token prediction: each predicts one token further ahead than the one before."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxscale.layout import constrain
from jaxscale.nn import Block, Context, Linear, MemoryPolicy, Run, Stats

if TYPE_CHECKING:
    from jaxscale.models.transformer_config import TransformerConfig


class MultiToken(nnx.Module):
    """The module of one depth k of multi-token prediction (DeepSeek-V3, arXiv:2412.19437, section 2.2).

    At position i it reads the hidden state of depth k - 1 and the embedding of token i + k, and gives the hidden state
    from which the model's output head predicts token i + k + 1: `norm(block(hidden norm(h) U + token norm(e) W))`.
    Depth 0 is the model itself. The embedding and the output head are the model's.

    Args:
      config: the model's settings; the block is like the model's last layer.
      make_group: makes that block from random streams.
      first: number of layers before the block, since each layer has its own random key.
      rngs: random streams of the initial values.
    """

    def __init__(
        self,
        config: TransformerConfig,
        make_group: Callable[[nnx.Rngs], Sequence[Block]],
        *,
        first: int,
        rngs: nnx.Rngs,
    ):
        width = config.sizes.width
        types: dict[str, Any] = dict(dtype=jnp.dtype(config.dtype), param_dtype=jnp.dtype(config.param_dtype))
        self.token_norm = config.norm(width, eps=config.norm_eps, **types)
        self.hidden_norm = config.norm(width, eps=config.norm_eps, **types)
        # one product of both, of fan-in 2 * width, in two parts
        options: dict[str, Any] = dict(scale=0.5**0.5, rngs=rngs, **types)
        self.from_token = Linear({"embed": width}, {"mlp": width}, **options)
        self.from_hidden = Linear({"embed": width}, {"mlp": width}, **options)
        memory = MemoryPolicy.of(config.memory)
        self.run = Run(make_group, 1, first=first, memory=memory, scan=config.scan, rngs=rngs)
        self.norm = config.norm(width, eps=config.norm_eps, **types)

    def __call__(
        self, hidden: Float[Array, "b s e"], embedded: Float[Array, "b s e"], context: Context
    ) -> tuple[Float[Array, "b s e"], Stats]:
        """Return the normalised hidden states of this depth, and the statistics of the block.

        Args:
          hidden: the normalised hidden states of the depth before.
          embedded: the embedding of token i + k at position i.
          context: the inputs that layers share.
        """
        with jax.named_scope("join"):
            token, before = (
                constrain(norm(x), "batch", "seq", "embed")
                for norm, x in ((self.token_norm, embedded), (self.hidden_norm, hidden))
            )
            x = constrain(self.from_token(token) + self.from_hidden(before), "batch", "residual_seq", "embed")
        x, stats = self.run(x, context)
        return constrain(self.norm(x), "batch", "seq", "embed"), stats
