"""Threads as coroutines: one runs at a time, until all of them wait and are answered together."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

Together = Callable[[Mapping[int, Any]], Mapping[int, Any]]
"""What is done for several members at once: their values, by member, to their answers."""


class Broken(Exception):
    """What was to be done for all of them together could not be done."""


class Turns:
    """The turns of a group of threads.

    A member runs while it has the turn (`of`) and passes it on by asking (`ask`). Whoever is the last to ask, or
    leaves while all others wait, answers them all. So no two of them ever start programs on the same devices at once,
    which would deadlock where the programs have collectives.

    Args:
      members: who takes part; all of them have to come.
      turn: shared by all groups of one process, so that only one thread of any of them runs.
    """

    def __init__(self, members: Iterable[int], turn: threading.Condition):
        self._turn = turn
        self._members = set(members)
        self._asked: dict[int, tuple[Together, Any]] = {}
        self._answers: dict[int, Any] = {}
        self._why: Exception | None = None

    @contextlib.contextmanager
    def of(self, member: int) -> Iterator[None]:
        """The turn of a member, who leaves the group at the end."""
        with self._turn:
            try:
                yield
            finally:
                self._members.discard(member)
                self._answer_if_all_wait()

    def ask(self, member: int, what: Together, value: Any) -> Any:
        """A member's part of `what`, done once all members ask for something.

        Raises:
          Broken: it failed, for this member or another.
        """
        if self._why is None:
            self._asked[member] = what, value
            self._answer_if_all_wait()
            while self._why is None and member not in self._answers:
                self._turn.wait()
        if self._why is not None:
            raise Broken(str(self._why).strip().partition("\n")[0] or repr(self._why)) from self._why
        return self._answers.pop(member)

    def _answer_if_all_wait(self) -> None:
        if not self._asked or self._asked.keys() != self._members:
            return
        what = next(iter(self._asked.values()))[0]  # others wait, perhaps to be joined by those that are answered now
        mine = {m: value for m, (w, value) in self._asked.items() if w == what}
        for member in mine:
            del self._asked[member]
        try:
            self._answers |= what(mine)
        except Exception as e:  # whatever it is, each of them goes on without the others
            self._why = e
        self._turn.notify_all()
