"""Wider models that compute the same function: every feature of the trained model several times (HyperCloning)."""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxscale.errors import ConfigError
from jaxscale.layout import STACKED, TensorInfo
from jaxscale.models import TransformerConfig
from jaxscale.nn import MixtureOfExperts
from jaxscale.nn.norms import UnitOffsetRMSNorm
from jaxscale.optim.mup import STREAM, role_of

MOMENTS = {"mu": 1, "nu": 2, "trace": 1}
"""Parts of optimizer state -> the power of the gradient that they average."""

_GATE = "/shared_gate"
"""End of the path of the one vector that is an input's weights: the gate of shared experts."""
_LAST_NORM = ("norm/scale", "norm/bias")


@dataclasses.dataclass(frozen=True)
class Wider:
    """A wider model whose output is the trained model's (Net2Net, Chen et al. 2016; HyperCloning, Samragh et al. 2024).

    Activations are the trained model's, copied n times. A matrix is therefore copied along its inputs and outputs and
    divided by the number of copies of its inputs. Exact copies would have equal gradients and never become different:
    `noise` is added to a matrix such that it cancels over the copies of an input.

    Args:
      before: the trained model.
      model: the wider one.
      noise: standard deviation of the noise, relative to that of the matrix.
      seed: of the noise.
    """

    before: TransformerConfig
    model: TransformerConfig
    noise: float = 0.1
    seed: int = 0

    def params(
        self, arrays: Mapping[str, jax.Array], before: Mapping[str, TensorInfo], after: Mapping[str, TensorInfo]
    ) -> dict[str, jax.Array]:
        """Return the wider model's parameters.

        Args:
          arrays: by name, of the trained model.
          before: a `TensorInfo` per array.
          after: a `TensorInfo` per array of the wider model.

        Raises:
          ConfigError: a parameter's axes do not show its inputs and outputs.
        """
        out = {}
        for name, info in after.items():
            role = role_of(info, before[name])
            gate = info.path.endswith(_GATE)
            x = _copied(arrays[name], info) / (role.fan_out if gate else role.fan_in)
            if self.noise and role.fan_in > 1:
                x = x + self._noise(x, before[name], info, role.kind == "head")
            if self.model.tied and name in _LAST_NORM:
                x = self._before_tied_head(name, x)
            out[name] = x.astype(arrays[name].dtype)
        return out

    def moments(
        self, arrays: Mapping[str, jax.Array], before: Mapping[str, TensorInfo], after: Mapping[str, TensorInfo]
    ) -> dict[str, jax.Array]:
        """Return the wider model's optimizer state: moments of gradients, which the copies of an output share.

        Args:
          arrays: by name, of the trained model.
          before: a `TensorInfo` per array.
          after: a `TensorInfo` per array of the wider model.

        Raises:
          ConfigError: the state is not moments of gradients.
        """
        out = {}
        for name, info in after.items():
            was = before.get(name)
            if was is not None and info.shape == was.shape:
                out[name] = arrays[name]
                continue
            part = next((p for p in MOMENTS if f"/{p}/{info.path}" in f"/{name}"), None)
            if part is None or was is None:
                raise ConfigError(
                    f"{name} of the optimizer state is no moment of a gradient ({', '.join(MOMENTS)}), so that its "
                    "values in a wider model are unknown; grow the weights only (--weights-only)"
                )
            role = role_of(info, was)
            whole = info.path.endswith(_GATE) or (self.model.tied and info.path in _LAST_NORM)
            shares = 1.0 if whole else role.fan_out
            out[name] = (_copied(arrays[name], info) / shares ** MOMENTS[part]).astype(arrays[name].dtype)
        return out

    def _before_tied_head(self, name: str, x: jax.Array) -> jax.Array:
        """Divide the last norm by the copies, since a tied head is also the embedding and cannot be divided."""
        copies = self.model.sizes.width // self.before.sizes.width
        norm = self.model.norm
        offset = isinstance(norm, type) and issubclass(norm, UnitOffsetRMSNorm) and name.endswith("/scale")
        return (x + offset) / copies - offset

    def _noise(self, x: jax.Array, before: TensorInfo, after: TensorInfo, head: bool) -> jax.Array:
        """Noise on a matrix whose sum over the copies of an input is zero."""
        own = [d for d in range(x.ndim) if after.axes[d] not in STACKED]
        inputs = own[1:] if head else own[:1] if after.axes[own[0]] in STREAM else own[:-1]
        axis = next(d for d in inputs if after.shape[d] != before.shape[d])
        copies = (after.shape[axis] // before.shape[axis], before.shape[axis])
        digest = hashlib.sha256(f"{self.seed} {after.path}".encode()).digest()
        noise = jax.random.normal(jax.random.key(int.from_bytes(digest[:4])), x.shape, jnp.float32)
        split = noise.reshape(*x.shape[:axis], *copies, *x.shape[axis + 1 :])
        noise = (split - jnp.mean(split, axis=axis, keepdims=True)).reshape(x.shape)
        return noise * self.noise * jnp.std(x, axis=tuple(own), keepdims=True)


def _copied(x: jax.Array, info: TensorInfo) -> jax.Array:
    return jnp.tile(x, [new // old for new, old in zip(info.shape, x.shape, strict=True)])


def widened(
    model: object,
    *,
    width: int | None = None,
    hidden: int | None = None,
    heads: int | None = None,
    noise: float = 0.1,
    seed: int = 0,
) -> Wider:
    """Return a wider model that computes the same function.

    Args:
      model: the trained model's config.
      width: width of the residual stream; by default unchanged.
      hidden: hidden width of the feed-forward layers, also of experts; by default it grows as the width.
      heads: number of query heads, and in proportion of key heads; by default it grows as the width. The width of a
        head stays.
      noise: see `Wider`.
      seed: see `Wider`.

    Raises:
      ConfigError: the model is no `Transformer`, or a width is not a whole multiple of the trained model's.
    """
    if not isinstance(model, TransformerConfig):
        raise ConfigError(f"{type(model).__name__} cannot be made wider; only a Transformer can")
    if model.parametrisation is not None:
        raise ConfigError(
            f"{type(model.parametrisation).__name__} changes the logits with the width, so that a wider model cannot "
            "compute the same function; grow a model of the standard parametrisation, or only its layers"
        )
    for layer in model.layer_specs():
        if not layer.mixer.widens:
            raise ConfigError(
                f"{type(layer.mixer).__name__} has its own widths and cannot be made wider; grow the layers"
            )
    if not (math.isfinite(noise) and noise >= 0):
        raise ConfigError(f"noise = {noise}: must be a finite number of at least 0")
    z = model.sizes
    by_width = _times("width", width, z.width)
    by_hidden = by_width if hidden is None else _times("hidden", hidden, z.hidden)
    by_heads = by_width if heads is None else _times("heads", heads, z.heads)

    def of(mlp: Any) -> Any:
        if not isinstance(mlp, MixtureOfExperts) or mlp.hidden is None:
            return mlp
        return dataclasses.replace(mlp, hidden=mlp.hidden * by_hidden)

    blocks = tuple(dataclasses.replace(b, mlp=of(b.mlp)) for b in model.blocks)
    sizes: dict[str, Any] = dict(width=z.width * by_width, hidden=z.hidden * by_hidden, head_dim=z.head_dim)
    sizes |= dict(heads=z.heads * by_heads, kv_heads=z.kv_heads * by_heads)
    wide = dataclasses.replace(model, **sizes, mlp=of(model.mlp), blocks=blocks)
    if wide.sizes == z:
        raise ConfigError(
            f"width = {z.width}, hidden = {z.hidden} and heads = {z.heads} are the model's own; name more"
        )
    return Wider(model, wide, noise, seed)


def _times(name: str, value: int | None, own: int) -> int:
    if value is None:
        return 1
    if not isinstance(value, int) or isinstance(value, bool) or value < own or value % own:
        nearest = max(1, round(value / own)) * own if isinstance(value, (int, float)) and value > 0 else 2 * own
        raise ConfigError(
            f"{name} = {value!r}: must be a whole multiple of the model's {own}; the nearest is {nearest}"
        )
    return value // own
