"""8-bit optimizers: against optax, on every layout, stacked and unrolled, composed, converted, and refused."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxscale as js
from jaxscale import optim
from jaxscale.errors import ConfigError, LayoutError
from jaxscale.layout import Layout, TensorInfo, shardings_of
from jaxscale.optim import EightBit, convert_state, is_quantized, state_shardings
from pallas_kernels.blockwise import dequantize_blockwise
from pallas_kernels.dispatch import KernelError
from tests.truth.compare import assert_leaves_agree
from tests.truth.errors import raises_saying
from tests.truth.long import short

ALL_32 = EightBit(min_size=10**9)
RATE = optax.linear_schedule(0.1, 0.01, 8)

INFOS = {
    "embed": {"weight": TensorInfo("embed/weight", (64, 128), jnp.float32, ("vocab", "embed"))},
    "mlp": {"kernel": TensorInfo("mlp/kernel", (2, 128, 512), jnp.float32, ("layers", "embed", "mlp"))},
    "attn": {"kernel": TensorInfo("attn/kernel", (2, 128, 4, 32), jnp.float32,
                                  ("layers", "embed", "heads", "head_dim"))},
    "norm": {"scale": TensorInfo("norm/scale", (2, 128), jnp.float32, ("layers", "norm"))},
}  # fmt: skip


def _fill(infos, seed, scale=1.0):
    """Normal arrays whose magnitudes spread as widely as those of gradients."""
    random = np.random.default_rng(seed)
    draw = lambda i: random.normal(size=i.shape) * 10.0 ** random.uniform(-3, 0, i.shape)  # noqa: E731
    return jax.tree.map(lambda i: (draw(i) * scale).astype(np.float32), infos)


PARAMS = _fill(INFOS, 0)


@functools.cache
def _gradients(step):
    """Gradients of `PARAMS` at a step, not to be written to."""
    return _fill(INFOS, step)


MEMBERS = {
    "adamw": (optim.adamw_8bit, lambda: optax.adamw(RATE, 0.9, 0.95, weight_decay=0.1)),
    "lion": (functools.partial(optim.lion_8bit, weight_decay=0.1), lambda: optax.lion(RATE, weight_decay=0.1)),
    "sgdm": (optim.sgdm_8bit, lambda: optax.sgd(RATE, 0.9)),
    "nesterov": (functools.partial(optim.sgdm_8bit, nesterov=True), lambda: optax.sgd(RATE, 0.9, nesterov=True)),
    "adagrad": (optim.adagrad_8bit, lambda: optax.adagrad(RATE, eps=1e-7)),
    "lamb": (functools.partial(optim.lamb_8bit, weight_decay=0.01), lambda: optax.lamb(RATE, weight_decay=0.01)),
}  # fmt: skip
"""Each 8-bit optimizer, and optax's float32 optimizer with the same rule."""


