"""8-bit optimizers on sparse and unevenly scaled gradients, against 32 bits and bitsandbytes' flat blocks."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxscale import optim
from jaxscale.layout import TensorInfo
from jaxscale.optim import EightBit, convert_state, is_quantized
from pallas_kernels.blockwise import codec, quantize_blockwise
from tests.truth.long import short

STEPS, SHAPE, LR = 50, (4, 384), 1e-2
KINDS = ("dense", "sparse", "sparse rows", "rows", "columns", "heavy tails", "one outlier")
INFOS = {"w": TensorInfo("w", (len(KINDS), *SHAPE), jnp.float32, ("layers", "embed", "mlp"))}
"""The kinds of gradients are layers of one parameter, so that no tile and no norm spans two of them."""
EIGHT = EightBit(min_size=0)


def _gradients():
    """Return gradients, (steps, kinds, rows, columns) float32."""
    random = np.random.default_rng(0)
    draw = lambda: random.normal(size=(STEPS, *SHAPE)) * 1e-3  # noqa: E731
    outlier = draw()
    outlier[:, 3, 5] *= 1e4
    kinds = {
        "dense": draw(),
        "sparse": draw() * (random.uniform(size=(STEPS, *SHAPE)) < 0.05),
        "sparse rows": draw() * (random.uniform(size=(STEPS, SHAPE[0], 1)) < 0.05),
        "rows": draw() * 10.0 ** random.uniform(-4, 0, (SHAPE[0], 1)),
        "columns": draw() * 10.0 ** random.uniform(-4, 0, SHAPE[1]),
        "heavy tails": random.standard_cauchy((STEPS, *SHAPE)) * 1e-3,
        "one outlier": outlier,
    }
    return np.stack([kinds[k] for k in KINDS], axis=1).astype(np.float32)


GRADS = _gradients()
W0 = np.random.default_rng(1).normal(size=GRADS.shape[1:]).astype(np.float32)


def _steps(tx):
    """Return (largest |update| of each kind, weights, state) after all gradients."""

    @jax.jit
    def run(params):
        def step(carry, grads):
            updates, state = tx.update({"w": grads}, carry[1], carry[0])
            new = jax.tree.map(jnp.add, carry[0], updates)
            return (new, state), jnp.max(jnp.abs(updates["w"]), axis=(1, 2))

        (params, state), largest = jax.lax.scan(step, (params, tx.init(params)), GRADS)
        return jnp.max(largest, axis=0), params["w"], state

    largest, w, state = run({"w": jnp.asarray(W0)})
    return np.float64(largest), np.float64(w), state


def _flat(x, signed):
    """Quantise and dequantise in bitsandbytes' blocks of 256 numbers of the flat tensor (Dettmers et al. 2022).

    Each number becomes the nearest value of the dynamic map times the block's absmax; as in its CPU kernel, a positive
    second moment does not become 0.
    """
    values = codec("dynamic", signed).values()
    blocks = x.reshape(len(KINDS), -1, 256)
    scale = np.max(np.abs(blocks), axis=-1, keepdims=True)
    unit = blocks / np.where(scale > 0, scale, 1)
    places = np.searchsorted((values[1:] + values[:-1]) / 2, unit)
    places = places if signed else np.where(unit > 0, np.maximum(places, 1), places)
    return (values[places] * scale).reshape(x.shape)


def _adam(state, g, t, b2=0.95, eps=1e-8):
    m, v = 0.9 * state[0] + 0.1 * g, b2 * state[1] + (1 - b2) * g * g
    return m / (1 - 0.9**t) / (np.sqrt(v / (1 - b2**t)) + eps), (m, v)


def _lamb(w, u):
    norm = lambda x: np.sqrt(np.sum(x * x, axis=(1, 2), keepdims=True))  # noqa: E731
    return norm(w) / np.where(norm(u) > 0, norm(u), 1) * u


def _lion(state, g, t):
    return np.sign(0.9 * state[0] + 0.1 * g), (0.99 * state[0] + 0.01 * g,)


def _momentum(state, g, t):
    m = 0.9 * state[0] + g
    return m, (m,)


def _nesterov(state, g, t):
    m = 0.9 * state[0] + g
    return g + 0.9 * m, (m,)


def _adagrad(state, g, t):
    total = state[0] + g * g
    return g / (np.sqrt(total) + 1e-7), (total,)


MEMBERS = {
    "adamw": (functools.partial(optim.adamw_8bit, weight_decay=0.0), _adam, (True, False)),
    "adamw, b2 = 0.999": (
        functools.partial(optim.adamw_8bit, b2=0.999, weight_decay=0.0),
        functools.partial(_adam, b2=0.999),
        (True, False),
    ),
    "lamb": (optim.lamb_8bit, functools.partial(_adam, b2=0.999, eps=1e-6), (True, False)),
    "lion": (functools.partial(optim.lion_8bit, weight_decay=0.0), _lion, (True,)),
    "sgdm": (optim.sgdm_8bit, _momentum, (True,)),
    "nesterov": (functools.partial(optim.sgdm_8bit, nesterov=True), _nesterov, (True,)),
    "adagrad": (functools.partial(optim.adagrad_8bit, initial_accumulator=0.0), _adagrad, (False,)),
}
"""8-bit optimizer; its rule in NumPy, (state, gradient, step) -> (direction, state); which states are signed."""


def _in_numpy(name, keep):
    """Return (largest |update| of each kind, weights) after all gradients, in float64 but for states after `keep`."""
    _, rule, signs = MEMBERS[name]
    w, state, largest = np.float64(W0), tuple(np.zeros(W0.shape) for _ in signs), []
    for t, g in enumerate(np.float64(GRADS), 1):
        u, state = rule(state, g, t)
        u = LR * (_lamb(w, u) if name == "lamb" else u)
        w, state = w - u, tuple(keep(x, signed) for x, signed in zip(state, signs, strict=True))
        largest.append(np.max(np.abs(u), axis=(1, 2)))
    return np.max(largest, axis=0), w


@pytest.mark.parametrize("name", short(3, MEMBERS))
def test_no_step_is_larger_and_weights_stay_as_near_as_bitsandbytes(name):
    tx = MEMBERS[name][0](LR, infos=INFOS, storage=EIGHT)
    largest, ours, state = _steps(tx)
    assert is_quantized(state[1]["w"])
    (exact_largest, exact), (_, theirs) = _in_numpy(name, lambda x, _: x), _in_numpy(name, _flat)
    for i, kind in enumerate(KINDS):
        ratio = largest[i] / exact_largest[i]
        assert ratio < 1.2, f"{kind}: the largest update is {ratio:.2f} times that without rounding"
        a, b = (np.sqrt(np.mean((w[i] - exact[i]) ** 2)) for w in (ours, theirs))
        assert a <= 2 * b + 1e-6, f"{kind}: weights are off by {a:.2e}, bitsandbytes' by {b:.2e}"


def test_a_second_moment_that_an_older_checkpoint_sent_to_zero_takes_no_large_step():
    tx = optim.adamw_8bit(1.0, weight_decay=0.0, infos=INFOS, storage=EIGHT)

    @jax.jit
    def largest():
        params = {"w": jnp.zeros(W0.shape)}
        m = jnp.full(W0.shape, 1e-4).at[..., ::128].set(1.0)
        old = functools.partial(quantize_blockwise, tile=(1, 2, 128))
        like = tx.init(params)
        state = like._replace(count=jnp.int32(20), mu={"w": old(m)}, nu={"w": old(m * m, signed=False)})
        updates, _ = tx.update(jax.tree.map(jnp.zeros_like, params), convert_state(state, like), params)
        lost = (state.nu["w"].codes == 0) & (state.mu["w"].codes != codec("dynamic", True).encode(jnp.zeros(())))
        return jnp.max(jnp.abs(updates["w"])), jnp.any(lost)

    step, lost = largest()
    assert lost and step < 2
