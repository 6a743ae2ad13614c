"""Generation by models that keep nothing between tokens: each takes the whole text again."""

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
from jaxscale.infer.engine import Give, Text, check_independent
from jaxscale.infer.forward import everywhere
from jaxscale.infer.loaded import Loaded
from jaxscale.infer.sampling import Choices, Chosen, Sampling, choose, seen_bits, seen_of
from jaxscale.layout import Layout, constrain
from jaxscale.nn import head_logits

TOP = 20


def keeps_nothing(loaded: Loaded) -> str | None:
    """Why a model cannot go on from kept keys, in a sentence; `None` when it can."""
    try:
        describe_cache(nnx.merge(loaded.graphdef, loaded.params))
    except ConfigError as e:
        return str(e)
    return None


class WholeTexts:
    """Steps (see `jaxscale.infer.engine.Stepper`) of any model of a run: each token takes the whole text again.

    Args:
      graphdef, params: the model, laid out by `layout`.
      layout: where it lives.
      rows: texts under way at once, rounded up to what the layout divides.
      length: the most tokens of a text, prompt and continuation.
      end_ids: ids that end a text.

    Raises:
      ConfigError: a text would depend on the padding behind it and on the texts beside it.
    """

    scores = False

    def __init__(
        self,
        graphdef: nnx.GraphDef[Any],
        params: Any,
        *,
        layout: Layout | None = None,
        rows: int = 8,
        length: int = 1024,
        end_ids: Iterable[int] = (),
    ):
        split = 1 if layout is None else layout.split("batch")
        self.places = -(-rows // split) * split
        cut = 1 if layout is None else layout.split("seq")
        self.length, self._width = length, length if cut == 1 else -(-length // (2 * cut)) * 2 * cut
        self._graphdef, self._params, self._layout = graphdef, params, layout
        model = nnx.merge(graphdef, params)
        check_independent(model)
        self.vocab = model.head_weight().shape[0]
        self.end_ids = frozenset(end_ids)
        self._rows: list[Text | None] = [None] * self.places
        self._steps = 0

    def counts(self) -> dict[str, int]:
        """See `Stepper`."""
        return {"steps": self._steps, "calls": self._steps}

    def admit(self, queue: Sequence[Text], running: Sequence[Text], clock: float) -> None:
        """See `Stepper`; in order of arrival."""
        waiting = list(queue)
        for row, there in enumerate(self._rows):
            if there is None and waiting:
                self._rows[row] = waiting.pop(0)
                self._rows[row].row = row  # type: ignore[union-attr]

    def run(self, plan: None, give: Give) -> None:
        """See `Stepper`: the next token of every running text."""
        rows = self.places
        tokens, counts = np.zeros((rows, self._width), np.int32), np.ones(rows, np.int32)
        settings, seen = [Sampling()] * rows, np.zeros((rows, -(-self.vocab // 8)), np.uint8)
        texts = [(row, t) for row, t in enumerate(self._rows) if t is not None]
        for row, t in texts:
            tokens[row, : len(t.tokens)], counts[row], settings[row] = t.tokens, len(t.tokens), t.request.sampling
            seen[row] = seen_bits(t.tokens, settings[row], self.vocab)
        with self._layout or contextlib.nullcontext():
            last = _last(self._graphdef, self._params, tokens, counts)
        with generating(self._layout) or contextlib.nullcontext():  # one column is not cut along the sequence
            how = Choices.of(settings, self.vocab)
            chosen, top = jax.device_get(_next(self._graphdef, self._params, last, counts, how, seen))
        self._steps += 1
        for row, t in texts:
            values, ids = (x[row, : settings[row].logprobs].tolist() for x in top)
            give(t, int(chosen.token[row]), float(chosen.logprob[row]), tuple(zip(ids, values, strict=True)))

    def release(self, text: Text) -> None:
        """See `Stepper`."""
        self._rows[text.row] = None
        text.row = -1

    def compile(self, note: Callable[[int, int], None]) -> None:
        """See `Stepper`: with no text."""
        note(0, 1)
        self.run(None, lambda *_: None)
        self._steps = 0


@functools.partial(jax.jit, static_argnums=0)
def _last(graphdef: nnx.GraphDef[Any], params: Any, tokens: Int[Array, "b s"], counts: Int[Array, " b"]) -> Array:
    """The final hidden state of each text's last token, (b, 1, e)."""
    hidden = nnx.merge(graphdef, params).hidden(tokens)
    return constrain(jnp.take_along_axis(hidden, counts[:, None, None] - 1, axis=1), "batch", None, None)


@functools.partial(jax.jit, static_argnums=0)
def _next(
    graphdef: nnx.GraphDef[Any],
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
