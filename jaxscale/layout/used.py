"""Parameters as layers use them: gathered, and a vocabulary padded until the layout divides it."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxscale.layout.layout import constrain, current


def in_use(param: jax.Array, axes: Sequence[str | None], dtype: DTypeLike) -> jax.Array:
    """Return a parameter as a layer computes with it: cast, then sharded as an activation.

    Activation rules do not shard `embed`, so this is FSDP's all-gather. The cast array is first constrained to its
    stored sharding, so that XLA gathers inside a scan and not the whole stack before it. A vocabulary that the layout
    does not divide is padded with zeros (`fill`).

    Args:
      param: the stored parameter.
      axes: its logical axes.
      dtype: the compute dtype.
    """
    return constrain(fill(constrain(param.astype(dtype), *axes, kind="params"), *axes), *axes)


def fill(x: jax.Array, *axes: str | None) -> jax.Array:
    """Pad a parameter's vocabulary with zeros until the layout in force divides it.

    Args:
      x: the parameter.
      *axes: a logical axis or `None` per dimension.
    """
    more = [(0, n - size) for n, size in zip(filled_shape(axes, x.shape), x.shape, strict=True)]
    return constrain(jnp.pad(x, more), *axes, kind="params") if any(n for _, n in more) else x


def filled_shape(axes: Sequence[str | None], shape: Sequence[int]) -> tuple[int, ...]:
    """Return the shape of `fill(x, *axes)`.

    Args:
      axes: a logical axis or `None` per dimension.
      shape: the shape of `x`.
    """
    layout, manual = current(), jax.sharding.get_abstract_mesh().manual_axes
    if layout is None:
        return tuple(shape)
    return tuple(layout.filled(a, n, manual) for a, n in zip(axes, shape, strict=True))


def unfill(gradient: jax.Array, shape: Sequence[int], *axes: str) -> jax.Array:
    """Return the gradient of a parameter from the gradient of `fill(parameter, *axes)`.

    Args:
      gradient: of the padded parameter.
      shape: the parameter's own shape.
      *axes: a logical axis per dimension.
    """
    if gradient.shape == tuple(shape):
        return gradient
    return constrain(gradient[tuple(slice(n) for n in shape)], *axes, kind="grads")
