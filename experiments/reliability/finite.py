"""Put NaN and infinity into live buffers of one of two processes: both skip the step, and no bit of the state changes.

    python -m experiments.reliability.finite --seed 0

Two processes of four simulated devices train a small transformer on data=2, fsdp=2, tensor=2. The faults: a loss
weight in process 1's part of a batch; one element in one shard of a gradient; one element of an optimizer moment on one
device of process 1, which makes every step bad until the run rolls back. Each process computes digests of its own
buffers before and after the step.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxscale as js
from experiments.reliability import lives
from experiments.reliability.processes import at_step, changed, together
from jaxscale.step import backprop
from jaxscale.train import loop
from jaxscale.train.skips import read_skips

HERE = Path(__file__).parent
STEPS, SAVED = 24, 16
HOLES = {9: np.nan, 12: np.inf}
"""Step -> value that is put into a gradient."""
MADE = {
    3: "NaN in process 1's batch",
    6: "infinity in process 1's batch",
    9: "NaN in one shard of a gradient",
    12: "infinity in one shard of a gradient",
    18: "NaN in one shard of the optimizer's state",
}


def config(seed: int) -> js.TrainConfig:
    """Return the config of the run."""
    return js.TrainConfig(
        model=js.models.Transformer.Config(depth=2, vocab=32, width=16, heads=4, head_dim=4, hidden=32),
        data=js.data.synthetic(32, documents=64, length=64),
        layout=js.Layout("data=2,fsdp=2,tensor=2"),
        steps=STEPS,
        batch_size=8,
        seq_len=16,
        seed=seed,
        eval_batches=0,
        checkpoint_every=SAVED,
    )


def life(seed: int, root: Path) -> None:
    """Run one process: train with the faults, and write which steps it skipped and whether its state changed."""
    number = jax.process_index()
    random = np.random.default_rng(seed)
    sound, take = backprop.make_loss_and_grads, loop.Loop._take
    seen: dict[str, Any] = {}
    fold = lambda step: jax.random.fold_in(jax.random.key(seed), step - 1)  # noqa: E731
    keys = {step: np.asarray(jax.random.key_data(fold(step))) for step in HOLES}

    def with_hole(*args: Any, **options: Any) -> Any:
        inner = sound(*args, **options)

        def loss_and_grads(params: Any, batch: Any, key: Any, frozen: Any) -> Any:
            metrics, grads = inner(params, batch, key, frozen)
            weight = grads["embed"]["weight"]
            last = jnp.arange(weight.size).reshape(weight.shape) == weight.size - 1  # one element: no collective
            for step, value in HOLES.items():
                hit = jnp.all(jax.random.key_data(key) == keys[step])
                weight = jnp.where(last & hit, value, weight)
            return metrics, {**grads, "embed": {"weight": weight}}

        return loss_and_grads

    def weighing(value: float, mine: bool) -> Callable[..., Any]:
        place = 0, int(random.integers(16))

        def fault(state: Any, batch: dict[str, jax.Array]) -> Any:
            def put(data: np.ndarray) -> None:
                data[place] = value

            return state, batch | {"weights": changed(batch["weights"], put) if mine else batch["weights"]}

        return fault

    def moment(state: Any, batch: Any) -> Any:
        leaves, tree = jax.tree.flatten(state.opt_state)
        i = next(i for i, x in enumerate(leaves) if x.ndim > 1 and jnp.issubdtype(x.dtype, jnp.floating))
        if number == 1:

            def put(data: np.ndarray) -> None:
                data.reshape(-1)[0] = np.nan

            leaves[i] = changed(leaves[i], put, jax.local_devices()[0].id)
        state = dataclasses.replace(state, opt_state=jax.tree.unflatten(tree, leaves))
        seen["struck"] = digest(state)
        return state, batch

    faults = {
        3: weighing(np.nan, number == 1),
        6: weighing(np.inf, number == 1),
        18: moment,
    }
    faulty = at_step(take, faults)

    def watched(self: Any, state: Any, done: int) -> Any:
        before = digest(state)
        new, metrics = faulty(self, state, done)
        before = seen.pop("struck", before)  # the digest just after the fault, where the fault changed the state
        refused = float(jax.device_get(metrics["refused_by_finite"]))
        seen.setdefault(str(done + 1), {"refused": refused, "unchanged": before == digest(new)})
        return new, metrics

    backprop.make_loss_and_grads, loop.Loop._take = with_hole, watched  # type: ignore[method-assign]
    run = js.fit(config(seed), run=root / "run", quiet=True)
    seen["end"] = digest(run.state)
    (root / f"{number}.json").write_text(json.dumps(seen))


def digest(state: Any) -> str:
    """Return the SHA-256 of this process's shards of parameters and optimizer state."""
    digests = hashlib.sha256()
    for x in jax.tree.leaves((state.params, state.opt_state)):
        for shard in x.addressable_shards:
            digests.update(np.asarray(shard.data).tobytes())
    return digests.hexdigest()


def main() -> None:
    """Run both processes, print a table and write results/finite.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        lives.configure(root / "cache")
        together(lambda: life(args.seed, root), 2, 4)
        seen = [json.loads((root / f"{i}.json").read_text()) for i in range(2)]
        skips = read_skips(root / "run" / "skipped.jsonl")
    rows = []
    for step, fault in MADE.items():
        record = next((r for r in skips if r.get("step") == step), {})
        both = [s[str(step)] for s in seen]
        rows.append({
            "step": step,
            "fault": fault,
            "skipped_by": [i for i, s in enumerate(both) if s["refused"]],
            "bitwise_unchanged_in": [i for i, s in enumerate(both) if s["unchanged"]],
            "rows_recorded": len(record.get("rows", ())),
        })  # fmt: skip
        print(rows[-1])
    others = [s for s in range(1, STEPS + 1) if s not in MADE and str(s) in seen[0]]
    wrong = [s for s in others if bool(seen[0][str(s)]["refused"]) != (s in (19, 20))]
    back = [r for r in skips if "back_to" in r]
    print("rolled back:", back)
    print("steps skipped without a fault, or not skipped with one:", wrong)
    result = {"seed": args.seed, "rows": rows, "returns": [{k: r[k] for k in ("back_to", "passed_over")} for r in back]}
    result |= {"wrong_elsewhere": wrong, "jax": jax.__version__}
    (HERE / "results" / "finite.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
