"""Capabilities of a model and of its config, one protocol each. Callers test for a protocol, never for a class.

A config needs only `make` to be trained with a custom objective:

    ModelConfig           make                              training
    LanguageModelConfig   vocab                             next-token objectives, evaluation and generation of text
    CountsFlops           flops                             model FLOPs utilisation
    CountsProducts        products                          model FLOPs utilisation with adapters
    Plannable             not_in_formulas                   planning by formulas (else from the traced step)
    ExtendsContext        for_length                        positions that depend on the sequence length
    HasWidths             at_width                          the coordinate check of parametrisations

The module that it makes needs only parameters with axis names:

    LanguageModel         hidden, head_weight, logit_softcap    next-token objectives
    ReportsStats          hidden_and_stats                      auxiliary losses of layers (load balance)
    PredictsAhead         ahead, hidden_ahead                   multi-token prediction
    DecodesAhead          ahead_runs, decode_ahead              its modules draft tokens
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
from jaxscale.layout.tensors import Tree
from jaxscale.nn import Context, Part, Run, RunCache, Stats
from jaxscale.optim.mup import Widening
from jaxscale.parallel import Logits, Weight, as_weight

# ---- configs


@runtime_checkable
class ModelConfig(Protocol):
    """Makes a model. Write it as a frozen dataclass, so that a run can save it in its config."""

    def make(self, rngs: nnx.Rngs) -> nnx.Module:
        """Make the model, a Flax module.

        Args:
          rngs: random streams of the initial values.
        """
        ...


@runtime_checkable
class LanguageModelConfig(ModelConfig, Protocol):
    """Makes a `LanguageModel`, which is causal unless the config has an attribute `causal` that is False."""

    @property
    def vocab(self) -> int:
        """The number of token ids."""
        ...


@runtime_checkable
class CountsFlops(Protocol):
    """Counts the matrix-multiplication FLOPs of a pass over `batch` rows of `seq` tokens (see `Transformer.flops`)."""

    def flops(self, batch: int, seq: int, *, training: bool = True) -> int:
        """Return the FLOPs of a forward pass, and with `training` also of the backward pass."""
        ...


@runtime_checkable
class CountsProducts(Protocol):
    """Counts the FLOPs of a forward pass by product; "scores" and "attn_out" multiply two activations."""

    def product_flops(self, batch: int, seq: int) -> dict[str, int]:
        """Return the FLOPs by the name of the product's result, over all layers."""
        ...


@runtime_checkable
class NamesActivations(Protocol):
    """Lists the residuals of a layer, by the names of `jaxscale.nn.TENSORS`."""

    def activations(self, batch: int, seq: int, layer: int = -1) -> dict[str, tuple[TensorInfo, ...]]:
        """Return the residuals of a layer by name."""
        ...


@runtime_checkable
class Plannable(CountsProducts, NamesActivations, Protocol):
    """A config that the planner's formulas can cover. Any other config is planned from its traced step."""

    def not_in_formulas(self) -> str | None:
        """Return the part that the formulas do not cover, in a few words, or `None`."""
        ...


@runtime_checkable
class ExtendsContext(Protocol):
    """Has position embeddings that depend on the sequence length (LongRoPE)."""

    def for_length(self, length: int) -> ModelConfig:
        """Return the config for sequences of up to `length` tokens; an equal one if nothing changes."""
        ...


@runtime_checkable
class DropsTokens(Protocol):
    """Has experts that may drop tokens in training."""

    def dropless(self) -> ModelConfig:
        """Return the config of the same model without dropped tokens, for every mesh; the same object if it is that."""
        ...


@runtime_checkable
class SendsToExperts(Protocol):
    """Has experts on several devices, to which a dispatcher may send tokens in a way that needs a certain mesh."""

    @property
    def sends_codes(self) -> bool:
        """Whether a dispatcher sends codes in place of rows, which changes results by more than rounding."""
        ...

    def on_any_mesh(self) -> ModelConfig:
        """Return the config of the same model with the default dispatcher; the same object if it has that."""
        ...


