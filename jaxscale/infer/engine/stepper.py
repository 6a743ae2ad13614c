"""What an engine asks of the part that takes its steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from jaxscale.errors import ConfigError
from jaxscale.infer.engine.request import Text
from jaxscale.nn import SharesCapacity

Top = tuple[tuple[int, float], ...]
Give = Callable[[Text, int, float, Top], None]
"""Called with a running text, its next token, the token's log-probability and the likeliest tokens with theirs."""


class Stepper(Protocol):
    """Takes the steps of an engine. A text is running while `text.row` is at least 0, and its row is the stepper's.

    Attributes:
      vocab: the model knows ids below this.
      length: the most tokens of a text, prompt and continuation.
      places: texts that may be under way at once.
      end_ids: ids that end a text.
      scores: whether it answers requests that want log-probabilities of their prompt (`Request.scored`).
    """

    vocab: int
    length: int
    places: int
    end_ids: frozenset[int]
    scores: bool

    def admit(self, queue: Sequence[Text], running: Sequence[Text], clock: float) -> Any:
        """Decides who takes part in the next step: gives rows to waiting texts, may take them from running ones.

        Returns:
          what `run` is called with.

        Raises:
          ConfigError: nobody would get on.
        """

    def run(self, plan: Any, give: Give) -> None:
        """Takes a step. After each `give` the text may have ended (it is not `running` then) and gets nothing more."""

    def release(self, text: Text) -> None:
        """A running text has ended: takes its row back."""

    def counts(self) -> dict[str, int]:
        """Fields of `Stats` that only the stepper knows."""

    def compile(self, note: Callable[[int, int], None]) -> None:
        """Compiles every program there can be; calls `note` before each with how many are done, and of how many."""


def check_sizes(**sizes: Any) -> None:
    """Raises `ConfigError` where a size is no whole number of at least 1."""
    for name, value in sizes.items():
        if not isinstance(value, int) or value < 1:
            raise ConfigError(f"{name} = {value!r}: must be a whole number of at least 1")


def check_independent(model: Any) -> None:
    """Checks that no sequence depends on the others of its batch.

    Raises:
      ConfigError: one does.
    """
    if isinstance(model, SharesCapacity):
        model.check_independent()
