"""Rotary position embedding (Su et al. 2021) and its length-extending variants."""

from __future__ import annotations

import dataclasses
import math
from typing import Protocol

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxscale.config import register
from jaxscale.errors import ConfigError


class RotaryScaling(Protocol):
    """Stretches a rotary embedding: new inverse frequencies, and a factor on cosine and sine."""

    def __call__(self, inv_freq: np.ndarray, theta: float) -> tuple[np.ndarray, float]: ...


@register
@dataclasses.dataclass(frozen=True)
class LinearScaling:
    """Positions divided by `factor` (Chen et al. 2023)."""

    factor: float = 1.0

    def __call__(self, inv_freq: np.ndarray, theta: float) -> tuple[np.ndarray, float]:
        return inv_freq / self.factor, 1.0


@register
@dataclasses.dataclass(frozen=True)
class NTKScaling:
    """A larger base, so that the lowest frequency is stretched by `factor` and the highest not at all."""

    factor: float = 1.0

    def __call__(self, inv_freq: np.ndarray, theta: float) -> tuple[np.ndarray, float]:
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

    def __call__(self, inv_freq: np.ndarray, theta: float) -> tuple[np.ndarray, float]:
        turns = self.original_length * inv_freq / (2 * math.pi)
        keep = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        keep = np.clip(keep, 0.0, 1.0)
        return inv_freq * (keep + (1 - keep) / self.factor), 1.0


@register
@dataclasses.dataclass(frozen=True)
class YarnScaling:
    """Blend by number of turns, and a temperature on the logits (Peng et al. 2023, YaRN)."""

    factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    original_length: int = 4096

    def __call__(self, inv_freq: np.ndarray, theta: float) -> tuple[np.ndarray, float]:
        n = len(inv_freq)

        def index(turns: float) -> float:
            return n * math.log(self.original_length / (turns * 2 * math.pi)) / math.log(theta)

        low, high = max(math.floor(index(self.beta_fast)), 0), min(math.ceil(index(self.beta_slow)), 2 * n - 1)
        stretch = np.clip((np.arange(n) - low) / max(high - low, 0.001), 0.0, 1.0)
        attention = 0.1 * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0
        return inv_freq * (1 - stretch) + inv_freq / self.factor * stretch, attention


@register
@dataclasses.dataclass(frozen=True)
class Rotary:
    """Rotates pairs of a head's dimensions by an angle that grows with position.

    The pairs are (i, i + D/2), as in GPT-NeoX and Llama's converted weights.

    Args:
      theta: base of the frequencies.
      scaling: a `RotaryScaling`, or `None`.
    """

    theta: float = 10000.0
    scaling: RotaryScaling | None = None

    def tables(
        self, positions: Int[Array, "b s"], head_dim: int
    ) -> tuple[Float[Array, "b s d"], Float[Array, "b s d"]]:
        """Cosine and sine for every position, float32, with D = head_dim / 2; the same for all layers, so made once.

        Raises:
          ConfigError: an odd `head_dim`.
        """
        if head_dim % 2:
            raise ConfigError(f"rotary embedding needs an even head_dim, not {head_dim}; use {head_dim + 1}")
        inv_freq = self.theta ** (-np.arange(head_dim // 2, dtype=np.float64) * 2 / head_dim)
        factor = 1.0
        if self.scaling is not None:
            inv_freq, factor = self.scaling(inv_freq, self.theta)
        angle = positions[..., None].astype(jnp.float32) * jnp.asarray(inv_freq, jnp.float32)
        return jnp.cos(angle) * factor, jnp.sin(angle) * factor


def rotate(
    x: Float[Array, "b s h d"], cos: Float[Array, "#b s half"], sin: Float[Array, "#b s half"]
) -> Float[Array, "b s h d"]:
    """Applies `Rotary.tables` to queries or keys, in float32."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[..., None, :], sin[..., None, :]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
