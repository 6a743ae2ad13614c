"""Products with delayed scaling: the recipe in NumPy, and histories in the training state."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest

import jaxscale as js
from jaxscale.errors import ConfigError
from jaxscale.layout import Layout
from jaxscale.models import TransformerConfig
from jaxscale.nn import Fp8, Int8, ProductRule, project
from jaxscale.parallel.tracked import Tracked
from jaxscale.step.backprop import Backprop
from jaxscale.step.tracking import EXTRA, check_histories, renewed
from jaxscale.testing.layouts import build, random_batch
from tests.truth.compare import assert_leaves_agree
from tests.truth.errors import raises_saying
from tests.truth.runs import assert_same_bits, bigram

DELAYED = Fp8(scaling="delayed", history=3)
E4M3, E5M2 = (ml_dtypes.float8_e4m3fn, 448.0), (ml_dtypes.float8_e5m2, 57344.0)


def model(products=DELAYED, **settings):
    sizes = dict(depth=2, vocab=64, width=32, heads=4, kv_heads=4, head_dim=8, hidden=64)
    return TransformerConfig(products=products, **(sizes | settings))


def coded(a, largest, kind):
    """Return `a` rounded to 8-bit floats with the scale of a largest magnitude; larger numbers become the largest."""
    name, top = kind
    scale = np.float32(largest) / np.float32(top)
    return np.clip(a / scale, -top, top).astype(name).astype(np.float64) * scale


def gradients(x, kernel, history, dy):
    weight = Tracked(kernel, history, jnp.zeros(3))
    f = lambda x, w: project(x, w, ("embed", "mlp"), (0,), DELAYED.arithmetic("float32"))  # noqa: E731
    y, pull = jax.vjp(f, x, weight)
    return y, *pull(dy)


def operands():
    rng = np.random.default_rng(0)
    return [rng.normal(size=s).astype(np.float32) for s in ((4, 8, 32), (32, 24), (4, 8, 24))]


def test_operands_are_scaled_by_the_largest_magnitude_of_earlier_steps():
    x, kernel, dy = operands()
    history = np.array([[0, 2.0, 1.0], [4.0, 1.0, 0], [0.5, 6.0, 1.0]], np.float32)  # 2.0 is less than x's largest
    y, dx, d = gradients(x, kernel, jnp.asarray(history), dy)
    q, w, g = coded(x, 2.0, E4M3), coded(kernel, 4.0, E4M3), coded(dy, 6.0, E5M2)
    for ours, want in ((y, q @ w), (dx, g @ w.T), (d.kernel, np.einsum("bse,bsf->ef", q, g))):
        assert np.linalg.norm(ours - want) < 1e-6 * np.linalg.norm(want)
    np.testing.assert_allclose(d.largest, [np.abs(a).max() for a in (x, kernel, dy)], rtol=1e-6)
    first = gradients(x, kernel, jnp.zeros((3, 3)), dy)[0]  # nothing is known: the operand itself
    want = coded(x, np.abs(x).max(), E4M3) @ coded(kernel, np.abs(kernel).max(), E4M3)
    assert np.linalg.norm(first - want) < 1e-6 * np.linalg.norm(want)


def test_a_product_with_delayed_scaling_is_that_of_one_device_on_a_layout():
    x, kernel, dy = operands()
    history = jnp.full((3, 3), 2.5)
    want = gradients(x, kernel, history, dy)
    with Layout("data=2,fsdp=2,tensor=2"):
        assert_leaves_agree(jax.jit(gradients)(x, kernel, history, jnp.asarray(dy)), want)


def test_the_oldest_magnitudes_leave_a_history_and_those_that_are_not_finite_do_not_enter():
    history = {"a": jnp.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])}
    got = renewed(history, {"a": jnp.array([7.0, jnp.inf, 9.0])})["a"]
    np.testing.assert_array_equal(got, [[2, 7], [4, 0], [6, 9]])


def trained(layout, accumulate=1, steps=2):
    setup = build(model(ProductRule("*/mlp/*", DELAYED)), layout, optax.sgd(0.1))
    state, batch = setup.state, random_batch(64, seq=16)
    step = jax.jit(Backprop().step(setup.blueprint, accumulate=accumulate))
    for _ in range(steps):
        state, metrics = step(state, batch)
    return state, metrics


@pytest.mark.long
def test_a_step_keeps_the_same_histories_on_every_layout_and_in_micro_batches():
    want, metrics = trained(None)
    assert sorted(want.extra[EXTRA])[0].endswith("mlp/down")
    history = np.asarray(want.extra[EXTRA][sorted(want.extra[EXTRA])[0]])
    assert history.shape == (2, 3, 3) and (history[..., 0] == 0).all() and (history[..., 1:] > 0).all()
    layout = Layout("data=2,tensor=2")
    with layout:
        on_layout, its = trained(layout)
    assert abs(float(its["loss"]) - float(metrics["loss"])) < 1e-3
    parts = trained(None, accumulate=2)[0]
    for other in (on_layout, parts):
        for path, ours in other.extra[EXTRA].items():
            theirs = np.asarray(want.extra[EXTRA][path])
            np.testing.assert_allclose(
                ours[..., :2, 1], theirs[..., :2, 1], rtol=0.05
            )  # of the first step, a code apart


@pytest.mark.long
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(tmp_path):
    recipe = Fp8(scaling="delayed", history=3, stochastic=True)  # whose random numbers are those of the step, too
    small = model(recipe, vocab=32)

    def fit(name, steps, **more):
        config = js.TrainConfig(**bigram(model=small, checkpoint_every=2, steps=steps))
        return js.fit(config, run=tmp_path / name, quiet=True, **more).state

    whole = fit("whole", 4)
    fit("parts", 2)
    assert_same_bits(fit("parts", 4, resume=True), whole)
    assert all(np.asarray(h)[..., 1:].min() > 0 for h in jax.tree.leaves(whole.extra[EXTRA]))


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: Int8(scaling="delayed", block=8), ("'delayed'", "remove one")),
        (lambda: Fp8(scaling="delayed", history=0), ("Fp8.history = 0", "at least 1")),
        (lambda: check(None, keeps=False), ("LocalSteps", "'tensor'")),
        (lambda: check(Layout("pipeline=2")), ("pipeline stages", "'tensor'")),
        (lambda: check(None, memory="minimal"), ("MemoryPolicy.tile", "'tensor'")),
    ],
)
def test_delayed_scaling_that_cannot_be_is_refused(make, words):
    with raises_saying(ConfigError, *words):
        make()


def check(layout, keeps=True, **settings):
    check_histories(build(model(**settings), layout, optax.sgd(0.1)).blueprint, keeps=keeps, name="LocalSteps")
