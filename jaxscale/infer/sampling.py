"""How the next token is chosen: settings of one text, and the choice for many texts at once."""

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
    """How a text is continued. Steps apply in this order: penalty, temperature, top-k, top-p, min-p.

    Args:
      max_tokens: at most so many new ones.
      temperature: divides the logits; 0 takes the likeliest token.
      top_k: among this many likeliest tokens only; `None` is all.
      top_p: among the likeliest that together reach this probability (nucleus, Holtzman et al. 2020).
      min_p: among those at least this share of the likeliest one's probability (Nguyen et al. 2024).
      repetition_penalty: divides positive and multiplies negative logits of tokens that are in the text already (CTRL,
        Keskar et al. 2019).
      stop: texts that end the continuation, and are not part of it.
      seed: of the choices; the same seed, text and model give the same continuation in whatever company.
      logprobs: how many of the likeliest tokens to give with their log-probabilities, besides the chosen one's.
      ignore_end: go on after the end of the text.

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
        for name, (right, wanted) in checks.items():
            if not right:
                raise ConfigError(f"Sampling.{name} = {getattr(self, name)!r}: must be {wanted}")
        if any(not isinstance(s, str) or not s for s in self.stop):
            raise ConfigError(f"Sampling.stop = {self.stop!r}: must be texts that are not empty")


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


class Choices(NamedTuple):
    """`Sampling` of n texts, as arrays.

    Args:
      temperature, top_p, min_p, penalty: float32.
      top_k: int32, the vocabulary's size for all.
      seed: uint32.
    """

    temperature: Float[Array, " n"]
    top_k: Int[Array, " n"]
    top_p: Float[Array, " n"]
    min_p: Float[Array, " n"]
    penalty: Float[Array, " n"]
    seed: Int[Array, " n"]

    @classmethod
    def of(cls, settings: Sequence[Sampling], vocab: int) -> Choices:
        """As NumPy arrays, so that a step's are one transfer."""
        f = lambda name: np.asarray([getattr(s, name) for s in settings], np.float32)  # noqa: E731
        top_k = np.asarray([min(s.top_k or vocab, vocab) for s in settings], np.int32)
        seed = np.asarray([s.seed for s in settings], np.uint32)
        return cls(f("temperature"), top_k, f("top_p"), f("min_p"), f("repetition_penalty"), seed)  # type: ignore[arg-type]


def seen_bits(tokens: Sequence[int], how: Sampling, vocab: int) -> UInt8[np.ndarray, "w"]:
    """A bit for each id, big end first: whether a text has it already; 0 for all where nothing is penalised."""
    own = np.zeros(vocab, bool)
    if how.repetition_penalty != 1:
        own[list(tokens)] = True
    return np.packbits(own)


def seen_of(bits: UInt8[Array, "n w"], vocab: int) -> Bool[Array, "n v"]:
    """`seen_bits` of n texts, as `processed` takes them."""
    return jnp.unpackbits(bits, axis=-1, count=vocab).astype(bool)


class Chosen(NamedTuple):
    """The next token of n texts.

    Args:
      token: its id, int32.
      logprob: its log-probability by the model itself, before penalty, temperature and cuts; float32.
    """

    token: Int[Array, " n"]
    logprob: Float[Array, " n"]


def choose(
    logits: Float[Array, "n v"], how: Choices, at: Int[Array, " n"], seen: Bool[Array, "n v"] | None = None
) -> Chosen:
    """The next token of every text.

    Args:
      logits: the model's, float32.
      how: settings.
      at: place of the token to be chosen in its text; the randomness is a function of it and the seed alone.
      seen: which tokens are in the text already; `None` when nothing is penalised.
    """
    shaped = processed(logits, how, seen)
    likeliest = jnp.argmax(shaped, axis=-1).astype(jnp.int32)

    def drawn() -> Int[Array, " n"]:
        keys = jax.vmap(lambda seed, at: jax.random.fold_in(jax.random.key(seed), at))(how.seed, at)
        return jax.vmap(jax.random.categorical)(keys, shaped).astype(jnp.int32)

    # A random number for every token of the vocabulary is not to be had for nothing.
    draws = jax.lax.cond(jnp.all(how.temperature == 0), lambda: likeliest, drawn)
    token = jnp.where(how.temperature == 0, likeliest, draws)
    logprob = jax.nn.log_softmax(logits, axis=-1)
    return Chosen(token, jnp.take_along_axis(logprob, token[:, None], axis=-1)[:, 0])


def processed(logits: Float[Array, "n v"], how: Choices, seen: Bool[Array, "n v"] | None = None) -> Float[Array, "n v"]:
    """Logits of the distribution that is drawn from: -inf where it has no mass. Arguments as `choose`'s.

    At temperature 0 they are penalised only, their largest being the choice.
    """
    if seen is not None:
        factor = how.penalty[:, None]
        logits = jnp.where(seen, jnp.where(logits > 0, logits / factor, logits * factor), logits)
    greedy = how.temperature == 0
    logits = logits / jnp.where(greedy, 1, how.temperature)[:, None]
    plain = greedy | ((how.top_k >= logits.shape[-1]) & (how.top_p >= 1))
    # Sorting a vocabulary is most of the work here, and often nobody asks for it.
    cut = jax.lax.cond(jnp.all(plain), lambda: logits, lambda: jnp.where(plain[:, None], logits, _largest(logits, how)))
    top = jnp.max(cut, axis=-1, keepdims=True)
    floor = jnp.where(greedy, -jnp.inf, jnp.log(how.min_p))[:, None]
    return jnp.where(cut - top < floor, -jnp.inf, cut)


def _largest(logits: Float[Array, "n v"], how: Choices) -> Float[Array, "n v"]:
    """The `top_k` largest, and of those the fewest that reach `top_p`; ties with the last are kept."""
    order = jnp.sort(logits, axis=-1, descending=True)
    kth = jnp.take_along_axis(order, how.top_k[:, None] - 1, axis=-1)
    kept = jnp.where(order < kth, -jnp.inf, order)
    probability = jax.nn.softmax(kept, axis=-1)
    before = jnp.cumsum(probability, axis=-1) - probability
    top_p = how.top_p[:, None]
    reaching = (before < top_p) | (top_p >= 1)  # all, where sums of float32 come to 1 too early
    last = jnp.sum(reaching, axis=-1, keepdims=True) - 1  # the one that reaches it counts
    nucleus = jnp.take_along_axis(kept, jnp.maximum(last, 0), axis=-1)
    return jnp.where(logits < jnp.maximum(kth, nucleus), -jnp.inf, logits)
