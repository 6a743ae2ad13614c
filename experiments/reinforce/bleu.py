"""Time sentence BLEU under `jit` beside a loop over sentences with counters.

python experiments/reinforce/bleu.py
"""

from __future__ import annotations

import collections
import math
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jaxscale.rl import sentence_bleu


def grams(words: list[int], n: int) -> collections.Counter[tuple[int, ...]]:
    """Return the n-grams of a sentence with their counts."""
    return collections.Counter(tuple(words[i : i + n]) for i in range(len(words) - n + 1))


def by_counters(hypothesis: list[int], reference: list[int]) -> float:
    """Return the BLEU of one sentence, exponentially smoothed."""
    logs, halves = 0.0, 1.0
    for n in range(1, 5):
        ours = grams(hypothesis, n)
        total, matches = sum(ours.values()), float(sum((ours & grams(reference, n)).values()))
        if not matches:
            halves /= 2
            matches = halves
        logs += math.log(matches / total) / 4
    return math.exp(logs + min(0.0, 1 - len(reference) / len(hypothesis)))


def median_of(work: Callable[[], Any], rounds: int = 9) -> float:
    """Return the median seconds of a call."""
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return float(np.median(times))


def main() -> None:
    """Print a table."""
    random, jitted = np.random.default_rng(0), jax.jit(sentence_bleu)
    print("sentences  tokens  loop (ms)  jit (ms)  largest difference")
    for count, length in ((64, 32), (256, 64), (256, 256), (1024, 64)):
        pair = [random.integers(0, 40, (count, length)).astype(np.int32) for _ in range(2)]
        sizes = np.full(count, length, np.int32)
        arrays = pair[0], sizes, pair[1][:, None], sizes[:, None]
        lists = [x.tolist() for x in pair]
        loop = [by_counters(h, r) for h, r in zip(*lists, strict=True)]
        apart = np.abs(np.asarray(jitted(*arrays)) - loop).max()
        slow = median_of(lambda lists=lists: [by_counters(h, r) for h, r in zip(*lists, strict=True)])
        fast = median_of(lambda arrays=arrays: jax.block_until_ready(jitted(*arrays)))
        print(f"{count:9} {length:7} {slow * 1e3:10.1f} {fast * 1e3:9.1f}  {apart:.1e}")


if __name__ == "__main__":
    main()
