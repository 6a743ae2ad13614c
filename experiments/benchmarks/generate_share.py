"""A step of decoding on an accelerator: which share of the memory's bandwidth our engine reaches, weights and cache.

    python experiments/benchmarks/generate_share.py               a 1.2B Llama of random weights, bfloat16
    python experiments/benchmarks/generate_share.py --json FILE   and every row into a file

A step reads every weight once and the keys and values of each text; those bytes over its time are held against the
read bandwidth of a plain sum, measured between texts of the same row. There is no target. On a CPU the model is tiny
and the figures say nothing of an accelerator.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
import measure
import record
import rivals
from flax import nnx
from generate import Case, Ours, Sizes

from jaxscale.infer.cache import Contiguous, cache_bytes
from jaxscale.models import TransformerConfig
from jaxscale.train import describe_model, make_params

LARGE = Sizes(layers=16, width=2048, heads=32, kv_heads=8, hidden=8192, vocab=128256, dtype="bfloat16")


def measure_row(
    z: Sizes, graphdef: Any, params: Any, prompt: int, new: int, rounds: int, batch: int
) -> tuple[dict[str, Any], list[record.Line]]:
    """Tokens a second of so many texts at once, and the share of the bandwidth that their steps reach."""
    read = jnp.ones((2**26 if jax.default_backend() == "cpu" else 2**32) // 4, jnp.float32)
    total = rivals.several(functools.partial(jax.jit(jnp.sum), read), 1)
    case = Case(f"batch {batch}", ((prompt, new),) * batch)
    ours = Ours(graphdef, params, case, z)
    ours(0)
    total()
    steps, sums = [], []
    for n in range(1, rounds + 1):
        begin = time.perf_counter()
        ours(n)
        steps.append((time.perf_counter() - begin - ours.first[-1]) / (new - 1))
        begin = time.perf_counter()
        total()
        sums.append(time.perf_counter() - begin)
    weights = sum(x.nbytes for x in jax.tree.leaves(params))
    kept = cache_bytes(nnx.merge(graphdef, params), Contiguous(), 1, batch, prompt + new // 2)
    share = measure.ratio([(weights + kept) / read.nbytes * s for s in sums], steps)
    row = {
        "weights_bytes": weights,
        "cache_bytes": kept,
        "compile_seconds": ours.compile_seconds,
        "first_token_seconds": statistics.median(ours.first[1:]),
        "timings": {"step": steps, "sum": sums},
    }
    line = record.Line(
        f"generate 1.2B batch {batch}, {prompt} + {new} tokens" if z is LARGE else f"generate batch {batch}",
        runs="engine", unit="tokens/s", ours=batch / statistics.median(steps), ratio=dataclasses.asdict(share),
        against="sum", copy=read.nbytes / statistics.median(sums) / 1e9,
    )  # fmt: skip
    return row, [line]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    record.options(parser)
    args = parser.parse_args()
    device = jax.devices()[0]
    small = device.platform == "cpu"
    z, prompt, new = (Sizes(), 32, 16) if small else (LARGE, 1024, 256)
    config = TransformerConfig(
        depth=z.layers, width=z.width, heads=z.heads, kv_heads=z.kv_heads, hidden=z.hidden, vocab=z.vocab,
        dtype=z.dtype, param_dtype=z.dtype, tied=True,
    )  # fmt: skip
    graphdef, _ = describe_model(config)
    params = jax.jit(make_params, static_argnums=(0, 1))(config, 0)
    results = record.Results("generate_share", device.device_kind, args, sizes=dataclasses.asdict(z))
    run = functools.partial(measure_row, z, graphdef, params, prompt, new, min(args.rounds, 9))
    results.each(((f"generate batch {batch}", batch) for batch in (8, 1, 32)), run)
    results.show()


if __name__ == "__main__":
    main()
