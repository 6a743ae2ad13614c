"""Prints the tables of README.md: `python -m experiments.calculators.tables`."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator

import numpy as np

import jaxscale as js
from experiments.calculators import leaf_spine
from experiments.calculators.attention_io import Machine, flash, needed, small_cache
from experiments.calculators.einsum_cascade import CASCADES, passes
from experiments.calculators.long_context import costs
from experiments.calculators.shapes import sizing
from jaxscale.hardware import chip
from jaxscale.models import TransformerConfig

N, D = 32, 16
NETWORK, SEEDS = leaf_spine.Network(leaves=6, hosts=8, spines=6), 5
YI_34B = TransformerConfig(depth=60, vocab=64000, width=7168, heads=56, kv_heads=8, head_dim=128, hidden=20480)
A100 = dataclasses.replace(chip("a100"), bandwidth=2e12, host_bandwidth=2e10)  # rounded as in the paper
SHAPES = TransformerConfig(depth=2, vocab=32770, width=1024, heads=16, head_dim=64, hidden=4224, dtype="bfloat16")


def _table(title: str, *rows: tuple[object, ...]) -> None:
    first, *rest = ([f"{x:,.4g}" if isinstance(x, float) else str(x) for x in row] for row in rows)
    print(f"\n{title}\n")
    print(f"| {' | '.join(first)} |\n|{' --- |' * len(first)}")
    for row in rest:
        print(f"| {' | '.join(row)} |")


def _moved(algorithm, memory: int) -> int:  # type: ignore[no-untyped-def]
    machine = Machine(memory)
    algorithm(machine, *np.random.default_rng(0).normal(size=(3, N, D)))
    return machine.moved


def main() -> None:
    """Print all five tables."""
    rows = [(m, _moved(flash, m), _moved(small_cache, m), needed(N, D, m)) for m in (64, 128, 256, 1024)]
    _table(f"Numbers moved, N = {N}, d = {D}", ("fast memory", "FlashAttention", "tiled product", "bound"), *rows)
    _table("Passes over the keys", ("cascade", "passes"), *((name, passes(text)) for name, text in CASCADES.items()))
    by_length = [(n, costs(YI_34B, A100, n)) for n in (4000, 50000)]
    seen = [(n, c.concurrency, c.prefill, c.decode, c.swap) for n, c in by_length]
    _table("Yi-34B on one A100", ("context", "users", "prefill (s)", "250 tokens (s)", "swap (s)"), *seen)
    run = js.TrainConfig(model=SHAPES, layout=js.Layout("fsdp=2,tensor=2"), batch_size=8, seq_len=512, prompt=None)
    sizes = sizing(run, "v5e:2x2")
    wasted = [(s.name, f"{s.waste:.1%}", s.advice) for s in sizes.rows if s.waste]
    _table(f"Padding on v5e:2x2, {sizes.waste:.1%} of all arithmetic", ("product", "padding", "advice"), *wasted)
    head = ("step", "hashed: congestion", "time", "split: congestion", "time", "split flows", "sprayed: time")
    _table(f"{NETWORK.leaves} leaves of {NETWORK.hosts} hosts, {NETWORK.spines} spines", head, *_network())


def _network() -> Iterator[tuple[object, ...]]:
    """Yield, for steps of collectives, congestion and time over those of sprayed packets."""
    steps = {
        "ring": leaf_spine.ring(NETWORK),
        "ring across leaves": leaf_spine.ring(NETWORK, NETWORK.hosts),
        "all-to-all": leaf_spine.all_to_all(NETWORK),
    }
    for name, flows in steps.items():
        ideal = leaf_spine.sprayed(NETWORK, flows)
        most, time = max(leaf_spine.congestion(ideal).values()), leaf_spine.seconds(ideal)
        row: list[object] = [name]
        runs = [[leaf_spine.hashed(NETWORK, flows, seed) for seed in range(SEEDS)], [leaf_spine.split(NETWORK, flows)]]
        for parts in runs:
            row.append(float(np.median([float(max(leaf_spine.congestion(p).values()) / most) for p in parts])))
            row.append(float(np.median([leaf_spine.seconds(p) / time for p in parts])))
        cut = [count for count in Counter(part.flow for part in runs[1][0]).values() if count > 1]
        yield (*row, f"{len(cut)} of {len(flows)}", 1.0)


if __name__ == "__main__":
    main()
