"""The interface of guards: a guard can skip updates inside the compiled step, and watch the training loop."""

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
    """Raised by a guard to make the run go back to its newest checkpoint.

    Args:
      why: the reason, a sentence.
      steps: steps whose batches are skipped when training continues from that checkpoint.
    """

    def __init__(self, why: str, steps: Sequence[int] = ()):
        super().__init__(why)
        self.steps = tuple(steps)


class SkipRecord(Protocol):
    """A record of skipped steps (`jaxscale.train.skips.Skips`)."""

    path: Path

    def refused(self, step: int, guard: str, numbers: dict[str, Any], rows: np.ndarray) -> None:
        """Record a step whose update a guard refused.

        Args:
          step: the step, from 1.
          guard: name of the guard.
          numbers: the step's metrics.
          rows: ids of the source's rows in the step's batch, int64 (B,).
        """


@dataclasses.dataclass(frozen=True)
class Watched:
    """The parts of a run that a guard can use.

    Args:
      layout: the run's layout.
      loader: the run's batches by step.
      skips: the run's record of skipped steps.
      say: logs a sentence; processes other than the first log nothing.
      warn: logs a warning, likewise.
    """

    layout: Layout | None
    loader: Loader
    skips: SkipRecord
    say: Callable[[str], None]
    warn: Callable[[str], None]


class Watch:
    """Callbacks of a guard in the training loop of one run. All processes call them; all may raise `RollBack`."""

    def before(self, step: int, state: TrainState) -> None:
        """Run before a step is dispatched.

        Args:
          step: the step, from 1.
          state: the state before the step.
        """

    def after(self, step: int, row: dict[str, Any]) -> None:
        """Run with a step's metrics before they are written.

        Args:
          step: the step, from 1.
          row: metrics by name; may be changed.
        """

    def before_save(self, state: TrainState) -> None:
        """Run before a checkpoint is written.

        Args:
          state: the state to be saved.

        Raises:
          RollBack: the state must not be saved.
        """

    def close(self) -> None:
        """Run once at the end of the run, also after an error."""


@dataclasses.dataclass(frozen=True)
class Guard:
    """Base of guards. A guard is a setting and frozen; what changes during a run is in its `Watch` or in the state."""

    @property
    def name(self) -> str:
        """Name in metrics and checkpoints; no two guards of a run may have the same."""
        return type(self).__name__.removesuffix("Guard").lower()

    def memory(self) -> Tree:
        """Return initial values of the guard's arrays in the training state, which are replicated, and checkpointed."""
        return {}

    def watch(self, run: Watched) -> Watch:
        """Return the guard's callbacks for a run.

        Args:
          run: parts of the run.
        """
        return Watch()

    def idle(self, config: TrainConfig) -> str | None:
        """Return why the guard has no effect in this run and on these processes, or `None` if it has.

        Args:
          config: the run's settings.
        """
        return None


@dataclasses.dataclass(frozen=True)
class StepGuard(Guard):
    """A guard that can refuse a step's update, from the state and metrics before it; then the state is unchanged.

    After `patience` consecutive refusals the run goes back to its newest checkpoint, and skips their batches.

    Args:
      patience: consecutive refusals before the run goes back.

    Raises:
      ConfigError: `patience` is below 1.
    """

    patience: int = 3
    offence: ClassVar[str] = "was refused"

    def __post_init__(self) -> None:
        if not isinstance(self.patience, int) or isinstance(self.patience, bool) or self.patience < 1:
            raise ConfigError(
                f"{type(self).__name__}.patience = {self.patience!r}: must be a whole number of at least 1"
            )

    def memory(self) -> Tree:
        """Return the number of consecutive refusals so far, 0."""
        return {"in_a_row": jnp.zeros([], jnp.int32)}

    def refuses(self, memory: Tree, state: TrainState, metrics: Metrics) -> Bool[Array, ""]:
        """Return whether to refuse the update; traced. It is refused if the result is true on any device.

        Args:
          memory: the guard's memory.
          state: the state before the step.
          metrics: the step's metrics, with "loss" and "grad_norm".
        """
        raise NotImplementedError

    def remember(self, memory: Tree, metrics: Metrics, accepted: Bool[Array, ""]) -> Tree:
        """Return the guard's memory after the step, without the count of refusals; traced.

        Args:
          memory: the guard's memory before the step.
          metrics: the step's metrics.
          accepted: whether no guard refused the update.
        """
        return memory

    def watch(self, run: Watched) -> Watch:
        """Return callbacks that record refusals, and raise `RollBack` after `patience` of them."""
        return Patience(self, run)


