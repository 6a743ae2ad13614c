"""An engine without a model: its tokens depend only on the seed, and each step takes as long as a test needs."""

from __future__ import annotations

import time
from typing import Any, NamedTuple

from jaxscale.errors import ConfigError
from jaxscale.infer.engine import Event, Request


class Stats(NamedTuple):
    """The engine's statistics, as `jaxscale.infer.engine` reports them."""

    waiting: int
    running: int
    pages_used: int
    pages_free: int
    preemptions: int = 0
    steps: int = 0
    proposed: int = 0
    accepted: int = 0


PAGES = 1000


class FakeEngine:
    """Continues each sequence with the letters of the alphabet from the seed-th on, one a step; each has one page."""

    parameters = 1234

    def __init__(self, seconds: float = 0.0, fail_at: int | None = None, slots: int = PAGES):
        self.seconds, self.fail_at, self.slots = seconds, fail_at, slots
        self.sequences: dict[Any, tuple[Request, int]] = {}
        self.steps = 0

    @property
    def busy(self) -> bool:
        """Return whether there are unfinished sequences."""
        return bool(self.sequences)

    @property
    def stats(self) -> Stats:
        """Return the statistics."""
        running = min(self.slots, len(self.sequences))
        return Stats(len(self.sequences) - running, running, running, PAGES - running, 0, self.steps)

    def check(self, request: Request) -> None:
        """Raise for a prompt of more than 900 tokens."""
        if len(request.prompt) > 900:
            raise ConfigError(f"the prompt has {len(request.prompt)} tokens; the fake engine takes 900")

    def submit(self, request: Request) -> None:
        """Add a sequence."""
        self.sequences[request.id] = (request, 0)

    def cancel(self, id: Any) -> None:
        """Remove a sequence."""
        self.sequences.pop(id, None)

    def step(self) -> list[Event]:
        """Generate a token for each sequence that has a slot."""
        time.sleep(self.seconds)
        self.steps += 1
        if self.fail_at is not None and self.steps >= self.fail_at:
            raise RuntimeError("the device is on fire")
        events = []
        for id, (request, generated) in list(self.sequences.items())[: self.slots]:
            token = ord("a") + (request.sampling.seed + generated) % 26
            top = tuple((ord("a") + i, -1.0 - i) for i in range(request.sampling.logprobs))
            finished = None
            if generated + 1 == request.sampling.max_tokens:
                finished = "length"
            events.append(Event(id, token, -0.5, top, finished))
            self.sequences[id] = (request, generated + 1)
            if finished:
                del self.sequences[id]
        return events
