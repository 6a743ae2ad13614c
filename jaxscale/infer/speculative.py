"""Speculative decoding: a small model proposes tokens, and the large one judges them all in one step.

What comes out is distributed as the large model's own (Leviathan et al. 2023; Chen et al. 2023), and is the same text
where it takes the likeliest tokens.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Hashable, Iterable
from typing import NamedTuple

import jax
import numpy as np
from flax import nnx

from jaxscale.errors import ConfigError
from jaxscale.infer.cache import generating, init_cache
from jaxscale.infer.engine import Event, Request, check_independent
from jaxscale.infer.loaded import Loaded
from jaxscale.infer.sampling import Choices, Sampling, seen_bits
from jaxscale.infer.speculative_round import CACHE, Judged, Told, rounds_of
from jaxscale.step.texts import checked

_CHUNK = 64


@dataclasses.dataclass(eq=False)
class _Text:
    request: Request
    tokens: list[int]
    kept: int = 0
    """By the large model while the prompt is read, then by the draft; the large one lacks the last token alone."""

    @property
    def left(self) -> int:
        return self.request.sampling.max_tokens - (len(self.tokens) - len(self.request.prompt))


class Counts(NamedTuple):
    """What an engine with a draft has done.

    Args:
      rounds: of proposals and judgement.
      proposed, accepted: tokens of the draft.
      tokens_in, tokens_out: of prompts, and given.
    """

    rounds: int
    proposed: int
    accepted: int
    tokens_in: int
    tokens_out: int

    @property
    def acceptance(self) -> float:
        """The share of proposals that were accepted."""
        return self.accepted / self.proposed if self.proposed else 0.0


class Speculative:
    """An engine of a large model and its draft; `submit`, `cancel`, `step` and `busy` are those of `Engine`.

    A text has a lane of either model's cache. What was proposed in vain lies behind the text's end there, where no
    token looks, until others are written over it.

    Args:
      target, draft: the models, on one layout. Where the draft knows other ids, it is as if it gave them no chance.
      draft_tokens: proposals of a round.
      rows: texts under way at once; rounded up to what the layout divides.
      length: the most tokens of a text, prompt and continuation.
      end_ids: ids that end a text.

    Raises:
      ConfigError: sizes that do not fit, or a model whose texts are not independent of each other.
    """

    def __init__(
        self,
        target: Loaded,
        draft: Loaded,
        *,
        draft_tokens: int = 4,
        rows: int = 8,
        length: int = 1024,
        end_ids: Iterable[int] = (),
    ):
        for name, value in (("draft_tokens", draft_tokens), ("rows", rows), ("length", length)):
            if not isinstance(value, int) or value < 1:
                raise ConfigError(f"{name} = {value!r}: must be a whole number of at least 1")
        layout = generating(target.layout)
        self._there = lambda: layout or contextlib.nullcontext()
        self._models, self.length, self._most = (target, draft), length, draft_tokens
        self.end_ids = frozenset(end_ids)
        cut = lambda axis: 1 if layout is None else layout.split(axis)  # noqa: E731
        lanes = -(-rows // cut("batch")) * cut("batch")
        self._lanes: list[_Text | None] = [None] * lanes
        size = -(-length // cut("cache_seq")) * cut("cache_seq")
        made = [nnx.merge(m.graphdef, m.params) for m in self._models]
        for model in made:
            check_independent(model)
        self.vocab = made[0].head_weight().shape[0]
        with self._there():
            self._states = [init_cache(m, CACHE, lanes, 1, size, length, back=draft_tokens) for m in made]
        self._read, self._judge = rounds_of(target.graphdef, draft.graphdef, draft_tokens)
        self._texts: dict[Hashable, _Text] = {}
        self._queue: list[_Text] = []
        self._events: list[Event] = []
        self._count = dict.fromkeys(Counts._fields, 0)

    def submit(self, request: Request) -> None:
        """Puts a request into the queue.

        Raises:
          ConfigError: what it asks cannot be done here.
        """
        if request.id in self._texts:
            raise ConfigError(f"there is a request {request.id!r} under way already; give this one another id")
        n, more = len(checked(np.asarray(request.prompt), self.vocab)), request.sampling.max_tokens
        if n + more > self.length:
            raise ConfigError(
                f"a prompt of {n} tokens and max_tokens = {more} are more than the {self.length} tokens that a text "
                f"may have here; ask for at most {max(self.length - n, 0)}"
            )
        self._count["tokens_in"] += len(request.prompt)
        self._texts[request.id] = text = _Text(request, [int(i) for i in request.prompt])
        self._queue.append(text)

    def cancel(self, id: Hashable) -> None:
        """Ends a request; of one that is not under way, nothing."""
        text = self._texts.get(id)
        if text is not None:
            self._events.append(Event(id, -1, finished="cancelled"))
            self._end(text)

    @property
    def busy(self) -> bool:
        """Whether `step` has something to do or to tell."""
        return bool(self._texts or self._events)

    @property
    def stats(self) -> Counts:
        """Counts."""
        return Counts(**self._count)

    def step(self) -> list[Event]:
        """Reads a chunk of prompts, where there are some to read, else takes a round; the tokens that came."""
        events, self._events = self._events, []
        for lane, text in enumerate(self._lanes):
            if text is None and self._queue:
                self._lanes[lane] = self._queue.pop(0)
        if any(t is not None and self._unread(t) for t in self._lanes):
            self._read_on()
        elif any(self._lanes):
            events += self._round()
        return events

    # Within

    def _end(self, text: _Text) -> None:
        del self._texts[text.request.id]
        if text in self._lanes:
            self._lanes[self._lanes.index(text)] = None
        else:
            self._queue.remove(text)

    @staticmethod
    def _unread(text: _Text) -> int:
        """Tokens of the prompt that neither model has; the last one begins the first round."""
        return max(len(text.request.prompt) - 1 - text.kept, 0)

    def _read_on(self) -> None:
        lanes = len(self._lanes)
        tokens, starts, counts = np.zeros((lanes, _CHUNK), np.int32), *np.zeros((2, lanes), np.int32)
        for lane, text in enumerate(self._lanes):
            if text is not None and (n := min(self._unread(text), _CHUNK)):
                tokens[lane, :n] = text.tokens[text.kept : text.kept + n]
                starts[lane], counts[lane] = text.kept, n
                text.kept += n
        params = [m.params for m in self._models]
        with self._there():
            self._states = self._read(params, self._states, tokens, starts, counts)

    def _round(self) -> list[Event]:
        lanes, texts = len(self._lanes), [(i, t) for i, t in enumerate(self._lanes) if t is not None]
        pending, (kept, behind, proposals) = np.zeros((lanes, 2), np.int32), np.zeros((3, lanes), np.int32)
        seen = np.zeros((lanes, -(-self.vocab // 8)), np.uint8)
        settings = [Sampling()] * lanes
        for lane, t in texts:
            behind[lane], kept[lane] = len(t.tokens) - t.kept, t.kept
            pending[lane, : behind[lane]] = t.tokens[t.kept :]
            proposals[lane] = min(self._most, t.left - 1)
            settings[lane] = t.request.sampling
            seen[lane] = seen_bits(t.tokens, settings[lane], self.vocab)
        top = np.asarray(any(s.logprobs for s in settings))
        told = Told(pending, kept, behind, proposals, Choices.of(settings, self.vocab), seen, top)  # type: ignore[arg-type]
        with self._there():
            judged, self._states = self._judge([m.params for m in self._models], self._states, told)
        judged = jax.device_get(judged)
        events = []
        for lane, t in texts:
            n, accepted = len(t.tokens), int(judged.accepted[lane])
            t.kept = n + min(max(int(proposals[lane]) - 1, 0), accepted)
            self._count["proposed"] += int(proposals[lane])
            self._count["accepted"] += accepted
            events += self._given(t, judged, lane, accepted + 1)
        self._count["rounds"] += 1
        return events

    def _given(self, text: _Text, judged: Judged, lane: int, n: int) -> list[Event]:
        """A text's new tokens; ends it with its last."""
        events, s = [], text.request.sampling
        for i in range(n):
            token = int(judged.tokens[lane, i])
            text.tokens.append(token)
            ids, logprobs = (x[lane, i, : s.logprobs].tolist() for x in (judged.top, judged.top_logprob))
            ended = token in self.end_ids and not s.ignore_end
            finished = "stop" if ended else None if text.left else "length"
            top = tuple(zip(ids, logprobs, strict=True))
            events.append(Event(text.request.id, token, float(judged.logprob[lane, i]), top, finished))  # type: ignore[arg-type]
            if finished is not None:
                self._end(text)
                break
        self._count["tokens_out"] += len(events)
        return events
