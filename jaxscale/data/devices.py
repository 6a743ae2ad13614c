"""Copies batches to devices."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from jaxscale.data.batch import Batch
from jaxscale.data.loader import Loader
from jaxscale.errors import DataError

if TYPE_CHECKING:
    import jax


def to_devices(
    batches: Loader | Callable[[int], Batch],
    step: int,
    shardings: Mapping[str, jax.sharding.Sharding | None] | jax.sharding.Sharding | None = None,
) -> dict[str, jax.Array]:
    """Return the global batch of a step as arrays of shape (B, ...), sharded.

    Args:
      batches: a `Loader`, from which each process reads only the rows that its devices hold, each range once; or a
        function from the step to the whole global batch (held-out batches are small enough for that).
      step: the step, from 0.
      shardings: a sharding by name for each array to return; or one sharding for all arrays, such as
        `NamedSharding(mesh, PartitionSpec("data", "context"))`; or `None` for whole arrays on the default device.

    Raises:
      DataError: a sharding does not divide its array.
    """
    import jax
    import jax.numpy as jnp

    if isinstance(batches, Loader):
        shapes = {name: (batches.batch_size, *shape) for name, (shape, _) in batches.arrays.items()}
        loader = batches

        def read(rows: slice) -> Batch:
            return loader.batch_at(step, rows)

    else:
        whole = batches(step)
        shapes = {name: array.shape for name, array in whole.items()}

        def read(rows: slice) -> Batch:
            return {name: array[rows] for name, array in whole.items()}

    by_name = shardings if isinstance(shardings, Mapping) else dict.fromkeys(shapes, shardings)
    pieces: dict[tuple[int, int], Batch] = {}  # devices that hold the same rows share one read

    def piece(name: str, index: tuple[slice, ...]) -> np.ndarray:
        start, stop, _ = index[0].indices(shapes[name][0])
        if (start, stop) not in pieces:
            pieces[start, stop] = read(slice(start, stop))
        return pieces[start, stop][name][:, *index[1:]]

    def place(name: str, sharding: jax.sharding.Sharding | None) -> jax.Array:
        if sharding is None:
            return jnp.asarray(piece(name, (slice(None),)))
        try:
            sharding.shard_shape(shapes[name])
        except ValueError as error:
            raise DataError(
                f"the batch's {name} of shape {shapes[name]} (batch_size first) does not divide over {sharding}; make "
                "each a multiple of the devices along its dimension."
            ) from error
        return jax.make_array_from_callback(shapes[name], sharding, partial(piece, name))

    return {name: place(name, sharding) for name, sharding in by_name.items()}
