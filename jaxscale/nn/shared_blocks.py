"""Layers that share weights: a group of blocks is applied several times, each time with small parameters of its own."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jaxscale.config import register
from jaxscale.errors import ConfigError
from jaxscale.layout import TensorInfo, named
from jaxscale.layout.tensors import Tree, path_name
from jaxscale.nn.block import Block
from jaxscale.nn.linear import Linear, by_column
from jaxscale.parallel import Arithmetic, Weight, as_weight

NORMS = ("attn_norm", "mlp_norm", "attn_post_norm", "mlp_post_norm")
"""The norms of a block."""


@register
@dataclasses.dataclass(frozen=True)
class SharedBlocks:
    """Consecutive layers with the same matrices (`Transformer.shared = @SharedBlocks(uses=2)`).

    Each group of blocks is applied `uses` times before the next, as in MobileLLM (Liu et al. 2024, arXiv:2402.14905);
    with as many uses as layers the whole model is one block (ALBERT, Lan et al. 2019). `Transformer.depth` counts the
    layers that are applied, so that the model computes as much as one without sharing and has about `1 / uses` of its
    parameters. Each use has its own KV cache, norms and scales (FoldGPT, Liu et al. 2024, arXiv:2407.00928).

    Args:
      uses: how often a group of blocks is applied.
      norms: each use has norms of its own; else they are shared as well.
      scales: each use multiplies the columns of every matrix by scales of its own, which begin as 1.

    Raises:
      ConfigError: a number of uses below 2.
    """

    uses: int = 2
    norms: bool = True
    scales: bool = True

    def __post_init__(self) -> None:
        if isinstance(self.uses, bool) or not isinstance(self.uses, int) or self.uses < 2:
            raise ConfigError(
                f"SharedBlocks.uses = {self.uses!r}: must be a whole number of at least 2; leave out "
                "Transformer.shared if no layers share weights"
            )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ScaledColumns(Weight):
    """The kernel with each column multiplied by a scale.

    Args:
      kernel: `(*layers, *inputs, *outputs)`, an array or another weight.
      scale: `(*layers, *outputs)`; a dimension of size 1 is one scale for all.
      outputs: how many dimensions are outputs.
    """

    kernel: Float[Array, "..."] | Weight
    scale: Float[Array, "..."]
    outputs: int = dataclasses.field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the kernel."""
        return tuple(self.kernel.shape)

    def matmul(
        self, x: Float[Array, "..."], axes: tuple[str, ...], contracted: tuple[int, ...], arithmetic: Arithmetic
    ) -> Float[Array, "..."]:
        """See `Weight`: the product's columns are scaled, in float32."""
        return by_column(as_weight(self.kernel).matmul(x, axes, contracted, arithmetic), self.scale)

    def matrix(self, arithmetic: Arithmetic) -> tuple[Float[Array, "..."], Float[Array, "..."]]:
        """See `Weight`: numbers of a product are those of the kernel, before its columns are scaled."""
        return as_weight(self.kernel).matrix(arithmetic)[0], self.scale

    def base(self) -> Weight:
        """See `Weight`: that of the kernel, with its columns scaled."""
        return ScaledColumns(as_weight(self.kernel).base(), self.scale, self.outputs)

    def added(
        self, x: Float[Array, "..."], axes: tuple[str, ...], contracted: tuple[int, ...], arithmetic: Arithmetic
    ) -> Float[Array, "..."] | None:
        """See `Weight`: that of the kernel, with its columns scaled."""
        more = as_weight(self.kernel).added(x, axes, contracted, arithmetic)
        return None if more is None else by_column(more, self.scale)

    def arithmetic(self, arithmetic: Arithmetic) -> Arithmetic:
        """See `Weight`: that of the kernel."""
        return as_weight(self.kernel).arithmetic(arithmetic)

    def dense(self, dtype: DTypeLike | None = None) -> Float[Array, "..."]:
        """See `Weight`; multiplied in float32."""
        kernel = as_weight(self.kernel).dense()
        lead = self.scale.ndim - self.outputs
        shape = (*self.scale.shape[:lead], *(1,) * (kernel.ndim - self.scale.ndim), *self.scale.shape[lead:])
        scaled = kernel.astype(jnp.float32) * self.scale.reshape(shape)
        return scaled.astype(kernel.dtype if dtype is None else dtype)

    def infos(self, info: TensorInfo) -> Tree:
        """See `Weight`: scales have the axes of the kernel's layers and outputs, those of size 1 none."""
        lead = self.scale.ndim - self.outputs
        axes = (*info.axes[:lead], *info.axes[len(info.axes) - self.outputs :])
        own = tuple(None if n == 1 else a for a, n in zip(axes, self.scale.shape, strict=True))
        scale = TensorInfo(f"{info.path}/scale", tuple(self.scale.shape), self.scale.dtype, own)
        inner = dataclasses.replace(info, path=f"{info.path}/kernel")
        return ScaledColumns(as_weight(self.kernel).infos(inner), scale, self.outputs)  # type: ignore[arg-type]


