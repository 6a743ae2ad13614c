"""Functions that return pipeline schedules, and schedules from a file."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from jaxscale.errors import LayoutError
from jaxscale.layout.table import PHASES, B, F, Op, Table, W, needs, validate

Rank = Callable[[int, int, int, np.ndarray], object | None]
"""(stage, phase, item, how many F, B and W the stage has run) -> an order, least first; `None` holds an op back."""

ScheduleFn = Callable[..., Table]
"""(stages, microbatches) -> a table; `interleaved` takes chunks as well."""


def place(
    name: str, stages: int, microbatches: int, chunks: int, phases: int, rank: Rank, *, several: bool = False
) -> Table:
    """List scheduling: at each tick, each stage runs the op of least rank among those that can run.

    Args:
      name, stages, microbatches, chunks, phases: the table's.
      rank: see `Rank`.
      several: one op of each phase in a tick, instead of one.

    Raises:
      LayoutError: at some tick nothing can run: the order deadlocks.
    """
    when: dict[Op, int] = {}
    rows: list[np.ndarray] = []
    done = np.zeros((stages, 3), int)
    left = {(s, p): list(range(chunks * microbatches)) for s in range(stages) for p in range(phases)}
    while any(left.values()):
        tick, before = len(rows), len(when)
        rows.append(np.full((stages, 3), -1))
        for s in range(stages):
            for group in [(p,) for p in range(phases)] if several else [tuple(range(phases))]:
                ready = []
                for p in group:
                    for k in left[s, p]:
                        waits = needs((p, s, k), stages, microbatches, chunks)
                        if any(when.get(op, tick + 1) + gap > tick for op, gap in waits):
                            continue
                        order = rank(s, p, k, done[s])
                        if order is not None:
                            ready.append((order, p, k))
                if ready:
                    _, p, k = min(ready)
                    rows[tick][s, p] = k
                    when[p, s, k] = tick
                    done[s, p] += 1
                    left[s, p].remove(k)
        if len(when) == before:
            (s, p), items = next((key, items) for key, items in left.items() if items)
            stuck = Table(name, stages, microbatches, chunks, np.empty((0, stages, 3)), phases).say((p, s, items[0]))
            raise LayoutError(
                f"schedule '{name}' deadlocks: at tick {tick} nothing can run, {stuck} among what is left"
            )
    return Table(name, stages, microbatches, chunks, np.stack(rows), phases)


def gpipe(stages: int, microbatches: int) -> Table:
    """All forwards, then all backwards (Huang et al. 2019). Stash: every micro-batch. Loses nothing in lockstep."""
    m = range(microbatches)
    return place("gpipe", stages, microbatches, 1, 2, _in_order([_warm(m, m, microbatches)] * stages))


def one_f_one_b(stages: int, microbatches: int) -> Table:
    """One forward, one backward in turn (PipeDream-Flush, Narayanan et al. 2021). GPipe's bubble, stash of `stages`.

    Where devices wait for each other's phases it idles more, since stages alternate out of step: see `lockstep`.
    """
    m = range(microbatches)
    orders = [_warm(m, m, min(microbatches, stages - 1 - s)) for s in range(stages)]
    return place("1f1b", stages, microbatches, 1, 2, _in_order(orders))


def interleaved(stages: int, microbatches: int, chunks: int = 2) -> Table:
    """1F1B over `chunks` pieces per stage, which divides the bubble by them (Narayanan et al. 2021).

    Raises:
      LayoutError: micro-batches that are no multiple of the stages.
    """
    if microbatches % stages:
        fit = max(stages, round(microbatches / stages) * stages)
        raise LayoutError(
            f"schedule 'interleaved' goes round in groups of {stages} micro-batches, one a stage, and {microbatches} "
            f"is no multiple of that; the nearest is {fit}"
        )
    n, group = microbatches * chunks, stages * chunks
    forwards = [j // stages % chunks * microbatches + j // group * stages + j % stages for j in range(n)]
    backwards = [(chunks - 1 - k // microbatches) * microbatches + k % microbatches for k in forwards]
    warm = [min(n, 2 * (stages - 1 - s) + (chunks - 1) * stages) for s in range(stages)]
    orders = [_warm(forwards, backwards, w) for w in warm]
    return place("interleaved", stages, microbatches, chunks, 2, _in_order(orders))


def zero_bubble(stages: int, microbatches: int) -> Table:
    """ZB-H1: weight gradients fill the gaps, within 1F1B's stash (Qi et al. 2024)."""

    def rank(s: int, p: int, k: int, done: np.ndarray) -> tuple[int, int] | None:
        full = done[F] - done[B] >= stages - s or done[F] - done[W] >= stages
        return None if p == F and full else (p, k)

    return place("zb-h1", stages, microbatches, 1, 3, rank)


