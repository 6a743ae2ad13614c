"""The engine: requests come and go at any time, and every step is for all that are there."""

from __future__ import annotations

import bisect
import time
from collections.abc import Callable, Hashable, Iterable
from typing import NamedTuple

import numpy as np

from jaxscale.errors import ConfigError
from jaxscale.infer.engine.request import Event, Finish, Request, Text
from jaxscale.infer.engine.stepper import Stepper, Top


class Stats(NamedTuple):
    """What an engine is doing and has done.

    Args:
      waiting, running: texts.
      pages_used, pages_free: of all lanes; a page that is only remembered is free.
      pages_known: of the free ones, those that are remembered.
      tokens_in: of the prompts of all requests.
      tokens_out: that were given.
      shared: tokens that were found in the cache, and not computed.
      computed: tokens that went through the model.
      columns: places that the steps had for them, so that what is more than `computed` is padding.
      preemptions: how often a text's pages were taken from it.
      steps: passes through the model.
      calls: of the device, each of one step or several.
      proposed, accepted: tokens of a draft.
    """

    waiting: int = 0
    running: int = 0
    pages_used: int = 0
    pages_free: int = 0
    pages_known: int = 0
    tokens_in: int = 0
    tokens_out: int = 0
    shared: int = 0
    computed: int = 0
    columns: int = 0
    preemptions: int = 0
    steps: int = 0
    calls: int = 0
    proposed: int = 0
    accepted: int = 0

    @property
    def acceptance(self) -> float:
        """The share of a draft's proposals that were accepted."""
        return self.accepted / self.proposed if self.proposed else 0.0


class Engine:
    """Generates for many requests at once, each of which gets what it would get alone.

    Keeps the queue, checks requests, ends texts and counts; a stepper computes the tokens: `Cached` for most models,
    `WithDraft` for speculative decoding, `Streamed` for models larger than the device, `WholeTexts` for models that
    keep nothing between tokens. Several processes with one layout each have an engine, and call the same of it in the
    same order (with a scheduler that does not go by the clock); all are told all tokens.

    Args:
      stepper: what takes the steps.
      clock: seconds, for the scheduler.
    """

    def __init__(self, stepper: Stepper, clock: Callable[[], float] = time.monotonic):
        self.stepper, self.clock = stepper, clock
        self._queue: list[Text] = []
        self._running: list[Text] = []
        self._texts: dict[Hashable, Text] = {}
        self._events: list[Event] = []
        self._number = self._tokens_in = self._tokens_out = self._preemptions = 0

    @property
    def places(self) -> int:
        """Texts that may be under way at once."""
        return self.stepper.places

    @property
    def length(self) -> int:
        """The most tokens of a text, prompt and continuation."""
        return self.stepper.length

    def submit(self, request: Request) -> None:
        """Puts a request into the queue.

        Raises:
          ConfigError: what it asks cannot be done here.
        """
        self.check(request)
        if request.id in self._texts:
            raise ConfigError(f"there is a request {request.id!r} under way already; give this one another id")
        text = Text(request, self._number, self.clock(), np.asarray(request.prompt).tolist())
        self._number += 1
        self._tokens_in += len(text.tokens)
        self._texts[request.id] = text
        self._queue.append(text)

    def check(self, request: Request) -> None:
        """That a request can be answered here.

        Raises:
          ConfigError: it cannot.
        """
        vocab, ids, s = self.stepper.vocab, np.asarray(request.prompt), request.sampling
        if ids.ndim != 1 or not ids.size or ids.dtype.kind not in "iu":
            raise ConfigError("a prompt is one or more token ids; begin with the id that ends a text, if with none")
        if ids.min() < 0 or ids.max() >= vocab:
            wrong = int(ids.min() if ids.min() < 0 else ids.max())
            raise ConfigError(f"the prompt has token id {wrong}, and the model knows ids from 0 to {vocab - 1}")
        if ids.size + s.max_tokens > self.length:
            raise ConfigError(
                f"a prompt of {ids.size} tokens and max_tokens = {s.max_tokens} are more than the {self.length} tokens "
                f"that a text may have here; ask for at most {max(self.length - ids.size, 0)}"
            )
        if request.scored and not self.stepper.scores:
            name = type(self.stepper).__name__
            raise ConfigError(f"{name} gives no log-probabilities of a prompt; ask for those of new tokens alone")

    def cancel(self, id: Hashable) -> None:
        """Ends a request, whose pages are free at once; of one that is not under way, nothing."""
        text = self._texts.get(id)
        if text is not None:
            self._events.append(Event(id, -1, finished="cancelled"))
            self._end(text)

    @property
    def busy(self) -> bool:
        """Whether `step` has something to do or to tell."""
        return bool(self._texts or self._events)

    @property
    def stats(self) -> Stats:
        """Counts."""
        return Stats(
            waiting=len(self._queue),
            running=len(self._running),
            tokens_in=self._tokens_in,
            tokens_out=self._tokens_out,
            preemptions=self._preemptions,
            **self.stepper.counts(),
        )

    def step(self) -> list[Event]:
        """Does what the stepper says is next; the tokens that were chosen, and the ends of texts.

        Raises:
          ConfigError: a scheduler that leaves everybody waiting, or gives a text what it cannot have.
        """
        events, self._events = self._events, []
        if self._texts:
            plan = self.stepper.admit(tuple(self._queue), tuple(self._running), self.clock())
            self._sort()
            self.stepper.run(plan, lambda *new: events.append(self._given(*new)))
        return events

    def compile(self, note: Callable[[int, int], None] = lambda done, of: None) -> None:
        """Compiles every step that there can be, so that no text waits for it, whatever its `Sampling`.

        Args:
          note: called before each with how many are done, and of how many.
        """
        self.stepper.compile(note)

    # Within

    def _sort(self) -> None:
        """Who waits and who runs, after the stepper has spoken."""
        gone = [t for t in self._running if not t.running]
        for text in gone:
            text.preempted += 1
            self._preemptions += 1
        came = [t for t in self._queue if t.running]
        self._running = [t for t in self._running if t.running]
        self._queue = [t for t in self._queue if not t.running]
        _insert(self._running, came)
        _insert(self._queue, gone)

    def _given(self, text: Text, token: int, logprob: float, top: Top) -> Event:
        """A text's new token; ends it with its last."""
        text.tokens.append(token)
        self._tokens_out += 1
        finished: Finish | None = None
        if token in self.stepper.end_ids and not text.request.sampling.ignore_end:
            finished = "stop"
        elif not text.left:
            finished = "length"
        if finished is not None:
            self._end(text)
        prompt = tuple(text.scores) if text.made == 1 else ()
        return Event(text.request.id, token, logprob, top, finished, prompt)

    def _end(self, text: Text) -> None:
        del self._texts[text.request.id]
        if text.running:
            self.stepper.release(text)
            self._running.remove(text)
        else:
            self._queue.remove(text)


def _insert(into: list[Text], texts: Iterable[Text]) -> None:
    """In order of arrival."""
    for text in texts:
        bisect.insort(into, text, key=_number)


def _number(text: Text) -> int:
    return text.number
