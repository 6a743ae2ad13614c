"""Compiling and lowering for hardware that is not present."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.aot import compile_kernel, kernel_reports, why_no_gpu
from pallas_kernels.dispatch import on_device
from pallas_kernels.gate import TPUS, configurations
from pallas_kernels.softmax import log_softmax, logsumexp, softmax

GPU = {name: (fn, shapes) for name, fn, shapes in configurations("softmax", "gpu")}
TPU = {name: (fn, shapes) for name, fn, shapes in configurations("softmax", "tpu")}


@pytest.mark.gpu_aot
@pytest.mark.parametrize("name", [n for n in GPU if "110592 softmax" in n or "1048576 softmax" in n or "32768" in n])
def test_the_gpu_kernel_compiles_without_spills_and_fits_in_shared_memory(name):
    fn, shapes = GPU[name]
    reports = kernel_reports(fn, *shapes)
    assert reports and not [r.problem for r in reports if r.problem]


@pytest.mark.tpu_aot
@pytest.mark.parametrize("topology", TPUS)
def test_the_tpu_kernel_compiles_for_every_generation(topology):
    for name in ("float32 1021 softmax_backward", "bfloat16 262141 log_softmax", "float32 262141 sums"):
        fn, shapes = TPU[name]
        assert "tpu_custom_call" in compile_kernel(fn, *shapes, topology=topology).as_text()


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

    def f(x):
        return jax.grad(lambda x: (softmax(x) * log_softmax(x)).sum() + logsumexp(x).sum())(x)

    with on_device(kind):
        text = jax.jit(f).trace(jax.ShapeDtypeStruct((64, 32768), jnp.float32)).lower(lowering_platforms=(platform,))
    calls = re.findall(r"custom_call @(\S*?(?:mosaic_gpu|tpu_custom_call)\S*?)\(", text.as_text())
    assert all(kernel in c for c in calls) and bool(calls) == bool(kernel), calls
