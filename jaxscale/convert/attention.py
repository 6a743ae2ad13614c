"""Make a run with another attention layer out of a trained one, with all of its matrices, to be trained further."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax

from jaxscale.convert.new_run import begin, check_new, finish, save_params
from jaxscale.errors import ConfigError
from jaxscale.layout import Layout, path_name, shardings_of
from jaxscale.models import TransformerConfig
from jaxscale.nn import AttentionLayer
from jaxscale.run import Run
from jaxscale.step import describe_model
from jaxscale.step.state import make_params


def change_attention(
    run: Run | str | Path,
    out: str | Path,
    layer: AttentionLayer,
    *,
    step: int | None = None,
    layout: Layout | None = None,
) -> Run:
    """Write a run with another `Transformer.attention_layer` that has all parameters of a trained run, and more.

    What the new layers have besides is at its initial values. `Lizard` and `SinkMultiHead` have the parameters of
    `MultiHead`, and `DSA` those of `MultiHeadLatent` with the same widths. Then train it, for example to be like the
    old one (arXiv:2507.09025):

        new = change_attention(run, "runs/lizard", js.nn.Lizard(reach=128))
        js.fit(model=new.config.model, start=js.train.FromRun(new.path),
               objective=js.step.Distill(teacher=js.train.FromRun(run.path)), ...)

    Args:
      run: the trained run, or its folder.
      out: the new run folder.
      layer: the new layers.
      step: the checkpoint's step; the newest by default.
      layout: where parameters are while they are copied; `None` is one device.

    Returns:
      the new run; its checkpoint has parameters only.

    Raises:
      ConfigError: the new layer lacks a parameter of the old one, or has it in another shape; the model has no such
        layers, or weights that are stored in few bits.
      RunError: `out` exists already, or `run` has no checkpoint.
    """
    run = run if isinstance(run, Run) else Run(run)
    config, name = run.config, type(layer).__name__
    model = config.model
    if not isinstance(model, TransformerConfig):
        raise ConfigError(f"{run.place} is {type(model).__name__}, which has no attention_layer; name another run")
    if model.blocks and all(block.mixer is not None for block in model.blocks):
        raise ConfigError(
            f"every block of {run.place} sets Block.mixer, and {name} replaces Transformer.attention_layer; leave out "
            f"Block.mixer where it is {type(model.attention_layer).__name__}()"
        )
    if config.stored is not None:
        raise ConfigError(
            f"{run.place} stores its matrices as {config.stored.describe()}; write plain arrays first, with jaxscale "
            f"merge {run.place} OUT"
        )
    changed = dataclasses.replace(model, attention_layer=layer)
    infos = describe_model(changed)[1]
    shapes = {i.path: i.shape for i in jax.tree.leaves(infos)}
    lost = [i for i in jax.tree.leaves(describe_model(model)[1]) if shapes.get(i.path) != i.shape]
    if lost:
        instead = f"of shape {shapes[lost[0].path]}" if lost[0].path in shapes else "not there"
        raise ConfigError(
            f"{run.place} has {type(model.attention_layer).__name__} with {lost[0].path} of shape {lost[0].shape}, "
            f"which is {instead} in {name}; use a layer that has all parameters of the old one"
        )
    check_new(out)
    step = run.last_step() if step is None else step
    trained = {path_name(path): x for path, x in jax.tree_util.tree_leaves_with_path(run.params(step, layout))}
    where: Any = None if layout is None else shardings_of(infos, layout)
    fresh = jax.jit(lambda: make_params(changed, config.seed), out_shardings=where)()
    params = jax.tree_util.tree_map_with_path(lambda path, x: trained.get(path_name(path), x), fresh)
    facts = {"attention_changed": {"run": str(run.path.absolute()), "id": run.info.get("id"), "step": step}}
    settings = dataclasses.replace(config, model=changed, start=None, adapters=None)
    new = begin(run, out, settings, facts, "changing attention")
    save_params(new, params, layout)
    finish(new, "attention changed")
    return new
