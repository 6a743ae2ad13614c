"""Pipeline schedules as tables of which stage does what at which tick: check, simulate and draw them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import numpy as np

from jaxscale.errors import LayoutError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

F, B, W = 0, 1, 2
"""Phases of a tick, in the order they run: forward, input gradient, weight gradient."""

PHASES = "FBW"
Op = tuple[int, int, int]
"""(phase, stage, item)"""

Placement = Literal["ring", "v"]
"""Order of virtual stages on stages: "ring", each chunk from the first stage to the last; or "v", every second chunk
from the last stage to the first, so that with two chunks the first stage has both ends of the model."""


def virtual_stage(stage: int, chunk: int, stages: int, placement: Placement) -> int:
    """Return the number of the virtual stage that a chunk of a stage is."""
    return chunk * stages + (stages - 1 - stage if placement == "v" and chunk % 2 else stage)


def stage_of(virtual: int, stages: int, placement: Placement) -> tuple[int, int]:
    """Return the stage of a virtual stage, and which of its chunks it is."""
    chunk, stage = divmod(virtual, stages)
    return (stages - 1 - stage if placement == "v" and chunk % 2 else stage), chunk


@dataclasses.dataclass(frozen=True, eq=False)
class Table:
    """A pipeline schedule.

    The model is divided into `stages * chunks` virtual stages; chunk c of stage s is virtual stage c * stages + s, or
    as `placement` says. What a stage sends at one tick can be used from the next tick on.

    Args:
      name: the schedule's name.
      stages: the number of pipeline stages.
      microbatches: the number of micro-batches of a step.
      chunks: the number of virtual stages per stage.
      slots: int (ticks, stages, 3), the item that each phase of a stage's tick works on: chunk * microbatches +
        micro-batch, or -1 for none. A stage may run one phase in a tick or several.
      phases: how many of the three phases are used: 1 forward only, 2 with the whole backward pass in `B`, 3 with
        separate weight gradients in `W`.
      placement: see `Placement`.
    """

    name: str
    stages: int
    microbatches: int
    chunks: int
    slots: np.ndarray
    phases: int = 2
    placement: Placement = "ring"

    @property
    def items(self) -> int:
        """The number of items per stage and phase: micro-batches times chunks."""
        return self.microbatches * self.chunks

    def needs(self, op: Op) -> list[tuple[Op, int]]:
        """Return the ops that an op depends on.

        Args:
          op: (phase, stage, item).

        Returns:
          pairs of an op and how many ticks later the dependent op can run; 0 allows a later phase of the same tick.
        """
        return needs(op, self.stages, self.microbatches, self.chunks, self.placement)

    def say(self, op: Op) -> str:
        """Write an op for messages, such as "F3.1 on stage 0".

        Args:
          op: (phase, stage, item).
        """
        phase, stage, item = op
        chunk, micro = divmod(item, self.microbatches)
        return f"{PHASES[phase]}{micro}" + (f".{chunk}" if self.chunks > 1 else "") + f" on stage {stage}"


def needs(op: Op, stages: int, microbatches: int, chunks: int, placement: Placement = "ring") -> list[tuple[Op, int]]:
    """Return the ops that an op depends on, as `Table.needs`, for a table of these sizes."""
    phase, stage, item = op
    chunk, micro = divmod(item, microbatches)
    virtual = virtual_stage(stage, chunk, stages, placement)

    def at(phase: int, virtual: int) -> Op:
        stage, chunk = stage_of(virtual, stages, placement)
        return phase, stage, chunk * microbatches + micro

    if phase == F:
        return [(at(F, virtual - 1), 1)] if virtual else []
    if phase == B:
        after = [(at(B, virtual + 1), 1)] if virtual + 1 < stages * chunks else []
        return [((F, stage, item), 0), *after]
    return [((B, stage, item), 0)]


def validate(table: Table) -> dict[Op, int]:
    """Check a table.

    Args:
      table: the table.

    Returns:
      the tick of every op.

    Raises:
      LayoutError: an op that is missing, repeated, too early, or outside of the table's sizes; the message names it.
    """
    t = table
    if t.slots.ndim != 3 or t.slots.shape[1:] != (t.stages, 3):
        raise LayoutError(
            f"schedule '{t.name}': its table has shape {t.slots.shape}; give (ticks, {t.stages} stages, 3 phases)"
        )
    when: dict[Op, int] = {}
    for tick, stage, phase in np.argwhere(t.slots >= 0).tolist():
        op = phase, stage, int(t.slots[tick, stage, phase])
        if op[2] >= t.items or phase >= t.phases:
            raise LayoutError(
                f"schedule '{t.name}' has {t.say(op)} at tick {tick}, which is outside of its {t.microbatches} "
                f"micro-batches, {t.chunks} chunk(s) and phases {', '.join(PHASES[: t.phases])}"
            )
        if op in when:
            raise LayoutError(f"schedule '{t.name}' runs {t.say(op)} twice, at ticks {when[op]} and {tick}; remove one")
        when[op] = tick
    for phase in range(t.phases):
        for stage in range(t.stages):
            for item in range(t.items):
                if (phase, stage, item) not in when:
                    raise LayoutError(f"schedule '{t.name}' never runs {t.say((phase, stage, item))}")
    for op, tick in when.items():
        for before, gap in t.needs(op):
            if when[before] + gap > tick:
                raise LayoutError(
                    f"schedule '{t.name}' runs {t.say(op)} at tick {tick}, and it needs {t.say(before)}, which runs at "
                    f"tick {when[before]}{' (a transfer takes one tick)' if gap else ''}; the earliest it can run is "
                    f"tick {when[before] + gap}"
                )
    return when


@dataclasses.dataclass(frozen=True)
class Simulation:
    """The simulated cost of a table.

    Args:
      ticks: rows of the table.
      bubble: share of the time that stages are idle when they wait for their inputs only (as the papers count it).
      lockstep_bubble: the same when every device waits for every phase that any device runs, as in the executor.
      entered: the number of ticks in which any stage runs each phase.
      stash: per stage, the most items in flight: after their forward and before their last backward phase.
    """

    ticks: int
    bubble: float
    lockstep_bubble: float
    entered: tuple[int, int, int]
    stash: tuple[int, ...]


def simulate(table: Table, cost: Sequence[float] = (1, 1, 1)) -> Simulation:
    """Simulate a table.

    Args:
      table: the table.
      cost: relative times of a chunk's forward, input-gradient and weight-gradient phase; a transfer costs nothing.

    Raises:
      LayoutError: see `validate`.
    """
    when = validate(table)
    costs = np.zeros(3)
    costs[: table.phases] = cost[: table.phases]
    if table.phases == 2:
        costs[B] += cost[W]
    end: dict[Op, float] = {}
    clock = np.zeros(table.stages)
    for op in sorted(when, key=lambda op: (when[op], op[0])):
        ready = max((end[before] for before, _ in table.needs(op)), default=0.0)
        end[op] = max(clock[op[1]], ready) + costs[op[0]]
        clock[op[1]] = end[op]
    entered = (table.slots >= 0).any(axis=1).sum(axis=0)
    live = np.zeros((table.stages, len(table.slots) + 1), int)
    if table.phases > 1:
        for (phase, stage, item), tick in when.items():
            if phase == F:
                live[stage, tick] += 1
                live[stage, when[table.phases - 1, stage, item] + 1] -= 1
    busy = table.items * costs.sum()
    return Simulation(
        ticks=len(table.slots),
        bubble=float(1 - busy / clock.max()),
        lockstep_bubble=float(1 - busy / (entered @ costs)),
        entered=tuple(int(n) for n in entered),  # type: ignore[arg-type]
        stash=tuple(int(n) for n in live.cumsum(axis=1).max(axis=1)),
    )


def draw_text(table: Table) -> str:
    """Draw a table as text: a line per stage, a column per tick; `F3.1` is the forward of micro-batch 3 in chunk 1."""
    cells = [["/".join(_cell(table, tick[s])) or "." for tick in table.slots] for s in range(table.stages)]
    width = max((len(c) for row in cells for c in row), default=1)
    return "\n".join(f"stage {s}  " + " ".join(c.ljust(width) for c in row).rstrip() for s, row in enumerate(cells))


def draw_figure(table: Table) -> Figure:
    """Draw a table as a matplotlib figure, with a colour per phase.

    Raises:
      LayoutError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch, Rectangle
    except ImportError:
        raise LayoutError("drawing needs matplotlib: pip install 'jaxscale[plot]'") from None
    ticks = len(table.slots)
    figure = Figure(figsize=(max(4.0, 0.32 * ticks + 1), 0.5 * table.stages + 1.3), dpi=110, layout="constrained")
    ax = figure.add_subplot()
    colors = ("#8fb8de", "#8fce9b", "#f4c27a")
    for tick, stage, phase in np.argwhere(table.slots >= 0).tolist():
        ops = [p for p in range(3) if table.slots[tick, stage, p] >= 0]
        high = 1 / len(ops)
        y = stage + ops.index(phase) * high
        ax.add_patch(Rectangle((tick, y), 1, high, facecolor=colors[phase], edgecolor="w"))
        label = _cell(table, table.slots[tick, stage], only=phase)[0][1:]
        ax.text(tick + 0.5, y + high / 2, label, ha="center", va="center", fontsize=6 if len(ops) > 1 else 7)
    ax.set(xlim=(0, ticks), ylim=(table.stages, 0), xlabel="tick", yticks=np.arange(table.stages) + 0.5)
    ax.set_yticklabels([f"stage {s}" for s in range(table.stages)])
    words = ("forward", "backward" if table.phases == 2 else "input gradient", "weight gradient")
    legend = [Patch(facecolor=colors[p], label=words[p]) for p in range(table.phases)]
    figure.legend(handles=legend, loc="outside lower center", ncols=3, fontsize=7, frameon=False)
    ax.set_title(f"{table.name}: {table.stages} stages, {table.microbatches} micro-batches", fontsize=9)
    return figure


def _cell(table: Table, slots: np.ndarray, only: int | None = None) -> list[str]:
    """Write the ops of one stage's tick, such as "F3" or "F3.1"."""
    phases = range(3) if only is None else (only,)
    ops = [(p, *divmod(int(slots[p]), table.microbatches)) for p in phases if slots[p] >= 0]
    return [f"{PHASES[p]}{micro}" + (f".{chunk}" if table.chunks > 1 else "") for p, chunk, micro in ops]


def to_csv(table: Table) -> str:
    """Write a table with a line per tick and a column per stage, as `jaxscale.layout.schedules.from_csv` reads it.

    A placement other than "ring" stands in a line of its own before them.
    """
    first = "" if table.placement == "ring" else f"placement {table.placement}\n"
    return first + "\n".join(",".join(" ".join(_cell(table, cell)) for cell in tick) for tick in table.slots) + "\n"
