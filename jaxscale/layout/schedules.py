"""Functions that return pipeline schedules, and schedules from a file."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import get_args

import numpy as np

from jaxscale.errors import LayoutError
from jaxscale.layout.table import PHASES, B, F, Op, Placement, Table, W, needs, validate

Rank = Callable[[int, int, int, np.ndarray], object | None]
"""(stage, phase, item, numbers of F, B and W that the stage has run) -> a sort key; `None`: the op must wait."""

ScheduleFn = Callable[..., Table]
"""(stages, microbatches) -> a table; `interleaved` also takes chunks."""


def place(
    name: str,
    stages: int,
    microbatches: int,
    chunks: int,
    phases: int,
    rank: Rank,
    *,
    several: bool = False,
    placement: Placement = "ring",
) -> Table:
    """Make a table by list scheduling: at each tick, each stage runs the op of least rank among those that can run.

    Args:
      name: the schedule's name.
      stages: see `Table`, as the next three.
      microbatches: see `Table`.
      chunks: see `Table`.
      phases: see `Table`.
      rank: see `Rank`.
      several: run one op of each phase in a tick, instead of one op.
      placement: see `Placement`.

    Raises:
      LayoutError: no op can run at some tick (a deadlock).
    """
    items = range(chunks * microbatches)
    every = [(p, s, k) for s in range(stages) for p in range(phases) for k in items]
    when: dict[Op, int] = {}
    earliest = dict.fromkeys(every, 0)
    missing: dict[Op, int] = {}
    users: dict[Op, list[tuple[Op, int]]] = defaultdict(list)
    free: dict[tuple[int, int], list[int]] = defaultdict(list)  # items of which all that they need has run
    for p, s, k in every:
        waits = needs((p, s, k), stages, microbatches, chunks, placement)
        missing[p, s, k] = len(waits)
        for op, gap in waits:
            users[op].append(((p, s, k), gap))
        if not waits:
            free[s, p].append(k)
    rows: list[np.ndarray] = []
    done = np.zeros((stages, 3), int)
    while len(when) < len(every):
        tick, before = len(rows), len(when)
        rows.append(np.full((stages, 3), -1))
        for s in range(stages):
            for group in [(p,) for p in range(phases)] if several else [tuple(range(phases))]:
                ready = []
                for p in group:
                    for k in free[s, p]:
                        if earliest[p, s, k] <= tick and (order := rank(s, p, k, done[s])) is not None:
                            ready.append((order, p, k))
                if ready:
                    _, p, k = min(ready)
                    rows[tick][s, p] = k
                    when[p, s, k] = tick
                    done[s, p] += 1
                    free[s, p].remove(k)
                    for user, gap in users[p, s, k]:
                        earliest[user] = max(earliest[user], tick + gap)
                        missing[user] -= 1
                        if not missing[user]:
                            free[user[1], user[0]].append(user[2])
        if len(when) == before:
            p, s, k = next(op for op in every if op not in when)
            stuck = Table(name, stages, microbatches, chunks, np.empty((0, stages, 3)), phases).say((p, s, k))
            raise LayoutError(f"schedule '{name}' deadlocks: at tick {tick} no op can run, and {stuck} has not run yet")
    return Table(name, stages, microbatches, chunks, np.stack(rows), phases, placement)


def gpipe(stages: int, microbatches: int) -> Table:
    """All forwards, then all backwards (Huang et al. 2019).

    The stash holds every micro-batch. The bubble is the same when devices run their phases in lockstep.
    """
    m = range(microbatches)
    return place("gpipe", stages, microbatches, 1, 2, _in_order([_warm(m, m, microbatches)] * stages))


def one_f_one_b(stages: int, microbatches: int) -> Table:
    """One forward, one backward in turn (PipeDream-Flush, Narayanan et al. 2021): GPipe's bubble, a stash of `stages`.

    When devices run their phases in lockstep the bubble is larger, because stages alternate out of step; see
    `lockstep`.
    """
    m = range(microbatches)
    orders = [_warm(m, m, min(microbatches, stages - 1 - s)) for s in range(stages)]
    return place("1f1b", stages, microbatches, 1, 2, _in_order(orders))


def interleaved(stages: int, microbatches: int, chunks: int = 2) -> Table:
    """1F1B with `chunks` virtual stages per stage, which divides the bubble by `chunks` (Narayanan et al. 2021).

    Raises:
      LayoutError: the micro-batches are not a multiple of the stages.
    """
    if microbatches % stages:
        fit = max(stages, round(microbatches / stages) * stages)
        raise LayoutError(
            f"schedule 'interleaved' runs micro-batches in groups of {stages}, one per stage, and {microbatches} is "
            f"not a multiple of that; the nearest is {fit}"
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


def zero_bubble_v(stages: int, microbatches: int) -> Table:
    """ZB-V: zero-bubble with two chunks per stage in a V, within 1F1B's stash (Qi et al. 2024).

    With at least 2 * stages - 1 micro-batches, and phases that take equally long, each stage is busy from its first op
    to its last.
    """
    orders: list[list[_Group]] = []
    n = max(microbatches, 2 * stages - 1)
    for s in range(stages):
        after = stages - 1 - s
        second = [(F, 1), (B, 1), (W, 1)]
        order: list[tuple[int, int | None]] = []
        order += [(F, 0)] * (2 * after + 1) + [(F, 1), (F, 0)] * s + second * (after + 1)
        order += [(F, 0), (B, 0), (W, 0), *second] * (n - 2 * stages + s + 1) + [(B, 0), (W, 0), *second] * after
        order += [(B, 0), (B, 1)] * s + [(B, 0), (W, None)] * (after + 1)
        orders.append([[op] for op in order])
    return _in_v("zb-v", stages, microbatches, orders)


def dualpipe_v(stages: int, microbatches: int) -> Table:
    """DualPipeV: two chunks per stage in a V, and a forward and a backward of different chunks in one tick.

    It is half of DualPipe (DeepSeek-AI 2024), whose two directions need every stage's parameters twice, on devices of
    both ends. If a forward and a backward in one tick take as long as one after the other and send their results
    together, a stage idles (stages - 1) * (F + 2 B - 3 W) of a chunk, where B is a whole backward.
    """
    orders: list[list[_Group]] = []
    n = max(microbatches, 2 * stages)
    for s in range(stages):
        after = stages - 1 - s
        down, up = [(F, 0), (B, 1), (W, 1)], [(F, 1), (B, 0), (W, 0)]
        order: list[_Group] = []
        order += [[(F, 0)]] * (2 * after) + [[(F, 0)], [(F, 1)]] * (s + 1)
        order += [[(B, 1)], [(W, 1)], [(F, 1)]] * after
        main: list[_Group] = [down, up] * (n - 2 * stages + s + 1)
        order += [down[:1], down[1:], *main[1:]] if s == stages - 1 else main  # apart, the next stage's wait is shorter
        order += [down[1:], up] * after
        for i in range(2 * (s + 1)):  # the weight gradients of the second half wait
            order.append([(B, (i + 1) % 2), (W, (i + 1) % 2)][: 2 if i < s + 1 else 1])
        orders.append(order + [[(W, None)], [(B, 0)]] * after)
    return _in_v("dualpipe-v", stages, microbatches, orders)


def lockstep(stages: int, microbatches: int) -> Table:
    """1F1B for devices that run each phase together: each tick has a forward and a backward of different micro-batches.

    The bubble is GPipe's even in lockstep, and the stash is at most 2 * stages - 1.
    """
    return _lockstep("lockstep", stages, microbatches, 2)


def lockstep_zero_bubble(stages: int, microbatches: int) -> Table:
    """`lockstep` with separate weight gradients: all stages compute those of a micro-batch in the same tick."""
    return _lockstep("lockstep-zb", stages, microbatches, 3)


def _lockstep(name: str, stages: int, microbatches: int, phases: int) -> Table:
    m, turn = np.arange(microbatches), 2 * (stages - 1)
    slots = np.full((microbatches + turn, stages, 3), -1)
    for s in range(stages):
        slots[m + s, s, F] = slots[m + turn - s, s, B] = m
        if phases == 3:
            slots[m + turn, s, W] = m
    return Table(name, stages, microbatches, 1, slots, phases)


def forward_only(table: Table) -> Table:
    """Return a table of the forward phases only, each stage's in the same order and as early as possible."""
    t = table
    orders = [[(F, int(k)) for k in t.slots[:, s, F] if k >= 0] for s in range(t.stages)]
    return place(t.name, t.stages, t.microbatches, t.chunks, 1, _in_order(orders), placement=t.placement)


