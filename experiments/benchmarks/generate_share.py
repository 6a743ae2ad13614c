"""A step of decoding on an accelerator: which share of the memory's bandwidth our engine reaches, weights and cache.

    python experiments/benchmarks/generate_share.py               a 1.2B Llama of random weights, bfloat16
    python experiments/benchmarks/generate_share.py --json FILE   and every row into a file

A step reads every weight once and the keys and values of each text; those bytes over its time are held against the
read bandwidth of a plain sum, measured between texts of the same row. Only steps in which every text gets a token and
no prompt is computed are timed: the engine computes prompts in chunks, so texts begin and end one after another. There
is no target. On a CPU the model is tiny and the figures say nothing of an accelerator.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import measure
import record
import rivals
from flax import nnx
from generate import Case, Ours, Sizes

from jaxscale.infer.cache import Contiguous, cache_bytes
from jaxscale.infer.engine import Engine, Request
from jaxscale.infer.sampling import Sampling
from jaxscale.models import TransformerConfig
from jaxscale.step import describe_model, make_params

LARGE = Sizes(layers=16, width=2048, heads=32, kv_heads=8, hidden=8192, vocab=128256, dtype="bfloat16")


@dataclasses.dataclass(frozen=True)
class Decoding:
    """The steps of a round in which every text got a token and no prompt was computed.

    Args:
      seconds: they took together.
      steps: how many they were, each a token of every text.
      kept: tokens of all texts together that a step read from the cache, the mean.
      first, last: seconds until one text had its first token, and until all had.
    """

    seconds: float
    steps: int
    kept: float
    first: float
    last: float


def decode(engine: Engine, prompts: Sequence[tuple[int, ...]], new: int) -> Decoding:
    """Generates so many tokens of each prompt, greedily.

    Raises:
      RuntimeError: the first text ended before the last one began.
    """
    count = dict.fromkeys(range(len(prompts)), 0)
    begin = time.perf_counter()
    for i, prompt in enumerate(prompts):
        engine.submit(Request(prompt, Sampling(max_tokens=new, temperature=0.0), i))
    seconds, steps, kept, first, last = 0.0, 0, 0, 0.0, 0.0
    before, done = begin, engine.stats.steps
    while engine.busy:
        came = Counter(event.id for event in engine.step())
        now, more = time.perf_counter(), engine.stats.steps - done
        if all(count.values()) and all(came[i] == more for i in count):  # in a call of several, none ended before them
            seconds, steps = seconds + now - before, steps + more
            given = sum(len(prompt) for prompt in prompts) + sum(count.values())
            kept += sum(given + len(prompts) * step for step in range(more))
        for i, tokens in came.items():
            count[i] += tokens
        first = first or (now - begin if came else 0.0)
        last = last or (now - begin if all(count.values()) else 0.0)
        before, done = now, done + more
    if not steps:
        raise RuntimeError(f"no step was of all {len(prompts)} texts: the first ended before the last began")
    return Decoding(seconds, steps, kept / steps, first, last)


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
    found, sums = [], []
    for n in range(1, rounds + 1):
        found.append(decode(ours.engine, case.prompts(n, z.vocab), new))
        begin = time.perf_counter()
        total()
        sums.append(time.perf_counter() - begin)
    steps = [d.seconds / d.steps for d in found]
    weights = sum(x.nbytes for x in jax.tree.leaves(params))
    of_token = cache_bytes(nnx.merge(graphdef, params), Contiguous(), 1, 1, 1)
    kept = statistics.median(d.kept for d in found) * of_token
    share = measure.ratio([(weights + kept) / read.nbytes * s for s in sums], steps)
    row = {
        "weights_bytes": weights,
        "cache_bytes": kept,
        "compile_seconds": ours.compile_seconds,
        "first_token_seconds": statistics.median(d.first for d in found),
        "all_first_tokens_seconds": statistics.median(d.last for d in found),
        "timed_steps": statistics.median(d.steps for d in found),
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
    z, prompt, new = (Sizes(), 32, 32) if small else (LARGE, 1024, 256)
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
