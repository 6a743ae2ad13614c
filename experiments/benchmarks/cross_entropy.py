"""The loss without logits, forward and with its gradients, against materialised logits and the speed of a matmul.

    python experiments/benchmarks/cross_entropy.py                           on the device there is
    python experiments/benchmarks/cross_entropy.py --json cross_entropy.json and every timing into a file

A round calls a square matrix product, ours and theirs in turns, so that a clock that drops drops for all of them. A
forward pass has one product of N x E x V; with gradients ours has four, since logits are made twice, and theirs three.
The share is the time of that many products at the square one's rate, over ours. Ratios are medians over rounds. On a
CPU sizes are small and no target applies.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import measure
import optax

from pallas_kernels.cut_cross_entropy import linear_cross_entropy
from pallas_kernels.dispatch import chosen

TARGETS = {"forward": 0.85, "forward and backward": 1 / 1.15}
"""Of the matrix product's rate; and both at least as fast as materialised logits."""

PRODUCTS = {"forward": 1, "forward and backward": 4}


@dataclasses.dataclass(frozen=True)
class Machine:
    """What is measured where.

    Args:
      tokens, width, words: N, E and V.
      square: length of the matrix product's sides.
      rounds: timings of each.
    """

    tokens: int
    width: int
    words: int
    square: int
    rounds: int


MACHINES = {
    "gpu": Machine(8192, 4096, 131072, 8192, 30),
    "tpu": Machine(8192, 4096, 131072, 8192, 30),
    "cpu": Machine(512, 256, 16384, 1024, 30),
}


def ours(x: jax.Array, w: jax.Array, targets: jax.Array) -> jax.Array:
    """The mean loss."""
    return linear_cross_entropy(x, w, targets).mean()


def theirs(x: jax.Array, w: jax.Array, targets: jax.Array) -> jax.Array:
    """The same of float32 logits, as optax has it."""
    logits = jnp.einsum("ne,ve->nv", x, w, preferred_element_type=jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


def measure_row(machine: Machine, dtype: Any, direction: str) -> dict[str, Any]:
    """Seconds of each, what ran, and the ratios."""
    keys = jax.random.split(jax.random.key(0), 3)
    n, e, v = machine.tokens, machine.width, machine.words
    x, w = jax.random.normal(keys[0], (n, e), dtype), jax.random.normal(keys[1], (v, e), dtype) * e**-0.5
    targets = jax.random.randint(keys[2], (n,), 0, v)
    square = jnp.ones((machine.square,) * 2, dtype)
    calls = {"matmul": _call(jnp.matmul, square, square)}
    outs = {}
    for name, f in (("ours", ours), ("theirs", theirs)):
        calls[name] = _call(f if direction == "forward" else jax.value_and_grad(f, (0, 1)), x, w, targets)
        outs[name] = jax.tree.leaves(calls[name]())
    apart = max(_apart(a, b) for a, b in zip(outs["ours"], outs["theirs"], strict=True))
    if not apart < 0.02:
        raise SystemExit(f"{direction}: ours and optax's are {apart} apart, relatively")
    del outs
    seconds = {name: t.wall for name, t in measure.interleaved(calls, machine.rounds).items()}
    products = PRODUCTS[direction] * n * e * v / machine.square**3
    at_its_rate = [products * s for s in seconds["matmul"]]
    return {
        "direction": direction,
        "shape": [n, e, v],
        "dtype": jnp.dtype(dtype).name,
        "implementation": chosen("linear_cross_entropy")[-1].implementation,
        "matmul_tflops": 2 * machine.square**3 / statistics.median(seconds["matmul"]) / 1e12,
        "seconds": {name: statistics.median(s) for name, s in seconds.items()},
        "ratio": dataclasses.asdict(measure.ratio(seconds["theirs"], seconds["ours"])),
        "share_of_matmul": dataclasses.asdict(measure.ratio(at_its_rate, seconds["ours"])),
        "apart": apart,
        "target": TARGETS[direction],
        "timings": seconds,
    }


def _call(f: Callable[..., Any], *arrays: jax.Array) -> Callable[[], Any]:
    jitted = jax.jit(f)
    return lambda: jax.block_until_ready(jitted(*arrays))


def _apart(a: jax.Array, b: jax.Array) -> float:
    a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    return float(jnp.linalg.norm(a - b) / jnp.linalg.norm(b))


HEADER = ("direction", "N x E x V", "runs", "matmul TFLOP/s", "ours ms", "XLA ms", "of matmul", "ratio", "target", "")


def line(row: dict[str, Any], judged: bool) -> tuple[str, ...]:
    """A row of the table."""
    met = row["share_of_matmul"]["median"] >= row["target"] and row["ratio"]["median"] >= 1.0
    return (
        row["direction"],
        " x ".join(map(str, row["shape"])),
        row["implementation"],
        f"{row['matmul_tflops']:.3g}",
        f"{row['seconds']['ours'] * 1e3:.2f}",
        f"{row['seconds']['theirs'] * 1e3:.2f}",
        f"{row['share_of_matmul']['median']:.2f}",
        f"{row['ratio']['median']:.2f} ({row['ratio']['low']:.2f}–{row['ratio']['high']:.2f})",
        f"≥ {row['target']:.2f} of matmul, ≥ 1.0" if judged else "none",
        ("met" if met else "missed") if judged else "",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write every timing there")
    parser.add_argument("--dtype", default=None, help="bfloat16 (float32 on a CPU)")
    parser.add_argument("--rounds", type=int, help="timings of each (default 30)")
    for name in ("tokens", "width", "words"):
        parser.add_argument(f"--{name}", type=int, help="in place of the machine's own")
    args = parser.parse_args()
    device = jax.devices()[0]
    machine = MACHINES.get(device.platform, MACHINES["cpu"])
    given = {n: v for n in ("tokens", "width", "words", "rounds") if (v := getattr(args, n)) is not None}
    machine = dataclasses.replace(machine, **given)
    dtype = jnp.dtype(args.dtype or ("float32" if device.platform == "cpu" else "bfloat16"))
    judged = device.platform == "gpu" and "H200" in device.device_kind
    if not judged:
        print(f"on {device.device_kind}: sizes are {'small, ' if device.platform == 'cpu' else ''}no target applies")
    print("  ".join(HEADER))
    rows = []
    for direction in TARGETS:
        rows.append(measure_row(machine, dtype, direction))
        print("  ".join(line(rows[-1], judged)), flush=True)
    if args.json:
        result = {**measure.facts(device.device_kind), "judged": judged, "rows": rows}
        args.json.write_text(json.dumps(measure.rounded(result), indent=2) + "\n")


if __name__ == "__main__":
    main()
