"""What training asks of a model."""

from __future__ import annotations

from typing import Any, Protocol

from flax import nnx
from jaxtyping import Array, Float, Int


class Model(Protocol):
    """A language model: final hidden states and a head, never logits, so that a loss can avoid holding them.

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

    def head_weight(self) -> Float[Array, "v e"]: ...


class ModelConfig(Protocol):
    """Makes a model; a frozen dataclass, so that a run can write it down."""

    @property
    def vocab(self) -> int: ...

    def make(self, rngs: nnx.Rngs) -> Any: ...

    def param_count(self) -> int: ...

    def flops(self, batch: int, seq: int, *, training: bool = True) -> int: ...
