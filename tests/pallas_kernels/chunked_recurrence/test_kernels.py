"""The recurrence's kernels: interpreted, against float64 token by token; compiling for TPUs; what they refuse."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxscale.plan.flops import of_jaxpr
from jaxscale.testing.ops import allowed, error_of
from pallas_kernels import chosen, forget, tiles
from pallas_kernels.aot import compile_kernel
from pallas_kernels.chunked_recurrence import chunked_recurrence, examples, tpu
from pallas_kernels.chunked_recurrence.chunk import Chunk, inverse, step
from pallas_kernels.chunked_recurrence.inputs import checked
from pallas_kernels.chunked_recurrence.tpu import flops
from pallas_kernels.dispatch import KernelError, interpreted, on_device
from pallas_kernels.gate import TPUS, configurations
from tests.pallas_kernels.chunked_recurrence.cases import FEATURES, everything, make, program, truth

BOTH = ("xla", "mosaic_tpu")
GATE = {name: (fn, shapes) for name, fn, shapes in configurations("chunked_recurrence", "tpu")}


def check(decay, delta, dtype, implementation="mosaic_tpu"):
    """Compare outputs, the last state and gradients with float64, and errors with the plain recurrence's."""
    made = program(decay, delta, dtype, None)
    with interpreted(races=True):
        got = jax.jit(made.ours(implementation))(*made.arrays)
    for i, (ours, plain, right) in enumerate(zip(got, made.plain(), made.truth(), strict=True)):
        log_decay = i == 5 and decay != "none"  # see `without_log_decay`
        assert error_of(ours, right) <= allowed(error_of(plain, right), ours.dtype) * (1 + log_decay), i


@pytest.mark.long
def test_the_delta_rules_outputs_state_and_gradients_are_exact_across_restarts_and_have_no_races(capsys):
    check("heads", True, "float32")
    assert "RACE" not in capsys.readouterr().out


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("decay", "delta"), FEATURES.values(), ids=FEATURES)
def test_every_recurrence_is_as_exact_as_the_plain_one(decay, delta, dtype, capsys):
    check(decay, delta, dtype)
    assert "RACE" not in capsys.readouterr().out


@pytest.mark.long
@pytest.mark.parametrize(("decay", "delta"), FEATURES.values(), ids=FEATURES)
def test_xlas_form_is_as_exact_in_bfloat16(decay, delta):
    check(decay, delta, "bfloat16", "xla")


@pytest.mark.long
def test_strong_decays_by_channels_stay_exact():
    inputs, cotangents = make("channels", True, "float32", rate=8.0)
    f = lambda x: chunked_recurrence(*x, chunk=32, implementation="mosaic_tpu")  # noqa: E731
    with interpreted():
        got = jax.jit(lambda *a: everything(f, *a))(inputs, cotangents)
    for ours, right in zip(got, truth(inputs, cotangents), strict=True):
        assert error_of(ours, right) < 1e-5


@pytest.mark.parametrize(
    ("delta", "implementation"), [(False, "xla"), *(pytest.param(True, x, marks=pytest.mark.long) for x in BOTH)]
)
def test_channels_without_decay_beside_strong_ones_have_the_whole_gradient(delta, implementation):
    inputs, cotangents = make("channels", delta, "float32", rate=8.0, size=(2, 36, 1, 4, 4))
    kind = np.random.default_rng(1).random(inputs.log_decay.shape)
    decays = np.where(kind < 0.6, 0, np.where(kind < 0.7, -np.inf, inputs.log_decay))
    inputs = inputs._replace(log_decay=jnp.asarray(decays, jnp.float32))
    if delta:
        inputs = inputs._replace(beta=jnp.round(inputs.beta))
    f = lambda x: chunked_recurrence(*x, chunk=32, implementation=implementation)  # noqa: E731
    with interpreted():
        got = jax.jit(lambda *a: everything(f, *a))(inputs, cotangents)
    for ours, right in zip(got, truth(inputs, cotangents), strict=True):
        assert error_of(ours, right) < 1e-5


def test_the_inverse_is_exact_for_equal_keys():
    # every number of the inverse is 0, 1 or -1, and a sum of powers of the matrix would lose all digits to 1e18
    got = jax.jit(inverse)(jnp.tril(jnp.ones((64, 64)), -1))
    np.testing.assert_array_equal(got, np.eye(64) - np.eye(64, k=-1))


@pytest.mark.parametrize(
    ("seq", "options", "words"),
    [
        (64, {"dtype": "float16"}, "TPUs compute in float32 and bfloat16, not float16"),
        (8, {}, "a kernel takes 16 tokens or more, not 8"),
        (64, {"widths": (2048, 2048)}, "heads of 2048 x 2048 take .* bytes of VMEM, over"),
    ],
)
def test_what_has_no_kernel_raises_with_the_reason(seq, options, words):
    inputs = examples.shapes(seq, 2, **{"widths": (64, 64)} | options)
    with interpreted(), pytest.raises(KernelError, match=words):
        jax.eval_shape(lambda x: chunked_recurrence(*x, implementation="mosaic_tpu"), inputs)


