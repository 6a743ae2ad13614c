"""Attention of one new token of each row to its cache: what share of the memory's bandwidth it reaches.

    python experiments/benchmarks/decode_attention.py                      on the device there is
    python experiments/benchmarks/decode_attention.py --json decode.json   and every timing into a file
    python experiments/benchmarks/decode_attention.py --only paged         the rows whose name holds a word

A round calls a plain sum of as many bytes, ours and what it is held against in turns, so that whatever else the machine
does falls on all alike; a ratio is the median over rounds. The bandwidth is that of the sum, in the same round. Bytes
are those of the keys and values that are seen: rows of a batch have unlike lengths where a name says so. On a CPU sizes
are small, ours is "xla" and no target applies.
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
"""In a timing."""


@dataclasses.dataclass(frozen=True)
class Case:
    """A row of the table.

    Args:
      name: what it is called.
      b, t, h, kv, d: rows, keys of the longest, heads, key heads, width.
      page: keys of a page, or `None` for a cache without.
      ragged: rows have from an eighth of the keys to all.
      target: the share of the bandwidth that is asked for.
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
        """Keys of each row."""
        shares = np.linspace(1 / 8, 1, self.b) if self.ragged else np.ones(self.b)
        return np.maximum(1, (shares * self.t).astype(np.int32))

    @property
    def bytes(self) -> int:
        """Of keys and values that are seen, two bytes a number (four on a CPU)."""
        return int(self.lengths.sum()) * self.kv * self.d * 2 * (4 if jax.default_backend() == "cpu" else 2)


def cases(small: bool) -> Iterator[Case]:
    """Every row of a machine."""
    sizes = ((2, 512), (4, 256)) if small else ((1, 131072), (8, 32768), (64, 8192))
    h, kv, d = (4, 2, 32) if small else (32, 8, 128)
    for b, t in sizes:
        for page in (None, 16, 128):
            for ragged in (False, True) if b > 1 else (False,):
                how = "contiguous" if page is None else f"paged {page}"
                name = f"{how} {b}×{t}{' ragged' if ragged else ''}"
                yield Case(name, b, t, h, kv, d, page, ragged, 0.85 if page is None else 0.80)


def arrays(case: Case, dtype: Any) -> tuple[tuple[jax.Array, ...], np.ndarray | None]:
    """Queries, keys, values; and pages in a random order."""
    page = case.t if case.page is None else case.page
    per = -(-case.t // page)
    keys = jax.random.split(jax.random.key(0), 3)
    q = jax.random.normal(keys[0], (case.b, 1, case.h, case.d), dtype)
    k, v = (jax.random.normal(x, (case.b * per, page, case.kv, case.d), dtype) for x in keys[1:])
    if case.page is None:
        return (q, k, v), None
    return (q, k, v), np.random.default_rng(0).permutation(case.b * per).reshape(case.b, per).astype(np.int32)


def measure_row(dtype: Any, rounds: int, case: Case) -> tuple[dict[str, Any], list[record.Line]]:
    """Bandwidths, the share of that of a plain sum of as many bytes, and what ran."""
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
