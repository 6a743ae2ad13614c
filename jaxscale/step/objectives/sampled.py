"""What the loop of `jaxscale rl` asks of an objective: arrays of samples, advantages, and sampler against trainer."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import ClassVar

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from jaxscale.step.config import TrainConfig
from jaxscale.step.objective import Batch, Input, Totals

GAPS = np.logspace(-8, 1, 145).astype(np.float32)
"""Gaps between log-probabilities are counted in classes, 16 for each power of ten, so that micro-batches add up."""


SAMPLE = "jaxscale rl CONFIG computes it, and goes on with a run as jaxscale rl CONFIG --run RUN --continue"
"""What to do if the data has no samples."""


class Sampled:
    """Base of objectives on samples of the model itself, beside `Objective`; it reports `gap_metrics`."""

    greedy_baseline: ClassVar[bool] = False
    """Whether `advantages` needs the reward of each prompt's likeliest completion."""
    least_group: ClassVar[int] = 1
    """Fewest completions of a prompt that have advantages."""
    learns_rewards: bool = True
    """Whether the objective needs rewards; else they are only reported."""
    advice: ClassVar[Mapping[str, str]] = MappingProxyType({"logprobs": SAMPLE, "advantages": SAMPLE})

    def advantages(
        self, rewards: Float[np.ndarray, "p g"], greedy: Float[np.ndarray, " p"] | None = None
    ) -> Float[np.ndarray, "p g"]:
        """Return the advantage of each of `g` completions of `p` prompts, float32.

        Args:
          rewards: of each completion.
          greedy: the rewards of each prompt's likeliest completion, for objectives with `greedy_baseline`.
        """
        raise NotImplementedError

    def shaped(self, rewards: Float[np.ndarray, "p g"], lengths: np.ndarray, most: int) -> Float[np.ndarray, "p g"]:
        """Return rewards with the objective's own terms; in this class as they are.

        Args:
          rewards: of each completion.
          lengths: generated tokens of each.
          most: the most that a completion may have.
        """
        return rewards

    def inputs(self, config: TrainConfig) -> dict[str, Input]:
        """Return tokens, targets, weights and the sampler's logprobs, (B, S), and advantages, (B,)."""
        types = {"tokens": "int32", "targets": "int32", "weights": "float32", "logprobs": "float32"}
        rows = {name: Input((config.seq_len,), dtype, ("seq",)) for name, dtype in types.items()}
        return {**rows, "advantages": Input((), "float32", ())}

    def weights(self, batch: Batch, parts: int) -> Totals:
        """Return the numbers of generated tokens and of sequences that have some, and `parts`."""
        tokens = jnp.sum(batch["weights"], axis=1)
        counts = {"tokens": jnp.sum(tokens), "sequences": jnp.sum(tokens > 0).astype(jnp.float32)}
        return {**counts, "parts": jnp.asarray(parts, jnp.float32)}


def gap_terms(
    new: Float[Array, "b s"], sampler: Float[Array, "b s"], mask: Float[Array, "b s"]
) -> dict[str, Float[Array, "..."]]:
    """Return sums that `gap_metrics` needs.

    Args:
      new: log-probabilities of the tokens by the model as it is now.
      sampler: by the sampler.
      mask: 1 for generated tokens, else 0.
    """
    gap = jnp.abs(jnp.where(mask > 0, lax.stop_gradient(new) - sampler, 0.0))
    above = ~(gap[..., None] <= jnp.asarray(GAPS)) & (mask[..., None] > 0)  # NaN is above all
    return {"gap": jnp.sum(gap * mask), "above": jnp.sum(above, axis=(0, 1), dtype=jnp.float32)}


def gap_metrics(totals: Totals) -> dict[str, Float[Array, ""]]:
    """Return how far sampler and trainer are apart.

    `logprob_gap` is the mean over generated tokens of how much the log-probabilities of the sampler and of the model
    differ, and no token's differ by more than `logprob_gap_max` (rounded up by at most 16%; infinity above 10, and for
    NaN). For samples of the present parameters both are rounding errors.

    Args:
      totals: of `gap_terms`, and the number of generated `tokens`.
    """
    edges = jnp.append(jnp.asarray(GAPS), jnp.inf)
    mean = totals["gap"] / jnp.maximum(totals["tokens"], 1)
    return {"logprob_gap": mean, "logprob_gap_max": edges[jnp.sum(totals["above"] > 0)]}
