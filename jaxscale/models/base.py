"""Capabilities of a model and of its config, one protocol each. Callers test for a protocol, never for a class.

A config needs only `make` to be trained with a custom objective:

    ModelConfig           make                              training
    LanguageModelConfig   vocab                             next-token objectives, evaluation and generation of text
    CountsFlops           flops                             model FLOPs utilisation
    CountsProducts        products                          model FLOPs utilisation with adapters
    Plannable             not_in_formulas                   planning by formulas (else from the traced step)
    ExtendsContext        for_texts_of                      positions that depend on the sequence length
    HasWidths             at_width                          the coordinate check of parametrisations

The module that it makes needs only parameters with axis names:

    LanguageModel         hidden, head_weight, logit_softcap    next-token objectives
    ReportsStats          hidden_and_stats                      auxiliary losses of layers (load balance)
    ReordersTokens        order                                 attention on reordered sequences (zigzag)
    Stackable             runs                                  scanned stacks of layers
    Stageable             ... begin, context, layers, finish    pipeline stages
    Decodable             ... hidden_and_stats                  generation with a cache

`jaxscale.testing.check_model` lists the capabilities of a model and tests them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxscale.errors import ConfigError
from jaxscale.layout import Layout, TensorInfo, constrain
from jaxscale.nn import Context, Part, Run, RunCache, Stats
from jaxscale.optim.mup import Widening
from jaxscale.parallel import Weight

# ---- configs


@runtime_checkable
class ModelConfig(Protocol):
    """Makes a model. Write it as a frozen dataclass, so that a run can save it in its config."""

    def make(self, rngs: nnx.Rngs) -> Any: ...


@runtime_checkable
class LanguageModelConfig(ModelConfig, Protocol):
    """Makes a `LanguageModel`, which is causal unless the config has an attribute `causal` that is False."""

    @property
    def vocab(self) -> int: ...


@runtime_checkable
class CountsFlops(Protocol):
    """Counts the matrix-multiplication FLOPs of a pass over `batch` rows of `seq` tokens (see `Transformer.flops`)."""

    def flops(self, batch: int, seq: int, *, training: bool = True) -> int: ...


@runtime_checkable
class CountsProducts(Protocol):
    """Counts the FLOPs of a forward pass by product; "scores" and "attn_out" multiply two activations."""

    def products(self, batch: int, seq: int) -> dict[str, int]: ...


@runtime_checkable
class NamesActivations(Protocol):
    """Lists the residuals of a layer, by the names of `jaxscale.nn.TENSORS`."""

    def activations(self, batch: int, seq: int, layer: int = -1) -> dict[str, tuple[TensorInfo, ...]]: ...


@runtime_checkable
class Plannable(CountsProducts, NamesActivations, Protocol):
    """The planner's formulas may cover it. Any other config is planned from its traced step."""

    def not_in_formulas(self) -> str | None:
        """The part that the formulas do not cover, in a few words, or `None`."""
        ...


@runtime_checkable
class ExtendsContext(Protocol):
    """Has position embeddings that depend on the sequence length (LongRoPE)."""

    def for_texts_of(self, length: int) -> Any:
        """The config for sequences of up to `length` tokens; the same object if nothing changes."""
        ...


@runtime_checkable
class DropsTokens(Protocol):
    """Has experts that may drop tokens in training."""

    def dropless(self) -> Any:
        """The config of the same model without dropped tokens; the same object if it drops none."""
        ...


@runtime_checkable
class HasWidths(Protocol):
    """Can be scaled to another width."""

    def at_width(self, width: int) -> Any: ...


@runtime_checkable
class Parametrised(Protocol):
    """May scale initial values, learning rates and logits with the width (see `jaxscale.optim.mup`)."""

    @property
    def widening(self) -> Widening | None:
        """`None` is the standard parametrisation."""
        ...


@runtime_checkable
class LimitsLength(Protocol):
    """May limit the sequence length (learned positions)."""

    @property
    def max_length(self) -> int | None: ...


@runtime_checkable
class CutsSequences(Protocol):
    """Restricts the sequence length when devices shard the sequence."""

    def length_unit(self) -> int:
        """The sequence length must be a multiple of this under the current layout."""
        ...


@runtime_checkable
class ChecksRows(Protocol):
    """Says before it is traced which rows it refuses."""

    def check_row(self, seq_len: int) -> None:
        """Raises what a forward pass over rows of `seq_len` tokens would raise under the layout in force."""


@runtime_checkable
class DescribesLayers(Protocol):
    """Describes at the start of a run how its layers are applied."""

    def describe(self, layout: Layout | None) -> str: ...


@runtime_checkable
class FindsIdle(Protocol):
    """Lists its settings that have no effect."""

    def idle(self, seq_len: int, layout: Layout | None) -> Iterator[tuple[str, Any, str]]:
        """Settings that differ from their default and have no effect in a run: name, value, reason."""
        ...


