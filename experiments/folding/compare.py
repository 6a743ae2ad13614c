"""Removed and shared layers: python experiments/folding/compare.py RUN OUT [STEPS].

Makes smaller models of one run, trains each on the run's token distribution for as many steps, and prints a table of
held-out losses. Writes results.jsonl.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jaxscale as js
from jaxscale.convert.fold import Gates, fold, folded, gated_loss
from jaxscale.convert.new_run import begin, finish, save_params
from jaxscale.data import heldout_batches
from jaxscale.nn import SharedBlocks
from jaxscale.run import Run
from jaxscale.step import Distill, describe_model
from jaxscale.step.rates import parameter_count
from jaxscale.train import FromRun

RATE, ROWS, EVALUATED, GATES = 1e-3, 16, 16, Gates(steps=60)


def main(path: str, out: str, steps: str = "60") -> None:
    """Make, train and evaluate the models."""
    run, folder = js.load(path), Path(out)
    depth = run.config.model.depth  # type: ignore[attr-defined]
    half, more = depth // 2, depth * 3 // 4
    evenly = np.linspace(0, depth - 1, half).round().astype(int).tolist()
    pairs = SharedBlocks(2)
    made: dict[str, Callable[[Path], Run]] = {
        f"{half} layers, the first ones": lambda to: remaining(run, to, tuple(range(half))),
        f"{half} layers, evenly": lambda to: remaining(run, to, evenly),
        f"{half} layers, by gates": lambda to: fold(run, to, layers=half, gates=GATES),
        f"{depth} layers in pairs": lambda to: fold(run, to, shared=pairs),
        f"{more} layers by gates, in pairs": lambda to: fold(run, to, layers=more, shared=pairs, gates=GATES),
        f"{more // 2} layers, by gates": lambda to: fold(run, to, layers=more // 2, gates=GATES),
    }
    rows: list[dict[str, Any]] = [
        {"model": "as it is", "parameters": parameter_count(run.config), "loss": loss(run), "trained": None}
    ]
    for n, (name, make) in enumerate(made.items()):
        small = make(folder / f"made-{n}")
        healed = js.fit(
            start=FromRun(str(small.path)),  # type: ignore[arg-type]
            run=folder / f"trained-{n}",
            data=run.config.data,
            objective=Distill(teacher=FromRun(path)),
            layout=run.config.layout,
            steps=int(steps),
            batch_size=ROWS,
            seq_len=run.config.seq_len,
            lr=RATE,
            eval_batches=0,
            quiet=True,
        )
        facts = {k: small.info["folded"][k] for k in ("remaining", "gates") if k in small.info["folded"]}
        sizes = {"parameters": parameter_count(small.config), "loss": loss(small), "trained": loss(healed)}
        rows.append({"model": name, **sizes, **facts})
        print(rows[-1], flush=True)
    (Path(__file__).parent / "results.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    print("| model | parameters | loss as made | after training |\n|---|---|---|---|")
    for r in rows:
        after = "" if r["trained"] is None else f"{r['trained']:.4f}"
        print(f"| {r['model']} | {r['parameters']:,} | {r['loss']:.4f} | {after} |")


def remaining(run: Run, out: Path, layers: Sequence[int]) -> Run:
    """Write the run with these layers only."""
    keep = folded(run.config.model, len(layers), layers)
    config = dataclasses.replace(run.config, model=keep.model, start=None, adapters=None)
    new = begin(run, out, config, {"folded": {"remaining": list(keep.remaining)}}, "folding")
    save_params(new, keep.params(run.params()), None)
    finish(new, "folded")
    return new


def loss(run: Run) -> float:
    """Return the held-out loss in nats per token."""
    c: Any = run.config
    source = c.data.source(c.tokenizer, seq_len=c.seq_len, split="heldout", packing=c.packing)
    graphdef, _ = describe_model(c.model)
    open_ = jnp.ones(c.model.runs[0][1])

    @jax.jit
    def of(params: Any, batch: Any) -> Any:
        return gated_loss(nnx.merge(graphdef, params), open_, batch)

    names = ("tokens", "targets", "weights", *(("positions", "segment_ids") if c.segments else ()))
    params, read = run.params(), heldout_batches(source, ROWS, EVALUATED)
    return float(np.mean([of(params, {k: b[k] for k in names if k in b}) for b in read]))


if __name__ == "__main__":
    main(*sys.argv[1:])
