"""What is known of gated experts while tracing, and the checks before it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.arguments import as_int32
from pallas_kernels.errors import KernelError
from pallas_kernels.routed_experts.inputs import swiglu

__all__ = ["Arrays", "Facts", "checked", "swiglu", "why_not_inside"]

_OP = "grouped_experts"


class Arrays(NamedTuple):
    """The arrays of a layer, or their gradients.

    Args:
      rows: see `grouped_experts`, as all others.
      scale: likewise.
      gate: likewise.
      up: likewise.
      down: likewise.
      sizes: likewise.
      biases: likewise.
    """

    rows: Any
    scale: Any
    gate: Any
    up: Any
    down: Any
    sizes: Any
    biases: tuple[Any, Any] | None = None


@dataclasses.dataclass(frozen=True)
class Facts:
    """What is known of a kernel while tracing.

    Args:
      product: "hidden", the hidden layer of rows; or "gradients", those of the two products that it is made of.
      groups: number of groups.
      m: rows of all groups, and rows after them.
      k: columns of rows.
      n: columns of the hidden layer.
      dtype: of rows and matrices.
      saved: whether "hidden" returns the products, and "gradients" gets them.
      biased: whether biases are added to the products.
      activation: the hidden layer of the products.
    """

    product: Literal["hidden", "gradients"]
    groups: int
    m: int
    k: int
    n: int
    dtype: str
    saved: bool
    biased: bool
    activation: Callable[..., jax.Array]


def why_not_inside(activation: Callable[..., jax.Array]) -> str | None:
    """Return why an activation cannot be computed inside a kernel, or `None`.

    Args:
      activation: see `grouped_experts`.
    """
    tile = jax.ShapeDtypeStruct((8, 128), jnp.float32)
    if jax.make_jaxpr(activation)(tile, tile).consts:
        return "the activation reads arrays that are not its arguments"
    return None


def checked(
    arrays: Arrays,
    activation: Callable[..., jax.Array],
    saved: bool,
    product: Literal["hidden", "gradients"] = "hidden",
) -> tuple[Facts, jax.Array]:
    """Return the facts of a layer and its sizes as int32.

    Raises:
      KernelError: shapes or dtypes do not fit.
    """
    rows, scale, gate, up, down, sizes, biases = arrays
    if rows.ndim != 2 or up.ndim != 3 or not jnp.issubdtype(rows.dtype, jnp.floating):
        raise KernelError(
            f"{_OP}: rows are floats (m, e) and up (groups, e, f), not {rows.dtype.name}{tuple(rows.shape)} and "
            f"{tuple(up.shape)}"
        )
    (m, k), (groups, _, n), dtype = rows.shape, up.shape, rows.dtype.name
    float32: dict[str, tuple[Any, tuple[int, ...]]] = {"scale": (scale, (m,))}
    if biases is not None:
        float32 |= {f"bias of {name}": (b, (groups, n)) for name, b in zip(("gate", "up"), biases, strict=True)}
    same = {"gate": (gate, (groups, k, n)), "up": (up, (groups, k, n)), "down": (down, (groups, n, k))}
    for required, named in ((dtype, same), ("float32", float32)):
        for name, (array, shape) in named.items():
            if array.shape != shape or array.dtype != required:
                raise KernelError(
                    f"{_OP}: {name} is {required}{shape} for rows {tuple(rows.shape)} and up {tuple(up.shape)}, not "
                    f"{array.dtype.name}{tuple(array.shape)}"
                )
    if not isinstance(sizes, jax.ShapeDtypeStruct):
        sizes = as_int32(_OP, "sizes", sizes)
    if sizes.shape != (groups,):
        raise KernelError(f"{_OP}: sizes are ({groups},), one for each matrix, not {tuple(sizes.shape)}")
    try:
        hash(activation)
    except TypeError:
        raise KernelError(f"{_OP}: activation {activation!r} cannot be hashed; use a plain function") from None
    return Facts(product, groups, m, k, n, dtype, saved, biases is not None, activation), sizes
