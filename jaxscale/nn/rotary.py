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
    """Extends a rotary embedding to longer sequences: new inverse frequencies, and a factor on cosine and sine.

    It is called with inverse frequencies (D,), the base `theta`, and `positions` (B, S), which scalings that depend on
    the length of a sequence use. The frequencies that it returns are (D,) or (B, 1, D).
    """

    def __call__(
        self, inv_freq: np.ndarray, theta: float, positions: Int[Array, "b s"] | None = None
    ) -> tuple[Any, float]:
        """Return new inverse frequencies and the factor on cosine and sine."""
        ...


@runtime_checkable
class ScalesScores(Protocol):
    """A `RotaryScaling` that also scales all attention scores."""

    @property
    def score_factor(self) -> float:
        """The factor on attention scores."""
        ...


@runtime_checkable
class ScalesByLength(Protocol):
    """A `RotaryScaling` that has other factors for long sequences."""

    def for_length(self, length: int) -> RotaryScaling:
        """Return the scaling for sequences that may grow to a length.

        Args:
          length: the most tokens of a sequence.
        """

    def refuse_length(self, length: int) -> None:
        """Check that the factors do not change while a sequence grows.

        Args:
          length: the most tokens of a sequence.

        Raises:
          ConfigError: sequences that grow to `length` would change their factors.
        """


@register
@dataclasses.dataclass(frozen=True)
class LinearScaling:
    """Divides positions by a factor (position interpolation, Chen et al. 2023).

    Args:
      factor: the factor.
    """

    factor: float = 1.0

    def __post_init__(self) -> None:
        _check_positive(self, "factor")

    def __call__(
        self, inv_freq: np.ndarray, theta: float, positions: Int[Array, "b s"] | None = None
    ) -> tuple[np.ndarray, float]:
        """See `RotaryScaling`."""
        return inv_freq / self.factor, 1.0


