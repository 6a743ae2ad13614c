"""What a guard is: a setting, which may refuse a step from within it, and may watch the loop from outside."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool

from jaxscale.errors import ConfigError, JaxscaleError
from jaxscale.parallel.anywhere import anywhere

if TYPE_CHECKING:
    from jaxscale.data import Loader
    from jaxscale.layout import Layout
    from jaxscale.step.config import TrainConfig
    from jaxscale.step.state import TrainState

Tree = Any
Metrics = dict[str, jax.Array]


class RollBack(JaxscaleError, RuntimeError):
    """The run has to go back to its newest checkpoint.

    Args:
      why: a sentence.
      steps: what is passed over on the way forward again: steps whose batches gave offence.
    """

    def __init__(self, why: str, steps: Sequence[int] = ()):
        super().__init__(why)
        self.steps = tuple(steps)


class SkipRecord(Protocol):
    """Where refused steps are written down (`jaxscale.train.skips.Skips`)."""

    path: Path

    def refused(self, step: int, guard: str, numbers: dict[str, Any], rows: np.ndarray) -> None:
        """Records a step that a guard refused, and which rows of the source its batch was."""


@dataclasses.dataclass(frozen=True)
class Watched:
    """What a guard may know of the run that it looks after.

    Args:
      layout: the run's.
      loader: its batches by step.
      skips: its record of what was skipped.
      say, warn: take a sentence for the user; on all processes but the first they say nothing.
    """

    layout: Layout | None
    loader: Loader
    skips: SkipRecord
    say: Callable[[str], None]
    warn: Callable[[str], None]


class Watch:
    """A guard at work on one run, outside of its step. Every process calls it alike; any of its methods may raise."""

    def before(self, step: int, state: TrainState) -> None:
        """Called before step `step` (from 1) is dispatched, with the state that it starts from."""

    def after(self, step: int, row: dict[str, Any]) -> None:
        """Called with a step's numbers, before they are written; may take out what is not for the record."""

    def before_save(self, state: TrainState) -> None:
        """Called before a checkpoint is written; raises `RollBack` where the state is not fit for one."""

    def close(self) -> None:
        """Called once, however the run ends."""


@dataclasses.dataclass(frozen=True)
class Guard:
    """Looks after a run. A setting, so frozen; what it remembers is in its `Watch` or in the state."""

    @property
    def name(self) -> str:
        """Apart from those of the run's other guards; goes into metrics and checkpoints."""
        return type(self).__name__.removesuffix("Guard").lower()

    def memory(self) -> Tree:
        """Arrays that it keeps in the training state, whole on every device and saved with it, as they begin."""
        return {}

    def watch(self, run: Watched) -> Watch:
        """Sets to work."""
        return Watch()

    def idle(self, config: TrainConfig) -> str | None:
        """Why it would find nothing in this run and on these processes, or `None`."""
        return None


@dataclasses.dataclass(frozen=True)
class StepGuard(Guard):
    """A guard that may refuse a step's update, from what is known before it: then the state stays bit for bit.

    After `patience` refusals in a row the run goes back to its newest checkpoint, and passes over their batches.

    Args:
      patience: refusals in a row.

    Raises:
      ConfigError: a patience below 1.
    """

    patience: int = 3
    offence: ClassVar[str] = "was refused"

    def __post_init__(self) -> None:
        if not isinstance(self.patience, int) or isinstance(self.patience, bool) or self.patience < 1:
            raise ConfigError(
                f"{type(self).__name__}.patience = {self.patience!r}: must be a whole number of at least 1"
            )

    def memory(self) -> Tree:
        """How many steps in a row it refused."""
        return {"in_a_row": jnp.zeros([], jnp.int32)}

    def refuses(self, memory: Tree, state: TrainState, metrics: Metrics) -> Bool[Array, ""]:
        """Whether the step must not be taken; traced. It is not, as soon as one device says so.

        Args:
          memory: its own.
          state: what the step starts from.
          metrics: "loss" and "grad_norm" among them.
        """
        raise NotImplementedError

    def remember(self, memory: Tree, metrics: Metrics, taken: Bool[Array, ""]) -> Tree:
        """Its memory after the step, but for the count of refusals."""
        return memory

    def watch(self, run: Watched) -> Watch:
        """Records what is refused, and loses patience."""
        return Patience(self, run)