@runtime_checkable
class HasWidths(Protocol):
    """Can be scaled to another width."""

    def at_width(self, width: int) -> ModelConfig:
        """Return the config of the same model with another residual width."""
        ...


@runtime_checkable
class Parametrised(Protocol):
    """May scale initial values, learning rates and logits with the width (see `jaxscale.optim.mup`)."""

    @property
    def widening(self) -> Widening | None:
        """The changes of the parametrisation; `None` is the standard parametrisation."""
        ...


@runtime_checkable
class LimitsLength(Protocol):
    """May limit the sequence length (learned positions)."""

    @property
    def max_length(self) -> int | None:
        """The most tokens of a sequence, or `None`."""
        ...


@runtime_checkable
class OverRun(Protocol):
    """May leave out a part of the model, which is then that of the run that training starts from."""

    def over(self, model: ModelConfig) -> ModelConfig:
        """Return the config with the missing part taken from `model`."""
        ...


@runtime_checkable
class ReadsTokens(Protocol):
    """Reads token ids, but is no language model."""

    @property
    def token_ids(self) -> int | None:
        """The number of token ids, or `None` if it is not known yet."""
        ...


@runtime_checkable
class CutsSequences(Protocol):
    """Restricts the sequence length when devices shard the sequence."""

    def length_unit(self) -> int:
        """Return the number that a sequence's length must be a multiple of under the layout in force."""
        ...


@runtime_checkable
class ChecksRows(Protocol):
    """Checks the length of rows before the model is traced."""

    def check_row(self, seq_len: int) -> None:
        """Raise what a forward pass over rows of `seq_len` tokens would raise under the layout in force."""


@runtime_checkable
class ChecksDocuments(Protocol):
    """Checks the documents of packed rows that are read for training."""

    def check_documents(self, segment_ids: np.ndarray) -> None:
        """Raise `DataError` for a row that the model does not support.

        Args:
          segment_ids: the document of each token from 1, 0 for padding, (B, S) in host memory.
        """
        ...


@runtime_checkable
class NamesNumberTypes(Protocol):
    """Multiplies numbers of types that not every chip has."""

    def number_types(self) -> tuple[str, ...]:
        """Return the types, as `jaxscale.hardware.Chip.flops` names them."""
        ...


@runtime_checkable
class DescribesLayers(Protocol):
    """Describes at the start of a run how its layers are applied."""

    def describe(self, layout: Layout | None) -> str:
        """Return a line for the log."""
        ...


@runtime_checkable
class FindsIdle(Protocol):
    """Lists its settings that have no effect."""

    def idle(self, seq_len: int, layout: Layout | None) -> Iterator[tuple[str, Any, str]]:
        """Yield the settings that differ from their default and have no effect in a run: name, value, reason."""
        ...


@runtime_checkable
class ScansLayers(Protocol):
    """Applies its layers by a scan, or unrolled."""

    @property
    def scan(self) -> bool | str:
        """True, False (unrolled) or "auto"."""
        ...


def is_causal(model: object) -> bool:
    """Return whether a config's model is causal; True if the config has no attribute `causal`."""
    return bool(getattr(model, "causal", True))


def vocab_of(model: object) -> int:
    """Return the vocabulary size of a config's model.

    Raises:
      ConfigError: it is not a language model.
    """
    if not isinstance(model, LanguageModelConfig):
        raise ConfigError(f"{type(model).__name__} is no language model, since it has no `vocab`")
    return model.vocab


# ---- modules


