"""The one thread that has the engine, and how others ask it for texts."""

from __future__ import annotations

import collections
import itertools
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from jaxscale.errors import ConfigError
from jaxscale.infer.engine import Engine, Event, Request
from jaxscale.infer.sampling import Sampling
from jaxscale.infer.serve.errors import ApiError, bad, busy
from jaxscale.infer.serve.limits import Limits
from jaxscale.infer.serve.metrics import Metrics
from jaxscale.infer.serve.turns import Turns

_LOG = logging.getLogger("jaxscale.serve")
_LOOK = 0.25
"""Seconds between looks whether a waiting client is still there."""
_TOGETHER = 256
"""Tokens that are told at once at most."""


class Text(NamedTuple):
    """What is to be continued, and how; `scored` wants what the prompt's own tokens get, too."""

    prompt: tuple[int, ...]
    sampling: Sampling
    scored: bool = False


class Gone(Exception):
    """The client has left."""


class Asking:
    """Texts that were asked for together; leaving it as a context cancels those that have not ended.

    Made by `Worker.ask`, used by one thread.
    """

    def __init__(self, worker: Worker, texts: Sequence[Text], client: str):
        self.texts, self.client, self.since = texts, client, time.monotonic()
        self.inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._worker, self._left = worker, set(range(len(texts)))

    def __enter__(self) -> Asking:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        if self._left:
            self._worker.cancel(self, self._left)
        state = "cancelled" if self._left else "done"
        if isinstance(error, ApiError):
            state = {504: "timeout", 400: "refused"}.get(error.status, "failed")
        self._worker.metrics.requests.add(1, state)

    def end(self, index: int, *, cancel: bool = False) -> None:
        """Whoever listens wants no more of a text.

        Args:
          index: which.
          cancel: the engine does not know of its end.
        """
        self._left.remove(index)
        if cancel:
            self._worker.cancel(self, {index})

    def batches(self, until: float, gone: Callable[[], bool]) -> Iterator[list[tuple[int, Event]]]:
        """Tokens as they come, each with its text's place; the first batch is empty, once all texts were taken.

        Args:
          until: when it takes too long, on `time.monotonic`'s clock.
          gone: whether the client has left.

        Raises:
          ApiError: the engine takes a text not, or failed, or time is up.
          Gone: so it has.
        """
        looked = time.monotonic()
        while self._left:
            items: list[Any] = []
            try:
                items.append(self.inbox.get(timeout=_LOOK))
                while len(items) < _TOGETHER:  # what has come meanwhile goes out together
                    items.append(self.inbox.get_nowait())
            except queue.Empty:
                pass
            now = time.monotonic()
            if now > until:
                headers = {"x-should-retry": "false"}  # OpenAI's clients would ask again, for as long
                raise ApiError(504, "the answer took longer than this server allows", code="timeout", headers=headers)
            if now - looked > _LOOK or not items:
                looked = now
                if gone():
                    raise Gone
            batch = []
            for item in items:
                if isinstance(item, Exception):
                    raise item
                if item is None:
                    yield []
                else:
                    batch.append(item)
            if batch:
                yield batch


class _Live(NamedTuple):
    asking: Asking
    place: int
    request: Request
    last: list[float]  # when its last token came, if one did