class Patience(Watch):
    """Records a step guard's refusals, and asks for the way back after too many.

    Of refusals without a step beyond them that was taken, one is warned of.
    """

    def __init__(self, guard: StepGuard, run: Watched):
        self.guard, self.run = guard, run
        self._furthest = 0  # the last step that was refused; 0 where the run has passed it since

    def after(self, step: int, row: dict[str, Any]) -> None:
        refused = int(row.pop(_metric(self.guard), 0))
        if not refused:
            self._furthest = self._furthest if step <= self._furthest else 0
            return
        guard = self.guard
        row["skipped"] = guard.name
        self.run.skips.refused(step, guard.name, row, self.run.loader.ids_at(step - 1))
        why = f"step {step} {guard.offence} ({_numbers(row)}) and was skipped"
        known, self._furthest = self._furthest > 0, max(step, self._furthest)
        if refused < guard.patience:
            if not known:
                self.run.warn(f"{why}; skipped steps and their rows are in {self.run.skips.path}")
            return
        raise RollBack(
            f"{why}, the last of {refused} in a row ({type(guard).__name__}.patience)",
            range(step - refused + 1, step + 1),
        )


def memory_of(guards: Sequence[Guard]) -> Tree:
    """What guards remember before the first step, by name."""
    return {g.name: kept for g in guards if (kept := g.memory())}


def memory_saved(leaves: dict[str, dict[str, Any]]) -> Tree:
    """What guards remembered when a checkpoint was written: shapes and dtypes, from its manifest's leaves."""
    kept: Tree = {}
    for name, leaf in leaves.items():
        room, *path = name.split("/")
        if room == "guards":
            place = kept
            for part in path[:-1]:
                place = place.setdefault(part, {})
            place[path[-1]] = jax.ShapeDtypeStruct(tuple(leaf["shape"]), jnp.dtype(leaf["dtype"]))
    return kept


def with_memory(guards: Sequence[Guard], saved: Tree, sharding: Any) -> Tree:
    """What a run's guards remember: what was saved, or how it begins for one that was not there or kept another.

    Args:
      guards: the run's.
      saved: arrays by name of guard.
      sharding: of what begins.
    """
    shapes = lambda tree: jax.tree.map(lambda x: (x.shape, x.dtype), tree)  # noqa: E731
    first = memory_of(guards)
    return {
        name: saved[name] if name in saved and shapes(saved[name]) == shapes(new) else jax.device_put(new, sharding)
        for name, new in first.items()
    }


def judge(guards: Sequence[Guard], state: TrainState, metrics: Metrics) -> tuple[Bool[Array, ""] | None, Tree, Metrics]:
    """What the step guards among `guards` make of a step that is about to be taken; traced.

    Returns:
      whether it may be (`None`: nobody asks), what the guards then remember, and for each of them as a metric how many
      steps in a row it has refused.
    """
    asked = [g for g in guards if isinstance(g, StepGuard)]
    if not asked:
        return None, state.guards, {}
    found = anywhere(jnp.stack([g.refuses(state.guards[g.name], state, metrics) for g in asked]))
    refused = {g.name: found[i] for i, g in enumerate(asked)}
    taken = ~jnp.any(found)
    memory, counts = dict(state.guards), {}
    for g in asked:
        old = memory[g.name]
        in_a_row = jnp.where(refused[g.name], old["in_a_row"] + 1, 0)
        memory[g.name] = {**g.remember(old, metrics, taken), "in_a_row": in_a_row}
        counts[_metric(g)] = in_a_row.astype(jnp.float32)
    return taken, memory, counts


def _metric(guard: Guard) -> str:
    return f"refused_by_{guard.name}"


def _numbers(row: dict[str, Any]) -> str:
    return ", ".join(f"{k} {row[k]:.4g}" for k in ("loss", "grad_norm") if k in row)
