"""An engine without a model: what it says is a function of the prompt and the seed, as slowly as wanted."""

from __future__ import annotations

import time
from typing import Any, NamedTuple

from jaxscale.errors import ConfigError
from jaxscale.infer.engine import Event, Request


class Stats(NamedTuple):
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
    """Each text goes on with the letters of the alphabet from where its seed says, one a step; a page a text."""

    def __init__(self, seconds: float = 0.0, fail_at: int | None = None, places: int = PAGES):
        self.seconds, self.fail_at, self.places = seconds, fail_at, places
        self.texts: dict[Any, tuple[Request, int]] = {}
        self.steps = 0

    @property
    def busy(self) -> bool:
        return bool(self.texts)

    @property
    def stats(self) -> Stats:
        running = min(self.places, len(self.texts))
        return Stats(len(self.texts) - running, running, running, PAGES - running, 0, self.steps)

    def check(self, request: Request) -> None:
        if len(request.prompt) > 900:
            raise ConfigError(f"the prompt has {len(request.prompt)} tokens; the fake engine takes 900")

    def submit(self, request: Request) -> None:
        self.texts[request.id] = (request, 0)

    def cancel(self, id: Any) -> None:
        self.texts.pop(id, None)

    def step(self) -> list[Event]:
        time.sleep(self.seconds)
        self.steps += 1
        if self.fail_at is not None and self.steps >= self.fail_at:
            raise RuntimeError("the device is on fire")
        events = []
        for id, (request, made) in list(self.texts.items())[: self.places]:
            token = ord("a") + (request.sampling.seed + made) % 26
            top = tuple((ord("a") + i, -1.0 - i) for i in range(request.sampling.logprobs))
            finished = None
            if made + 1 == request.sampling.max_tokens:
                finished = "length"
            events.append(Event(id, token, -0.5, top, finished))
            self.texts[id] = (request, made + 1)
            if finished:
                del self.texts[id]
        return events
