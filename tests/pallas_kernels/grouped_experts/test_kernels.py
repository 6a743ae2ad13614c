"""Gated experts of sorted rows: against float64; interpreted without races; what compiles for TPUs."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxscale.testing.ops import allowed, error_of
from pallas_kernels import grouped_experts as op
from pallas_kernels import tiles
from pallas_kernels.aot import compile_kernel
from pallas_kernels.dispatch import KernelError, Target, interpreted, on_device
from pallas_kernels.gate import configurations
from pallas_kernels.grouped_experts import grouped_experts, inputs, tpu
from pallas_kernels.grouped_matmul.examples import MODELS
from tests.pallas_kernels.grouped_experts import cases
from tests.truth.long import short

TILE = {"rows": 16, "n": 128}
V5E = Target("TPU v5 lite", "tpu")


def other_products_by_xla(monkeypatch):
    """Those of `grouped_matmul`, whose kernels have tests of their own."""

    def by_xla(product, *arrays, implementation, **options):
        return product(*arrays, **options)  # the choice on a CPU

    for name in ("grouped_matmul", "grouped_outer"):
        monkeypatch.setattr(op, name, functools.partial(by_xla, getattr(op, name)))


def check(feature, dtype, implementation, tile=TILE, **shapes):
    """Compare the result and gradients with float64, and their errors with those of ordinary products."""
    made = cases.program(feature, dtype, None, **shapes)
    with interpreted(races=True), tiles.trying("grouped_experts", tile):
        got = jax.jit(made.ours(implementation))(*made.arrays)
    for part, ours, theirs, true in zip(cases.PARTS, got, made.plain(), made.truth(), strict=True):
        assert ours.shape == true.shape
        assert error_of(ours, true) <= allowed(error_of(theirs, true), ours.dtype), part


CASES = [
    ("empty, and rows after, biases", "float32", {}),  # whose last tile of columns is not whole
    ("empty, and rows after", "bfloat16", {}),
    ("one has 90%", "bfloat16", {"f": 256}),
    ("one has 90%", "float32", {"m": 640, "times": 12, "e": 128}),
]


@pytest.mark.parametrize(("feature", "dtype", "shapes"), short(1, CASES))
def test_the_kernels_are_as_exact_as_ordinary_products_and_have_no_races(feature, dtype, shapes, capsys, monkeypatch):
    if not shapes and dtype == "float32":  # the case of `make test` is quick
        other_products_by_xla(monkeypatch)
    check(feature, dtype, "mosaic_tpu", {"rows": 256, "n": 128} if "m" in shapes else TILE, **shapes)
    assert "RACE" not in capsys.readouterr().out


@pytest.mark.parametrize("feature", short(1, cases.FEATURES))
def test_separate_products_are_as_exact_as_ordinary_ones(feature):
    check(feature, "bfloat16", "xla", f=24)


@pytest.mark.parametrize("implementation", short(1, ["xla", "mosaic_tpu"]))
def test_biases_get_their_gradients(implementation, monkeypatch):
    other_products_by_xla(monkeypatch)
    *arguments, sizes, biases, dy = cases.arrays("empty, and rows after, biases", "float32", f=24)

    def result(biases):
        options = dict(activation=cases.cube, saves=False, implementation=implementation)
        return grouped_experts(*arguments, sizes, biases=biases, **options)

    with interpreted(), tiles.trying("grouped_experts", {"rows": 48, "n": 128}):
        got = jax.jit(lambda b: jax.vjp(result, b)[1](dy)[0])(biases)
    for ours, true in zip(got, cases.truth(*arguments, sizes, biases, dy)[len(cases.PARTS) :], strict=True):
        assert error_of(ours, true) < 2e-6


@pytest.mark.parametrize(
    ("place", "array", "words"),
    [
        (0, jnp.zeros((48, 16), "int8"), "rows are floats"),
        (1, jnp.zeros((48, 1)), r"scale is float32\(48,\) .* not float32\(48, 1\)"),
        (2, jnp.zeros((6, 16, 136), "bfloat16"), r"gate is float32\(6, 16, 136\) .* not bfloat16"),
        (4, jnp.zeros((6, 16, 136)), r"down is float32\(6, 136, 16\)"),
        (5, np.zeros(5, np.int32), r"sizes are \(6,\), one for each matrix, not \(5,\)"),
    ],
    ids=("rows", "scale", "gate", "down", "sizes"),
)
def test_arrays_that_do_not_fit_are_refused(place, array, words):
    arguments = list(cases.arrays("empty, and rows after", "float32")[:6])
    arguments[place] = array
    with pytest.raises(KernelError, match=words):
        grouped_experts(*arguments)


def test_an_activation_that_cannot_be_hashed_is_refused():
    with pytest.raises(KernelError, match=r"activation \[\] cannot be hashed"):
        grouped_experts(*cases.arrays("one has 90%", "float32")[:6], activation=[])


def facts(product="hidden", dtype="bfloat16", k=4096, n=14336, saved=False):
    return inputs.Facts(product, 8, 16384, k, n, dtype, saved, False, inputs.swiglu)


@pytest.mark.parametrize(
    ("of", "words"),
    [
        (facts(dtype="float16"), "float16 is left to XLA"),
        (facts(dtype="float32"), "float32 rows have at most 1024 columns, not 4096"),
        (facts("gradients", k=32768), "rows of 32768 columns and two tiles of matrices take over"),
        (facts(n=0), "an operand is empty"),
    ],
    ids=("float16", "float32", "wide", "empty"),
)
def test_what_the_kernels_do_not_serve_has_a_reason(of, words):
    assert words in tpu.supported(V5E, facts=of)


def test_activations_that_no_kernel_can_hold_are_computed_by_separate_products(caplog):
    largest, of_case = jnp.float32(7), facts(k=256, n=256)
    reads, plain = (lambda gate, up: jnp.minimum(gate, largest) * up), (lambda gate, up: jnp.minimum(gate, 7.0) * up)
    assert "reads arrays" in tpu.supported(V5E, facts=dataclasses.replace(of_case, activation=reads))
    assert tpu.supported(V5E, facts=dataclasses.replace(of_case, activation=plain)) is None
    arrays = inputs.Arrays(*cases.arrays("one has 90%", "float32")[:6])
    with on_device("TPU v5 lite"):
        assert "cannot be hashed" in op.why_not(arrays, [], saves=True)
    assert "experts take separate products; use a function or a frozen dataclass" in caplog.text


def test_models_have_a_tile_that_fits_and_wider_ones_a_narrower_tile():
    for product in ("hidden", "gradients"):
        assert all(tpu.tile_of(V5E, facts(product, k=k, n=n)) for _, _, k, n in MODELS.values())
    columns = [tpu.tile_of(V5E, facts("gradients", k=k))[1] for k in (1024, 2048, 4096)]
    assert columns == sorted(columns, reverse=True) and columns[0] > columns[-1]


@pytest.mark.tpu_aot
@pytest.mark.parametrize("kernel", ["hidden", "gradients"])
def test_a_kernel_compiles_without_a_temporary(kernel):
    _, fn, shapes = next(c for c in configurations("grouped_experts", "tpu") if c[0] == f"1000 rows float32 {kernel}")
    made = compile_kernel(fn, *shapes, topology="v5e")
    assert made.as_text().count('custom_call_target="tpu_custom_call"') == 1
    # the groups and tiles of steps, and the scale and its gradient, of which memory has one number in 128
    assert made.memory_analysis().temp_size_in_bytes < 2**21
