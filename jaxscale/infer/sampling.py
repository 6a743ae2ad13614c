"""Sampling: the settings of one sequence, and choosing the next token of many sequences at once."""

from __future__ import annotations

import dataclasses
import numbers
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt8

from jaxscale.config import register
from jaxscale.errors import ConfigError


@register
@dataclasses.dataclass(frozen=True)
class Sampling:
    """How a sequence is continued. Steps apply in this order: penalty, temperature, top-k, top-p, min-p.

    Args:
      max_tokens: the most new tokens.
      temperature: divides the logits; 0 takes the likeliest token.
      top_k: sample from this many likeliest tokens; `None` is all.
      top_p: sample from the fewest likeliest tokens that together reach this probability (nucleus, Holtzman et al.
        2020).
      min_p: sample from tokens with at least this share of the likeliest one's probability (Nguyen et al. 2024).
      repetition_penalty: divides positive and multiplies negative logits of tokens that are already in the sequence
        (CTRL, Keskar et al. 2019).
      stop: strings that end the text; the text ends before the string.
      seed: the same seed, prompt and model give the same tokens, whatever else is in the batch.
      logprobs: how many of the likeliest tokens to return with their log-probabilities, besides the chosen one's.
      ignore_end: continue after an end-of-text token.

    Raises:
      ConfigError: a setting out of its range.
    """

    max_tokens: int = 128
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    stop: tuple[str, ...] = ()
    seed: int = 0
    logprobs: int = 0
    ignore_end: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else tuple(self.stop))
        for name in ("temperature", "top_p", "min_p", "repetition_penalty"):
            if isinstance(getattr(self, name), bool) or not isinstance(getattr(self, name), numbers.Real):
                raise ConfigError(f"Sampling.{name} = {getattr(self, name)!r}: must be a number")
        checks = {
            "max_tokens": (_whole(self.max_tokens) and self.max_tokens >= 1, "a whole number of at least 1"),
            "temperature": (0 <= self.temperature < np.inf, "0 or more; 0 takes the likeliest token"),
            "top_k": (self.top_k is None or (_whole(self.top_k) and self.top_k >= 1), "at least 1, or None for all"),
            "top_p": (0 < self.top_p <= 1, "above 0 and at most 1"),
            "min_p": (0 <= self.min_p <= 1, "from 0 to 1"),
            "repetition_penalty": (0 < self.repetition_penalty < np.inf, "above 0; 1 is none"),
            "seed": (_whole(self.seed) and 0 <= self.seed < 2**32, "a whole number from 0 to 2**32 - 1"),
            "logprobs": (_whole(self.logprobs) and 0 <= self.logprobs <= 20, "a whole number from 0 to 20"),
        }
        for name, (valid, expected) in checks.items():
            if not valid:
                raise ConfigError(f"Sampling.{name} = {getattr(self, name)!r}: must be {expected}")
        if any(not isinstance(s, str) or not s for s in self.stop):
            raise ConfigError(f"Sampling.stop = {self.stop!r}: must be strings that are not empty")


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


class SamplingArrays(NamedTuple):
    """The `Sampling` of n sequences, as arrays.

    Args:
      temperature: float32 (n,).
      top_k: int32 (n,); the vocabulary's size for all tokens.
      top_p: float32 (n,).
      min_p: float32 (n,).
      penalty: repetition penalty, float32 (n,).
      seed: uint32 (n,).
    """

    temperature: Float[Array, " n"]
    top_k: Int[Array, " n"]
    top_p: Float[Array, " n"]
    min_p: Float[Array, " n"]
    penalty: Float[Array, " n"]
    seed: Int[Array, " n"]

    @classmethod
    def of(cls, settings: Sequence[Sampling], vocab: int) -> SamplingArrays:
        """Return NumPy arrays, so that those of a step are transferred together.

        Args:
          settings: of each sequence.
          vocab: the vocabulary's size.
        """

        def floats(name: str) -> np.ndarray:
            return np.asarray([getattr(s, name) for s in settings], np.float32)

        top_k = np.asarray([min(s.top_k or vocab, vocab) for s in settings], np.int32)
        seed = np.asarray([s.seed for s in settings], np.uint32)
        penalty = floats("repetition_penalty")
        return cls(floats("temperature"), top_k, floats("top_p"), floats("min_p"), penalty, seed)  # type: ignore[arg-type]


def seen_bits(tokens: Sequence[int], sampling: Sampling, vocab: int) -> UInt8[np.ndarray, "w"]:
    """Return which token ids a sequence contains, a bit for each, big-endian; all 0 without a repetition penalty.

    Args:
      tokens: the sequence's ids.
      sampling: its settings.
      vocab: the vocabulary's size.
    """
    own = np.zeros(vocab, bool)
    if sampling.repetition_penalty != 1:
        own[[t for t in tokens if t < vocab]] = True  # others are vectors of a soft prompt
    return np.packbits(own)


