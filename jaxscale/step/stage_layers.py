"""Which layers of a model a pipeline stage holds."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
from flax import nnx

from jaxscale.errors import LayoutError
from jaxscale.layout import Layout, TensorInfo
from jaxscale.models.base import Stageable
from jaxscale.parallel.pipeline import Stages, assign
from jaxscale.step.state import Blueprint

Tree = Any


def stages_of(blueprint: Blueprint) -> Stages:
    """Return the layers of each stage of a model with `runs` of layers.

    Args:
      blueprint: the run's blueprint, with a pipeline, without adapters; the model is `Stageable`.

    Raises:
      LayoutError: there are more stages than layers, or layers that cannot be distributed over them.
    """
    assert blueprint.layout is not None
    runs, layout = list(blueprint.infos["runs"].values()), blueprint.layout
    uses = _uses(nnx.merge(blueprint.graphdef, blueprint.infos))
    stages, stuck = _assigned(runs, uses, layout, layout.schedule.chunks_per_stage)
    if stuck is not None:
        # raises first if the reason is another mesh axis
        layout.spec((None, *stuck.axes[1:]), stuck.shape, name=stuck.path)
        raise LayoutError(
            f"{stuck.path} {stuck.axes} of shape {stuck.shape} has to be sharded along its width over pipeline stages, "
            f"since they do not hold its layers in equal parts, but {layout.stages} stages "
            f"divide none of its dimensions; use {_ways_to_divide(runs, uses, layout)}"
        )
    return stages


def _uses(model: Stageable) -> int:
    return max(getattr(run, "uses", 1) for run in model.runs)


def _groups(runs: Sequence[Tree], uses: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return for each run of blocks how often its group repeats, and the number of layers in a group.

    A group that is applied several times (`Transformer.shared`) is as many times as many layers.
    """
    return tuple(jax.tree.leaves(run)[0].shape[0] for run in runs), tuple(len(run["blocks"]) * uses for run in runs)


def _assigned(runs: Sequence[Tree], uses: int, layout: Layout, chunks: int) -> tuple[Stages, TensorInfo | None]:
    """Assign layers to stages.

    Returns:
      The stages, and a parameter that stages do not hold in equal parts and that cannot be sharded along its width
      either, or `None`.
    """
    stages = assign(*_groups(runs, uses), layout.stages, chunks, layout.schedule.placement)
    moved = (i for n, run in enumerate(runs) if not stages.equal(n) for i in jax.tree.leaves(run))
    return stages, next((i for i in moved if not _width_divides(i, layout)), None)


def _width_divides(info: TensorInfo, layout: Layout) -> bool:
    try:
        layout.spec(info.axes, (1, *info.shape[1:]))
    except LayoutError:
        return False
    return True


def _ways_to_divide(runs: Sequence[Tree], uses: int, layout: Layout) -> str:
    """Suggest changes of the layout or the model, each of which is enough to distribute the layers over stages."""

    def fits(stages: int, chunks: int) -> bool:
        mesh = ",".join(f"{a}={stages if a == 'pipeline' else n}" for a, n in layout.sizes.items())
        try:
            return _assigned(runs, uses, dataclasses.replace(layout.specification, mesh=mesh), chunks)[1] is None
        except LayoutError:  # more stages than layers
            return False

    stages, chunks = layout.stages, layout.schedule.chunks_per_stage
    ways = ["a schedule of 1 chunk a stage, such as 'lockstep'"] if chunks > 1 and fits(stages, 1) else []
    ways += [f"pipeline={n}" for n in range(stages - 1, 1, -1) if fits(n, chunks)][:1]
    (_, *rest), (period, *remainder) = _groups(runs, uses)
    if not rest or (rest == [1] and remainder[0] < period):  # one run, or one and a remainder
        ways.append(f"a number of layers that is a multiple of {stages * chunks * period}")
    return ", or ".join(ways or ["a mesh without pipeline"])
