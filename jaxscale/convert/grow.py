"""Grow a run into a deeper or wider one, or one of experts, optimizer state included where the smaller one shows it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from jaxscale.convert.deeper import Deeper, deepened
from jaxscale.convert.new_run import begin, check_new, finish, save_params
from jaxscale.convert.upcycled import Upcycled, upcycled
from jaxscale.convert.wider import Wider, widened
from jaxscale.errors import ConfigError
from jaxscale.layout import Layout, TensorInfo, path_name, shardings_of
from jaxscale.layout.tensors import Tree
from jaxscale.run import Run
from jaxscale.step.blueprint import blueprint_of
from jaxscale.step.state import Blueprint, TrainState, describe_model
from jaxscale.train.run import checkpoints_in

Growth = Deeper | Wider | Upcycled


def grow(
    run: Run,
    out: str | Path,
    *,
    layers: int | None = None,
    method: str = "stack",
    width: int | None = None,
    hidden: int | None = None,
    heads: int | None = None,
    noise: float | None = None,
    experts: int | None = None,
    top_k: int | None = None,
    redraw: float = 0.0,
    step: int | None = None,
    weights_only: bool = False,
    layout: Layout | None = None,
) -> Run:
    """Write a run with a larger model, whose parameters and optimizer state are made from a trained run's.

    The new run has the step count, the optimizer's counts, the corpus and the schedule of the trained one, and
    `fit(run=out, resume=True, steps=...)` continues with the data that follow. With `weights_only`, or by
    `FromRun(out)`, training starts at step 0 with a new optimizer instead.

    Args:
      run: a run with a checkpoint.
      out: the new folder.
      layers: number of layers of the new model; by default unchanged.
      method: how layers are added, a key of `jaxscale.convert.deeper.METHODS`: "stack" (G_stack, Du et al. 2024,
        arXiv:2405.15319), "interpolate", or "identity", which does not change the model's output.
      width: width of the residual stream, a whole multiple; the output does not change (HyperCloning, Samragh et al.
        2024, arXiv:2409.12903).
      hidden: hidden width of the feed-forward layers; by default it grows as `width`.
      heads: number of query heads; by default it grows as `width`.
      noise: see `jaxscale.convert.wider.Wider`; 0.1 by default.
      experts: number of experts that each feed-forward layer becomes, copies of it; needs `weights_only`.
      top_k: experts per token; 2 by default.
      redraw: see `jaxscale.convert.upcycled.Upcycled`.
      step: the checkpoint's step; the newest by default.
      weights_only: write the evaluation parameters only (for adapters, merged with the model).
      layout: where to compute; the default device by default.

    Returns:
      the new run.

    Raises:
      ConfigError: the model or its optimizer state cannot grow like this.
      RunError: `out` exists already or is in a bucket, or `run` has no checkpoint.
      CheckpointError: a checkpoint cannot be read.
    """
    config = run.config
    growths: list[Growth] = []
    if getattr(config.model, "shared", None) is not None:
        raise ConfigError(
            "a model whose layers share matrices (Transformer.shared) does not grow; grow one without, and fold it "
            "afterwards (jaxscale fold)"
        )
    if layers is not None:
        growths.append(deepened(config.model, layers, method))
    if (width, hidden, heads) != (None, None, None):
        before = growths[0].model if growths else config.model
        added_noise = 0.1 if noise is None else noise
        growths.append(widened(before, width=width, hidden=hidden, heads=heads, noise=added_noise, seed=config.seed))
    elif noise is not None:
        raise ConfigError(f"noise = {noise} has no effect without a width, hidden or heads; set one, or leave it out")
    if experts is not None:
        before = growths[-1].model if growths else config.model
        growths.append(
            upcycled(before, experts=experts, top_k=2 if top_k is None else top_k, redraw=redraw, seed=config.seed)
        )
        if not weights_only:
            raise ConfigError(
                f"experts = {experts}: the optimizer's state is that of the dense layers, and an expert's gradients "
                "are those of its own tokens; grow the weights only (--weights-only)"
            )
    elif top_k is not None:
        raise ConfigError(f"top_k = {top_k} has no effect without experts; set experts, or leave it out")
    elif redraw:
        raise ConfigError(f"redraw = {redraw} has no effect without experts; set experts, or leave it out")
    if layers is None and method != "stack":
        raise ConfigError(f"method = {method!r} has no effect without a number of layers; set layers, or leave it out")
    if not growths:
        raise ConfigError("nothing grows; set layers, width, hidden, heads or experts")
    if config.stored is not None:
        raise ConfigError(
            f"{run.place} stores its matrices as {config.stored.describe()}; "
            "write plain arrays first, with jaxscale merge "
            f"{run.place} OUT, and grow that run"
        )
    check_new(out)
    step = run.last_step() if step is None else step
    model = growths[-1].model
    grown = dataclasses.replace(config, model=model, start=None, adapters=None)
    entry: dict[str, Any] = {"run": str(run.path.absolute()), "id": run.info.get("id"), "step": step}
    facts: dict[str, Any] = {"grown": entry | {"method": method if layers is not None else None}}
    if weights_only:
        params = _grown_params(run.params(step, layout), growths, layout)
        new = begin(run, out, grown, facts, "growing")
        save_params(new, params, layout)
    else:
        _check_state(run)
        manifest = run.checkpoints.manifest(step)
        state, blueprint = _grown_state(run, growths, step, layout)
        same: dict[str, Any] = {
            name: manifest[name] for name in ("data", "rows", "steps", "teacher") if name in manifest
        }
        facts |= {"step": step}
        new = begin(run, out, grown, facts, "growing")
        store = checkpoints_in(new.path)
        where = None if layout is None else str(layout)
        store.save(state, blueprint.algorithm.infos(blueprint), {**same, "layout": where})
        store.close()
    finish(new, "grown")
    return new


def _check_state(run: Run) -> None:
    """Check that the run's checkpoints hold all that training continues from."""
    config = run.config
    if config.adapters is not None:
        raise ConfigError(
            f"{run.place} has adapters, whose optimizer state is of the smaller model; grow the weights only "
            "(--weights-only), or first run jaxscale merge"
        )
    if config.keeps_start:
        raise ConfigError(
            f"{run.place} has a frozen reference model, which would not grow with it; grow the weights only "
            "(--weights-only)"
        )


