"""Hardware files, topologies by name, and which link a group of devices uses."""

from __future__ import annotations

import json
import math
import pickle

import jax.numpy as jnp
import pytest

from jaxscale.errors import LayoutError
from jaxscale.hardware import chip, chip_of, chips, read_chip, topology
from jaxscale.layout import MESH_AXES
from pallas_kernels.aot import GPUS, SMALLEST
from tests.truth.errors import raises_saying

NVIDIA = ("a100", "b200", "b300", "gb200", "gb300", "h100", "h200")
ALL = tuple(sorted((*NVIDIA, "mi300x", "mi355x", "cpu", "tpu7x", "v4", "v5e", "v5p", "v6e")))


def sizes(**values: int) -> dict[str, int]:
    """Every mesh axis, in mesh order."""
    return {a: values.get(a, 1) for a in MESH_AXES}


def test_there_is_a_file_for_every_chip_that_can_be_compiled_for():
    assert chips() == ALL
    assert {*SMALLEST, *GPUS} < {*ALL}


@pytest.mark.parametrize("name", ALL)
def test_a_chips_figures_are_consistent_and_have_sources(name):
    c = chip(name)
    assert c.name == name and 0 < c.capacity <= c.memory
    assert c.flops["bfloat16"] > 0 and (c.platform == "cpu" or c.host_bandwidth < c.bandwidth)
    assert [link.bandwidth for link in c.links] == sorted((link.bandwidth for link in c.links), reverse=True)
    assert {link.shape for link in c.links} <= {"torus", "switch"} and c.links[-1].reach is None
    assert {"flops", "memory", "bandwidth", "host_bandwidth", "links", "latency"} <= set(c.sources)
    assert pickle.loads(pickle.dumps(c)) == c and hash(c) == hash(read_chip.__wrapped__(_path(name)))


@pytest.mark.parametrize(
    "name, float8, int8, float4",
    [
        ("h100", 1979e12, 1979e12, None),
        ("b200", 4.5e15, 4.5e15, 9e15),
        ("gb200", 5e15, 5e15, 10e15),
        ("gb300", 5e15, 0.165e15, 15e15),  # Blackwell Ultra gave up int8 for float4
        ("mi300x", 304 * 4096 * 2.1e9, 304 * 4096 * 2.1e9, None),  # compute units x operations a clock x clock
        ("mi355x", 256 * 8192 * 2.4e9, 256 * 8192 * 2.4e9, 256 * 16384 * 2.4e9),
        ("v5e", None, 393e12, None),
        ("v6e", 918e12, 1836e12, None),
    ],
)
def test_narrow_dtypes_have_dense_rates_by_their_full_names(name, float8, int8, float4):
    rates = {jnp.float8_e4m3fn: float8, jnp.float8_e5m2: float8, jnp.int8: int8, jnp.float4_e2m1fn: float4}
    for dtype, rate in rates.items():
        dtype = str(jnp.dtype(dtype))
        if rate is None:
            with raises_saying(LayoutError, f"the rate of {dtype} products on {name}"):
                chip(name).rate(dtype)
        else:
            assert chip(name).rate(dtype) == pytest.approx(rate, rel=1e-4)


def _path(name):
    from jaxscale.hardware.chip import _FOLDER

    return _FOLDER / f"{name}.json"


@pytest.mark.parametrize("name", ALL)
def test_a_chip_written_and_read_again_is_the_same(name, tmp_path):
    path = tmp_path / "again.json"
    path.write_text(json.dumps(chip(name).to_json()))
    assert read_chip(path) == chip(name)


@pytest.mark.parametrize(
    "kind, name",
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA GB200", "gb200"),
        ("AMD Instinct MI300X", "mi300x"),
        ("TPU v5 lite", "v5e"),
        ("TPU v5", "v5p"),
        ("TPU v5p", "v5p"),
        ("TPU v6 lite", "v6e"),
        ("TPU7x", "tpu7x"),
        ("cpu", None),
    ],
)
def test_a_device_is_known_by_its_kind(kind, name):
    result = chip_of(kind)
    assert (result.name if result else None) == name


