"""Who proposes the tokens of speculative decoding: a small model, or the large model's own modules."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, UInt8

from jaxscale.errors import ConfigError
from jaxscale.infer.cache import Contiguous, ModelCache, init_cache
from jaxscale.infer.engine import SequenceState
from jaxscale.infer.forward import forward, logits_at, one_per_batch_row
from jaxscale.infer.sampling import SamplingArrays, processed, seen_of
from jaxscale.layout import constrain, current
from jaxscale.layout.tensors import Tree
from jaxscale.models import LanguageModel
from jaxscale.models.base import DecodesAhead
from jaxscale.nn import Packed, RunCache

PROPOSE, ACCEPT, CORRECT = 1, 2, 3  # the three random numbers of a position in a sequence


class RoundInputs(NamedTuple):
    """The inputs of a round, for b sequences.

    Args:
      pending: the last tokens, from the first one that the drafter wants, int32 (b, w).
      cached: how many tokens are before them, int32 (b,).
      uncached: how many of `pending` there are, int32 (b,); 0 in a batch row without a sequence.
      proposals: how many tokens to propose, int32 (b,).
      sampling: settings of each sequence.
      seen: which token ids each sequence contains (`seen_bits`), uint8 (b, bytes).
      with_top: whether any sequence wants the likeliest tokens, bool scalar.
    """

    pending: Int[Array, "b w"]
    cached: Int[Array, " b"]
    uncached: Int[Array, " b"]
    proposals: Int[Array, " b"]
    sampling: SamplingArrays
    seen: UInt8[Array, "b bytes"]
    with_top: Bool[Array, ""]

    @property
    def length(self) -> Int[Array, " b"]:
        """The number of tokens of each sequence: the position of the first new one."""
        return self.cached + self.uncached


class Proposals(NamedTuple):
    """Proposed tokens of b sequences, up to m each.

    Args:
      tokens: ids, int32 (b, m).
      q: the distributions that they were drawn from, float32 (b, m, vocab).
      seen: which ids precede each of them, and the token after the last, bool (b, m + 1, vocab).
    """

    tokens: Int[Array, "b m"]
    q: Float[Array, "b m v"]
    seen: Bool[Array, "b n v"]


class Drafter(Protocol):
    """Proposes tokens; hashable. Its state is arrays on the devices, of which a batch row is a sequence's."""

    @property
    def cache(self) -> Contiguous:
        """The kind of KV cache, of the large model, too."""
        ...

    @property
    def lookahead(self) -> int:
        """How many tokens after a chunk of a prompt `prefill` takes."""
        ...

    @property
    def pending(self) -> int:
        """The most tokens at the end of a sequence that a round takes."""
        ...

    def init(self, model: Any, batch: int, size: int, length: int) -> Tree:
        """Return the empty state.

        Args:
          model: the large model.
          batch: batch rows.
          size: positions of each.
          length: the most tokens of a sequence.
        """
        ...

    def prefill(self, model: Any, params: Tree, state: Tree, tokens: Array, hidden: Array, step: Packed) -> Tree:
        """Return the state after a chunk of prompts.

        Args:
          model: the large model.
          params: the drafter's own parameters.
          state: the state before.
          tokens: ids of the chunk and of `lookahead` tokens after it, int32 (b, s + lookahead).
          hidden: the large model's hidden states of the chunk, (b, s, e).
          step: the position of each of its tokens.
        """
        ...

    def counts(self, sequence: SequenceState, most: int) -> tuple[int, int]:
        """Return how many of a sequence's last tokens are `RoundInputs.pending`, and how many tokens to propose.

        Args:
          sequence: the sequence.
          most: the most proposals of a round.
        """
        ...

    def cached(self, tokens: int, proposals: int, accepted: int) -> int:
        """Return how many tokens of a sequence need not be in `pending` of the next round.

        Args:
          tokens: how many it had before the round.
          proposals: tokens proposed.
          accepted: those that were accepted.
        """
        ...

    def propose(
        self, model: Any, params: Tree, state: Tree, inputs: RoundInputs, most: int, vocab: int
    ) -> tuple[Proposals, Tree]:
        """Return proposals, and the new state.

        Args:
          model: the large model.
          params: the drafter's own parameters.
          state: the state before.
          inputs: of the round.
          most: the most proposals.
          vocab: the large model's number of ids.
        """
        ...

    def verified(self, state: Tree, hidden: Float[Array, "b n e"], count: Int[Array, " b"]) -> Tree:
        """Return the state after the large model verified the proposals.

        Args:
          state: the state.
          hidden: the large model's hidden states from the last known token on.
          count: of how many of them the tokens stand.
        """
        ...


