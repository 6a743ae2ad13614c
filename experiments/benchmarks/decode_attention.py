"""Attention of one new token per sequence to its KV cache: the share of memory bandwidth that it reaches.

    python experiments/benchmarks/decode_attention.py                      on the present device
    python experiments/benchmarks/decode_attention.py --json decode.json   write every timing to a file
    python experiments/benchmarks/decode_attention.py --only paged         only rows whose name contains a word

A round calls a plain sum of as many bytes, ours and the others in turns, so that other load slows all of them alike; a
ratio is the median over rounds. The bandwidth is that of the sum, in the same round. Bytes are those of the unmasked
keys and values; in rows named "ragged", sequences have different lengths. On a CPU sizes are small, ours is "xla" and
no target applies.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import measure
import numpy as np
import record
import rivals

from pallas_kernels import chosen, forget
from pallas_kernels.decode_attention import decode_attention

CALLS = 8
"""Calls in a timing."""


@dataclasses.dataclass(frozen=True)
class Case:
    """A row of the table.

    Args:
      name: name of the row.
      b, t, h, kv, d: sequences, keys of the longest, query heads, key-value heads, head dim.
      page: keys in a page, or `None` for a contiguous cache.
      ragged: sequences have from an eighth of the keys to all of them.
      target: least share of the bandwidth.
    """

    name: str
    b: int
    t: int
    h: int
    kv: int
    d: int
    page: int | None
    ragged: bool
    target: float

    @property
    def lengths(self) -> np.ndarray:
        """Return the number of keys of each sequence."""
        shares = np.linspace(1 / 8, 1, self.b) if self.ragged else np.ones(self.b)
        return np.maximum(1, (shares * self.t).astype(np.int32))

    @property
    def bytes(self) -> int:
        """Return the bytes of unmasked keys and values: two a number, four on a CPU."""
        return int(self.lengths.sum()) * self.kv * self.d * 2 * (4 if jax.default_backend() == "cpu" else 2)


def cases(small: bool) -> Iterator[Case]:
    """Yield every row; small ones for a CPU."""
    sizes = ((2, 512), (4, 256)) if small else ((1, 131072), (8, 32768), (64, 8192))
    h, kv, d = (4, 2, 32) if small else (32, 8, 128)
    for b, t in sizes:
        for page in (None, 16, 128):
            for ragged in (False, True) if b > 1 else (False,):
                storage = "contiguous" if page is None else f"paged {page}"
                name = f"{storage} {b}×{t}{' ragged' if ragged else ''}"
                yield Case(name, b, t, h, kv, d, page, ragged, 0.85 if page is None else 0.80)


def arrays(case: Case, dtype: Any) -> tuple[tuple[jax.Array, ...], np.ndarray | None]:
    """Return (queries, keys, values), and a table of pages in random order or `None`."""
    page = case.t if case.page is None else case.page
    per = -(-case.t // page)
    keys = jax.random.split(jax.random.key(0), 3)
    q = jax.random.normal(keys[0], (case.b, 1, case.h, case.d), dtype)
    k, v = (jax.random.normal(x, (case.b * per, page, case.kv, case.d), dtype) for x in keys[1:])
    if case.page is None:
        return (q, k, v), None
    return (q, k, v), np.random.default_rng(0).permutation(case.b * per).reshape(case.b, per).astype(np.int32)


def measure_row(dtype: Any, rounds: int, case: Case) -> tuple[dict[str, Any], list[record.Line]]:
    """Measure a row: bandwidths, our share of a plain sum's bandwidth, and the implementation that ran."""
    (q, k, v), tables = arrays(case, dtype)
    lengths = jnp.asarray(case.lengths)
    plain = jax.random.normal(jax.random.key(1), (case.bytes // 4,), jnp.float32)
    forget()
    run = jax.jit(lambda q, k, v: decode_attention(q, k, v, lengths=lengths, tables=tables)[0])
    makers: dict[str, Callable[[], rivals.Call]] = {"ours": lambda: functools.partial(run, q, k, v)}
    for name in () if case.page else ("cudnn", "xla"):
        other = functools.partial(jax.nn.dot_product_attention, key_value_seq_lengths=lengths, implementation=name)
        makers[name] = lambda other=other: functools.partial(jax.jit(other), q, k, v)  # type: ignore[misc]
    timed, refused = rivals.agreeing(makers, 0.03)
    runs = chosen("decode_attention")[-1]
    timed["sum"] = functools.partial(jax.jit(jnp.sum), plain)
    several = {name: rivals.several(call, CALLS) for name, call in timed.items()}
    wall = {name: [w / CALLS for w in t.wall] for name, t in measure.interleaved(several, rounds).items()}
    speed = {name: case.bytes / statistics.median(w) / 1e9 for name, w in wall.items()}
    share = dataclasses.asdict(measure.ratio(wall["sum"], wall["ours"]))
    line = record.Line(
        f"decode {case.name}", runs=runs.implementation, unit="GB/s", ours=speed.pop("ours"), copy=speed.pop("sum"),
        others=speed, refused=refused, ratio=share, against="sum", target=case.target,
        verdict=record.judge(share, case.target, None, jax.devices()[0].device_kind),
    )  # fmt: skip
    jax.clear_caches()
    return {**dataclasses.asdict(case), "why": [list(x) for x in runs.why_not], "timings": wall}, [line]


def main() -> None:
    """Measure every row and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    record.options(parser)
    args = parser.parse_args()
    device = jax.devices()[0]
    small = device.platform == "cpu"
    dtype = jnp.dtype(jnp.float32 if small else jnp.bfloat16)
    results = record.Results("decode_attention", device.device_kind, args, dtype=dtype.name)
    run = functools.partial(measure_row, dtype, args.rounds)
    results.each(((f"decode {case.name}", case) for case in cases(small)), run)
    results.show()


if __name__ == "__main__":
    main()
