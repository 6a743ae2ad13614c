"""Trials that run in threads of this process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Protocol


class Work(Protocol):
    """A function that runs a trial."""

    def __call__(self, *, stop: Callable[[], bool]) -> None:
        """Run the trial until it ends, or until `stop` is true after a step."""


class Threads:
    """A handle on trials that run in this process, each in a thread of its own.

    Args:
      works: the function of each trial, by id.
    """

    def __init__(self, works: Mapping[int, Work]):
        self._stops = {id: threading.Event() for id in works}
        self._errors: list[str] = []
        self._threads = [threading.Thread(target=self._run, args=each, daemon=True) for each in works.items()]
        for thread in self._threads:
            thread.start()

    def _run(self, id: int, work: Work) -> None:
        try:
            work(stop=self._stops[id].is_set)
        except BaseException as e:
            self._errors.append(f"ended with {type(e).__name__}: {e}")
            raise

    def alive(self) -> bool:
        """Whether any of the trials still runs."""
        return any(thread.is_alive() for thread in self._threads)

    def stop(self, id: int) -> None:
        """End a trial at its next step."""
        self._stops[id].set()

    def why(self) -> str:
        """Errors that ended threads."""
        return "; ".join(self._errors)

    def end(self) -> None:
        """Stop all trials and wait until they have ended."""
        for event in self._stops.values():
            event.set()
        for thread in self._threads:
            thread.join()
