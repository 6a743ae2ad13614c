"""TD(0) with noisy rewards: squared error, two-hot and HL-Gauss, over the width of the network.

python experiments/value_losses/td.py           # train all, then draw
python experiments/value_losses/td.py --draw    # the figure and the table of results/results.json
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from matplotlib.figure import Figure

from jaxscale.step import HLGauss, SquaredError, TwoHot

HERE = Path(__file__).parent
STATES, FEATURES, SUCCESSORS, DISCOUNT, NOISE = 128, 32, 4, 0.9, 2.0
BOUND = 12.0
"""Values are within ±10, since mean rewards are within ±1 and the discount is 0.9."""
LOSSES = {"squared error": SquaredError(), "two-hot": TwoHot(-BOUND, BOUND, 51), "HL-Gauss": HLGauss(-BOUND, BOUND, 51)}
WIDTHS, RATES, SEEDS = (16, 64, 256, 512), (1e-4, 3e-4, 1e-3, 3e-3), 5
STEPS, BATCH, UPDATE_EVERY, EVALUATIONS = 2000, 32, 50, 20


def chain(seed: int) -> dict[str, np.ndarray]:
    """Return a random Markov chain: features, successors and mean reward of each state, and the exact values."""
    draw = np.random.default_rng(seed)
    successors = draw.integers(0, STATES, (STATES, SUCCESSORS))
    rewards = draw.uniform(-1, 1, STATES)
    moves = np.zeros((STATES, STATES))
    np.add.at(moves, (np.arange(STATES)[:, None], successors), 1 / SUCCESSORS)
    values = np.linalg.solve(np.eye(STATES) - DISCOUNT * moves, rewards)
    return dict(features=draw.normal(size=(STATES, FEATURES)), successors=successors, rewards=rewards, values=values)


def network(params: list[jax.Array], x: jax.Array) -> jax.Array:
    """Apply a network with two hidden layers."""
    for weight in params[:-1]:
        x = jax.nn.relu(x @ weight)
    return x @ params[-1]


def learned(loss: Any, width: int, rate: jax.Array, seed: jax.Array, world: dict[str, jax.Array]) -> jax.Array:
    """Return the root mean squared error of all states' values at `EVALUATIONS` steps of TD(0)."""
    sizes = (FEATURES, width, width, loss.outputs)
    keys = jax.random.split(jax.random.key(seed), 4)
    shapes = zip(keys[:3], sizes[:3], sizes[1:], strict=True)
    params = [jax.random.normal(key, (n, m)) * (2 / n) ** 0.5 for key, n, m in shapes]
    params[-1] = params[-1] * 0.1
    tx = optax.adam(rate)

    def step(carry: Any, i: jax.Array) -> tuple[Any, None]:
        params, target, opt_state = carry
        states, which, noise = jax.random.split(jax.random.fold_in(keys[3], i), 3)
        s = jax.random.randint(states, (BATCH,), 0, STATES)
        after = world["successors"][s, jax.random.randint(which, (BATCH,), 0, SUCCESSORS)]
        reward = world["rewards"][s] + NOISE * jax.random.normal(noise, (BATCH,))
        goal = reward + DISCOUNT * loss.mean(network(target, world["features"][after]))
        grads = jax.grad(lambda p: jnp.mean(loss.loss(network(p, world["features"][s]), goal)))(params)
        updates, opt_state = tx.update(grads, opt_state)
        params = optax.apply_updates(params, updates)
        target = jax.tree.map(lambda t, p: jnp.where(i % UPDATE_EVERY == 0, p, t), target, params)
        return (params, target, opt_state), None

    def evaluated(carry: Any, i: jax.Array) -> tuple[Any, jax.Array]:
        each = STEPS // EVALUATIONS
        carry, _ = jax.lax.scan(step, carry, i * each + jnp.arange(each))
        error = loss.mean(network(carry[0], world["features"])) - world["values"]
        return carry, jnp.sqrt(jnp.mean(jnp.square(error)))

    return jax.lax.scan(evaluated, (params, params, tx.init(params)), jnp.arange(EVALUATIONS))[1]


