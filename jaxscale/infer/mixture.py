"""The mixture of several models' predictions, each weighted by how well it predicted the tokens before."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxscale.errors import ConfigError


def mixture_logprobs(
    logprobs: Float[Array, "experts b s"], prior: Sequence[float] | None = None
) -> Float[Array, "b s"]:  # fmt: skip
    """Return log-probabilities of tokens under a mixture of experts that were trained apart.

    An expert's weight at a token is its posterior given the tokens of the row before it (Li et al. 2022, Branch-Train-
    Merge, arXiv:2208.03306), so that a row's total is the logarithm of the mean, under the prior, of its probabilities.

    Args:
      logprobs: natural log-probabilities of each row's tokens under each expert.
      prior: the experts' weights at the first token, which add up to 1; `None` is equal weights.

    Returns:
      Natural log-probabilities, float32.

    Raises:
      ConfigError: the prior has another length, is negative, or does not add up to 1.
    """
    experts = logprobs.shape[0]
    weights = [1 / experts] * experts if prior is None else list(prior)
    if len(weights) != experts:
        raise ConfigError(f"the prior has {len(weights)} weights for {experts} experts; give {experts}")
    if min(weights) < 0 or abs(sum(weights) - 1) > 1e-6:
        raise ConfigError(f"the prior {weights} must be at least 0 and add up to 1")
    logprobs = logprobs.astype(jnp.float32)
    before = jnp.cumsum(logprobs, axis=-1) - logprobs
    posterior = jax.nn.log_softmax(before + jnp.log(jnp.asarray(weights))[:, None, None], axis=0)
    return jax.nn.logsumexp(posterior + logprobs, axis=0)
