"""Make a run with linear attention and windows out of one with softmax attention, to be trained by distillation."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax

from jaxscale.convert.new_run import begin, check_new, finish, save_params
from jaxscale.errors import ConfigError
from jaxscale.layout import Layout, path_name, shardings_of
from jaxscale.models import TransformerConfig
from jaxscale.nn import AttentionLayer, Lizard, MultiHead
from jaxscale.run import Run
from jaxscale.step import describe_model
from jaxscale.step.state import make_params


def linearise(
    run: Run,
    out: str | Path,
    *,
    layer: AttentionLayer | None = None,
    step: int | None = None,
    layout: Layout | None = None,
) -> Run:
    """Write a run whose attention layers are `Lizard`, with all matrices of a trained run (arXiv:2507.09025).

    What the new layers have besides is at its initial values: each layer begins as attention to its window. Then train
    it to be like the old one:

        js.fit(model=new.config.model, start=js.train.FromRun(new.path),
               objective=js.step.Distill(teacher=js.train.FromRun(run.path)), ...)

    Args:
      run: the trained run, whose attention layers are `MultiHead`.
      out: the new run folder.
      layer: the new layers, `Lizard(reach=...)`; by default `Lizard()`.
      step: the checkpoint's step; the newest by default.
      layout: where parameters are while they are copied; `None` is one device.

    Returns:
      the new run; its checkpoint has parameters only.

    Raises:
      ConfigError: the model has other attention layers, or weights that are stored in few bits.
      RunError: `out` exists already, or `run` has no checkpoint.
    """
    config = run.config
    model = config.model
    if not isinstance(model, TransformerConfig) or type(model.attention_layer) is not MultiHead:
        layers = model.attention_layer if isinstance(model, TransformerConfig) else model
        raise ConfigError(
            f"{run.place} has {type(layers).__name__}, and Lizard replaces MultiHead() only; name another run"
        )
    if model.blocks and all(block.mixer is not None for block in model.blocks):
        raise ConfigError(
            f"every block of {run.place} sets Block.mixer, and Lizard replaces Transformer.attention_layer; leave out "
            "Block.mixer where it is MultiHead()"
        )
    if config.stored is not None:
        raise ConfigError(
            f"{run.place} stores its matrices as {config.stored.describe()}; write plain arrays first, with jaxscale "
            f"merge {run.place} OUT"
        )
    changed = dataclasses.replace(model, attention_layer=Lizard() if layer is None else layer)
    check_new(out)
    step = run.last_step() if step is None else step
    trained = {path_name(path): x for path, x in jax.tree_util.tree_leaves_with_path(run.params(step, layout))}
    _, infos = describe_model(changed)
    where: Any = None if layout is None else shardings_of(infos, layout)
    fresh = jax.jit(lambda: make_params(changed, config.seed), out_shardings=where)()
    params = jax.tree_util.tree_map_with_path(lambda path, x: trained.get(path_name(path), x), fresh)
    facts = {"linearised": {"run": str(run.path.absolute()), "id": run.info.get("id"), "step": step}}
    settings = dataclasses.replace(config, model=changed, start=None, adapters=None)
    new = begin(run, out, settings, facts, "linearising")
    save_params(new, params, layout)
    finish(new, "linearised")
    return new
