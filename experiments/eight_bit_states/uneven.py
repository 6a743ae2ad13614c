"""8-bit AdamW on uneven gradients: ours and bitsandbytes, both compared with AdamW in float64.

    python3 -m venv bnb && bnb/bin/pip install torch==2.13.0 bitsandbytes numpy       # CPU code; needs gcc
    bnb/bin/python experiments/eight_bit_states/uneven.py --theirs theirs.npz         # runs bitsandbytes, needs no JAX
    .venv/bin/python experiments/eight_bit_states/uneven.py --against theirs.npz      # writes uneven.json

A minute of processor time for bitsandbytes, ten seconds for ours. Both get the same gradients; every kind of gradient
has a parameter of its own, which starts at 0.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import platform
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).parent
STEPS, SHAPE, LR, B1, EPS = 50, (64, 256), 1e-2, 0.9, 1e-8
B2S, SEEDS = (0.95, 0.999), (0, 1, 2)
KINDS = ("dense", "95% zeros", "row-scaled", "column-scaled", "heavy-tailed", "one outlier")
Outcome = tuple[np.ndarray, np.ndarray]
"""Largest |update| / lr of all steps, (kinds,), and the final weights, (kinds, rows, columns); float64."""


def gradients(seed: int) -> np.ndarray:
    """Return random gradients (steps, kinds, rows, columns), float32."""
    random = np.random.default_rng(seed)
    draw = lambda: random.normal(size=(STEPS, *SHAPE)) * 1e-3  # noqa: E731
    outlier = draw()
    outlier[:, 3, 5] *= 1e4
    kinds = (
        draw(),
        draw() * (random.uniform(size=(STEPS, *SHAPE)) < 0.05),
        draw() * 10.0 ** random.uniform(-4, 0, (SHAPE[0], 1)),
        draw() * 10.0 ** random.uniform(-4, 0, SHAPE[1]),
        random.standard_cauchy((STEPS, *SHAPE)) * 1e-3,
        outlier,
    )
    return np.stack(kinds, axis=1).astype(np.float32)


def steps(grads: np.ndarray, step: Callable[[np.ndarray], np.ndarray]) -> Outcome:
    """Call `step(gradients of all kinds) -> weights` for every step and collect the updates."""
    w, largest = np.zeros(grads.shape[1:]), []
    for g in grads:
        new = np.float64(step(g))
        largest.append(np.abs(new - w).max(axis=(1, 2)) / LR)
        w = new
    return np.max(largest, axis=0), w


def exact(grads: np.ndarray, b2: float) -> Outcome:
    """Run AdamW without weight decay in float64."""
    m, v, w = np.zeros((3, *grads.shape[1:]))
    count = 0

    def step(g: np.ndarray) -> np.ndarray:
        nonlocal m, v, w, count
        count, g = count + 1, np.float64(g)
        m, v = B1 * m + (1 - B1) * g, b2 * v + (1 - b2) * g * g
        w = w - LR * m / (1 - B1**count) / (np.sqrt(v / (1 - b2**count)) + EPS)
        return w

    return steps(grads, step)


def theirs(grads: np.ndarray, b2: float) -> Outcome:
    """Run `bitsandbytes.optim.AdamW8bit` on the CPU."""
    import bitsandbytes
    import torch

    params = [torch.nn.Parameter(torch.zeros(SHAPE)) for _ in KINDS]
    optimizer = bitsandbytes.optim.AdamW8bit(params, lr=LR, betas=(B1, b2), eps=EPS, weight_decay=0.0)

    def step(g: np.ndarray) -> np.ndarray:
        for p, own in zip(params, g, strict=True):
            p.grad = torch.from_numpy(own.copy())
        optimizer.step()
        assert all(optimizer.state[p]["state2"].dtype == torch.uint8 for p in params), "its state is not in 8 bits"
        return np.stack([p.detach().numpy() for p in params])

    return steps(grads, step)


def ours(grads: np.ndarray, b2: float) -> Outcome:
    """Run `jaxscale.optim.adamw_8bit`, implemented by XLA."""
    import jax
    import jax.numpy as jnp

    from jaxscale.optim import EightBit, adamw_8bit, is_quantized

    storage = EightBit(min_size=0, keep=())
    tx = adamw_8bit(LR, B1, b2, EPS, 0.0, storage=storage, implementation="xla")
    params = {kind: jnp.zeros(SHAPE) for kind in KINDS}
    state = tx.init(params)
    assert all(is_quantized(q) and q.tile == (1, 128) for q in state.nu.values())
    update = jax.jit(tx.update_and_apply)

    def step(g: np.ndarray) -> np.ndarray:
        nonlocal params, state
        params, state = update(dict(zip(KINDS, g, strict=True)), state, params)
        return np.stack([params[kind] for kind in KINDS])

    return steps(grads, step)


def save_theirs(path: Path) -> None:
    """Run bitsandbytes for every b2 and seed, and save its results and versions."""
    outcomes = [[theirs(gradients(seed), b2) for seed in SEEDS] for b2 in B2S]
    largest, weights = ([[one[i] for one in row] for row in outcomes] for i in (0, 1))
    names = ("bitsandbytes", "torch", "numpy")
    versions = {name: importlib.metadata.version(name) for name in names} | {"python": platform.python_version()}
    np.savez(path, largest=largest, weights=weights, versions=json.dumps(versions))


def table(path: Path) -> list[dict[str, Any]]:
    """Return a row for each b2 and kind of gradient: the worst of the seeds."""
    known, rows = np.load(path), []
    for i, b2 in enumerate(B2S):
        outcomes = [(exact(g, b2), ours(g, b2)) for g in map(gradients, SEEDS)]
        for k, kind in enumerate(KINDS):
            largest = {
                "32-bit": max(e[0][k] for e, _ in outcomes),
                "ours": max(o[0][k] for _, o in outcomes),
                "bitsandbytes": known["largest"][i, :, k].max(),
            }
            off = lambda w, e: np.sqrt(np.mean(np.square(w - e))) / LR  # noqa: E731
            deviation = {
                "ours": max(off(o[1][k], e[1][k]) for e, o in outcomes),
                "bitsandbytes": max(off(known["weights"][i, s, k], outcomes[s][0][1][k]) for s in range(len(SEEDS))),
            }
            growth = max(o[0][k] / e[0][k] for e, o in outcomes)
            ratio = deviation["ours"] / deviation["bitsandbytes"]
            met = bool(growth <= 1.2 and ratio <= 2)
            figures = {"largest": largest, "growth": growth, "deviation": deviation, "ratio": ratio}
            rows.append({"b2": b2, "kind": kind, **json.loads(json.dumps(figures, default=float)), "met": met})
    return rows


def main() -> None:
    """Run bitsandbytes, or run ours, compare and write uneven.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--theirs", type=Path, metavar="FILE", help="run bitsandbytes and write its results")
    which.add_argument("--against", type=Path, metavar="FILE", help="run ours and compare with the results in FILE")
    args = parser.parse_args()
    if args.theirs is not None:
        save_theirs(args.theirs)
        return
    rows = table(args.against)
    print("| b2 | gradients | 32-bit | ours | bitsandbytes | ours off by | bitsandbytes off by | ratio |")
    print("|---|---|---|---|---|---|---|---|")
    for r in rows:
        most = " | ".join(f"{r['largest'][who]:.3f}" for who in ("32-bit", "ours", "bitsandbytes"))
        off = " | ".join(f"{r['deviation'][who]:.4f}" for who in ("ours", "bitsandbytes"))
        print(f"| {r['b2']} | {r['kind']} | {most} | {off} | {r['ratio']:.2f} |")
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=HERE).stdout.strip()
    result = {
        "what": f"{STEPS} steps of AdamW, {SHAPE[0]} x {SHAPE[1]}, lr {LR}, eps {EPS}; worst of {len(SEEDS)} seeds",
        "date": datetime.date.today().isoformat(),
        "commit": commit,
        "theirs": json.loads(str(np.load(args.against)["versions"])),
        "ours": {"jax": importlib.metadata.version("jax"), "python": platform.python_version()},
        "rows": rows,
    }
    (HERE / "uneven.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