class Patience(Watch):
    """Callbacks that record a step guard's refusals, and go back to a checkpoint after too many in a row.

    There is one warning for a refusal and those that follow it before the run gets past the last of them.

    Args:
      guard: the guard.
      run: the run.
    """

    def __init__(self, guard: StepGuard, run: Watched):
        self.guard, self.run = guard, run
        self._furthest = 0  # the last step that was refused; 0 once the run has got past it

    def after(self, step: int, row: dict[str, Any]) -> None:
        """Record a refusal and warn; raise `RollBack` if it is one too many."""
        refused = int(row.pop(_metric(self.guard), 0))
        if not refused:
            self._furthest = self._furthest if step <= self._furthest else 0
            return
        guard = self.guard
        row["skipped"] = guard.name
        self.run.skips.refused(step, guard.name, row, self.run.loader.ids_at(step - 1))
        why = f"step {step} {guard.offence} ({_numbers(row)}) and was skipped"
        warned, self._furthest = self._furthest > 0, max(step, self._furthest)
        if refused < guard.patience:
            if not warned:
                self.run.warn(f"{why}; skipped steps and their rows are in {self.run.skips.path}")
            return
        raise RollBack(
            f"{why}, the last of {refused} in a row ({type(guard).__name__}.patience)",
            range(step - refused + 1, step + 1),
        )


def memory_of(guards: Sequence[Guard]) -> Tree:
    """Return the initial memory of guards that have one, by name.

    Args:
      guards: the run's guards.
    """
    return {g.name: memory for g in guards if (memory := g.memory())}


def memory_saved(leaves: dict[str, dict[str, Any]]) -> Tree:
    """Return the shapes and dtypes of guards' memory in a checkpoint, by name of guard.

    Args:
      leaves: the entry "leaves" of the checkpoint's manifest.
    """
    memory: Tree = {}
    for name, leaf in leaves.items():
        field, *path = name.split("/")
        if field == "guards":
            node = memory
            for part in path[:-1]:
                node = node.setdefault(part, {})
            node[path[-1]] = jax.ShapeDtypeStruct(tuple(leaf["shape"]), jnp.dtype(leaf["dtype"]))
    return memory


def with_memory(guards: Sequence[Guard], saved: Tree, sharding: jax.sharding.Sharding) -> Tree:
    """Return the memory of a run's guards: as saved, or initial if a guard is new or its arrays have changed shape.

    Args:
      guards: the run's guards.
      saved: memory from a checkpoint, by name of guard.
      sharding: sharding of initial memory.
    """

    def shapes(tree: Tree) -> Tree:
        return jax.tree.map(lambda x: (x.shape, x.dtype), tree)

    first = memory_of(guards)
    return {
        name: saved[name] if name in saved and shapes(saved[name]) == shapes(new) else jax.device_put(new, sharding)
        for name, new in first.items()
    }


def judge(guards: Sequence[Guard], state: TrainState, metrics: Metrics) -> tuple[Bool[Array, ""] | None, Tree, Metrics]:
    """Return whether the step guards accept an update; traced.

    Args:
      guards: the run's guards.
      state: the state before the step.
      metrics: the step's metrics.

    Returns:
      Whether all step guards accept the update (`None` if there are none); the guards' new memory; and the number of
      consecutive refusals of each, as metrics.
    """
    step_guards = [g for g in guards if isinstance(g, StepGuard)]
    if not step_guards:
        return None, state.guards, {}
    refusals = anywhere(jnp.stack([g.refuses(state.guards[g.name], state, metrics) for g in step_guards]))
    refused = {g.name: refusals[i] for i, g in enumerate(step_guards)}
    accepted = ~jnp.any(refusals)
    memory, counts = dict(state.guards), {}
    for g in step_guards:
        old = memory[g.name]
        in_a_row = jnp.where(refused[g.name], old["in_a_row"] + 1, 0)
        memory[g.name] = {**g.remember(old, metrics, accepted), "in_a_row": in_a_row}
        counts[_metric(g)] = in_a_row.astype(jnp.float32)
    return accepted, memory, counts


def _metric(guard: Guard) -> str:
    return f"refused_by_{guard.name}"


def _numbers(row: dict[str, Any]) -> str:
    return ", ".join(f"{k} {row[k]:.4g}" for k in ("loss", "grad_norm") if k in row)
