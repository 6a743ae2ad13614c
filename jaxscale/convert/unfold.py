"""Write a model with shared layers (`Transformer.shared`) as a model in which each layer has its own matrices."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jaxscale.layout import TensorInfo
from jaxscale.layout.tensors import Tree
from jaxscale.models import TransformerConfig
from jaxscale.nn.shared_blocks import ScaledColumns
from jaxscale.step.state import describe_model


def unfolded(model: TransformerConfig) -> TransformerConfig:
    """Return the config of the model in which each layer has its own matrices.

    Args:
      model: a config; without `Transformer.shared` it is returned as it is.
    """
    return dataclasses.replace(model, shared=None)


def unfolded_params(model: TransformerConfig, params: Tree) -> Tree:
    """Return the parameters of `unfolded(model)`: each use's norms, and the matrices with its columns' scales in them.

    Args:
      model: a config with `Transformer.shared`.
      params: its parameters.
    """
    runs = {}
    for name, info in describe_model(model)[1]["runs"].items():
        blocks, scales = params["runs"][name]["blocks"], params["runs"][name].get("scales", {})

        def of_layers(path: tuple[Any, ...], info: TensorInfo, x: Array, scales: Tree = scales) -> Array:
            key, *names, last = (p.key for p in path)
            if "uses" not in info.axes:
                x = jnp.broadcast_to(x[:, None], (len(x), model.uses, *x.shape[1:]))
                own = scales.get(key, {}).get("_".join(names)) if last == "kernel" else None
                x = x if own is None else ScaledColumns(x, own["scale"], own["scale"].ndim - 2).dense()
            return x.reshape(-1, *x.shape[2:])

        runs[name] = {"blocks": jax.tree_util.tree_map_with_path(of_layers, info["blocks"], blocks)}
    return {**params, "runs": runs}
