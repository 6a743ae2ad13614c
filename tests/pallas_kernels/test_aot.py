"""Compilers without devices, and the gate on their reports."""

from __future__ import annotations

import dataclasses
import types

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl

from pallas_kernels import aot, gate, tiles, trials
from pallas_kernels.aot import Report
from pallas_kernels.dispatch import KernelError

NEW = pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="compiling for a GPU that is not here needs jax 0.11")
TPU = pytest.mark.tpu_aot
X = jax.ShapeDtypeStruct((16, 256), jnp.float32)


def _double(block, dtype=jnp.float32):
    def kernel(x, o):
        o[...] = x[...] * 2

    spec = pl.BlockSpec(block, lambda i: (i, 0))
    made = jax.ShapeDtypeStruct(X.shape, dtype)
    return pl.pallas_call(kernel, out_shape=made, grid=(16 // block[0],), in_specs=[spec], out_specs=spec)


def test_products_that_need_triton_autotuning_use_cublas_with_a_warning(caplog):
    option_sets = []

    class Lowered:
        def compile(self, compiler_options):
            option_sets.append(compiler_options)
            if compiler_options.get("xla_gpu_enable_triton_gemm", True):
                raise jax.errors.JaxRuntimeError("INTERNAL: No supported config found for HLO: %gemm_fusion_dot.42")
            return "program"

        def as_text(self):
            return ""

    assert aot.compile_lowered(Lowered(), [types.SimpleNamespace(platform="gpu")]) == "program"
    assert len(option_sets) == 2 and option_sets[1]["xla_gpu_autotune_level"] == 0
    assert "this program's products use cuBLAS" in caplog.text


def test_kernels_of_two_architectures_in_one_process_are_refused(monkeypatch):
    monkeypatch.setattr(aot, "_compiled_for", [])

    def compiled(kind, text="custom_call @mosaic_gpu_v2"):
        lowered = types.SimpleNamespace(as_text=lambda: text, compile=lambda compiler_options: kind)
        return aot.compile_lowered(lowered, [types.SimpleNamespace(platform="gpu", device_kind=kind)])

    assert compiled("NVIDIA B200", "no kernel") and compiled("NVIDIA H200") and compiled("NVIDIA H100 80GB HBM3")
    with pytest.raises(KernelError, match="compiled kernels for NVIDIA H200.*start another one for NVIDIA B200"):
        compiled("NVIDIA B200")
    assert compiled("NVIDIA B200", "no kernel")


@TPU
@pytest.mark.parametrize("topology", gate.TPUS)
def test_a_kernel_compiles_for_every_tpu(topology):
    assert gate.gate_tpu(_double((8, 256)), (X,), topology) is None


@TPU
@pytest.mark.parametrize("topology", gate.TPUS)
def test_mosaic_loads_no_float16_and_so_no_kernel_takes_it(topology):
    half = jax.ShapeDtypeStruct(X.shape, jnp.float16)
    assert "does not compile" in gate.gate_tpu(_double((16, 256), jnp.float16), (half,), topology)


@TPU
def test_the_gate_refuses_what_mosaic_refuses():
    assert "does not compile" in gate.gate_tpu(_double((4, 100)), (X,), "v5e")


@TPU
def test_the_gate_refuses_a_function_without_a_kernel():
    assert "the function has none" in gate.gate_tpu(lambda x: x * 2, (X,), "v5e")


@pytest.mark.gpu_aot
def test_the_gate_reads_the_report_of_ptxas_and_refuses_too_much_shared_memory():
    from jax.experimental.pallas import mosaic_gpu as plgpu

    def copy(rows):
        def kernel(x, o, shared, barrier):
            plgpu.copy_gmem_to_smem(x, shared, barrier)
            plgpu.barrier_wait(barrier)
            plgpu.copy_smem_to_gmem(shared, o)
            plgpu.wait_smem_to_gmem(0)

        shape = jax.ShapeDtypeStruct((rows, 256), jnp.float32)
        scratch = [plgpu.SMEM(shape.shape, jnp.float32), plgpu.Barrier()]
        return plgpu.kernel(kernel, out_type=shape, grid=(1,), grid_names=("i",), scratch_types=scratch), (shape,)

    fn, shapes = copy(32)
    with jax.set_mesh(jax.sharding.Mesh(aot.devices_of("h200"), ("x",))):
        jax.jit(fn).lower(*shapes)  # lowered only: the compiler and the lowering now number kernels differently
    reports, problem = gate.gate_gpu(*copy(64), "h200")
    assert problem is None and reports[0].shared_memory >= 64 * 256 * 4 and reports[0].registers > 0
    again, problem = gate.gate_gpu(*copy(64), "h200")  # newer versions of jax compile the kernel once, for both
    assert problem is None and [dataclasses.replace(r, name="") for r in again] == [
        dataclasses.replace(r, name="") for r in reports
    ]
    assert gate.gate_gpu(*copy(256), "h200")[1] is not None  # 256 KiB


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(spill_bytes=16), "16 bytes of registers spilled"),
        (dict(wgmma_serialised=True), "serialised"),
        (dict(shared_memory=240000), "240000 bytes of shared memory, and a block may use 232448"),
        (dict(), None),
    ],
)
def test_a_report_names_its_problem(change, message):
    fine = dict(name="k", registers=128, spill_bytes=0, wgmma_serialised=False, shared_memory=1024, instructions=10)
    assert Report(**fine | change).problem == message or (message and message in Report(**fine | change).problem)


