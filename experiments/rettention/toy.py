"""A small diffusion Transformer denoises with sparse attention: plain, with a residual, rescaled, and with both.

python experiments/rettention/toy.py        # one minute of one core; writes results.json
"""

from __future__ import annotations

import datetime
import json
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxscale.nn.rettention import SoftmaxHistory, dense_attention, neighbours, sparse_attention

HERE = pathlib.Path(__file__).parent
SEEDS, STEPS, BATCH = 3, 600, 32
TOKENS, PATCH, WIDTH, HEADS, DEPTH = 64, 4, 32, 2, 2
DENOISING, DENSE_EVERY, SAMPLES = 20, 5, 16
WINDOWS = (2, 4, 8, 16)
METHODS = {"plain": (0.0, 0.0), "rescaled": (1.0, 0.0), "residual": (0.0, 1.0), "both": (1.0, 1.0)}


def images(key: jax.Array, count: int) -> jax.Array:
    """Images of two blobs, 16 x 16, as 64 tokens of 2 x 2 pixels: (count, 64, 4), from -1 to 1."""
    at, wide = jax.random.split(key)
    centre = jax.random.uniform(at, (count, 2, 2), minval=2, maxval=14)[:, :, :, None, None]
    scale = jax.random.uniform(wide, (count, 2, 1, 1), minval=1.0, maxval=2.5)
    grid = jnp.stack(jnp.meshgrid(jnp.arange(16.0), jnp.arange(16.0), indexing="ij"))
    far = jnp.sum((grid - centre) ** 2, axis=2)
    pixels = 2 * jnp.max(jnp.exp(-far / (2 * scale**2)), axis=1) - 1
    return pixels.reshape(count, 8, 2, 8, 2).transpose(0, 1, 3, 2, 4).reshape(count, TOKENS, PATCH)


def initial(key: jax.Array) -> dict[str, Any]:
    """Parameters: matrices of a block with adaptive norms, for each layer."""
    keys = iter(jax.random.split(key, 4 + 6 * DEPTH))

    def matrix(*shape: int, scale: float = 1.0) -> jax.Array:
        return scale * jax.random.normal(next(keys), shape) / np.sqrt(shape[0])

    return {
        "in": matrix(PATCH, WIDTH),
        "place": 0.5 * jax.random.normal(next(keys), (TOKENS, WIDTH)),
        "time": matrix(32, WIDTH),
        "out": matrix(WIDTH, PATCH, scale=0.1),
        "layers": [
            {
                "qkv": matrix(WIDTH, 3 * WIDTH),
                "mixed": matrix(WIDTH, WIDTH, scale=0.5),
                "up": matrix(WIDTH, 4 * WIDTH),
                "down": matrix(4 * WIDTH, WIDTH, scale=0.5),
                "modulation": matrix(WIDTH, 4 * WIDTH, scale=0.1),
            }
            for _ in range(DEPTH)
        ],
    }


def norm(x: jax.Array) -> jax.Array:
    """Layer norm without parameters."""
    return (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-6)


def predict(params: dict[str, Any], x: jax.Array, time: jax.Array, attend: Any) -> jax.Array:
    """The noise in x (b, tokens, patch) at times (b,) from 0 to 1; `attend(layer, q, k, v)` mixes the tokens."""
    angles = time[:, None] * 2.0 ** jnp.arange(16)
    embedded = jax.nn.silu(jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], -1) @ params["time"])
    h = x @ params["in"] + params["place"]
    for i, layer in enumerate(params["layers"]):
        shift, scale, shift2, scale2 = jnp.split((embedded @ layer["modulation"])[:, None], 4, -1)
        q, k, v = jnp.split((norm(h) * (1 + scale) + shift) @ layer["qkv"], 3, -1)
        q, k, v = (y.reshape(*y.shape[:2], HEADS, -1) for y in (q, k, v))
        h = h + attend(i, q, k, v).reshape(h.shape) @ layer["mixed"]
        h = h + jax.nn.gelu((norm(h) * (1 + scale2) + shift2) @ layer["up"]) @ layer["down"]
    return norm(h) @ params["out"]


def signal(time: jax.Array) -> jax.Array:
    """The square of the image's factor at a time (cosine schedule)."""
    return jnp.clip(jnp.cos(time * jnp.pi / 2) ** 2, 1e-4, 1 - 1e-4)