def lockstep(stages: int, microbatches: int) -> Table:
    """1F1B for phases that all devices enter together: a forward and a backward of unlike micro-batches in each tick.

    No phase is entered in vain, so that what a tick costs is what its work costs: the bubble is GPipe's in lockstep
    too, and the stash up to 2 * stages - 1.
    """
    return _together("lockstep", stages, microbatches, 2)


def lockstep_zero_bubble(stages: int, microbatches: int) -> Table:
    """`lockstep` with weight gradients apart: all stages make those of a micro-batch in the same tick."""
    return _together("lockstep-zb", stages, microbatches, 3)


def _together(name: str, stages: int, microbatches: int, phases: int) -> Table:
    m, turn = np.arange(microbatches), 2 * (stages - 1)
    slots = np.full((microbatches + turn, stages, 3), -1)
    for s in range(stages):
        slots[m + s, s, F] = slots[m + turn - s, s, B] = m
        if phases == 3:
            slots[m + turn, s, W] = m
    return Table(name, stages, microbatches, 1, slots, phases)


def forward_only(table: Table) -> Table:
    """The forward phases alone, each stage's in the table's order and as early as can be."""
    t = table
    orders = [[(F, int(k)) for k in t.slots[:, s, F] if k >= 0] for s in range(t.stages)]
    return place(t.name, t.stages, t.microbatches, t.chunks, 1, _in_order(orders))


SCHEDULES: dict[str, ScheduleFn] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved": interleaved,
    "zb-h1": zero_bubble,
    "lockstep": lockstep,
    "lockstep-zb": lockstep_zero_bubble,
}
"""Schedules by name. `gpipe`, `1f1b`, `interleaved` and `zb-h1` are the papers'; the `lockstep` two are for stages that
wait for one another in each phase, as they must where a layer's own arithmetic is split over devices."""


def from_csv(path: str | Path) -> Table:
    """A table from a file: a line per tick, a cell per stage, in it the ops of that tick, or nothing.

    An op is a phase and a micro-batch, as `F0`, and with several chunks a point and the chunk, as `F0.1`; several are
    separated by spaces. Without a `W` anywhere, `B` is the whole backward.

    Raises:
      LayoutError: a file that cannot be read, or is no valid table.
    """
    try:
        lines = [line for line in Path(path).read_text().splitlines() if line.strip()]
    except OSError as e:
        raise LayoutError(f"schedule {path} cannot be read: {e.strerror}") from None
    ops: list[tuple[int, int, int, int, int]] = []  # tick, stage, phase, micro-batch, chunk
    stages = max((line.count(",") + 1 for line in lines), default=0)
    for tick, line in enumerate(lines):
        for stage, cell in enumerate(line.split(",")):
            for text in cell.split():
                found = re.fullmatch(r"([FBW])(\d+)(?:\.(\d+))?", text)
                if not found:
                    raise LayoutError(
                        f"schedule {path}, line {tick + 1}: '{text}' is no op; write F, B or W and a micro-batch, as "
                        "F0, or with chunks as F0.1"
                    )
                ops.append((tick, stage, PHASES.index(found[1]), int(found[2]), int(found[3] or 0)))
    if not ops:
        raise LayoutError(f"schedule {path} has no ops; write a line per tick, as 'F0,,' for a first tick of 3 stages")
    micro, chunks = max(o[3] for o in ops) + 1, max(o[4] for o in ops) + 1
    slots = np.full((len(lines), stages, 3), -1)
    for tick, stage, phase, m, c in ops:
        if slots[tick, stage, phase] >= 0:
            raise LayoutError(f"schedule {path}, line {tick + 1}: stage {stage} has two {PHASES[phase]} in one tick")
        slots[tick, stage, phase] = c * micro + m
    table = Table(Path(path).name, stages, micro, chunks, slots, max(o[2] for o in ops) + 1)
    validate(table)
    return table


def _in_order(orders: Sequence[Sequence[tuple[int, int]]]) -> Rank:
    """Each stage runs its list of (phase, item), waiting where it must."""
    return lambda s, p, k, done: 0 if orders[s][done.sum()] == (p, k) else None


def _warm(forwards: Sequence[int], backwards: Sequence[int], warm: int) -> list[tuple[int, int]]:
    """`warm` forwards, then pairs of a forward and a backward, then the backwards that are left."""
    pairs = [op for f, b in zip(forwards[warm:], backwards, strict=False) for op in ((F, f), (B, b))]
    return [(F, f) for f in forwards[:warm]] + pairs + [(B, b) for b in backwards[max(0, len(forwards) - warm) :]]