@pytest.mark.parametrize(
    "topology, message",
    [("v9:2x2", "no hardware 'v9:2x2'"), ("h300", "no hardware 'h300'"), ("", "no hardware ''")],
)
def test_the_error_for_unknown_hardware_lists_the_known_names(topology, message):
    with pytest.raises(KernelError, match=f"{message}; name one of v4, v5e.*h200"):
        aot.devices_of(topology)


@TPU
def test_a_slice_that_cannot_be_is_refused():
    with pytest.raises(KernelError, match="libtpu knows no slice 'v5e:3x5'.*the smallest is 'v5e:2x2'"):
        aot.devices_of("v5e:3x5")


@NEW
def test_a_number_of_gpus_that_cannot_be_is_refused():
    with pytest.raises(KernelError, match="'h200:9'.*multiple of 8"):
        aot.devices_of("h200:9")


def test_the_gates_command_names_an_op_without_kernels_for_the_backend_and_a_share_that_cannot_be(capsys):
    for argv, message in (
        (["sofmax"], "'sofmax' has no kernels for a GPU; these ops do: blockwise, chunked_recurrence"),
        (["fftconv"], "'fftconv' has no kernels for a GPU; these ops do: blockwise, chunked_recurrence"),
        (["sofmax", "--backend", "tpu"], "'sofmax' has no kernels for a TPU; these ops do: blockwise, chunked_rec"),
        (["--share", "4/3"], "--share 4/3: it is K/N with 1 <= K <= N, such as 2/3"),
    ):
        with pytest.raises(SystemExit):
            gate.main(argv)
        assert message in capsys.readouterr().err


@pytest.mark.parametrize("backend", ["gpu", "tpu"])
def test_the_gate_finds_configurations_of_every_op_that_has_kernels_for_the_backend(backend):
    first_of = {op: next(gate.configurations(op, backend), None) for op in gate.operations(backend)}
    needs_newer_jax = {"chunked_recurrence", "stored_matmul"} if backend == "gpu" else set()
    assert {op for op, first in first_of.items() if first is None} <= needs_newer_jax


@TPU
@pytest.mark.parametrize("op", ["blockwise", "softmax"])
def test_the_tuner_finds_a_tile_that_compiles_for_every_key(op):
    lines = []
    entries = trials.tune(op, "v5e", limit=1, say=lines.append)
    assert [f["key"] for f in entries] == list(trials.tuning(op).keys("tpu")), lines
    assert {(f["device"], f["from"]) for f in entries} == {("TPU v5 lite", "compiled")}


def test_lookup_returns_the_tile_that_is_tried():
    before = tiles.lookup("blockwise", "TPU v5 lite", form="matrix")
    with tiles.trying("blockwise", {"bytes": 1}):
        assert tiles.lookup("blockwise", "TPU v5 lite", form="matrix") == {"bytes": 1}
    assert tiles.lookup("blockwise", "TPU v5 lite", form="matrix") == before


def test_every_shipped_tile_has_a_key_that_the_tuner_knows():
    for op in gate.operations():
        known = [*trials.tuning(op).keys("tpu"), *trials.tuning(op).keys("gpu")]
        assert [e["key"] for e in tiles.entries(op) if e["key"] not in known] == []
