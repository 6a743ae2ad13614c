"""The worker: the one thread that uses the engine, and how other threads submit sequences to it."""

from __future__ import annotations

import collections
import itertools
import logging
import queue
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from types import TracebackType
from typing import NamedTuple

from jaxscale.errors import ConfigError
from jaxscale.infer.engine import Engine, Event, Request
from jaxscale.infer.sampling import Sampling
from jaxscale.infer.serve.errors import ApiError, bad, busy
from jaxscale.infer.serve.fair_queue import FairQueue
from jaxscale.infer.serve.limits import Limits
from jaxscale.infer.serve.metrics import Metrics

_LOG = logging.getLogger("jaxscale.serve")
_POLL = 0.25
"""Seconds between checks whether a waiting client is still connected."""
_BATCH = 256
"""The most tokens that are sent to a client together."""


_Item = tuple[int, Event] | ApiError | None
"""The index and the token of a sequence; an error; or `None` when all sequences are accepted."""


class NewSequence(NamedTuple):
    """A sequence to generate.

    Args:
      prompt: token ids.
      sampling: its settings.
      scored: whether the prompt's own log-probabilities are wanted.
    """

    prompt: tuple[int, ...]
    sampling: Sampling
    scored: bool = False


class Disconnected(Exception):
    """The client has closed the connection."""


class Submission:
    """Sequences that were submitted together; leaving the context cancels those that have not ended.

    `Worker.submit` makes it; one thread uses it.

    Args:
      worker: the worker.
      sequences: the sequences.
      client: who submitted them.
    """

    def __init__(self, worker: Worker, sequences: Sequence[NewSequence], client: str):
        self.sequences, self.client, self.since = sequences, client, time.monotonic()
        self.inbox: queue.SimpleQueue[_Item] = queue.SimpleQueue()
        self._worker, self._unfinished = worker, set(range(len(sequences)))

    def __enter__(self) -> Submission:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._unfinished:
            self._worker.cancel(self, self._unfinished)
        state = "cancelled" if self._unfinished else "done"
        if isinstance(error, ApiError):
            state = {504: "timeout", 400: "refused"}.get(error.status, "failed")
        self._worker.metrics.requests.add(1, state)

    def end(self, index: int, *, cancel: bool = False) -> None:
        """Note that a sequence has ended, or that no more of it is wanted.

        Args:
          index: of the sequence.
          cancel: whether the engine still has to be told.
        """
        self._unfinished.remove(index)
        if cancel:
            self._worker.cancel(self, {index})

    def batches(self, deadline: float, disconnected: Callable[[], bool]) -> Iterator[list[tuple[int, Event]]]:
        """Yield tokens as they are generated, each with the index of its sequence.

        The first batch is empty; it comes when all sequences are accepted.

        Args:
          deadline: on `time.monotonic`'s clock.
          disconnected: whether the client has closed the connection.

        Raises:
          ApiError: a sequence is refused, the engine has failed, or the deadline has passed.
          Disconnected: the client has closed the connection.
        """
        checked = time.monotonic()
        while self._unfinished:
            items: list[_Item] = []
            try:
                items.append(self.inbox.get(timeout=_POLL))
                while len(items) < _BATCH:  # send what has arrived meanwhile together
                    items.append(self.inbox.get_nowait())
            except queue.Empty:
                pass
            now = time.monotonic()
            if now > deadline:
                headers = {"x-should-retry": "false"}  # else OpenAI's clients would repeat the request
                raise ApiError(504, "the answer took longer than this server allows", code="timeout", headers=headers)
            if now - checked > _POLL or not items:
                checked = now
                if disconnected():
                    raise Disconnected
            batch = []
            for item in items:
                if isinstance(item, ApiError):
                    raise item
                if item is None:
                    yield []
                else:
                    batch.append(item)
            if batch:
                yield batch


class _Live(NamedTuple):
    submission: Submission
    sequence: int  # index in the submission
    request: Request
    last: list[float]  # the time of its last token, if it has one


