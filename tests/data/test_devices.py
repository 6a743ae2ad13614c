"""Global arrays on a mesh hold the global batch, and each range of rows is read once."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxscale import data
from jaxscale.errors import DataError


@pytest.fixture
def mesh():
    if len(jax.devices()) < 8:
        pytest.skip("needs XLA_FLAGS=--xla_force_host_platform_device_count=8")
    return Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ("data", "context"))


@pytest.mark.parametrize(
    "spec", [None, (), ("data",), ("data", "context"), (None, "context"), (("data", "context"),)], ids=str
)
def test_device_arrays_equal_the_host_batch(source, mesh, spec):
    loader = data.Loader(source, batch_size=8, seed=2)
    sharding = None if spec is None else NamedSharding(mesh, PartitionSpec(*spec))
    arrays, batch = data.to_devices(loader, 11, sharding), loader.batch_at(11)
    assert set(arrays) == set(data.KEYS)
    for key, array in arrays.items():
        assert array.dtype == batch[key].dtype
        np.testing.assert_array_equal(array, batch[key])
        assert sharding is None or array.sharding.is_equivalent_to(sharding, 2)


def test_each_range_of_rows_is_read_once(mesh):
    read = []

    class Counting:
        name, fingerprint, seq_len, vocab_size = "counting", "0", 4, 9

        def __len__(self):
            return 64

        def rows(self, ids):
            read.append(len(ids))
            return {key: np.zeros((len(ids), 4), np.float32 if key == "weights" else np.int32) for key in data.KEYS}

    data.to_devices(data.Loader(Counting(), 8), 0, NamedSharding(mesh, PartitionSpec("data", "context")))
    assert read == [2, 2, 2, 2, 2]  # the first read is for the shapes


def test_a_function_of_the_step_is_placed_like_a_loader(source, mesh):
    batches = list(data.heldout_batches(source, 8, count=2))
    sharding = NamedSharding(mesh, PartitionSpec("data"))
    arrays = data.to_devices(batches.__getitem__, 1, sharding)
    for key in data.KEYS:
        np.testing.assert_array_equal(arrays[key], batches[1][key])


def test_a_batch_that_does_not_divide_is_refused_in_one_sentence(source, mesh):
    with pytest.raises(DataError, match=r"\(6, 32\).*does not divide") as caught:
        data.to_devices(data.Loader(source, 6), 0, NamedSharding(mesh, PartitionSpec("data")))
    assert "\n" not in str(caught.value)
