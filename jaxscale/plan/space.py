"""Space of a search: the layouts of a number of devices that a model allows, with memory policies and micro-batches."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

from jaxscale.errors import ConfigError, LayoutError
from jaxscale.layout import Layout, Pipeline
from jaxscale.layout.axes import MESH_AXES
from jaxscale.nn import POLICIES, ContextKernel, MixtureOfExperts, dot_product_attention
from jaxscale.optim import check_state
from jaxscale.plan.memory import held_bytes
from jaxscale.step import TrainConfig, blueprint_of

OVER_SLICES = ("pipeline", "data", "fsdp")
"""Mesh axes that a search tries over slices. The others send in every layer, and are searched where they are named."""


@dataclasses.dataclass(frozen=True)
class Space:
    """Choices for each part of a layout; every combination of them that the model allows is a candidate.

    Args:
      axes: mesh axes that may have more than one device; `None`: all that the model can be sharded over.
      policies: names of memory policies.
      accumulate: numbers of micro-batches a step without pipeline stages.
      schedules: pipeline schedules.
      per_stage: numbers of a schedule's micro-batches, as multiples of the number of stages.
      stages: most pipeline stages.
      microbatches: most micro-batches of a schedule.
    """

    axes: tuple[str, ...] | None = None
    policies: tuple[str, ...] = tuple(POLICIES)
    accumulate: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    schedules: tuple[str, ...] = ("lockstep", "1f1b", "interleaved", "zb-h1")
    per_stage: tuple[int, ...] = (1, 2, 4, 8)
    stages: int = 16
    microbatches: int = 64


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One candidate of a search.

    Args:
      config: the changed settings of the run.
      policy: name of the memory policy; "its own" for a model without memory policies.
      floor: least bytes on a device: those of state and gradients.
    """

    config: TrainConfig
    policy: str
    floor: int


def axes_of(config: TrainConfig) -> tuple[str, ...]:
    """Return the mesh axes that a run's model can be sharded over."""
    model: Any = config.model
    kernel, mlp = getattr(model, "attention", None), getattr(model, "mlp", None)
    able = {
        "replica": False,  # without `LocalSteps` the same as `data`; with it, not a choice of layout
        # flash attention needs whole sequences
        "context": kernel is dot_product_attention or isinstance(kernel, ContextKernel),
        "expert": isinstance(mlp, MixtureOfExperts),
    }
    return tuple(axis for axis in MESH_AXES if able.get(axis, True))


def meshes(devices: int, axes: tuple[str, ...]) -> Iterator[dict[str, int]]:
    """Yield every factoring of a number of devices over some mesh axes, as sizes by axis."""
    if not axes:
        if devices == 1:
            yield {}
        return
    for size in (d for d in range(1, devices + 1) if devices % d == 0):
        for rest in meshes(devices // size, axes[1:]):
            yield {axes[0]: size, **rest}


def candidates(config: TrainConfig, devices: int, space: Space, slices: int = 1) -> Iterator[Candidate]:
    """Yield the candidates of a space that can be laid out, with the run's own batch, rules and sequence.

    Args:
      config: the run's settings.
      devices: number of devices of the meshes.
      space: the space.
      slices: number of TPU slices that the devices are of; without `Layout.across`, each of `OVER_SLICES` is a choice.
    """
    models: dict[str, Any] = {} if hasattr(config.model, "memory") else {"its own": config.model}
    for name in space.policies if not models else ():
        with contextlib.suppress(ConfigError):  # some policies tile, which experts do not support
            models[name] = dataclasses.replace(config.model, memory=name)  # type: ignore[type-var]
    blueprint, _ = blueprint_of(config)
    infos = blueprint.algorithm.infos(blueprint)
    checked: dict[tuple[str, int], TrainConfig] = {}
    for sizes in meshes(devices, space.axes or axes_of(config)):
        for layout in _layouts(config, sizes, slices) if sizes.get("pipeline", 1) <= space.stages else ():
            try:
                check_state(blueprint.tx, blueprint.infos, layout)
                state, gradients, _ = held_bytes(blueprint, infos, layout)
                batches = list(_batches(config, layout, space))
            except (LayoutError, ConfigError):  # cannot be laid out
                continue
            for accumulate, pipeline in batches:
                scheduled = dataclasses.replace(layout, pipeline=pipeline) if pipeline else layout
                for name, model in models.items():
                    if (name, accumulate) not in checked:
                        checked[name, accumulate] = dataclasses.replace(config, model=model, accumulate=accumulate)
                    yield Candidate(_on(checked[name, accumulate], scheduled), name, state + gradients)


def _on(config: TrainConfig, layout: Layout) -> TrainConfig:
    """Return the settings on a layout without the checks of `TrainConfig`, which depend on no layout and take long."""
    values = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
    changed = object.__new__(type(config))
    changed.__dict__.update(values, layout=layout)
    return changed


def _layouts(config: TrainConfig, sizes: dict[str, int], slices: int) -> Iterator[Layout]:
    assert config.layout is not None
    mesh = ",".join(f"{axis}={size}" for axis, size in sizes.items() if size > 1) or "data=1"
    named = config.layout.across
    over = [axis for axis in (OVER_SLICES if named is None else (named,)) if sizes.get(axis, 1) % slices == 0]
    for across in over if slices > 1 else [named]:
        layout = dataclasses.replace(config.layout.specification, mesh=mesh, pipeline=None, across=across)
        cut = sizes.get("tensor", 1) > 1 and isinstance(layout.rules, str)
        for sharded in (False, True) if cut else (layout.sequence_sharded,):
            yield dataclasses.replace(layout, sequence_sharded=sharded)


def _batches(config: TrainConfig, layout: Layout, space: Space) -> Iterator[tuple[int, str | Pipeline | None]]:
    """Yield numbers of accumulated micro-batches, and pipelines (`None` without stages), which gather as the run's."""
    assert config.layout is not None
    of_run = config.layout.schedule
    layout.spec(("batch", "seq"), (config.batch_size, config.seq_len), kind="activations", name="a batch")
    rows = config.batch_size // layout.split("batch")
    if layout.stages == 1:
        yield from ((n, None) for n in space.accumulate if rows % n == 0)
        return
    for name in space.schedules:
        for n in space.per_stage:
            if n * layout.stages <= space.microbatches and rows % (n * layout.stages) == 0:
                short = f"{name}:{n * layout.stages}"
                pipeline = dataclasses.replace(Pipeline.of(short), gather=of_run.gather, vocabulary=of_run.vocabulary)
                yield 1, short if pipeline == Pipeline.of(short) else pipeline
