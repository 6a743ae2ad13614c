"""The interface of callbacks (`train.callbacks`): your own code in the training loop."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxscale.errors import ConfigError, near
from jaxscale.signatures import check_method

if TYPE_CHECKING:
    from jaxscale.step.config import TrainConfig

CALLS = ("on_step", "on_evaluation", "on_checkpoint", "on_end")
"""Methods of a callback; each takes (step, row, run)."""


class Running:
    """The run, as a callback sees it.

    Args:
      path: its folder.
      config: its settings.
      params: returns the parameters.
      stop: requests a stop.

    Attributes:
      step: number of steps that `params` have taken. On a GPU or TPU a step's row is known when the next step is
        already under way; in `on_step` this is then one more than the row's step.
    """

    def __init__(self, path: Path, config: TrainConfig, params: Callable[[], Any], stop: Callable[[], None]):
        self.path, self.config, self.step = path, config, 0
        self._params, self._stop = params, stop

    @property
    def params(self) -> Any:
        """The model's parameters, a tree of sharded arrays, during the call; the next step deletes the arrays.

        Raises:
          RunError: the call is over.
        """
        return self._params()

    def stop(self) -> None:
        """Stop the run as a signal does, after the next step (of several processes, at the next tenth step)."""
        self._stop()


class Callback:
    """Base of callbacks; a subclass defines any of the methods. A class with such methods needs no base.

    All processes of a run make all calls, in the same order; `jax.process_index()` is 0 on the one that writes. `row`
    has the step's metrics by name, as `metrics.jsonl` does except for times that are measured at its end. An exception
    ends the run.
    """

    def on_step(self, step: int, row: Mapping[str, Any], run: Running) -> None:
        """Run after a step.

        Args:
          step: the step, from 1.
          row: its metrics.
          run: the run.
        """

    def on_evaluation(self, step: int, row: Mapping[str, Any], run: Running) -> None:
        """Run after an evaluation; `row` has `eval_loss` and the like.

        Args:
          step: the step.
          row: its metrics.
          run: the run.
        """

    def on_checkpoint(self, step: int, row: Mapping[str, Any], run: Running) -> None:
        """Run once the state was handed over to be saved, which goes on meanwhile.

        Args:
          step: the step.
          row: its metrics.
          run: the run.
        """

    def on_end(self, step: int, row: Mapping[str, Any], run: Running) -> None:
        """Run after the last step and checkpoint of a run that did not fail.

        Args:
          step: the step.
          row: its metrics.
          run: the run.
        """


def check_callbacks(callbacks: Any) -> tuple[Any, ...]:
    """Check the setting `train.callbacks`, and return it as a tuple.

    Args:
      callbacks: its value.

    Raises:
      ConfigError: it is not a tuple; or one is a class, has no method of a callback, a misspelt one, or one with other
        arguments.
    """
    if not isinstance(callbacks, tuple | list):
        raise ConfigError(f"train.callbacks must be a tuple of callbacks, such as (MyCallback(),), not {callbacks!r}")
    for one in callbacks:
        if isinstance(one, type):
            raise ConfigError(f"train.callbacks has the class {one.__name__}; write {one.__name__}()")
        methods = [name for name in dir(one) if name.startswith("on_") and callable(getattr(one, name))]
        for name in methods:
            if name not in CALLS:
                raise ConfigError(f"train.callbacks: {type(one).__name__}.{name} is never called{near(name, CALLS)}")
            check_method("train.callbacks", one, name, ("step", "row", "run"), ())
        if not methods:
            raise ConfigError(
                f"train.callbacks has {one!r}, which has no method of a callback; define one of {', '.join(CALLS)}"
            )
    return tuple(callbacks)