@dataclasses.dataclass(frozen=True)
class SmallModel:
    """A model of its own proposes. Ids that it does not have get probability 0.

    Args:
      graphdef: its graph definition.
      most: proposals of a round.
      cache: the kind of KV cache.
    """

    graphdef: nnx.GraphDef[Any]
    most: int
    cache: Contiguous = Contiguous()

    lookahead = 0
    pending = 2

    def init(self, model: Any, batch: int, size: int, length: int) -> Tree:
        """See `Drafter`; here `model` is this drafter's own."""
        return init_cache(model, self.cache, batch, 1, size, length, back=self.most)

    def prefill(self, model: Any, params: Tree, state: Tree, tokens: Array, hidden: Array, step: Packed) -> Tree:
        """See `Drafter`."""
        draft = nnx.merge(self.graphdef, params)
        return forward(draft, _ids(draft, tokens), step, self.cache, state)[1]

    def counts(self, sequence: SequenceState, most: int) -> tuple[int, int]:
        """See `Drafter`."""
        return sequence.uncached, min(most, sequence.remaining - 1)

    def cached(self, tokens: int, proposals: int, accepted: int) -> int:
        """See `Drafter`; of the proposals all but the last were its inputs."""
        return tokens + min(max(proposals - 1, 0), accepted)

    def propose(
        self, model: Any, params: Tree, state: Tree, inputs: RoundInputs, most: int, vocab: int
    ) -> tuple[Proposals, Tree]:
        """See `Drafter`."""
        draft = nnx.merge(self.graphdef, params)
        drawn = _Drawn(inputs, vocab)
        step = one_per_batch_row(inputs.cached, inputs.uncached, 2)
        hidden, state = forward(draft, _ids(draft, inputs.pending), step, self.cache, state)
        last = jnp.maximum(inputs.uncached - 1, 0)
        # Each proposal but the last is the draft's next input. There are few, so the loop is unrolled.
        for i in range(most):
            token = drawn.draw(_resized(_logits_at(draft, hidden, last), vocab))
            if i + 1 < most:
                step = one_per_batch_row(inputs.length + i, (i + 1 < inputs.proposals).astype(jnp.int32), 1)
                hidden, state = forward(draft, _ids(draft, token[:, None]), step, self.cache, state)
                last = jnp.zeros_like(token)
        return drawn.proposals(), state

    def verified(self, state: Tree, hidden: Float[Array, "b n e"], count: Int[Array, " b"]) -> Tree:
        """See `Drafter`: rejected tokens are overwritten later."""
        return state


class _Own(NamedTuple):
    """The state of `OwnModules`.

    Args:
      hidden: the large model's hidden states of each sequence's last `pending` tokens that it has cached, the last one
        at the end, float32 (b, pending, e).
      caches: of the modules' blocks.
    """

    hidden: Float[Array, "b w e"]
    caches: ModelCache


