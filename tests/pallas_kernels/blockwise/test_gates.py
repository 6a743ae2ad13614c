"""Compiling and lowering for hardware that is not present."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.aot import compile_kernel, kernel_reports, why_no_gpu
from pallas_kernels.blockwise import ADAMW, examples, quantize_blockwise, update_blockwise
from pallas_kernels.dispatch import on_device
from pallas_kernels.gate import TPUS, configurations
from tests.pallas_kernels.blockwise.cases import scalars_of

GPU = {name: (fn, shapes) for name, fn, shapes in configurations("blockwise", "gpu")}
TPU = {name: (fn, shapes) for name, fn, shapes in configurations("blockwise", "tpu")}


@pytest.mark.gpu_aot
@pytest.mark.parametrize(
    "name", ["adamw bfloat16 mlp, fsdp=8", "adamw float32 k stacked, fsdp=8", "lion bfloat16 linear"]
)
def test_the_gpu_kernel_compiles_without_spills_and_fits_in_shared_memory(name):
    fn, shapes = GPU[name]
    reports = kernel_reports(fn, *shapes)
    assert reports and not [r.problem for r in reports if r.problem]


@pytest.mark.tpu_aot
@pytest.mark.parametrize("topology", TPUS)
def test_the_tpu_kernel_compiles_for_every_generation(topology):
    for name in ("adamw bfloat16 mlp, fsdp=8", "adamw float32 k stacked, fsdp=8"):
        fn, shapes = TPU[name]
        assert "tpu_custom_call" in compile_kernel(fn, *shapes, topology=topology).as_text()


def test_every_case_is_of_a_shape_its_tile_divides():
    for _, shape, tile in examples.LLAMA:
        assert all(n % t == 0 for n, t in zip(shape, tile, strict=True))


@pytest.mark.parametrize(
    ("kind", "platform", "kernel"),
    [
        ("NVIDIA H200", "cuda", "mosaic_gpu"),
        ("NVIDIA GB200", "cuda", "mosaic_gpu"),
        ("TPU v6 lite", "tpu", "tpu_custom_call"),
        ("NVIDIA A100", "cuda", ""),
    ],
)
def test_lowering_chooses_the_kernel_of_the_platform(kind, platform, kernel):
    if platform == "cuda" and why_no_gpu() is not None:
        pytest.skip(str(why_no_gpu()))

    def f(p, states):
        return update_blockwise(ADAMW, scalars_of(ADAMW), p, p, states)

    p = jax.ShapeDtypeStruct((64, 256), jnp.float32)
    states = jax.eval_shape(
        lambda: tuple(quantize_blockwise(jnp.zeros((64, 256)), tile=(2, 128), signed=s) for s in (1, 0))
    )
    with on_device(kind):
        text = jax.jit(f).trace(p, states).lower(lowering_platforms=(platform,))
    calls = re.findall(r"custom_call @(\S*?(?:mosaic_gpu|tpu_custom_call)\S*?)\(", text.as_text())
    assert all(kernel in c for c in calls) and bool(calls) == bool(kernel), calls
