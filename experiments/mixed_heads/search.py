"""Search softmax heads among linear ones on recall of values by keys, and train the divisions of the same budget.

    python experiments/mixed_heads/search.py        # two minutes of one core; writes results.json

All models train at once, under `jax.vmap`. A division is trained as the search's layer with its mixes fixed at 0 and 1,
which computes the same function as `MixedHeads(softmax_heads=n)`.
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
from flax import nnx

from jaxscale.models import BlockConfig, TransformerConfig
from jaxscale.nn import MixedHeads
from jaxscale.nn.mixers import harden

HERE = pathlib.Path(__file__).parent
SEEDS, STEPS, BATCH, RATE = (0, 1, 2), 200, 16, 5e-3
KEYS, VALUES = 20, 4
LAYERS, HEADS, BUDGET = 2, 4, 4
SIZES: dict[str, Any] = dict(depth=LAYERS, width=32, heads=HEADS, head_dim=4, hidden=64, vocab=KEYS * VALUES + KEYS)
DIVISIONS = ((4, 0), (2, 2), (0, 4), (0, 0), (1, 1), (4, 4))
FREE = {"search by head": 0, "search by layer": 1}


def recall(key: jax.Array, batch: int) -> tuple[jax.Array, jax.Array]:
    """Rows of tokens that are each a key with its value, then the keys alone; and the value of each of these keys."""

    def row(key: jax.Array) -> tuple[jax.Array, jax.Array]:
        first, second, third = jax.random.split(key, 3)
        keys, queries = (jax.random.permutation(k, KEYS) for k in (first, third))
        values = jax.random.randint(second, (KEYS,), 0, VALUES)
        answers = values[jnp.argsort(keys)][queries]
        return jnp.concatenate([keys * VALUES + values, KEYS * VALUES + queries]), answers

    return jax.vmap(row)(jax.random.split(key, batch))


def fixed(division: tuple[int, int]) -> np.ndarray:
    """The choices (layers, heads) of a division: mixes of 1, then of 0."""
    return np.where(np.arange(HEADS) < np.array(division)[:, None], 40.0, -40.0)


def main() -> None:
    """Train all models of all seeds, and write what they learn."""
    config = TransformerConfig(**SIZES, blocks=(BlockConfig(mixer=MixedHeads()),))
    names = [*FREE, *(" + ".join(map(str, d)) for d in DIVISIONS)]
    modes = jnp.array([*FREE.values(), *[2] * len(DIVISIONS)])
    choices = jnp.array([*[fixed((0, 0))] * len(FREE), *map(fixed, DIVISIONS)], jnp.float32)
    graphdef, _ = nnx.split(config.make(nnx.Rngs(0)))
    of_seed = jax.jit(lambda key: nnx.state(config.make(nnx.Rngs(key))))
    params = jax.tree.map(lambda *x: jnp.stack(x), *map(of_seed, map(jax.random.key, SEEDS)))
    optimizer = optax.adamw(optax.warmup_cosine_decay_schedule(0, RATE, 50, STEPS), weight_decay=0.01)

    def is_choice(path: Any) -> bool:
        return "choice" in jax.tree_util.keystr(path)

    def loss(params: Any, mode: jax.Array, choice: jax.Array, key: jax.Array, batch: int) -> tuple[Any, Any]:
        def used(path: Any, x: jax.Array) -> jax.Array:
            whole = jnp.broadcast_to(jnp.mean(x, axis=-1, keepdims=True), x.shape)
            return jnp.where(mode == 0, x, jnp.where(mode == 1, whole, choice))

        params = jax.tree.map_with_path(lambda path, x: used(path, x) if is_choice(path) else x, params)
        tokens, values = recall(key, batch)
        logits = nnx.merge(graphdef, params)(tokens)[:, KEYS:, :VALUES].astype(jnp.float32)
        nats = optax.softmax_cross_entropy_with_integer_labels(logits, values)
        return jnp.mean(nats), jnp.mean(jnp.argmax(logits, -1) == values)

    def some(params: Any, state: Any, mode: jax.Array, choice: jax.Array, key: jax.Array, first: jax.Array) -> Any:
        def step(carry: Any, i: jax.Array) -> Any:
            params, state = carry
            of_step = jax.random.fold_in(key, i)
            nats, grads = jax.value_and_grad(lambda p: loss(p, mode, choice, of_step, BATCH)[0])(params)
            updates, state = optimizer.update(grads, state, params)
            return (optax.apply_updates(params, updates), state), nats

        return jax.lax.scan(step, (params, state), first + jnp.arange(50))

    def over(fn: Any, *rest: None) -> Any:
        """Over models, and over seeds."""
        return jax.jit(jax.vmap(jax.vmap(fn, (0, 0, None, None, 0, *rest)), (0, 0, 0, 0, None, *rest)))

    params = jax.tree.map(lambda x: jnp.broadcast_to(x, (len(names), *x.shape)), params)
    state = jax.vmap(jax.vmap(optimizer.init))(params)
    keys = jnp.stack([jax.random.key(1000 + seed) for seed in SEEDS])
    run = over(some, None)
    for first in range(0, STEPS, 50):
        (params, state), nats = run(params, state, modes, choices, keys, first)
        print(first + 50, np.round(np.mean(nats[..., -10:], axis=(1, 2)), 3), flush=True)
    score = over(lambda params, _, mode, choice, key: loss(params, mode, choice, jax.random.fold_in(key, STEPS), 512))
    held_out = score(params, state, modes, choices, keys)
    trained = next(x for path, x in jax.tree.leaves_with_path(params) if is_choice(path))
    rows: dict[str, Any] = {}
    for i, name in enumerate(names):
        rows[name] = {k: np.round(x[i], 4).tolist() for k, x in zip(("loss", "accuracy"), held_out, strict=True)}
        if i < len(FREE):
            each = np.asarray(trained[i] if i == 0 else np.mean(trained[i], axis=-1, keepdims=True))
            rows[name]["choices"] = np.round(each, 3).tolist()
            mixers = [harden(choice, HEADS, BUDGET) for choice in each]
        else:
            mixers = [tuple(MixedHeads(softmax_heads=n) for n in DIVISIONS[i - len(FREE)])]
        rows[name]["divisions"] = [[m.softmax_heads for m in of] for of in mixers]
        fixed_heads = TransformerConfig(**SIZES, blocks=tuple(BlockConfig(mixer=m) for m in mixers[0]))
        rows[name]["flops"] = fixed_heads.flops(1, 2 * KEYS, training=False)
    versions = {"jax": jax.__version__, "date": datetime.date.today().isoformat(), "steps": STEPS}
    (HERE / "results.json").write_text(json.dumps({"versions": versions, "rows": rows}, indent=1) + "\n")
    print(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
