"""The engine: a queue of requests, continuous batching, and counts."""

from __future__ import annotations

import bisect
import dataclasses
import time
from collections.abc import Callable, Hashable, Iterable
from typing import NamedTuple

import numpy as np

from jaxscale.errors import ConfigError
from jaxscale.infer.engine.request import Event, Finish, Request, SequenceState
from jaxscale.infer.engine.stepper import Stepper, Top


class Stats(NamedTuple):
    """The state of an engine, and counts since it was made.

    Args:
      waiting: sequences without a slot.
      running: sequences with one.
      pages_used: pages that running sequences hold, over all shards.
      pages_free: pages that none holds, those of `pages_known` included.
      pages_known: free pages whose tokens are still in the prefix cache.
      tokens_in: tokens of the prompts of all requests.
      tokens_out: generated tokens.
      shared: tokens that the prefix cache had, so that they were not computed.
      computed: tokens that passed through the model.
      columns: places for tokens in all steps; what exceeds `computed` is padding.
      preemptions: how often a sequence was preempted.
      steps: passes through the model.
      calls: programs launched on the device, each of one step or several.
      proposed: tokens that a draft proposed.
      accepted: those of them that were accepted.
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
        """The share of a draft's proposals that were accepted; 0 without proposals."""
        return self.accepted / self.proposed if self.proposed else 0.0


