"""Long convolutions: against float64 sums, documents apart, gradients, the kernel interpreted and compiled."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.aot import compile_kernel
from pallas_kernels.dispatch import KernelError, interpreted, on_device
from pallas_kernels.fftconv import checked, fftconv
from pallas_kernels.fftconv.reference import convolve
from pallas_kernels.gate import TPUS, configurations
from tests.pallas_kernels.fftconv.cases import DOCUMENTS, TOKENS, gradients, plain, truth

RANDOM = np.random.default_rng(0)
X, DY = RANDOM.normal(size=(2, 2, TOKENS, 3)).astype(np.float32)
KERNEL = RANDOM.normal(size=(90, 3)).astype(np.float32)
GATE = {name: (fn, shapes) for name, fn, shapes in configurations("fftconv", "tpu")}


@pytest.mark.parametrize("implementation", ["xla", "mosaic_tpu"])
def test_a_packed_convolution_and_its_gradients_are_float64_sums_of_each_document(implementation, capsys):
    f = lambda x, k: fftconv(x, k, jnp.asarray(DOCUMENTS), implementation=implementation)  # noqa: E731
    with interpreted(races=True):
        got = jax.jit(lambda *a: gradients(f, *a))(X, KERNEL, DY)
    for ours, right in zip(got, truth(X, KERNEL, DY, DOCUMENTS), strict=True):
        np.testing.assert_allclose(ours, right, atol=5e-5)
    assert "RACE" not in capsys.readouterr().out


def test_a_short_kernel_takes_a_shorter_transform_with_the_same_sums():
    assert checked(X, KERNEL).factors == (16, 16) and checked(X, KERNEL[:9]).factors == (8, 16)
    y = jax.jit(fftconv)(X, KERNEL[:9])
    np.testing.assert_allclose(y, plain(np.float64(X), np.float64(KERNEL[:9]), None, np), atol=2e-5)


@pytest.mark.parametrize("implementation", ["xla", pytest.param("mosaic_tpu", marks=pytest.mark.long)])
def test_few_frequencies_are_those_of_numpys_transform_and_of_the_reference(implementation):
    keep = (5, 7)
    run = lambda x, k: fftconv(x, k, keep=keep, implementation=implementation)  # noqa: E731
    with interpreted():
        y, back = jax.vjp(jax.jit(run), jnp.asarray(X), jnp.asarray(KERNEL[:70]))
        dx, dkernel = back(jnp.asarray(DY))
    k = np.arange(256)
    mask = ((k % 16 < 5) & (k // 16 < 7))[:, None]
    spectra = np.fft.fft(KERNEL[:70], 256, axis=0) * mask
    want = np.fft.ifft(np.fft.fft(X, 256, axis=1) * spectra, axis=1).real[:, :70]
    np.testing.assert_allclose(y, want, atol=2e-5)
    np.testing.assert_allclose(convolve(X, KERNEL[:70], checked(X, KERNEL[:70], None, keep)), want, atol=2e-5)
    # the result is linear in each argument: both gradients give the same sum as the cotangent
    np.testing.assert_allclose([np.sum(dx * X), np.sum(dkernel * KERNEL[:70])], [np.sum(want * DY)] * 2, rtol=1e-4)
    dspectra = np.fft.ifft(np.fft.fft(DY, 256, axis=1) * spectra.conj(), axis=1).real[:, :70]
    np.testing.assert_allclose(dx, dspectra, atol=2e-5)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"keep": (17, 16)}, "16 x 16 frequencies; keep 1 to 16"),
        ({"documents": np.ones((2, 9), np.int32)}, r"documents is integer \(2, 70\)"),
        ({"kernel": KERNEL[:, :2]}, r"kernel \(W, C\), not \(2, 70, 3\) and \(90, 2\)"),
        ({"x": X[:, :20], "implementation": "mosaic_tpu"}, "a kernel takes 64 tokens or more, not 20"),
    ],
)
def test_what_does_not_fit_is_refused(options, words):
    with interpreted(), pytest.raises(KernelError, match=words):
        fftconv(**{"x": jnp.asarray(X), "kernel": jnp.asarray(KERNEL)} | options)


def test_lowered_for_a_tpu_it_is_a_kernel_both_ways():
    loss = lambda x, k: jnp.sum(fftconv(x, k))  # noqa: E731
    with on_device("TPU v5"):
        traced = jax.jit(jax.value_and_grad(loss, argnums=(0, 1))).trace(X, KERNEL)
        text = traced.lower(lowering_platforms=("tpu",)).as_text()
    assert text.count("tpu_custom_call") == 3  # the result, and the gradients of x and of the kernel's transform


@pytest.mark.tpu_aot
@pytest.mark.parametrize(
    ("name", "topology"),
    [*(("4096 tokens convolve", t) for t in TPUS), ("16384 tokens spectrum", "v5e")],
)
def test_the_kernels_compile_for_every_tpu(name, topology):
    fn, shapes = GATE[name]
    assert "tpu_custom_call" in compile_kernel(fn, *shapes, topology=topology).as_text()