@runtime_checkable
class LanguageModel(Protocol):
    """Gives final hidden states and the output head's weight, never logits, so that a loss need not store them."""

    @property
    def logit_softcap(self) -> float | None:
        """The soft cap on logits that a loss must apply, or `None`."""
        ...

    def hidden(
        self,
        tokens: Int[Array, "b s"],
        *,
        positions: Int[Array, "b s"] | None = None,
        segment_ids: Int[Array, "b s"] | None = None,
        key: Array | None = None,
    ) -> Float[Array, "b s e"]:
        """Return the final hidden states, normalised.

        Args:
          tokens: ids.
          positions: position of each token in its document; `None` counts from the start of the row.
          segment_ids: document of each token within the row (packing); 0 is padding.
          key: random key for dropout; `None` in evaluation.
        """
        ...

    def head_weight(self) -> Float[Array, "v e"] | Weight:
        """Return the stored weight of the output head, an array or a `Weight`."""
        ...


@runtime_checkable
class ReportsStats(Protocol):
    """A language model whose layers report statistics, and may add to the loss."""

    def hidden_and_stats(self, tokens: Int[Array, "b s"], **inputs: Any) -> tuple[Float[Array, "b s e"], Stats]:
        """Return what `LanguageModel.hidden` returns, and the statistics of the layers."""
        ...


@runtime_checkable
class PredictsAhead(Protocol):
    """A language model with modules that predict tokens after the next one (multi-token prediction)."""

    @property
    def ahead(self) -> int:
        """The number of modules."""
        ...

    def hidden_ahead(
        self, hidden: Float[Array, "b s e"], tokens: Sequence[Int[Array, "b s"]], **inputs: Any
    ) -> tuple[list[Float[Array, "b s e"]], Stats]:
        """Return for each depth k the hidden states that predict token i + k + 1, and the statistics of the layers.

        Args:
          hidden: the result of `hidden`.
          tokens: for each depth k from 1 the ids of token i + k at position i.
          **inputs: `positions`, `segment_ids`, `key`, `rows` and `arranged`, as of `hidden`.
        """
        ...


@runtime_checkable
class DecodesAhead(PredictsAhead, Protocol):
    """A language model whose modules of multi-token prediction decode with a cache, one at a time."""

    @property
    def ahead_runs(self) -> Sequence[Run]:
        """The blocks of each module."""
        ...

    def decode_ahead(
        self, module: int, hidden: Float[Array, "b s e"], tokens: Int[Array, "b s"], *, cache: RunCache, **inputs: Any
    ) -> tuple[Float[Array, "b s e"], Float[Array, "b s e"]]:
        """Return the hidden states of one module for the next one, and those that predict token i + module + 2.

        Args:
          module: its number, from 0.
          hidden: the hidden states of the module before, or those of the model.
          tokens: the ids of token i + module + 1 at position i.
          cache: the cache of its blocks, updated in place.
          **inputs: `positions` and `segment_ids`, as of `hidden`.
        """
        ...


@runtime_checkable
class ReordersTokens(Protocol):
    """Reorders the tokens of a sequence; `hidden` then takes a keyword `arranged`."""

    def order(self, seq_len: int) -> Int[np.ndarray, "s"] | None:
        """Return the position of each column under the layout in force; `None` for the natural order."""
        ...


@runtime_checkable
class Stackable(Protocol):
    """Layers in `runs`: each a group of blocks, repeated, whose parameters are stacked along `layers`."""

    runs: Sequence[Run]


@runtime_checkable
class Stageable(Stackable, LanguageModel, Protocol):
    """A language model that can be divided into pipeline stages: `hidden` is `begin`, `layers` and `finish`."""

    def begin(
        self,
        tokens: Int[Array, "b s"],
        positions: Int[Array, "b s"] | None = None,
        order: Int[np.ndarray, "s"] | None = None,
    ) -> Tree:
        """Return the input of the first layer (the embedding).

        Args:
          tokens: ids.
          positions: position of each token in its document; `None` counts from the start of the row.
          order: position of each column, if columns are not in the natural order.
        """
        ...

    def context(self, seq: int, **inputs: Any) -> Context:
        """Return the inputs that all layers share.

        Args:
          seq: number of columns.
          **inputs: `positions`, `segment_ids`, `key`, `rows` and `order`, as of `hidden`.
        """
        ...

    def layers(self, x: Tree, context: Context, parts: Sequence[Part | None] | None = None) -> tuple[Tree, Stats]:
        """Apply the layers; return the result and the statistics of the layers.

        Args:
          x: the result of `begin`, or of earlier layers.
          context: the inputs that layers share.
          parts: for each of `runs`, which repeats of its group these parameters are; `None` is all.
        """
        ...

    def finish(self, x: Tree) -> Float[Array, "b s e"]:
        """Return the final hidden states, normalised.

        Args:
          x: the result of the last layer.
        """
        ...


