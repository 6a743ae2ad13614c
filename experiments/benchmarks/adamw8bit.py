"""Fused AdamW with 8-bit states, compared with the same in plain XLA, with 32-bit states, and with torch.

    python experiments/benchmarks/adamw8bit.py                 all sizes for this machine
    python experiments/benchmarks/adamw8bit.py --json FILE     the same, and write the figures

One process; rows are called in turns and each ratio is a median over adjacent calls. Parameters, gradients and states
are those after a few real steps on normally distributed data. On a GPU a call is several steps in one program, so that
launch time matters little, and the caches are overwritten before each call. A copy is measured in the same turns; a
row's share of the copy's bandwidth follows from its bytes per parameter (counted, not measured) and its time. On a CPU
the sizes are toys, and the figures say nothing about a GPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import math
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # leaves memory for torch

import jax
import jax.numpy as jnp
import measure
import record
import rivals
from jax import Array

from jaxscale.optim.adamw import AdamWState, adamw
from pallas_kernels.blockwise import ADAMW, quantize_blockwise, update_blockwise
from pallas_kernels.dispatch import chosen, forget

NUMBERS = dict(lr=1e-3, b1=0.9, b2=0.95, eps=1e-8, weight_decay=0.1)
TILE, COLUMNS = (1, 128), 4096
SIZES = {"gpu": (256, 64, 16), "tpu": (256, 64, 16), "cpu": (4, 1)}  # millions of parameters, most informative first
STEPS = {"gpu": 8, "tpu": 8, "cpu": 1}  # in one timed call
SETTLING = 3  # real steps before anything is timed
FLUSH = 256 * 2**20
TARGETS = {"copy": 0.70, "8-bit in XLA": 2.5, "torch fused": 1.4}
"""Share of the copy's bandwidth; speed relative to the same in XLA, and to torch's 32-bit AdamW."""


@dataclasses.dataclass
class Row:
    """One way to take a step.

    Args:
      call: takes `steps` steps and returns when they are done.
      bytes: bytes read and written per parameter and step.
      steps: steps in one call.
    """

    call: Callable[[], None]
    bytes: float
    steps: int


def scalars(t: Any) -> dict[str, Any]:
    """Return the scalars that the update rule needs at step t."""
    return NUMBERS | {"fix1": 1 - NUMBERS["b1"] ** t, "fix2": 1 - NUMBERS["b2"] ** t}


def normal(size: int, dtype: Any, scale: float, seed: int) -> Array:
    """Return a random matrix of 4096 columns."""
    return (jax.random.normal(jax.random.key(seed), (size // COLUMNS, COLUMNS)) * scale).astype(dtype)


def carried(
    step: Callable[..., tuple[Any, ...]], state: tuple[Any, ...], grad: Array, steps: int
) -> Callable[[], None]:
    """Return a call that takes `steps` steps in one program and updates the state in place."""

    def several(state: tuple[Any, ...], grad: Array) -> tuple[Any, ...]:
        for _ in range(steps):
            state = jax.lax.optimization_barrier(step(*state, grad))  # or XLA would fuse all steps into one pass
        return state

    program = jax.jit(several, donate_argnums=0).lower(state, grad).compile()
    box = [state]

    def call() -> None:
        box[0] = program(box[0], grad)
        jax.block_until_ready(box[0])

    return call


def eight_bit(size: int, dtype: Any, steps: int, implementation: str | None) -> Row:
    """Return our AdamW with 8-bit moments."""

    def step(p: Array, states: Any, t: Array, g: Array) -> tuple[Any, ...]:
        p, states = update_blockwise(ADAMW, scalars(t), p, g, states, implementation=implementation)
        return p, states, t + 1

    shape = (size // COLUMNS, COLUMNS)
    zero = jax.jit(lambda x: tuple(quantize_blockwise(x, tile=TILE, signed=signed) for signed in ADAMW.states))
    states = zero(jnp.zeros(shape))
    state = (normal(size, dtype, 0.02, 0), states, jnp.float32(1))
    for i in range(SETTLING):
        state = jax.jit(step)(*state, normal(size, dtype, 1e-3, 1 + i))
    item = jnp.dtype(dtype).itemsize
    return Row(carried(step, state, normal(size, dtype, 1e-3, 9), steps), 3 * item + 4 + 16 / math.prod(TILE), steps)


def thirty_two_bit(size: int, dtype: Any, steps: int) -> Row:
    """Return jaxscale's AdamW with float32 moments, updated in place."""
    tx = adamw(NUMBERS["lr"], **{k: v for k, v in NUMBERS.items() if k != "lr"})

    def step(p: Array, state: AdamWState, g: Array) -> tuple[Any, ...]:
        return tx.update_and_apply(g, state, p)

    p = normal(size, dtype, 0.02, 0)
    mu, nu = normal(size, jnp.float32, 1e-4, 1), jnp.square(normal(size, jnp.float32, 1e-4, 2))
    state = (p, AdamWState(jnp.int32(SETTLING), mu, nu))
    return Row(carried(step, state, normal(size, dtype, 1e-3, 9), steps), 3 * jnp.dtype(dtype).itemsize + 16, steps)


def copy(size: int, dtype: Any, steps: int) -> Row:
    """Return a row that copies a float32 array of `size` numbers (times one)."""

    def step(x: Array, one: Array) -> tuple[Any, ...]:
        return (x * one,)

    state = (normal(size, jnp.float32, 1.0, 0),)
    return Row(carried(step, state, jnp.float32(1.0), steps), 8.0, steps)


