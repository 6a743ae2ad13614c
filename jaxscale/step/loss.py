"""The language-model loss, from final hidden states and the output head's weight, with or without stored logits."""

from __future__ import annotations

import dataclasses
import functools
from typing import ClassVar, Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxscale.config import register
from jaxscale.errors import ConfigError
from jaxscale.nn import filled_logits
from jaxscale.nn.memory import in_tiles
from jaxscale.parallel import Weight, cut_already, logsumexp_over, sharded_cross_entropy, share_over, sum_over
from jaxscale.parallel.ends import axis_size, local_rows

TILE = 1024
"""Positions of a row whose logits `CutLoss` holds at a time where the head multiplies in few bits."""


class Loss(Protocol):
    """A loss of each token, from hidden states and the output head's weight.

    A loss that works inside a `shard_map` in which the vocabulary is sharded (`jaxscale.parallel.ends`), as pipelines
    need, sets `of_cut_vocabulary = True` and also takes `vocab`, the size of the vocabulary: if devices do not divide
    it, the weight is padded with rows of zeros that are not tokens. Elsewhere the weight's rows are the vocabulary.

    A loss that does not save the B x S x V logits for its backward pass sets `holds_logits = False`, for the planner.
    """

    def __call__(
        self,
        hidden: Float[Array, "b s e"],
        weight: Float[Array, "v e"] | Weight,
        targets: Int[Array, "b s"],
        *,
        softcap: float | None,
    ) -> tuple[Float[Array, "b s"], Float[Array, "b s"]]:
        """Return cross-entropy and squared log-partition of every token; see `token_losses`."""
        ...

    def describe(self, vocab: int) -> str:
        """Return a description of the loss that runs.

        Args:
          vocab: size of the vocabulary.
        """
        ...


@register
@dataclasses.dataclass(frozen=True)
class MaterialisedLoss:
    """Cross-entropy that stores the B x S x V float32 logits and their gradient; needs three matrix products."""

    of_cut_vocabulary: ClassVar[bool] = True
    holds_logits: ClassVar[bool] = True

    def __call__(
        self, hidden: Array, weight: Array | Weight, targets: Array, *, softcap: float | None, vocab: int | None = None
    ) -> tuple[Array, Array]:
        """Return cross-entropy and squared log-partition of every token; see `token_losses`."""
        return token_losses(hidden, weight, targets, softcap=softcap, vocab=vocab)

    def describe(self, vocab: int) -> str:
        """Return a short description."""
        return "cross-entropy of materialised logits"


@register
@dataclasses.dataclass(frozen=True)
class CutLoss:
    """Cross-entropy that never stores the logits (Wijmans et al. 2024); the backward pass recomputes them.

    That is a fourth matrix product. A head in few bits (`ProductRule`) has the logits of `TILE` positions at a time.

    Args:
      filter: as of `jaxscale.parallel.sharded_cross_entropy`; filtered gradients are not exact.
      implementation: as of `jaxscale.parallel.sharded_cross_entropy`.
    """

    of_cut_vocabulary: ClassVar[bool] = True
    holds_logits: ClassVar[bool] = False
    filter: float | None = None
    implementation: str | None = None

    def __call__(
        self, hidden: Array, weight: Array | Weight, targets: Array, *, softcap: float | None, vocab: int | None = None
    ) -> tuple[Array, Array]:
        """Return cross-entropy and squared log-partition of every token; see `token_losses`."""
        if isinstance(weight, Weight):
            return self._in_tiles(hidden, weight, targets, softcap, vocab)
        loss, lse = sharded_cross_entropy(
            hidden, weight, targets, softcap=softcap, return_lse=True, filter=self.filter,
            implementation=self.implementation, vocab=vocab,
        )  # fmt: skip
        return loss, jnp.square(lse)

    def _in_tiles(
        self, hidden: Array, weight: Weight, targets: Array, softcap: float | None, vocab: int | None
    ) -> tuple[Array, Array]:
        """Compute the logits of `TILE` positions at a time, forward and backward, by the weight's own product."""
        if self.filter is not None or self.implementation is not None:
            name = "filter" if self.filter is not None else "implementation"
            raise ConfigError(
                f"CutLoss.{name} is for heads that multiply in the model's dtype; set it to None, or remove the "
                "@ProductRule() of 'head' from Transformer.products"
            )
        losses = functools.partial(token_losses, softcap=softcap, vocab=_vocab_of(weight, vocab))
        return in_tiles(lambda h, t: losses(h, weight, t), hidden, targets, size=TILE)

    def describe(self, vocab: int) -> str:
        """Return a short description, with the filter."""
        filtered = "" if self.filter is None else f", gradients filtered below {self.filter:g}"
        return f"cut cross-entropy, no logits held{filtered}"