class Worker:
    """Runs an engine on a thread of its own.

    Args:
      engine: the engine; no other thread may use it afterwards.
      limits: of sequences that wait or run.
      metrics: counters to update.

    Attributes:
      generated: tokens that clients have received.
      busy: seconds of the engine's steps.
      parameters: bytes of the model's parameters; `None` if they are not known.
    """

    def __init__(self, engine: Engine, limits: Limits, metrics: Metrics):
        self.metrics, self.stats, self.parameters = metrics, engine.stats, engine.parameters
        self._engine, self._limits = engine, limits
        self._waiting: FairQueue[Hashable] = FairQueue()  # ids of sequences that the engine does not have yet
        self._inbox: queue.SimpleQueue[Submission | tuple[Submission, set[int]] | None] = queue.SimpleQueue()
        self._live: dict[Hashable, _Live] = {}
        self._ids, self._lock = itertools.count(), threading.Lock()
        self._unfinished: collections.Counter[str] = collections.Counter()  # sequences that wait or run, by client
        self._closed: ApiError | None = None
        self.failed = False
        self.generated, self.busy = 0, 0.0
        self._thread = threading.Thread(target=self._run, name="jaxscale-engine", daemon=True)
        self._thread.start()

    def submit(self, sequences: Sequence[NewSequence], client: str = "") -> Submission:
        """Submit sequences to the engine.

        Args:
          sequences: the sequences.
          client: who submits them; clients have equal shares of the engine.

        Raises:
          ApiError: too many sequences wait or run already, or the engine has failed.
        """
        submission = Submission(self, sequences, client)
        with self._lock:
            if self._closed is not None:
                raise self._closed
            own, total = self._unfinished[client], self._unfinished.total()
            most, share = self._limits.requests, self._limits.per_client
            if own + len(sequences) > share or total + len(sequences) > most:
                self.metrics.requests.add(1, "refused")
                raise busy(
                    f"no place for {len(sequences)} more sequences: this client has {own} of at most {share} "
                    f"unfinished, and all clients {total} of at most {most}; try again when some have ended",
                    429,
                )
            self._unfinished[client] += len(sequences)
            self._inbox.put(submission)
        return submission

    def cancel(self, submission: Submission, indices: set[int]) -> None:
        """End sequences, and free their pages.

        Args:
          submission: whose.
          indices: of its sequences.
        """
        self._inbox.put((submission, set(indices)))

    def stop(self, seconds: float = 10.0) -> None:
        """End the thread after its step; sequences that still run are lost.

        Args:
          seconds: how long to wait for the thread.
        """
        self._inbox.put(None)
        self._thread.join(seconds)

    @property
    def rate(self) -> float:
        """Tokens per second of the engine's steps so far; 0 before the first token."""
        return self.generated / self.busy if self.generated else 0.0

    def _run(self) -> None:
        try:
            while self._read_inbox():
                self._feed_engine()
                if self._engine.busy:
                    began = time.monotonic()
                    events = self._engine.step()
                    self.busy += time.monotonic() - began
                    self._deliver(events)
                stats = self._engine.stats
                self.stats = stats._replace(waiting=stats.waiting + len(self._waiting))
        except BaseException:  # whatever it is, waiting threads must learn of it
            self.failed = True
            _LOG.exception("the engine failed")
            self._close(ApiError(500, "the engine failed; the server must be restarted", code="engine_failed"))
        else:
            self._close(busy("the server is stopping"))

    def _read_inbox(self) -> bool:
        """Handle submissions and cancellations; wait for one if there is nothing to do. `False` means stop."""
        wait = not self._engine.busy and not self._waiting
        while True:
            try:
                message = self._inbox.get(block=wait)
            except queue.Empty:
                return True
            if message is None:
                return False
            if isinstance(message, Submission):
                self._accept(message)
            else:
                self._cancel(*message)
            wait = False

    def _accept(self, submission: Submission) -> None:
        requests = [Request(s.prompt, s.sampling, next(self._ids), s.scored) for s in submission.sequences]
        try:
            for request in requests:
                self._engine.check(request)
        except ConfigError as error:
            self._release(submission.client, len(requests))
            submission.inbox.put(bad("prompt", str(error)))
            return
        for index, request in enumerate(requests):
            self._live[request.id] = _Live(submission, index, request, [])
            self._waiting.put(submission.client, id(submission), request.id)
        self.metrics.tokens_in.add(sum(len(s.prompt) for s in submission.sequences))
        submission.inbox.put(None)

    def _feed_engine(self) -> None:
        """Give the engine one sequence more than it has slots: its queue is in order of arrival, and ours is fair."""
        stats = self._engine.stats
        for _ in range(min(len(self._waiting), self._engine.slots + 1 - stats.waiting - stats.running)):
            self._engine.submit(self._live[self._waiting.take()].request)

    def _cancel(self, submission: Submission, indices: set[int]) -> None:
        cancelled = [n for n, live in self._live.items() if live.submission is submission and live.sequence in indices]
        for number in cancelled:
            if not self._waiting.remove(submission.client, id(submission), number):
                self._engine.cancel(number)
            del self._live[number]
            self._release(submission.client, 1)

    def _deliver(self, events: Sequence[Event]) -> None:
        now = time.monotonic()
        by_sequence: dict[Hashable, list[Event]] = {}  # a step may generate several tokens of a sequence
        for event in events:
            by_sequence.setdefault(event.id, []).append(event)
        for id, tokens in by_sequence.items():
            live = self._live.get(id)
            if live is None:  # cancelled meanwhile
                continue
            self.metrics.tokens_out.add(len(tokens))
            self.generated += len(tokens)
            if live.last:
                self.metrics.each.observe((now - live.last[0]) / len(tokens), len(tokens))
            else:
                self.metrics.first.observe(now - live.submission.since)
            live.last[:] = [now]
            if tokens[-1].finished is not None:
                self.metrics.whole.observe(now - live.submission.since)
                del self._live[id]
                self._release(live.submission.client, 1)
            for token in tokens:
                live.submission.inbox.put((live.sequence, token))

    def _release(self, client: str, sequences: int) -> None:
        with self._lock:
            self._unfinished[client] -= sequences
            if not self._unfinished[client]:
                del self._unfinished[client]

    def _close(self, error: ApiError) -> None:
        """Answer all unfinished and later submissions with an error."""
        with self._lock:  # no submission is accepted after this
            self._closed = error
        for live in self._live.values():
            live.submission.inbox.put(error)
        self._live.clear()
        while True:
            try:
                message = self._inbox.get_nowait()
            except queue.Empty:
                return
            if isinstance(message, Submission):
                message.inbox.put(error)
