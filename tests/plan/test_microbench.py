"""Measuring a machine, models fitted to that, and the hardware file it becomes."""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxscale.cli import main
from jaxscale.errors import ConfigError, LayoutError
from jaxscale.hardware import chip, topology
from jaxscale.layout import MESH_AXES
from jaxscale.plan import collective_bench, gemm, microbench
from jaxscale.plan.clock import clock, own_time
from jaxscale.plan.collectives import KINDS, collectives
from jaxscale.plan.microbench import Effort
from tests.truth.errors import raises_saying

ROOT = Path(__file__).resolve().parents[2]
TINY = Effort((64,), ("float32", "bfloat16"), 0, 0, (2**16, 2**18), 2**16, (2**10, 2**12, 2**14), 2)
TRUE = gemm.GemmModel(100e12, 0.3e12, 5e-6, 8.0, (128, 128, 32), 132, 2)


def _made(noise, count=90):
    """Products as `TRUE` takes, with noise."""
    random = np.random.default_rng(1)
    sizes = gemm.shapes(count, 8192)
    return [gemm.Gemm(*s, "bfloat16", TRUE.seconds(*s) * float(np.exp(random.normal(0, noise)))) for s in sizes]


def test_a_clock_counts_what_it_runs():
    calls = []

    def work():
        calls.append(1)
        return np.zeros(1)

    result = clock(work, rounds=3, least=0, most=4)
    assert 3 <= result.rounds <= 4 and result.fastest <= result.seconds
    assert len(calls) == 2 + result.rounds  # one to warm up, one to see how long it takes


def test_a_fitted_model_finds_the_hardware_behind_products():
    seen, unseen = gemm.split(_made(0.03))
    model = gemm.fit(seen, cores=(1, 108, 132))
    assert (model.tile, model.cores) == (TRUE.tile, TRUE.cores)
    assert model.rate == pytest.approx(TRUE.rate, rel=0.05)
    assert model.bandwidth == pytest.approx(TRUE.bandwidth, rel=0.1)
    result = gemm.score(model, unseen)
    assert result.r2 > 0.98 and result.mean_error < 0.05 and result.count == 30


def test_a_split_leaves_no_product_on_both_sides():
    made = _made(0.0, 30)
    seen, unseen = gemm.split(made)
    assert len(unseen) == 10 and len(seen) == 20 and not set(seen) & set(unseen)
    assert gemm.split(made) == (seen, unseen)


@pytest.mark.parametrize(
    "sizes, padded",
    [((128, 128, 32), 128 * 128 * 32), ((129, 128, 32), 2 * 128 * 128 * 32), ((128, 1, 33), 128 * 128 * 64)],
)
def test_products_are_worked_on_in_whole_tiles(sizes, padded):
    assert gemm.padded_flops(*sizes, (128, 128, 32)) == 2 * padded
    assert gemm.padded_flops(*sizes, (128, 128, 32), cores=4) >= 4 * 2 * 128 * 128 * 32


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn", "int8"])
def test_products_are_timed_on_numbers_all_over_their_range(dtype):
    kind = jnp.dtype(dtype)
    x = np.asarray(gemm.scattered((256, 256), kind, jnp.uint32(1)), np.float64) / (128 if dtype == "int8" else 1)
    assert abs(x.mean()) < 0.02
    assert abs(x.std() - 3**-0.5) < 0.02  # of an even spread over [-1, 1)
    assert abs(np.corrcoef(x[:-1].ravel(), x[1:].ravel())[0, 1]) < 0.02


def test_a_model_is_fitted_on_enough_products_of_one_dtype():
    with raises_saying(ConfigError, "8 or more"):
        gemm.fit(_made(0.0, 7))
    mixed = [dataclasses.replace(g, dtype=d) for g, d in zip(_made(0.0, 8), ["bfloat16", "float32"] * 4, strict=True)]
    with raises_saying(ConfigError, "one dtype"):
        gemm.fit(mixed)


def test_a_data_sheet_is_a_roofline_with_tiles():
    sheet = gemm.model_of(dataclasses.replace(chip("v5p"), efficiency={}), "bfloat16")
    assert sheet.seconds(8192, 8192, 8192) == pytest.approx(2 * 8192**3 / 459e12, rel=0.01)
    assert sheet.seconds(1, 8192, 8192) == pytest.approx(2 * 8192**2 / 2765e9, rel=0.01)
    assert sheet.seconds(8192, 8192, 8193) > 1.01 * sheet.seconds(8192, 8192, 8192)


