"""Train a small mixture, and put experts and sequences on devices by what token ids predict.

python experiments/placed_experts/measure.py       # about two minutes of one core; writes crossing.json
"""

from __future__ import annotations

import json
import pathlib
import tempfile
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jaxscale as js
from jaxscale.convert import placed_experts as place
from jaxscale.infer.loaded import load_model
from jaxscale.models import TransformerConfig
from jaxscale.nn import MixtureOfExperts
from jaxscale.step import describe_model

HERE = pathlib.Path(__file__).parent
EXPERTS, TOP, SEQ, STEPS = 16, 2, 64, 200
MOE = MixtureOfExperts(EXPERTS, TOP, hidden=32, balance_loss=0.01)
SIZES: dict[str, Any] = dict(depth=2, vocab=256, width=64, heads=4, hidden=64, mlp=MOE)


def trained(folder: str) -> js.Run:
    """Return a run of the standard library's text, by bytes."""
    return js.fit(
        model=TransformerConfig(**SIZES), layout=None, data=js.data.python_stdlib(), batch_size=16, seq_len=SEQ,
        steps=STEPS, lr=3e-3, eval_batches=4, quiet=True, run=folder,
    )  # fmt: skip


def rows_of(run: js.Run, split: str, batches: int) -> np.ndarray:
    """Return rows of tokens, (rows, SEQ)."""
    source = run.config.data.source(run.session.tokenizer, seq_len=SEQ, split=split)
    loader = js.data.Loader(source, batch_size=16, seed=1)
    return np.concatenate([np.asarray(loader.batch_at(step)["tokens"])[:, :SEQ] for step in range(batches)])


def main() -> None:
    """Train, place for several numbers of devices, and write what crosses."""
    with tempfile.TemporaryDirectory() as folder:
        run = trained(f"{folder}/run")
        model, params = run.config.model, jax.tree.map(np.asarray, load_model(run).params)
        loss = run.metrics()[-1]["loss"]
        seen, new = rows_of(run, "train", 64), rows_of(run, "heldout", 16)
    table = place.counted(seen.reshape(-1), place.recorded(model, params, seen), model.vocab, EXPERTS)
    chosen = place.recorded(model, params, new)
    guess = place.predicted(table, new.reshape(-1), TOP)
    graphdef, _ = describe_model(model)
    logits = jax.jit(lambda p: nnx.merge(graphdef, p)(jnp.asarray(new[:8])))
    rows = []
    for devices in (2, 4, 8):
        order, plain = place.placement(table, devices), np.tile(np.arange(EXPERTS), (len(chosen), 1))
        home, own = place.homes_of(order, devices), place.homes_of(plain, devices)
        anywhere = np.repeat(np.arange(len(new)) % devices, SEQ)
        by_row, by_token = (place.devices_of(guess, home, devices, rows=n) for n in (SEQ, 1))
        known = place.devices_of(chosen, home, devices)  # a prediction that is always right
        want, got = logits(params), logits(place.placed(model, params, order))
        rows.append({
            "devices": devices,
            "experts and rows as they are": place.crossing(chosen, own, anywhere),
            "experts placed": place.crossing(chosen, home, anywhere),
            "rows placed": place.crossing(chosen, own, place.devices_of(guess, own, devices, rows=SEQ)),
            "both": place.crossing(chosen, home, by_row),
            "experts and tokens": place.crossing(chosen, home, by_token),
            "tokens by their choices": place.crossing(chosen, home, known),
            "difference of logits": float(np.max(np.abs(got - want)) / np.max(np.abs(want))),
        })  # fmt: skip
        print(json.dumps(rows[-1]), flush=True)
    often = np.argsort(-table.sum(1), axis=1)[:, :TOP]
    result = {
        "loss": float(loss),
        "accuracy": place.accuracy(guess, chosen),
        "accuracy of the most chosen": place.accuracy(np.broadcast_to(often[:, None], chosen.shape), chosen),
        "largest load / mean": float(table.sum(1).max() / table.sum(1).mean()),
        "rows": rows,
    }
    print(json.dumps({name: value for name, value in result.items() if name != "rows"}))
    (HERE / "crossing.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
