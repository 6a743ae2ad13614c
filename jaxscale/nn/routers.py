"""Routers, which choose the experts of each token."""

from __future__ import annotations

import dataclasses
from typing import Protocol

import jax
import jax.numpy as jnp
from einops import rearrange
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxscale.config import register
from jaxscale.errors import ConfigError
from jaxscale.layout import constrain
from jaxscale.parallel import Capacity, Choices, Slots, sharded_op

_SCORES = ("expert_batch", "expert_seq", None)


class Router(Protocol):
    """Chooses experts from scores."""

    @property
    def balanced(self) -> bool:
        """Whether experts are chosen with a bias that training adjusts to equalise their loads (Wang et al. 2024)."""
        ...

    @property
    def needs_capacity(self) -> bool:
        """Whether experts choose tokens, so that each needs a number of slots."""
        ...

    def probabilities(self, scores: Float[Array, "b s x"]) -> Float[Array, "b s x"]:
        """Return the probability of each expert for the load-balance loss; sums to 1 over experts.

        Args:
          scores: of every token with every expert, float32.
        """
        ...

    def __call__(
        self,
        scores: Float[Array, "b s x"],
        bias: Float[Array, " x"] | None,
        *,
        top_k: int,
        capacity: Capacity | None,
        real: Bool[Array, "b s"],
    ) -> Choices | Slots:
        """Route tokens.

        Args:
          scores: of every token with every expert, float32, before any softmax or sigmoid.
          bias: per expert, if `balanced`: added to the values that experts are chosen by, and not to the weights.
          top_k: experts per token.
          capacity: slots per expert, if `needs_capacity`.
          real: which tokens are not padding. Padding goes to no expert: its ids in `Choices` are one past the last
            expert, and `Slots` do not have it.
        """
        ...


@register
@dataclasses.dataclass(frozen=True)
class GroupLimit:
    """Chooses a token's experts from a few groups only, so that it goes to few devices (DeepSeek-V2, Liu et al. 2024).

    Args:
      groups: number of groups of consecutive experts.
      chosen: number of groups that a token's experts can be in: those of the highest scores.
      best: a group's score is the sum of the scores of this many of its best experts (1 in DeepSeek-V2, 2 in V3).
    """

    groups: int = 8
    chosen: int = 4
    best: int = 1

    def __post_init__(self) -> None:
        if not (self.best >= 1 and 1 <= self.chosen <= self.groups):
            raise ConfigError(
                f"GroupLimit(groups={self.groups}, chosen={self.chosen}, best={self.best}): each must be at least 1, "
                "and chosen at most groups"
            )

    def check(self, experts: int, top_k: int) -> None:
        """Check that the limit works with a number of experts.

        Args:
          experts: the number of experts.
          top_k: experts per token.

        Raises:
          ConfigError: the groups do not divide the experts, or the chosen groups have fewer than `top_k`.
        """
        each = experts // self.groups
        if experts % self.groups or self.best > each or self.chosen * each < top_k:
            raise ConfigError(
                f"GroupLimit(groups={self.groups}, chosen={self.chosen}, best={self.best}) does not work with "
                f"{experts} experts and top_k = {top_k}: groups must have the same size, at least {self.best}, and "
                f"{self.chosen} groups must have at least {top_k} experts"
            )

    def __call__(self, values: Float[Array, "b s x"]) -> Float[Array, "b s x"]:
        """Replace the values outside of the chosen groups by -inf."""
        grouped = rearrange(values, "b s (groups x) -> b s groups x", groups=self.groups)
        score = jnp.sum(lax.top_k(grouped, self.best)[0], axis=-1)
        chosen = lax.top_k(score, self.chosen)[1]
        inside = jnp.any(chosen[..., None] == jnp.arange(self.groups), axis=-2)
        return rearrange(jnp.where(inside[..., None], grouped, -jnp.inf), "b s groups x -> b s (groups x)")


@register
@dataclasses.dataclass(frozen=True)
class SoftmaxRouter:
    """Chooses the `top_k` experts of the largest softmax (Shazeer et al. 2017; Fedus et al. 2022 with `top_k = 1`).

    Args:
      normalized: divide the weights by their sum over the chosen experts (Mixtral, Jiang et al. 2024); else they are
        the probabilities (Switch; DeepSeekMoE).
      balanced: choose by probability plus a bias that training adjusts.
      scale: multiplies the weights (16 in DeepSeek-V2).
      limit: choose from a few groups of experts only; `None` chooses from all.
    """

    normalized: bool = True
    balanced: bool = False
    scale: float = 1.0
    limit: GroupLimit | None = None
    needs_capacity = False

    def __post_init__(self) -> None:
        _check_scale(self)

    def probabilities(self, scores: Float[Array, "b s x"]) -> Float[Array, "b s x"]:
        """Their softmax."""
        return jax.nn.softmax(scores, axis=-1)

    def __call__(
        self,
        scores: Float[Array, "b s x"],
        bias: Float[Array, " x"] | None,
        *,
        top_k: int,
        capacity: Capacity | None,
        real: Bool[Array, "b s"],
    ) -> Choices:
        """The choice, of every token."""
        return _choose(self, self.probabilities(scores), bias, real, top_k)


