"""Untrained run folders with random weights, and with adapters whose two matrices are not zero."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxscale as js
from jaxscale.models import TransformerConfig
from jaxscale.run import Run
from jaxscale.step import LoRA, TrainConfig, blueprint_of, settled
from jaxscale.train import FromRun
from jaxscale.train.checkpoints import flatten
from jaxscale.train.checkpoints.chunks import to_host
from jaxscale.train.checkpoints.manifest import leaves_of
from jaxscale.train.run import about, checkpoints_in, write_config


def drawn(model: TransformerConfig, out: Path) -> Run:
    """Write a run of a model with random weights."""
    return _written(TrainConfig(model=model, layout=None), out)


def adapted(base: Run, out: Path, lora: LoRA) -> Run:
    """Write a run of random adapters on the newest checkpoint of another run."""
    return _written(settled(TrainConfig(start=FromRun(str(base.path)), adapters=lora, layout=None)), out)


def _written(config: TrainConfig, out: Path) -> Run:
    infos: Any = blueprint_of(config)[0].infos
    random = np.random.default_rng(0)
    draw = lambda i: jnp.asarray(0.3 * random.standard_normal(i.shape), i.dtype)  # noqa: E731
    out.mkdir()
    write_config(out, config, 1)
    (out / "run.json").write_text(json.dumps({"id": out.name, **about(config, ""), "status": "finished"}))
    arrays = to_host(flatten({"params": jax.tree.map(draw, infos)}))
    store = checkpoints_in(out)
    store.save_host(1, arrays, {"leaves": leaves_of({}, arrays, infos), "layout": None, "data": None})
    store.close()
    return js.load(str(out))
