"""BLEU of many sentences at once, on token ids, under `jit`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxscale.config import register
from jaxscale.errors import ConfigError
from jaxscale.rl.rewards import Sample


def sentence_bleu(
    hypotheses: Int[Array, "b s"],
    lengths: Int[Array, " b"],
    references: Int[Array, "b r t"],
    reference_lengths: Int[Array, "b r"],
    *,
    order: int = 4,
    smoothing: Literal["none", "exp"] = "exp",
) -> Float[Array, " b"]:
    """Return the BLEU of each sentence, from 0 to 1, float32 (Papineni et al. 2002; vectorised as TensorBLEU, 2025).

    Counts are exact, by comparing all pairs of positions, so that no table of n-grams is needed.

    Args:
      hypotheses: token ids.
      lengths: of each hypothesis.
      references: token ids of the references of each; all have `r`.
      reference_lengths: of each reference; 0 for none.
      order: the longest n-grams.
      smoothing: "none"; or "exp", sacreBLEU's default, where the k-th order without a match counts as `1 / 2**k`.

    Raises:
      ConfigError: `order` is below 1, or there is no such smoothing.
    """
    if order < 1 or smoothing not in ("none", "exp"):
        raise ConfigError(f"sentence_bleu(order={order}, smoothing={smoothing!r}): use 1 or more, and 'none' or 'exp'")
    one = _one(order, smoothing)
    return jax.vmap(one)(hypotheses, lengths, references, reference_lengths)


def _one(order: int, smoothing: str):  # type: ignore[no-untyped-def]
    def bleu(hypothesis: Array, length: Array, references: Array, reference_lengths: Array) -> Array:
        inside = jnp.arange(hypothesis.shape[0]) < length
        own = (hypothesis[:, None] == hypothesis[None]) & inside[:, None] & inside[None]
        valid = jnp.arange(references.shape[1]) < reference_lengths[:, None]
        others = (hypothesis[None, :, None] == references[:, None, :]) & inside[None, :, None] & valid[:, None, :]
        same, across = own, others
        before = jnp.tril(jnp.ones(own.shape, bool), -1)
        precisions, penalty = [], jnp.float32(1)
        for n in range(order):
            if n:  # n-grams are equal where their first tokens are, and the (n - 1)-grams after them
                same, across = own & _shifted(same), others & _shifted(across)
            whole = jnp.arange(hypothesis.shape[0]) + n < length
            rank = jnp.sum(same & before, axis=1)  # how many equal n-grams come before
            most = jnp.max(jnp.sum(across, axis=2), axis=0)
            matches = jnp.sum(whole & (rank < most)).astype(jnp.float32)
            total = jnp.maximum(length - n, 0).astype(jnp.float32)
            if smoothing == "exp":
                penalty = jnp.where((matches == 0) & (total > 0), penalty / 2, penalty)
                matches = jnp.where(matches == 0, penalty, matches)
            precisions.append(jnp.where(total > 0, matches / jnp.maximum(total, 1), 0))
        p = jnp.stack(precisions)
        mean = jnp.where(jnp.all(p > 0), jnp.exp(jnp.mean(jnp.log(jnp.maximum(p, 1e-30)))), 0)
        far = jnp.where(reference_lengths > 0, jnp.abs(reference_lengths - length), jnp.iinfo(jnp.int32).max)
        nearest = jnp.min(jnp.where(far == jnp.min(far), reference_lengths, jnp.iinfo(jnp.int32).max))
        brevity = jnp.exp(jnp.minimum(0, 1 - nearest / jnp.maximum(length, 1)))
        return jnp.where(length > 0, mean * brevity, 0).astype(jnp.float32)

    return bleu


def _shifted(equal: Bool[Array, "... i j"]) -> Bool[Array, "... i j"]:
    """Return element (i + 1, j + 1) at (i, j), and False beyond the end."""
    padding = [(0, 0)] * (equal.ndim - 2) + [(0, 1), (0, 1)]
    return jnp.pad(equal, padding)[..., 1:, 1:]


@register
@dataclasses.dataclass(frozen=True)
class BleuReward:
    """The BLEU of what was generated against the prompt's answer, by words; all samples of a step at once.

    Args:
      order: as of `sentence_bleu`.
      smoothing: as of `sentence_bleu`.
    """

    batched: ClassVar[bool] = True
    order: int = 4
    smoothing: str = "exp"

    def __call__(self, samples: Sequence[Sample]) -> np.ndarray:
        """Return the rewards, float32 (n,).

        Args:
          samples: the samples; the answer of each is a text, or a list of texts.
        """
        known: dict[str, int] = {}

        def ids(text: str) -> list[int]:
            return [known.setdefault(word, len(known)) for word in text.split()]

        texts = [ids(s.text) for s in samples]
        answers = [[ids(a) for a in ([s.answer] if isinstance(s.answer, str) else s.answer)] for s in samples]
        references = max(map(len, answers))
        longest = _rounded(max(map(len, texts))), _rounded(max(len(a) for one in answers for a in one))
        hypothesis = np.full((len(samples), longest[0]), -1, np.int32)
        reference = np.full((len(samples), references, longest[1]), -2, np.int32)
        sizes = np.zeros((len(samples), references), np.int32)
        for i, (text, several) in enumerate(zip(texts, answers, strict=True)):
            hypothesis[i, : len(text)] = text
            for j, answer in enumerate(several):
                reference[i, j, : len(answer)], sizes[i, j] = answer, len(answer)
        lengths = np.asarray([len(t) for t in texts], np.int32)
        return np.asarray(_jitted(hypothesis, lengths, reference, sizes, order=self.order, smoothing=self.smoothing))


_jitted = jax.jit(sentence_bleu, static_argnames=("order", "smoothing"))


def _rounded(length: int) -> int:
    """Return a power of two, so that few programs are compiled."""
    return 1 << max(3, (length - 1).bit_length())