def _grown_params(params: Tree, growths: list[Growth], layout: Layout | None) -> Tree:
    infos = [_by_name(describe_model(m)[1]) for m in (growths[0].before, *(g.model for g in growths))]
    target = describe_model(growths[-1].model)[1]

    def grown(params: Tree) -> Tree:
        arrays = _by_name(params)
        for growth, before, after in zip(growths, infos, infos[1:], strict=False):
            arrays = growth.params(arrays, before, after)
        return _tree(target, arrays)

    return jax.jit(grown, out_shardings=shardings_of(target, layout))(params)


def _grown_state(run: Run, growths: list[Growth], step: int, layout: Layout | None) -> tuple[TrainState, Blueprint]:
    base = dataclasses.replace(run.config, layout=layout)
    blueprints = [
        blueprint_of(dataclasses.replace(base, model=m))[0]
        for m in (growths[0].before, *(g.model for g in growths))
    ]  # fmt: skip
    small, large = blueprints[0], blueprints[-1]
    state = run.checkpoints.restore(step, small.abstract_state(), small.shardings())

    def grown(state: TrainState) -> TrainState:
        for growth, before, after in zip(growths, blueprints, blueprints[1:], strict=False):
            state = _state(growth, state, before, after)
        return state

    target = large.shardings()
    if target is not None:
        replicated = target.step
        target = target.saved.replace(guards=jax.tree.map(lambda _: replicated, state.guards))
    return jax.jit(grown, out_shardings=target)(state), large


def _state(growth: Growth, state: TrainState, before: Blueprint, after: Blueprint) -> TrainState:
    infos = [b.algorithm.infos(b) for b in (before, after)]

    def named(part: str) -> tuple[dict[str, Any], dict[str, TensorInfo], dict[str, TensorInfo]]:
        return _by_name(getattr(state, part)), _by_name(infos[0][part]), _by_name(infos[1][part])

    copied = any("replicas" in i.axes for i in jax.tree.leaves(infos[1]["params"]))
    if isinstance(growth, Wider) and (copied or infos[1]["extra"]):
        raise ConfigError(
            f"the state of {type(after.algorithm).__name__} has further copies of the parameters, which cannot be made "
            "wider; grow the weights only (--weights-only)"
        )
    params = _tree(infos[1]["params"], growth.params(*named("params")))
    extra = _tree(infos[1]["extra"], growth.params(*named("extra")))
    assert not isinstance(growth, Upcycled)
    if isinstance(growth, Wider):
        opt_state = growth.moments(*named("opt_state"))
    else:
        opt_state = growth.arrays(*named("opt_state"))
    if isinstance(growth, Deeper) and any(growth.new):
        one = jax.tree.map(lambda x, i: x[0] if "replicas" in i.axes else x, params, infos[1]["params"])
        first = after.algorithm.init(after, one)["opt_state"]
        opt_state = growth.silenced(opt_state, named("opt_state")[2], _by_name(first))
    return state.replace(params=params, extra=extra, opt_state=_tree(infos[1]["opt_state"], opt_state))


def _by_name(tree: Tree) -> dict[str, Any]:
    return {path_name(path): x for path, x in jax.tree_util.tree_leaves_with_path(tree)}


def _tree(like: Tree, arrays: Mapping[str, Any]) -> Tree:
    paths, structure = jax.tree_util.tree_flatten_with_path(like)
    return jax.tree.unflatten(structure, [arrays[path_name(path)] for path, _ in paths])