@dataclasses.dataclass(frozen=True)
class OwnModules:
    """The large model's modules of multi-token prediction propose (DeepSeek-V3, arXiv:2412.19437, section 2.2).

    Module k proposes the token k + 2 after the last one that the large model has cached; the last module proposes the
    tokens after those, from its own hidden states in place of those of the module before (as in EAGLE, Li et al. 2024).
    Each round computes the modules again for the last `pending` tokens, of which some had rejected tokens after them.

    Args:
      modules: how many of the modules are used.
      most: proposals of a round.
      cache: the kind of KV cache.
    """

    modules: int
    most: int
    cache: Contiguous = Contiguous()

    @classmethod
    def of(cls, model: object, most: int, cache: Contiguous) -> OwnModules:
        """Return the drafter of a model.

        Args:
          model: the large model.
          most: proposals of a round.
          cache: the kind of KV cache.

        Raises:
          ConfigError: it has no such modules, or its layers are on pipeline stages.
        """
        if not isinstance(model, DecodesAhead) or not model.ahead:
            raise ConfigError(
                f"draft = 'mtp' needs a model with modules of multi-token prediction, and this {type(model).__name__} "
                "has none; train one with Transformer.multi_token = 1 and train.objective = @NextTokens(), or pass the "
                "run of a smaller model as the draft"
            )
        layout = current()
        if layout is not None and layout.stages > 1:
            raise ConfigError(
                "draft = 'mtp' does not work with pipeline stages, since the modules read the last stage's result; use "
                "a mesh without pipeline, or leave out the draft"
            )
        return cls(min(model.ahead, most), most, cache)

    @property
    def lookahead(self) -> int:
        """See `Drafter`."""
        return self.modules

    @property
    def pending(self) -> int:
        """See `Drafter`."""
        return self.most + self.modules

    def init(self, model: Any, batch: int, size: int, length: int) -> Tree:
        """See `Drafter`."""
        back = self.pending + self.most  # a round starts again before the last, whose proposals may all be rejected
        width = model.head_weight().shape[-1]
        hidden = jax.jit(lambda: _laid_out(jnp.zeros((batch, self.pending, width), jnp.float32)))()
        runs = model.ahead_runs[: self.modules]
        return _Own(hidden, init_cache(model, self.cache, batch, 1, size, length, back=back, runs=runs))

    def prefill(self, model: Any, params: Tree, state: Tree, tokens: Array, hidden: Array, step: Packed) -> Tree:
        """See `Drafter`."""
        x, caches, n = hidden, state.caches, hidden.shape[1]
        for k in range(self.modules):
            x, _, caches = _run(model, self.cache, k, x, tokens[:, k + 1 : k + 1 + n], step, caches)
        return self.verified(_Own(state.hidden, caches), hidden, jnp.sum(step.slots >= 0, axis=1))

    def counts(self, sequence: SequenceState, most: int) -> tuple[int, int]:
        """See `Drafter`; before the first token has a hidden state, there is nothing to propose from."""
        n = len(sequence.tokens)
        return (1, 0) if n == 1 else (min(self.pending, n - 1), min(most, sequence.remaining - 1))

    def cached(self, tokens: int, proposals: int, accepted: int) -> int:
        """See `Drafter`: all but the last token, as in the large model."""
        return tokens + accepted

    def propose(
        self, model: Any, params: Tree, state: Tree, inputs: RoundInputs, most: int, vocab: int
    ) -> tuple[Proposals, Tree]:
        """See `Drafter`."""
        drawn, row = _Drawn(inputs, vocab), jnp.arange(inputs.cached.shape[0])
        # The large model has cached all tokens but the last one: as many as are pending, one place before them.
        count, start = jnp.where(inputs.cached > 0, inputs.uncached, 0), inputs.cached - 1
        step, last = one_per_batch_row(start, count, self.pending), jnp.maximum(count - 1, 0)
        columns = jnp.minimum(jnp.arange(self.pending) + self.pending - count[:, None], self.pending - 1)
        x, caches = jnp.take_along_axis(state.hidden, columns[..., None], axis=1), state.caches
        tokens = jnp.pad(inputs.pending, ((0, 0), (0, self.modules)))
        token: Array = tokens[:, 0]
        for i in range(most):
            if i < self.modules:
                x, out, caches = _run(model, self.cache, i, x, tokens[:, i : i + self.pending], step, caches)
            else:
                at = start + count + i - self.modules
                step = one_per_batch_row(at, ((i < inputs.proposals) & (count > 0)).astype(jnp.int32), 1)
                x = jnp.take_along_axis(x, last[:, None, None], axis=1)
                x, out, caches = _run(model, self.cache, self.modules - 1, x, token[:, None], step, caches)
                last = jnp.zeros_like(last)
            token = drawn.draw(_logits_at(model, out, last))
            if i < self.modules:
                tokens = tokens.at[row, count + i].set(token)
        return drawn.proposals(), _Own(state.hidden, caches)

    def verified(self, state: Tree, hidden: Float[Array, "b n e"], count: Int[Array, " b"]) -> Tree:
        """See `Drafter`."""
        both = jnp.concatenate([state.hidden, hidden.astype(jnp.float32)], axis=1)
        columns = count[:, None] + jnp.arange(self.pending)
        return _Own(_laid_out(jnp.take_along_axis(both, columns[..., None], axis=1)), state.caches)