class Worker:
    """Runs an engine on a thread of its own.

    Args:
      engine: what nobody else may touch from now on.
      limits: of texts that may wait or run at once.
      metrics: where it counts.
    """

    def __init__(self, engine: Engine, limits: Limits, metrics: Metrics):
        self.metrics, self.stats = metrics, engine.stats
        self._engine, self._limits = engine, limits
        self._turns: Turns[int] = Turns()  # ids of texts that the engine does not know yet
        self._inbox: queue.SimpleQueue[Asking | tuple[Asking, set[int]] | None] = queue.SimpleQueue()
        self._live: dict[Any, _Live] = {}
        self._ids, self._lock = itertools.count(), threading.Lock()
        self._asked: collections.Counter[str] = collections.Counter()  # texts that wait or run, by client
        self._over: ApiError | None = None
        self.failed = False
        self._thread = threading.Thread(target=self._run, name="jaxscale-engine", daemon=True)
        self._thread.start()

    def ask(self, texts: Sequence[Text], client: str = "") -> Asking:
        """Asks for continuations.

        Args:
          texts: to continue.
          client: who asks; clients have equal shares of the engine.

        Raises:
          ApiError: too many wait already, or the engine has failed.
        """
        asking = Asking(self, texts, client)
        with self._lock:
            if self._over is not None:
                raise self._over
            own, every = self._asked[client], self._asked.total()
            most, share = self._limits.requests, self._limits.most
            if own + len(texts) > share or every + len(texts) > most:
                self.metrics.requests.add(1, "refused")
                raise busy(
                    f"{len(texts)} more texts are too many now: {own} of this client's {share} places are taken, and "
                    f"{every} of all {most}; ask again when some have ended",
                    429,
                )
            self._asked[client] += len(texts)
            self._inbox.put(asking)
        return asking

    def cancel(self, asking: Asking, indices: set[int]) -> None:
        """Ends texts of an asking, and frees their pages."""
        self._inbox.put((asking, set(indices)))

    def stop(self, seconds: float = 10.0) -> None:
        """Ends the thread after its step; texts that still run are lost."""
        self._inbox.put(None)
        self._thread.join(seconds)

    def _run(self) -> None:
        try:
            while self._take():
                self._feed()
                if self._engine.busy:
                    self._give(self._engine.step())
                stats = self._engine.stats
                self.stats = stats._replace(waiting=stats.waiting + len(self._turns))
        except BaseException:  # whatever it was, those who wait must hear of it
            self.failed = True
            _LOG.exception("the engine failed")
            self._end(ApiError(500, "the engine failed; this server is of no use any more", code="engine_failed"))
        else:
            self._end(busy("the server is stopping"))

    def _take(self) -> bool:
        """Does what was asked for; waits when there is nothing else to do. False: stop."""
        wait = not self._engine.busy and not self._turns
        while True:
            try:
                task = self._inbox.get(block=wait)
            except queue.Empty:
                return True
            if task is None:
                return False
            if isinstance(task, Asking):
                self._submit(task)
            else:
                self._cancel(*task)
            wait = False

    def _submit(self, asking: Asking) -> None:
        requests = [Request(t.prompt, t.sampling, next(self._ids), t.scored) for t in asking.texts]
        try:
            for request in requests:
                self._engine.check(request)
        except ConfigError as error:
            self._release(asking.client, len(requests))
            asking.inbox.put(bad("prompt", str(error)))
            return
        for place, request in enumerate(requests):
            self._live[request.id] = _Live(asking, place, request, [])
            self._turns.put(asking.client, id(asking), request.id)  # type: ignore[arg-type]
        self.metrics.tokens_in.add(sum(len(t.prompt) for t in asking.texts))
        asking.inbox.put(None)

    def _feed(self) -> None:
        """Gives the engine as many texts as it has places for and one, so that others need not wait for all."""
        stats = self._engine.stats
        for _ in range(min(len(self._turns), self._engine.places + 1 - stats.waiting - stats.running)):
            self._engine.submit(self._live[self._turns.take()].request)

    def _cancel(self, asking: Asking, indices: set[int]) -> None:
        for number in [n for n, live in self._live.items() if live.asking is asking and live.place in indices]:
            if not self._turns.remove(asking.client, id(asking), number):
                self._engine.cancel(number)
            del self._live[number]
            self._release(asking.client, 1)

    def _give(self, events: Sequence[Event]) -> None:
        now = time.monotonic()
        by_text: dict[Any, list[Event]] = {}  # a step may bring a text several
        for event in events:
            by_text.setdefault(event.id, []).append(event)
        for id, tokens in by_text.items():
            live = self._live.get(id)
            if live is None:  # cancelled meanwhile
                continue
            self.metrics.tokens_out.add(len(tokens))
            if live.last:
                self.metrics.each.observe((now - live.last[0]) / len(tokens), len(tokens))
            else:
                self.metrics.first.observe(now - live.asking.since)
            live.last[:] = [now]
            if tokens[-1].finished is not None:
                self.metrics.whole.observe(now - live.asking.since)
                del self._live[id]
                self._release(live.asking.client, 1)
            for token in tokens:
                live.asking.inbox.put((live.place, token))

    def _release(self, client: str, texts: int) -> None:
        with self._lock:
            self._asked[client] -= texts
            if not self._asked[client]:
                del self._asked[client]

    def _end(self, told: ApiError) -> None:
        with self._lock:  # nobody asks any more after this
            self._over = told
        for live in self._live.values():
            live.asking.inbox.put(told)
        self._live.clear()
        while True:
            try:
                task = self._inbox.get_nowait()
            except queue.Empty:
                return
            if isinstance(task, Asking):
                task.inbox.put(told)
