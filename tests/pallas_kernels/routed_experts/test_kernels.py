"""Experts in one kernel: output and gradients against float64; interpreted without races; compiling for TPUs."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxscale.testing.ops import allowed, error_of
from pallas_kernels import tiles
from pallas_kernels.aot import compile_kernel
from pallas_kernels.dispatch import KernelError, Target, interpreted
from pallas_kernels.gate import configurations
from pallas_kernels.routed_experts import examples, gated_experts, inputs, reference, routed_experts, tpu, xla
from tests.pallas_kernels.routed_experts import cases
from tests.truth.long import short

TILE = {"rows": 16, "columns": 128}
V5E = Target("TPU v5 lite", "tpu")


def check(feature, dtype, implementation, tile=TILE, **shapes):
    """Compare output and gradients with float64, and their errors with those of ordinary products."""
    made = cases.program(feature, dtype, None, **shapes)
    with interpreted(races=True), tiles.trying("routed_experts", tile):
        got = jax.jit(made.ours(implementation))(*made.arrays)
    for part, ours, theirs, true in zip(cases.PARTS, got, made.plain(), made.truth(), strict=True):
        assert ours.shape == true.shape
        assert error_of(ours, true) <= allowed(error_of(theirs, true), ours.dtype), part


CASES = [
    ("one has 90%", "float32", {"f": 320}),  # the last tile of the hidden layer is not whole; several tiles of rows
    ("router", "bfloat16", {}),
    ("some without an expert", "bfloat16", {"tokens": 40}),
    ("one has 90%", "bfloat16", {"tokens": 7}),
    ("router", "float32", {"tokens": 40, "f": 256}),
]


@pytest.mark.parametrize(("feature", "dtype", "shapes"), short(1, CASES))
def test_the_kernel_is_as_exact_as_ordinary_products_and_has_no_races(feature, dtype, shapes, capsys):
    check(feature, dtype, "mosaic_tpu", **shapes)
    assert "RACE" not in capsys.readouterr().out


@pytest.mark.parametrize("feature", short(1, ["router", "one has 90%", "some without an expert"]))
def test_sorted_rows_are_as_exact_as_ordinary_products(feature):
    check(feature, "bfloat16", "xla", f=16)


def test_tokens_without_an_expert_are_zero_even_if_no_expert_is_used():
    x, _, weights, *matrices, _ = cases.arrays("some without an expert", "float32")
    none = np.full(weights.shape, -1, np.int32)
    with interpreted(), tiles.trying("routed_experts", TILE):
        for implementation in ("mosaic_tpu", "xla"):
            assert not np.any(routed_experts(x, none, weights, *matrices, implementation=implementation))


@pytest.mark.long
def test_experts_without_a_gate_and_weights_as_the_softmax_gives_them():
    x, _, router, _, up, down, _ = cases.arrays("router", "float32")
    wide = [np.asarray(a, np.float64) for a in (x, router, up, down)]
    factors = reference.chosen(*wide[:2], cases.TOP, normalized=False)
    want = reference.experts(wide[0], factors, None, *wide[2:], np.square)
    with interpreted(), tiles.trying("routed_experts", TILE):
        for implementation in ("mosaic_tpu", "xla"):
            got = gated_experts(
                x, router, None, up, down, top_k=cases.TOP, normalized=False, activation=jnp.square,
                implementation=implementation,
            )  # fmt: skip
            assert error_of(got, want) < 2e-6


def test_of_equal_scores_the_first_experts_are_chosen():
    facts = inputs.Facts(16, 4, 2, 8, 8, "float32", True, True, True, inputs.swiglu)
    x, router = jnp.ones((16, 8)), jnp.zeros((8, 4)).at[:, 2].set(1.0)
    factors = tpu._chosen(x, router, 0, facts)
    ids, _ = xla.choose(x, router, facts)
    assert {tuple(row) for row in np.argsort(-factors, axis=1)[:, :2].tolist()} == {(2, 0)}
    assert {tuple(row) for row in ids.tolist()} == {(2, 0)}


def test_rows_are_multiplied_for_their_own_experts_only():
    ids = np.array([[0, 1]] * 100 + [[0, 2]] * 20)
    facts = inputs.Facts(120, 8, 2, 256, 512, "bfloat16", True, False, True, inputs.swiglu)
    with tiles.trying("routed_experts", {"rows": 16, "columns": 128}):
        assert tpu.multiplied_rows(ids, facts, V5E) == 128 + 112 + 32  # 240 rows, in tiles of 16


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (dict(top_k=7), "top_k = 7 of 6 experts; the nearest is 6"),
        (dict(router=jnp.zeros((16, 5))), r"router is float32\(16, 6\) .* not float32\(16, 5\)"),
        (dict(down=jnp.zeros((6, 16, 128))), r"down is float32\(6, 128, 16\)"),
        (dict(x=jnp.zeros((24, 16), jnp.int32)), "x is floats"),
        (dict(activation=[]), r"activation \[\] cannot be hashed"),
    ],
    ids=lambda a: next(iter(a)) if isinstance(a, dict) else "",
)
def test_arrays_that_do_not_fit_are_refused(changes, words):
    x, _, router, gate, up, down, _ = cases.arrays("router", "float32")
    arguments = dict(x=x, router=router, gate=gate, up=up, down=down, top_k=2) | changes
    with pytest.raises(KernelError, match=words):
        gated_experts(**arguments)


def test_choices_and_weights_of_other_shapes_are_refused():
    x, ids, weights, *matrices, _ = cases.arrays("one has 90%", "float32")
    with pytest.raises(KernelError, match=r"ids are \(24, k\) and weights float32"):
        routed_experts(x, ids, weights[:, :1], *matrices)


@pytest.mark.parametrize(
    ("tokens", "width", "dtype", "words"),
    [
        (2000, 256, "bfloat16", "at most 1024, not 2000"),
        (1024, 7168, "bfloat16", "1024 tokens of width 7168 and a tile of an expert take over"),
        (64, 256, "float16", "float16 is left to XLA"),
    ],
)
def test_what_the_kernel_does_not_serve_has_a_reason(tokens, width, dtype, words):
    facts = inputs.Facts(tokens, 8, 2, width, 512, dtype, True, False, True, inputs.swiglu)
    assert words in tpu.supported(V5E, facts=facts)


@pytest.mark.tpu_aot
@pytest.mark.parametrize("topology", ["v5p", "v6e"])
def test_a_layer_is_one_kernel_whose_rows_are_in_no_other_memory(topology):
    name = "qwen3 256 tokens"
    _, fn, shapes = next(c for c in configurations("routed_experts", "tpu") if c[0] == name)
    made = compile_kernel(fn, *shapes, topology=topology)
    assert made.as_text().count("tpu_custom_call") == 1
    sorted_rows = f"bf16[{256 * 8},2048]"
    assert sorted_rows not in made.as_text()
    unfused = next(f for n, f, _ in examples.cases(xla.run) if n == name)
    assert sorted_rows in compile_kernel(unfused, *shapes, topology=topology).as_text()
