"""Speculative decoding: a draft proposes tokens, and the large model verifies them all in one step.

The output is distributed as the large model's own (Leviathan et al. 2023; Chen et al. 2023), and identical to it for
greedy decoding.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx

from jaxscale.errors import ConfigError
from jaxscale.infer.cache import Contiguous, generating, init_cache
from jaxscale.infer.drafters import Drafter, OwnModules, RoundInputs, SmallModel
from jaxscale.infer.engine import Emit, SequenceState, check_independent, check_sizes
from jaxscale.infer.loaded import Loaded
from jaxscale.infer.sampling import Sampling, SamplingArrays, seen_bits
from jaxscale.infer.speculative_round import rounds_of

_CHUNK = 64


class WithDraft:
    """A `jaxscale.infer.engine.Stepper` that decodes a large model with a draft.

    Each sequence has a batch row of either model's cache. Rejected proposals stay in the cache past the sequence's end,
    where no token attends, until new tokens overwrite them. `SequenceState.cached` counts what both have cached during
    prefill, and what the draft has cached afterwards; the large model then lacks only the last token.

    Args:
      target: the large model.
      draft: the small model, on the same layout (`SmallModel`); `None` is the large model's own modules of multi-token
        prediction (`OwnModules`).
      draft_tokens: proposals of a round.
      rows: sequences that may run at once, rounded up to what the layout divides.
      length: the most tokens of a sequence, prompt included.
      end_ids: end-of-text token ids.
      ring: see `jaxscale.infer.cache.Paged`.

    Raises:
      ConfigError: sizes that do not fit together, or a model whose sequences depend on each other.
    """

    scores = False
    prefix: tuple[int, ...] = ()

    def __init__(
        self,
        target: Loaded,
        draft: Loaded | None,
        *,
        draft_tokens: int = 4,
        rows: int = 8,
        length: int = 1024,
        end_ids: Iterable[int] = (),
        ring: int | None = None,
    ):
        check_sizes(draft_tokens=draft_tokens, rows=rows, length=length)
        self._layout = generating(target.layout)
        self._params = [target.params, None if draft is None else draft.params]
        self.length, self._most = length, draft_tokens
        self.end_ids = frozenset(end_ids)
        split, split_length = (
            1 if self._layout is None else self._layout.split(axis) for axis in ("batch", "cache_seq")
        )
        self.slots = -(-rows // split) * split
        self._sequences: list[SequenceState | None] = [None] * self.slots
        size = -(-length // split_length) * split_length
        models = [nnx.merge(m.graphdef, m.params) for m in (target, draft) if m is not None]
        for model in models:
            check_independent(model)
            if getattr(model, "prefix", ()):
                raise ConfigError(
                    "a draft and its model generate from the same tokens, so that neither can have a soft prompt; "
                    "leave out the draft"
                )
        self.vocab = models[0].head_weight().shape[0]
        with self._under_layout():
            cache = Contiguous(ring=ring)
            self._drafter: Drafter
            if draft is None:
                self._drafter = OwnModules.of(models[0], draft_tokens, cache)
            else:
                self._drafter = SmallModel(draft.graphdef, draft_tokens, cache)
            cached = init_cache(models[0], cache, self.slots, 1, size, length, back=draft_tokens)
            self._states = [cached, self._drafter.init(models[-1], self.slots, size, length)]
        self._prefill, self._draft_and_verify = rounds_of(target.graphdef, self._drafter, draft_tokens)
        self._count = dict.fromkeys(("proposed", "accepted", "computed", "columns", "steps", "calls"), 0)

    def counts(self) -> dict[str, int]:
        """See `Stepper`."""
        return dict(self._count)

    def admit(self, queue: Sequence[SequenceState], running: Sequence[SequenceState], clock: float) -> None:
        """See `Stepper`; in order of arrival."""
        waiting = list(queue)
        for i, occupant in enumerate(self._sequences):
            if occupant is None and waiting:
                sequence = self._sequences[i] = waiting.pop(0)
                sequence.shard, sequence.slot = i, 0

    def run(self, plan: None, emit: Emit) -> None:
        """See `Stepper`; prefills a chunk of the prompts that are not cached yet, else takes a round."""
        if any(s is not None and self._unread(s) for s in self._sequences):
            self._prefill_chunk()
        else:
            self._round(emit)

    def release(self, sequence: SequenceState) -> None:
        """See `Stepper`."""
        self._sequences[sequence.shard] = None
        sequence.shard = sequence.slot = -1

    def compile(self, note: Callable[[int, int], None]) -> None:
        """See `Stepper`; runs both programs without a sequence."""
        note(0, 2)
        self._prefill_chunk()
        note(1, 2)
        self._round(lambda *_: None)
        self._count = dict.fromkeys(self._count, 0)

    # Helpers

    def _under_layout(self) -> contextlib.AbstractContextManager[Any]:
        return self._layout or contextlib.nullcontext()

    @staticmethod
    def _unread(sequence: SequenceState) -> int:
        """Tokens of the prompt to prefill; its last token is the first input of the first round."""
        return max(len(sequence.request.prompt) - 1 - sequence.cached, 0)

    def _prefill_chunk(self) -> None:
        ahead = self._drafter.lookahead
        tokens, starts, counts = np.zeros((self.slots, _CHUNK + ahead), np.int32), *np.zeros((2, self.slots), np.int32)
        for i, sequence in enumerate(self._sequences):
            if sequence is not None and (n := min(self._unread(sequence), _CHUNK)):
                known = sequence.tokens[sequence.cached : sequence.cached + n + ahead]
                tokens[i, : len(known)] = known
                starts[i], counts[i] = sequence.cached, n
                sequence.cached += n
        with self._under_layout():
            self._states = self._prefill(self._params, self._states, tokens, starts, counts)
        self._add_counts(int(counts.sum()), self.slots * _CHUNK)

    def _round(self, emit: Emit) -> None:
        running = [(i, s) for i, s in enumerate(self._sequences) if s is not None]
        pending = np.zeros((self.slots, self._drafter.pending), np.int32)
        cached, uncached, proposals = np.zeros((3, self.slots), np.int32)
        seen = np.zeros((self.slots, -(-self.vocab // 8)), np.uint8)
        settings = [Sampling()] * self.slots
        for i, sequence in running:
            uncached[i], proposals[i] = self._drafter.counts(sequence, self._most)
            cached[i] = len(sequence.tokens) - uncached[i]
            pending[i, : uncached[i]] = sequence.tokens[cached[i] :]
            settings[i] = sequence.request.sampling
            seen[i] = seen_bits(sequence.tokens, settings[i], self.vocab)
        with_top = np.asarray(any(s.logprobs for s in settings))
        sampling = SamplingArrays.of(settings, self.vocab)
        inputs = RoundInputs(pending, cached, uncached, proposals, sampling, seen, with_top)  # type: ignore[arg-type]
        with self._under_layout():
            result, self._states = self._draft_and_verify(self._params, self._states, inputs)
        result = jax.device_get(result)
        for i, sequence in running:
            accepted = int(result.accepted[i])
            sequence.cached = self._drafter.cached(len(sequence.tokens), int(proposals[i]), accepted)
            self._count["proposed"] += int(proposals[i])
            self._count["accepted"] += accepted
            for j in range(accepted + 1):
                if sequence.running:
                    k = sequence.request.sampling.logprobs
                    ids, logprobs = (x[i, j, :k].tolist() for x in (result.top, result.top_logprob))
                    top = tuple(zip(ids, logprobs, strict=True))
                    emit(sequence, int(result.tokens[i, j]), float(result.logprob[i, j]), top)
        self._add_counts(int(proposals.sum()) + len(running), self.slots * (self._most + 1))

    def _add_counts(self, computed: int, columns: int) -> None:
        for name, n in (("computed", computed), ("columns", columns), ("steps", 1), ("calls", 1)):
            self._count[name] += n
