"""Predict the collectives of a training step from its traced program, without a compiler or devices.

The step constrains parameters, activations and gradients to the layout's shardings. Its collectives are the changes
from one sharding to the next (`jaxscale.plan.partition`), for any layers, objective and optimizer.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
from jax.sharding import NamedSharding

from jaxscale.errors import ConfigError
from jaxscale.hardware import Topology, topology
from jaxscale.layout import Boxes, Layout
from jaxscale.layout.table import B, F, W
from jaxscale.plan.collectives import Collective
from jaxscale.plan.compile import abstract_batch
from jaxscale.plan.partition import Partitioned, partitioned
from jaxscale.step import TrainConfig, blueprint_of, step_of
from jaxscale.step.stage_order import by_stage
from jaxscale.step.step import batch_shardings


def predict(
    config: TrainConfig, hardware: str | Topology, *, every_branch: bool = False, repeats: bool | None = None
) -> list[Collective]:
    """Return the predicted collectives of a training step, with named scopes and source lines.

    A compiler may replace some of them by others, merges small ones, and adds a few of scalars
    (`experiments/planner_accuracy/COMMUNICATION.md` compares). A ragged all-to-all of experts' tokens is counted as
    if no token were dropped. See `jaxscale.plan.partition.partitioned` for primitives that have no rule.

    Args:
      config: the run's settings, with a layout.
      hardware: a topology or its name, such as "v5p:8x8x8"; only the number and the kind of its devices matter.
      every_branch: count a pipeline's branches at every tick and the optimizer's periodic work at every update, as in
        the text of a compiled program, instead of as often as they are taken.
      repeats: count a gather again that equals an earlier one, as XLA does for GPUs: weights of a backward pass are
        gathered once for recomputed operations and once more. By default `True` on GPUs only.

    Raises:
      ConfigError: the run has no layout, or its layers refuse it.
      LayoutError: something cannot be laid out, or the topology is unknown.
    """
    return list(partition(config, hardware, every_branch=every_branch, repeats=repeats).collectives)


def partition(
    config: TrainConfig, hardware: str | Topology, *, every_branch: bool = False, repeats: bool | None = None
) -> Partitioned:
    """Partition a training step: return what one device computes and sends; arguments as for `predict`."""
    if config.layout is None:
        raise ConfigError("a run with layout=None is for one local device; give it Layout('data=1') to plan it")
    target = topology(hardware) if isinstance(hardware, str) else hardware
    kind = target.chip.kinds[0] if target.chip.kinds else None
    layout = config.layout.abstract(target.devices, kind=kind)
    config = dataclasses.replace(config, layout=layout, guards=())
    blueprint, schedule = blueprint_of(config)
    blueprint = by_stage(blueprint)
    batch = batch_shardings(layout, config.objective.inputs(config), config.batch_size)
    shardings = (blueprint.shardings(), batch)
    with layout:
        args = (blueprint.abstract_state(), abstract_batch(config))
    boxes: Any = jax.tree.map(functools.partial(_boxes, layout), args, shardings)
    shares = None if every_branch else _branch_shares(config, layout) if layout.stages > 1 else {}
    platform = {"gpu": "cuda"}.get(target.chip.platform, target.chip.platform)
    step = step_of(blueprint, config, schedule)
    repeats = target.chip.platform == "gpu" if repeats is None else repeats
    options: dict[str, Any] = dict(platform=platform, branch_shares=shares, repeats=repeats)
    return partitioned(step, args, boxes, layout, out=boxes[0], **options)


def sized(layout: Layout, devices: int) -> Layout:
    """Return a layout without devices whose mesh has no size of -1.

    Args:
      layout: any layout.
      devices: number of devices that the mesh fills.

    Raises:
      LayoutError: the mesh needs more devices, or they do not divide into a size of -1.
    """
    return layout.abstract(devices)


def _boxes(layout: Layout, x: jax.Array | jax.ShapeDtypeStruct, sharding: NamedSharding) -> Boxes:
    """Return how an array is sharded, without mesh axes of size 1."""
    split = Boxes.of(sharding.spec, len(x.shape)).split
    return Boxes(tuple(tuple(a for a in axes if layout.sizes[a] > 1) for axes in split))


def _branch_shares(config: TrainConfig, layout: Layout) -> dict[str, float]:
    """Return the share of a pipeline's ticks that enter each branch, by named scope of `parallel/pipeline/executor`."""
    rows, split = config.micro_batch, layout.split("batch")
    table = layout.schedule.table(layout.stages, layout.schedule.microbatches_of(layout.stages, rows, split))
    ticks = len(table.slots)
    entered = (table.slots >= 0).any(axis=1).sum(axis=0)
    phases = {"forward_phase": F, "backward_phase": B, "weights_phase": W}
    ends = dict.fromkeys(("begin_phase", "end_phase", "back_phase"), table.microbatches / ticks)
    return {name: float(entered[phase]) / ticks for name, phase in phases.items()} | ends
