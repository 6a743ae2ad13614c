"""The cross-entropy that never stores logits, forward and with gradients, compared with stored logits and a matmul.

The others: stored logits by XLA and by compiled torch, and tokamax where it is installed.

    python experiments/benchmarks/cross_entropy.py                           on the present device
    python experiments/benchmarks/cross_entropy.py --json cross_entropy.json write every timing to a file

A round calls a square matrix product, ours and theirs in turns, so that a change of the clock frequency affects all of
them. A forward pass has one product of N x E x V; with gradients ours has four, since it computes logits twice, and
theirs has three. Our share is the time that as many products take at the square product's rate, over our time. Ratios
are medians over rounds. On a CPU sizes are small and no target applies.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import os
import statistics
from collections.abc import Callable
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # leaves memory for torch

import jax
import jax.numpy as jnp
import measure
import optax
import record
import rivals

from pallas_kernels.cut_cross_entropy import linear_cross_entropy
from pallas_kernels.dispatch import chosen

TARGETS = {"forward": 0.85, "forward and backward": 1 / 1.15}
"""Least share of the matrix product's rate. Both directions are also to be as fast as stored logits."""

PRODUCTS = {"forward": 1, "forward and backward": 4}


@dataclasses.dataclass(frozen=True)
class Machine:
    """Sizes for a kind of device.

    Args:
      tokens, width, words: N, E and V.
      square: length of the sides of the matrix product.
    """

    tokens: int
    width: int
    words: int
    square: int


MACHINES = {
    "gpu": Machine(8192, 4096, 131072, 8192),
    "tpu": Machine(8192, 4096, 131072, 8192),
    "cpu": Machine(512, 256, 16384, 1024),
}


def ours(x: jax.Array, w: jax.Array, targets: jax.Array) -> jax.Array:
    """Return the mean loss, by our op."""
    return linear_cross_entropy(x, w, targets).mean()


def theirs(x: jax.Array, w: jax.Array, targets: jax.Array) -> jax.Array:
    """Return the mean loss from float32 logits, by optax."""
    logits = jnp.einsum("ne,ve->nv", x, w, preferred_element_type=jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


def measure_row(machine: Machine, dtype: Any, rounds: int, direction: str) -> tuple[dict[str, Any], list[record.Line]]:
    """Measure one direction: seconds of each call, the implementation that ran, and the ratios."""
    keys = jax.random.split(jax.random.key(0), 4)
    n, e, v = machine.tokens, machine.width, machine.words
    x, w = jax.random.normal(keys[0], (n, e), dtype), jax.random.normal(keys[1], (v, e), dtype) * e**-0.5
    targets = jax.random.randint(keys[2], (n,), 0, v)
    square = jax.random.normal(keys[3], (machine.square,) * 2, dtype)
    makers: dict[str, Callable[[], rivals.Call]] = {
        "ours": lambda: _call(ours, direction, x, w, targets),
        "xla": lambda: _call(theirs, direction, x, w, targets),
        "torch": lambda: rivals.torch_loss(x, w, targets, direction),
        "tokamax": lambda: rivals.tokamax_loss(x, w, targets, direction),
    }
    calls, refused = rivals.agreeing(makers, 0.02)
    calls["matmul"] = functools.partial(jax.jit(jnp.matmul), square, square)
    timed = measure.interleaved({name: rivals.several(call, 1) for name, call in calls.items()}, rounds)
    seconds = {name: t.wall for name, t in timed.items()}
    products = PRODUCTS[direction] * n * e * v / machine.square**3
    at_its_rate = [products * s for s in seconds["matmul"]]
    ms = {name: statistics.median(s) * 1e3 for name, s in seconds.items()}
    common: dict[str, Any] = dict(
        runs=chosen("linear_cross_entropy")[-1].implementation, unit="ms", ours=ms["ours"], refused=refused,
        others={name: t for name, t in ms.items() if name not in ("ours", "matmul")},
        matmul=2 * machine.square**3 / ms["matmul"] / 1e9,
    )  # fmt: skip
    lines = []
    for against, time, aim in (("matmul", at_its_rate, TARGETS[direction]), ("xla", seconds.get("xla"), 1.0)):
        ratio = None if time is None else dataclasses.asdict(measure.ratio(time, seconds["ours"]))
        verdict = record.judge(ratio, aim, None, jax.devices()[0].device_kind)
        lines.append(
            record.Line(f"loss {direction}", ratio=ratio, against=against, target=aim, verdict=verdict, **common)
        )
    return {"shape": [n, e, v], "direction": direction, "timings": seconds}, lines


def _call(f: Callable[..., Any], direction: str, *arrays: jax.Array) -> rivals.Call:
    return functools.partial(jax.jit(f if direction == "forward" else jax.value_and_grad(f, (0, 1))), *arrays)


def main() -> None:
    """Measure every row and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    record.options(parser)
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), help="bfloat16 (float32 on a CPU)")
    for name in ("tokens", "width", "words"):
        parser.add_argument(f"--{name}", type=int, help="instead of the size for this machine")
    args = parser.parse_args()
    device = jax.devices()[0]
    machine = MACHINES.get(device.platform, MACHINES["cpu"])
    sizes = {n: v for n in ("tokens", "width", "words") if (v := getattr(args, n)) is not None}
    machine = dataclasses.replace(machine, **sizes)
    dtype = jnp.dtype(args.dtype or ("float32" if device.platform == "cpu" else "bfloat16"))
    results = record.Results("cross_entropy", device.device_kind, args, dtype=dtype.name)
    run = functools.partial(measure_row, machine, dtype, args.rounds)
    results.each(((f"loss {direction}", direction) for direction in TARGETS), run)
    results.show()


if __name__ == "__main__":
    main()
