"""Calls a run's callbacks from the training loop."""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType
from typing import Any

from jaxscale.errors import ConfigError, RunError
from jaxscale.step.callbacks import Running
from jaxscale.step.state import Blueprint, TrainState
from jaxscale.step.user_metrics import collecting
from jaxscale.train.run import RunFolder


class Calls:
    """The callbacks of one run.

    Args:
      run: the run.
      blueprint: its blueprint.
      stop: requests a stop.
    """

    def __init__(self, run: RunFolder, blueprint: Blueprint, stop: Callable[[], None]):
        self._callbacks = run.config.callbacks
        self._state: TrainState | None = None
        self._row: dict[str, Any] = {}
        self._blueprint = blueprint
        self._view = Running(run.path, run.config, self._params, stop)

    def step(self, row: dict[str, Any], state: TrainState, evaluated: bool) -> None:
        """Call `on_step` and `on_evaluation`, and add to the row what they log.

        Args:
          row: the step's row.
          state: the state, which may be a step ahead of the row.
          evaluated: whether the step was evaluated.
        """
        self._row = row
        self.call("on_step", state)
        if evaluated:
            self.call("on_evaluation", state)

    def call(self, name: str, state: TrainState) -> None:
        """Call one method of all callbacks, with the newest row.

        Args:
          name: the method.
          state: the run's state.
        """
        if not self._callbacks:
            return
        self._state, self._view.step = state, int(state.step)
        step = self._row.get("step", self._view.step)
        try:
            for callback in self._callbacks:
                if hasattr(callback, name):
                    self._one(callback, name, step)
        finally:
            self._state = None  # the next step deletes its arrays

    def _params(self) -> Any:
        if self._state is None:
            raise RunError("run.params of a callback is used after the call; copy what you need with jax.device_get")
        return self._blueprint.weights(self._state)

    def _one(self, callback: Any, name: str, step: int) -> None:
        try:
            with collecting() as logged:
                getattr(callback, name)(step, MappingProxyType(self._row), self._view)
            self._add(logged, name)
        except Exception as e:
            e.add_note(f"raised by the callback {type(callback).__name__}, in {name} of step {step}")
            raise

    def _add(self, logged: dict[str, Any], name: str) -> None:
        if logged and name in ("on_checkpoint", "on_end"):
            raise ConfigError(
                f"jaxscale.log in {name} is too late, since the step's row is written; use on_step or on_evaluation"
            )
        for key, value in logged.items():
            if key in self._row:
                raise ConfigError(f"jaxscale.log: the step has a metric '{key}' already; log it under another name")
            self._row[key] = float(value)
