"""Detection of replicas whose bits differ, and of slow processes; false alarms, and the time that checks take.

    python -m experiments.reliability.divergence --seed 0

1. Flip random bits in one device's copy of one array: each flip must be detected and its array named.
2. Train with a comparison after each step: none may report a difference.
3. Time a comparison and the demo's training step, in turns.
4. Two processes: flip a bit in process 1, which must be named within `every` steps; and let a process sleep.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import io
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

import jaxscale as js
from experiments.reliability import lives
from experiments.reliability.processes import at_step, changed, together
from jaxscale.layout import path_name
from jaxscale.step import blueprint_of, prepare
from jaxscale.step.guards import FingerprintGuard, FiniteGuard, StragglerGuard
from jaxscale.step.guards.fingerprint import comparer
from jaxscale.train import loop
from jaxscale.train.skips import read_skips

HERE = Path(__file__).parent
EVERY = 100


def small(**changes: Any) -> js.TrainConfig:
    """Return the config of a small transformer on eight devices, with four replicas of each array."""
    settings: dict[str, Any] = dict(
        model=js.models.Transformer.Config(depth=1, vocab=32, width=16, heads=2, head_dim=8, hidden=32),
        data=js.data.synthetic(32, documents=64, length=64),
        layout=js.Layout("data=4,tensor=2"),
        steps=40,
        batch_size=8,
        seq_len=16,
        eval_batches=0,
    )
    return js.TrainConfig(**settings | changes)


def turn(word: int, bit: int) -> Any:
    """Return a function that flips one bit of a buffer."""

    def change(data: np.ndarray) -> None:
        kind = np.dtype(f"uint{8 * data.dtype.itemsize}")
        data.reshape(-1).view(kind)[word % data.size] ^= kind.type(1 << bit % (8 * kind.itemsize))

    return change


def flips(count: int, seed: int) -> dict[str, Any]:
    """Flip `count` bits in a live state, one at a time; count those detected, and with array and device named."""
    config, random = small(), np.random.default_rng(seed)
    state = blueprint_of(config)[0].init(seed)
    compare = comparer(state, config.layout)
    leaves, tree = jax.tree_util.tree_flatten_with_path(state)
    plain = [i for i, (_, x) in enumerate(leaves) if not jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)]
    detected = named = placed = 0
    for _ in range(count):
        i, device = int(random.choice(plain)), int(random.integers(8))
        (path, x), fault = leaves[i], turn(int(random.integers(1 << 30)), int(random.integers(64)))
        arrays = [changed(a, fault, device) if n == i else a for n, (_, a) in enumerate(leaves)]
        differences = compare(jax.tree.unflatten(tree, arrays))
        detected += bool(differences)
        named += [d.tensor for d in differences] == [path_name(path)]
        placed += [d.odd for d in differences] == [(device,)]
        del x
    return {"flips": count, "found": detected, "array_named": named, "device_named": placed}


def false_alarms(steps: int, root: Path) -> dict[str, Any]:
    """Train with a comparison after every step; count the reported differences, which would have rolled back."""
    config = small(steps=steps, guards=(FiniteGuard(), FingerprintGuard(every=1)))
    run = js.fit(config, run=root / "long", quiet=True)
    assert run.state is not None and int(run.state.step) == steps
    return {"steps": steps, "comparisons": steps, "false_alarms": len(read_skips(run.path / "skipped.jsonl"))}


def cost(rounds: int) -> dict[str, Any]:
    """Measure the median time of the demo's step and of a comparison of its state, in turns."""
    js.config.load([HERE.parent / "demo.gin"])
    config: Any = js.config.call("train")
    config = dataclasses.replace(config, eval_batches=0, prompt=None)
    prepared = prepare(config)
    seconds: dict[str, list[float]] = {"step": [], "comparison": []}
    with config.layout:
        state, step = prepared.blueprint.init(0), prepared.step_of(config)
        compare = comparer(state, config.layout)
        for i in range(rounds):
            start = time.perf_counter()
            state, metrics = step(state, prepared.place(prepared.loader, i))
            jax.block_until_ready(metrics)
            middle = time.perf_counter()
            assert compare(state) == []
            if i > 1:
                seconds["step"].append(middle - start)
                seconds["comparison"].append(time.perf_counter() - middle)
    medians = {k: float(np.median(v)) for k, v in seconds.items()}
    share = medians["comparison"] / (EVERY * medians["step"])
    return {"rounds": rounds, "every": EVERY, **{f"{k}_ms": round(1e3 * v, 2) for k, v in medians.items()},
            "share_of_step_time": round(share, 5)}  # fmt: skip


FLIPPED, COMPARED, SLEEPS = 7, 5, 0.05


def pair(root: Path) -> None:
    """Run one of two processes: a bit is flipped in process 1, and process 1 is slow to load its batches."""
    number = jax.process_index()

    def flip(state: Any, batch: Any) -> Any:
        if number == 1:
            weight = state.params["embed"]["weight"]
            state.params["embed"]["weight"] = changed(weight, turn(11, 5), jax.local_devices()[2].id)
        return state, batch

    place = loop.Loop._place
    loop.Loop._take = at_step(loop.Loop._take, {FLIPPED: flip})  # type: ignore[method-assign]

    def slow(self: Any, done: int) -> Any:
        time.sleep(SLEEPS * number)
        return place(self, done)

    loop.Loop._place = slow  # type: ignore[method-assign]
    guards = (FingerprintGuard(every=COMPARED), StragglerGuard(every=10))
    with contextlib.redirect_stdout(io.StringIO()) as output:
        js.fit(small(steps=20, checkpoint_every=5, guards=guards), run=root / "pair")
    lines = [line for line in output.getvalue().splitlines() if "is slow" in line or "different bits" in line]
    (root / f"{number}.json").write_text(json.dumps(lines))


def main() -> None:
    """Measure all four, print them and write results/divergence.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--flips", type=int, default=200)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--again", action="store_true", help="ignore earlier results")
    args = parser.parse_args()
    file = HERE / "results" / "divergence.json"
    result: dict[str, Any] = {"seed": args.seed, "jax": jax.__version__}
    if file.exists() and not args.again:  # existing results are not measured again
        before = json.loads(file.read_text())
        result = before if all(before[k] == v for k, v in result.items()) else result
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        lives.configure(root / "cache")

        def alone(name: str, measure: Any) -> None:
            if name not in result:
                together(lambda: (root / name).write_text(json.dumps(measure())) and None, 1, 8)
                result[name] = json.loads((root / name).read_text())
                file.write_text(json.dumps(result, indent=1) + "\n")
            print(name, result[name], flush=True)

        alone("flips", lambda: flips(args.flips, args.seed))
        alone("cost", lambda: cost(args.rounds))
        if "two_processes" not in result:
            together(lambda: pair(root), 2, 4)
            faults = {"flipped_before_step": FLIPPED, "compared_every": COMPARED, "process_1_sleeps": SLEEPS}
            result["two_processes"] = {**faults, "said": json.loads((root / "0.json").read_text())}
            file.write_text(json.dumps(result, indent=1) + "\n")
        print(*result["two_processes"]["said"], sep="\n", flush=True)
        alone("false_alarms", lambda: false_alarms(args.steps, root))


if __name__ == "__main__":
    main()
