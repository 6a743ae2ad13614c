"""The language-model loss, from final hidden states and the head's weight: with its logits held, or without."""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxscale.config import register
from jaxscale.errors import ConfigError
from jaxscale.nn import filled_logits
from jaxscale.parallel import cut_already, logsumexp_over, sharded_cross_entropy, share_over, sum_over
from jaxscale.parallel.ends import axis_size, rows_from_ours


class Loss(Protocol):
    """How training makes each token's loss.

    One that works inside a `shard_map` which cuts the vocabulary (`jaxscale.parallel.ends`), as a pipeline's does, says
    `of_cut_vocabulary = True`. It takes `vocab` as well, the vocabulary's size: where devices do not divide it, the
    weight has rows of zeros behind it there, which are no words. Elsewhere the weight's rows are the vocabulary.

    One that does not keep the B x S x V logits for its backward pass says `holds_logits = False`, for the planner.
    """

    def __call__(
        self,
        hidden: Float[Array, "b s e"],
        weight: Float[Array, "v e"],
        targets: Int[Array, "b s"],
        *,
        softcap: float | None,
    ) -> tuple[Float[Array, "b s"], Float[Array, "b s"]]:
        """Arguments and outputs of `token_losses`."""
        ...

    def describe(self, vocab: int) -> str:
        """Which loss runs for a vocabulary of this size, in words."""
        ...


@register
@dataclasses.dataclass(frozen=True)
class MaterialisedLoss:
    """Holds the B x S x V logits, float32, and their gradient: three matrix products, and the memory."""

    of_cut_vocabulary: ClassVar[bool] = True
    holds_logits: ClassVar[bool] = True

    def __call__(
        self, hidden: Array, weight: Array, targets: Array, *, softcap: float | None, vocab: int | None = None
    ) -> tuple[Array, Array]:
        return token_losses(hidden, weight, targets, softcap=softcap, vocab=vocab)

    def describe(self, vocab: int) -> str:
        return "cross-entropy of materialised logits"


@register
@dataclasses.dataclass(frozen=True)
class CutLoss:
    """Holds no logits (Wijmans et al. 2024): a fourth matrix product makes them again in the backward pass.

    Args:
      filter, implementation: those of `jaxscale.parallel.sharded_cross_entropy`; filtered gradients are not exact.
    """

    of_cut_vocabulary: ClassVar[bool] = True
    holds_logits: ClassVar[bool] = False
    filter: float | None = None
    implementation: str | None = None

    def __call__(
        self, hidden: Array, weight: Array, targets: Array, *, softcap: float | None, vocab: int | None = None
    ) -> tuple[Array, Array]:
        loss, lse = sharded_cross_entropy(
            hidden, weight, targets, softcap=softcap, return_lse=True, filter=self.filter,
            implementation=self.implementation, vocab=vocab,
        )  # fmt: skip
        return loss, jnp.square(lse)

    def describe(self, vocab: int) -> str:
        filtered = "" if self.filter is None else f", gradients filtered below {self.filter:g}"
        return f"cut cross-entropy, no logits held{filtered}"


@register
@dataclasses.dataclass(frozen=True)
class AutoLoss:
    """`CutLoss` for large vocabularies; `MaterialisedLoss` for small ones, whose logits cost less to keep than to make.

    Args:
      cut_from: the smallest vocabulary whose logits are not held.

    Raises:
      ConfigError: a size below 1.
    """

    of_cut_vocabulary: ClassVar[bool] = True
    cut_from: int = 32768

    def __post_init__(self) -> None:
        if not isinstance(self.cut_from, int) or self.cut_from < 1:
            raise ConfigError(f"AutoLoss.cut_from = {self.cut_from!r}: must be a whole number of at least 1")

    def of(self, vocab: int) -> CutLoss | MaterialisedLoss:
        """The one that runs."""
        return CutLoss() if vocab >= self.cut_from else MaterialisedLoss()

    def __call__(
        self, hidden: Array, weight: Array, targets: Array, *, softcap: float | None, vocab: int | None = None
    ) -> tuple[Array, Array]:
        whole = _vocab_of(weight, vocab)
        return self.of(whole)(hidden, weight, targets, softcap=softcap, vocab=whole)

    def describe(self, vocab: int) -> str:
        side = "below" if vocab < self.cut_from else "not below"
        return f"{self.of(vocab).describe(vocab)} (a vocabulary of {vocab:,} is {side} {self.cut_from:,})"


def holds_logits(loss: Loss) -> bool:
    """Whether a loss keeps the B x S x V logits for its backward pass."""
    return getattr(loss, "holds_logits", True)


def token_losses(
    hidden: Float[Array, "b s e"],
    weight: Float[Array, "v e"],
    targets: Int[Array, "b s"],
    *,
    softcap: float | None,
    vocab: int | None = None,
) -> tuple[Float[Array, "b s"], Float[Array, "b s"]]:
    """Cross-entropy and squared log-partition of every token, float32, in nats.

    Holds the logits. Written with a comparison rather than a gather, so that a vocabulary split over devices needs one
    sum and no gather.

    Args:
      hidden: final hidden states.
      weight: the head's.
      targets: ids from 0 to V - 1; the loss of another is NaN.
      softcap: of the logits, or `None`.
      vocab: V, where `weight` has rows of zeros behind its words already.

    Returns:
      the cross-entropy, and the square that the z-loss weighs (Chowdhery et al. 2022, PaLM).
    """
    over, vocab = cut_already("vocab"), _vocab_of(weight, vocab)
    logits = filled_logits(share_over(hidden, over) if over else hidden, weight, softcap=softcap)
    rows = logits.shape[-1]
    if rows * axis_size(over) > vocab:
        words = jnp.arange(rows) < rows_from_ours(jnp.int32(vocab), rows, over)
        logits = jnp.where(words, logits, -jnp.inf)
    log_z = logsumexp_over(logits, over) if over else jax.nn.logsumexp(logits, axis=-1)
    hit = jnp.arange(rows, dtype=targets.dtype) == rows_from_ours(targets, rows, over)[..., None]
    chosen = jnp.sum(jnp.where(hit, logits, 0.0), axis=-1)
    known = (targets >= 0) & (targets < vocab)
    loss = log_z - (sum_over(chosen, over) if over else chosen)
    return jnp.where(known, loss, jnp.nan), jnp.square(log_z)


def _vocab_of(weight: Array, vocab: int | None) -> int:
    """The vocabulary's size; by default that of all devices' rows together (a pipeline's stage holds a part)."""
    return weight.shape[0] * axis_size(cut_already("vocab")) if vocab is None else vocab