@register
@dataclasses.dataclass(frozen=True)
class ProportionalScaling:
    """Rotates the fast pairs of dimensions and no others, at the frequencies that all of them would have (Gemma 4).

    `Rotary.fraction` takes the frequencies of a narrower head instead, and pairs its dimensions among themselves.

    Args:
      fraction: the share of pairs that are rotated, from the fastest.
      factor: divides their frequencies.
    """

    fraction: float = 1.0
    factor: float = 1.0

    def __post_init__(self) -> None:
        _check_positive(self, "factor", "fraction")
        if self.fraction > 1:
            raise ConfigError(f"ProportionalScaling.fraction = {self.fraction}: must be above 0 and at most 1")

    def __call__(
        self, inv_freq: np.ndarray, theta: float, positions: Int[Array, "b s"] | None = None
    ) -> tuple[np.ndarray, float]:
        """See `RotaryScaling`."""
        n = len(inv_freq)
        return np.where(np.arange(n) < int(self.fraction * 2 * n // 2), inv_freq / self.factor, 0.0), 1.0


@register
@dataclasses.dataclass(frozen=True)
class NTKScaling:
    """NTK-aware scaling: a larger base, which divides the lowest frequency by `factor` and leaves the highest.

    Args:
      factor: how many times longer sequences become.
    """

    factor: float = 1.0

    def __post_init__(self) -> None:
        _check_positive(self, "factor")

    def __call__(
        self, inv_freq: np.ndarray, theta: float, positions: Int[Array, "b s"] | None = None
    ) -> tuple[np.ndarray, float]:
        """See `RotaryScaling`."""
        n = len(inv_freq)
        base = theta * self.factor ** (n / max(n - 1, 1))
        return base ** (-np.arange(n) / n), 1.0


@register
@dataclasses.dataclass(frozen=True)
class Llama3Scaling:
    """Divides low frequencies, leaves high ones, and interpolates between (Llama 3.1).

    Args:
      factor: divides the low frequencies.
      low_freq_factor: rotations over `original_length` below which a frequency is divided by `factor`.
      high_freq_factor: rotations over `original_length` above which a frequency is unchanged.
      original_length: the sequence length of pre-training.
    """

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

    def __call__(
        self, inv_freq: np.ndarray, theta: float, positions: Int[Array, "b s"] | None = None
    ) -> tuple[np.ndarray, float]:
        """See `RotaryScaling`."""
        turns = self.original_length * inv_freq / (2 * math.pi)
        keep = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        keep = np.clip(keep, 0.0, 1.0)
        return inv_freq * (keep + (1 - keep) / self.factor), 1.0


@register
@dataclasses.dataclass(frozen=True)
class YarnScaling:
    """YaRN: interpolates frequencies by their number of rotations, with a temperature (Peng et al. 2023).

    Args:
      factor: how many times longer sequences become.
      beta_fast: rotations over `original_length` above which a frequency is unchanged.
      beta_slow: rotations over `original_length` below which a frequency is divided by `factor`.
      original_length: the sequence length of pre-training.
      mscale: the factor on cosine and sine is `t(mscale) / t(mscale_all_dim)`, where `t(m) = 0.1 * m * ln(factor) + 1`.
      mscale_all_dim: `t(mscale_all_dim) ** 2` multiplies all scores of `MultiHeadLatent` (DeepSeek-V2).
      whole_dims: round the range of dimensions that are interpolated outwards to whole ones (not in GPT-OSS).
    """

    factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    original_length: int = 4096
    mscale: float = 1.0
    mscale_all_dim: float = 0.0
    whole_dims: bool = True

    def __post_init__(self) -> None:
        _check_positive(self, "factor", "beta_fast", "beta_slow", "original_length")

    def __call__(
        self, inv_freq: np.ndarray, theta: float, positions: Int[Array, "b s"] | None = None
    ) -> tuple[np.ndarray, float]:
        """See `RotaryScaling`."""
        n = len(inv_freq)

        def index(rotations: float) -> float:
            return n * math.log(self.original_length / (rotations * 2 * math.pi)) / math.log(theta)

        low, high = index(self.beta_fast), index(self.beta_slow)
        if self.whole_dims:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, 2 * n - 1)
        stretch = np.clip((np.arange(n) - low) / max(high - low, 0.001), 0.0, 1.0)
        return inv_freq * (1 - stretch) + inv_freq / self.factor * stretch, self.temperature

    @property
    def temperature(self) -> float:
        """The factor on cosine and sine."""
        return self._temperature(self.mscale) / self._temperature(self.mscale_all_dim)

    @property
    def score_factor(self) -> float:
        """The factor on the attention scores of `MultiHeadLatent`."""
        return self._temperature(self.mscale_all_dim) ** 2

    def _temperature(self, mscale: float) -> float:
        return 0.1 * mscale * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0


@register
@dataclasses.dataclass(frozen=True)
class LongRopeScaling:
    """LongRoPE: a factor for each frequency, with other factors for long sequences (Ding et al. 2024).

    Short or long factors are chosen once for a whole sequence, because cached keys cannot be rotated again: by
    `length`, or, without a cache, by the largest position of each row (in a packed row, that of its longest document).

    Args:
      short: a factor per pair of dimensions, for sequences of up to `original_length` tokens.
      long: a factor per pair of dimensions, for longer sequences.
      original_length: the sequence length of pre-training.
      factor: how many times longer sequences become; the factor on cosine and sine is
        `sqrt(1 + ln(factor) / ln(original_length))`.
      attention_factor: another factor on cosine and sine.
      length: the most tokens of a sequence, if known; generation past `original_length` needs it.
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

    def __call__(
        self, inv_freq: np.ndarray, theta: float, positions: Int[Array, "b s"] | None = None
    ) -> tuple[Any, float]:
        """See `RotaryScaling`."""
        for name in ("short", "long"):
            if len(getattr(self, name)) != len(inv_freq):
                raise ConfigError(
                    f"LongRopeScaling.{name} has {len(getattr(self, name))} factors and there are {len(inv_freq)} "
                    f"pairs of dimensions; give {len(inv_freq)} factors"
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

    def for_length(self, length: int) -> LongRopeScaling:
        """See `ScalesByLength`: sets `length` if it is more than `original_length`."""
        if self.length is not None or length <= self.original_length:
            return self
        return dataclasses.replace(self, length=length)

    def refuse_length(self, length: int) -> None:
        """See `ScalesByLength`."""
        if self.length is None and length > self.original_length:
            raise ConfigError(
                f"LongRopeScaling has other factors for sequences of more than {self.original_length} tokens, and a "
                f"cache for {length} tokens has keys that were rotated by the short ones; set LongRopeScaling.length = "
                f"{length} (the long factors for all sequences) or generate at most {self.original_length} tokens"
            )


@register
@dataclasses.dataclass(frozen=True)
class Rotary:
    """Rotary positions: rotates pairs of a head's dimensions by an angle proportional to the position.

    The pairs are (i, i + D/2), as in GPT-NeoX and Llama's converted weights.

    Args:
      theta: base of the frequencies.
      scaling: a `RotaryScaling`, or `None`.
      fraction: the share of a head's dimensions, from the first, that is rotated (GPT-NeoX; Phi-4: 0.75).
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
        """Compute the cosines and sines of all positions, once for all layers.

        Args:
          positions: position of each token.
          head_dim: width of a head.

        Returns:
          cosine and sine, float32; their last dimension is half of the rotated dimensions.

        Raises:
          ConfigError: an odd number of rotated dimensions.
        """
        if head_dim % 2:
            raise ConfigError(f"rotary embedding needs an even head_dim, not {head_dim}; use {head_dim + 1}")
        whole, head_dim = head_dim, int(head_dim * self.fraction)
        if head_dim % 2 or not head_dim:
            near = max(2, head_dim - 1)
            raise ConfigError(
                f"Rotary.fraction = {self.fraction} rotates {head_dim} of a head's {whole} dimensions, and only an "
                f"even number can be rotated; the nearest is {near}, Rotary.fraction = {_fraction(near, whole)}"
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
    """Rotate queries or keys, in float32; dimensions beyond those of the tables are unchanged.

    Args:
      x: queries or keys.
      cos: cosines, from `Rotary.tables`.
      sin: sines, from `Rotary.tables`.
    """
    rotated = 2 * cos.shape[-1]
    if rotated < x.shape[-1]:
        return jnp.concatenate([rotate(x[..., :rotated], cos, sin), x[..., rotated:]], axis=-1)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[..., None, :], sin[..., None, :]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def _fraction(part: int, whole: int) -> float:
    """Return a fraction for which `int(whole * fraction)` is `part`."""
    fraction = part / whole
    return fraction if int(whole * fraction) == part else math.nextafter(fraction, 1.0)


def _check_positive(part: object, *names: str) -> None:
    for name in names:
        value = getattr(part, name)
        if not 0 < value < math.inf:
            raise ConfigError(f"{type(part).__name__}.{name} = {value}: must be above 0 and finite")
