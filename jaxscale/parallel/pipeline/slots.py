"""Lower a schedule to arrays that the executor reads at each tick: which stage runs what, from which buffer slot."""

from __future__ import annotations

import dataclasses
import heapq

import numpy as np

from jaxscale.layout.table import B, F, Op, Table, W, stage_of, validate, virtual_stage

_BUFFER = {
    "begin_put": "inputs",
    "f_in": "inputs",
    "f_up": "inputs",
    "f_down": "inputs",
    "b_in": "inputs",
    "end_put": "cotangents",
    "b_ct": "cotangents",
    "b_up": "cotangents",
    "b_down": "cotangents",
    "b_pairs": "pairs",
    "w_pairs": "pairs",
}


@dataclasses.dataclass(frozen=True, eq=False)
class Slots:
    """A lowered table.

    Args:
      size: slots of each buffer: stage "inputs", stored until their backward phase; output "cotangents"; and "pairs",
        stored until their weight-gradient phase. Each has one more slot, the last, for idle stages.
      mine: int32 (ticks, stages) or (ticks, stages, 3) by name: the slot that each read or write uses (`f_up`: for the
        output of the stage before, `f_down`: of the one after; `b_up` and `b_down`: for their cotangents); and for each
        phase the virtual stage (`v`, -1 when idle), the chunk (`c`) and the micro-batch (`m`).
      all: by name, equal on every stage: which phases any stage runs (`run`, bool (ticks, 3)); and the micro-batch
        whose embedding (`begin`), loss (`end`) or embedding's backward pass (`back`) runs, int32 (ticks,), or -1.
    """

    size: dict[str, int]
    mine: dict[str, np.ndarray]
    all: dict[str, np.ndarray]


def lower(table: Table) -> Slots:
    """Assign buffer slots by lifetime, so that each buffer has exactly as many slots as its peak needs.

    Args:
      table: the schedule.

    Raises:
      LayoutError: see `jaxscale.layout.table.validate`.
    """
    t, when = table, validate(table)
    ticks, last = len(t.slots), t.stages * t.chunks - 1
    mine = {name: np.full((ticks, t.stages), -1) for name in _BUFFER}
    size = dict.fromkeys(("inputs", "cotangents", "pairs"), 0)
    for s in range(t.stages):
        for buffer, spans in _lifetimes(t, when, s, last).items():
            size[buffer] = max(size[buffer], _assign_slots(spans, mine, s))
    for name, buffer in _BUFFER.items():
        mine[name][mine[name] < 0] = size[buffer]
    chunk, micro = np.divmod(t.slots, t.microbatches)
    busy = t.slots >= 0
    numbers = [[virtual_stage(s, c, t.stages, t.placement) for c in range(t.chunks)] for s in range(t.stages)]
    v = np.where(busy, np.asarray(numbers)[np.arange(t.stages)[:, None], chunk], -1)
    mine |= {"v": v, "c": np.where(busy, chunk, 0), "m": np.where(busy, micro, 0)}

    def micro_of(phase: int, virtual: int) -> np.ndarray:
        return np.where(v[..., phase] == virtual, micro[..., phase], -1).max(axis=1)

    every = {"begin": micro_of(F, 0), "end": micro_of(F, last), "back": micro_of(B, 0)}
    alike: dict[str, np.ndarray] = {name: a.astype(np.int32) for name, a in every.items()}
    alike["run"] = np.any(busy, axis=1)
    return Slots(size, {name: a.astype(np.int32) for name, a in mine.items()}, alike)


Span = tuple[int, int, list[tuple[str, int]]]
"""The first and last tick at which a value is stored, and the reads and writes that need its slot: (name, tick)."""


def _lifetimes(t: Table, when: dict[Op, int], stage: int, last: int) -> dict[str, list[Span]]:
    """Return the lifetimes of a stage's values. A value sent at a tick is stored from the next tick on."""
    spans: dict[str, list[Span]] = {"inputs": [], "cotangents": [], "pairs": []}
    for k in range(t.items):
        f = when[F, stage, k]
        b = when[B, stage, k] if t.phases > 1 else f
        read = [("f_in", f)] + ([("b_in", b)] if t.phases > 1 else [])
        before = [when[op] for op, _ in t.needs((F, stage, k))]
        held, put = (before[0] + 1, (_port(t, F, stage, k), before[0])) if before else (f, ("begin_put", f))
        spans["inputs"].append((held, b, [put, *read]))
        if t.phases == 1:
            continue
        after = [when[op] for op, _ in t.needs((B, stage, k))[1:]]
        ends = virtual_stage(stage, k // t.microbatches, t.stages, t.placement) == last
        held, put = (f, ("end_put", f)) if ends else (after[0] + 1, (_port(t, B, stage, k), after[0]))
        spans["cotangents"].append((held, b, [put, ("b_ct", b)]))
        if t.phases == 3:
            w = when[W, stage, k]
            spans["pairs"].append((b, w, [("b_pairs", b), ("w_pairs", w)]))
    return spans


def _port(t: Table, phase: int, stage: int, item: int) -> str:
    """Return by which slot a stage receives an item's input (F) or its output's cotangent (B)."""
    if t.placement == "ring":
        return "f_up" if phase == F else "b_down"
    virtual = virtual_stage(stage, item // t.microbatches, t.stages, t.placement)
    sender, _ = stage_of(virtual + (-1 if phase == F else 1), t.stages, t.placement)
    # where the V turns, a stage sends to itself, as if from the stage that it does not have
    up = sender < stage or (sender == stage and stage == 0)
    return f"{'f' if phase == F else 'b'}_{'up' if up else 'down'}"


def _assign_slots(spans: list[Span], mine: dict[str, np.ndarray], stage: int) -> int:
    """Assign a slot to each span, and return the number of slots."""
    free: list[int] = []
    held: list[tuple[int, int]] = []  # last tick, slot
    slots = 0
    for first, last, uses in sorted(spans):
        while held and held[0][0] < first:
            heapq.heappush(free, heapq.heappop(held)[1])
        if not free:
            free.append(slots)
            slots += 1
        slot = heapq.heappop(free)
        heapq.heappush(held, (last, slot))
        for name, tick in uses:
            mine[name][tick, stage] = slot
    return slots