@pytest.mark.parametrize(
    ("name", "shape", "words"),
    [
        ("v", (1, 64, 3, 8), r"v is \(1, 64, 2, V\) beside q \(1, 64, 2, 16\), not \(1, 64, 3, 8\)"),
        ("log_decay", (1, 64, 2, 8), r"log_decay is \(1, 64, 2\) or \(1, 64, 2, 16\), not \(1, 64, 2, 8\)"),
        ("beta", (1, 64), r"beta is \(1, 64, 2\), not \(1, 64\)"),
        ("initial", (1, 2, 8, 16), r"initial is \(1, 2, 16, 8\), not \(1, 2, 8, 16\)"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(name, shape, words):
    inputs = examples.shapes(64, 2, widths=(16, 8), decay="heads", delta=True, state=True)
    inputs = inputs._replace(**{name: jax.ShapeDtypeStruct(shape, jnp.float32)})
    with pytest.raises(KernelError, match=words):
        jax.eval_shape(lambda x: chunked_recurrence(*x), inputs)


@pytest.mark.parametrize("chunk", [0, 16.0, True])
def test_a_chunk_that_is_no_whole_number_is_refused(chunk):
    inputs = examples.shapes(64, 2, widths=(16, 8), decay="heads", delta=True, state=True)
    with pytest.raises(KernelError, match=f"at least 1 token, a whole number, not {chunk}"):
        jax.eval_shape(lambda x: chunked_recurrence(*x, chunk=chunk), inputs)


def test_lowered_for_a_tpu_it_is_a_kernel_both_ways_and_on_a_cpu_xlas_form():
    inputs = examples.shapes(256, 2, widths=(64, 64), decay="heads", delta=True)

    def loss(x):
        out, state = chunked_recurrence(*x)
        return jnp.sum(out.astype(jnp.float32)) + jnp.sum(state)

    arrays = inputs._replace(starts=None)
    forget()
    with on_device("TPU v5"):
        text = jax.jit(jax.value_and_grad(loss)).trace(arrays).lower(lowering_platforms=("tpu",)).as_text()
    # the outputs, the states for the gradient, and the gradient
    assert text.count("tpu_custom_call") == 3
    assert {c.implementation for c in chosen("chunked_recurrence")} == {"mosaic_tpu"}
    with on_device("TPU v5"):
        assert "tpu_custom_call" not in jax.jit(loss).trace(arrays).lower(lowering_platforms=("cpu",)).as_text()


@pytest.mark.tpu_aot
@pytest.mark.parametrize(
    ("name", "topology"),
    [*(("Gated DeltaNet bfloat16 backward", t) for t in TPUS), ("Mamba-2 bfloat16 forward", "v5e")],
)
def test_the_kernels_compile_for_every_tpu(name, topology):
    fn, shapes = GATE[name]
    made = compile_kernel(fn, *shapes, topology=topology)
    assert "tpu_custom_call" in made.as_text()


@pytest.mark.tpu_aot
def test_memory_beside_the_arguments_is_that_of_chunk_states_and_linear_in_the_length():
    def temp(seq):
        inputs = examples.shapes(seq, 4, widths=(128, 128), decay="heads", delta=True)
        fn, shapes = examples.case(tpu.run, inputs, "backward")
        with tiles.trying("chunked_recurrence", {"chunk": 64, "heads": 1}):
            return compile_kernel(fn, *shapes, topology="v5p").memory_analysis().temp_size_in_bytes

    states = lambda seq: seq // 64 * 4 * 128 * 128 * 4  # noqa: E731
    short, long = temp(16384), temp(32768)
    tokens = 8 * 4 * 128 * 2  # q, k, v and their cotangents in the kernel's order, at most
    assert states(16384) <= long - short <= states(16384) + 16384 * tokens


def test_a_kernel_declares_the_products_of_its_step() -> None:
    for decay, delta in list(FEATURES.values())[2:]:
        inputs, _ = make(decay, delta, "bfloat16", size=(2, 64, 1, 32, 16))
        row, wide = jnp.zeros((1, 64)), jnp.zeros((64, 32))
        q, k, v = (x[0, :, 0] for x in inputs[:3])
        chunk = Chunk(q, k, v, wide if decay == "channels" else row, row if delta else None)
        run = jax.make_jaxpr(partial(step, dtype=jnp.bfloat16))(jnp.zeros((32, 16)), chunk, row)
        assert of_jaxpr(run, platform="tpu").matmul * 2 == flops(checked(inputs, 64), 64), (decay, delta)