SCHEDULES: dict[str, ScheduleFn] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved": interleaved,
    "zb-h1": zero_bubble,
    "zb-v": zero_bubble_v,
    "dualpipe-v": dualpipe_v,
    "lockstep": lockstep,
    "lockstep-zb": lockstep_zero_bubble,
}
"""Schedules by name. Those before the last two are of the papers. The two `lockstep` schedules
are for stages that wait for each other in each phase, as they must where layers are sharded over devices too."""

CHUNKS = {"interleaved": 2, "zb-v": 2, "dualpipe-v": 2}
"""Chunks of a stage by default, of schedules that have more than one."""

PLACEMENTS: dict[str, Placement] = {"zb-v": "v", "dualpipe-v": "v"}
"""Order of virtual stages, of schedules whose order is not "ring"."""


def from_csv(path: str | Path) -> Table:
    """Read a table from a file: a line per tick, and in it a cell per stage with the ops of that tick, or none.

    An op is a phase and a micro-batch, such as `F0`; with several chunks, a point and the chunk follow, such as `F0.1`.
    Ops are separated by spaces. In a file without any `W`, `B` is the whole backward pass. A first line "placement v"
    says that the chunks of a stage are placed so (see `jaxscale.layout.table.Placement`).

    Args:
      path: the file.

    Raises:
      LayoutError: the file cannot be read, or is not a valid table.
    """
    try:
        lines = [line for line in Path(path).read_text().splitlines() if line.strip()]
    except OSError as e:
        raise LayoutError(f"schedule {path} cannot be read: {e.strerror}") from None
    placement: Placement = "ring"
    if lines and (first := re.fullmatch(r"placement (\w+)\s*", lines[0])):
        if first[1] not in get_args(Placement):
            raise LayoutError(
                f"schedule {path}, line 1: placement '{first[1]}'; use {' or '.join(get_args(Placement))}"
            )
        placement, lines = first[1], lines[1:]  # type: ignore[assignment]
    ops: list[tuple[int, int, int, int, int]] = []  # tick, stage, phase, micro-batch, chunk
    stages = max((line.count(",") + 1 for line in lines), default=0)
    for tick, line in enumerate(lines):
        for stage, cell in enumerate(line.split(",")):
            for text in cell.split():
                match = re.fullmatch(r"([FBW])(\d+)(?:\.(\d+))?", text)
                if not match:
                    raise LayoutError(
                        f"schedule {path}, line {tick + 1}: '{text}' is not an op; write F, B or W and a micro-batch, "
                        "such as F0, or with chunks F0.1"
                    )
                ops.append((tick, stage, PHASES.index(match[1]), int(match[2]), int(match[3] or 0)))
    if not ops:
        raise LayoutError(
            f"schedule {path} has no ops; write a line per tick, such as 'F0,,' for the first tick of 3 stages"
        )
    micro, chunks = max(o[3] for o in ops) + 1, max(o[4] for o in ops) + 1
    slots = np.full((len(lines), stages, 3), -1)
    for tick, stage, phase, m, c in ops:
        if slots[tick, stage, phase] >= 0:
            raise LayoutError(f"schedule {path}, line {tick + 1}: stage {stage} has two {PHASES[phase]} in one tick")
        slots[tick, stage, phase] = c * micro + m
    table = Table(Path(path).name, stages, micro, chunks, slots, max(o[2] for o in ops) + 1, placement)
    validate(table)
    return table