@runtime_checkable
class Decodable(Stackable, LanguageModel, Protocol):
    """A language model that decodes with a cache; the mixer of each block describes its state (`decode_state`)."""

    @property
    def max_length(self) -> int | None:
        """The most tokens of a sequence, or `None`."""
        ...

    def refuse_length(self, length: int) -> None:
        """Check that sequences can be decoded up to a length.

        Args:
          length: the most tokens of a sequence.

        Raises:
          ConfigError: they cannot.
        """
        ...

    def check_independent(self) -> None:
        """Check that the result for a sequence does not depend on the other sequences of a batch.

        Raises:
          ConfigError: it does.
        """
        ...

    def hidden_and_stats(
        self, tokens: Int[Array, "b s"], *, cache: Sequence[RunCache] | None = None, **inputs: Any
    ) -> tuple[Float[Array, "b s e"], Stats]:
        """Return the final hidden states, normalised, and the statistics of the layers.

        Args:
          tokens: ids.
          cache: a cache for each of `runs`, updated in place; `None` is a forward pass without one.
          **inputs: as of `hidden`.
        """
        ...


def logits_of(model: LanguageModel, hidden: Float[Array, "b s e"]) -> Logits:
    """Return what gives a model's logits, for `jaxscale.parallel.token_logprobs` and the functions beside it.

    Args:
      model: the module; only its output head is used.
      hidden: final hidden states, (B, S, E).
    """
    return Logits(hidden, as_weight(model.head_weight()).dense(), model.logit_softcap)


def hidden_and_stats(
    model: LanguageModel, tokens: Int[Array, "b s"], **inputs: Any
) -> tuple[Float[Array, "b s e"], Stats]:
    """Return a language model's hidden states and its layers' statistics (`{}` without a `hidden_and_stats` method)."""
    if isinstance(model, ReportsStats):
        return model.hidden_and_stats(tokens, **inputs)
    return model.hidden(tokens, **inputs), {}


def order_of(model: object, seq_len: int) -> Int[np.ndarray, "s"] | None:
    """Return the column order that a model needs, `None` for the natural order."""
    return model.order(seq_len) if isinstance(model, ReordersTokens) else None


def arrange(tree: Tree, order: Int[np.ndarray, "s"], *axes: str) -> Tree:
    """Reorder the columns of every array of `tree`, (B, S) or (B, S, ...); arrays (B,) are unchanged.

    Args:
      tree: a tree of arrays.
      order: for each new column the old one.
      *axes: logical axes of the dimensions after S, such as "embed"; by default they have none.
    """

    def one(x: Array) -> Array:
        if x.ndim < 2:
            return x
        return constrain(reordered(x), "batch", "seq", *(axes or (None,) * (x.ndim - 2)))

    def reordered(x: Array) -> Array:
        if not jax.sharding.get_abstract_mesh().manual_axes:
            return jnp.take(x, order, axis=1)
        # XLA's partitioner aborts on this gather inside a shard_map over a part of the mesh axes (jax 0.10.2).
        pieces = np.split(order, np.flatnonzero(np.diff(order) != 1) + 1)
        return jnp.concatenate([x[:, piece[0] : piece[-1] + 1] for piece in pieces], axis=1)

    return jax.tree.map(one, tree)