@pytest.mark.parametrize("kind", KINDS)
def test_a_timed_collective_is_the_one_it_is_called(kind):
    mesh = jax.make_mesh((8,), ("device",), axis_types=(jax.sharding.AxisType.Auto,))
    payload = 2**12 // (8 if kind == "all-gather" else 1)
    spec = jax.sharding.PartitionSpec("device")
    run = jax.shard_map(collective_bench._run(kind, 8), mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    (result,) = collectives(
        jax.jit(run).lower(jax.ShapeDtypeStruct((8, payload // 4), "float32")).compile(), {"device": 8}
    )
    assert (result.kind, result.devices, result.payload) == (kind, 2 if kind == "collective-permute" else 8, 2**12)


def test_a_links_latency_and_bandwidth_are_found_again():
    made = [
        collective_bench.Sample(kind, 8, 2**p, 3e-6 * collective_bench.steps(kind, 8) + sent / 5e10, 0.0)
        for kind in KINDS
        for p in range(10, 28, 4)
        for sent in [collective_bench.Sample(kind, 8, 2**p, 1.0, 0.0).sent]
    ]
    result = collective_bench.fit(made)
    assert {f.kind for f in result} == set(KINDS)
    for f in result:
        assert f.latency == pytest.approx(3e-6, rel=1e-3) and f.bandwidth == pytest.approx(5e10, rel=1e-3)
        assert f.error < 1e-6
    with raises_saying(LayoutError, "3 sizes"):
        collective_bench.fit(made[:2])


@pytest.mark.parametrize(
    "options, words",
    [({"kinds": ("all-gathr",)}, ["'all-gathr'", "did you mean 'all-gather'"]), ({"counts": (16,)}, ["16", "8"])],
    ids=["kind", "count"],
)
def test_collectives_that_cannot_be_timed_are_named(options, words):
    with raises_saying(LayoutError, *words):
        collective_bench.sweep([1024], **options)


@pytest.fixture(scope="module")
def measured():
    return microbench.microbench(effort=TINY)


def test_a_measured_machine_is_hardware_to_plan_on(measured, tmp_path):
    hardware = topology(f"{measured.write(tmp_path / 'my.json')}:8")
    assert hardware.devices == 8 and hardware.chip == measured.chip
    assert set(hardware.chip.flops) == {"float32", "bfloat16"}
    sizes = {a: 8 if a == "fsdp" else 1 for a in MESH_AXES}
    assert hardware.link(sizes, ("fsdp",)) == (hardware.chip.links[0], hardware.chip.links[0].bandwidth)
    assert gemm.model_of(hardware.chip, "float32").rate == hardware.chip.flops["float32"]
    sizes, rates = zip(*hardware.chip.measured["copy"], strict=True)
    assert tuple(sizes) == TINY.copies and min(rates) > 0


def test_every_measurement_is_shown_with_its_spread(measured):
    assert {row.what for row in measured.rows} >= {
        "float32 product",
        "copy",
        "host to device",
        "device to host",
        *KINDS,
    }
    assert all(row.rate > 0 and row.seconds > 0 and row.spread >= 0 for row in measured.rows)
    shaky = dataclasses.replace(measured, rows=(dataclasses.replace(measured.rows[0], spread=0.2),))
    assert len(shaky.unsteady) == 1
    from rich.console import Console

    console = Console(record=True, width=132, quiet=False, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(shaky)
    assert "1 of 1 measurements spread by more than 5%" in console.export_text()


def test_the_command_writes_a_hardware_file(measured, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(microbench, "microbench", lambda **_: measured)
    path = tmp_path / "my.json"
    assert main(["microbench", "--quick", "--json", "--out", str(path)]) == 0
    assert json.loads(capsys.readouterr().out)["hardware"] == json.loads(path.read_text())
    assert main(["microbench", "--out", "my.txt"]) == 2
    assert "ends in .json" in capsys.readouterr().err


@pytest.mark.parametrize("dtype, error", [("float32", 0.097), ("bfloat16", 0.137)])
def test_measured_products_are_predicted_as_the_experiment_says(dtype, error):
    result = json.loads((ROOT / "experiments/gemm_model/cpu.json").read_text())["dtypes"][dtype]["products"]
    seen, unseen = gemm.split([gemm.Gemm(**g) for g in result])
    scored = gemm.score(gemm.fit(seen), unseen)
    assert scored.mean_error == pytest.approx(error, abs=0.002) and scored.r2 > 0.975


def test_the_time_of_ones_own_work_is_a_cpus():
    assert microbench.EFFORTS["gpu", False].timer is time.perf_counter
    before = own_time()
    time.sleep(0.05)
    assert own_time() - before < 0.04  # sleeping is no work


@pytest.mark.parametrize("backend", ["gpu", "tpu"])
def test_an_accelerators_work_is_not_counted_in_cpu_time(monkeypatch, backend):
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    with raises_saying(ConfigError, "--cpu-time", backend):
        microbench.microbench(cpu_time=True)
