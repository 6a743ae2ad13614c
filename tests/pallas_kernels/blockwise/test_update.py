"""The fused step against bitsandbytes' steps, against optax and against its formula in float64."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from pallas_kernels.blockwise import (
    ADAM_DIRECTION,
    ADAMW,
    LION,
    RULES,
    Quantized,
    codec,
    dequantize_blockwise,
    quantize_blockwise,
    update_blockwise,
)
from pallas_kernels.dispatch import KernelError
from tests.pallas_kernels.blockwise.cases import SCALARS, make, scalars_of, step
from tests.pallas_kernels.blockwise.vectors import VECTORS
from tests.truth.long import short


@pytest.mark.parametrize("flat", [True, False], ids=["flat", "tiles"])
@pytest.mark.parametrize("t", range(1, 6))
def test_steps_of_adamw_are_those_of_bitsandbytes(t, flat):
    form = dict(tile=(), flat=256) if flat else dict(tile=(256,))
    if t == 1:
        zero = jnp.zeros(8192)
        states = tuple(quantize_blockwise(zero, signed=s, tile=form["tile"] or None) for s in (True, False))
    else:
        states = tuple(
            Quantized(
                jnp.asarray(VECTORS[f"adamw8.s{t - 1}.state{k}"].reshape(-1)),
                jnp.asarray(VECTORS[f"adamw8.s{t - 1}.absmax{k}"]),
                format="dynamic",
                signed=k == 1,
                **form,
            )
            for k in (1, 2)
        )
    scalars = dict(lr=1e-2, b1=0.9, b2=0.95, eps=1e-8, weight_decay=0.1, fix1=1 - 0.9**t, fix2=1 - 0.95**t)
    w, g = (jnp.asarray(VECTORS[f"adamw8.{name}{t - 1}"].reshape(-1)) for name in "wg")
    new, states = update_blockwise(ADAMW, scalars, w, g, states)
    np.testing.assert_allclose(new, VECTORS[f"adamw8.w{t}"].reshape(-1), rtol=0, atol=1e-6)
    for k, q in zip((1, 2), states, strict=True):
        np.testing.assert_allclose(q.scales, VECTORS[f"adamw8.s{t}.absmax{k}"], rtol=1e-6)
        theirs = VECTORS[f"adamw8.s{t}.qmap{k}"][VECTORS[f"adamw8.s{t}.state{k}"].reshape(-1)]
        off = abs(codec("dynamic", k == 1).values()[np.asarray(q.codes)] - theirs)
        assert off.mean() < 1e-4 and off.max() < 2e-2


def _optax(name):
    """Return the optax transformation of a rule, and where its state has ours."""
    s = SCALARS
    adam = dict(b1=s["b1"], b2=s["b2"], eps=s["eps"])
    return {
        "adamw": lambda: optax.adamw(s["lr"], weight_decay=s["weight_decay"], **adam),
        "adam_direction": lambda: optax.chain(
            optax.scale_by_adam(**adam), optax.add_decayed_weights(s["weight_decay"])
        ),
        "lion": lambda: optax.lion(s["lr"], b1=s["b1"], b2=s["b2"], weight_decay=s["weight_decay"]),
        "momentum": lambda: optax.chain(
            optax.add_decayed_weights(s["weight_decay"]), optax.sgd(s["lr"], s["momentum"])
        ),
        "nesterov": lambda: optax.chain(
            optax.add_decayed_weights(s["weight_decay"]), optax.sgd(s["lr"], s["momentum"], nesterov=True)
        ),
        "adagrad": None,
    }[name]


@pytest.mark.parametrize("name", [n for n in RULES if _optax(n)])
def test_a_rule_in_float32_is_optaxs_for_several_steps(name):
    rule, tx = RULES[name], _optax(name)()
    random = np.random.default_rng(0)
    ours = theirs = jnp.asarray(random.normal(size=200), jnp.float32)
    states, opt = tuple(jnp.zeros(200) for _ in rule.states), tx.init(theirs)
    for t in range(1, 6):
        g = jnp.asarray(random.normal(size=200) * 10.0 ** (t - 3), jnp.float32)
        derived = rule.derive({k: jnp.float32(v) for k, v in scalars_of(rule, t).items()})
        change, states = rule.step(ours, g, states, derived)
        want, opt = tx.update(g, opt, theirs)
        np.testing.assert_allclose(change, want, rtol=2e-5, atol=1e-7)
        ours, theirs = ours + change, theirs + want


def test_adagrad_is_its_formula():
    p, g, s = np.float32([1.0, -2.0]), np.float32([0.5, 3.0]), np.float32([0.25, 0.0])
    rule = RULES["adagrad"]
    change, (new,) = rule.step(p, g, (s,), rule.derive({k: jnp.float32(v) for k, v in scalars_of(rule).items()}))
    np.testing.assert_allclose(new, s + g * g, rtol=1e-6)
    lr, eps, decay = (SCALARS[k] for k in ("lr", "eps", "weight_decay"))
    np.testing.assert_allclose(change, -lr * (g / (np.sqrt(s + g * g) + eps) + decay * p), rtol=1e-5)


@pytest.mark.parametrize(
    "name, format", short(4, [*((name, "dynamic") for name in RULES), ("adamw", "linear"), ("adamw", "fp8")])
)
def test_the_step_is_dequantise_update_quantise(name, format):
    rule, (p, g, states) = RULES[name], make(RULES[name], (8, 256), (2, 128), format=format)
    got, new = step(rule, p, g, states)
    derived = {k: np.float64(v) for k, v in rule.derive(scalars_of(rule)).items()}
    with jax.enable_x64(True):
        old = tuple(jnp.asarray(np.asarray(dequantize_blockwise(q), np.float64)) for q in states)
        change, fresh = rule.step(jnp.asarray(np.float64(p)), jnp.asarray(np.float64(g)), old, derived)
        change, fresh = np.asarray(change), [np.asarray(x) for x in fresh]
    np.testing.assert_allclose(got, np.float64(p) + change, rtol=1e-5, atol=1e-6)
    for q, x in zip(new, fresh, strict=True):
        form = dict(tile=(2, 128), signed=q.signed, format=format, moment=True)
        want = quantize_blockwise(jnp.asarray(x, jnp.float32), **form)
        np.testing.assert_allclose(q.scales, want.scales, rtol=1e-5)
        code = codec(format, q.signed)
        off = np.asarray(code.order(q.codes)) - np.asarray(code.order(want.codes))
        assert abs(off).max() <= 1 and np.count_nonzero(off) <= 4  # ties


@pytest.mark.parametrize(
    "name, dtype", short(4, [*((name, "float32") for name in RULES), ("adamw", "bfloat16"), ("adamw", "float16")])
)
def test_the_update_added_to_the_parameter_is_the_new_parameter(name, dtype):
    rule, (p, g, states) = RULES[name], make(RULES[name], (4, 256), (2, 128), dtype)
    new, after = step(rule, p, g, states)
    change, again = step(rule, p, g, states, apply=False)
    assert new.dtype == p.dtype and change.dtype == jnp.float32
    want = (p.astype(jnp.float32) + change).astype(p.dtype)
    np.testing.assert_allclose(np.float32(new), np.float32(want), rtol=float(jnp.finfo(p.dtype).eps))
    jax.tree.map(np.testing.assert_array_equal, after, again)


def test_a_block_without_gradients_moves_by_decay_alone_and_has_no_nan():
    p, _, states = make(ADAMW, (4, 256), (2, 128), zero=True)
    new, after = step(ADAMW, p, jnp.zeros_like(p), states)
    np.testing.assert_allclose(new, p * (1 - SCALARS["lr"] * SCALARS["weight_decay"]), rtol=1e-6)
    assert all(np.all(dequantize_blockwise(q) == 0) for q in after)


def test_cutting_the_parameter_along_its_tiles_changes_no_bit():
    p, g, states = make(ADAMW, (8, 512), (2, 128))
    whole, after = step(ADAMW, p, g, states)
    for rows, columns in ((slice(2, 8), slice(128, 256)),):
        few = slice(rows.start // 2, rows.stop // 2), slice(columns.start // 128, columns.stop // 128)
        cut = tuple(
            Quantized(q.codes[rows, columns], q.scales[few], q.tile, q.format, q.signed) for q in states
        )  # fmt: skip
        part, parts = step(ADAMW, p[rows, columns], g[rows, columns], cut)
        np.testing.assert_array_equal(part, whole[rows, columns])
        for a, b in zip(parts, after, strict=True):
            np.testing.assert_array_equal(a.codes, b.codes[rows, columns])
            np.testing.assert_array_equal(a.scales, b.scales[few])


def test_rules_are_found_by_their_names():
    assert all(RULES[name].name == name for name in RULES) and RULES["lion"] is LION
    assert "lr" not in ADAM_DIRECTION.scalars


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(param=lambda p: p.astype(jnp.int32)), "a parameter is float32, bfloat16 or float16, not int32"),
        (dict(grad=lambda g: g.astype(jnp.int32)), "a gradient is a float, not int32; cast it to float32"),
        (dict(grad=lambda g: g[:2]), r"the gradient's shape \(2, 256\) is not the parameter's, \(4, 256\)"),
        (dict(states=lambda s: s[:1]), "adamw has 2 states, but the argument states has 1"),
        (dict(states=lambda s: (s[1], s[0])), "state 0 of adamw must be quantised with signed=True"),
        (dict(states=lambda s: (s[0], s[0])), "state 1 of adamw must be quantised with signed=False"),
        (
            dict(
                states=lambda s: tuple(
                    quantize_blockwise(jnp.zeros((2, 256)), tile=(2, 128), signed=q.signed) for q in s
                )
            ),
            r"state 0's shape \(2, 256\) is not the parameter's",
        ),
        (
            dict(states=lambda s: tuple(Quantized(q.codes, q.scales, (3, 128), q.format, q.signed) for q in s)),
            r"the tile \(3, 128\) does not divide state 0",
        ),
        (
            dict(states=lambda s: tuple(Quantized(q.codes, q.scales[:1], q.tile, q.format, q.signed) for q in s)),
            "state 0's scales are of shape",
        ),
        (
            dict(states=lambda s: tuple(Quantized(q.codes, q.scales, q.tile, "dinamic", q.signed) for q in s)),
            "did you mean 'dynamic'",
        ),
        (dict(scalars=lambda s: s | {"momentum": 0.9}), "adamw takes the scalars lr, b1, .*; momentum do not match"),
        (dict(implementation="xlo"), "blockwise has no implementation 'xlo'.*did you mean 'xla'"),
        (dict(implementation="mosaic_tpu"), "implementation='mosaic_tpu' is not supported here: it is for tpu"),
        (dict(implementation="mosaic_gpu"), "implementation='mosaic_gpu' is not supported here: it is for cuda"),
    ],
    ids=lambda v: v[:40] if isinstance(v, str) else "-".join(v),
)
def test_arguments_that_do_not_fit_raise_one_sentence(change, message):
    p, g, states = make(ADAMW, (4, 256), (2, 128))
    arguments = dict(scalars=scalars_of(ADAMW), param=p, grad=g, states=states)
    for key, f in change.items():
        arguments[key] = f(arguments[key]) if callable(f) else f
    with pytest.raises(KernelError, match=message) as caught:
        update_blockwise(ADAMW, **arguments)
    assert "\n" not in str(caught.value)
