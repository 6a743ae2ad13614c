"""Streaming the layers of a run's model."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from flax import nnx

from jaxscale.errors import ConfigError, near
from jaxscale.infer.loaded import dropless, for_length, refuse_second_format
from jaxscale.infer.streaming.layers import Encoded, Layers, OnHost
from jaxscale.layout import Layout
from jaxscale.nn import WeightFormat

if TYPE_CHECKING:
    from jaxscale.run import Run

FROM = ("host", "disk")


def source_and_window(text: str) -> tuple[str, int]:
    """Return where layers wait, and the most layers on the device.

    Args:
      text: "host" or "disk", and after a colon the number of layers, 2 by default.

    Raises:
      ConfigError: it is neither.
    """
    source, colon, window = str(text).partition(":")
    if source not in FROM or (colon and not window.isdecimal()):
        raise ConfigError(
            f"stream_layers = {text!r}: must be 'host' or 'disk', or such as 'host:4' with four layers on the device"
            f"{near(source, FROM) if source not in FROM else ''}"
        )
    return source, int(window or 2)


def stream_model(
    run: Run,
    source: str = "host",
    layout: Layout | None = None,
    step: int | None = None,
    length: int | None = None,
    weights: WeightFormat | None = None,
) -> tuple[nnx.GraphDef[Any], Layers]:
    """Return a run's model, with its layers outside the device.

    Args:
      run: the run; its checkpoint is streamed, also while its state is in memory.
      source: "host" holds all parameters in the host's memory; "disk" reads each layer from the checkpoint's files
        every time, through the system's page cache, and verifies digests where there are some. "host:4" has at most
        four layers on the device, where "host" has two.
      layout: where layers are computed; `None` is one device.
      step: the checkpoint's step; the newest by default.
      length: the most tokens of a sequence, for position encodings that depend on it.
      weights: a weight format for the matrices that it supports; from "disk" each layer is encoded whenever it is read.

    Returns:
      the graph definition, and the parameters.

    Raises:
      ConfigError: an unknown source, a window that does not fit the model, or "disk" for a checkpoint whose arrays are
        not the model's weights.
      CheckpointError: there is no such checkpoint.
      RunError: the run has no checkpoint.
    """
    from jaxscale.step import describe_model
    from jaxscale.step.blueprint import blueprint_of

    source, window = source_and_window(source)
    graphdef, infos = describe_model(for_length(dropless(run.config.model), length))
    refuse_second_format(run, weights)
    if run.config.stored is not None:
        infos = run.config.stored.infos(infos)
    step = run.last_step() if step is None else step
    if source == "host":
        host = jax.devices("cpu")[0]
        with jax.default_device(host):
            params = run.weights(step)
            if weights is not None:
                params, infos = weights.encoded(params, infos, None), weights.infos(infos)
        leaves: dict[str, np.ndarray] = {}
        for info, x in zip(jax.tree.leaves(infos), jax.tree.leaves(params), strict=True):
            leaves[info.path] = np.array(x)  # a copy: a view would keep the JAX array alive
            x.delete()
        return graphdef, Layers(infos, OnHost(leaves), layout, window=window)
    if run.config.stored is not None:
        return graphdef, Layers(infos, run.checkpoints.arrays(step), layout, prefix="params/", window=window)
    blueprint, _ = blueprint_of(dataclasses.replace(run.config, layout=None))
    part = blueprint.algorithm.weights_in(blueprint)
    if run.config.adapters is not None or part is None:
        what = "adapters are added to them" if run.config.adapters is not None else "this run averages them"
        raise ConfigError(f"stream_layers = 'disk' needs parameters as they are stored, and {what}; use 'host'")
    arrays = run.checkpoints.arrays(step)
    if weights is not None:
        return graphdef, Layers(
            weights.infos(infos), Encoded(arrays, infos, weights, f"{part}/"), layout, window=window
        )
    return graphdef, Layers(infos, arrays, layout, prefix=f"{part}/", window=window)
