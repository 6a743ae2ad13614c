"""When an algorithm exchanges arrays between replicas, and how many bytes: what the planner needs to know of it."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Exchange:
    """One exchange of a round.

    Args:
      after: the exchange begins after so many steps of the round.
      delay: steps from its begin to the use of its result; 0 waits for it.
      sent: bytes that each device sends.
    """

    after: int
    delay: int
    sent: float


@dataclasses.dataclass(frozen=True)
class Round:
    """The exchanges that repeat every so many steps.

    Args:
      steps: steps of a round.
      exchanges: its exchanges.
    """

    steps: int
    exchanges: tuple[Exchange, ...]

    @property
    def sent(self) -> float:
        """Bytes that each device sends in a step, on average."""
        return sum(e.sent for e in self.exchanges) / self.steps
