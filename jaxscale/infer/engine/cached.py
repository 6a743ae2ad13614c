"""Steps of a model with a cache: tokens of all texts stand side by side, prompts in chunks beside new tokens."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx

from jaxscale.errors import ConfigError
from jaxscale.infer.cache import Paged, decodable, generating, init_cache, reuses_prefixes
from jaxscale.infer.engine.device import Found, Scored, pick_of, score_of, steps_of
from jaxscale.infer.engine.packing import Shape, Sizes, Told, how_to_pick, pack, targets_of
from jaxscale.infer.engine.pages import Pages
from jaxscale.infer.engine.request import Score, Text
from jaxscale.infer.engine.scheduler import Batch, FirstCome, Scheduler
from jaxscale.infer.engine.stepper import Give, check_independent, check_sizes
from jaxscale.layout import Layout
from jaxscale.nn import Cache


class Cached:
    """Texts join and leave between steps (continuous batching), and texts that begin alike share pages.

    Long prompts are computed in chunks beside the others' tokens; where pages run out, a text is sent back into the
    queue and computed anew.

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

    Raises:
      ConfigError: sizes that do not fit, or a model whose texts are not independent of each other.
      LayoutError: the cache does not divide.
    """

    scores = True

    def __init__(
        self,
        graphdef: nnx.GraphDef[Any],
        params: Any,
        *,
        layout: Layout | None = None,
        cache: Cache = Paged(),  # noqa: B008  (a value)
        rows: int = 8,
        length: int | None = None,
        budget: int | None = None,
        scheduler: Scheduler = FirstCome(),  # noqa: B008
        end_ids: Iterable[int] = (),
    ):
        self.layout, self.cache, self.scheduler = generating(layout), cache, scheduler
        model = nnx.merge(graphdef, params)
        self.vocab = model.head_weight().shape[0]
        self.end_ids = frozenset(end_ids)
        positions = decodable(model).max_length
        self.length = (positions or 1024) if length is None else length
        budget = max(256, 2 * rows) if budget is None else budget
        _check(model, rows, self.length, budget, positions)
        self._params, self._ends = params, np.asarray(sorted(self.end_ids) or [-1], np.int32)
        self.pages, self._sizes, lanes, length = _room(
            self.layout, cache, rows, self.length, budget, reuses_prefixes(model, cache)
        )
        self.places = self._sizes.lanes * self._sizes.rows
        with self._there():
            self._states = init_cache(model, cache, lanes, rows, length, self.length)
        self._one, self._ahead = steps_of(graphdef, cache, scheduler.ahead)  # type: ignore[arg-type]  # caches are values
        self._pick, self._score = pick_of(graphdef), score_of(graphdef)
        self._count = dict.fromkeys(("computed", "columns", "steps", "calls"), 0)

    def counts(self) -> dict[str, int]:
        """See `Stepper`."""
        pages = self.pages.count()
        kept = dict(pages_used=pages.used, pages_free=pages.free, pages_known=pages.known)
        return {**kept, "shared": self.pages.shared_tokens, **self._count}

    def admit(self, queue: Sequence[Text], running: Sequence[Text], clock: float) -> Batch:
        """See `Stepper`; what the scheduler says."""
        batch = self.scheduler.step(queue, running, self.pages, clock)
        name = type(self.scheduler).__name__
        if not batch.parts:
            raise ConfigError(f"{name} gave a step without a text, and {len(queue) + len(running)} are under way")
        for text, n in batch.parts:
            pages = -(-(text.kept + n) // self.pages.page)
            if not text.running or not 1 <= n <= text.behind or len(text.pages) < pages:
                raise ConfigError(
                    f"{name} wants {n} tokens of request {text.request.id!r}, which has {text.behind} to compute and "
                    f"{len(text.pages)} pages; admit it and let it grow first"
                )
        return batch

    def run(self, plan: Batch, give: Give) -> None:
        """See `Stepper`."""
        shape = self._sizes.of(plan.parts)
        told, chosen = pack(plan.parts, shape, self._sizes, self.vocab, self._ends)
        targets, stretches = targets_of(plan.parts, shape, self._sizes.lanes)
        found, scored = self._run(shape, told, plan.ahead, plan.until_end, targets if stretches else None)
        for stretch in stretches:
            _note_scores(scored, *stretch)
        for text, n in plan.parts:
            text.kept += n
        steps, given = int(found.steps), 0
        for step in range(steps):
            for text, lane, place in chosen:
                if text.running:
                    text.kept, at, given = len(text.tokens), (step, lane, place), given + 1
                    shown = text.request.sampling.logprobs
                    top = zip(found.top[at][:shown].tolist(), found.top_logprob[at][:shown].tolist(), strict=True)
                    give(text, int(found.token[at]), float(found.logprob[at]), tuple(top))
        for text, _ in plan.parts:
            if text.running:
                self.pages.learn(text)
        c = self._count
        c["calls"] += 1
        c["steps"] += steps
        c["columns"] += steps * told.tokens.size
        c["computed"] += sum(n for _, n in plan.parts) + given - len(chosen)

    def release(self, text: Text) -> None:
        """See `Stepper`."""
        self.pages.learn(text)
        self.pages.release(text)

    def compile(self, note: Callable[[int, int], None]) -> None:
        """See `Stepper`."""
        shapes = list(self._sizes.all())
        for done, shape in enumerate(shapes):
            note(done, len(shapes))
            told, _ = pack((), shape, self._sizes, self.vocab, self._ends)
            self._run(shape, told, 1, False, np.zeros_like(told.tokens) if shape.blocks else None)

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
    check_sizes(rows=rows, length=length, budget=budget)
    if budget < rows:
        raise ConfigError(f"budget = {budget} does not give each of the {rows} rows a token; the least is {rows}")
    if positions is not None and length > positions:
        raise ConfigError(f"length = {length} is more than the model's {positions} learned positions")
    check_independent(model)
