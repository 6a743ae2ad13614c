"""A Vision Transformer (Dosovitskiy et al. 2021) in Flax NNX, with and without axis names, and a model in Linen.

The models use nothing of jaxscale except `named` and `constrain`.
"""

from __future__ import annotations

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx import bridge

from experiments.bring_your_own.digits import CLASSES
from jaxscale.config import register
from jaxscale.layout import constrain, named

DENSE = nnx.initializers.lecun_normal()
ZEROS = nnx.initializers.zeros_init()
SMALL = nnx.initializers.normal(0.02)


def patches(images: jax.Array, size: int) -> jax.Array:
    """(B, H, W) -> (B, patches, size * size)."""
    b, h, w = images.shape
    cut = images.reshape(b, h // size, size, w // size, size)
    return jnp.swapaxes(cut, 2, 3).reshape(b, -1, size * size)


class Block(nnx.Module):
    """Attention and feed-forward, each with a norm before it; with `axes` parameters have axis names."""

    def __init__(self, width: int, heads: int, *, axes: bool, rngs: nnx.Rngs):
        with_axes = named if axes else lambda init, *_: init
        size = width // heads
        self.norms = nnx.List([
            nnx.LayerNorm(width, rngs=rngs, scale_init=with_axes(nnx.initializers.ones_init(), "norm"),
                          bias_init=with_axes(ZEROS, "norm"))
            for _ in range(2)
        ])  # fmt: skip
        self.qkv = nnx.List([
            nnx.LinearGeneral(width, (heads, size), use_bias=False, rngs=rngs,
                              kernel_init=with_axes(DENSE, "embed", "heads", "head_dim"))
            for _ in range(3)
        ])  # fmt: skip
        self.out = nnx.LinearGeneral((heads, size), width, axis=(-2, -1), use_bias=False, rngs=rngs,
                                     kernel_init=with_axes(DENSE, "heads", "head_dim", "embed"))  # fmt: skip
        self.up = nnx.Linear(width, 4 * width, use_bias=False, rngs=rngs, kernel_init=with_axes(DENSE, "embed", "mlp"))
        down = with_axes(DENSE, "mlp", "embed")
        self.down = nnx.Linear(4 * width, width, use_bias=False, rngs=rngs, kernel_init=down)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Return the residual stream after the block, (B, patches, E)."""
        q, k, v = (one(self.norms[0](x)) for one in self.qkv)
        x = x + self.out(jax.nn.dot_product_attention(q, k, v))
        hidden = constrain(jax.nn.gelu(self.up(self.norms[1](x))), "batch", None, "mlp")
        return constrain(x + self.down(hidden), "batch", None, "embed")


class ViTModule(nnx.Module):
    """Images (B, 8, 8) to logits (B, classes)."""

    def __init__(self, config: ViT, *, rngs: nnx.Rngs):
        c, with_axes = config, named if config.axes else lambda init, *_: init
        self.patch = c.patch
        self.enter = nnx.Linear(c.patch**2, c.width, rngs=rngs, kernel_init=with_axes(DENSE, None, "embed"),
                                bias_init=with_axes(ZEROS, "norm"))  # fmt: skip
        place = with_axes(SMALL, None, "embed")
        self.place = nnx.Linear((8 // c.patch) ** 2, c.width, use_bias=False, rngs=rngs, kernel_init=place)
        self.blocks = nnx.List([Block(c.width, c.heads, axes=c.axes, rngs=rngs) for _ in range(c.depth)])
        self.leave = nnx.Linear(c.width, CLASSES, rngs=rngs, kernel_init=with_axes(DENSE, "embed", None),
                                bias_init=with_axes(ZEROS, None))  # fmt: skip

    def __call__(self, images: jax.Array) -> jax.Array:
        """Return logits, (B, classes), for images (B, 8, 8)."""
        x = self.enter(patches(images, self.patch))
        x = constrain(x + self.place.kernel[...], "batch", None, "embed")
        for block in self.blocks:
            x = block(x)
        return self.leave(jnp.mean(x, axis=1))


@register
@dataclasses.dataclass(frozen=True)
class ViT:
    """Config of the model; the only method that jaxscale needs is `make`.

    Args:
      width: width of the residual stream.
      heads: attention heads.
      depth: number of blocks.
      patch: pixels along a side of a patch; divides 8.
      axes: whether parameters have axis names; otherwise jaxscale infers them from the program.
    """

    width: int = 64
    heads: int = 4
    depth: int = 2
    patch: int = 2
    axes: bool = True

    def make(self, rngs: nnx.Rngs) -> ViTModule:
        """Return the module."""
        return ViTModule(self, rngs=rngs)


class LinenNet(nn.Module):
    """A Linen module, such as one from another project."""

    width: int

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        """Return logits, (B, classes), for images (B, 8, 8)."""
        x = nn.Dense(self.width)(patches(images, 2).reshape(len(images), -1))
        x = nn.Dense(self.width)(nn.gelu(nn.Dense(4 * self.width)(x))) + x
        return nn.Dense(CLASSES)(x)


@register
@dataclasses.dataclass(frozen=True)
class FromLinen:
    """Config of the Linen module, converted to NNX by Flax's bridge."""

    width: int = 64

    def make(self, rngs: nnx.Rngs) -> nnx.Module:
        """Return the module, without the random keys that the bridge adds."""
        model = bridge.lazy_init(bridge.ToNNX(LinenNet(self.width), rngs=rngs), jnp.zeros((1, 8, 8)))
        model.to_nnx__rngs = None
        return model
