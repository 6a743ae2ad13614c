"""The one function that puts data on devices."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from jaxscale.data.batch import KEYS, Batch
from jaxscale.data.loader import Loader
from jaxscale.errors import DataError

if TYPE_CHECKING:
    import jax


def to_devices(
    batches: Loader | Callable[[int], Batch], step: int, sharding: jax.sharding.Sharding | None = None
) -> dict[str, jax.Array]:
    """The global batch of `step` as arrays of shape (B, S), laid out by `sharding`.

    Args:
      batches: a `Loader`, of which each process reads only the rows its own devices hold, each range once;
        or a function from the step to the whole global batch (held-out batches are small enough for that).
      step: which batch.
      sharding: of a (B, S) array, such as `NamedSharding(mesh, PartitionSpec("data", "context"))`; None puts
        the whole batch on the default device.

    Raises DataError when the batch or the sequence does not divide over the sharding.
    """
    import jax
    import jax.numpy as jnp

    if isinstance(batches, Loader):
        loader = batches
        shape = (loader.batch_size, loader.source.seq_len)

        def read(rows: slice) -> Batch:
            return loader.batch_at(step, rows)
    else:
        whole = batches(step)
        shape = whole["tokens"].shape

        def read(rows: slice) -> Batch:
            return {key: array[rows] for key, array in whole.items()}

    if sharding is None:
        batch = read(slice(0, shape[0]))
        return {key: jnp.asarray(batch[key]) for key in KEYS}
    try:
        sharding.shard_shape(shape)
    except ValueError as error:
        raise DataError(
            f"a batch of shape {shape} (batch_size, seq_len) does not divide over {sharding}; make each a multiple "
            "of the devices along its dimension."
        ) from error

    ranges: dict[tuple[int, int], Batch] = {}  # devices that differ only in columns share one read

    def piece(rows: slice) -> Batch:
        start, stop, _ = rows.indices(shape[0])
        if (start, stop) not in ranges:
            ranges[start, stop] = read(slice(start, stop))
        return ranges[start, stop]

    def shard(key: str, at: tuple[slice, slice]) -> np.ndarray:
        return piece(at[0])[key][:, at[1]]

    return {key: jax.make_array_from_callback(shape, sharding, partial(shard, key)) for key in KEYS}
