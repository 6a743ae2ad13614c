"""What training asks of a model."""

from __future__ import annotations

from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxscale.layout import constrain
from jaxscale.parallel import Weight


class Model(Protocol):
    """A language model: final hidden states and a head, never logits, so that a loss can avoid holding them.

    It may have an `order(seq_len)`, too (see `Transformer.order`): then `hidden` takes `arranged`.
    One whose layers add to the loss has `hidden_and_stats` as well (see `Transformer`).
    """

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


class ModelConfig(Protocol):
    """Makes a model; a frozen dataclass, so that a run can write it down."""

    @property
    def vocab(self) -> int: ...

    def make(self, rngs: nnx.Rngs) -> Any: ...

    def param_count(self) -> int: ...

    def flops(self, batch: int, seq: int, *, training: bool = True) -> int: ...


def order_of(model: Model, seq_len: int) -> Int[np.ndarray, "s"] | None:
    """The order in which a model wants a sequence's columns, `None` for the natural one."""
    order = getattr(model, "order", None)
    return None if order is None else order(seq_len)


def arrange(tree: Any, order: Int[np.ndarray, "s"]) -> Any:
    """Every array of `tree`, (B, S) or (B, S, E), with its columns in this order; one of rows (B,) has none."""

    def one(x: Array) -> Array:
        if x.ndim < 2:
            return x
        return constrain(jnp.take(x, order, axis=1), "batch", "seq", *(("embed",) if x.ndim == 3 else ()))

    return jax.tree.map(one, tree)
