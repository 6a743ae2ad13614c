"""The interface of the part of an engine that computes its steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from jaxscale.errors import ConfigError
from jaxscale.infer.engine.request import SequenceState
from jaxscale.nn import SharesCapacity

Top = tuple[tuple[int, float], ...]
Emit = Callable[[SequenceState, int, float, Top], None]
"""Called with a running sequence, its next token, the token's log-probability and the likeliest tokens with theirs."""


class Stepper(Protocol):
    """Computes the steps of an engine. A sequence is running while it has a slot, which the stepper assigns.

    Attributes:
      vocab: the model's token ids are below this.
      length: the most tokens of a sequence, prompt and generated ones.
      slots: sequences that may run at once.
      end_ids: end-of-text token ids.
      scores: whether it answers requests with `Request.scored`.
      prefix: ids that every sequence begins with, of the vectors of a soft prompt.
    """

    vocab: int
    length: int
    slots: int
    end_ids: frozenset[int]
    scores: bool
    prefix: tuple[int, ...]

    def admit(self, queue: Sequence[SequenceState], running: Sequence[SequenceState], clock: float) -> Any:
        """Plan the next step: give slots to waiting sequences, and preempt running ones where necessary.

        Args:
          queue: waiting sequences in order of arrival.
          running: running sequences in order of arrival.
          clock: seconds.

        Returns:
          the argument of `run`.

        Raises:
          ConfigError: no sequence would make progress.
        """

    def run(self, plan: Any, emit: Emit) -> None:
        """Take the step.

        Args:
          plan: from `admit`.
          emit: called with each new token; it may end the sequence, which then is not `running` and gets no more.
        """

    def release(self, sequence: SequenceState) -> None:
        """Free the slot of a running sequence that has ended.

        Args:
          sequence: the sequence.
        """

    def counts(self) -> dict[str, int]:
        """Return the fields of `Stats` that the stepper counts."""

    def compile(self, note: Callable[[int, int], None]) -> None:
        """Compile every program that a step may need.

        Args:
          note: called before each with the number of programs that are compiled, and of all.
        """


def check_sizes(**sizes: object) -> None:
    """Check that sizes are whole numbers of at least 1.

    Args:
      **sizes: values by the names of their settings.

    Raises:
      ConfigError: one is not.
    """
    for name, value in sizes.items():
        if not isinstance(value, int) or value < 1:
            raise ConfigError(f"{name} = {value!r}: must be a whole number of at least 1")


def check_independent(model: object) -> None:
    """Check that no sequence depends on the others of its batch.

    Args:
      model: a language model.

    Raises:
      ConfigError: one does.
    """
    if isinstance(model, SharesCapacity):
        model.check_independent()
