"""Divergences of a student's token distribution from its teacher's: functions of both log-probabilities of one token.

The divergence of a position is the sum over the vocabulary (see `jaxscale.parallel.vocabulary_sum`).
"""

from __future__ import annotations

import dataclasses
from typing import Protocol

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxscale.config import register
from jaxscale.errors import ConfigError


class Divergence(Protocol):
    """A token's share of a divergence, element by element; hashable."""

    def __call__(self, teacher: Float[Array, "..."], student: Float[Array, "..."]) -> Float[Array, "..."]:
        """Return a token's share.

        Args:
          teacher: its log-probability under the teacher, float32.
          student: under the student, float32.
        """
        ...


@register
@dataclasses.dataclass(frozen=True)
class ForwardKL:
    """The Kullback–Leibler divergence of the student from the teacher, KL(teacher || student): covers all modes.

    It is that of Hinton et al. 2015 (arXiv:1503.02531).
    """

    def __call__(self, teacher: Float[Array, "..."], student: Float[Array, "..."]) -> Float[Array, "..."]:
        """Return p_teacher (log p_teacher - log p_student)."""
        return jnp.exp(teacher) * (teacher - student)


@register
@dataclasses.dataclass(frozen=True)
class ReverseKL:
    """The Kullback–Leibler divergence of the teacher from the student, KL(student || teacher): seeks one mode.

    It is that of MiniLLM (Gu et al. 2023, arXiv:2306.08543).
    """

    def __call__(self, teacher: Float[Array, "..."], student: Float[Array, "..."]) -> Float[Array, "..."]:
        """Return p_student (log p_student - log p_teacher)."""
        return jnp.exp(student) * (student - teacher)


@register
@dataclasses.dataclass(frozen=True)
class JensenShannon:
    """The generalised Jensen–Shannon divergence (Agarwal et al. 2023, GKD, arXiv:2306.13649, equation 1).

    With m = beta * teacher + (1 - beta) * student it is beta * KL(teacher || m) + (1 - beta) * KL(student || m).

    Args:
      beta: the teacher's share of the mixture.

    Raises:
      ConfigError: `beta` is not between 0 and 1.
    """

    beta: float = 0.5

    def __post_init__(self) -> None:
        if not isinstance(self.beta, float) or not 0 < self.beta < 1:
            raise ConfigError(
                f"JensenShannon.beta = {self.beta!r}: must be above 0 and below 1; the limits are ForwardKL() and "
                "ReverseKL()"
            )

    def __call__(self, teacher: Float[Array, "..."], student: Float[Array, "..."]) -> Float[Array, "..."]:
        """Return the shares of both divergences from the mixture."""
        mixture = jnp.logaddexp(teacher + np.log(self.beta), student + np.log1p(-self.beta))
        of_teacher = jnp.exp(teacher) * (teacher - mixture)
        return self.beta * of_teacher + (1 - self.beta) * jnp.exp(student) * (student - mixture)
