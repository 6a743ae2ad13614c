"""What an algorithm sends between replicas, as a sentence for the planner's notes."""

from __future__ import annotations

from jaxscale.parallel import Float32Wire
from jaxscale.step import Blueprint
from jaxscale.units import human_bytes


def wire_notes(blueprint: Blueprint) -> list[str]:
    """Return a note on the bytes that cross the mesh axis `replica`, if the algorithm states them.

    Args:
      blueprint: the run's blueprint.
    """
    layout, algorithm = blueprint.layout, blueprint.algorithm
    sent = algorithm.wire_bytes(blueprint)
    if sent is None or layout is None:
        return []
    replicas = layout.sizes["replica"]
    if replicas == 1:
        return [f"{algorithm.describe()} sends nothing between devices for its replicas: the mesh has no axis replica"]
    every_step = Float32Wire().sent(blueprint.infos, replicas, layout)
    return [
        f"{algorithm.describe()}: each device sends {human_bytes(round(sent))} a step over replica on average; an "
        f"all-reduce of float32 gradients in every step would send {human_bytes(every_step)}"
    ]
