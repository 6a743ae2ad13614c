"""The engine: requests come and go at any time, and every step is for all that are there."""

from __future__ import annotations

import bisect
import contextlib
import time
from collections.abc import Callable, Hashable, Iterable
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx

from jaxscale.errors import ConfigError
from jaxscale.infer.cache import Paged, generating, init_cache, reuses_prefixes
from jaxscale.infer.engine.device import Found, Scored, pick_of, score_of, steps_of
from jaxscale.infer.engine.packing import Shape, Sizes, Told, how_to_pick, pack, targets_of
from jaxscale.infer.engine.pages import Pages
from jaxscale.infer.engine.request import Event, Finish, Request, Score, Text
from jaxscale.infer.engine.scheduler import Batch, FirstCome, Scheduler
from jaxscale.layout import Layout
from jaxscale.nn import Cache


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
    """

    waiting: int
    running: int
    pages_used: int
    pages_free: int
    pages_known: int
    tokens_in: int
    tokens_out: int
    shared: int
    computed: int
    columns: int
    preemptions: int
    steps: int
    calls: int


class Engine:
    """Generates for many requests at once, each of which gets what it would get alone.

    Texts join and leave between steps (continuous batching), long prompts are computed in chunks beside the others'
    tokens, tokens of all texts stand side by side without padding, and texts that begin alike share pages. Several
    processes with one layout each have an engine, and call the same of it in the same order (with a scheduler that
    does not go by the clock); all are told all tokens.

    Args:
      graphdef, params: the model, laid out by `layout` (`infer.stages.on_stages`, where it has stages).
      layout: where it lives; each of the devices that cut `batch` has texts of its own (a lane), or, where layers lie
        on stages, as many lanes as there are stages.
      cache: how keys and values are kept.
      rows: texts under way at once in each lane.
      length: the most tokens of a text, prompt and continuation; by default 1024, or the model's learned positions.
      budget: the most tokens of a lane in a step; by default 256, or twice `rows` if that is more.
      scheduler: who goes on, and who waits.
      end_ids: ids that end a text.
      clock: seconds, for the scheduler.

    Raises:
      ConfigError: sizes that do not fit, or a model whose texts are not independent of each other.
      LayoutError: the cache does not divide.
    """

    def __init__(
        self,
        graphdef: nnx.GraphDef,
        params: Any,
        *,
        layout: Layout | None = None,
        cache: Cache = Paged(),  # noqa: B008  (a value)
        rows: int = 8,
        length: int | None = None,
        budget: int | None = None,
        scheduler: Scheduler = FirstCome(),  # noqa: B008
        end_ids: Iterable[int] = (),
        clock: Callable[[], float] = time.monotonic,
    ):
        self.layout, self.cache, self.scheduler, self.clock = generating(layout), cache, scheduler, clock
        model = nnx.merge(graphdef, params)
        self.vocab = model.head_weight().shape[0]
        self.end_ids = frozenset(end_ids)
        learned = getattr(model, "positions", None)
        positions = None if learned is None else learned.weight.get_value().shape[0]
        self.length = (positions or 1024) if length is None else length
        budget = max(256, 2 * rows) if budget is None else budget
        _check(model, rows, self.length, budget, positions)
        self._params, self._ends = params, np.asarray(sorted(self.end_ids) or [-1], np.int32)
        self.pages, self._sizes, lanes, length = _room(
            self.layout, cache, rows, self.length, budget, reuses_prefixes(model, cache)
        )
        with self._there():
            self._states = init_cache(model, cache, lanes, rows, length, self.length)
        self._one, self._ahead = steps_of(graphdef, cache, scheduler.ahead)  # type: ignore[arg-type]  # caches are values
        self._pick, self._score = pick_of(graphdef), score_of(graphdef)
        self._queue: list[Text] = []
        self._running: list[Text] = []
        self._texts: dict[Hashable, Text] = {}
        self._events: list[Event] = []
        self._count = dict.fromkeys(("number", "in", "out", "computed", "columns", "preemptions", "steps", "calls"), 0)

    @property
    def places(self) -> int:
        """Texts that may be under way at once."""
        return self._sizes.lanes * self._sizes.rows

    def submit(self, request: Request) -> None:
        """Puts a request into the queue.

        Raises:
          ConfigError: what it asks cannot be done here.
        """
        self.check(request)
        if request.id in self._texts:
            raise ConfigError(f"there is a request {request.id!r} under way already; give this one another id")
        text = Text(request, self._count["number"], self.clock(), np.asarray(request.prompt).tolist())
        self._count["number"] += 1
        self._count["in"] += len(text.tokens)
        self._texts[request.id] = text
        self._queue.append(text)

    def check(self, request: Request) -> None:
        """That a request can be answered here.

        Raises:
          ConfigError: it cannot.
        """
        ids, s = np.asarray(request.prompt), request.sampling
        if ids.ndim != 1 or not ids.size or ids.dtype.kind not in "iu":
            raise ConfigError("a prompt is one or more token ids; begin with the id that ends a text, if with none")
        if ids.min() < 0 or ids.max() >= self.vocab:
            wrong = int(ids.min() if ids.min() < 0 else ids.max())
            raise ConfigError(f"the prompt has token id {wrong}, and the model knows ids from 0 to {self.vocab - 1}")
        if ids.size + s.max_tokens > self.length:
            raise ConfigError(
                f"a prompt of {ids.size} tokens and max_tokens = {s.max_tokens} are more than the {self.length} tokens "
                f"that a text may have here; ask for at most {max(self.length - ids.size, 0)}"
            )

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
        c, pages = self._count, self.pages.count()
        return Stats(
            waiting=len(self._queue),
            running=len(self._running),
            pages_used=pages.used,
            pages_free=pages.free,
            pages_known=pages.known,
            tokens_in=c["in"],
            tokens_out=c["out"],
            shared=self.pages.shared_tokens,
            computed=c["computed"],
            columns=c["columns"],
            preemptions=c["preemptions"],
            steps=c["steps"],
            calls=c["calls"],
        )

    def step(self) -> list[Event]:
        """Does what the scheduler says is next; the tokens that were chosen, and the ends of texts.

        Raises:
          ConfigError: a scheduler that leaves everybody waiting, or gives a text what it cannot have.
        """
        events, self._events = self._events, []
        before = len(events)
        if not self._texts:
            return events
        batch = self.scheduler.step(tuple(self._queue), tuple(self._running), self.pages, self.clock())
        self._sort(batch)
        shape = self._sizes.of(batch.parts)
        told, chosen = pack(batch.parts, shape, self._sizes, self.vocab, self._ends)
        targets, stretches = targets_of(batch.parts, shape, self._sizes.lanes)
        found, scored = self._run(shape, told, batch.ahead, batch.until_end, targets if stretches else None)
        for stretch in stretches:
            _note_scores(scored, *stretch)
        for text, n in batch.parts:
            text.kept += n
        for step in range(int(found.steps)):
            for text, lane, place in chosen:
                if text.running:
                    text.kept = len(text.tokens)
                    events.append(self._given(text, found, (step, lane, place)))
        for text, _ in batch.parts:
            if text.running:
                self.pages.learn(text)
        self._tally(told, int(found.steps), sum(n for _, n in batch.parts) + len(events) - len(chosen) - before)
        return events

    def compile(self, note: Callable[[int, int], None] = lambda done, of: None) -> None:
        """Compiles every step that there can be, so that no text waits for it, whatever its `Sampling`.

        Args:
          note: called before each with how many are done, and of how many.
        """
        shapes = list(self._sizes.all())
        for done, shape in enumerate(shapes):
            note(done, len(shapes))
            told, _ = pack((), shape, self._sizes, self.vocab, self._ends)
            self._run(shape, told, 1, False, np.zeros_like(told.tokens) if shape.blocks else None)

    # Within

    def _run(self, shape: Shape, told: Told, ahead: int, until_end: bool, targets: Any) -> tuple[Found, Scored | None]:
        scored = None
        with self._there():
            if shape.blocks:
                last, hidden, self._states = self._one(self._params, self._states, told)
                found = self._pick(self._params, last, how_to_pick(told))
                if targets is not None:
                    scored = self._score(self._params, hidden, targets)
            else:
                found, self._states = self._ahead(
                    self._params, self._states, told, np.int32(ahead), np.bool_(until_end)
                )
        return jax.device_get((found, scored))

    def _there(self) -> contextlib.AbstractContextManager[Any]:
        return self.layout or contextlib.nullcontext()

    def _sort(self, batch: Batch) -> None:
        """Who waits and who runs, after the scheduler has spoken."""
        gone = [t for t in self._running if not t.running]
        for text in gone:
            text.preempted += 1
            self._count["preemptions"] += 1
        came = [t for t in self._queue if t.running]
        number = lambda t: t.number  # noqa: E731
        self._running = [t for t in self._running if t.running]
        for text in came:
            bisect.insort(self._running, text, key=number)
        self._queue = [t for t in self._queue if not t.running]
        for text in gone:
            bisect.insort(self._queue, text, key=number)
        name = type(self.scheduler).__name__
        if not batch.parts:
            raise ConfigError(f"{name} gave a step without a text, and {len(self._texts)} are under way")
        for text, n in batch.parts:
            pages = -(-(text.kept + n) // self.pages.page)
            if not text.running or not 1 <= n <= text.behind or len(text.pages) < pages:
                raise ConfigError(
                    f"{name} wants {n} tokens of request {text.request.id!r}, which has {text.behind} to compute and "
                    f"{len(text.pages)} pages; admit it and let it grow first"
                )

    def _given(self, text: Text, found: Found, at: tuple[int, int, int]) -> Event:
        """A text's new token; ends it with its last."""
        s, token = text.request.sampling, int(found.token[at])
        text.tokens.append(token)
        self._count["out"] += 1
        finished: Finish | None = None
        if token in self.end_ids and not s.ignore_end:
            finished = "stop"
        elif not text.left:
            finished = "length"
        ids, logprobs = found.top[at][: s.logprobs], found.top_logprob[at][: s.logprobs]
        top = tuple(zip(ids.tolist(), logprobs.tolist(), strict=True))
        if finished is not None:
            self._end(text)
        prompt = tuple(text.scores) if text.made == 1 else ()
        return Event(text.request.id, token, float(found.logprob[at]), top, finished, prompt)

    def _end(self, text: Text) -> None:
        del self._texts[text.request.id]
        if text.running:
            self.pages.learn(text)
            self.pages.release(text)
            self._running.remove(text)
        else:
            self._queue.remove(text)

    def _tally(self, told: Told, steps: int, computed: int) -> None:
        c = self._count
        c["calls"] += 1
        c["steps"] += steps
        c["columns"] += steps * told.tokens.size
        c["computed"] += computed


