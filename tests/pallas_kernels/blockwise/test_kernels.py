"""The TPU and the GPU kernel, interpreted, against the XLA implementation."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest

from pallas_kernels.blockwise import ADAMW, LION, RULES, codec, gpu, tpu
from pallas_kernels.dispatch import JAX_VERSION, KernelError, Target, interpreted
from tests.pallas_kernels.blockwise.cases import make, step
from tests.truth.long import short

needs_jax_11 = pytest.mark.skipif(JAX_VERSION < (0, 11), reason="Mosaic GPU's interpreter came with jax 0.11")


def _agree(rule, shape, tile, implementation, *dtypes, races=False, format="dynamic", apply=True):
    p, g, states = make(rule, shape, tile, *dtypes, format=format)
    want, before = step(rule, p, g, states, implementation="xla", apply=apply)
    with interpreted(races=races):
        got, after = step(rule, p, g, states, implementation=implementation, apply=apply)
    assert got.dtype == want.dtype
    ulp = 2.0**-23 if got.dtype == np.float32 else float(jax.numpy.finfo(got.dtype).eps)
    np.testing.assert_allclose(np.float32(got), np.float32(want), rtol=2 * ulp, atol=1e-6 * (ulp < 1e-6))
    for a, b in zip(after, before, strict=True):
        np.testing.assert_allclose(a.scales, b.scales, rtol=1e-6)
        order = codec(format, b.signed).order
        off = np.asarray(order(a.codes)) - np.asarray(order(b.codes))
        assert abs(off).max() <= 1 and np.count_nonzero(off) <= 2  # ties
        assert b.signed or np.asarray(order(a.codes))[np.asarray(g) != 0].min() > 0


@pytest.mark.parametrize(
    "shape, tile",
    short(
        2,
        [
            pytest.param((8, 256), (2, 128), marks=pytest.mark.long),
            ((104, 128), (2, 128)),  # the last block of rows is short
            pytest.param((2, 32, 256), (1, 2, 128), marks=pytest.mark.long),
            pytest.param((12, 3, 128), (2, 1, 128), marks=pytest.mark.long),
            ((12, 3, 128), (1, 1, 128)),
            ((2, 4, 2, 256), (1, 2, 1, 128)),
            ((32, 128), (8, 128)),
        ],
    ),
    ids=str,
)
def test_the_tpu_kernel_agrees_with_xla(shape, tile, monkeypatch):
    monkeypatch.setattr(tpu, "lookup", lambda *_, **__: {"bytes": 2 * 12 * 64 * shape[-1]})  # a few blocks
    _agree(ADAMW, shape, tile, "mosaic_tpu")


@pytest.mark.parametrize("name", short(3, RULES))
def test_the_tpu_kernel_runs_every_rule_in_bfloat16(name):
    _agree(RULES[name], (32, 128), (2, 128), "mosaic_tpu", "bfloat16")


def test_the_tpu_kernel_takes_other_formats_gradients_and_gives_updates():
    _agree(LION, (32, 128), (2, 128), "mosaic_tpu", format="linear")
    _agree(LION, (4, 2, 128), (2, 1, 128), "mosaic_tpu", "float32", "bfloat16", apply=False)


@needs_jax_11
@pytest.mark.parametrize(
    "shape, tile",
    [
        ((64, 256), (2, 128)),  # several blocks
        ((32, 3, 128), (2, 1, 128)),
        ((2, 16, 128), (1, 2, 128)),
        ((4096,), (256,)),
        ((8, 4, 64), (1, 2, 64)),  # two whole heads lie side by side
        ((2, 2048), (1, 256)),
        ((8, 128), (1, 128)),
        ((32, 128), (4, 128)),
    ],
    ids=str,
)
def test_the_gpu_kernel_agrees_with_xla_without_races(shape, tile, monkeypatch):
    monkeypatch.setattr(gpu, "lookup", lambda *_, **__: {"pairs": 16})
    _agree(ADAMW, shape, tile, "mosaic_gpu", races=True)


@needs_jax_11
@pytest.mark.parametrize("name", RULES)
def test_the_gpu_kernel_runs_every_rule_in_bfloat16(name):
    _agree(RULES[name], (16, 128), (2, 128), "mosaic_gpu", "bfloat16", races=True)


@needs_jax_11
def test_the_gpu_kernel_takes_other_formats_gradients_and_gives_updates():
    _agree(LION, (16, 128), (2, 128), "mosaic_gpu", format="linear", races=True)
    _agree(ADAMW, (16, 128), (2, 128), "mosaic_gpu", "bfloat16", "float32", apply=False, races=True)
    _agree(ADAMW, (16, 128), (2, 128), "mosaic_gpu", "float16", apply=False, races=True)


CASE = dict(rule=ADAMW, shape=(64, 256), tile=(2, 128), flat=None, format="dynamic", apply=True)
CASE |= dict(param_dtype="float32", grad_dtype="float32")


@pytest.mark.parametrize(
    "changed, message",
    [
        (dict(), None),
        (dict(flat=256, tile=()), "the flat form has no kernel"),
        (dict(format="fp8"), "formats 'dynamic' and 'linear'"),
        (dict(grad_dtype="float64"), "float64"),
        (dict(tile=(8, 32)), "last dimension is 128"),
        (dict(shape=(8, 8, 256), tile=(2, 2, 128)), "one dimension besides the last"),
        (dict(shape=(0, 256)), "empty"),
    ],
)
@pytest.mark.parametrize("module, kind", [(tpu, "TPU v5 lite"), (gpu, "NVIDIA H200")], ids=["tpu", "gpu"])
def test_the_reason_for_an_unsupported_case_is_one_sentence(module, kind, changed, message):
    why = module.supported(Target(kind, "tpu" if module is tpu else "cuda"), **(CASE | changed))
    if module is gpu and JAX_VERSION < (0, 11):
        message = "jax 0.11"
    assert why is None if message is None else message in why and "\n" not in why


def test_a_tpu_kernel_refuses_a_block_that_does_not_fit_its_memory():
    why = tpu.supported(Target("TPU v5 lite", "tpu"), **CASE | dict(shape=(48, 8192, 128), tile=(8, 1, 128)))
    assert "takes 268435456 bytes of VMEM" in why


@pytest.mark.parametrize("columns", [128 * 128 + 256])
def test_the_tpu_kernel_takes_rows_wider_than_a_block(columns):
    _agree(ADAMW, (32, columns), (2, 128), "mosaic_tpu")


@pytest.mark.parametrize("backend", ["mosaic_tpu", pytest.param("mosaic_gpu", marks=needs_jax_11)])
def test_kernels_keep_blocks_of_the_largest_floats(backend):
    p, g, states = make(LION, (32, 128), (1, 128))
    (huge,) = states
    huge = dataclasses.replace(huge, scales=huge.scales.at[3].set(3e38).at[5].set(8.6e37))
    _, (want,) = step(LION, p, g, (huge,), implementation="xla")
    with interpreted():
        _, (got,) = step(LION, p, g, (huge,), implementation=backend)
    np.testing.assert_array_equal(got.codes, want.codes)
    assert len(np.unique(got.codes[3])) > 50


@needs_jax_11
def test_a_gpu_kernel_refuses_rows_it_cannot_cut():
    p, g, states = make(ADAMW, (20, 128), (2, 128))
    with interpreted(), pytest.raises(KernelError, match="blocks of 8 tiles of 2 rows"):
        step(ADAMW, p, g, states, implementation="mosaic_gpu")