_Group = Sequence[tuple[int, int | None]]
"""Ops of one tick of a stage: phase and chunk, or `None` for the weight gradient that has waited longest."""


def _in_v(name: str, stages: int, microbatches: int, orders: Sequence[Sequence[_Group]]) -> Table:
    """Run each stage's groups of ops in order, as early as possible; its stages have two chunks each, in a V.

    Micro-batches of a phase and chunk are numbered in order; ops of more than there are are left out.
    """
    todo = [_numbered(order, microbatches) for order in orders]
    when: dict[Op, int] = {}
    rows: list[np.ndarray] = []
    at = [0] * stages
    while any(n < len(groups) for n, groups in zip(at, todo, strict=True)):
        tick, now = len(rows), dict[Op, int]()
        rows.append(np.full((stages, 3), -1))
        for s in range(stages):
            ops = [(p, s, k) for p, k in todo[s][at[s]]] if at[s] < len(todo[s]) else []
            own = dict.fromkeys(ops, tick)
            waits = [
                (own.get(op, when.get(op)), gap) for o in ops for op, gap in needs(o, stages, microbatches, 2, "v")
            ]
            if all(t is not None and t + gap <= tick for t, gap in waits):
                now |= own
                at[s] += bool(ops)
        if not now:
            raise LayoutError(f"schedule '{name}' deadlocks: at tick {tick} no op can run")
        when |= now
        for (p, s, k), t in now.items():
            rows[t][s, p] = k
    return Table(name, stages, microbatches, 2, np.stack(rows), 3, "v")


def _numbered(order: Sequence[_Group], microbatches: int) -> list[list[tuple[int, int]]]:
    """Return (phase, item) for ops of a stage, with the weight gradients that are still waiting at the end."""
    counts: dict[tuple[int, int], int] = {}
    waiting: list[tuple[int, int]] = []
    groups = []
    for group in order:
        ops: list[tuple[int, int, int]] = []
        for phase, chunk in group:
            if phase == W:
                key = waiting[0] if chunk is None else (chunk, counts[B, chunk] - 1)
                waiting.remove(key)
                ops.append((W, *key))
                continue
            assert chunk is not None
            micro = counts.get((phase, chunk), 0)
            counts[phase, chunk] = micro + 1
            ops.append((phase, chunk, micro))
            if phase == B:
                waiting.append((chunk, micro))
        groups.append(ops)
    groups += [[(W, *key)] for key in waiting]
    items = ([(p, c * microbatches + m) for p, c, m in ops if m < microbatches] for ops in groups)
    return [ops for ops in items if ops]


def _in_order(orders: Sequence[Sequence[tuple[int, int]]]) -> Rank:
    """Return a rank by which each stage runs its list of (phase, item) in order."""
    return lambda s, p, k, done: 0 if orders[s][done.sum()] == (p, k) else None


def _warm(forwards: Sequence[int], backwards: Sequence[int], warm: int) -> list[tuple[int, int]]:
    """`warm` forwards, then pairs of a forward and a backward, then the remaining backwards."""
    pairs = [op for f, b in zip(forwards[warm:], backwards, strict=False) for op in ((F, f), (B, b))]
    return [(F, f) for f in forwards[:warm]] + pairs + [(B, b) for b in backwards[max(0, len(forwards) - warm) :]]
