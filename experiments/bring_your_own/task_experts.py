"""A Vision Transformer whose feed-forward layers have experts, of which each task has its own few (M3ViT)."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from experiments.bring_your_own.vit import SMALL, Block, ViT, ViTModule
from jaxscale.config import register
from jaxscale.layout import constrain, named

EXPERTS = nnx.initializers.lecun_normal(batch_axis=0)


class TaskExperts(nnx.Module):
    """Experts of which a task's gate chooses `top_k` for all of its tokens; a program multiplies by these alone.

    In M3ViT (Liang et al. 2022, arXiv:2210.14793) a task's gate reads each token, too.
    """

    def __init__(self, config: M3ViT, *, rngs: nnx.Rngs):
        c, hidden = config, 4 * config.width // config.top_k
        self.task, self.top_k = c.task, c.top_k
        self.gate = nnx.Param(named(SMALL, None, None)(rngs.params(), (c.tasks, c.experts)))
        up, down = named(EXPERTS, "experts", "embed", "mlp"), named(EXPERTS, "experts", "mlp", "embed")
        self.up = nnx.Param(up(rngs.params(), (c.experts, c.width, hidden)))
        self.down = nnx.Param(down(rngs.params(), (c.experts, hidden, c.width)))

    def __call__(self, x: jax.Array) -> jax.Array:
        """Return what the task's experts add, (B, patches, E)."""
        score, ids = jax.lax.top_k(self.gate[...][self.task], self.top_k)
        hidden = jax.nn.gelu(jnp.einsum("bpe,keh->kbph", x, self.up[...][ids]))
        outputs = jnp.einsum("kbph,khe->kbpe", hidden, self.down[...][ids])
        return jnp.einsum("kbpe,k->bpe", outputs, self.top_k * jax.nn.softmax(score))


class TaskBlock(Block):
    """A block whose feed-forward layer is `TaskExperts`."""

    def __init__(self, config: M3ViT, *, rngs: nnx.Rngs):
        super().__init__(config.width, config.heads, axes=True, rngs=rngs)
        del self.up, self.down
        self.experts = TaskExperts(config, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Return the residual stream after the block, (B, patches, E)."""
        q, k, v = (one(self.norms[0](x)) for one in self.qkv)
        x = x + self.out(jax.nn.dot_product_attention(q, k, v))
        return constrain(x + self.experts(self.norms[1](x)), "batch", None, "embed")


@register
@dataclasses.dataclass(frozen=True)
class M3ViT(ViT):
    """Config of the model for one of its tasks; all tasks have the same parameters.

    Args:
      width: see `ViT`.
      heads: see `ViT`.
      depth: see `ViT`.
      patch: see `ViT`.
      axes: must be `True`.
      experts: experts of each layer.
      top_k: experts of a task, which together are as wide as a layer of `ViT`.
      tasks: how many tasks there are.
      task: the one that this program is for.
    """

    experts: int = 8
    top_k: int = 2
    tasks: int = 2
    task: int = 0

    def make(self, rngs: nnx.Rngs) -> ViTModule:
        """Return the module."""
        model = ViTModule(dataclasses.replace(self, depth=0), rngs=rngs)
        model.blocks = nnx.List([TaskBlock(self, rngs=rngs) for _ in range(self.depth)])
        return model
