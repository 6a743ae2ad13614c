"""Checks that models and mixers have the capabilities that they declare."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxscale.errors import ConfigError
from jaxscale.infer.cache import Contiguous, init_cache
from jaxscale.infer.forward import forward
from jaxscale.layout import Layout
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
from jaxscale.step.objective import NextToken, Objective
from jaxscale.step.objectives import MaskedToken
from jaxscale.step.state import describe_model
from jaxscale.testing.layouts import compare_layouts, random_batch
from jaxscale.testing.params import random_params

LENGTHS, SEQ, VOCAB = (5, 1, 4, 3), 16, 32
WIDTH = 6
BACK = 2
Same = Callable[[np.ndarray, np.ndarray, str], None]


def check_model(config: ModelConfig, *, tolerance: float = 1e-4) -> tuple[str, ...]:
    """Check each capability of a model, with random parameters on one device.

    - Either every parameter has axis names, or none has.
    - LanguageModel: a document has the same output alone and anywhere in a packed row; padding changes nothing; if the
      model is causal, no token depends on a later one.
    - Stackable: scanned and unrolled layers have the same output.
    - Stageable: `begin`, `layers` and `finish` together equal `hidden`.
    - Decodable: feeding tokens of several sequences a few at a time equals whole sequences, also after going back to
      an earlier token and after reusing a slot. Checked for causal models whose mixers all have a `decode_state`.
    - Plannable: the FLOPs of its products add up to those of a forward pass (`flops`).

    `compare_layouts` checks that results are the same on several devices.

    Args:
      config: config of a small model. A language model must accept rows of 16 tokens.
      tolerance: allowed difference, relative to the largest number, of float32 sums in another order.

    Returns:
      the names of the model's capabilities (see `jaxscale.models.base`).

    Raises:
      AssertionError: a capability does not hold; the message names it.
      LayoutError: some parameters have axis names and others do not.
    """
    return _check(config, type(config).__name__, tolerance)


def _check(config: ModelConfig, name: str, tolerance: float) -> tuple[str, ...]:
    if isinstance(config, DropsTokens):  # which tokens are dropped depends on the rest of the row
        config = config.dropless()
    graphdef, infos = describe_model(config)
    model = nnx.merge(graphdef, jax.tree.map(jnp.asarray, random_params(infos)))

    def same(got: np.ndarray, want: np.ndarray, what: str) -> None:
        error = float(np.max(np.abs(got - want))) / max(1.0, float(np.max(np.abs(want))))
        assert error <= tolerance, f"{name}: {what}; the largest difference is {error:.1e} of the largest number"

    capabilities: list[type] = [p for p in (Stackable, Stageable, LanguageModel) if isinstance(model, p)]
    capabilities += [Decodable] if _decodes(config, model) else []
    capabilities += [Plannable] if isinstance(config, Plannable) else []
    if isinstance(config, Plannable) and isinstance(config, CountsFlops):
        counted, products = config.flops(2, SEQ, training=False), sum(config.product_flops(2, SEQ).values())
        assert counted == products, f"{name}: its products have {products} FLOPs, but its forward pass has {counted}"
    if isinstance(model, LanguageModel):
        _check_language_model(config, model, same)
    return tuple(p.__name__ for p in capabilities)


def check_mixer(mixer: Mixer, layouts: Iterable[Layout] = (), *, tolerance: float = 1e-4, **fields: Any) -> None:
    """Check a mixer in a model of one layer as `check_model` checks a language model, and its training on layouts.

    Args:
      mixer: as `BlockConfig.mixer`. Decoding with a cache is checked if its layer has a `decode_state`.
      layouts: layouts on which packed documents train to the same numbers as on one device (`compare_layouts`).
      tolerance: as for `check_model`.
      **fields: fields of the model's `TransformerConfig` to change.

    Raises:
      AssertionError: a capability does not hold; the message names it.
    """
    sizes: dict[str, Any] = dict(vocab=VOCAB, width=32, heads=4, head_dim=8, hidden=32)
    config = TransformerConfig(blocks=(BlockConfig(mixer=mixer),), **(sizes | {"depth": 1} | fields))
    name = type(mixer).__name__
    _check(config, name, tolerance)
    if not (layouts := list(layouts)):
        return
    objective: Objective = NextToken() if config.causal else MaskedToken()
    batch = random_batch(config.vocab, seq=SEQ, lengths=LENGTHS)
    agreement = compare_layouts(config, layouts, batch=batch, objective=objective)
    try:
        agreement.check()
    except AssertionError as e:
        raise AssertionError(f"{name}: {e}") from None


def _decodes(config: Any, model: Any) -> bool:
    if not is_causal(config) or not isinstance(model, Decodable):
        return False
    try:
        return all(block.decode_state is not None for run in model.runs for block in run.blocks)
    except ConfigError:
        return False


def _check_language_model(config: Any, model: Any, same: Same) -> None:
    vocab = vocab_of(config)
    sequences = np.random.default_rng(0).integers(0, vocab, (len(LENGTHS) + 1, SEQ), dtype=np.int32)
    # row 0 packs one document per further row; each of these rows has its document alone
    segments, positions = np.zeros((2, len(LENGTHS) + 1, SEQ), np.int32)
    starts = np.cumsum([0, *LENGTHS])
    for row, (start, n) in enumerate(zip(starts, LENGTHS, strict=False), 1):
        segments[0, start : start + n], segments[row, :n] = row, 1
        positions[0, start : start + n] = positions[row, :n] = np.arange(n)
        sequences[0, start : start + n] = sequences[row, :n]
    inputs = dict(positions=jnp.asarray(positions), segment_ids=jnp.asarray(segments))
    hidden = jax.jit(lambda tokens: model.hidden(tokens, **inputs))

    expected = np.asarray(hidden(sequences))
    for row, (start, n) in enumerate(zip(starts, LENGTHS, strict=False), 1):
        same(expected[0, start : start + n], expected[row, :n], "a document differs in a packed row and alone")
    other = np.where(segments == 0, (sequences + 1) % vocab, sequences)
    real = segments != 0
    same(np.asarray(hidden(other))[real], expected[real], "padding tokens change a document")
    if is_causal(config):
        last = LENGTHS[0] - 1
        other = sequences.copy()
        other[1, last] = (other[1, last] + 1) % vocab
        same(np.asarray(hidden(other))[1, :last], expected[1, :last], "a token changes those before it")
    runs = model.runs if isinstance(model, Stackable) else ()
    if runs:
        before = [run.scan for run in runs]
        for scanned in (True, False):
            for run in runs:
                run.scan = scanned
            got = jax.jit(lambda tokens: model.hidden(tokens, **inputs))(sequences)
            same(np.asarray(got)[real], expected[real], "layers differ scanned and unrolled")
        for run, scan in zip(runs, before, strict=True):
            run.scan = scan
    if isinstance(model, Stageable):

        def staged(tokens: jax.Array) -> jax.Array:
            return model.finish(model.layers(model.begin(tokens, inputs["positions"]), model.context(SEQ, **inputs))[0])

        got = jax.jit(staged)(sequences)
        same(np.asarray(got)[real], expected[real], "begin, layers and finish together differ from hidden")
    if _decodes(config, model):
        whole = np.asarray(jax.jit(model.hidden)(sequences[1:4]))
        _check_decoding(model, sequences[1:4], whole, same)


STEPS = (
    # (slot, sequence, first token, number of tokens) of each sequence in a step
    ((0, 0, 0, 4), (1, 1, 0, 2)),
    ((0, 0, 4, 1), (1, 1, 2, 1)),
    ((1, 1, 3, 5),),
    ((0, 0, 5, 5), (1, 1, 8, 1)),
    ((0, 0, 10 - BACK, 3), (1, 1, 9, 3)),  # the first sequence goes back
    ((0, 2, 0, 3), (1, 1, 12, 1)),  # a third sequence reuses the slot of the first
    ((0, 2, 3, 2), (1, 1, 13, 3)),
)


def _check_decoding(model: Any, sequences: np.ndarray, whole: np.ndarray, same: Same) -> None:
    """Check steps of two slots in one batch row, with padding after the tokens."""
    cache = Contiguous()
    states = init_cache(model, cache, 1, 2, SEQ, back=BACK)
    run = jax.jit(lambda tokens, step, states: forward(model, tokens, step, cache, states))
    for parts in STEPS:
        hidden, states = run(*_packed(parts, sequences), states)
        column = 0
        for _, sequence, first, n in parts:
            got = np.asarray(hidden)[0, column : column + n]
            same(got, whole[sequence, first : first + n], "decoding a sequence differs from the whole sequence")
            column += n


def _packed(parts: Sequence[tuple[int, int, int, int]], sequences: np.ndarray) -> tuple[jax.Array, Packed]:
    tokens, rows, positions = np.zeros(WIDTH, np.int32), *np.full((2, WIDTH), -1, np.int32)
    columns, at = np.full((1, 2, WIDTH), WIDTH, np.int32), 0
    for slot, sequence, first, n in parts:
        tokens[at : at + n], rows[at : at + n] = sequences[sequence, first : first + n], slot
        positions[at : at + n] = np.arange(first, first + n)
        columns[0, slot, :n] = np.arange(at, at + n)
        at += n
    return jnp.asarray(tokens[None]), Packed(
        jnp.asarray(rows[None]), jnp.asarray(positions[None]), (Group(jnp.asarray(columns)),)
    )
