"""Arrays move to another mesh: same values, and no fewer bytes would do, counted with sets of elements."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

from jaxscale.errors import LayoutError
from jaxscale.layout import Layout, moved, nearest
from tests.truth.errors import raises_saying

AXES = {(8, 4, 6): ("experts", "expert_embed", "expert_mlp"), (4, 8): ("embed", "mlp"), (3,): (None,), (): ()}


def where(layout):
    return [layout.sharding(axes, shape, kind="params") for shape, axes in AXES.items()]


def elements(sharding, shape):
    """What each device has, as a set of element numbers."""
    numbers = np.arange(int(np.prod(shape))).reshape(shape)
    return {d: set(np.ravel(numbers[index]).tolist()) for d, index in sharding.devices_indices_map(shape).items()}


def fewest(before, mesh, devices):
    """The fewest elements that devices lack, over all orders of all choices of devices."""
    old, many = [elements(x.sharding, x.shape) for x in before], int(np.prod(list(mesh.sizes.values())))
    place = jax.devices()[:many]
    new = [elements(s, shape) for s, shape in zip(where(mesh.on(place)), AXES, strict=True)]
    lacks = [[sum(len(n[p] - o.get(d, set())) for o, n in zip(old, new, strict=True)) for p in place] for d in devices]
    return min(
        sum(lacks[d][p] for p, d in enumerate(order)) for order in itertools.permutations(range(len(devices)), many)
    )


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("expert=2", "expert=4"),
        ("expert=4", "expert=2"),
        ("expert=2,tensor=2", "expert=4"),
        ("expert=2,fsdp=2", "expert=4,fsdp=1"),
    ],
)
def test_each_device_receives_only_what_it_lacks_and_takes_the_place_where_it_lacks_least(old, new):
    devices, values = jax.devices()[:5], [np.arange(int(np.prod(s)), dtype=np.float32).reshape(s) for s in AXES]
    before = [jax.device_put(v, s) for v, s in zip(values, where(Layout(old).on(devices)), strict=True)]
    placed = nearest(Layout(new), before, where, devices)
    after, received = moved(before, where(placed))
    for x, sharding, value in zip(after, where(placed), values, strict=True):
        assert x.sharding == sharding
        for shard in x.addressable_shards:
            np.testing.assert_array_equal(shard.data, value[shard.index])
    assert received == 4 * fewest(before, Layout(new), devices)


def test_shards_that_stay_are_the_same_buffers_and_random_keys_move():
    layout = Layout("expert=2").on(jax.devices()[:2])
    x = jax.device_put(jnp.arange(16.0).reshape(4, 4), layout.sharding(("experts", None), (4, 4), kind="params"))
    key = jax.random.key(3)
    (y, other), received = moved([x, key], [x.sharding, SingleDeviceSharding(jax.devices()[1])])
    pointer = lambda a: [s.data.unsafe_buffer_pointer() for s in a.addressable_shards]  # noqa: E731
    assert pointer(x) == pointer(y) and received == 8
    assert (jax.random.key_data(other) == jax.random.key_data(key)).all() and other.devices() == {jax.devices()[1]}


def test_too_few_devices_are_refused():
    with raises_saying(LayoutError, "needs 4 devices and there are 2"):
        nearest(Layout("expert=4"), [], where, jax.devices()[:2])
