"""Pass keys retrieved with rotary scalings, before and after training on longer rows; a search for LongRoPE's factors.

python -m experiments.context_extension.extend search runs/passkey512                # prints factors for extend.gin
python -m experiments.context_extension.extend score runs/passkey512 runs/passkey8k  # writes results.json
python -m experiments.context_extension.extend picture                               # writes passkey.png
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from matplotlib.figure import Figure

import jaxscale as js
from experiments.context_extension.passkey import Passkey
from jaxscale.infer.loaded import load_model
from jaxscale.nn import flash_attention
from jaxscale.nn.rotary import LinearScaling, LongRopeScaling, NTKScaling, YarnScaling

HERE = Path(__file__).parent
SHORT, LONG = 512, 8192
LENGTHS = (512, 1024, 2048, 4096, 8192)
KEYS = 20
"""Rows of each length, with keys at depths from 0 to 1."""
POPULATION, GENERATIONS, SAMPLES = 12, 8, 6


@dataclasses.dataclass(frozen=True, eq=False)
class Divided:
    """A scaling whose factors may be traced, with LongRoPE's temperature."""

    factors: Any

    def __call__(self, inv_freq: np.ndarray, theta: float, positions: Any = None) -> tuple[Any, float]:
        """See `jaxscale.nn.rotary.RotaryScaling`."""
        return jnp.asarray(inv_freq) / self.factors, LongRopeScaling(
            factor=LONG / SHORT, original_length=SHORT
        ).temperature


def logits(config: Any, params: Any, scaling: Any, tokens: jax.Array, last: int) -> jax.Array:
    """Return the logits (last, V) at the end of one row, of a model with another scaling."""
    positions = dataclasses.replace(config.positions, scaling=scaling)
    model = dataclasses.replace(config, positions=positions, attention=flash_attention)
    graphdef = nnx.split(nnx.eval_shape(lambda: model.make(nnx.Rngs(0))))[0]
    return nnx.merge(graphdef, params)(tokens[None])[0, -last:]


def search(run: js.Run) -> list[float]:
    """Search a factor for each frequency by the loss on rows of LONG tokens, without training (Ding et al. 2024).

    As there: a population that begins with known scalings, of which the best are mutated; factors do not fall from the
    highest frequency to the lowest, and are between 1 and LONG / SHORT. There is no search for the tokens at the begin
    that stay as they are.
    """
    config, params = run.config.model, load_model(run, text=False).params
    pairs, most = config.sizes.head_dim // 2, LONG / SHORT
    data, rng = Passkey(length=LONG, seed=2), np.random.default_rng(0)

    @jax.jit
    def loss(factors: jax.Array, tokens: jax.Array, targets: jax.Array) -> jax.Array:
        out = jax.nn.log_softmax(logits(config, params, Divided(factors), tokens, data.digits))
        return -jnp.mean(jnp.take_along_axis(out, targets[-data.digits :, None], axis=1))

    def fitness(factors: np.ndarray) -> float:
        rows = (data[i] for i in range(SAMPLES))
        return float(np.mean([loss(jnp.asarray(factors, jnp.float32), r["tokens"], r["targets"]) for r in rows]))

    frequencies = config.positions.theta ** -(np.arange(pairs) / pairs)
    known = [
        frequencies / np.asarray(s(frequencies, config.positions.theta)[0])
        for s in (LinearScaling(most), NTKScaling(most), YarnScaling(most, original_length=SHORT))
    ]
    drawn = [np.sort(most ** rng.random(pairs)) for _ in range(POPULATION - len(known))]
    scored = sorted(((fitness(f), f) for f in known + drawn), key=lambda pair: pair[0])
    for generation in range(GENERATIONS):
        parents = [f for _, f in scored[: POPULATION // 3]]
        children = []
        for _ in range(POPULATION // 2):
            one, other = (parents[i] for i in rng.integers(len(parents), size=2))
            mixed = np.where(rng.random(pairs) < 0.5, one, other) * np.exp(rng.normal(0, 0.3, pairs))
            children.append(np.maximum.accumulate(np.clip(mixed, 1.0, most)))
        scored = sorted(scored + [(fitness(f), f) for f in children], key=lambda pair: pair[0])[:POPULATION]
        print(f"generation {generation}: loss {scored[0][0]:.3f}", flush=True)
    return [round(float(x), 3) for x in scored[0][1]]


def accuracy(config: Any, params: Any, scaling: Any) -> dict[str, float]:
    """Return the share of rows whose whole key is predicted, by length."""
    run = jax.jit(lambda tokens: jnp.argmax(logits(config, params, scaling, tokens, Passkey().digits), axis=-1))
    shares = {}
    for length in LENGTHS:
        rows = [Passkey(length=length, seed=3, depth=i / (KEYS - 1))[i] for i in range(KEYS)]
        right = [np.array_equal(run(r["tokens"]), r["targets"][-Passkey().digits :]) for r in rows]
        shares[str(length)] = float(np.mean(right))
    return shares


def score(base: js.Run, sweep: Path) -> None:
    """Score all scalings without training and each trial of the sweep; write results.json."""
    rows = []
    trials = [js.Run(path) for path in sorted(sweep.glob("[0-9]*")) if (path / "run.json").exists()]
    start = load_model(base, text=False).params
    for trial in trials:
        config = trial.config.model
        scaling = config.positions.scaling
        for trained, params in ((False, start), (True, load_model(trial, text=False).params)):
            name = "none" if scaling is None else type(scaling).__name__
            rows.append({"scaling": name, "trained": trained, "accuracy": accuracy(config, params, scaling)})
            print(json.dumps(rows[-1]), flush=True)
    (HERE / "results.json").write_text("[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n")


def picture() -> None:
    """Draw passkey.png: accuracy by length, before and after training."""
    figure = Figure(figsize=(9, 3.4), dpi=110, layout="constrained")
    rows = json.loads((HERE / "results.json").read_text())
    for ax, trained in zip(figure.subplots(1, 2, sharey=True), (False, True), strict=True):
        for row in rows:
            if row["trained"] == trained:
                ax.plot(
                    *zip(*((int(n), s) for n, s in row["accuracy"].items()), strict=True), "o-", label=row["scaling"]
                )
        ax.set(xscale="log", title="40 steps of 8,192 tokens" if trained else "not trained further", xlabel="tokens")
        ax.set_xticks(LENGTHS, [str(n) for n in LENGTHS])
        ax.minorticks_off()
        ax.grid(alpha=0.25)
    figure.axes[0].set_ylabel("keys retrieved")
    figure.axes[1].legend(frameon=False, fontsize=8)
    figure.savefig(HERE / "passkey.png")


def main() -> None:
    """Search, score or draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("search", "score", "picture"))
    parser.add_argument("runs", nargs="*", type=Path)
    args = parser.parse_args()
    if args.what == "search":
        print("LongRopeScaling.long =", search(js.Run(args.runs[0])))
    elif args.what == "score":
        score(js.Run(args.runs[0]), args.runs[1])
    else:
        picture()


if __name__ == "__main__":
    main()
