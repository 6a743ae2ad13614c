"""Trials in threads of this process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Protocol


class Work(Protocol):
    """Runs a trial."""

    def __call__(self, *, stop: Callable[[], bool]) -> None:
        """Asks `stop` after every step whether to."""


class Threads:
    """A handle on trials that run here, each in a thread of its own.

    Args:
      works: by trial.
    """

    def __init__(self, works: Mapping[int, Work]):
        self._asked = {id: threading.Event() for id in works}
        self._errors: list[str] = []
        self._threads = [threading.Thread(target=self._run, args=each, daemon=True) for each in works.items()]
        for thread in self._threads:
            thread.start()

    def _run(self, id: int, work: Work) -> None:
        try:
            work(stop=self._asked[id].is_set)
        except BaseException as e:
            self._errors.append(f"ended with {type(e).__name__}: {e}")
            raise

    def alive(self) -> bool:
        """See `Handle`."""
        return any(thread.is_alive() for thread in self._threads)

    def stop(self, id: int) -> None:
        """See `Handle`."""
        self._asked[id].set()

    def why(self) -> str:
        """See `Handle`."""
        return "; ".join(self._errors)

    def end(self) -> None:
        """Stops all of them and waits until they have."""
        for asked in self._asked.values():
            asked.set()
        for thread in self._threads:
            thread.join()
