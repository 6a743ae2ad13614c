"""Meshes from strings, and the errors for those that cannot be made."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

from jaxscale.errors import LayoutError
from jaxscale.layout import MESH_AXES, Layout, init_distributed, make_mesh, parse_mesh, simulate_devices
from jaxscale.layout.distributed import compile_anew
from tests.truth.errors import raises_saying

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    "spec, sizes",
    [
        ("data=2,fsdp=2,tensor=2", {"data": 2, "fsdp": 2, "tensor": 2}),
        (" tensor=4 , data=-1 ", {"tensor": 4, "data": -1}),
        ("context=1 expert=3", {"context": 1, "expert": 3}),
        ("", {}),
    ],
)
def test_a_mesh_is_read_from_text(spec, sizes):
    assert parse_mesh(spec) == sizes


@pytest.mark.parametrize(
    "spec, words",
    [
        ("data", ["'data'", "axis=size", "data=2"]),
        ("data=two", ["'data=two'", "axis=size"]),
        ("data=2,tensr=2", ["'tensr'", "did you mean 'tensor'"]),
        ("zzz=2", ["'zzz'", "known:", *MESH_AXES]),
        ("data=2,data=4", ["'data' twice", "once"]),
        ("data=0", ["data=0", "positive", "-1"]),
        ("data=-2", ["data=-2", "positive", "-1"]),
        ("data=-1,fsdp=-1", ["more than one -1", "only one axis"]),
    ],
)
@pytest.mark.parametrize("read", [parse_mesh, Layout], ids=["parse_mesh", "Layout"])
def test_a_mesh_that_cannot_be_read_is_named_with_the_fix(read, spec, words):
    with raises_saying(LayoutError, f"'{spec}'", *words):
        read(spec)


def test_minus_one_takes_the_rest_of_the_devices():
    assert make_mesh("data=-1").shape == {**dict.fromkeys(MESH_AXES, 1), "data": 8}
    assert make_mesh("tensor=2,fsdp=-1").shape == {**dict.fromkeys(MESH_AXES, 1), "fsdp": 4, "tensor": 2}
    assert Layout("tensor=8,data=-1").sizes["data"] == 1


def test_devices_that_minus_one_cannot_fill_are_named_with_a_size_that_fits():
    with raises_saying(LayoutError, "'tensor=3,data=-1'", "8 devices", "multiple of 3", "is 2"):
        make_mesh("tensor=3,data=-1")
    with raises_saying(LayoutError, "'tensor=16,data=-1'", "8 devices", "is 8"):
        Layout("tensor=16,data=-1").sizes  # noqa: B018


def test_a_mesh_smaller_than_the_machine_uses_its_first_devices_and_says_so(caplog):
    with caplog.at_level(logging.WARNING, "jaxscale"):
        mesh = make_mesh("tensor=2,data=2")
    assert list(mesh.devices.flat) == jax.devices()[:4]
    assert "'tensor=2,data=2'" in caplog.text and "first 4 of 8" in caplog.text


def test_a_mesh_of_the_whole_machine_says_nothing(caplog):
    with caplog.at_level(logging.WARNING, "jaxscale"):
        mesh = make_mesh("data=2,tensor=4")
    assert set(mesh.devices.flat) == set(jax.devices())
    assert not caplog.records


def test_a_mesh_larger_than_the_machine_says_how_to_get_one():
    with raises_saying(LayoutError, "'data=16'", "16 devices", "has 8", "--devices 16", "simulate_devices(16)"):
        make_mesh("data=16")


def test_a_layout_too_large_for_the_machine_can_be_described_but_not_entered():
    layout = Layout("data=16,tensor=4")
    assert layout.devices == 64
    with raises_saying(LayoutError, "64 devices", "simulate_devices(64)"):
        layout.device_mesh  # noqa: B018


def test_two_spellings_are_one_mesh():
    assert make_mesh("tensor=4,data=2") == make_mesh("data=2,tensor=4")


def test_every_axis_is_auto():
    assert set(make_mesh("data=2,tensor=4").axis_types) == {jax.sharding.AxisType.Auto}


def test_simulating_no_device_is_refused():
    with raises_saying(LayoutError, "0 devices", "at least 1"):
        simulate_devices(0)


@pytest.mark.once
def test_devices_are_simulated_before_jax_starts_and_refused_after():
    script = """
import jax
from jaxscale.errors import LayoutError
from jaxscale.layout import simulate_devices
simulate_devices(3)
assert jax.device_count() == 3, jax.devices()
simulate_devices(3)
try:
    simulate_devices(5)
except LayoutError as e:
    print(e)
"""
    # a flag in the environment does not override the call
    env = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=2", "PYTHONPATH": str(ROOT)}
    run = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    assert all(w in run.stdout for w in ("already runs on 3 cpu", "simulate_devices(5)", "fresh process")), run.stdout


def test_distributed_arguments_come_together(monkeypatch):
    for name in ("COORDINATOR", "PROCESSES", "PROCESS"):
        monkeypatch.delenv(f"JAXSCALE_{name}", raising=False)
    with raises_saying(LayoutError, "no processes and no process", "address, processes and process"):
        init_distributed("localhost:1234")
    with raises_saying(LayoutError, "process 2", "2 processes", "from 0 to 1"):
        init_distributed("localhost:1234", 2, 2)
    monkeypatch.setenv("JAXSCALE_PROCESSES", "two")
    with raises_saying(LayoutError, "JAXSCALE_PROCESSES", "'two'"):
        init_distributed("localhost:1234")


@pytest.mark.parametrize("platform, processes, off", [("cpu", 2, True), ("cpu", 1, False), ("gpu", 2, False)])
def test_programs_over_the_cpus_of_several_processes_never_come_from_the_cache(
    platform, processes, off, tmp_path, caplog
):
    set_to = {"jax_enable_compilation_cache": True, "jax_compilation_cache_dir": str(tmp_path)}
    before = {name: jax.config.values[name] for name in set_to}
    devices = [SimpleNamespace(platform=platform, process_index=i % processes) for i in range(4)]
    try:
        for name, value in set_to.items():
            jax.config.update(name, value)
        for _ in range(2):
            compile_anew(devices)
        assert jax.config.values["jax_enable_compilation_cache"] is not off
        assert caplog.text.count(f"JAX's compilation cache ({tmp_path}) is off") == off
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()
