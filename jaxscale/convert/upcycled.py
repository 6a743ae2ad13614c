"""Upcycling: a trained model whose feed-forward layers become mixtures of experts that start as copies of them."""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from jaxscale.errors import ConfigError
from jaxscale.layout import TensorInfo
from jaxscale.models import TransformerConfig
from jaxscale.nn import FeedForward, MixtureOfExperts
from jaxscale.nn.linear import truncated_std

_MATRIX = re.compile(r"(.*/mlp/)(gate|up|down)(_bias)?")


@dataclasses.dataclass(frozen=True)
class Upcycled:
    """A model of experts from a dense one (sparse upcycling, Komatsuzaki et al. 2023, arXiv:2212.05055).

    Every expert is a copy of the layer's feed-forward, and the router is new, with the initial values of a router. A
    token's weights sum to 1, so that the model computes what the dense one does, whatever the router chooses. With
    `redraw`, each expert draws a share of its hidden features anew, each expert others (drop-upcycling, Nakamura et al.
    2025, arXiv:2502.19261), and the output changes.

    Args:
      before: the trained model.
      model: the model of experts.
      redraw: share of each expert's hidden features that are drawn anew, from a normal distribution with the mean and
        standard deviation of the matrix at these features.
      seed: of the router and of what is drawn anew.
    """

    before: TransformerConfig
    model: TransformerConfig
    redraw: float = 0.0
    seed: int = 0

    def params(
        self, arrays: Mapping[str, jax.Array], before: Mapping[str, TensorInfo], after: Mapping[str, TensorInfo]
    ) -> dict[str, jax.Array]:
        """Return the parameters of the model of experts.

        Args:
          arrays: by name, of the trained model.
          before: a `TensorInfo` per array.
          after: a `TensorInfo` per array of the model of experts.
        """
        return {name: arrays[name] if name in before else self._new(name, arrays, info) for name, info in after.items()}

    def _new(self, name: str, arrays: Mapping[str, jax.Array], info: TensorInfo) -> jax.Array:
        matrix = _MATRIX.fullmatch(name)
        if matrix is None:
            if not name.endswith("/router"):  # biases
                return jnp.zeros(info.shape, info.dtype)
            drawn = jax.random.truncated_normal(self._key(name), -2, 2, info.shape)
            return (drawn * truncated_std(info.shape[-2])).astype(info.dtype)
        prefix, kind, bias = matrix.groups()
        dense = arrays[f"{prefix}{kind}/{'bias' if bias else 'kernel'}"]
        copies = jnp.broadcast_to(jnp.expand_dims(dense, info.axes.index("experts")), info.shape)
        hidden = [d for d, a in enumerate(info.axes) if a == "expert_mlp"]
        if not (self.redraw and hidden):
            return copies.astype(info.dtype)
        return self._redrawn(name, prefix, copies.astype(jnp.float32), info, hidden[0]).astype(info.dtype)

    def _redrawn(self, name: str, prefix: str, copies: jax.Array, info: TensorInfo, hidden: int) -> jax.Array:
        """Draw each expert's chosen features anew; the matrices of an expert have the same ones."""
        count = round(self.redraw * info.shape[hidden])
        stack = info.axes.index("experts") + 1
        order = jax.random.uniform(self._key(prefix), (*info.shape[:stack], info.shape[hidden]))
        new = jnp.argsort(jnp.argsort(order, axis=-1), axis=-1) < count
        new = jnp.expand_dims(new, tuple(d for d in range(stack, len(info.shape)) if d != hidden))
        own = tuple(range(stack, len(info.shape)))
        where = jnp.broadcast_to(new, info.shape)
        mean = jnp.mean(copies, axis=own, keepdims=True, where=where)
        std = jnp.std(copies, axis=own, keepdims=True, where=where)
        return jnp.where(new, mean + std * jax.random.normal(self._key(name), info.shape), copies)

    def _key(self, name: str) -> jax.Array:
        digest = hashlib.sha256(f"{self.seed} {name}".encode()).digest()
        return jax.random.key(int.from_bytes(digest[:4], "little"))


def upcycled(model: object, *, experts: int, top_k: int = 2, redraw: float = 0.0, seed: int = 0) -> Upcycled:
    """Return the model whose feed-forward layers are mixtures of experts, from a dense one.

    Args:
      model: the trained model's config.
      experts: number of experts of each layer.
      top_k: experts per token.
      redraw: see `Upcycled`.
      seed: see `Upcycled`.

    Raises:
      ConfigError: the model is no `Transformer` of feed-forward layers, or a number is out of its range.
    """
    if not isinstance(model, TransformerConfig):
        raise ConfigError(f"{type(model).__name__} cannot be made of experts; only a Transformer can")
    if not (isinstance(model.mlp, type) and issubclass(model.mlp, FeedForward)) or model.blocks:
        raise ConfigError(
            f"experts = {experts}: makes experts of the feed-forward layers that Transformer.mlp names, and this model "
            f"has {'layers of Transformer.blocks' if model.blocks else 'experts already'}; grow a dense model of "
            "Transformer.mlp = @SwiGLU or @GELU"
        )
    if model.parametrisation is not None:
        raise ConfigError(
            f"{type(model.parametrisation).__name__} scales the router's initial values with the width, which "
            "experts from a dense model do not; grow a model of the standard parametrisation"
        )
    if not 0 <= redraw < 1:
        raise ConfigError(f"redraw = {redraw}: must be at least 0 and below 1; Nakamura et al. (2025) take 0.5")
    mixture = MixtureOfExperts(experts=experts, top_k=top_k, expert=model.mlp)
    return Upcycled(model, dataclasses.replace(model, mlp=mixture), redraw, seed)
