"""How formats change sampling at several temperatures: python experiments/quantize/temperature.py RUN.

For each weight format the error of its weights, and the divergence of the next token's distribution from the full
model's, at each temperature, averaged over held-out tokens. Prints a table, and writes temperature.jsonl.
"""

from __future__ import annotations

import functools
import json
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from compare import batches_of
from flax import nnx
from jaxtyping import Array, Float

import jaxscale as js
from jaxscale.nn import as_weight, head_logits
from jaxscale.nn.formats import FORMATS
from jaxscale.step.state import describe_model

NAMES = "int8", "fp8", "int4", "nf4", "fp4", "mxfp4", "nvfp4", "int3", "int2"
TEMPERATURES = 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 1.0, 1.5


def divergences(
    full: Float[Array, "... v"], few: Float[Array, "... v"], temperature: float
) -> tuple[Float[Array, "..."], Float[Array, "..."]]:
    """Return KL(full, few) in nats, and the total variation, of the distributions that tokens are drawn from.

    The total variation is the share of draws that differ under the best coupling, 0 to 1.

    Args:
      full: logits of the model as it is.
      few: logits of the same model in few bits.
      temperature: above 0.
    """
    logs = [jax.nn.log_softmax(x.astype(jnp.float32) / temperature) for x in (full, few)]
    p, q = jnp.exp(logs[0]), jnp.exp(logs[1])
    return jnp.sum(p * (logs[0] - logs[1]), -1), 0.5 * jnp.sum(jnp.abs(p - q), -1)


def main(path: str) -> None:
    """Measure every format."""
    run = js.load(path)
    graphdef, infos = describe_model(run.config.model)
    params, batches = run.params(), batches_of(run)

    @jax.jit
    def sums(params: Any, other: Any, batch: Any) -> Array:
        """Return sums over tokens: of each temperature's divergences, of unlike best tokens, and how many there are."""
        weight = (batch["segment_ids"] != 0) * batch["weights"] if "segment_ids" in batch else batch["weights"]
        context = {k: batch[k] for k in ("positions", "segment_ids") if k in batch}
        logits = []
        for tree in (params, other):
            model = nnx.merge(graphdef, tree)
            hidden = model.hidden(batch["tokens"], **context)
            logits.append(head_logits(hidden, model.head_weight(), softcap=model.logit_softcap))
        each = [x for t in TEMPERATURES for x in divergences(*logits, t)]
        unlike = jnp.argmax(logits[0], -1) != jnp.argmax(logits[1], -1)
        return jnp.stack([jnp.sum(x * weight) for x in (*each, unlike, jnp.ones_like(weight))])

    rows = []
    for name in NAMES:
        weights = FORMATS[name][0].encoded(jax.tree.map(jnp.copy, params), infos, None)
        dense = jax.tree.map(lambda i, w: as_weight(w).dense(i.dtype), infos, weights)
        pairs = [
            (a, b)
            for i, a, b in zip(*map(jax.tree.leaves, (infos, params, dense)), strict=True)
            if i.contracted is not None and FORMATS[name][0].covers(i)
        ]
        error, square = (
            sum(float(jnp.sum(x**2)) for x in xs) for xs in ([a - b for a, b in pairs], [a for a, _ in pairs])
        )
        *each, unlike, tokens = functools.reduce(jnp.add, (sums(params, dense, b) for b in batches)).tolist()
        rows.append({"format": name, "error": (error / square) ** 0.5, "unlike_best": unlike / tokens})
        rows[-1] |= {"kl": [x / tokens for x in each[::2]], "variation": [x / tokens for x in each[1::2]]}
    file = Path(__file__).parent / "temperature.jsonl"
    file.write_text("".join(json.dumps(r | {"temperatures": TEMPERATURES}) + "\n" for r in rows))
    for what in ("kl", "variation"):
        print(f"| {what} | error of weights | {' | '.join(f'T = {t}' for t in TEMPERATURES)} | unlike best token |")
        print("|---" * (len(TEMPERATURES) + 3) + "|")
        for r in rows:
            numbers = " | ".join(f"{x:.4f}" if what == "kl" else f"{x:.2%}" for x in r[what])
            print(f"| `{r['format']}` | {r['error']:.2%} | {numbers} | {r['unlike_best']:.2%} |")


if __name__ == "__main__":
    main(*sys.argv[1:])
