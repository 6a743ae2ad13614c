"""Fewer experts: a run's mixtures without the experts that are chosen least, or with them merged into the others."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxtyping import Float, Int
from scipy.optimize import linear_sum_assignment

from jaxscale.convert.new_run import begin, check_new, finish, save_params
from jaxscale.errors import ConfigError, RunError, check_whole, near
from jaxscale.layout import Layout, shardings_of
from jaxscale.layout.tensors import Tree
from jaxscale.models import TransformerConfig
from jaxscale.nn import MixtureOfExperts
from jaxscale.run import Run
from jaxscale.step.state import describe_model
from jaxscale.train.expert_load import FILE, read_experts

Arrays = dict[str, np.ndarray]
Axes = Mapping[str, tuple[str, ...]]
Load = Float[np.ndarray, " experts"]

_MATRICES = ("gate", "up", "down")


def most_chosen(load: Load, experts: int) -> Int[np.ndarray, " n"]:
    """Return the experts with the largest loads, in their order; of equal ones the first.

    Args:
      load: how often each was chosen.
      experts: how many.
    """
    return np.sort(np.argsort(-load, kind="stable")[:experts])


def dropped(arrays: Arrays, axes: Axes, load: Load, experts: int) -> Arrays:
    """Return a layer with its most chosen experts alone.

    With a normalised router a token is computed as before if all its experts remain.

    Args:
      arrays: the layer's, by name.
      axes: the logical axes of each.
      load: how often each expert was chosen.
      experts: how many remain.
    """
    return ordered(arrays, axes, most_chosen(load, experts))


def merged(arrays: Arrays, axes: Axes, load: Load, experts: int) -> Arrays:
    """Return a layer whose most chosen experts take the others in (M-SMoE, Li et al. 2023, arXiv:2310.01334).

    Each of the others joins the remaining expert whose column of the router has the largest cosine with its own. Its
    hidden features are first put in the order that fits the remaining expert's best. A group's parameters, columns of
    the router included, are the mean by how often its experts were chosen. (In the paper the router does not shrink: a
    token for any of a group goes to the merged expert.)

    Args:
      arrays: the layer's, by name.
      axes: the logical axes of each.
      load: how often each expert was chosen.
      experts: how many remain.
    """
    remaining = most_chosen(load, experts)
    columns = np.asarray(arrays["router"], np.float64).T
    columns = columns / np.maximum(np.linalg.norm(columns, axis=1, keepdims=True), 1e-30)
    joins = np.argmax(columns @ columns[remaining].T, axis=1)
    joins[remaining] = np.arange(experts)
    share = np.zeros((experts, len(load)))
    share[joins, np.arange(len(load))] = load
    share[np.arange(experts), remaining] += load[remaining] == 0  # of a group that was never chosen
    share /= share.sum(1, keepdims=True)
    orders = _orders(arrays, axes, remaining[joins], share.max(0) > 0)
    return {name: _mean(x, axes[name], share, orders) for name, x in arrays.items()}


METHODS: dict[str, Callable[[Arrays, Axes, Load, int], Arrays]] = {"drop": dropped, "merge": merged}
"""How a layer gets fewer experts, by name."""


def fewer_experts(
    run: Run,
    out: str | Path,
    experts: int,
    *,
    method: str = "drop",
    step: int | None = None,
    layout: Layout | None = None,
) -> Run:
    """Write a run whose mixtures have fewer experts, chosen by the loads that the run recorded (`experts.jsonl`).

    Every layer ranks its own experts by the last tenth of the recorded lines. The new run has parameters alone: train
    it from step 0 (`FromRun(out)`), or generate with it.

    Args:
      run: a trained run of a `Transformer` with `MixtureOfExperts`.
      out: the new folder.
      experts: experts of each layer that remain.
      method: a key of `METHODS`: "drop" or "merge".
      step: the checkpoint's step; the newest by default.
      layout: the new run's layout; the default device by default.

    Returns:
      the new run.

    Raises:
      ConfigError: the model has no such experts, or a setting is out of its range.
      RunError: the run recorded no loads, `out` exists already or is in a bucket, or `run` has no checkpoint.
      CheckpointError: a checkpoint cannot be read.
    """
    model = with_experts(run.config.model, experts)
    if method not in METHODS:
        raise ConfigError(f"method = {method!r}: must be one of {', '.join(METHODS)}{near(method, METHODS)}")
    if run.config.stored is not None:
        raise ConfigError(
            f"{run.place} stores its matrices as {run.config.stored.describe()}; write plain arrays first, with "
            f"jaxscale merge {run.place} OUT, and prune that run"
        )
    loads = loads_of(run)
    check_new(out)
    step = run.last_step() if step is None else step
    assert isinstance(run.config.model, TransformerConfig)
    params = reduced(run.config.model, jax.tree.map(np.asarray, run.params(step)), loads, experts, method)
    config = dataclasses.replace(run.config, model=model, start=None, adapters=None, layout=layout)
    facts: dict[str, Any] = {
        "pruned": {"run": str(run.path.absolute()), "id": run.info.get("id"), "step": step, "method": method}
    }
    new = begin(run, out, config, facts, "pruning")
    shardings = shardings_of(describe_model(model)[1], layout)
    save_params(new, jax.device_put(params, shardings), layout)
    finish(new, "pruned")
    return new


def with_experts(model: object, experts: int) -> TransformerConfig:
    """Return a model's config with fewer experts.

    Args:
      model: the config.
      experts: the new number.

    Raises:
      ConfigError: it has no experts that can be fewer, or not as many.
    """
    mixture = getattr(model, "mlp", None)
    if not isinstance(model, TransformerConfig) or not isinstance(mixture, MixtureOfExperts) or model.blocks:
        raise ConfigError(
            f"experts = {experts}: prunes a Transformer whose mlp is @MixtureOfExperts(), and this model's is not; "
            "jaxscale fold removes layers of any Transformer"
        )
    check_whole("experts", experts)
    if not mixture.top_k <= experts < mixture.experts:
        raise ConfigError(
            f"experts = {experts}: must be a whole number from {mixture.top_k}, the experts of a token, to "
            f"{mixture.experts - 1}, one fewer than there are"
        )
    return dataclasses.replace(model, mlp=dataclasses.replace(mixture, experts=experts))


def loads_of(run: Run) -> dict[int, Load]:
    """Return how often each expert was chosen, by layer, in the last tenth of the lines that a run recorded.

    Args:
      run: the run.

    Raises:
      RunError: it recorded none.
    """
    routing = read_experts(run.path / FILE)
    if not routing:
        raise RunError(
            f"{run.place} has no {FILE} with the loads of its experts; train it for some steps first, with "
            f"jaxscale train --from {run.place} CONFIG"
        )
    loads: dict[int, Load] = {}
    for step in sorted(routing)[-max(1, len(routing) // 10) :]:
        for layer, at in routing[step].items():
            loads[layer] = loads.get(layer, 0.0) + np.array(at.load, np.float64)
    return loads


def reduced(
    model: TransformerConfig, params: Tree, loads: Mapping[int, Load], experts: int, method: str = "drop"
) -> Tree:
    """Return the parameters of a model with fewer experts.

    Args:
      model: the trained model's config.
      params: its parameters, NumPy arrays.
      loads: how often each expert was chosen, by the number of the layer.
      experts: experts of each layer that remain.
      method: a key of `METHODS`.

    Raises:
      RunError: a layer has no load.
    """

    def one(number: int, arrays: Arrays, axes: Axes) -> Arrays:
        if number not in loads:
            raise RunError(f"layer {number} has experts and no recorded load; train the run for more steps")
        return METHODS[method](arrays, axes, loads[number], experts)

    return each_layer(model, params, one)


def each_layer(model: TransformerConfig, params: Tree, change: Callable[[int, Arrays, Axes], Arrays]) -> Tree:
    """Return a model's parameters with every layer of experts changed.

    Args:
      model: the model's config.
      params: its parameters, NumPy arrays.
      change: returns a layer's arrays by name; called with the number of the layer, its arrays, and the axes of each.
    """
    infos, first = describe_model(model)[1], 0
    runs = dict(params["runs"])
    for name, run in infos["runs"].items():
        blocks = dict(runs[name]["blocks"])
        repeats = jax.tree.leaves(run)[0].shape[0]
        for place, (key, info) in enumerate(run["blocks"].items()):
            if "router" not in info.get("mlp", {}):
                continue
            own, structure = jax.tree_util.tree_flatten_with_path(blocks[key]["mlp"])
            arrays = {jax.tree_util.keystr(path, simple=True, separator="/"): x for path, x in own}
            axes = {k: i.axes[1:] for k, i in zip(arrays, jax.tree.leaves(info["mlp"]), strict=True)}
            layers = [
                change(first + repeat * len(blocks) + place, {k: x[repeat] for k, x in arrays.items()}, axes)
                for repeat in range(repeats)
            ]
            stacked = [np.stack([layer[k] for layer in layers]) for k in arrays]
            blocks[key] = {**blocks[key], "mlp": jax.tree.unflatten(structure, stacked)}
        runs[name] = {**runs[name], "blocks": blocks}
        first += repeats * len(blocks)
    return {**params, "runs": runs}


def ordered(arrays: Arrays, axes: Axes, order: Int[np.ndarray, " n"]) -> Arrays:
    """Return a layer with some of its experts, or all of them in another order.

    Args:
      arrays: the layer's, by name.
      axes: the logical axes of each.
      order: the experts, by their numbers now.
    """
    return {k: np.take(x, order, at) if (at := _place(axes[k])) is not None else x for k, x in arrays.items()}


def _place(axes: tuple[str, ...]) -> int | None:
    """The dimension of experts, if there is one."""
    return next((d for d, a in enumerate(axes) if a in ("experts", "router")), None)


def _orders(arrays: Arrays, axes: Axes, onto: Int[np.ndarray, " x"], used: np.ndarray) -> Int[np.ndarray, "x m"]:
    """Return each expert's hidden features in the order of those of the expert that it joins, by their inner products.

    Args:
      arrays: of the layer.
      axes: of each.
      onto: the expert that each joins.
      used: which experts have a share.
    """
    parts = []
    for name in _MATRICES:
        if name in arrays:
            hidden = axes[name].index("expert_mlp")
            parts.append(np.swapaxes(np.asarray(arrays[name], np.float64), hidden, 1))
    features = np.concatenate(parts, axis=2)  # (experts, hidden, weights)
    orders = np.tile(np.arange(features.shape[1]), (len(onto), 1))
    for expert, other in enumerate(onto):
        if expert != other and used[expert]:
            orders[expert] = linear_sum_assignment(features[other] @ features[expert].T, maximize=True)[1]
    return orders


def _mean(
    x: np.ndarray, axes: tuple[str, ...], share: Float[np.ndarray, "n x"], orders: Int[np.ndarray, "x m"]
) -> np.ndarray:
    """Return the mean over experts of each group, in float64."""
    at = _place(axes)
    if at is None:
        return x
    each = np.moveaxis(x, at, 0)
    if "expert_mlp" in axes:
        hidden = axes.index("expert_mlp")
        each = np.stack([np.take(e, order, hidden - 1) for e, order in zip(each, orders, strict=True)])
    mean = np.tensordot(share, each.astype(np.float64), 1)
    return np.moveaxis(mean, 0, at).astype(x.dtype)