def seen_of(bits: UInt8[Array, "n w"], vocab: int) -> Bool[Array, "n v"]:
    """Unpack `seen_bits` of n sequences.

    Args:
      bits: uint8 (n, bytes).
      vocab: the vocabulary's size.
    """
    return jnp.unpackbits(bits, axis=-1, count=vocab).astype(bool)


class Chosen(NamedTuple):
    """The next token of n sequences.

    Args:
      token: its id, int32 (n,).
      logprob: its log-probability by the model itself, before penalty, temperature and cuts; float32 (n,).
    """

    token: Int[Array, " n"]
    logprob: Float[Array, " n"]


def choose(
    logits: Float[Array, "n v"],
    sampling: SamplingArrays,
    positions: Int[Array, " n"],
    seen: Bool[Array, "n v"] | None = None,
) -> Chosen:
    """Choose the next token of every sequence.

    Args:
      logits: the model's, float32 (n, vocab).
      sampling: settings of each sequence.
      positions: position of the new token in its sequence, int32 (n,); the random number depends on it and the seed
        alone.
      seen: which tokens each sequence contains, bool (n, vocab); `None` when nothing is penalised.
    """
    shaped = processed(logits, sampling, seen)
    likeliest = jnp.argmax(shaped, axis=-1).astype(jnp.int32)

    def draw() -> Int[Array, " n"]:
        keys = jax.vmap(lambda seed, at: jax.random.fold_in(jax.random.key(seed), at))(sampling.seed, positions)
        return jax.vmap(jax.random.categorical)(keys, shaped).astype(jnp.int32)

    # Drawing takes a random number for every token of the vocabulary: skip it where all sequences are greedy.
    draws = jax.lax.cond(jnp.all(sampling.temperature == 0), lambda: likeliest, draw)
    token = jnp.where(sampling.temperature == 0, likeliest, draws)
    logprob = jax.nn.log_softmax(logits, axis=-1)
    return Chosen(token, jnp.take_along_axis(logprob, token[:, None], axis=-1)[:, 0])


def processed(
    logits: Float[Array, "n v"], sampling: SamplingArrays, seen: Bool[Array, "n v"] | None = None
) -> Float[Array, "n v"]:
    """Return logits of the distribution to sample from; -inf for tokens that are cut.

    At temperature 0 only the penalty applies, and the largest is the choice.

    Args:
      logits: the model's, float32 (n, vocab).
      sampling: settings of each sequence.
      seen: which tokens each sequence contains, bool (n, vocab); `None` when nothing is penalised.
    """
    if seen is not None:
        factor = sampling.penalty[:, None]
        logits = jnp.where(seen, jnp.where(logits > 0, logits / factor, logits * factor), logits)
    greedy = sampling.temperature == 0
    logits = logits / jnp.where(greedy, 1, sampling.temperature)[:, None]
    uncut = greedy | ((sampling.top_k >= logits.shape[-1]) & (sampling.top_p >= 1))

    def cut() -> Float[Array, "n v"]:
        return jnp.where(uncut[:, None], logits, _largest(logits, sampling))

    # Sorting the vocabulary takes most of the time here: skip it where no sequence needs it.
    logits = jax.lax.cond(jnp.all(uncut), lambda: logits, cut)
    top = jnp.max(logits, axis=-1, keepdims=True)
    floor = jnp.where(greedy, -jnp.inf, jnp.log(sampling.min_p))[:, None]
    return jnp.where(logits - top < floor, -jnp.inf, logits)


def _largest(logits: Float[Array, "n v"], sampling: SamplingArrays) -> Float[Array, "n v"]:
    """Logits of the `top_k` largest, and of those the fewest that reach `top_p`; ties with the last one stay."""
    order = jnp.sort(logits, axis=-1, descending=True)
    kth = jnp.take_along_axis(order, sampling.top_k[:, None] - 1, axis=-1)
    largest = jnp.where(order < kth, -jnp.inf, order)
    probability = jax.nn.softmax(largest, axis=-1)
    before = jnp.cumsum(probability, axis=-1) - probability
    top_p = sampling.top_p[:, None]
    reaching = (before < top_p) | (top_p >= 1)  # all for top_p = 1: a float32 sum may reach 1 too early
    last = jnp.sum(reaching, axis=-1, keepdims=True) - 1  # the token that reaches top_p is included
    nucleus = jnp.take_along_axis(largest, jnp.maximum(last, 0), axis=-1)
    return jnp.where(logits < jnp.maximum(kth, nucleus), -jnp.inf, logits)
