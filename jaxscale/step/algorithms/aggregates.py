"""Ways to make one gradient of those of several replicas, some of which may be wrong."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jaxscale.config import register
from jaxscale.errors import ConfigError

Tree = Any


class Aggregate:
    """Base of aggregations (`RobustGradients.aggregate`)."""

    def __call__(self, grads: Tree) -> Tree:
        """Return one tree of float32 arrays.

        Args:
          grads: float32 arrays (replicas, ...).
        """
        raise NotImplementedError


@register
@dataclasses.dataclass(frozen=True)
class Mean(Aggregate):
    """The mean, which one wrong replica can move anywhere."""

    def __call__(self, grads: Tree) -> Tree:
        """Return the means over replicas."""
        return jax.tree.map(lambda g: jnp.mean(g, axis=0), grads)


@register
@dataclasses.dataclass(frozen=True)
class Median(Aggregate):
    """The median of each number (Yin et al. 2018, arXiv:1803.01498); what is not finite counts as 0."""

    def __call__(self, grads: Tree) -> Tree:
        """Return the medians over replicas."""
        return jax.tree.map(lambda g: jnp.median(g, axis=0), _finite(grads))


@register
@dataclasses.dataclass(frozen=True)
class Flag(Aggregate):
    """Flag Aggregator (Almasi et al. 2024, arXiv:2302.05865): the gradients' projections on a robust subspace.

    The subspace minimises the sum of the sines between it and the normalised gradients, by iteratively reweighted least
    squares from the unweighted solution: with weights w_i = (1 - |Yᵀ x_i|² + eps)^(-1/4), Y are the leading left
    singular vectors of the w_i x_i. The result is the mean of Y Yᵀ x_i times the median norm of the gradients; the
    authors' code has the sum, and leaves the norm to the optimizer. All is computed from the inner products of the
    replicas' gradients over all parameters. Numbers that are not finite count as 0.

    Args:
      dimensions: dimensions of the subspace, below the number of replicas.
      iterations: reweightings; the authors' code makes 4.
      eps: added to 1 - |Yᵀ x_i|².

    Raises:
      ConfigError: a field is out of its range.
    """

    dimensions: int = 1
    iterations: int = 4
    eps: float = 1e-6

    def __post_init__(self) -> None:
        for name, least in (("dimensions", 1), ("iterations", 0)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ConfigError(f"Flag.{name} = {value!r}: must be a whole number of at least {least}")
        if not self.eps > 0:
            raise ConfigError(f"Flag.eps = {self.eps}: must be above 0, such as 1e-6")

    def __call__(self, grads: Tree) -> Tree:
        """Return a weighted sum of the replicas' gradients."""
        grads = _finite(grads)

        def products(g: jax.Array) -> jax.Array:
            every = tuple(range(1, g.ndim))
            return jax.lax.dot_general(g, g, ((every, every), ((), ())), precision="highest")

        gram = sum(map(products, jax.tree.leaves(grads)), jnp.zeros([]))
        norms = jnp.sqrt(jnp.diag(gram))
        scale = 1 / jnp.where(norms > 0, norms, 1)
        cosines = gram * scale[:, None] * scale

        def basis(weights: jax.Array) -> jax.Array:
            values, vectors = jnp.linalg.eigh(weights[:, None] * cosines * weights)
            top = jnp.sqrt(jnp.maximum(values[-self.dimensions :], 1e-12))
            return weights[:, None] * vectors[:, -self.dimensions :] / top

        weights = jnp.ones_like(norms)
        for _ in range(self.iterations):
            inside = jnp.sum(jnp.square(cosines @ basis(weights)), axis=1)
            weights = (jnp.maximum(1 - inside, 0) + self.eps) ** -0.25
        y = basis(weights)
        shares = y @ jnp.mean(y.T @ cosines, axis=1) * scale * jnp.median(norms)
        return jax.tree.map(lambda g: jnp.tensordot(shares, g, 1, precision="highest"), grads)


def _finite(grads: Tree) -> Tree:
    return jax.tree.map(lambda g: jnp.where(jnp.isfinite(g), g, 0), grads)
