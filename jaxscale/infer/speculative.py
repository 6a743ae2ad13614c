"""Speculative decoding: a small model proposes tokens, and the large one judges them all in one step.

What comes out is distributed as the large model's own (Leviathan et al. 2023; Chen et al. 2023), and is the same text
where it takes the likeliest tokens.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence

import jax
import numpy as np
from flax import nnx

from jaxscale.infer.cache import generating, init_cache
from jaxscale.infer.engine import Give, Text, check_independent, check_sizes
from jaxscale.infer.loaded import Loaded
from jaxscale.infer.sampling import Choices, Sampling, seen_bits
from jaxscale.infer.speculative_round import CACHE, Told, rounds_of

_CHUNK = 64


class WithDraft:
    """Steps of a large model and its draft (see `jaxscale.infer.engine.Stepper`).

    A text has a row of either model's cache, which are at most `rows`, rounded up to what the layout divides. What was
    proposed in vain lies behind the text's end there, where no token looks, until others are written over it. Of a
    text, `kept` counts what both models have while the prompt is read, and then what the draft has; the large one lacks
    the last token alone.

    Args:
      target, draft: the models, on one layout. Where the draft knows other ids, it is as if it gave them no chance.
      draft_tokens: proposals of a round.
      rows: texts under way at once.
      length: the most tokens of a text, prompt and continuation.
      end_ids: ids that end a text.

    Raises:
      ConfigError: sizes that do not fit, or a model whose texts are not independent of each other.
    """

    scores = False

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
        check_sizes(draft_tokens=draft_tokens, rows=rows, length=length)
        layout = generating(target.layout)
        self._there = lambda: layout or contextlib.nullcontext()
        self._models, self.length, self._most = (target, draft), length, draft_tokens
        self.end_ids = frozenset(end_ids)
        cut = lambda axis: 1 if layout is None else layout.split(axis)  # noqa: E731
        self.places = -(-rows // cut("batch")) * cut("batch")
        self._rows: list[Text | None] = [None] * self.places
        size = -(-length // cut("cache_seq")) * cut("cache_seq")
        made = [nnx.merge(m.graphdef, m.params) for m in self._models]
        for model in made:
            check_independent(model)
        self.vocab = made[0].head_weight().shape[0]
        with self._there():
            self._states = [init_cache(m, CACHE, self.places, 1, size, length, back=draft_tokens) for m in made]
        self._read, self._judge = rounds_of(target.graphdef, draft.graphdef, draft_tokens)
        self._count = dict.fromkeys(("proposed", "accepted", "computed", "columns", "steps", "calls"), 0)

    def counts(self) -> dict[str, int]:
        """See `Stepper`."""
        return dict(self._count)

    def admit(self, queue: Sequence[Text], running: Sequence[Text], clock: float) -> None:
        """See `Stepper`; in order of arrival."""
        waiting = list(queue)
        for row, there in enumerate(self._rows):
            if there is None and waiting:
                text = self._rows[row] = waiting.pop(0)
                text.lane, text.row = row, 0

    def run(self, plan: None, give: Give) -> None:
        """See `Stepper`; reads a chunk of prompts, where there are some to read, else takes a round."""
        if any(t is not None and self._unread(t) for t in self._rows):
            self._read_on()
        else:
            self._round(give)

    def release(self, text: Text) -> None:
        """See `Stepper`."""
        self._rows[text.lane] = None
        text.lane = text.row = -1

    def compile(self, note: Callable[[int, int], None]) -> None:
        """See `Stepper`: with no text."""
        note(0, 2)
        self._read_on()
        note(1, 2)
        self._round(lambda *_: None)
        self._count = dict.fromkeys(self._count, 0)

    # Within

    @staticmethod
    def _unread(text: Text) -> int:
        """Tokens of the prompt that neither model has; the last one begins the first round."""
        return max(len(text.request.prompt) - 1 - text.kept, 0)

    def _read_on(self) -> None:
        tokens, starts, counts = np.zeros((self.places, _CHUNK), np.int32), *np.zeros((2, self.places), np.int32)
        for row, text in enumerate(self._rows):
            if text is not None and (n := min(self._unread(text), _CHUNK)):
                tokens[row, :n] = text.tokens[text.kept : text.kept + n]
                starts[row], counts[row] = text.kept, n
                text.kept += n
        params = [m.params for m in self._models]
        with self._there():
            self._states = self._read(params, self._states, tokens, starts, counts)
        self._tally(int(counts.sum()), tokens.size)

    def _round(self, give: Give) -> None:
        rows, texts = self.places, [(i, t) for i, t in enumerate(self._rows) if t is not None]
        pending, (kept, behind, proposals) = np.zeros((rows, 2), np.int32), np.zeros((3, rows), np.int32)
        seen = np.zeros((rows, -(-self.vocab // 8)), np.uint8)
        settings = [Sampling()] * rows
        for row, t in texts:
            behind[row], kept[row] = t.behind, t.kept
            pending[row, : t.behind] = t.tokens[t.kept :]
            proposals[row] = min(self._most, t.left - 1)
            settings[row] = t.request.sampling
            seen[row] = seen_bits(t.tokens, settings[row], self.vocab)
        top = np.asarray(any(s.logprobs for s in settings))
        told = Told(pending, kept, behind, proposals, Choices.of(settings, self.vocab), seen, top)  # type: ignore[arg-type]
        with self._there():
            judged, self._states = self._judge([m.params for m in self._models], self._states, told)
        judged = jax.device_get(judged)
        for row, t in texts:
            accepted = int(judged.accepted[row])
            t.kept = len(t.tokens) + min(max(int(proposals[row]) - 1, 0), accepted)
            self._count["proposed"] += int(proposals[row])
            self._count["accepted"] += accepted
            for i in range(accepted + 1):
                if t.running:
                    shown = t.request.sampling.logprobs
                    ids, logprobs = (x[row, i, :shown].tolist() for x in (judged.top, judged.top_logprob))
                    likeliest = tuple(zip(ids, logprobs, strict=True))
                    give(t, int(judged.tokens[row, i]), float(judged.logprob[row, i]), likeliest)
        self._tally(int(proposals.sum()) + len(texts), rows * (self._most + 1))

    def _tally(self, computed: int, columns: int) -> None:
        for name, n in (("computed", computed), ("columns", columns), ("steps", 1), ("calls", 1)):
            self._count[name] += n