def torch_fused(size: int, dtype: Any, steps: int) -> Row:
    """Return torch's fused AdamW; its moments have the parameter's dtype.

    Raises:
      Exception: torch is not installed, has no GPU, or fails.
    """
    torch = rivals.torch_here()
    kind = {"float32": torch.float32, "bfloat16": torch.bfloat16}[jnp.dtype(dtype).name]
    p = torch.nn.Parameter((torch.randn(size, device="cuda") * 0.02).to(kind))
    p.grad = (torch.randn(size, device="cuda") * 1e-3).to(kind)
    numbers = dict(lr=NUMBERS["lr"], betas=(NUMBERS["b1"], NUMBERS["b2"]), eps=NUMBERS["eps"])
    optimizer = torch.optim.AdamW([p], weight_decay=NUMBERS["weight_decay"], fused=True, **numbers)

    def call() -> None:
        for _ in range(steps):
            optimizer.step()
        torch.cuda.synchronize()

    for _ in range(SETTLING):
        call()
    return Row(call, 7 * jnp.dtype(dtype).itemsize, steps)


def in_turns(rows: dict[str, Row], rounds: int, flush: Callable[[], None]) -> dict[str, list[float]]:
    """Return seconds per step of every row: as `measure.interleaved`, with the caches overwritten before each call."""
    seconds: dict[str, list[float]] = {name: [] for name in rows}
    names = list(rows)
    for i in range(-2, rounds):
        for name in names if i % 2 == 0 else reversed(names):
            flush()
            start = time.perf_counter()
            rows[name].call()
            if i >= 0:
                seconds[name].append((time.perf_counter() - start) / rows[name].steps)
    return seconds


def flusher(platform: str) -> Callable[[], None]:
    """Return a function that overwrites a GPU's caches; it does nothing on other platforms."""
    if platform != "gpu":
        return lambda: None
    write = jax.jit(lambda x: x + 1, donate_argnums=0)
    box = [jnp.zeros(FLUSH // 4, jnp.int32)]

    def flush() -> None:
        box[0] = jax.block_until_ready(write(box[0]))

    return flush


def one_size(platform: str, rounds: int, case: tuple[int, Any]) -> tuple[dict[str, Any], list[record.Line]]:
    """Measure all implementations at one size.

    Args:
      platform: "gpu", "tpu" or "cpu".
      rounds: timed calls of each.
      case: millions of parameters, and their dtype.
    """
    (millions, dtype), steps = case, STEPS[platform]
    size = millions * 2**20
    forget()
    rows = {"ours": eight_bit(size, dtype, steps, None)}
    ran = sorted({c.implementation for c in chosen("blockwise")})
    rows |= {
        "8-bit in XLA": eight_bit(size, dtype, steps, "xla"),
        "32-bit in XLA": thirty_two_bit(size, dtype, steps),
        "copy": copy(size, dtype, steps),
    }
    kind = jax.devices()[0].device_kind
    refused = {}
    try:
        rows["torch fused"] = torch_fused(size, dtype, steps)
    except Exception as e:
        refused["torch fused"] = f"{type(e).__name__}: {str(e)[:200]}"
    seconds = in_turns(rows, rounds, flusher(platform))
    speed = {n: rows[n].bytes * size / statistics.median(s) / 1e9 for n, s in seconds.items()}
    common: dict[str, Any] = dict(
        runs=", ".join(ran), unit="GB/s", ours=speed["ours"], copy=speed["copy"], refused=refused
    )
    common["others"] = {n: v for n, v in speed.items() if n not in ("ours", "copy")}
    lines = []
    for against, aim in TARGETS.items():
        if against not in rows or (against == "torch fused" and dtype != jnp.float32):
            continue  # torch's moments have the parameter's dtype: 32 bits only for float32 parameters
        work = rows["ours"].bytes / rows["copy"].bytes if against == "copy" else 1.0
        ratio = dataclasses.asdict(measure.ratio([work * s for s in seconds[against]], seconds["ours"]))
        verdict = record.judge(ratio, aim, None, kind)
        lines.append(record.Line(_name(case), ratio=ratio, against=against, target=aim, verdict=verdict, **common))
    bytes_each = {n: r.bytes for n, r in rows.items()}
    return {"parameters": size, "bytes_per_parameter": bytes_each, "timings": seconds}, lines


def _name(case: tuple[int, Any]) -> str:
    return f"adamw8bit {case[0]}M {jnp.dtype(case[1]).name}"


def main() -> None:
    """Measure every row and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    record.options(parser)
    parser.add_argument("--millions", type=int, nargs="*", help="millions of parameters (default: by machine)")
    args = parser.parse_args()
    device = jax.devices()[0]
    platform = device.platform if device.platform in SIZES else "gpu"
    if platform == "cpu":
        print("on a CPU: toy sizes, no kernel; these figures say nothing about a GPU or a TPU")
    results = record.Results("adamw8bit", device.device_kind, args)
    cases = [
        (millions, dtype) for millions in args.millions or SIZES[platform] for dtype in (jnp.bfloat16, jnp.float32)
    ]
    results.each(((_name(case), case) for case in cases), functools.partial(one_size, platform, args.rounds))
    results.show()


if __name__ == "__main__":
    main()
