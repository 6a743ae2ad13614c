"""AdamW, fused and not, against optax's; and a chain that ends with it."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxscale import optim
from jaxscale.errors import ConfigError
from jaxscale.layout import TensorInfo
from jaxscale.models import TransformerConfig
from jaxscale.optim import FusedTransformation, apply_gradients
from jaxscale.step.state import describe_model
from tests.truth.compare import assert_leaves_agree
from tests.truth.errors import raises_saying

SCHEDULE = optax.linear_schedule(0.0, 0.3, 4)
PARAMS = {"w": np.float32([[1.0, -2.0], [3.0, 0.5]]), "norm": {"scale": np.float32([1.0, 2.0, 3.0])}}
MASK = {"w": True, "norm": {"scale": False}}


def _gradients(step):
    random = np.random.default_rng(step)
    return jax.tree.map(lambda p: random.normal(size=p.shape).astype(np.float32) * 10.0 ** (step - 3), PARAMS)


def _through_updates(tx, grads, state, params):
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state


def _after(tx, apply, steps=6):
    apply = jax.jit(functools.partial(apply, tx))
    params, state, seen = jax.tree.map(jnp.asarray, PARAMS), tx.init(PARAMS), []
    for step in range(steps):
        params, state = apply(_gradients(step), state, params)
        seen.append(params)
    return seen


OURS = {
    "update, then apply": _through_updates,
    "update and apply": lambda tx, *args: tx.update_and_apply(*args),
    "what the step calls": apply_gradients,
}


@pytest.mark.parametrize("mask", [None, MASK], ids=["all decay", "masked"])
@pytest.mark.parametrize("rate", [0.1, SCHEDULE], ids=["constant", "schedule"])
@pytest.mark.parametrize("form", OURS)
def test_adamw_equals_optax_for_several_steps(form, rate, mask):
    numbers = dict(b1=0.8, b2=0.97, eps=1e-3, weight_decay=0.2, mask=mask)
    got = _after(optim.adamw(rate, **numbers), OURS[form])
    want = _after(optax.adamw(rate, **numbers), _through_updates)
    assert_leaves_agree(got, want, gradient_norm=0.0)


@pytest.mark.parametrize("form", OURS)
def test_a_chain_clips_before_adamw_in_either_form(form):
    clip = optax.clip_by_global_norm(0.5)
    got = _after(optim.chain(clip, optim.adamw(0.1)), OURS[form])
    want = _after(optax.chain(clip, optax.adamw(0.1, b2=0.95, weight_decay=0.1)), _through_updates)
    assert_leaves_agree(got, want, gradient_norm=0.0)


def test_a_chain_keeps_update_and_apply_only_when_nothing_follows_it():
    clip = optax.clip_by_global_norm(1.0)
    assert isinstance(optim.chain(clip, optim.adamw(0.1)), FusedTransformation)
    assert isinstance(optim.chain(clip, optim.chain(clip, optim.adamw(0.1))), FusedTransformation)
    assert not isinstance(optim.chain(optim.adamw(0.1), optax.scale(0.5)), FusedTransformation)
    assert not isinstance(optim.chain(clip, optax.sgd(0.1)), FusedTransformation)


def test_a_chains_state_has_the_same_structure_in_either_form():
    tx = optim.chain(optax.clip_by_global_norm(1.0), optax.trace(0.9), optim.adamw(0.1))
    state = tx.init(PARAMS)
    for form in OURS.values():
        assert jax.tree.structure(form(tx, _gradients(0), state, PARAMS)[1]) == jax.tree.structure(state)


def test_state_and_parameters_keep_their_types():
    params = jax.tree.map(lambda p: jnp.asarray(p, jnp.bfloat16), PARAMS)
    tx = optim.adamw(SCHEDULE)
    for form in OURS.values():
        new, state = form(tx, params, tx.init(params), params)
        assert {str(x.dtype) for x in jax.tree.leaves((new, state.mu, state.nu))} == {"bfloat16"}
        assert state.count.dtype == jnp.int32


def test_adamw_asks_for_the_parameters():
    with pytest.raises(ValueError, match="needs the parameters"):
        optim.adamw(0.1).update(PARAMS, optim.adamw(0.1).init(PARAMS))


def test_weight_decay_spares_norms_and_biases():
    _, infos = describe_model(TransformerConfig(depth=1, width=32, heads=2, bias=True, qk_norm=True, post_norm=True))
    decayed = {i.path.rsplit("/", 1)[-1] for i, d in _pairs(infos, optim.decay_mask(infos)) if d}
    spared = {i.path.rsplit("/", 1)[-1] for i, d in _pairs(infos, optim.decay_mask(infos)) if not d}
    assert (decayed, spared) == ({"kernel", "weight"}, {"scale", "bias"})


def _pairs(*trees):
    return zip(*(jax.tree.leaves(t) for t in trees), strict=True)


def test_the_configured_optimizers_make_what_they_say():
    infos = jax.tree.map(lambda p: TensorInfo("", p.shape, p.dtype, (None,) * p.ndim), PARAMS)
    infos["norm"]["scale"] = TensorInfo("norm/scale", (3,), np.dtype("float32"), ("norm",))
    rate = optax.constant_schedule(0.1)
    got = _after(optim.AdamW(b1=0.5, eps=1e-2, weight_decay=0.3).make(rate, infos), apply_gradients)
    want = _after(optax.adamw(0.1, 0.5, 0.95, 1e-2, weight_decay=0.3, mask=MASK), _through_updates)
    assert_leaves_agree(got, want, gradient_norm=0.0)
    got = _after(optim.SGD(0.9, nesterov=True).make(rate, infos), apply_gradients)
    assert_leaves_agree(got, _after(optax.sgd(0.1, 0.9, True), _through_updates), gradient_norm=0.0)


def test_a_decay_outside_of_its_range_is_refused():
    with raises_saying(ConfigError, "AdamW.b2 = 1.0", "below 1"):
        optim.AdamW(b2=1.0)