def train(seed: jax.Array) -> tuple[dict[str, Any], jax.Array]:
    """Train a model; return its parameters and the mean loss of the last steps."""
    columns = neighbours(TOKENS, TOKENS)
    params = initial(jax.random.fold_in(seed, 0))
    optimizer = optax.adam(optax.cosine_decay_schedule(3e-3, STEPS))

    def loss(params: Any, key: jax.Array) -> jax.Array:
        one, two, three = jax.random.split(key, 3)
        x, noise = images(one, BATCH), jax.random.normal(two, (BATCH, TOKENS, PATCH))
        time = jax.random.uniform(three, (BATCH,))
        part = signal(time)[:, None, None]
        noisy = jnp.sqrt(part) * x + jnp.sqrt(1 - part) * noise
        guess = predict(params, noisy, time, lambda i, q, k, v: dense_attention(q, k, v, columns[:, :1])[0])
        return jnp.mean((guess - noise) ** 2)

    def step(carry: Any, i: jax.Array) -> Any:
        params, state = carry
        value, grads = jax.value_and_grad(loss)(params, jax.random.fold_in(seed, 1 + i))
        updates, state = optimizer.update(grads, state)
        return (optax.apply_updates(params, updates), state), value

    (params, _), losses = jax.lax.scan(step, (params, optimizer.init(params)), jnp.arange(STEPS))
    return params, jnp.mean(losses[-50:])


def denoise(params: Any, noise: jax.Array, columns: Any, method: jax.Array, follows: jax.Array) -> Any:
    """Denoise by DDIM, dense in every `DENSE_EVERY`-th step.

    Returns the images, and the squared errors of the sparse steps' attention at the same inputs, relative to the dense
    outputs. With `follows`, the steps themselves go on from the dense outputs, so that every method sees equal inputs.
    """
    rescale, keep = method
    shape = (DEPTH, *noise.shape[:2], HEADS)
    empty = SoftmaxHistory(jnp.zeros(shape), jnp.zeros((*shape, WIDTH // HEADS)))

    def step(carry: Any, i: jax.Array) -> Any:
        x, history = carry
        time, after = 1 - i / DENOISING, 1 - (i + 1) / DENOISING
        is_dense, new, errors = i % DENSE_EVERY == 0, [], []

        def attend(layer: int, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            dense, seen = dense_attention(q, k, v, columns)
            share = jnp.where(rescale > 0, seen.share, 1)
            left = keep * (dense - share[..., None] * sparse_attention(q, k, v, columns))
            mine = jax.tree.map(lambda a, b: jnp.where(is_dense, a, b[layer]), SoftmaxHistory(share, left), history)
            out = sparse_attention(q, k, v, columns, mine)
            new.append(mine)
            errors.append(jnp.sum((out - dense) ** 2) / jnp.sum(dense**2))
            return jnp.where(is_dense | follows, dense, out)

        guess = predict(params, x, jnp.full(len(x), time), attend)
        now, then = signal(time), signal(after)
        clean = jnp.clip((x - jnp.sqrt(1 - now) * guess) / jnp.sqrt(now), -1, 1)
        x = jnp.sqrt(then) * clean + jnp.sqrt(1 - then) * guess
        history = jax.tree.map(lambda *parts: jnp.stack(parts), *new)
        return (x, history), jnp.where(is_dense, jnp.nan, jnp.mean(jnp.stack(errors)))

    (x, _), errors = jax.lax.scan(step, (noise, empty), jnp.arange(DENOISING))
    return x, jnp.nanmean(errors)


def main() -> None:
    """Train, denoise by every method at every sparsity, and write the errors."""
    params, losses = jax.jit(jax.vmap(train))(jax.random.split(jax.random.key(0), SEEDS))
    print("loss", losses, flush=True)
    noise = jax.random.normal(jax.random.key(1), (SEEDS, SAMPLES, TOKENS, PATCH))
    methods = jnp.array(list(METHODS.values()))
    over_seeds = jax.vmap(denoise, (0, 0, None, None, None))
    run = jax.jit(jax.vmap(over_seeds, (None, None, None, 0, None)))
    whole = None
    rows: dict[str, Any] = {}
    for window in WINDOWS:
        columns = jnp.asarray(neighbours(TOKENS, window))
        exact, errors = run(params, noise, columns, methods, True)
        whole = exact[0] if whole is None else whole
        got, _ = run(params, noise, columns, methods, False)
        away = jnp.sqrt(jnp.mean((got - whole) ** 2, axis=(2, 3, 4)))
        for i, name in enumerate(METHODS):
            rows[f"{window} {name}"] = {
                "keys": window / TOKENS,
                "block_error": np.round(np.sqrt(errors[i]), 4).tolist(),
                "image_error": np.round(away[i], 4).tolist(),
            }
            print(window, name, rows[f"{window} {name}"], flush=True)
    versions = {"jax": jax.__version__, "date": datetime.date.today().isoformat()}
    data = {"versions": versions, "loss": np.round(losses, 4).tolist(), "rows": rows}
    (HERE / "results.json").write_text(json.dumps(data, indent=1) + "\n")


if __name__ == "__main__":
    main()
