"""Threads that run one at a time, and whose calls are batched once all of them wait."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

BatchedCall = Callable[[Mapping[int, Any]], Mapping[int, Any]]
"""A function of several members at once: from their arguments, by member, to their results."""


class Broken(Exception):
    """A batched call failed."""


class Turns:
    """Lets one thread of a group run at a time, and batches their calls.

    A member runs while it has the turn (`of`) and waits while its call is pending (`ask`). The last member to call, or
    one that leaves while all others wait, runs the batched call for all. So no two threads start programs on the same
    devices at the same time, which would deadlock if the programs have collectives.

    Args:
      members: numbers of the members; each has to enter `of` once.
      turn: shared by all groups of a process, so that only one thread of any group runs.
    """

    def __init__(self, members: Iterable[int], turn: threading.Condition):
        self._turn = turn
        self._members = set(members)
        self._pending: dict[int, tuple[BatchedCall, Any]] = {}
        self._results: dict[int, Any] = {}
        self._why: Exception | None = None

    @contextlib.contextmanager
    def of(self, member: int) -> Iterator[None]:
        """Context in which a member has the turn; it leaves the group at the end."""
        with self._turn:
            try:
                yield
            finally:
                self._members.discard(member)
                self._call_if_all_wait()

    def ask(self, member: int, call: BatchedCall, value: Any) -> Any:
        """Return this member's result of a batched call, which runs once all members have called.

        Args:
          member: the member's number.
          call: the function of all members that pass the same one.
          value: this member's argument.

        Raises:
          Broken: a call failed, of this member or another.
        """
        if self._why is None:
            self._pending[member] = call, value
            self._call_if_all_wait()
            while self._why is None and member not in self._results:
                self._turn.wait()
        if self._why is not None:
            raise Broken(str(self._why).strip().partition("\n")[0] or repr(self._why)) from self._why
        return self._results.pop(member)

    def _call_if_all_wait(self) -> None:
        if not self._pending or self._pending.keys() != self._members:
            return
        call = next(iter(self._pending.values()))[0]  # other calls wait: members served now may join them
        values = {m: value for m, (other, value) in self._pending.items() if other == call}
        for member in values:
            del self._pending[member]
        try:
            self._results |= call(values)
        except Exception as e:  # on any error, each member continues alone
            self._why = e
        self._turn.notify_all()