@runtime_checkable
class ScansLayers(Protocol):
    """Applies its layers by a scan, or unrolled."""

    @property
    def scan(self) -> bool | str: ...


def is_causal(model: Any) -> bool:
    """Whether a config's model is causal, which is assumed if the config has no attribute `causal`."""
    return bool(getattr(model, "causal", True))


def vocab_of(model: Any) -> int:
    """The vocabulary size of a config's model.

    Raises:
      ConfigError: it is no language model.
    """
    if not isinstance(model, LanguageModelConfig):
        raise ConfigError(f"{type(model).__name__} is no language model, so it has no texts")
    return model.vocab


# ---- modules


@runtime_checkable
class LanguageModel(Protocol):
    """Final hidden states and a head, never logits, so that a loss can avoid holding them."""

    @property
    def logit_softcap(self) -> float | None: ...

    def hidden(
        self,
        tokens: Int[Array, "b s"],
        *,
        positions: Int[Array, "b s"] | None = None,
        segment_ids: Int[Array, "b s"] | None = None,
        key: Array | None = None,
    ) -> Float[Array, "b s e"]: ...

    def head_weight(self) -> Float[Array, "v e"] | Weight: ...


@runtime_checkable
class ReportsStats(Protocol):
    """A language model whose layers report statistics, and may add to the loss."""

    def hidden_and_stats(self, tokens: Int[Array, "b s"], **inputs: Any) -> tuple[Float[Array, "b s e"], Stats]:
        """As `LanguageModel.hidden`, and what layers report."""
        ...


@runtime_checkable
class ReordersTokens(Protocol):
    """Reorders the tokens of a sequence; `hidden` then takes a keyword `arranged`."""

    def order(self, seq_len: int) -> Int[np.ndarray, "s"] | None:
        """The natural place of each column under the layout in force; `None` for the natural order."""
        ...


@runtime_checkable
class Stackable(Protocol):
    """Layers in `runs`: each a group of blocks, repeated, whose parameters are stacked along `layers`."""

    runs: Sequence[Run]


@runtime_checkable
class Stageable(Stackable, LanguageModel, Protocol):
    """A language model that pipeline stages can take apart: `hidden` is `begin`, `layers` and `finish`."""

    def begin(
        self, tokens: Int[Array, "b s"], positions: Int[Array, "b s"] | None = None, order: Any = None
    ) -> Any: ...

    def context(self, seq: int, **inputs: Any) -> Context: ...

    def layers(self, x: Any, context: Context, parts: Sequence[Part | None] | None = None) -> tuple[Any, Stats]: ...

    def finish(self, x: Any) -> Float[Array, "b s e"]: ...


@runtime_checkable
class Decodable(Stackable, LanguageModel, Protocol):
    """A language model that decodes with a cache; the mixer of each block describes its state (`decode_state`).

    `max_length` is the longest sequence in tokens, or `None`. `refuse_length` raises `ConfigError` if sequences cannot
    be decoded up to a length, `check_independent` if a sequence would depend on the others of its batch.
    """

    @property
    def max_length(self) -> int | None: ...

    def refuse_length(self, length: int) -> None: ...

    def check_independent(self) -> None: ...

    def hidden_and_stats(
        self, tokens: Int[Array, "b s"], *, cache: Sequence[RunCache] | None = None, **inputs: Any
    ) -> tuple[Float[Array, "b s e"], Stats]: ...


def hidden_and_stats(model: Any, tokens: Int[Array, "b s"], **inputs: Any) -> tuple[Float[Array, "b s e"], Stats]:
    """Hidden states of a language model and the statistics of its layers; `{}` without a `hidden_and_stats` method."""
    if isinstance(model, ReportsStats):
        return model.hidden_and_stats(tokens, **inputs)
    return model.hidden(tokens, **inputs), {}


def order_of(model: Any, seq_len: int) -> Int[np.ndarray, "s"] | None:
    """The order in which a model wants a sequence's columns, `None` for the natural one."""
    return model.order(seq_len) if isinstance(model, ReordersTokens) else None


def arrange(tree: Any, order: Int[np.ndarray, "s"]) -> Any:
    """Every array of `tree`, (B, S) or (B, S, E), with its columns in this order; one of rows (B,) has none."""

    def one(x: Array) -> Array:
        if x.ndim < 2:
            return x
        return constrain(taken(x), "batch", "seq", *(("embed",) if x.ndim == 3 else ()))

    def taken(x: Array) -> Array:
        if not jax.sharding.get_abstract_mesh().manual_axes:
            return jnp.take(x, order, axis=1)
        # XLA's partitioner aborts on this gather inside a shard_map over a part of the mesh axes (jax 0.10.2).
        pieces = np.split(order, np.flatnonzero(np.diff(order) != 1) + 1)
        return jnp.concatenate([x[:, piece[0] : piece[-1] + 1] for piece in pieces], axis=1)

    return jax.tree.map(one, tree)
