"""From a run to layers that can be streamed."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from flax import nnx

from jaxscale.errors import ConfigError, near
from jaxscale.infer.loaded import dropless, for_texts_of
from jaxscale.infer.streaming.layers import Encoded, Layers, OnHost
from jaxscale.layout import Layout
from jaxscale.nn import WeightFormat

if TYPE_CHECKING:
    from jaxscale.run import Run

FROM = ("host", "disk")


def stream_model(
    run: Run,
    source: str = "host",
    layout: Layout | None = None,
    step: int | None = None,
    length: int | None = None,
    weights: WeightFormat | None = None,
) -> tuple[nnx.GraphDef[Any], Layers]:
    """A run's model, its layers outside of the device.

    Args:
      run: the run; what is streamed is a checkpoint, also while its state is in memory.
      source: "host" holds all parameters in the host's memory; "disk" reads each layer from the checkpoint's files
        every time, through the system's page cache, and checks what it reads.
      layout: where layers come to.
      step: of which checkpoint, by default the newest.
      length: how long texts may become, for positions that go by it.
      weights: a form in which the matrices that it covers are kept and brought; from "disk" each layer is encoded
        whenever it is read.

    Raises:
      ConfigError: another source, or a checkpoint that is not what the model computes with.
      CheckpointError, RunError: there is none.
    """
    from jaxscale.step import describe_model
    from jaxscale.step.prepare import blueprint_of

    if source not in FROM:
        raise ConfigError(f"stream_layers = {source!r}: must be 'host' or 'disk'{near(str(source), FROM)}")
    graphdef, infos = describe_model(for_texts_of(dropless(run.config.model), length))
    step = run.last_step() if step is None else step
    if source == "host":
        host = jax.devices("cpu")[0]
        with jax.default_device(host):
            params = run.params(step)
            if weights is not None:
                params, infos = weights.encoded(params, infos, None), weights.infos(infos)
        leaves: dict[str, np.ndarray] = {}
        for info, x in zip(jax.tree.leaves(infos), jax.tree.leaves(params), strict=True):
            leaves[info.path] = np.array(x)  # a copy: what JAX lends would stay alive with it
            x.delete()
        return graphdef, Layers(infos, OnHost(leaves), layout)
    blueprint, _ = blueprint_of(dataclasses.replace(run.config, layout=None))
    part = blueprint.algorithm.weights_in(blueprint)
    if run.config.adapters is not None or part is None:
        what = "adapters are added to them" if run.config.adapters is not None else "this run averages them"
        raise ConfigError(f"stream_layers = 'disk' takes parameters as they are kept, and {what}; use 'host'")
    arrays = run.checkpoints.arrays(step)
    if weights is not None:
        return graphdef, Layers(weights.infos(infos), Encoded(arrays, infos, weights, f"{part}/"), layout)
    return graphdef, Layers(infos, arrays, layout, prefix=f"{part}/")
