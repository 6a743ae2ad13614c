"""What a model and its config may offer. Each capability is a protocol, and whoever needs one asks for it by its name.

Of a config, only `make` is needed to train with an objective of one's own:

    ModelConfig           make                              training
    LanguageModelConfig   vocab                             next-token objectives, texts
    CountsFlops           flops                             model FLOPs utilisation
    CountsProducts        products                          the same with adapters
    Plannable             not_in_formulas                   planning by formulas; others are planned by compiling
    ExtendsContext        for_texts_of                      positions that go by a text's length
    HasWidths             at_width                          the coordinate check of parametrisations

Of the module that it makes, only named parameters:

    LanguageModel         hidden, head_weight, logit_softcap    next-token objectives
    ReportsStats          hidden_and_stats                      losses of layers (experts' balance)
    ReordersTokens        order                                 attention that wants another order of a row
    Stackable             runs                                  layers in scanned stacks
    Stageable             ... begin, context, layers, finish    pipeline stages
    Decodable             ... hidden_and_stats                  generation with a cache

`jaxscale.testing.check_model` tells which a model has, and holds it to them.
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
    """Makes a model; a frozen dataclass, so that a run can write it down."""

    def make(self, rngs: nnx.Rngs) -> Any: ...


@runtime_checkable
class LanguageModelConfig(ModelConfig, Protocol):
    """Makes a `LanguageModel`. Its tokens see none behind them, unless it has a `causal` that is False."""

    @property
    def vocab(self) -> int: ...


@runtime_checkable
class CountsFlops(Protocol):
    """Knows the matrix-multiplication FLOPs of a pass over `batch` rows of `seq` tokens (see `Transformer.flops`)."""

    def flops(self, batch: int, seq: int, *, training: bool = True) -> int: ...


@runtime_checkable
class CountsProducts(Protocol):
    """Knows the FLOPs of a forward pass by product, "scores" and "attn_out" being those of two activations."""

    def products(self, batch: int, seq: int) -> dict[str, int]: ...


@runtime_checkable
class NamesActivations(Protocol):
    """Knows what a layer leaves for its backward pass, by the names of `jaxscale.nn.TENSORS`."""

    def activations(self, batch: int, seq: int, layer: int = -1) -> dict[str, tuple[TensorInfo, ...]]: ...


@runtime_checkable
class Plannable(CountsProducts, NamesActivations, Protocol):
    """One that the planner's formulas may cover; others are planned from their compiled step."""

    def not_in_formulas(self) -> str | None:
        """What of it no formula knows, in a few words, or `None`."""
        ...


@runtime_checkable
class ExtendsContext(Protocol):
    """Has other positions for longer texts."""

    def for_texts_of(self, length: int) -> Any:
        """The config for texts that may reach `length` tokens; itself where they change nothing."""
        ...


@runtime_checkable
class DropsTokens(Protocol):
    """May drop tokens in training."""

    def dropless(self) -> Any:
        """The config of the same model dropping none, as generation has it; itself where it drops none."""
        ...


@runtime_checkable
class HasWidths(Protocol):
    """Can be had at other widths."""

    def at_width(self, width: int) -> Any: ...


@runtime_checkable
class Parametrised(Protocol):
    """Has initial values, learning rates and logits that may follow the width (see `jaxscale.optim.mup`)."""

    @property
    def widening(self) -> Widening | None:
        """`None` is the standard parametrisation."""
        ...


@runtime_checkable
class LimitsLength(Protocol):
    """May have no positions behind a certain length."""

    @property
    def max_length(self) -> int | None: ...


@runtime_checkable
class CutsSequences(Protocol):
    """Wants sequences of certain lengths where devices cut them."""

    def length_unit(self) -> int:
        """Of what a length has to be a multiple under the layout in force."""
        ...


@runtime_checkable
class DescribesLayers(Protocol):
    """Says at the start of a run how its layers are applied."""

    def describe(self, layout: Layout | None) -> str: ...


@runtime_checkable
class FindsIdle(Protocol):
    """Knows which of its settings change nothing."""

    def idle(self, seq_len: int, layout: Layout | None) -> Iterator[tuple[str, Any, str]]:
        """Settings that differ from their default and change nothing in a run: name, value, and why."""
        ...


@runtime_checkable
class ScansLayers(Protocol):
    """Applies its layers by a scan, or unrolled."""

    @property
    def scan(self) -> bool | str: ...


def is_causal(model: Any) -> bool:
    """Whether no token of a config's model sees one behind it; so it is where the config does not say."""
    return bool(getattr(model, "causal", True))


def vocab_of(model: Any) -> int:
    """How many token ids a config's model has.

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
    """Wants a sequence's columns in an order of its own; then `hidden` takes `arranged`."""

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
    """A language model that goes on from a cache, of which each block's mixer says what it keeps (`decode_state`).

    `max_length` is the most tokens of a text, `None` where there is no such limit; `refuse_length` raises `ConfigError`
    where texts that grow up to a length cannot be gone on with, and `check_independent` where a text would depend on
    the others of a step.
    """

    @property
    def max_length(self) -> int | None: ...

    def refuse_length(self, length: int) -> None: ...

    def check_independent(self) -> None: ...

    def hidden_and_stats(
        self, tokens: Int[Array, "b s"], *, cache: Sequence[RunCache] | None = None, **inputs: Any
    ) -> tuple[Float[Array, "b s e"], Stats]: ...


def hidden_and_stats(model: Any, tokens: Int[Array, "b s"], **inputs: Any) -> tuple[Float[Array, "b s e"], Stats]:
    """A language model's hidden states, and what its layers report, which is nothing where it has no such method."""
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
        # Inside of a shard_map over some mesh axes, the partitioner aborts on this gather (jax 0.10.2).
        pieces = np.split(order, np.flatnonzero(np.diff(order) != 1) + 1)
        return jnp.concatenate([x[:, piece[0] : piece[-1] + 1] for piece in pieces], axis=1)

    return jax.tree.map(one, tree)