def distribution(
    logits: Float[Array, "n v"], sampling: SamplingArrays, seen: Bool[Array, "n v"] | None
) -> Float[Array, "n v"]:
    """Return the distribution of the next token; at temperature 0 the likeliest token has probability 1.

    Args:
      logits: the model's, float32 (n, vocab).
      sampling: settings of each sequence.
      seen: which tokens each sequence contains, bool (n, vocab); `None` when nothing is penalised.
    """
    shaped = processed(logits, sampling, seen)
    likeliest = jax.nn.one_hot(jnp.argmax(shaped, axis=-1), shaped.shape[-1], dtype=shaped.dtype)
    return jnp.where((sampling.temperature == 0)[:, None], likeliest, jax.nn.softmax(shaped, axis=-1))


def random_key(seed: Array, position: Array, role: int) -> Array:
    """Return the random key of a position and role.

    Positions after a rejected proposal are proposed again with the same keys; that is sound, since their first draws
    influenced no token of the output.

    Args:
      seed: of the sequence, uint32 scalar.
      position: in the sequence, int32 scalar.
      role: `PROPOSE`, `ACCEPT` or `CORRECT`.
    """
    return jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), position), role)


class _Drawn:
    """Proposals as they are drawn, one after the other."""

    def __init__(self, inputs: RoundInputs, vocab: int):
        self._inputs = inputs
        self._tokens: list[Array] = []
        self._q: list[Array] = []
        self._seen = [seen_of(inputs.seen, vocab)]

    def draw(self, logits: Float[Array, "b v"]) -> Int[Array, " b"]:
        """Draw the next proposal of each sequence, int32."""
        inputs, i = self._inputs, len(self._tokens)
        q = distribution(logits, inputs.sampling, self._seen[-1])
        keys = jax.vmap(functools.partial(random_key, role=PROPOSE))(inputs.sampling.seed, inputs.length + i)
        token = jax.vmap(jax.random.categorical)(keys, jnp.log(q)).astype(jnp.int32)
        self._tokens.append(token)
        self._q.append(q)
        self._seen.append(self._seen[-1].at[jnp.arange(len(token)), token].set(True))
        return token

    def proposals(self) -> Proposals:
        """All of them."""
        each = self._tokens, self._q, self._seen
        return Proposals(*(jnp.stack(x, axis=1) for x in each))


def _run(
    model: Any, cache: Contiguous, module: int, hidden: Array, tokens: Array, step: Packed, caches: ModelCache
) -> tuple[Float[Array, "b s e"], Float[Array, "b s e"], ModelCache]:
    """One module on a step's tokens, for the next and for the head, and the caches of all modules with these added."""
    run = RunCache(cache, step, caches[module])
    inputs: dict[str, Any] = dict(positions=step.positions, segment_ids=step.slots + 1, cache=run)
    hidden, out = model.decode_ahead(module, hidden, tokens, **inputs)
    return hidden, out, (*caches[:module], run.states, *caches[module + 1 :])


def _logits_at(model: LanguageModel, hidden: Float[Array, "b s e"], column: Int[Array, " b"]) -> Float[Array, "b v"]:
    return constrain(logits_at(model, hidden, column[:, None]), "batch", None, None)[:, 0]


def _laid_out(hidden: Float[Array, "b w e"]) -> Float[Array, "b w e"]:
    return constrain(hidden, "batch", None, "embed")


def _ids(model: LanguageModel, tokens: Int[Array, "b s"]) -> Int[Array, "b s"]:
    """Clip ids to the model's vocabulary: what a draft makes of an id that it does not have is verified anyway."""
    return jnp.minimum(tokens, model.head_weight().shape[0] - 1)


def _resized(logits: Float[Array, "b v"], vocab: int) -> Float[Array, "b w"]:
    """The draft's logits for the large model's vocabulary: -inf for ids that the draft does not have."""
    more = max(vocab - logits.shape[-1], 0)
    return jnp.pad(logits, ((0, 0), (0, more)), constant_values=-jnp.inf)[:, :vocab]