def _note_scores(scored: Any, text: Text, lane: int, column: int, count: int) -> None:
    """Writes down what the model made of tokens of a text's prompt."""
    shown = text.request.sampling.logprobs
    for i in range(column, column + count):
        ids, logprobs = scored.top[lane, i, :shown].tolist(), scored.top_logprob[lane, i, :shown].tolist()
        place = text.kept + i - column  # one that was sent back begins again
        text.scores[place : place + 1] = [Score(float(scored.logprob[lane, i]), tuple(zip(ids, logprobs, strict=True)))]


def _room(
    layout: Layout | None, cache: Cache, rows: int, length: int, budget: int, sharing: bool
) -> tuple[Pages, Sizes, int, int]:
    """The bookkeeping of a cache, the sizes of steps, the number of lanes, and the length to make it of."""
    cut = lambda axis: 1 if layout is None else layout.split(axis)  # noqa: E731
    lanes = cut("batch") * (1 if layout is None else layout.stages)  # so that every pipeline stage is at work
    if not isinstance(cache, Paged):  # a row is a page, and every text has its own
        unit = cut("cache_seq")
        length = -(-length // unit) * unit
        pages = Pages(lanes, rows, length, rows, budget=budget, sharing=False, growing=False)
        return pages, Sizes(lanes, rows, budget, 0), lanes, length
    pieces = cut("pages")
    unit = cache.page * pieces
    length = -(-length // unit) * unit
    entries, count = cache.per_row(length), cache.count(rows, length)
    if count < entries:
        raise ConfigError(
            f"PagedCache.pages = {count} of {cache.page} positions do not hold a text of {length} tokens; give it at "
            f"least {entries}, or make length smaller"
        )
    pages = Pages(lanes, rows, cache.page, count, pieces=pieces, budget=budget, sharing=sharing)
    return pages, Sizes(lanes, rows, budget, entries), lanes, length


def _check(model: Any, rows: int, length: int, budget: int, positions: int | None) -> None:
    for name, value in (("rows", rows), ("length", length), ("budget", budget)):
        if not isinstance(value, int) or value < 1:
            raise ConfigError(f"Engine: {name} = {value!r}: must be a whole number of at least 1")
    if budget < rows:
        raise ConfigError(
            f"Engine: budget = {budget} does not give each of the {rows} rows a token; the least is {rows}"
        )
    if positions is not None and length > positions:
        raise ConfigError(f"Engine: length = {length} is more than the model's {positions} learned positions")
    check_independent(model)


def check_independent(model: Any) -> None:
    """That no text of a model depends on its company.

    Raises:
      ConfigError: one does.
    """
    for run in getattr(model, "runs", ()):
        for block in run.blocks:
            capacity = getattr(getattr(block.mlp, "config", None), "capacity", None)
            router = getattr(getattr(block.mlp, "config", None), "router", None)
            if getattr(router, "needs_capacity", False):
                raise ConfigError(
                    f"{type(router).__name__} chooses among all tokens of a step, later ones and padding included, so "
                    "that a text would depend on its company; a model that is to generate is trained with SoftmaxRouter"
                )
            if capacity is not None:
                raise ConfigError(
                    f"MixtureOfExperts.capacity = {capacity} drops tokens by what else is in a step, so that a text "
                    "would depend on its company; generate with MixtureOfExperts.capacity = None"
                )