@register
@dataclasses.dataclass(frozen=True)
class SigmoidRouter:
    """Chooses the `top_k` experts of the largest sigmoid plus bias (DeepSeek-V3, Liu et al. 2024).

    Args:
      normalized: weights are sigmoids divided by their sum over the chosen experts; else the sigmoids.
      scale: multiplies the weights (2.5 in DeepSeek-V3).
      balanced: choose by sigmoid plus a bias that training adjusts, without an auxiliary loss.
      limit: choose from a few groups of experts only; `None` chooses from all.
    """

    normalized: bool = True
    scale: float = 1.0
    balanced: bool = True
    limit: GroupLimit | None = None
    needs_capacity = False

    def __post_init__(self) -> None:
        _check_scale(self)

    def probabilities(self, scores: Float[Array, "b s x"]) -> Float[Array, "b s x"]:
        """The sigmoids, divided by their sum over experts."""
        s = jax.nn.sigmoid(scores)
        return s / jnp.sum(s, axis=-1, keepdims=True)

    def __call__(
        self,
        scores: Float[Array, "b s x"],
        bias: Float[Array, " x"] | None,
        *,
        top_k: int,
        capacity: Capacity | None,
        real: Bool[Array, "b s"],
    ) -> Choices:
        """The choice, of every token."""
        return _choose(self, jax.nn.sigmoid(scores), bias, real, top_k)


@register
@dataclasses.dataclass(frozen=True)
class ExpertChoiceRouter:
    """Each expert takes the tokens of a group whose softmax over experts is largest (Zhou et al. 2022).

    All experts have the same load; a token may have many experts, or none. An expert's choice depends on the whole
    group, later tokens included, so it cannot be reproduced when tokens are generated one by one.
    """

    balanced = False
    needs_capacity = True

    def probabilities(self, scores: Float[Array, "b s x"]) -> Float[Array, "b s x"]:
        """Their softmax."""
        return jax.nn.softmax(scores, axis=-1)

    def __call__(
        self,
        scores: Float[Array, "b s x"],
        bias: Float[Array, " x"] | None,
        *,
        top_k: int,
        capacity: Capacity | None,
        real: Bool[Array, "b s"],
    ) -> Slots:
        """The tokens that each expert chooses."""
        assert capacity is not None
        probabilities = jnp.where(real[..., None], self.probabilities(scores), 0.0)
        probabilities = rearrange(probabilities, "b (n group) x -> b n x group", group=capacity.group)
        names = (*_SCORES, None)
        token: Int[Array, "b n x c"] = sharded_op(
            lambda p: lax.top_k(p, capacity.slots)[1],
            lax.stop_gradient(probabilities),
            axes=(names,),
            out_axes=names,
            name="the routers' scores",
        )
        weight = _picked(probabilities, token)
        return Slots(jnp.where(weight > 0, token, capacity.group), weight)


def _check_scale(router: SoftmaxRouter | SigmoidRouter) -> None:
    if not router.scale > 0:
        raise ConfigError(f"{type(router).__name__}.scale = {router.scale}: must be above 0")


def _choose(
    router: SoftmaxRouter | SigmoidRouter, values: Array, bias: Array | None, real: Array, top_k: int
) -> Choices:
    limit = router.limit or (lambda v: v)
    by = lax.stop_gradient(values if bias is None else values + bias)
    # in a shard_map, because the partitioner may gather all tokens to sort them
    ids = sharded_op(
        lambda v: lax.top_k(limit(v), top_k)[1], by, axes=(_SCORES,), out_axes=_SCORES, name="the routers' scores"
    )
    weights = _picked(values, ids)
    if router.normalized:
        weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
    ids = jnp.where(real[..., None], ids, values.shape[-1])
    return Choices(ids, constrain(router.scale * weights, *_SCORES))


def _picked(values: Float[Array, "... n"], at: Int[Array, "... k"]) -> Float[Array, "... k"]:
    """`take_along_axis` of the last axis by comparisons, which needs no gather and no scatter in the backward pass."""
    hit = at[..., None] == jnp.arange(values.shape[-1])
    return jnp.sum(jnp.where(hit, values[..., None, :], 0.0), axis=-1)