class OneScale(nnx.Module):
    """The scales of one matrix's columns, for each repeat and use.

    Args:
      linear: the layer of the matrix.
      stack: the sizes of the leading dimensions, by logical axis.
    """

    def __init__(self, linear: Linear, stack: dict[str, int]):
        kernel = linear.kernel.get_value()
        count = len(linear.axes) - len(linear.contracted)
        # as a bias: FSDP does not shard the small scales of the residual stream
        axes = ("norm" if a == "embed" else a for a in linear.axes[-count:])
        ones = named(jax.nn.initializers.ones, *stack, *axes)
        shape = (*stack.values(), *kernel.shape[kernel.ndim - count :])
        self.scale = nnx.Param(ones(jax.random.key(0), shape, kernel.dtype))


class OwnScales(nnx.Module):
    """The scales of all matrices of a block, for each repeat and use.

    Args:
      block: the stacked block.
      stack: the sizes of the leading dimensions, by logical axis.
    """

    def __init__(self, block: Block, stack: dict[str, int]):
        for name, linear in linears(block):
            setattr(self, name, OneScale(linear, stack))


def linears(block: Block) -> list[tuple[str, Linear]]:
    """Return the linear layers of a block by name: "attn_q" is `block.attn.q`.

    Args:
      block: the block.
    """
    layers = ((path, m) for path, m in nnx.iter_graph(block) if isinstance(m, Linear))
    return sorted((path_name(path).replace("/", "_"), m) for path, m in layers)


def own_norms(block: Block, uses: int) -> None:
    """Give each use of a stacked block norms of its own: another dimension after that of the layers.

    Args:
      block: the block; its norms are replaced.
      uses: how often it is applied.
    """
    for norm in (getattr(block, name) for name in NORMS):
        for _, variable in nnx.iter_graph(norm):
            if isinstance(variable, nnx.Param):
                value = variable.get_value()
                shape = (value.shape[0], uses, *value.shape[1:])
                variable.set_value(jnp.broadcast_to(jnp.expand_dims(value, 1), shape))
                layers, *axes = variable.get_metadata()["axes"]
                variable.set_metadata(axes=(layers, "uses", *axes))


def used(block: Block, scales: OwnScales | None, norms: bool, use: int | Int[Array, ""]) -> Block:
    """Return a block as one use applies it.

    Args:
      block: one layer of the stacked block.
      scales: one layer of its scales, or `None`.
      norms: whether it has norms for each use.
      use: the number of the use.
    """
    graphdef, state = nnx.split(block)
    params: dict[tuple[Any, ...], Any] = flatten_dict(nnx.to_pure_dict(state))
    if norms:
        params = {path: x[use] if path[0] in NORMS else x for path, x in params.items()}
    if scales is not None:
        for path, linear in nnx.iter_graph(block):
            if isinstance(linear, Linear):
                own = getattr(scales, path_name(path).replace("/", "_")).scale.get_value()[use]
                kernel = (*path, "kernel")
                params[kernel] = ScaledColumns(params[kernel], own, own.ndim)
    return nnx.merge(graphdef, unflatten_dict(params))