@pytest.mark.parametrize(
    "name, shape, devices",
    [
        ("v5p:8x8x8", (8, 8, 8), 512),
        ("v5p:8x8x8*2", (8, 8, 8), 1024),
        ("v5e:4x4", (4, 4), 16),
        ("v5e", (2, 2), 4),
        ("V4", (2, 2, 1), 4),
        ("tpu7x:2x2x1", (2, 2, 1), 8),
        ("h100:8x4", (8, 4), 32),
        ("h100:32", (8, 4), 32),
        ("h200", (1,), 1),
        ("gb200:72", (72,), 72),
        ("gb300:144", (72, 2), 144),
        ("mi355x:8x4", (8, 4), 32),
        ("cpu:8", (8,), 8),
    ],
)
def test_a_topology_is_read_from_its_name(name, shape, devices):
    result = topology(name)
    assert (result.shape, result.devices, result.name) == (shape, devices, name)


@pytest.mark.parametrize(
    "name, words",
    [
        ("v5x:2x2", ["'v5x'", "did you mean 'v5p'", "'v5e'"]),
        ("v5p:8x8", ["'v5p:8x8'", "3 dimensions", "v5p:2x2x1"]),
        ("v5e:32x32", ["1024 chips", "256", "*2"]),
        ("v5p:8x0x8", ["'8x0x8'", "v5p:2x2x1"]),
        ("h100:16x4", ["'h100:16x4'", "h100:8x4"]),
        ("h100:12", ["'h100:12'", "multiple"]),
        ("h100:8*2", ["'h100:8*2'", "slices", "h100:8x4"]),
        ("none.json:8", ["'none.json'", "cannot be read"]),
    ],
)
def test_hardware_that_there_is_not_is_named_with_what_there_is(name, words):
    with raises_saying(LayoutError, *words):
        topology(name)


def test_a_hardware_file_of_ones_own_is_a_topology(tmp_path):
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(chip("h200").to_json() | {"name": "mine", "bandwidth": 1e12}))
    result = topology(f"{path}:8")
    assert (result.chip.name, result.devices, result.chip.bandwidth) == ("mine", 8, 1e12)
    path = tmp_path / "short.json"
    path.write_text('{"name": "short"}')
    with raises_saying(LayoutError, "short.json", "bandwidth", "microbench"):
        topology(str(path))


@pytest.mark.parametrize(
    "change, words",
    [
        ({"bandwidth": "fast"}, ["bandwidth = 'fast'", "above 0"]),
        ({"memory": -1}, ["memory = -1", "above 0"]),
        ({"flops": {"bfloat16": 0}}, ["flops", "bfloat16 = 0"]),
        ({"memoyr": 1}, ["'memoyr'", "did you mean 'memory'"]),
        (
            {"links": [{"name": "x", "shape": "switch", "bandwidth": 1e9, "latncy": 0, "reach": None}]},
            ["link 0", "'latency'"],
        ),
        ({"links": 3}, ["links", "a list"]),
    ],
    ids=["type", "sign", "rate", "name", "link", "links"],
)
def test_a_hardware_file_that_makes_no_sense_is_one_sentence(tmp_path, change, words):
    path = tmp_path / "odd.json"
    path.write_text(json.dumps(chip("v5e").to_json() | change))
    with raises_saying(LayoutError, "odd.json", *words):
        topology(f"{path}:2x4")