def measure() -> dict[str, Any]:
    """Train every loss at every width and learning rate."""
    worlds = [chain(seed) for seed in range(SEEDS)]
    world = {k: jnp.asarray(np.stack([w[k] for w in worlds])) for k in worlds[0]}
    rows, spread = [], float(np.mean([np.std(w["values"]) for w in worlds]))
    for width in WIDTHS:
        for name, loss in LOSSES.items():
            began = time.time()
            over_seeds = jax.vmap(lambda r, s, w: learned(loss, width, r, s, w), (None, 0, 0))  # noqa: B023
            run = jax.jit(over_seeds)
            for rate in RATES:
                errors = np.asarray(run(jnp.float32(rate), jnp.arange(SEEDS), world))
                rows.append(dict(width=width, loss=name, rate=rate, errors=errors.round(4).tolist()))
            print(f"width {width}, {name}: {time.time() - began:.0f} s", flush=True)
    return {"spread of values": spread, "rows": rows}


def last(row: dict[str, Any]) -> np.ndarray:
    """Return each seed's error, a mean over the last quarter of training."""
    return np.mean(np.array(row["errors"])[:, -EVALUATIONS // 4 :], axis=1)


def best(rows: list[dict[str, Any]], width: int, name: str) -> dict[str, Any]:
    """Return the row of the learning rate with the smallest mean error."""
    return min((r for r in rows if (r["width"], r["loss"]) == (width, name)), key=lambda r: last(r).mean())


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Draw the error over the width, and over training at the largest width."""
    figure = Figure(figsize=(12, 4.2), dpi=110, layout="constrained")
    left, right = figure.subplots(1, 2)
    for name, colour in zip(LOSSES, ("#222222", "#edae49", "#d1495b"), strict=True):
        errors = np.array([last(best(rows, w, name)) for w in WIDTHS])
        spread = errors.std(1, ddof=1) / SEEDS**0.5
        left.errorbar(WIDTHS, errors.mean(1), spread, fmt="o-", color=colour, label=name, capsize=3)
        curve = np.mean(best(rows, WIDTHS[-1], name)["errors"], axis=0)
        right.plot((1 + np.arange(EVALUATIONS)) * STEPS // EVALUATIONS, curve, color=colour, label=name)
    left.set(xlabel="width", ylabel="error of values (RMS)", xscale="log", title="after training, best learning rate")
    left.set_xticks(WIDTHS, map(str, WIDTHS))
    left.minorticks_off()
    right.set(xlabel="step", title=f"width {WIDTHS[-1]}")
    for ax in (left, right):
        ax.grid(alpha=0.25)
        ax.legend(frameon=False)
    figure.savefig(path)


def main() -> None:
    """Train or draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draw", action="store_true", help="draw what is measured")
    file = HERE / "results/results.json"
    if not parser.parse_args().draw:
        file.write_text(json.dumps(measure()) + "\n")
    results = json.loads(file.read_text())
    draw(results["rows"], HERE / "results/td.png")
    gains = [f"gain of {name}" for name in list(LOSSES)[1:]]
    print(f"| width | {' | '.join([*LOSSES, *gains])} |\n{'|---' * (1 + len(LOSSES) + len(gains))}|")
    for width in WIDTHS:
        some = [best(results["rows"], width, name) for name in LOSSES]
        cells = [f"{last(r).mean():.3f} (lr {r['rate']:g})" for r in some]
        for row in some[1:]:  # seed by seed
            gain = last(some[0]) - last(row)
            cells.append(f"{gain.mean():+.3f} ± {gain.std(ddof=1) / SEEDS**0.5:.3f}")
        print(f"| {width} | {' | '.join(cells)} |")
    print(f"standard deviation of the values: {results['spread of values']:.3f}")


if __name__ == "__main__":
    main()
