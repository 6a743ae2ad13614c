"""Generation by models without a cache: each token is computed from the whole sequence again."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int, UInt8

from jaxscale.errors import ConfigError
from jaxscale.infer.cache import describe_cache, generating
from jaxscale.infer.engine import Emit, SequenceState, check_independent
from jaxscale.infer.forward import replicated
from jaxscale.infer.loaded import Loaded
from jaxscale.infer.sampling import Chosen, Sampling, SamplingArrays, choose, seen_bits, seen_of
from jaxscale.layout import Layout, constrain
from jaxscale.layout.tensors import Tree
from jaxscale.nn import head_logits

TOP = 20


def why_no_cache(loaded: Loaded) -> str | None:
    """Return why a model cannot decode with a cache, in a sentence; `None` when it can.

    Args:
      loaded: the model.
    """
    try:
        describe_cache(nnx.merge(loaded.graphdef, loaded.params))
    except ConfigError as e:
        return str(e)
    return None


class WholeSequences:
    """A `jaxscale.infer.engine.Stepper` for any model: each token is computed from the whole sequence again.

    Args:
      graphdef: the model's graph definition.
      params: its parameters, sharded by `layout`.
      layout: where the model lives; `None` is one device.
      rows: sequences that may run at once, rounded up to what the layout divides.
      length: the most tokens of a sequence, prompt included.
      end_ids: end-of-text token ids.

    Raises:
      ConfigError: a sequence would depend on its padding or on other sequences of the batch.
    """

    scores = False
    prefix: tuple[int, ...] = ()

    def __init__(
        self,
        graphdef: nnx.GraphDef[Any],
        params: Tree,
        *,
        layout: Layout | None = None,
        rows: int = 8,
        length: int = 1024,
        end_ids: Iterable[int] = (),
    ):
        split = 1 if layout is None else layout.split("batch")
        self.slots = -(-rows // split) * split
        split = 1 if layout is None else layout.split("seq")
        self.length, self._width = length, length if split == 1 else -(-length // (2 * split)) * 2 * split
        self._graphdef, self._params, self._layout = graphdef, params, layout
        model = nnx.merge(graphdef, params)
        check_independent(model)
        self.vocab = model.head_weight().shape[0]
        self.end_ids = frozenset(end_ids)
        self._sequences: list[SequenceState | None] = [None] * self.slots
        self._steps = 0

    def counts(self) -> dict[str, int]:
        """See `Stepper`."""
        return {"steps": self._steps, "calls": self._steps}

    def admit(self, queue: Sequence[SequenceState], running: Sequence[SequenceState], clock: float) -> None:
        """See `Stepper`; in order of arrival."""
        waiting = list(queue)
        for slot, occupant in enumerate(self._sequences):
            if occupant is None and waiting:
                sequence = self._sequences[slot] = waiting.pop(0)
                sequence.slot = slot

    def run(self, plan: None, emit: Emit) -> None:
        """See `Stepper`; the next token of every running sequence."""
        tokens, counts = np.zeros((self.slots, self._width), np.int32), np.ones(self.slots, np.int32)
        settings, seen = [Sampling()] * self.slots, np.zeros((self.slots, -(-self.vocab // 8)), np.uint8)
        running = [(slot, s) for slot, s in enumerate(self._sequences) if s is not None]
        for slot, s in running:
            tokens[slot, : len(s.tokens)], counts[slot], settings[slot] = s.tokens, len(s.tokens), s.request.sampling
            seen[slot] = seen_bits(s.tokens, settings[slot], self.vocab)
        with self._layout or contextlib.nullcontext():
            last = _last(self._graphdef, self._params, tokens, counts)
        with generating(self._layout) or contextlib.nullcontext():  # one column cannot be sharded along the sequence
            sampling = SamplingArrays.of(settings, self.vocab)
            chosen, top = jax.device_get(_next(self._graphdef, self._params, last, counts, sampling, seen))
        self._steps += 1
        for slot, s in running:
            values, ids = (x[slot, : settings[slot].logprobs].tolist() for x in top)
            emit(s, int(chosen.token[slot]), float(chosen.logprob[slot]), tuple(zip(ids, values, strict=True)))

    def release(self, sequence: SequenceState) -> None:
        """See `Stepper`."""
        self._sequences[sequence.slot] = None
        sequence.slot = -1

    def compile(self, note: Callable[[int, int], None]) -> None:
        """See `Stepper`; runs a step without a sequence."""
        note(0, 1)
        self.run(None, lambda *_: None)
        self._steps = 0


@functools.partial(jax.jit, static_argnums=0)
def _last(graphdef: nnx.GraphDef[Any], params: Tree, tokens: Int[Array, "b s"], counts: Int[Array, " b"]) -> Array:
    """The final hidden state of each sequence's last token, (b, 1, e)."""
    hidden = nnx.merge(graphdef, params).hidden(tokens)
    return constrain(jnp.take_along_axis(hidden, counts[:, None, None] - 1, axis=1), "batch", None, None)


@functools.partial(jax.jit, static_argnums=0)
def _next(
    graphdef: nnx.GraphDef[Any],
    params: Tree,
    last: Float[Array, "b 1 e"],
    counts: Int[Array, " b"],
    sampling: SamplingArrays,
    seen: UInt8[Array, "b w"],
) -> tuple[Chosen, tuple[Float[Array, "b t"], Int[Array, "b t"]]]:
    """Each sequence's next token, and the likeliest tokens with their log-probabilities."""
    model = nnx.merge(graphdef, params)
    logits = constrain(head_logits(last, model.head_weight(), softcap=model.logit_softcap), "batch", None, None)[:, 0]
    logprobs = jax.nn.log_softmax(logits, axis=-1)
    chosen = choose(logits, sampling, counts, seen_of(seen, logits.shape[-1]))
    return replicated((chosen, lax.top_k(logprobs, min(TOP, logits.shape[-1]))))
