"""That a mixer keeps texts apart, and generates what it gives of the whole text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxscale.infer.cache import Contiguous, init_cache
from jaxscale.infer.forward import forward
from jaxscale.models import BlockConfig, TransformerConfig
from jaxscale.nn import Group, Mixer, Packed
from jaxscale.step.state import describe_model
from jaxscale.testing.params import random_params

LENGTHS, SEQ, VOCAB = (5, 1, 4, 3), 16, 32
WIDTH = 6
BACK = 2


def check_mixer(mixer: Mixer, *, tolerance: float = 1e-4, **fields: Any) -> None:
    """Checks a mixer in a model of one layer with random parameters, on one device.

    Checked are that a document gives what it gives alone, wherever it stands in a packed row; that padding changes
    nothing; that no token sees a later one, in a model that is causal; and, where the layer has a `decode_state`, that
    tokens of several texts, some at a time, give what whole texts give, also after going back by a few tokens and
    where a text takes another's place. That it is the same on several devices is `compare_layouts`' to say.

    Args:
      mixer: as `BlockConfig.mixer`.
      tolerance: of float32 sums in another order, as a share of the largest number.
      **fields: of the model's `TransformerConfig`, where others than a small model's are wanted.

    Raises:
      AssertionError: saying which promise is broken.
    """
    sizes: dict[str, Any] = dict(vocab=VOCAB, width=32, heads=4, head_dim=8, hidden=32)
    config = TransformerConfig(depth=1, blocks=(BlockConfig(mixer=mixer),), **(sizes | fields))
    graphdef, infos = describe_model(config)
    model = nnx.merge(graphdef, jax.tree.map(jnp.asarray, random_params(infos)))
    name = type(mixer).__name__
    texts = np.random.default_rng(0).integers(0, config.vocab, (len(LENGTHS) + 1, SEQ), dtype=np.int32)
    # the first row is packed with the beginnings of all the others, each of which stands alone in its own
    segments, positions = np.zeros((2, len(LENGTHS) + 1, SEQ), np.int32)
    starts = np.cumsum([0, *LENGTHS])
    for row, (start, n) in enumerate(zip(starts, LENGTHS, strict=False), 1):
        segments[0, start : start + n], segments[row, :n] = row, 1
        positions[0, start : start + n] = positions[row, :n] = np.arange(n)
        texts[0, start : start + n] = texts[row, :n]
    hidden = jax.jit(lambda tokens: model.hidden(tokens, positions=positions, segment_ids=segments))

    def same(got: Any, want: Any, what: str) -> None:
        error = float(np.max(np.abs(got - want))) / max(1.0, float(np.max(np.abs(want))))
        assert error <= tolerance, f"{name}: {what}; the largest difference is {error:.1e} of the largest number"

    found = np.asarray(hidden(texts))
    for row, (start, n) in enumerate(zip(starts, LENGTHS, strict=False), 1):
        same(found[0, start : start + n], found[row, :n], "a document is another in a packed row than alone")
    other = np.where(segments == 0, (texts + 1) % config.vocab, texts)
    there = segments != 0
    same(np.asarray(hidden(other))[there], found[there], "tokens of padding change those of a document")
    if config.causal:
        last = LENGTHS[0] - 1
        other = texts.copy()
        other[1, last] = (other[1, last] + 1) % config.vocab
        same(np.asarray(hidden(other))[1, :last], found[1, :last], "a token changes those before it")
    if getattr(model.runs[0].blocks[0].attn, "decode_state", None) is not None:
        whole = np.asarray(jax.jit(model.hidden)(texts[1:4]))
        _check_decoding(model, texts[1:4], whole, same)


STEPS = (
    # (row, text, first token, number of tokens) of each text in a step
    ((0, 0, 0, 4), (1, 1, 0, 2)),
    ((0, 0, 4, 1), (1, 1, 2, 1)),
    ((1, 1, 3, 5),),
    ((0, 0, 5, 5), (1, 1, 8, 1)),
    ((0, 0, 10 - BACK, 3), (1, 1, 9, 3)),  # the first goes back
    ((0, 2, 0, 3), (1, 1, 12, 1)),  # a third text takes the place of the first
    ((0, 2, 3, 2), (1, 1, 13, 3)),
)


def _check_decoding(model: Any, texts: np.ndarray, whole: np.ndarray, same: Any) -> None:
    """Steps of two rows of one lane, padding behind them."""
    how = Contiguous()
    states = init_cache(model, how, 1, 2, SEQ, back=BACK)
    run = jax.jit(lambda tokens, step, states: forward(model, tokens, step, how, states))
    for parts in STEPS:
        hidden, states = run(*_packed(parts, texts), states)
        column = 0
        for _, text, first, n in parts:
            got = np.asarray(hidden)[0, column : column + n]
            same(got, whole[text, first : first + n], "a text that is generated is another than the whole text")
            column += n


def _packed(parts: Sequence[tuple[int, int, int, int]], texts: np.ndarray) -> tuple[jax.Array, Packed]:
    tokens, rows, positions = np.zeros(WIDTH, np.int32), *np.full((2, WIDTH), -1, np.int32)
    columns, at = np.full((1, 2, WIDTH), WIDTH, np.int32), 0
    for row, text, first, n in parts:
        tokens[at : at + n], rows[at : at + n] = texts[text, first : first + n], row
        positions[at : at + n] = np.arange(first, first + n)
        columns[0, row, :n] = np.arange(at, at + n)
        at += n
    return jnp.asarray(tokens[None]), Packed(
        jnp.asarray(rows[None]), jnp.asarray(positions[None]), (Group(jnp.asarray(columns)),)
    )
