"""Synthetic time series as tokens, with two forecasting tasks: value by value, and the whole masked horizon at once.

Imported by `forecast.gin`. A series is scaled by mean and standard deviation of its context and quantised into bins, as
in Chronos (Ansari et al. 2024); the last quarter of a row is the horizon, on which forecasts are evaluated.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import numpy as np

from jaxscale.config import register
from jaxscale.data import Batch, Source
from jaxscale.nn import dot_product_attention

BINS, MASK = 63, 63
VOCAB = BINS + 1
"""Bins between -4 and 4 standard deviations, and the id of a masked value."""

HORIZON = 4
"""The horizon is the last of this many equal parts of a row."""

Shape = Callable[[np.random.Generator, int, int], np.ndarray]
Task = Callable[[np.ndarray, bool], dict[str, np.ndarray]]


@register
def waves(random: np.random.Generator, series: int, length: int, low: float = 6.0, high: float = 24.0) -> np.ndarray:
    """Return series (series, length): two sines with periods between `low` and `high`, plus white noise."""
    at = np.arange(length)
    out = 0.2 * random.normal(size=(series, length))
    for scale in (1.0, 0.5):
        period = np.exp(random.uniform(np.log(low), np.log(high), (series, 1)))
        out += scale * np.sin(2 * np.pi * (at / period + random.random((series, 1))))
    return out


@register
def slow_waves(random: np.random.Generator, series: int, length: int) -> np.ndarray:
    """Return series as `waves`, with longer periods than there."""
    return waves(random, series, length, 24.0, 72.0)


@register
def saws(random: np.random.Generator, series: int, length: int) -> np.ndarray:
    """Return sawtooth series with a drift, a different shape from `waves`."""
    at = np.arange(length)
    period = random.uniform(6.0, 24.0, (series, 1))
    teeth = 1 - 2 * np.mod(at / period + random.random((series, 1)), 1.0)
    return teeth + 0.02 * random.normal(size=(series, 1)) * at + 0.2 * random.normal(size=(series, length))


@register
def next_value(ids: np.ndarray, train: bool) -> dict[str, np.ndarray]:
    """Return a decoder's task: predict each value from the true values before it; evaluated on the horizon."""
    weights = np.ones((len(ids), ids.shape[1] - 1), np.float32)
    if not train:
        weights[:, : -(ids.shape[1] // HORIZON)] = 0
    return {"tokens": ids[:, :-1], "targets": ids[:, 1:], "weights": weights}


@register
def masked_horizon(ids: np.ndarray, train: bool) -> dict[str, np.ndarray]:
    """Return an encoder's task: predict the whole horizon at once from the values before it."""
    ids = ids[:, 1:]
    hidden = ids.shape[1] // HORIZON
    tokens, weights = ids.copy(), np.zeros(ids.shape, np.float32)
    tokens[:, -hidden:], weights[:, -hidden:] = MASK, 1
    return {"tokens": tokens, "targets": ids, "weights": weights}


@register
def everywhere(q: jax.Array, k: jax.Array, v: jax.Array, *, causal: bool = True, **options: Any) -> jax.Array:
    """Compute an encoder's attention: every position attends to all others."""
    return dot_product_attention(q, k, v, causal=False, **options)


@register
@dataclasses.dataclass(frozen=True)
class Series:
    """A corpus of series of one shape for one task.

    Args:
      shape: makes the values of series.
      task: makes tokens, targets and weights from the quantised values.
      count: number of training series; a quarter as many are held out.
      seed: random seed of the series.
    """

    shape: Shape = waves
    task: Task = next_value
    count: int = 20000
    seed: int = 0
    name: ClassVar[str] = "series"

    def source(
        self, tokenizer: Any = None, *, seq_len: int, split: str, packing: str = "stream", cache: Any = None
    ) -> Source:
        """Return the rows of a split, made in memory; `tokenizer`, `packing` and `cache` are not used."""
        train = split == "train"
        random = np.random.default_rng([self.seed, train])
        values = self.shape(random, self.count if train else self.count // 4, seq_len + 1)
        seen = values[:, : -((seq_len + 1) // HORIZON)]
        scaled = (values - seen.mean(1, keepdims=True)) / (seen.std(1, keepdims=True) + 1e-6)
        ids = np.clip(np.round((scaled + 4) / 8 * (BINS - 1)), 0, BINS - 1).astype(np.int32)
        made = self.task(ids, train)
        described = f"{self.shape.__name__} {self.task.__name__} {self.count} {self.seed} {seq_len} {split}"
        return _Rows(made, seq_len, hashlib.sha256(described.encode()).hexdigest())


class _Rows:
    """A source whose rows are series."""

    name, vocab_size = "series", VOCAB

    def __init__(self, made: dict[str, np.ndarray], seq_len: int, fingerprint: str):
        self._made, self.seq_len, self.fingerprint = made, seq_len, fingerprint

    def __len__(self) -> int:
        return len(self._made["tokens"])

    def rows(self, ids: np.ndarray) -> Batch:
        """Return the rows with these numbers."""
        some = {key: x[ids] for key, x in self._made.items()}
        place = np.broadcast_to(np.arange(self.seq_len, dtype=np.int32), some["tokens"].shape)
        return {**some, "segment_ids": np.ones_like(some["tokens"]), "positions": place.copy()}
