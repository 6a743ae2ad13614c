"""Conformance of models and mixers to what they say they can do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxscale.infer.cache import Contiguous, init_cache
from jaxscale.infer.forward import forward
from jaxscale.models import (
    BlockConfig,
    Decodable,
    LanguageModel,
    ModelConfig,
    Plannable,
    Stackable,
    Stageable,
    TransformerConfig,
)
from jaxscale.models.base import CountsFlops, DropsTokens, is_causal, vocab_of
from jaxscale.nn import Group, Mixer, Packed
from jaxscale.step.state import describe_model
from jaxscale.testing.params import random_params

LENGTHS, SEQ, VOCAB = (5, 1, 4, 3), 16, 32
WIDTH = 6
BACK = 2
Same = Callable[[Any, Any, str], None]


def check_model(config: ModelConfig, *, tolerance: float = 1e-4) -> tuple[str, ...]:
    """Holds a model, with random parameters on one device, to each capability that it has.

    - Every parameter has axis names, or none has.
    - LanguageModel: a document gives what it gives alone, wherever it stands in a packed row; padding changes nothing;
      no token sees a later one, where the model is causal.
    - Stackable: layers give the same scanned and unrolled.
    - Stageable: `begin`, `layers` and `finish` make what `hidden` makes.
    - Decodable: tokens of several sequences, a few at a time, give what whole sequences give, also after going back
      and after a slot is reused. A causal model whose mixers all have a `decode_state` is checked.
    - Plannable: the FLOPs of its products add up to those of a forward pass (`flops`).

    That it is the same on several devices is `compare_layouts`' to say.

    Args:
      config: makes the model; small. A language model is asked for rows of 16 tokens.
      tolerance: of float32 sums in another order, as a share of the largest number.

    Returns:
      the names of the capabilities that it has (see `jaxscale.models.base`).

    Raises:
      AssertionError: saying which promise is broken.
      LayoutError: a parameter without names beside others that have some.
    """
    return _check(config, type(config).__name__, tolerance)


def _check(config: Any, name: str, tolerance: float) -> tuple[str, ...]:
    if isinstance(config, DropsTokens):  # by what else is in a row
        config = config.dropless()
    graphdef, infos = describe_model(config)
    model = nnx.merge(graphdef, jax.tree.map(jnp.asarray, random_params(infos)))

    def same(got: Any, want: Any, what: str) -> None:
        error = float(np.max(np.abs(got - want))) / max(1.0, float(np.max(np.abs(want))))
        assert error <= tolerance, f"{name}: {what}; the largest difference is {error:.1e} of the largest number"

    capabilities: list[type] = [p for p in (Stackable, Stageable, LanguageModel) if isinstance(model, p)]
    capabilities += [Decodable] if _decodes(config, model) else []
    capabilities += [Plannable] if isinstance(config, Plannable) else []
    if isinstance(config, Plannable) and isinstance(config, CountsFlops):
        counted, products = config.flops(2, SEQ, training=False), sum(config.products(2, SEQ).values())
        assert counted == products, f"{name}: its products have {products} FLOPs and its forward pass {counted}"
    if isinstance(model, LanguageModel):
        _check_language_model(config, model, same)
    return tuple(p.__name__ for p in capabilities)


def check_mixer(mixer: Mixer, *, tolerance: float = 1e-4, **fields: Any) -> None:
    """Checks a mixer in a model of one layer: all that `check_model` says of a language model.

    Args:
      mixer: as `BlockConfig.mixer`. A cache is tried where its layer has a `decode_state`.
      tolerance: as of `check_model`.
      **fields: of the model's `TransformerConfig`, where others than a small model's are wanted.

    Raises:
      AssertionError: saying which promise is broken.
    """
    sizes: dict[str, Any] = dict(vocab=VOCAB, width=32, heads=4, head_dim=8, hidden=32)
    config = TransformerConfig(depth=1, blocks=(BlockConfig(mixer=mixer),), **(sizes | fields))
    _check(config, type(mixer).__name__, tolerance)


def _decodes(config: Any, model: Any) -> bool:
    if not is_causal(config) or not isinstance(model, Decodable):
        return False
    return all(hasattr(block.attn, "decode_state") for run in model.runs for block in run.blocks)


def _check_language_model(config: Any, model: Any, same: Same) -> None:
    vocab = vocab_of(config)
    texts = np.random.default_rng(0).integers(0, vocab, (len(LENGTHS) + 1, SEQ), dtype=np.int32)
    # the first row is packed with the beginnings of all the others, each of which stands alone in its own
    segments, positions = np.zeros((2, len(LENGTHS) + 1, SEQ), np.int32)
    starts = np.cumsum([0, *LENGTHS])
    for row, (start, n) in enumerate(zip(starts, LENGTHS, strict=False), 1):
        segments[0, start : start + n], segments[row, :n] = row, 1
        positions[0, start : start + n] = positions[row, :n] = np.arange(n)
        texts[0, start : start + n] = texts[row, :n]
    inputs = dict(positions=jnp.asarray(positions), segment_ids=jnp.asarray(segments))
    hidden = jax.jit(lambda tokens: model.hidden(tokens, **inputs))

    expected = np.asarray(hidden(texts))
    for row, (start, n) in enumerate(zip(starts, LENGTHS, strict=False), 1):
        same(expected[0, start : start + n], expected[row, :n], "a document is another in a packed row than alone")
    other = np.where(segments == 0, (texts + 1) % vocab, texts)
    real = segments != 0
    same(np.asarray(hidden(other))[real], expected[real], "tokens of padding change those of a document")
    if is_causal(config):
        last = LENGTHS[0] - 1
        other = texts.copy()
        other[1, last] = (other[1, last] + 1) % vocab
        same(np.asarray(hidden(other))[1, :last], expected[1, :last], "a token changes those before it")
    runs = model.runs if isinstance(model, Stackable) else ()
    if runs:
        before = [run.scan for run in runs]
        for scanned in (True, False):
            for run in runs:
                run.scan = scanned
            got = jax.jit(lambda tokens: model.hidden(tokens, **inputs))(texts)
            same(np.asarray(got)[real], expected[real], "layers give something else scanned than unrolled")
        for run, scan in zip(runs, before, strict=True):
            run.scan = scan
    if isinstance(model, Stageable):

        def staged(tokens: jax.Array) -> jax.Array:
            return model.finish(model.layers(model.begin(tokens, inputs["positions"]), model.context(SEQ, **inputs))[0])

        same(np.asarray(jax.jit(staged)(texts))[real], expected[real], "begin, layers and finish are not hidden")
    if _decodes(config, model):
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


def _check_decoding(model: Any, texts: np.ndarray, whole: np.ndarray, same: Same) -> None:
    """Steps of two slots of one batch row, with padding behind the tokens."""
    cache = Contiguous()
    states = init_cache(model, cache, 1, 2, SEQ, back=BACK)
    run = jax.jit(lambda tokens, step, states: forward(model, tokens, step, cache, states))
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
