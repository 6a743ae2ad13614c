"""Held-out loss of one model quantised by each recipe: python experiments/quantize/compare.py RUN OUT.

A row of OUT/results.jsonl is a recipe at a width; rows that are there already are not computed again.
"""

from __future__ import annotations

import functools
import json
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jaxscale as js
from jaxscale.convert.quantize import quantize
from jaxscale.convert.recipes import (
    AWQ,
    COMET,
    GPTQ,
    HQQ,
    AllocatedBits,
    BitStack,
    EoRA,
    FlexQ,
    Recipe,
    RoundToNearest,
    SmoothQuant,
)
from jaxscale.data import heldout_batches
from jaxscale.models import ModelConfig
from jaxscale.nn import WeightFormat, as_weight, head_logits
from jaxscale.nn.formats import FewerBlocks
from jaxscale.nn.formats.mixed_blocks import MixedWeight
from jaxscale.run import Run
from jaxscale.step.state import describe_model
from jaxscale.step.stored import is_weight
from jaxscale.train.checkpoints.read import dtype_named

GROUP = 32
BATCHES, ROWS = 16, 16


def recipes() -> list[Recipe]:
    """Return the recipes that are compared."""
    few = [kind(bits, GROUP) for bits in (4, 3, 2) for kind in (RoundToNearest, HQQ, AWQ, GPTQ)]
    repaired = [EoRA(recipe=kind(2, GROUP), rank=8) for kind in (RoundToNearest, GPTQ)]
    ordered = [GPTQ(bits, GROUP, by_activation=True) for bits in (3, 2)]
    allocated = [AllocatedBits(bits=3.0, recipe=GPTQ(group=GROUP))]
    stacks = [BitStack(blocks=16), BitStack(blocks=6, rank=4)]
    mixed = [COMET(group=16, share=share) for share in (0.0, 0.125, 0.25, 1.0)]
    mixed += [COMET(group=16, share=0.125, recipe=GPTQ()), *(FlexQ(group=GROUP, share=share) for share in (0.0, 0.25))]
    before = [*few, *ordered, RoundToNearest(8, None), SmoothQuant(), *repaired, *allocated]
    return [*before, *stacks, *mixed]


def parts() -> dict[str, list[float]]:
    """Return the bits for each weight, on average, of which a run's blocks are read."""
    return {repr(BitStack(blocks=16)): [2.0, 3.0, 3.25, 4.25, 5.25, 8.0, 12.0]}


def batches_of(run: Run) -> list[dict[str, np.ndarray]]:
    """Return held-out batches, those of training's evaluations."""
    c = run.config
    source = c.data.source(c.tokenizer, seq_len=c.seq_len, split="heldout", packing=c.packing)
    return list(heldout_batches(source, ROWS, BATCHES))


def loss_of(run: Run, batches: list[dict[str, np.ndarray]], part: WeightFormat | None = None) -> float:
    """Return the mean negative log-likelihood of a token, in nats.

    Args:
      run: the run.
      batches: from `batches_of`.
      part: a format whose arrays are some of the run's, which alone are read.
    """
    weights = run.weights(run.last_step(), part=part)
    few = [w for w in jax.tree.leaves(weights, is_leaf=is_weight) if is_weight(w)]
    if not any(isinstance(w, MixedWeight) or getattr(w, "activations", None) for w in few):
        infos = describe_model(run.config.model)[1]  # no activations are rounded: one program for all recipes
        weights = jax.tree.map(lambda i, w: as_weight(w).dense(i.dtype), infos, weights)
    nats = nats_of(run.config.model)
    sums = [nats(weights, b) for b in batches]
    return math.fsum(float(n) for n, _ in sums) / math.fsum(float(w) for _, w in sums)


@functools.cache
def nats_of(model: ModelConfig) -> Callable[[Any, dict[str, np.ndarray]], tuple[jax.Array, jax.Array]]:
    """Return a function of parameters and a batch: the sum of the tokens' nats, and how many tokens there are."""
    graphdef, _ = describe_model(model)

    @jax.jit
    def nats(params, batch):  # type: ignore[no-untyped-def]
        model = nnx.merge(graphdef, params)
        context = {k: batch[k] for k in ("positions", "segment_ids") if k in batch}
        hidden = model.hidden(batch["tokens"], **context)
        logs = jax.nn.log_softmax(head_logits(hidden, model.head_weight(), softcap=model.logit_softcap))
        own = jnp.take_along_axis(logs, batch["targets"][..., None], -1)[..., 0]
        weight = (batch["segment_ids"] != 0) * batch["weights"] if "segment_ids" in batch else batch["weights"]
        return -jnp.sum(own * weight), jnp.sum(weight)

    return nats


def bytes_of(run: Run) -> int:
    """Return the bytes of the layers' matrices, with scales and zero points."""
    leaves = run.checkpoints.manifest(run.last_step())["leaves"]
    sizes = {n: math.prod(x["shape"]) * dtype_named(x["dtype"]).itemsize for n, x in leaves.items()}
    return sum(s for n, s in sizes.items() if n.startswith("params/runs/") and "/kernel" in n)


def rows_of_parts(run: Run, name: str, batches: list[dict[str, np.ndarray]], plain: int) -> list[dict[str, Any]]:
    """Return a row for each part of a stack of blocks that is read.

    Args:
      run: the quantised run.
      name: of its recipe.
      batches: held-out batches.
      plain: bytes of the matrices in float32.
    """
    infos, rows = describe_model(run.config.model)[1], []
    stored = run.config.stored
    assert stored is not None
    matrices = {i.path for i in jax.tree.leaves(infos) if i.contracted is not None and stored.covers(i)}
    rest = sum(i.nbytes for i in jax.tree.leaves(infos) if i.path not in matrices)
    for bits in parts().get(name, []):
        within = FewerBlocks(rest + int(bits * plain / 32))
        part = within.part_of(stored, infos, run.some_weights)
        assert part is not None
        size = sum(i.nbytes for i in jax.tree.leaves(part.infos(infos))) - rest
        rows.append({"recipe": f"{name} with {bits} bits read", "loss": loss_of(run, batches, part), "bytes": size})
    return rows


def main(path: str, out: str) -> None:
    """Measure every recipe that has no row yet."""
    base, folder = js.load(path), Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    results = folder / "results.jsonl"
    rows = [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []
    batches = batches_of(base)
    if not rows:
        rows = [{"recipe": "none", "loss": loss_of(base, batches), "bytes": bytes_of(base), "seconds": 0.0}]
        results.write_text(json.dumps(rows[0]) + "\n")
    print(rows[0], flush=True)
    for n, recipe in enumerate(recipes()):
        if any(row["recipe"] == repr(recipe) for row in rows):
            continue
        began = time.monotonic()
        run = quantize(base, folder / f"run-{n}", recipe, rows=64, batch=16, say=lambda _: None)
        row = {"recipe": repr(recipe), "loss": loss_of(run, batches), "bytes": bytes_of(run)}
        row |= {"seconds": round(time.monotonic() - began, 1)}
        more = rows_of_parts(run, repr(recipe), batches, rows[0]["bytes"])
        with results.open("a") as f:
            f.writelines(json.dumps(r) + "\n" for r in (row, *more))
        print(row, *more, sep="\n", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
