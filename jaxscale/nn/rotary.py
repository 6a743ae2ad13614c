"""Rotary position embedding (Su et al. 2021) and its length-extending variants."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Protocol, runtime_checkable

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxscale.config import register
from jaxscale.errors import ConfigError


class RotaryScaling(Protocol):
    """Stretches a rotary embedding: new inverse frequencies, and a factor on cosine and sine.

    `positions` (B, S) are for those that go by the length of a text; what they return is (D,), or (B, 1, D).
    """

    def __call__(
        self, inv_freq: np.ndarray, theta: float, positions: Int[Array, "b s"] | None = None
    ) -> tuple[Any, float]: ...


@runtime_checkable
class ScalesScores(Protocol):
    """A `RotaryScaling` that scales all attention scores besides."""

    @property
    def score_factor(self) -> float: ...


@runtime_checkable
class ScalesByLength(Protocol):
    """A `RotaryScaling` whose factors are others for long texts."""

    def for_texts_of(self, length: int) -> Any:
        """The same for texts that may reach `length` tokens."""

    def refuse_length(self, length: int) -> None:
        """Raises `ConfigError` where texts that grow up to `length` would change from some factors to others."""


@register
@dataclasses.dataclass(frozen=True)
class LinearScaling:
    """Positions divided by `factor` (Chen et al. 2023)."""

    factor: float = 1.0

    def __post_init__(self) -> None:
        _check_positive(self, "factor")

    def __call__(self, inv_freq: np.ndarray, theta: float, positions: Any = None) -> tuple[np.ndarray, float]:
        return inv_freq / self.factor, 1.0


@register
@dataclasses.dataclass(frozen=True)
class NTKScaling:
    """A larger base, so that the lowest frequency is stretched by `factor` and the highest not at all."""

    factor: float = 1.0

    def __post_init__(self) -> None:
        _check_positive(self, "factor")

    def __call__(self, inv_freq: np.ndarray, theta: float, positions: Any = None) -> tuple[np.ndarray, float]:
        n = len(inv_freq)
        base = theta * self.factor ** (n / max(n - 1, 1))
        return base ** (-np.arange(n) / n), 1.0


@register
@dataclasses.dataclass(frozen=True)
class Llama3Scaling:
    """Low frequencies stretched, high ones kept, a blend between (Llama 3.1)."""

    factor: float = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_length: int = 8192

    def __post_init__(self) -> None:
        _check_positive(self, "factor", "low_freq_factor", "high_freq_factor", "original_length")
        if self.high_freq_factor <= self.low_freq_factor:
            raise ConfigError(
                f"Llama3Scaling.high_freq_factor = {self.high_freq_factor}: must be above low_freq_factor, "
                f"{self.low_freq_factor}"
            )

    def __call__(self, inv_freq: np.ndarray, theta: float, positions: Any = None) -> tuple[np.ndarray, float]:
        turns = self.original_length * inv_freq / (2 * math.pi)
        keep = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        keep = np.clip(keep, 0.0, 1.0)
        return inv_freq * (keep + (1 - keep) / self.factor), 1.0


@register
@dataclasses.dataclass(frozen=True)
class YarnScaling:
    """Blend by number of turns, and a temperature on the logits (Peng et al. 2023, YaRN).

    Args:
      factor: how many times longer texts become.
      beta_fast, beta_slow: turns over the original length from which, and up to which, frequencies are kept and
        divided by `factor`.
      original_length: that the model was trained on.
      mscale, mscale_all_dim: DeepSeek-V2's: the temperature is `(0.1 * mscale * ln(factor) + 1)`, and the same of
        `mscale_all_dim` is taken from cosine and sine, to stand in the scale of all scores (`score_factor`).
    """

    factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    original_length: int = 4096
    mscale: float = 1.0
    mscale_all_dim: float = 0.0

    def __post_init__(self) -> None:
        _check_positive(self, "factor", "beta_fast", "beta_slow", "original_length")

    def __call__(self, inv_freq: np.ndarray, theta: float, positions: Any = None) -> tuple[np.ndarray, float]:
        n = len(inv_freq)

        def index(turns: float) -> float:
            return n * math.log(self.original_length / (turns * 2 * math.pi)) / math.log(theta)

        low, high = max(math.floor(index(self.beta_fast)), 0), min(math.ceil(index(self.beta_slow)), 2 * n - 1)
        stretch = np.clip((np.arange(n) - low) / max(high - low, 0.001), 0.0, 1.0)
        attention = self._temperature(self.mscale) / self._temperature(self.mscale_all_dim)
        return inv_freq * (1 - stretch) + inv_freq / self.factor * stretch, attention

    @property
    def score_factor(self) -> float:
        """What `MultiHeadLatent` multiplies its scores by, besides."""
        return self._temperature(self.mscale_all_dim) ** 2

    def _temperature(self, mscale: float) -> float:
        return 0.1 * mscale * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0


@register
@dataclasses.dataclass(frozen=True)
class LongRopeScaling:
    """Each frequency divided by a factor of its own, short texts by others than long ones (Ding et al. 2024, LongRoPE).

    Which of the two is decided once for a whole text, since keys that are kept cannot be turned anew: by `length`, or,
    of rows that are seen whole, by the largest position of each (in a packed row, of its longest document).

    Args:
      short, long: a factor for each pair of dimensions, of texts up to `original_length` tokens and of longer ones.
      original_length: that the model was trained on.
      factor: how many times longer texts become, for the temperature `sqrt(1 + ln(factor) / ln(original_length))`.
      attention_factor: another temperature.
      length: that texts may reach, when it is known; generation past `original_length` needs it.
    """

    short: tuple[float, ...] = ()
    long: tuple[float, ...] = ()
    original_length: int = 4096
    factor: float = 1.0
    attention_factor: float | None = None
    length: int | None = None

    def __post_init__(self) -> None:
        for name in ("short", "long"):
            object.__setattr__(self, name, tuple(map(float, getattr(self, name))))
            if not all(0 < x < math.inf for x in getattr(self, name)):
                raise ConfigError(f"LongRopeScaling.{name} has a factor that is not above 0, or not finite")
        _check_positive(self, "factor", "original_length", *(["attention_factor"] if self.attention_factor else []))
        if self.factor > 1 and self.original_length < 2:
            raise ConfigError("LongRopeScaling.original_length = 1: must be at least 2 to be stretched")

    def __call__(self, inv_freq: np.ndarray, theta: float, positions: Any = None) -> tuple[Any, float]:
        for name in ("short", "long"):
            if len(getattr(self, name)) != len(inv_freq):
                raise ConfigError(
                    f"LongRopeScaling.{name} has {len(getattr(self, name))} factors and there are {len(inv_freq)} "
                    f"pairs of dimensions to turn; give {len(inv_freq)}"
                )
        short, long = inv_freq / np.asarray(self.short), inv_freq / np.asarray(self.long)
        if self.length is not None or positions is None:
            return (long if (self.length or 0) > self.original_length else short), self.temperature
        is_long = jnp.max(positions, axis=-1)[:, None, None] >= self.original_length
        return jnp.where(is_long, jnp.asarray(long, jnp.float32), jnp.asarray(short, jnp.float32)), self.temperature

    @property
    def temperature(self) -> float:
        """The factor on cosine and sine."""
        if self.attention_factor is not None:
            return self.attention_factor
        return math.sqrt(1 + math.log(self.factor) / math.log(self.original_length)) if self.factor > 1 else 1.0

    def for_texts_of(self, length: int) -> LongRopeScaling:
        """The same, told that texts may reach `length`, where that is more than it began with."""
        if self.length is not None or length <= self.original_length:
            return self
        return dataclasses.replace(self, length=length)

    def refuse_length(self, length: int) -> None:
        """Raises `ConfigError` where texts that grow up to `length` would change from some factors to others."""
        if self.length is None and length > self.original_length:
            raise ConfigError(
                f"LongRopeScaling has other factors for texts of more than {self.original_length} tokens, and a cache "
                f"for {length} keeps keys that were turned by the first ones; set LongRopeScaling.length = {length} "
                f"(the long factors for all texts) or generate at most {self.original_length} tokens"
            )


@register
@dataclasses.dataclass(frozen=True)
class Rotary:
    """Rotates pairs of a head's dimensions by an angle that grows with position.

    The pairs are (i, i + D/2), as in GPT-NeoX and Llama's converted weights.

    Args:
      theta: base of the frequencies.
      scaling: a `RotaryScaling`, or `None`.
      fraction: the part of a head's dimensions, the first ones, that is turned (GPT-NeoX; Phi-4: 0.75).
    """

    theta: float = 10000.0
    scaling: RotaryScaling | None = None
    fraction: float = 1.0

    def __post_init__(self) -> None:
        _check_positive(self, "theta")
        if not 0 < self.fraction <= 1:
            raise ConfigError(f"Rotary.fraction = {self.fraction}: must be above 0 and at most 1")

    def tables(
        self, positions: Int[Array, "b s"], head_dim: int
    ) -> tuple[Float[Array, "b s d"], Float[Array, "b s d"]]:
        """Cosine and sine for every position, float32, with D half of the turned dimensions; made once for all layers.

        Raises:
          ConfigError: an odd number of dimensions.
        """
        if head_dim % 2:
            raise ConfigError(f"rotary embedding needs an even head_dim, not {head_dim}; use {head_dim + 1}")
        whole, head_dim = head_dim, int(head_dim * self.fraction)
        if head_dim % 2 or not head_dim:
            near = max(2, head_dim - 1)
            raise ConfigError(
                f"Rotary.fraction = {self.fraction} turns {head_dim} of a head's {whole} dimensions, and only an even "
                f"number can be turned; the nearest is {near}, Rotary.fraction = {_fraction(near, whole)}"
            )
        inv_freq = self.theta ** (-np.arange(head_dim // 2, dtype=np.float64) * 2 / head_dim)
        factor = 1.0
        if self.scaling is not None:
            inv_freq, factor = self.scaling(inv_freq, self.theta, positions)
        angle = positions[..., None].astype(jnp.float32) * jnp.asarray(inv_freq, jnp.float32)
        return jnp.cos(angle) * factor, jnp.sin(angle) * factor


def rotate(
    x: Float[Array, "b s h d"], cos: Float[Array, "#b s half"], sin: Float[Array, "#b s half"]
) -> Float[Array, "b s h d"]:
    """Applies `Rotary.tables` to queries or keys, in float32; dimensions beyond the tables' stay as they are."""
    turned = 2 * cos.shape[-1]
    if turned < x.shape[-1]:
        return jnp.concatenate([rotate(x[..., :turned], cos, sin), x[..., turned:]], axis=-1)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[..., None, :], sin[..., None, :]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def _fraction(part: int, whole: int) -> float:
    """The fraction of a number that gives another, rounded down."""
    found = part / whole
    return found if int(whole * found) == part else math.nextafter(found, 1.0)


def _check_positive(part: Any, *names: str) -> None:
    for name in names:
        value = getattr(part, name)
        if not 0 < value < math.inf:
            raise ConfigError(f"{type(part).__name__}.{name} = {value}: must be above 0 and finite")
