"""The recurrence's Hopper kernels: interpreted, against float64 token by token; compiling without spills; refusals."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from jaxscale.testing.ops import allowed, error_of
from pallas_kernels import chosen, forget
from pallas_kernels.chunked_recurrence import chunked_recurrence, examples
from pallas_kernels.dispatch import JAX_VERSION, KernelError, interpreted, on_device
from pallas_kernels.gate import configurations, gate_gpu
from tests.pallas_kernels.chunked_recurrence.cases import WIDE, program

NEW = pytest.mark.skipif(JAX_VERSION < (0, 11), reason="kernels for GPUs need jax 0.11")
GATE = {name: rest for name, *rest in configurations("chunked_recurrence", "gpu")} if JAX_VERSION >= (0, 11) else {}


@NEW
@pytest.mark.parametrize(
    ("decay", "delta"), [pytest.param(*x, id=name, marks=pytest.mark.long) for name, x in WIDE.items()]
)
def test_outputs_states_and_gradients_are_as_exact_as_the_plain_recurrences_and_have_no_races(decay, delta, capsys):
    made = program(decay, delta, "bfloat16", None, wide=True)
    with interpreted(races=True):
        got = jax.jit(made.ours("mosaic_gpu"))(*made.arrays)
    for i, (ours, plain, right) in enumerate(zip(got, made.plain(), made.truth(), strict=True)):
        assert error_of(ours, right) <= allowed(error_of(plain, right), ours.dtype), i
    assert "RACE" not in capsys.readouterr().out


@NEW
@pytest.mark.parametrize(
    ("seq", "options", "words"),
    [
        (64, {"dtype": "float32"}, "multiplies bfloat16, and products of float32 are left to XLA"),
        (64, {"widths": (256, 512)}, "keys of width 256 are left to XLA: .* wider than 128 does not fit"),
        (64, {"widths": (64, 80)}, "takes keys of width 64 or 128 and values of .*, not 64 and 80"),
    ],
)
def test_what_has_no_kernel_raises_with_the_reason_and_is_xlas_by_default(seq, options, words):
    inputs = examples.shapes(seq, 2, **{"widths": (64, 64)} | options)
    with interpreted(), pytest.raises(KernelError, match=words):
        jax.eval_shape(lambda x: chunked_recurrence(*x, implementation="mosaic_gpu"), inputs)
    forget()
    with on_device("NVIDIA H200"):
        jax.eval_shape(lambda x: chunked_recurrence(*x), inputs)
    (choice,) = chosen("chunked_recurrence")
    assert choice.implementation == "xla" and choice.why_not[0][0] == "mosaic_gpu"


@NEW
@pytest.mark.parametrize("decay", ["heads", "channels"])
def test_on_a_hopper_gpu_the_kernels_are_chosen_both_ways(decay):
    inputs = examples.shapes(100, 2, widths=(64, 64), decay=decay, delta=True)

    def loss(x):
        out, state = chunked_recurrence(*x)
        return jnp.sum(out.astype(jnp.float32)) + jnp.sum(state)

    forget()
    with on_device("NVIDIA H200"):
        jax.eval_shape(jax.grad(loss), inputs._replace(starts=None))
    ran = {(dict(c.case)["direction"], c.implementation) for c in chosen("chunked_recurrence")}
    assert ran == {("forward", "mosaic_gpu"), ("backward", "mosaic_gpu")}


@NEW
@pytest.mark.gpu_aot
@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.long] if i else []) for i, n in enumerate(GATE)])
def test_the_kernels_compile_without_spills(name):
    reports, problem = gate_gpu(*GATE[name], "h200")
    assert reports and problem is None
