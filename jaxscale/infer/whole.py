"""Generation by models that keep nothing between tokens: each takes the whole text again."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Hashable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int, UInt8

from jaxscale.errors import ConfigError
from jaxscale.infer.cache import describe_cache, generating
from jaxscale.infer.engine import Event, Request, check_independent
from jaxscale.infer.forward import everywhere
from jaxscale.infer.loaded import Loaded
from jaxscale.infer.sampling import Choices, Chosen, Sampling, choose, seen_bits, seen_of
from jaxscale.layout import Layout, constrain
from jaxscale.nn import head_logits
from jaxscale.step.texts import checked

TOP = 20


def keeps_nothing(loaded: Loaded) -> str | None:
    """Why a model cannot go on from kept keys, in a sentence; `None` when it can."""
    try:
        describe_cache(nnx.merge(loaded.graphdef, loaded.params))
    except ConfigError as e:
        return str(e)
    return None


@dataclasses.dataclass(eq=False)
class _Text:
    request: Request
    tokens: list[int]


class WholeTexts:
    """An engine (`submit`, `cancel`, `step`, `busy` of `jaxscale.infer.engine.Engine`) for any model of a run.

    Args:
      graphdef, params: the model, laid out by `layout`.
      layout: where it lives.
      rows: texts under way at once, rounded up to what the layout divides.
      length: the most tokens of a text, prompt and continuation.
      end_ids: ids that end a text.

    Raises:
      ConfigError: a text would depend on the padding behind it and on the texts beside it.
    """

    def __init__(
        self,
        graphdef: nnx.GraphDef,
        params: Any,
        *,
        layout: Layout | None = None,
        rows: int = 8,
        length: int = 1024,
        end_ids: Iterable[int] = (),
    ):
        split = 1 if layout is None else layout.split("batch")
        self._rows = -(-rows // split) * split
        cut = 1 if layout is None else layout.split("seq")
        self.length, self._width = length, length if cut == 1 else -(-length // (2 * cut)) * 2 * cut
        self._graphdef, self._params, self._layout = graphdef, params, layout
        model = nnx.merge(graphdef, params)
        check_independent(model)
        self.vocab = model.head_weight().shape[0]
        self.end_ids = frozenset(end_ids)
        self._texts: list[_Text] = []
        self._events: list[Event] = []

    def submit(self, request: Request) -> None:
        """Puts a request into the queue.

        Raises:
          ConfigError: what it asks cannot be done here.
        """
        n = len(checked(np.asarray(request.prompt), self.vocab))
        if n + request.sampling.max_tokens > self.length:
            raise ConfigError(
                f"a prompt of {n} tokens and max_tokens = {request.sampling.max_tokens} are more than the "
                f"{self.length} tokens that a text may have here; ask for at most {max(self.length - n, 0)}"
            )
        self._texts.append(_Text(request, [int(i) for i in request.prompt]))

    def cancel(self, id: Hashable) -> None:
        """Ends a request; of one that is not under way, nothing."""
        for text in [t for t in self._texts if t.request.id == id]:
            self._events.append(Event(id, -1, finished="cancelled"))
            self._texts.remove(text)

    @property
    def busy(self) -> bool:
        """Whether `step` has something to do or to tell."""
        return bool(self._texts or self._events)

    def step(self) -> list[Event]:
        """The next token of the first texts."""
        events, self._events = self._events, []
        texts = self._texts[: self._rows]
        if not texts:
            return events
        tokens, counts = np.zeros((self._rows, self._width), np.int32), np.ones(self._rows, np.int32)
        settings, seen = [Sampling()] * self._rows, np.zeros((self._rows, -(-self.vocab // 8)), np.uint8)
        for row, t in enumerate(texts):
            tokens[row, : len(t.tokens)], counts[row], settings[row] = t.tokens, len(t.tokens), t.request.sampling
            seen[row] = seen_bits(t.tokens, settings[row], self.vocab)
        with self._layout or contextlib.nullcontext():
            last = _last(self._graphdef, self._params, tokens, counts)
        with generating(self._layout) or contextlib.nullcontext():  # one column is not cut along the sequence
            how = Choices.of(settings, self.vocab)
            chosen, top = jax.device_get(_next(self._graphdef, self._params, last, counts, how, seen))
        return events + [self._given(t, row, chosen, top) for row, t in enumerate(texts)]

    def _given(self, text: _Text, row: int, chosen: Chosen, top: Any) -> Event:
        s, token = text.request.sampling, int(chosen.token[row])
        text.tokens.append(token)
        made = len(text.tokens) - len(text.request.prompt)
        ended = token in self.end_ids and not s.ignore_end
        finished: Any = "stop" if ended else "length" if made == s.max_tokens else None
        if finished is not None:
            self._texts.remove(text)
        values, ids = (x[row, : s.logprobs].tolist() for x in top)
        return Event(text.request.id, token, float(chosen.logprob[row]), tuple(zip(ids, values, strict=True)), finished)


@functools.partial(jax.jit, static_argnums=0)
def _last(graphdef: nnx.GraphDef, params: Any, tokens: Int[Array, "b s"], counts: Int[Array, " b"]) -> Array:
    """The final hidden state of each text's last token, (b, 1, e)."""
    hidden = nnx.merge(graphdef, params).hidden(tokens)
    return constrain(jnp.take_along_axis(hidden, counts[:, None, None] - 1, axis=1), "batch", None, None)


@functools.partial(jax.jit, static_argnums=0)
def _next(
    graphdef: nnx.GraphDef,
    params: Any,
    last: Float[Array, "b 1 e"],
    counts: Int[Array, " b"],
    how: Choices,
    seen: UInt8[Array, "b w"],
) -> tuple[Chosen, Any]:
    model = nnx.merge(graphdef, params)
    logits = constrain(head_logits(last, model.head_weight(), softcap=model.logit_softcap), "batch", None, None)[:, 0]
    own = jax.nn.log_softmax(logits, axis=-1)
    chosen = choose(logits, how, counts, seen_of(seen, logits.shape[-1]))
    return everywhere((chosen, lax.top_k(own, min(TOP, logits.shape[-1]))))