@register
@dataclasses.dataclass(frozen=True)
class AutoLoss:
    """`CutLoss` for large vocabularies, and `MaterialisedLoss` for small ones, whose logits are cheap to store.

    Args:
      cut_from: the smallest size of a vocabulary for which `CutLoss` is used.

    Raises:
      ConfigError: a size below 1.
    """

    of_cut_vocabulary: ClassVar[bool] = True
    cut_from: int = 32768

    def __post_init__(self) -> None:
        if not isinstance(self.cut_from, int) or self.cut_from < 1:
            raise ConfigError(f"AutoLoss.cut_from = {self.cut_from!r}: must be a whole number of at least 1")

    def of(self, vocab: int) -> CutLoss | MaterialisedLoss:
        """Return the loss that runs.

        Args:
          vocab: size of the vocabulary.
        """
        return CutLoss() if vocab >= self.cut_from else MaterialisedLoss()

    def __call__(
        self, hidden: Array, weight: Array | Weight, targets: Array, *, softcap: float | None, vocab: int | None = None
    ) -> tuple[Array, Array]:
        """Return cross-entropy and squared log-partition of every token; see `token_losses`."""
        whole = _vocab_of(weight, vocab)
        return self.of(whole)(hidden, weight, targets, softcap=softcap, vocab=whole)

    def describe(self, vocab: int) -> str:
        """Return which loss runs, and why."""
        side = "below" if vocab < self.cut_from else "not below"
        return f"{self.of(vocab).describe(vocab)} (a vocabulary of {vocab:,} is {side} {self.cut_from:,})"


def holds_logits(loss: Loss) -> bool:
    """Return whether a loss saves the B x S x V logits for its backward pass.

    Args:
      loss: a loss of tokens.
    """
    return getattr(loss, "holds_logits", True)


def token_losses(
    hidden: Float[Array, "b s e"],
    weight: Float[Array, "v e"] | Weight,
    targets: Int[Array, "b s"],
    *,
    softcap: float | None,
    vocab: int | None = None,
) -> tuple[Float[Array, "b s"], Float[Array, "b s"]]:
    """Return cross-entropy and squared log-partition of every token, float32, in nats; logits are stored.

    The target's logit is selected by a comparison and not by a gather, so that a sharded vocabulary needs one sum over
    devices and no gather.

    Args:
      hidden: final hidden states, (B, S, E).
      weight: the output head's weight, (V, E), or a `Weight` with a product of its own.
      targets: token ids from 0 to V - 1, (B, S); other ids have the loss NaN.
      softcap: soft cap of the logits, or `None`.
      vocab: V, if `weight` is padded with rows of zeros.

    Returns:
      The cross-entropy, and the squared log-partition for the z-loss (Chowdhery et al. 2022, PaLM), each (B, S).
    """
    over, vocab = cut_already("vocab"), _vocab_of(weight, vocab)
    logits = filled_logits(share_over(hidden, over) if over else hidden, weight, softcap=softcap)
    rows = logits.shape[-1]
    if rows * axis_size(over) > vocab:
        words = jnp.arange(rows) < local_rows(jnp.int32(vocab), rows, over)
        logits = jnp.where(words, logits, -jnp.inf)
    log_z = logsumexp_over(logits, over) if over else jax.nn.logsumexp(logits, axis=-1)
    hit = jnp.arange(rows, dtype=targets.dtype) == local_rows(targets, rows, over)[..., None]
    chosen = jnp.sum(jnp.where(hit, logits, 0.0), axis=-1)
    known = (targets >= 0) & (targets < vocab)
    loss = log_z - (sum_over(chosen, over) if over else chosen)
    return jnp.where(known, loss, jnp.nan), jnp.square(log_z)


def _vocab_of(weight: Array | Weight, vocab: int | None) -> int:
    """Return the size of the vocabulary, by default the number of rows on all devices (a pipeline shards them)."""
    return weight.shape[0] * axis_size(cut_already("vocab")) if vocab is None else vocab