def _steps(tx, params, *, steps=3, infos=INFOS, fused=True, layout=None):
    """Parameters and state, in NumPy, after a few steps from the initial state."""

    def step(params, state, grads):
        if fused:
            return optim.apply_gradients(tx, grads, state, params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    where = None if layout is None else (shardings_of(infos, layout), state_shardings(tx, infos, layout))
    state = jax.jit(tx.init, out_shardings=where and where[1])(params)
    params = jax.tree.map(jnp.asarray, params) if where is None else jax.device_put(params, where[0])
    step = jax.jit(step, out_shardings=where)
    for i in range(steps):
        params, state = step(params, state, _gradients(i + 1) if infos is INFOS else _fill(infos, i + 1))
    return jax.tree.map(np.asarray, (params, state))


@functools.cache
def _whole(name):
    """Parameters and state of a member after a few steps on one device."""
    return _steps(MEMBERS[name][0](RATE, infos=INFOS), PARAMS)


@pytest.mark.parametrize("name", MEMBERS)
def test_with_all_state_in_32_bits_it_is_optaxs(name):
    ours, theirs = MEMBERS[name]
    single = {k: v for k, v in INFOS.items() if k == "embed"}  # optax knows no layers
    params = _fill(single, 0)
    got, _ = _steps(ours(RATE, storage=ALL_32), params, infos=single)
    want, _ = _steps(theirs(), params, infos=single, fused=False)
    assert_leaves_agree(got, want, gradient_norm=0.0)


@pytest.mark.parametrize("name", MEMBERS)
def test_8_bits_stay_close_to_32(name):
    ours, _ = MEMBERS[name]
    eight, state = _whole(name)
    full, _ = _steps(ours(RATE, infos=INFOS, storage=ALL_32), PARAMS)
    assert any(is_quantized(q) for q in jax.tree.leaves(state, is_leaf=is_quantized))
    for key in ("mlp", "attn"):
        a, b, before = eight[key]["kernel"], full[key]["kernel"], PARAMS[key]["kernel"]
        moved = np.abs(b - before).mean()
        assert 0 < np.abs(a - b).mean() < 0.25 * moved, key  # a wrong rule or scale is off by its whole size


@pytest.mark.parametrize("name", short(3, MEMBERS))
def test_update_then_apply_is_update_and_apply(name):
    tx = MEMBERS[name][0](RATE, infos=INFOS)
    (fused, state), (split, other) = _whole(name), _steps(tx, PARAMS, fused=False)
    assert_leaves_agree(fused, split, gradient_norm=0.0)
    same = [np.array_equal(a, b) for a, b in zip(*map(jax.tree.leaves, (state, other)), strict=True)]
    assert all(same)


LAYOUTS = [
    Layout("data=8", "zero1"),
    Layout("data=2,fsdp=4", "zero2"),
    Layout("fsdp=8"),
    Layout("tensor=4,data=2"),
    Layout("data=2,fsdp=2,tensor=2"),
]


@pytest.mark.parametrize(
    ("name", "layout"),
    short(
        3,
        [
            pytest.param(name, layout, marks=pytest.mark.long if name == "lamb" and layout in LAYOUTS[1:4] else ())
            for name in ("adamw", "lamb")
            for layout in LAYOUTS
        ],
    ),
    ids=str,
)
def test_state_is_identical_on_every_layout(name, layout):
    with layout:
        params, state = _steps(MEMBERS[name][0](RATE, infos=INFOS), PARAMS, layout=layout)
    want_params, want = _whole(name)
    pairs = zip(*map(_quantized, (state, want)), strict=True)
    same = [np.array_equal(a.codes, b.codes) and np.array_equal(a.scales, b.scales) for a, b in pairs]
    assert same == [True] * 4
    assert_leaves_agree(params, want_params, gradient_norm=0.0)


@pytest.mark.parametrize("name", short(3, MEMBERS))
def test_stacked_layers_equal_unrolled_ones(name):
    make = MEMBERS[name][0]
    stacked, state = _whole(name)
    split = lambda tree, i: {k: jax.tree.map(lambda x: x[i], tree[k]) for k in ("mlp", "attn", "norm")}  # noqa: E731
    layers = {k: INFOS[k] for k in ("mlp", "attn", "norm")}
    infos = jax.tree.map(lambda i: dataclasses.replace(i, shape=i.shape[1:], axes=i.axes[1:]), layers)
    for layer in (0, 1):
        tx = make(RATE, infos=infos)
        params, alone = jax.tree.map(jnp.asarray, split(PARAMS, layer)), None
        alone = tx.init(params)
        step = jax.jit(functools.partial(optim.apply_gradients, tx))
        for i in range(3):
            params, alone = step(split(_gradients(i + 1), layer), alone, params)
        assert_leaves_agree(params, split(stacked, layer), gradient_norm=0.0)
        for key in ("mlp", "attn"):
            assert np.array_equal(alone[1][key]["kernel"].codes, state[1][key]["kernel"].codes[layer])


@functools.cache
def _plain():
    return _steps(optim.adamw_8bit(0.1), PARAMS, fused=False)[0]


COMPOSED = {
    "chain": lambda: optax.chain(optax.scale(1.0), optim.adamw_8bit(0.1)),
    "our chain": lambda: optim.chain(optax.scale(1.0), optim.adamw_8bit(0.1)),
    "masked": lambda: optax.masked(optim.adamw_8bit(0.1), jax.tree.map(lambda _: True, PARAMS)),
    "multi_transform": lambda: optax.multi_transform(
        {"a": optim.adamw_8bit(0.1), "b": optim.adamw_8bit(0.1)},
        {"embed": "a", "mlp": "b", "attn": "a", "norm": "b"},
    ),
    "inject_hyperparams": lambda: optax.inject_hyperparams(optim.adamw_8bit)(learning_rate=0.1),
}


@pytest.mark.parametrize("wrapper", short(2, COMPOSED))
def test_composed_with_optax_it_does_the_same(wrapper):
    got, _ = _steps(COMPOSED[wrapper](), PARAMS, fused=False)
    assert_leaves_agree(got, _plain(), gradient_norm=0.0)


@pytest.mark.long
def test_an_injected_learning_rate_can_be_changed_while_training():
    tx = optax.inject_hyperparams(optim.adamw_8bit)(learning_rate=0.1, weight_decay=0.0)
    state = tx.init(PARAMS)
    state.hyperparams["learning_rate"] = jnp.float32(0.0)
    updates, _ = tx.update(_fill(INFOS, 1), state, PARAMS)
    assert all(not np.any(u) for u in jax.tree.leaves(updates))


def test_masked_leaves_have_no_state():
    mask = {**jax.tree.map(lambda _: False, PARAMS), "mlp": {"kernel": True}}
    state = optax.masked(optim.adamw_8bit(0.1), mask).init(PARAMS)
    assert len([q for q in jax.tree.leaves(state, is_leaf=is_quantized) if is_quantized(q)]) == 2


def test_shardings_are_found_for_a_composed_optimizer():
    layout = LAYOUTS[-1]
    tx = optax.chain(optax.clip_by_global_norm(1.0), optim.adamw_8bit(0.1, infos=INFOS))
    state = state_shardings(tx, INFOS, layout)
    mu = state[1].mu["mlp"]["kernel"]
    assert mu.codes.spec == mu.scales.spec == jax.P(None, "fsdp", "tensor")


WRAPPED = {
    "masked": lambda tx: optax.masked(tx, {"embed": False, "mlp": True, "attn": True, "norm": False}),
    "multi_transform": lambda tx: optax.multi_transform(
        {"a": tx, "b": optax.sgd(0.1)}, {"embed": "b", "mlp": "a", "attn": "a", "norm": "b"}
    ),
}


@pytest.mark.parametrize("wrapper", WRAPPED)
def test_a_wrapped_optimizer_is_laid_out_and_trains_like_one_that_is_not(wrapper):
    masks = optim.decay_mask(INFOS)
    tx = WRAPPED[wrapper](optim.adamw_8bit(RATE, infos=INFOS, mask=masks))
    layout = LAYOUTS[-1]
    with layout:
        got, state = _steps(tx, PARAMS, fused=False, layout=layout)
    want, _ = _steps(optim.adamw_8bit(RATE, infos=INFOS, mask=masks), PARAMS)
    assert len(_quantized(state)) == 4
    assert_leaves_agree({k: got[k] for k in ("mlp", "attn")}, {k: want[k] for k in ("mlp", "attn")}, gradient_norm=0.0)


MASKS = {
    "a bool for each": jax.tree.map(lambda _: False, INFOS) | {"mlp": {"kernel": True}},
    "a bool for a subtree": {"embed": False, "mlp": True, "attn": False, "norm": False},
    "none for what stays": {"embed": None, "mlp": True, "attn": None, "norm": None},
    "a function": lambda params: {k: k == "mlp" for k in params},
}


@pytest.mark.parametrize("mask", MASKS)
def test_what_decays_can_be_said_in_any_of_optaxs_ways(mask):
    tx = optim.adamw_8bit(0.1, weight_decay=1.0, infos=INFOS, mask=MASKS[mask])
    zeros = jax.tree.map(np.zeros_like, PARAMS)
    updates, _ = jax.jit(tx.update)(zeros, tx.init(PARAMS), PARAMS)
    assert {k: bool(np.any(u)) for k, t in updates.items() for u in t.values()} == {
        "embed": False, "mlp": True, "attn": False, "norm": False
    }  # fmt: skip


def test_a_mask_that_says_nothing_of_a_parameter_is_refused():
    tx = optim.adamw_8bit(0.1, infos=INFOS, mask={"mlp": True})
    with raises_saying(ConfigError, "weight-decay mask has no entry for 'attn/kernel'"):
        tx.update(PARAMS, tx.init(PARAMS), PARAMS)


def test_both_forms_agree_for_bfloat16_parameters():
    half = jax.tree.map(lambda p: jnp.asarray(p, jnp.bfloat16), PARAMS)
    tx = optim.adamw_8bit(RATE)
    fused, split = _steps(tx, half)[0], _steps(tx, half, fused=False)[0]
    assert all(np.array_equal(a, b) for a, b in zip(*map(jax.tree.leaves, (fused, split)), strict=True))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_gradient_that_is_not_finite_shows_in_the_state(bad):
    grads = _fill(INFOS, 1)
    grads["mlp"]["kernel"][1, 3, 5] = bad
    tx = optim.adamw_8bit(0.1, infos=INFOS)
    _, state = jax.jit(tx.update)(grads, tx.init(PARAMS), PARAMS)
    for m in (state.mu, state.nu):
        values = np.asarray(dequantize_blockwise(m["mlp"]["kernel"]))
        assert not np.isfinite(values[1, 3, :128]).any() and np.isfinite(np.delete(values[1], 3, 0)).all()


def test_state_is_two_bytes_a_parameter_and_a_scale_a_block():
    tx = optim.adamw_8bit(0.1, infos=INFOS)
    state = tx.init(PARAMS)
    size = INFOS["mlp"]["kernel"].size
    held = sum(x.nbytes for m in (state.mu, state.nu) for x in jax.tree.leaves(m["mlp"]))
    assert held == 2 * size + 2 * 4 * size // 128
    assert held / size <= 2.07


def test_embeddings_and_small_tensors_keep_32_bits_and_say_so():
    tx = optim.adamw_8bit(0.1, infos=INFOS)
    assert tx.notes == (
        "embed/weight keeps 32-bit optimizer state: 'embed' is in EightBit.keep",
        "norm/scale keeps 32-bit optimizer state: 128 elements per layer, below EightBit.min_size = 4096",
    )
    mu = tx.init(PARAMS).mu
    assert {k: is_quantized(v) for k, t in mu.items() for v in t.values()} == {
        "embed": False, "mlp": True, "attn": True, "norm": False
    }  # fmt: skip


def test_the_rule_can_be_changed():
    tx = optim.adamw_8bit(0.1, infos=INFOS, storage=EightBit(keep=("mlp",), min_size=0))
    mu = tx.init(PARAMS).mu
    assert is_quantized(mu["embed"]["weight"]) and is_quantized(mu["norm"]["scale"])
    assert not is_quantized(mu["mlp"]["kernel"])


def test_the_size_that_counts_is_that_of_a_layer():
    info = TensorInfo("x", (64, 64, 63), jnp.float32, ("layers", "embed", "mlp"))
    assert "4032 elements per layer" in EightBit().why_32bit(info)


@pytest.mark.parametrize("format", ["dynamic", "linear", "fp8", "fp8_expanded"])
def test_every_format_trains(format):
    _, state = _steps(optim.adamw_8bit(0.1, infos=INFOS, storage=EightBit(format=format)), PARAMS)
    exact = _steps(optim.adamw_8bit(0.1, infos=INFOS, storage=ALL_32), PARAMS)[1]
    q = state[1]["mlp"]["kernel"]
    assert q.format == format
    error = np.abs(dequantize_blockwise(jax.tree.map(jnp.asarray, q)) - exact[1]["mlp"]["kernel"])
    assert error.max() < 0.1 * np.abs(exact[1]["mlp"]["kernel"]).max()


def test_a_state_converts_to_32_bits_and_back():
    tx, full = optim.adamw_8bit(0.1, infos=INFOS), optim.adamw(0.1)
    _, state = _steps(tx, PARAMS)
    wide = convert_state(state, jax.eval_shape(full.init, PARAMS))
    assert jax.tree.structure(wide) == jax.tree.structure(full.init(PARAMS))
    back = convert_state(wide, jax.eval_shape(tx.init, PARAMS))
    assert jax.tree.structure(back) == jax.tree.structure(state)
    for q, exact in zip(_quantized(back.mu), (wide.mu["attn"]["kernel"], wide.mu["mlp"]["kernel"]), strict=True):
        # -1 is not in the map, its neighbour -0.993 is: a block's scale may shrink by that much, and codes with it
        assert np.abs(dequantize_blockwise(q) - exact).max() < 0.02 * np.abs(exact).max()


def _quantized(state):
    return [q for q in jax.tree.leaves(state, is_leaf=is_quantized) if is_quantized(q)]


def test_another_optimizers_state_does_not_convert():
    state = optim.adamw_8bit(0.1).init(PARAMS)
    with raises_saying(ConfigError, "only the state of the same optimizer converts"):
        convert_state(state, jax.eval_shape(optim.lion_8bit(0.1).init, PARAMS))


def test_a_tile_that_a_layout_would_cut_names_one_that_fits():
    info = {"w": TensorInfo("mlp/up", (128, 384), jnp.float32, ("embed", "mlp"))}
    words = ("mlp/up", "tiles of (1, 128)", "a device holds (128, 192)", "storage=EightBit(width=64)")
    with raises_saying(LayoutError, *words):
        state_shardings(optim.adamw_8bit(0.1, infos=info), info, Layout("tensor=2"))
    fits = optim.adamw_8bit(0.1, infos=info, storage=EightBit(width=64))
    assert state_shardings(fits, info, Layout("tensor=2")).mu["w"].scales.spec == jax.P(None, "tensor")


def test_a_tile_joins_few_rows_where_the_layout_leaves_few():
    info = {"w": TensorInfo("attn/kernel", (64, 4, 16), jnp.float32, ("embed", "heads", "head_dim"))}
    tx = optim.adamw_8bit(0.1, infos=info)
    assert tx.init(jax.tree.map(lambda i: jnp.zeros(i.shape), info)).mu["w"].tile == (2, 1, 16)
    assert state_shardings(tx, info, Layout("fsdp=8")).mu["w"].scales.spec == jax.P("fsdp", None, None)


def test_a_tensor_that_no_tile_fits_can_be_kept():
    odd = {"w": TensorInfo("head/kernel", (3, 1000, 8), jnp.float32, (None, None, "mlp"))}
    with raises_saying(LayoutError, "a device holds (3, 1000, 1)", "adding 'head' to EightBit.keep"):
        state_shardings(optim.adamw_8bit(0.1, infos=odd), odd, Layout("tensor=8"))


def test_integer_gradients_are_refused():
    grads = jax.tree.map(lambda p: p.astype(np.int32), PARAMS)
    tx = optim.adamw_8bit(0.1)
    with raises_saying(ConfigError, "the gradient of attn/kernel is int32", "cast it to float32"):
        tx.update(grads, tx.init(PARAMS), PARAMS)


def test_a_gradient_of_another_shape_is_named():
    grads = PARAMS | {"mlp": {"kernel": np.ones((2, 512, 128), np.float32)}}
    tx = optim.adamw_8bit(0.1)
    with raises_saying(ConfigError, "the gradient of mlp/kernel has shape (2, 512, 128)", "(2, 128, 512)"):
        tx.update(grads, tx.init(PARAMS), PARAMS)


def test_a_kernel_that_cannot_run_here_is_refused_by_name():
    tx = optim.adamw_8bit(0.1, implementation="mosaic_tpu")
    with pytest.raises(KernelError, match="implementation='mosaic_tpu' is not supported here"):
        tx.update(_fill(INFOS, 1), tx.init(PARAMS), PARAMS)


@pytest.mark.parametrize(
    "setting, words",
    [
        (dict(block_size=100), ("EightBit.block_size = 100", "power of two")),
        (dict(format="dinamic"), ("EightBit.format = 'dinamic'", "dynamic")),
        (dict(keep="embed"), ("EightBit.keep = 'embed'", "('embed',)")),
    ],
)
def test_a_storage_that_does_not_exist_is_refused(setting, words):
    with raises_saying(ConfigError, *words):
        EightBit(**setting)


def test_other_parameters_than_those_it_was_made_for_are_refused():
    with raises_saying(ConfigError, "made for other parameters", "'other'"):
        optim.adamw_8bit(0.1, infos=INFOS).init({"other": jnp.ones((64, 64))})


def test_config_objects_make_what_the_functions_do():
    schedule = js.optim.Constant().make(0.1, 10)
    for made in (optim.AdamW8bit(), optim.LAMB8bit(), optim.Lion8bit(), optim.SGDM8bit()):
        state = made.make(schedule, INFOS).init(PARAMS)
        assert is_quantized(state[1]["mlp"]["kernel"])
