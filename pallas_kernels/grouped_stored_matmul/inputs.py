"""What is known of a grouped product with stored matrices while tracing, and the checks before it."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
from jax.typing import DTypeLike

from pallas_kernels.arguments import as_int32
from pallas_kernels.errors import KernelError
from pallas_kernels.stored_matmul import inputs
from pallas_kernels.stored_matmul.inputs import Packed

__all__ = ["Facts", "checked", "one_of"]


@dataclasses.dataclass(frozen=True)
class Facts:
    """What is known of a grouped product while tracing.

    Args:
      groups: number of groups.
      each: of all rows with one group's matrix.
    """

    groups: int
    each: inputs.Facts


def one_of(weight: Packed) -> Packed:
    """Return the shapes of one group's matrix.

    Args:
      weight: of all groups.
    """
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype), weight)


def checked(
    rows: jax.Array, weight: Packed, sizes: Any, transposed: bool, out: DTypeLike | None
) -> tuple[Facts, jax.Array]:
    """Return the facts of a product and its sizes as int32.

    Raises:
      KernelError: shapes or dtypes do not fit.
    """
    op = "grouped_stored_matmul"
    groups = weight.codes.shape[0] if weight.codes.ndim == 3 else 0
    if not groups or any(not a.ndim or a.shape[0] != groups for a in jax.tree.leaves(weight)):
        raise KernelError(
            f"{op}: every array of the weight has a first dimension of groups, at least 1, as its codes (groups, words,"
            f" n), not {', '.join(str(tuple(a.shape)) for a in jax.tree.leaves(weight))}"
        )
    sizes = as_int32(op, "sizes", sizes)
    if sizes.shape != (groups,):
        raise KernelError(f"{op}: sizes are ({groups},), one for each matrix, not {tuple(sizes.shape)}")
    return Facts(groups, inputs.checked(rows, one_of(weight), transposed, out)), sizes
