"""The settings of each degree of context parallelism, with `train.batching`: layouts, sizes of rows, and costs."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh

from jaxscale.data.batching import HDP, SequenceCosts
from jaxscale.errors import ConfigError, LayoutError
from jaxscale.layout import Layout, shardings_of
from jaxscale.layout.axes import MESH_AXES
from jaxscale.layout.layout import PlacedLayout
from jaxscale.models.base import CountsFlops, CutsSequences
from jaxscale.nn import flash_attention
from jaxscale.step.backprop import Backprop
from jaxscale.step.config import TrainConfig
from jaxscale.step.objective import NextToken
from jaxscale.step.state import Blueprint
from jaxscale.step.tracking import histories

EXCHANGE, LATENCY = 0.01, 7.0
"""Without `costs` of the planner: the exchange of a token, and the latency of each further device of a ring, over the
seconds of a token's linear arithmetic. About what `jaxscale.plan.sequence_costs` predicts for Llama 3 8B on one host of
H100s (`experiments/layouts_per_step/costs.json`)."""


def settings_by_degree(config: TrainConfig, blueprint: Blueprint) -> dict[int, TrainConfig]:
    """Return the settings of each degree's micro-batches: their layout, `batch_size` rows, and `seq_len` tokens.

    Args:
      config: the run's settings, with `batching`.
      blueprint: the run's blueprint.

    Raises:
      ConfigError: `batching` does not work with another setting.
      LayoutError: the mesh cannot be divided, or an array would move.
    """
    refuse(config, blueprint)
    layout, batching = config.layout, config.batching
    assert layout is not None and batching is not None
    axis, name = axis_of(layout), type(batching).__name__
    size = layout.sizes[axis]
    possible = [d for d in range(1, size + 1) if size % d == 0]
    degrees = batching.degrees
    if degrees is None:
        known = [d for d in possible if d.bit_count() == 1] if batching.costs is None else batching.costs.degrees
        degrees = tuple(d for d in known if d in possible)
    wrong = sorted(set(degrees) - set(possible))
    if wrong or not degrees:
        raise LayoutError(
            f"{layout} has {axis}={size}, which groups of {wrong[0] if wrong else 'no'} devices do not divide; use "
            f"{name}.degrees of {', '.join(map(str, possible))}"
        )
    layouts = {d: with_context(layout, axis, d) for d in sorted(set(degrees))}
    for other in layouts.values():
        _check_unmoved(blueprint, layout, other, name)
    capacity = _capacity(config, layouts)
    rows = layout.split("batch")
    plain: dict[str, Any] = dict(batching=None, eval_batches=0, evaluate_on={})
    return {
        d: dataclasses.replace(config, layout=each, batch_size=rows // d, seq_len=d * capacity, **plain)
        for d, each in layouts.items()
    }


def refuse(config: TrainConfig, blueprint: Blueprint) -> None:
    """Check that a run's other settings work with `batching`.

    Args:
      config: the run's settings.
      blueprint: the run's blueprint.

    Raises:
      ConfigError: a setting does not.
      LayoutError: the layout does not.
    """
    assert config.batching is not None
    layout, planner = config.layout, type(config.batching).__name__
    name = f"train.batching = {planner}()"
    if layout is None:
        raise ConfigError(f"{name} divides the devices of a mesh, and train.layout is None; set Layout('fsdp=-1')")
    for axis in ("pipeline", "expert", "context"):
        if layout.sizes[axis] > 1:
            raise LayoutError(
                f"{name} divides the mesh axis fsdp or data by itself, and does not work with {axis}="
                f"{layout.sizes[axis]}; use a mesh of data, fsdp and tensor"
            )
    if layout.sizes["fsdp"] == layout.sizes["data"] == 1:
        raise LayoutError(f"{name} divides the mesh axis fsdp or data, and {layout} has neither; use such as fsdp=8")
    if isinstance(config.batching, HDP):
        _refuse_hdp(layout, blueprint, config.batching)
    objective, algorithm = type(config.objective), type(config.algorithm)
    if objective is not NextToken:
        raise ConfigError(f"{name} trains with NextToken(), not {objective.__name__}; leave out train.batching")
    if algorithm is not Backprop:
        raise ConfigError(f"{name} trains by Backprop(), not {algorithm.__name__}; leave out train.batching")
    if not config.segments:
        raise ConfigError(f"{name} moves documents between rows, which needs train.segments = True")
    if config.accumulate > 1:
        raise ConfigError(
            f"{name} chooses the number of micro-batches itself; leave out train.accumulate = {config.accumulate}, and "
            f"set {planner}.capacity to limit the tokens of a micro-batch"
        )
    if config.histograms is not None:
        raise ConfigError(f"{name} makes no histograms of gradients; leave out train.histograms")
    if tracked := next(iter(histories(blueprint)), None):
        raise ConfigError(
            f"{name} keeps no history of scales, and {tracked} has delayed scaling; use scaling by the current values"
        )
    attention = getattr(config.model, "attention", None)
    if getattr(attention, "func", attention) is flash_attention and config.batching.degrees != (1,):
        raise ConfigError(
            f"{name} shards long sequences over a group of devices, and flash_attention needs whole ones; set "
            f"Transformer.attention = @RingAttention(), or {planner}.degrees = (1,)"
        )
    if getattr(config.model, "soft_prompt", 0):
        raise ConfigError(f"{name} moves documents between rows, and a soft prompt begins each row; use LoRA()")


def _refuse_hdp(layout: Layout, blueprint: Blueprint, batching: HDP) -> None:
    """Check that groups of devices can have programs of their own."""
    if batching.offload:
        raise ConfigError(
            "HDP.offload = True is planned, not trained; leave it out, and set Transformer.memory to a policy that "
            "offloads"
        )
    if layout.split("batch") != layout.sizes["data"]:
        raise LayoutError(
            f"train.batching = HDP() runs programs on some devices of the mesh axis data, each of which holds whole "
            f"parameters, and {layout} has other axes of rows; use data={layout.split('batch')}, or FlexSP()"
        )
    for infos in (blueprint.infos, blueprint.frozen):
        shardings = jax.tree.leaves(shardings_of(infos, layout))
        for i, sharding in zip(jax.tree.leaves(infos), shardings, strict=True):
            if "data" in jax.tree.leaves(tuple(sharding.spec)):
                raise LayoutError(
                    f"train.batching = HDP() runs programs on some devices of the mesh axis data, over which {layout} "
                    f"shards {i.path}; use rules that shard states alone, such as rules='zero1', or FlexSP()"
                )


def axis_of(layout: Layout) -> str:
    """Return the mesh axis whose devices share the sequences of a step.

    Args:
      layout: the run's layout.
    """
    return "fsdp" if layout.sizes["fsdp"] > 1 else "data"


def with_context(layout: Layout, axis: str, degree: int) -> Layout:
    """Return a layout on the same devices in the same order, with a part of a mesh axis as `context`.

    What the rules for parameters, gradients and state shard over the axis is sharded over both.

    Args:
      layout: a layout whose mesh has no axes between `axis` and `tensor`.
      axis: the mesh axis to divide.
      degree: the size of `context`.
    """
    if degree == 1:
        return layout
    rules = layout.resolved_rules

    def over(targets: dict[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
        both = {axis: (axis, "context")}
        return {name: tuple(m for a in target for m in both.get(a, (a,))) for name, target in targets.items()}

    kinds: Any = {kind: over(getattr(rules, kind)) for kind in ("params", "grads", "opt_state")}
    sizes = layout.sizes | {axis: layout.sizes[axis] // degree, "context": degree}
    shape, mesh = tuple(sizes.values()), layout.device_mesh
    if isinstance(mesh, AbstractMesh):
        placement: Any = AbstractMesh(
            shape, MESH_AXES, axis_types=mesh.axis_types, abstract_device=mesh.abstract_device
        )  # fmt: skip
    else:
        placement = Mesh(mesh.devices.reshape(shape), MESH_AXES, axis_types=mesh.axis_types)
    text = ",".join(f"{a}={n}" for a, n in sizes.items())
    return PlacedLayout(text, dataclasses.replace(rules, **kinds), across=layout.across, placement=placement)


def _check_unmoved(blueprint: Blueprint, layout: Layout, other: Layout, name: str) -> None:
    """Check that two layouts put the same shards of parameters and gradients on the same devices."""
    if isinstance(layout.device_mesh, AbstractMesh):
        return
    for infos, kind in ((blueprint.infos, "params"), (blueprint.frozen, "params"), (blueprint.infos, "grads")):
        before, after = (jax.tree.leaves(shardings_of(infos, one, kind)) for one in (layout, other))  # type: ignore[arg-type]
        for i, a, b in zip(jax.tree.leaves(infos), before, after, strict=True):
            if not a.is_equivalent_to(b, len(i.shape)):
                raise LayoutError(
                    f"train.batching = {name}(): {i.path} would move between devices from {layout} to {other}; use "
                    "rules='fsdp_tensor'"
                )


def unit_of(config: TrainConfig, layouts: dict[int, Layout]) -> int:
    """Return the number of tokens whose multiples a device can have of a row at every degree.

    Args:
      config: the run's settings.
      layouts: the layout of each degree.
    """
    unit = 1
    for degree, layout in layouts.items():
        with layout:
            of_row = config.model.length_unit() if isinstance(config.model, CutsSequences) else 1
        of_row = math.lcm(of_row, *(layout.split(a) for a in ("seq", "residual_seq", "expert_seq")))
        unit = math.lcm(unit, of_row // math.gcd(of_row, degree))
    return unit


def evaluation_of(config: TrainConfig, settings: dict[int, TrainConfig]) -> TrainConfig:
    """Return the settings of evaluations: on the layout of the largest degree, with a length that its devices divide.

    Args:
      config: the run's settings.
      settings: the settings of each degree.
    """
    largest = max(settings)
    layout = settings[largest].layout
    assert layout is not None
    multiple = largest * unit_of(config, {largest: layout})
    seq_len = -(-config.seq_len // multiple) * multiple
    return dataclasses.replace(config, layout=layout, batching=None, seq_len=seq_len)


def _capacity(config: TrainConfig, layouts: dict[int, Layout]) -> int:
    """Return the tokens of a micro-batch on a device."""
    batching, name = config.batching, type(config.batching).__name__
    assert batching is not None
    unit = unit_of(config, layouts)
    largest = max(layouts)
    least = -(-config.seq_len // (largest * unit)) * unit
    if batching.capacity is None:
        capacity = least if batching.costs is None else batching.costs.capacity // unit * unit
        if capacity < least:
            raise ConfigError(
                f"{name}.costs hold {capacity} tokens on a device, and train.seq_len = {config.seq_len} on {largest} "
                f"devices needs {least}; use a train.seq_len of at most {capacity * largest}"
            )
        return capacity
    if batching.capacity < least or batching.capacity % unit:
        nearest = max(least, round(batching.capacity / unit) * unit)
        raise ConfigError(
            f"{name}.capacity = {batching.capacity}: must be a multiple of {unit}, and at least {least}, for "
            f"train.seq_len = {config.seq_len} on {largest} devices; the nearest that works is {nearest}"
        )
    return batching.capacity


def costs_of(config: TrainConfig, capacity: int, degrees: tuple[int, ...]) -> SequenceCosts:
    """Return the costs of tokens that a run plans with.

    Args:
      config: the run's settings, with `batching`.
      capacity: tokens of a micro-batch on a device.
      degrees: the degrees.
    """
    assert config.batching is not None
    costs = config.batching.costs
    if costs is None:
        linear, quadratic = 1.0, 0.0
        if isinstance(config.model, CountsFlops):  # a s + b s^2 at two lengths, in units of a
            s = config.seq_len
            once, twice = (float(config.model.flops(1, n)) for n in (s, 2 * s))
            quadratic = max(0.0, (twice - 2 * once) / (2 * s**2) / ((4 * once - twice) / (2 * s)))
        exchange = {d: EXCHANGE if d > 1 else 0.0 for d in degrees}
        costs = SequenceCosts(linear, quadratic, exchange, capacity, {d: LATENCY * (d - 1) for d in degrees})
    return dataclasses.replace(costs, capacity=capacity)


def padded(costs: SequenceCosts, capacity: int) -> SequenceCosts:
    """Return costs of rows that are padded to one length, which take the seconds of so many tokens.

    Args:
      costs: costs of tokens.
      capacity: tokens of a row on a device.
    """
    latency = {d: costs.of_group(d) + costs.linear * capacity for d in costs.degrees}
    linear = 0.0 if costs.quadratic else costs.linear
    return dataclasses.replace(costs, capacity=capacity, latency=latency, linear=linear)
