"""Rows of associative recall and of pixels, and the next-token loss with two scores beside it."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxscale.config import register
from jaxscale.step import NextToken

Row = dict[str, np.ndarray]


@register
@dataclasses.dataclass(frozen=True)
class Recall:
    """Multi-query associative recall (after Arora et al. 2023, arXiv 2312.04927): which value came with this key?

    A row begins with `pairs` tokens that are each a key with its value. Then the same keys come alone, in another
    order, and the value of each is what to predict there; only these predictions count. In the paper a value is a token
    of its own after its key.

    Token ids: first the values, then the keys alone, then each key with each value.

    Args:
      pairs: pairs of a row, at most `keys`; the row has twice as many tokens.
      keys: number of keys.
      values: number of values.
      rows: number of rows, training and held-out ones together.
      seed: of the rows.
    """

    pairs: int = 16
    keys: int = 24
    values: int = 4
    rows: int = 20000
    seed: int = 0

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, number: int) -> Row:
        rng = np.random.default_rng((self.seed, number))
        keys = rng.permutation(self.keys)[: self.pairs]
        values = rng.integers(self.values, size=self.pairs)
        order = rng.permutation(self.pairs)
        together = self.values + self.keys + keys * self.values + values
        tokens = np.concatenate([together, self.values + keys[order]]).astype(np.int32)
        targets = np.concatenate([np.zeros(self.pairs), values[order]]).astype(np.int32)
        return {"tokens": tokens, "targets": targets, "weights": np.repeat([0.0, 1.0], self.pairs).astype(np.float32)}


@register
@dataclasses.dataclass(frozen=True)
class Pixels:
    """Images of one shape as rows of pixels: which shape is it?

    An image has a rectangle, the outline of one, a disc or a cross of a random size at a random place; its pixels have
    one of two light greys, the others one of two dark ones, and one in `1 / noise` has a wrong one. Its rows of pixels
    follow each other, and the last pixel's prediction is the shape, the only one that counts.

    Token ids: the four greys, then the four shapes.

    Args:
      side: pixels of a side; a row has `side**2` tokens.
      noise: share of wrong pixels.
      rows: number of rows, training and held-out ones together.
      seed: of the rows.
    """

    side: int = 8
    noise: float = 0.05
    rows: int = 40000
    seed: int = 0

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, number: int) -> Row:
        rng = np.random.default_rng((self.seed, number))
        shape, size = int(rng.integers(4)), int(rng.integers(4, self.side))
        y, x = (np.arange(self.side) - rng.integers(self.side - size + 1) for _ in range(2))
        y, x = np.meshgrid(y, x, indexing="ij")
        middle = (size - 1) / 2
        inside = (y >= 0) & (y < size) & (x >= 0) & (x < size)
        edge = (y == 0) | (y == size - 1) | (x == 0) | (x == size - 1)
        disc = (y - middle) ** 2 + (x - middle) ** 2 <= (size / 2) ** 2
        cross = (abs(y - middle) < 1) | (abs(x - middle) < 1)
        image = inside & (np.ones_like(inside), edge, disc, cross)[shape]
        image ^= rng.random(image.shape) < self.noise
        tokens = (2 * image + rng.integers(2, size=image.shape)).reshape(-1).astype(np.int32)
        last = np.arange(tokens.size) == tokens.size - 1
        return {
            "tokens": tokens,
            "targets": np.where(last, 4 + shape, 0).astype(np.int32),
            "weights": last.astype(np.float32),
        }


@register
@dataclasses.dataclass(frozen=True)
class Scored(NextToken):
    """The loss of `NextToken`; also `accuracy`, and `ndcg`, the mean of 1 / log2(1 + rank) of ranks up to 10."""

    evaluated: ClassVar[tuple[str, ...]] = ("loss", "accuracy", "ndcg")

    def of_hidden(self, model: Any, hidden: jax.Array, stats: Any, batch: Any, **vocab: int) -> dict[str, Any]:
        """Return the terms of `NextToken`, and the sums of both scores."""
        logits = hidden @ model.head_weight().T
        target = jnp.take_along_axis(logits, batch["targets"][..., None], axis=-1)
        rank = 1 + jnp.sum(logits > target, axis=-1)
        gain = jnp.where(rank <= 10, 1 / jnp.log2(1.0 + rank), 0)
        scores = {"right": jnp.sum((rank == 1) * batch["weights"]), "gain": jnp.sum(gain * batch["weights"])}
        return super().of_hidden(model, hidden, stats, batch, **vocab) | scores

    def metrics(self, totals: Any) -> dict[str, jax.Array]:
        """Return the loss and both scores."""
        return super().metrics(totals) | {
            "accuracy": totals["right"] / totals["tokens"],
            "ndcg": totals["gain"] / totals["tokens"],
        }
