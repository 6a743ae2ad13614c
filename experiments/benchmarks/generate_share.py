"""Decode steps on an accelerator: the share of memory bandwidth that our engine reaches in reading weights and cache.

    python experiments/benchmarks/generate_share.py               a 1.2B Llama of random weights, bfloat16
    python experiments/benchmarks/generate_share.py --json FILE   the same, and write every row

A step reads every weight once and the keys and values of each sequence; those bytes over its time are compared with the
read bandwidth of a plain sum, measured after each round. Only steps in which every sequence gets a token and no prompt
is prefilled are timed: the engine prefills prompts in chunks, so sequences begin and end one after another. There is no
target. On a CPU the model is tiny and the figures say nothing about an accelerator.
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
    """The steps of a round in which every sequence got a token and no prompt was prefilled.

    Args:
      seconds: time of these steps together.
      steps: number of these steps.
      cached: tokens of all sequences together that a step read from the cache, the mean.
      first, last: seconds until one sequence had its first token, and until all had.
    """

    seconds: float
    steps: int
    cached: float
    first: float
    last: float


def decode(engine: Engine, prompts: Sequence[tuple[int, ...]], new: int) -> Decoding:
    """Generate `new` tokens for each prompt, greedily, and time the decode steps.

    Raises:
      RuntimeError: the first sequence ended before the last one began.
    """
    count = dict.fromkeys(range(len(prompts)), 0)
    begin = time.perf_counter()
    for i, prompt in enumerate(prompts):
        engine.submit(Request(prompt, Sampling(max_tokens=new, temperature=0.0), i))
    seconds, steps, cached, first, last = 0.0, 0, 0, 0.0, 0.0
    before, done = begin, engine.stats.steps
    while engine.busy:
        came = Counter(event.id for event in engine.step())
        now, more = time.perf_counter(), engine.stats.steps - done
        if all(count.values()) and all(came[i] == more for i in count):  # also in a call of several steps
            seconds, steps = seconds + now - before, steps + more
            length = sum(len(prompt) for prompt in prompts) + sum(count.values())
            cached += sum(length + len(prompts) * step for step in range(more))
        for i, tokens in came.items():
            count[i] += tokens
        first = first or (now - begin if came else 0.0)
        last = last or (now - begin if all(count.values()) else 0.0)
        before, done = now, done + more
    if not steps:
        raise RuntimeError(f"no step had all {len(prompts)} sequences: the first ended before the last began")
    return Decoding(seconds, steps, cached / steps, first, last)


def measure_row(
    z: Sizes, graphdef: Any, params: Any, prompt: int, new: int, rounds: int, batch: int
) -> tuple[dict[str, Any], list[record.Line]]:
    """Measure tokens a second of `batch` sequences, and the share of the bandwidth that their steps reach."""
    read = jnp.ones((2**26 if jax.default_backend() == "cpu" else 2**32) // 4, jnp.float32)
    total = rivals.several(functools.partial(jax.jit(jnp.sum), read), 1)
    case = Case(f"batch {batch}", ((prompt, new),) * batch)
    ours = Ours(graphdef, params, case, z)
    ours(0)
    total()
    decodings, sums = [], []
    for n in range(1, rounds + 1):
        decodings.append(decode(ours.engine, case.prompts(n, z.vocab), new))
        begin = time.perf_counter()
        total()
        sums.append(time.perf_counter() - begin)
    steps = [d.seconds / d.steps for d in decodings]
    weights = sum(x.nbytes for x in jax.tree.leaves(params))
    of_token = cache_bytes(nnx.merge(graphdef, params), Contiguous(), 1, 1, 1)
    cached = statistics.median(d.cached for d in decodings) * of_token
    share = measure.ratio([(weights + cached) / read.nbytes * s for s in sums], steps)
    row = {
        "weights_bytes": weights,
        "cache_bytes": cached,
        "compile_seconds": ours.compile_seconds,
        "first_token_seconds": statistics.median(d.first for d in decodings),
        "all_first_tokens_seconds": statistics.median(d.last for d in decodings),
        "timed_steps": statistics.median(d.steps for d in decodings),
        "timings": {"step": steps, "sum": sums},
    }
    line = record.Line(
        f"generate 1.2B batch {batch}, {prompt} + {new} tokens" if z is LARGE else f"generate batch {batch}",
        runs="engine", unit="tokens/s", ours=batch / statistics.median(steps), ratio=dataclasses.asdict(share),
        against="sum", copy=read.nbytes / statistics.median(sums) / 1e9,
    )  # fmt: skip
    return row, [line]


def main() -> None:
    """Measure every row and print the table."""
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
