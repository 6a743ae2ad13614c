"""Steps of a model with a KV cache: chunks of prompts beside the new tokens of other sequences."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx

from jaxscale.errors import ConfigError
from jaxscale.infer.cache import Paged, decodable, generating, init_cache, reuses_prefixes
from jaxscale.infer.engine.device import ChosenTokens, Scored, pick_of, score_of, steps_of
from jaxscale.infer.engine.packing import Shape, Sizes, StepInputs, pack, sampling_inputs, targets_of
from jaxscale.infer.engine.pages import Pages
from jaxscale.infer.engine.request import Score, SequenceState
from jaxscale.infer.engine.scheduler import Batch, FirstCome, Scheduler
from jaxscale.infer.engine.stepper import Emit, check_independent, check_sizes
from jaxscale.layout import Layout
from jaxscale.layout.tensors import Tree
from jaxscale.nn import Cache


class Cached:
    """A `Stepper` with a KV cache: continuous batching, chunked prefill and a prefix cache.

    Sequences join and leave between steps. Long prompts are computed in chunks beside the other sequences' tokens;
    where pages run out, a sequence is preempted and prefilled again later.

    Args:
      graphdef: the model's graph definition.
      params: its parameters, sharded by `layout` (with pipeline stages, from `jaxscale.infer.on_stages`).
      layout: where the model lives. Each device along the batch axes has sequences of its own, a shard of the cache;
        with pipeline stages it has as many shards as there are stages.
      cache: the kind of KV cache.
      rows: decode slots of each shard: how many sequences may run at once there.
      length: the most tokens of a sequence, prompt included; by default 1024, or the model's learned positions.
      budget: the most tokens of a shard in a step; by default 256, or twice `rows` if that is more.
      scheduler: chooses the sequences of each step.
      end_ids: end-of-text token ids.

    Raises:
      ConfigError: sizes that do not fit together, or a model whose sequences depend on each other.
      LayoutError: the cache does not divide over its mesh axes.
    """

    scores = True

    def __init__(
        self,
        graphdef: nnx.GraphDef[Any],
        params: Tree,
        *,
        layout: Layout | None = None,
        cache: Cache = Paged(),  # noqa: B008  (immutable)
        rows: int = 8,
        length: int | None = None,
        budget: int | None = None,
        scheduler: Scheduler = FirstCome(),  # noqa: B008
        end_ids: Iterable[int] = (),
    ):
        self._settings = dict(cache=cache, rows=rows, length=length, budget=budget, scheduler=scheduler)
        self._graphdef = graphdef
        self.layout, self.cache, self.scheduler = generating(layout), cache, scheduler
        model = nnx.merge(graphdef, params)
        self.vocab, self.prefix = model.head_weight().shape[0], getattr(model, "prefix", ())
        self.end_ids = frozenset(end_ids)
        positions = decodable(model).max_length
        self.length = (positions or 1024) if length is None else length
        budget = max(256, 2 * rows) if budget is None else budget
        _check(model, rows, self.length, budget, positions)
        self._params, self._ends = params, np.asarray(sorted(self.end_ids) or [-1], np.int32)
        longest = self.length + len(self.prefix)
        self.pages, self._sizes, length = _plan_cache(
            self.layout, cache, rows, longest, budget, reuses_prefixes(model, cache)
        )
        shards = self._sizes.shards
        self.slots = shards * self._sizes.slots
        with self._under_layout():
            self._states = init_cache(model, cache, shards, rows, length, longest)
        self._one, self._ahead = steps_of(graphdef, cache, scheduler.ahead)  # type: ignore[arg-type]  # caches are hashable
        self._pick, self._score = pick_of(graphdef), score_of(graphdef)
        self._count = dict.fromkeys(("computed", "columns", "steps", "calls"), 0)

    def replace_params(self, params: Tree) -> None:
        """Use other parameters from the next sequence on, and forget the prefixes that the old ones computed.

        Args:
          params: parameters of the same shapes and shardings, or `None` until the next call.
        """
        self._params = params
        self.pages.forget_prefixes()

    def on(self, params: Tree, layout: Layout | None) -> Cached:
        """Return a stepper of the same model and sizes on another layout, with an empty cache, for `Engine.move`.

        Args:
          params: the parameters, sharded by `layout`; `jaxscale.layout.tree_moved` moves them.
          layout: the layout.

        Raises:
          ConfigError: as the class.
          LayoutError: likewise.
        """
        return Cached(self._graphdef, params, layout=layout, end_ids=self.end_ids, **self._settings)  # type: ignore[arg-type]

    def counts(self) -> dict[str, int]:
        """See `Stepper`."""
        pages = self.pages.count()
        of_pages = dict(pages_used=pages.used, pages_free=pages.free, pages_known=pages.known)
        return {**of_pages, "shared": self.pages.shared_tokens, **self._count}

    def admit(self, queue: Sequence[SequenceState], running: Sequence[SequenceState], clock: float) -> Batch:
        """See `Stepper`; the scheduler decides."""
        batch = self.scheduler.step(queue, running, self.pages, clock)
        name = type(self.scheduler).__name__
        if not batch.parts:
            unfinished = len(queue) + len(running)
            raise ConfigError(f"{name} scheduled no sequence, and {unfinished} are unfinished")
        for sequence, n in batch.parts:
            pages = -(-(sequence.cached + n) // self.pages.page)
            if not sequence.running or not 1 <= n <= sequence.uncached or len(sequence.pages) < pages:
                raise ConfigError(
                    f"{name} scheduled {n} tokens of request {sequence.request.id!r}, which has {sequence.uncached} to "
                    f"compute and {len(sequence.pages)} pages; call Pages.admit and Pages.grow first"
                )
        return batch

    def run(self, plan: Batch, emit: Emit) -> None:
        """See `Stepper`."""
        shape = self._sizes.of(plan.parts)
        inputs, chosen = pack(plan.parts, shape, self._sizes, self.vocab, self._ends)
        targets, stretches = targets_of(plan.parts, shape, self._sizes.shards)
        tokens, scored = self._run(shape, inputs, plan.ahead, plan.until_end, targets if stretches else None)
        for stretch in stretches:
            _record_scores(scored, *stretch)
        for sequence, n in plan.parts:
            sequence.cached += n
        steps, emitted = int(tokens.steps), 0
        for step in range(steps):
            for sequence, shard, place in chosen:
                if sequence.running:
                    sequence.cached, at, emitted = len(sequence.tokens), (step, shard, place), emitted + 1
                    k = sequence.request.sampling.logprobs
                    top = zip(tokens.top[at][:k].tolist(), tokens.top_logprob[at][:k].tolist(), strict=True)
                    emit(sequence, int(tokens.token[at]), float(tokens.logprob[at]), tuple(top))
        for sequence, _ in plan.parts:
            if sequence.running:
                self.pages.record(sequence)
        c = self._count
        c["calls"] += 1
        c["steps"] += steps
        c["columns"] += steps * inputs.tokens.size
        c["computed"] += sum(n for _, n in plan.parts) + emitted - len(chosen)

    def release(self, sequence: SequenceState) -> None:
        """See `Stepper`."""
        self.pages.record(sequence)
        self.pages.release(sequence)

    def compile(self, note: Callable[[int, int], None]) -> None:
        """See `Stepper`."""
        shapes = list(self._sizes.all())
        for done, shape in enumerate(shapes):
            note(done, len(shapes))
            inputs, _ = pack((), shape, self._sizes, self.vocab, self._ends)
            self._run(shape, inputs, 1, False, np.zeros_like(inputs.tokens) if shape.blocks else None)

    def _run(
        self, shape: Shape, inputs: StepInputs, ahead: int, until_end: bool, targets: Any
    ) -> tuple[ChosenTokens, Scored | None]:
        scored = None
        with self._under_layout():
            if shape.blocks:
                last, hidden, self._states = self._one(self._params, self._states, inputs)
                tokens = self._pick(self._params, last, sampling_inputs(inputs))
                if targets is not None:
                    scored = self._score(self._params, hidden, targets)
            else:
                tokens, self._states = self._ahead(
                    self._params, self._states, inputs, np.int32(ahead), np.bool_(until_end)
                )
        return jax.device_get((tokens, scored))

    def _under_layout(self) -> contextlib.AbstractContextManager[Any]:
        return self.layout or contextlib.nullcontext()


def _record_scores(scored: Any, sequence: SequenceState, shard: int, column: int, count: int) -> None:
    """Store the model's predictions for tokens of a sequence's prompt."""
    k = sequence.request.sampling.logprobs
    for i in range(column, column + count):
        ids, logprobs = scored.top[shard, i, :k].tolist(), scored.top_logprob[shard, i, :k].tolist()
        place = sequence.cached + i - column  # a preempted sequence scores its first tokens again
        score = Score(float(scored.logprob[shard, i]), tuple(zip(ids, logprobs, strict=True)))
        sequence.scores[place : place + 1] = [score]


def _plan_cache(
    layout: Layout | None, cache: Cache, slots: int, length: int, budget: int, sharing: bool
) -> tuple[Pages, Sizes, int]:
    """The bookkeeping of a cache, the sizes of steps, and the length of a slot, rounded up so that it divides."""

    def split(axis: str) -> int:
        return 1 if layout is None else layout.split(axis)

    shards = split("batch") * (1 if layout is None else layout.stages)  # so that every pipeline stage is busy
    if not isinstance(cache, Paged):  # a slot is one page, and sequences share none
        unit = split("cache_seq")
        length = -(-length // unit) * unit
        pages = Pages(shards, slots, length, slots, budget=budget, sharing=False, growing=False)
        return pages, Sizes(shards, slots, budget, 0), length
    devices = split("pages")
    unit = cache.page * devices
    length = -(-length // unit) * unit
    entries, count = cache.per_slot(length), cache.count(slots, length)
    if count < entries:
        raise ConfigError(
            f"PagedCache.pages = {count} of {cache.page} positions do not hold a sequence of {length} tokens; use at "
            f"least {entries}, or make length smaller"
        )
    pages = Pages(shards, slots, cache.page, count, devices=devices, budget=budget, sharing=sharing)
    return pages, Sizes(shards, slots, budget, entries), length


def _check(model: object, rows: int, length: int, budget: int, positions: int | None) -> None:
    check_sizes(rows=rows, length=length, budget=budget)
    if budget < rows:
        raise ConfigError(f"budget = {budget} is less than a token for each of the {rows} rows; use at least {rows}")
    if positions is not None and length > positions:
        raise ConfigError(f"length = {length} is more than the model's {positions} learned positions")
    check_independent(model)