class Engine:
    """Generates for many requests at once; each gets what it would get alone.

    The engine keeps the queue, checks requests, ends sequences and counts; a stepper computes the tokens: `Cached` for
    most models, `WithDraft` for speculative decoding, `Streamed` for models larger than the device's memory,
    `WholeSequences` for models without a cache. Several processes with one layout each have an engine; they must make
    the same calls in the same order (with a scheduler that does not read the clock), and each gets all events.

    Args:
      stepper: computes the steps.
      clock: returns seconds, for the scheduler.
      parameters: bytes of the model's parameters; `None` if they are not known.
    """

    def __init__(self, stepper: Stepper, clock: Callable[[], float] = time.monotonic, parameters: int | None = None):
        self.stepper, self.clock, self.parameters = stepper, clock, parameters
        self._queue: list[SequenceState] = []
        self._running: list[SequenceState] = []
        self._sequences: dict[Hashable, SequenceState] = {}
        self._events: list[Event] = []
        self._number = self._tokens_in = self._tokens_out = self._preemptions = 0
        self._before: dict[str, int] = {}  # what earlier steppers counted

    @property
    def slots(self) -> int:
        """Sequences that may run at once."""
        return self.stepper.slots

    @property
    def length(self) -> int:
        """The most tokens of a sequence, prompt and generated ones."""
        return self.stepper.length

    def submit(self, request: Request) -> None:
        """Put a request into the queue.

        Args:
          request: the request.

        Raises:
          ConfigError: the engine cannot answer it (see `check`), or an unfinished request has its id.
        """
        self.check(request)
        if request.id in self._sequences:
            raise ConfigError(f"request id {request.id!r} belongs to an unfinished request; use another id")
        prompt = np.asarray(request.prompt).tolist()
        self._tokens_in += len(prompt)
        if self.stepper.prefix:
            request = dataclasses.replace(request, prompt=(*self.stepper.prefix, *prompt))
            prompt = list(request.prompt)
        sequence = SequenceState(request, self._number, self.clock(), prompt)
        self._number += 1
        self._sequences[request.id] = sequence
        self._queue.append(sequence)

    def check(self, request: Request) -> None:
        """Check that the engine can answer a request.

        Args:
          request: the request.

        Raises:
          ConfigError: it cannot.
        """
        vocab, ids, s = self.stepper.vocab, np.asarray(request.prompt), request.sampling
        if ids.ndim != 1 or not ids.size or ids.dtype.kind not in "iu":
            raise ConfigError("a prompt must be one or more token ids; use the end-of-text id for an empty one")
        if ids.min() < 0 or ids.max() >= vocab:
            wrong = int(ids.min() if ids.min() < 0 else ids.max())
            raise ConfigError(f"the prompt has token id {wrong}; the model's ids are from 0 to {vocab - 1}")
        if ids.size + s.max_tokens > self.length:
            raise ConfigError(
                f"a prompt of {ids.size} tokens and max_tokens = {s.max_tokens} exceed the engine's length of "
                f"{self.length} tokens; max_tokens may be at most {max(self.length - ids.size, 0)}"
            )
        if request.scored and not self.stepper.scores:
            name = type(self.stepper).__name__
            raise ConfigError(f"{name} gives no log-probabilities of a prompt; request those of new tokens only")

    def cancel(self, id: Hashable) -> None:
        """End a request and free its pages; an unknown id does nothing.

        Args:
          id: of the request.
        """
        sequence = self._sequences.get(id)
        if sequence is not None:
            self._events.append(Event(id, -1, finished="cancelled"))
            self._end(sequence)

    @property
    def busy(self) -> bool:
        """Whether there are unfinished requests, or events that `step` has not returned yet."""
        return bool(self._sequences or self._events)

    @property
    def stats(self) -> Stats:
        """The engine's state and counts."""
        counts = {name: n + self._before.get(name, 0) for name, n in self.stepper.counts().items()}
        return Stats(
            waiting=len(self._queue),
            running=len(self._running),
            tokens_in=self._tokens_in,
            tokens_out=self._tokens_out,
            preemptions=self._preemptions,
            **counts,
        )

    def step(self) -> list[Event]:
        """Take the stepper's next step; return the chosen tokens and the ends of sequences.

        Raises:
          ConfigError: a scheduler schedules nothing, or tokens that a sequence has no pages for.
        """
        events, self._events = self._events, []
        if self._sequences:
            plan = self.stepper.admit(tuple(self._queue), tuple(self._running), self.clock())
            self._sort()
            self.stepper.run(plan, lambda *new: events.append(self._add_token(*new)))
        return events

    def move(self, stepper: Stepper) -> None:
        """Continue with another stepper of the same model, such as one on more devices (`Cached.on`).

        Unfinished requests stay, and get the tokens that they would have got: what running sequences had in the cache
        is computed again.

        Args:
          stepper: the new stepper.

        Raises:
          ConfigError: it has other ids, is for shorter sequences, or lacks scores of prompts that a request asks for;
            nothing was changed.
        """
        old, names = self.stepper, ("vocab", "end_ids", "prefix")
        if other := [name for name in names if getattr(old, name) != getattr(stepper, name)]:
            raise ConfigError(f"a stepper with another {other[0]} would answer otherwise; use one of the same model")
        if stepper.length < old.length:
            raise ConfigError(f"the stepper's length is {stepper.length}, and requests were accepted for {old.length}")
        if not stepper.scores and any(s.request.scored for s in self._sequences.values()):
            name = type(stepper).__name__
            raise ConfigError(f"{name} gives no log-probabilities of a prompt, which an unfinished request asks for")
        for sequence in self._running:
            old.release(sequence)
        for sequence in self._sequences.values():
            sequence.digests = []  # of pages, which may have another size; waiting ones may have them too
        self._sort()
        for name, n in old.counts().items():
            if not name.startswith("pages_"):
                self._before[name] = self._before.get(name, 0) + n
        self.stepper = stepper

    def compile(self, note: Callable[[int, int], None] = lambda done, of: None) -> None:
        """Compile every program that a step may need, so that no request waits for it, whatever its `Sampling`.

        Args:
          note: called before each with the number of programs that are compiled, and of all.
        """
        self.stepper.compile(note)

    # Helpers

    def _sort(self) -> None:
        """Move sequences between queue and running after the stepper has admitted and preempted."""
        preempted = [s for s in self._running if not s.running]
        for sequence in preempted:
            sequence.preempted += 1
            self._preemptions += 1
        admitted = [s for s in self._queue if s.running]
        self._running = [s for s in self._running if s.running]
        self._queue = [s for s in self._queue if not s.running]
        _insert(self._running, admitted)
        _insert(self._queue, preempted)

    def _add_token(self, sequence: SequenceState, token: int, logprob: float, top: Top) -> Event:
        """Append a sequence's new token, and end the sequence with its last."""
        sequence.tokens.append(token)
        self._tokens_out += 1
        finished: Finish | None = None
        if token in self.stepper.end_ids and not sequence.request.sampling.ignore_end:
            finished = "stop"
        elif not sequence.remaining:
            finished = "length"
        if finished is not None:
            self._end(sequence)
        prompt = tuple(sequence.scores[len(self.stepper.prefix) :]) if sequence.generated == 1 else ()
        return Event(sequence.request.id, token, logprob, top, finished, prompt)

    def _end(self, sequence: SequenceState) -> None:
        del self._sequences[sequence.request.id]
        if sequence.running:
            self.stepper.release(sequence)
            self._running.remove(sequence)
        else:
            self._queue.remove(sequence)


def _insert(into: list[SequenceState], sequences: Iterable[SequenceState]) -> None:
    """Insert in order of arrival."""
    for sequence in sequences:
        bisect.insort(into, sequence, key=lambda s: s.number)
