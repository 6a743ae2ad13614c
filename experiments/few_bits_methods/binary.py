"""Attention weights of one bit (BiViT) beside plain signs: error of a trained model's weights, and loss of training.

python experiments/few_bits_methods/binary.py     # writes binary.json beside this file
"""

from __future__ import annotations

import dataclasses
import pathlib
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxscale.nn import BinaryAttention, Rounded, Stored
from jaxscale.nn.dense_weights import ChangedWeights
from jaxscale.step import TrainConfig, describe_model

sys.path.insert(0, str(pathlib.Path(__file__).parent))
from common import MODEL, ROWS, SAME, SEEDS, SEQ, base, heldout, trained, write  # noqa: E402

STEPS = 240


@dataclasses.dataclass(frozen=True)
class Signs(ChangedWeights):
    """Signs around a fixed threshold, times the mean of the weights above it; gradients pass straight through."""

    threshold: float = 0.0

    def change(self, weights: jax.Array) -> jax.Array:
        """See `ChangedWeights`."""
        ones = weights > self.threshold
        scale = jnp.sum(jnp.where(ones, weights, 0), -1, keepdims=True) / jnp.maximum(ones.sum(-1, keepdims=True), 1)
        return weights + jax.lax.stop_gradient(jnp.where(ones, scale, 0) - weights)


KINDS: dict[str, ChangedWeights] = {
    "signs around 0": Signs(),
    "signs around 0.5": Signs(0.5),
    "BinaryAttention": BinaryAttention(),
}


@dataclasses.dataclass(frozen=True)
class Recorder(ChangedWeights):
    """Appends all weights to a list, outside of `jit`."""

    seen: list[np.ndarray] = dataclasses.field(default_factory=list, compare=False)

    def change(self, weights: jax.Array) -> jax.Array:
        """See `ChangedWeights`."""
        self.seen.append(np.asarray(weights))
        return weights


def main() -> None:
    """Measure and write the results."""
    lines: dict[str, Any] = {}
    recorder = Recorder()  # one, since all are equal, and a model's structure is cached by its config
    for seed in SEEDS[:2]:
        start = base(seed)
        recorder.seen.clear()
        graphdef, _ = describe_model(dataclasses.replace(MODEL, attention=recorder, scan=False))
        config = start.config
        source = config.data.source(config.tokenizer, seq_len=SEQ, split="heldout", packing=config.packing)
        with jax.disable_jit():
            nnx.merge(graphdef, start.params()).hidden(jnp.asarray(source.rows(np.arange(ROWS))["tokens"]))
        for name, kind in KINDS.items():
            wrong = sum(float(np.sum((np.asarray(kind.change(jnp.asarray(w))) - w) ** 2)) for w in recorder.seen)
            whole = sum(float(np.sum(w**2)) for w in recorder.seen)
            lines[f"{name}, squared error of weights, seed {seed}"] = wrong / whole
        write("binary", lines)
    for seed in SEEDS[:2]:
        for name, kind in {"softmax": MODEL.attention, **KINDS}.items():
            model = dataclasses.replace(MODEL, attention=kind, products=Rounded(Stored("binary")))
            config = TrainConfig(model=model, seed=seed, **{**SAME, "steps": STEPS})
            run = trained(f"binary-{name.replace(' ', '-')}-{seed}", config)
            lines[f"{name}, held-out loss, seed {seed}"] = heldout(run.config, run.params())
            write("binary", lines)


if __name__ == "__main__":
    main()