@pytest.mark.parametrize(
    "name, mesh, axes, level, rate",
    [
        # one ring of the torus, both directions; two; all three
        ("v5p:8x8x8", {"data": 64, "tensor": 8}, ("tensor",), "ici", 2e11),
        ("v5p:8x8x8", {"data": 8, "fsdp": 64}, ("fsdp",), "ici", 4e11),
        ("v5p:8x8x8", {"fsdp": 512}, ("fsdp",), "ici", 6e11),
        ("v5p:8x8x8", {"data": 8, "fsdp": 64}, ("data", "fsdp"), "ici", 6e11),
        # part of a dimension is a line, and so is one that is no multiple of four, or of 16 on v5e
        ("v5p:4x4x8", {"fsdp": 32, "tensor": 4}, ("tensor",), "ici", 2e11),
        ("v5p:8x8x8", {"fsdp": 128, "tensor": 4}, ("tensor",), "ici", 1e11),
        ("v5p:2x2x4", {"fsdp": 4, "tensor": 4}, ("tensor",), "ici", 2e11),
        ("v5e:16x16", {"fsdp": 16, "tensor": 16}, ("tensor",), "ici", 1e11),
        ("v5e:8x16", {"fsdp": 8, "tensor": 16}, ("fsdp",), "ici", 0.5e11),
        # every fourth or second place of a ring, beside groups that send along the same links
        ("v5p:8x8x8", {"fsdp": 128, "tensor": 4}, ("fsdp",), "ici", (1 + 1 + 1 / 4) * 2e11),
        ("v5e:16x16", {"data": 8, "fsdp": 8, "tensor": 4}, ("data",), "ici", 0.5e11),
        # the two devices of a tpu7x chip, and the torus that they share
        ("tpu7x:4x4x4", {"fsdp": 64, "tensor": 2}, ("tensor",), "d2d", 6e11),
        ("tpu7x:4x4x4", {"fsdp": 64, "tensor": 2}, ("fsdp",), "ici", 3e11),
        ("tpu7x:4x4x4", {"fsdp": 128}, ("fsdp",), "ici", 6e11),
        # within a host; one device of each host; all eight of each, whose network cards work together
        ("h100:8x4", {"data": 4, "tensor": 8}, ("tensor",), "nvlink", 450e9),
        ("h100:8x4", {"data": 4, "tensor": 8}, ("data",), "infiniband", 50e9),
        ("h100:8x4", {"fsdp": 32}, ("fsdp",), "infiniband", 400e9),
        ("h100:8x4", {"fsdp": 16, "tensor": 2}, ("fsdp",), "infiniband", 200e9),
        # a rack, all of it on NVLink; two racks
        ("gb200:72", {"data": 9, "fsdp": 8}, ("data", "fsdp"), "nvlink", 900e9),
        ("gb200:72x2", {"data": 2, "fsdp": 72}, ("data",), "infiniband", 50e9),
        ("cpu:8", {"fsdp": 4, "tensor": 2}, ("fsdp",), "measured", None),
    ],
)
def test_a_group_uses_the_slowest_level_it_crosses(name, mesh, axes, level, rate):
    link, speed = topology(name).link(sizes(**mesh), axes)
    assert link.name == level and (rate is None or speed == pytest.approx(rate))


def test_slices_talk_over_the_data_centres_network():
    target = topology("v5p:8x8x8*2")
    mesh = sizes(data=2, fsdp=512)
    assert target.link(mesh, ("fsdp",), "data") == (target.chip.links[0], 6e11)
    assert target.link(mesh, ("data",), "data") == (target.chip.links[1], 6.25e9)
    assert target.link(mesh, ("data", "fsdp"), "data") == (target.chip.links[0], 6e11)  # 512 network cards are faster
    assert topology("v5p:8x8x8*2").link(sizes(data=16, fsdp=64), ("data",), "data")[1] == 8 * 6.25e9
    with raises_saying(LayoutError, "2 slices", "Layout.across = 'data'"):
        target.link(mesh, ("data",))


def test_clusters_of_gpus_talk_over_the_last_link_of_their_file(tmp_path):
    path, body = tmp_path / "mixed.json", chip("a100").to_json()
    slow = {"name": "ethernet", "shape": "switch", "bandwidth": 4e8, "latency": 5e-5, "reach": None}
    path.write_text(json.dumps(body | {"links": [*body["links"], slow]}))
    target = topology(f"{path}:8x2*2")
    assert target.devices == 32
    for across in ("pipeline", "data"):
        mesh = sizes(data=2, pipeline=2, tensor=8)
        names = {axis: target.link(mesh, (axis,), across)[0].name for axis in ("data", "pipeline", "tensor")}
        assert (
            names.pop("tensor") == "nvlink" and names.pop(across) == "ethernet" and [*names.values()] == ["infiniband"]
        )
    assert target.link(sizes(data=4, tensor=8), ("data",), "data")[1] == 2 * 4e8  # two hosts' links in each cluster
    with raises_saying(LayoutError, "only TPUs have slices", "last two links have no reach"):
        topology("a100:8x2*2")


def test_a_device_alone_sends_nothing():
    assert topology("v5e:4x4").link(sizes(fsdp=16), ("tensor",))[1] == math.inf


def test_a_link_is_asked_for_with_axes_that_there_are():
    with raises_saying(LayoutError, "'model'"):
        topology("v5e:4x4").link(sizes(fsdp=16), ("model",))
    with raises_saying(LayoutError, "more devices"):
        topology("v5e:4x4").link(sizes(fsdp=32), ("fsdp",))
