"""A fault of jaxlib on CPUs is avoided."""

import importlib.metadata
import os
import subprocess
import sys

import pytest

from pallas_kernels.cpu import FLAG, avoid_fault


def test_sums_are_not_fused_by_the_library_with_a_fault(monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.10.2")
    monkeypatch.setenv("XLA_FLAGS", "--a=b")
    avoid_fault()
    avoid_fault()
    assert os.environ["XLA_FLAGS"] == f"{FLAG}=individual_dot,individual_convolution --a=b"
    monkeypatch.setenv("XLA_FLAGS", f"{FLAG}=reduce")
    avoid_fault()
    assert os.environ["XLA_FLAGS"] == f"{FLAG}=reduce", "the user decides"


def test_other_versions_do_not_get_a_flag_that_they_may_not_know(monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.11.2")
    monkeypatch.setenv("XLA_FLAGS", "")
    avoid_fault()
    assert os.environ["XLA_FLAGS"] == ""


@pytest.mark.long
@pytest.mark.parametrize("package", ["jaxscale", "pallas_kernels"])
def test_importing_a_package_is_enough(package):
    code = (
        f"import {package}, jax, jax.numpy as jnp\n"
        "from pallas_kernels.chunked_recurrence import chunked_recurrence\n"
        "q, k, v, rates = jax.random.normal(jax.random.key(0), (4, 1, 40, 2, 16))\n"
        "f = lambda *x: (chunked_recurrence(*x, chunk=32)[0] ** 2).sum()\n"
        "f = jax.jit(jax.grad(f, argnums=(0, 1, 2, 3)))\n"
        "for _ in range(100):\n"
        "    jax.block_until_ready(f(q, k, v, -abs(rates)))\n"
    )
    environment = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "JAX_COMPILATION_CACHE_DIR")}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
