"""Factors on the inputs of matrices, undone in the layer before: the model computes the same function."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxscale.layout.tensors import Tree
from jaxscale.nn import GELU, Attention, Block, GeGLU, LayerNorm, RMSNorm, SwiGLU
from jaxscale.nn.norms import UnitOffsetRMSNorm

Path = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Fold:
    """Matrices of a block that share their inputs, and what computes these.

    Args:
      before: path within the block of what makes the inputs: a norm, or a projection whose outputs they are.
      kernels: paths of the matrices.
      offset: whether `before` is a norm whose factor is 1 plus its parameter.
      repeats: query heads that share a key-value head; the inputs of these heads have one factor.
    """

    before: Path
    kernels: tuple[Path, ...]
    offset: bool = False
    repeats: int = 1

    def applied(self, block: Tree, factors: Float[Array, " n"], lead: int = 1) -> Tree:
        """Return a block's parameters with factors on the rows of the matrices, and divided by in the layer before.

        Args:
          block: a nested dict of the block's parameters.
          factors: one for each input, above 0.
          lead: dimensions of stacked layers that come first.
        """
        out = _copy(block)
        for path in self.kernels:
            kernel = _get(block, (*path, "kernel"))
            _put(out, (*path, "kernel"), _times_rows(kernel, factors, lead))
        before = _get(block, self.before)
        if "kernel" in before:
            kernel = before["kernel"]
            inner = factors.reshape(-1, self.repeats, kernel.shape[-1]) if kernel.ndim - lead == 3 else factors
            inverse = 1 / (inner[:, 0] if kernel.ndim - lead == 3 else inner)
            changed = {"kernel": _scaled(kernel, inverse)}
            if "bias" in before:
                changed["bias"] = _scaled(before["bias"], inverse)
        else:
            scale = before["scale"]
            one = 1.0 if self.offset else 0.0
            changed = {"scale": ((scale.astype(jnp.float32) + one) / factors - one).astype(scale.dtype)}
            if "bias" in before:
                changed["bias"] = _scaled(before["bias"], 1 / factors)
        _put(out, self.before, before | changed)
        return out


def folds_of(block: Any, params: Tree) -> list[Fold]:
    """Return the places of a block where factors can be folded.

    Args:
      block: the block, a module.
      params: its parameters, a nested dict.
    """
    if type(block) is not Block:
        return []
    folds = []
    plain = type(block.mlp) in (GELU, SwiGLU, GeGLU)
    feed: tuple[Path, ...] = tuple(("mlp", name) for name in ("gate", "up") if plain and name in params["mlp"])
    if type(block.attn) is Attention:
        qkv: tuple[Path, ...] = tuple(("attn", name) for name in ("q", "k", "v"))
        if block.attn_norm is not None and _is_norm(block.attn_norm) and not (block.parallel and not feed):
            readers = qkv + feed if block.parallel else qkv
            folds.append(Fold(("attn_norm",), readers, isinstance(block.attn_norm, UnitOffsetRMSNorm)))
        heads, kv = (_get(params, ("attn", name, "kernel")).shape[i] for name, i in (("out", -3), ("v", -2)))
        folds.append(Fold(("attn", "v"), (("attn", "out"),), repeats=heads // kv))
    if feed and not block.parallel and block.mlp_norm is not None and _is_norm(block.mlp_norm):
        folds.append(Fold(("mlp_norm",), feed, isinstance(block.mlp_norm, UnitOffsetRMSNorm)))
    if len(feed) == 2:
        folds.append(Fold(("mlp", "up"), (("mlp", "down"),)))
    return folds


def _is_norm(norm: nnx.Module) -> bool:
    return type(norm) in (RMSNorm, UnitOffsetRMSNorm, LayerNorm)


def _times_rows(kernel: Array, factors: Array, lead: int) -> Array:
    """Multiply the inputs of a kernel (layers, *inputs, *outputs) by their factors."""
    inputs, size = 0, 1
    while size < len(factors):
        size *= kernel.shape[lead + inputs]
        inputs += 1
    shape = (*kernel.shape[lead : lead + inputs], *(1,) * (kernel.ndim - lead - inputs))
    return (kernel.astype(jnp.float32) * factors.reshape(shape)).astype(kernel.dtype)


def _scaled(x: Array, by: Array) -> Array:
    return (x.astype(jnp.float32) * by).astype(x.dtype)


def _get(tree: Tree, path: Path) -> Any:
    for key in path:
        tree = tree[key]
    return tree


def _put(tree: Tree, path: Path, value: Any) -> None:
    for key in path[:-1]:
        tree = tree[key]
    tree[path[-1]] = value


def _copy(tree: Tree) -> Tree:
    return {k: _copy(v) for k, v in tree.items()} if isinstance(tree, dict) else tree
