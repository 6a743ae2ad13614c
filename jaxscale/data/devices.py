"""The one function that puts data on devices."""

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
    """The global batch of `step` as arrays of shape (B, ...), laid out by `shardings`.

    Args:
      batches: a `Loader`, of which each process reads only the rows its own devices hold, each range once;
        or a function from the step to the whole global batch (held-out batches are small enough for that).
      step: which batch.
      shardings: by name, of the arrays that are wanted; one sharding is that of each array, such as
        `NamedSharding(mesh, PartitionSpec("data", "context"))`, and None puts them on the default device, whole.

    Raises DataError when an array does not divide over its sharding.
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

    wanted = shardings if isinstance(shardings, Mapping) else dict.fromkeys(shapes, shardings)
    pieces: dict[tuple[int, int], Batch] = {}  # devices that differ only in columns share one read

    def piece(name: str, at: tuple[slice, ...]) -> np.ndarray:
        start, stop, _ = at[0].indices(shapes[name][0])
        if (start, stop) not in pieces:
            pieces[start, stop] = read(slice(start, stop))
        return pieces[start, stop][name][:, *at[1:]]

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

    return {name: place(name, sharding) for name, sharding in wanted.items()}
