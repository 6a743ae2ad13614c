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
import json
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import measure
import numpy as np

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


def calls(case: Case, dtype: Any) -> dict[str, Callable[[], Any]]:
    """What is timed: the sum that measures the bandwidth, ours, and `jax.nn`'s where it can do it."""
    (q, k, v), tables = arrays(case, dtype)
    lengths = jnp.asarray(case.lengths)
    plain = jnp.ones(case.bytes // 4, jnp.float32)
    run = jax.jit(functools.partial(decode_attention, lengths=lengths, tables=tables))
    found = {"sum": functools.partial(jax.jit(jnp.sum), plain), "ours": functools.partial(run, q, k, v)}
    if tables is None:
        for name in ("cudnn", "xla"):
            other = functools.partial(
                jax.nn.dot_product_attention, key_value_seq_lengths=lengths, implementation=name
            )  # fmt: skip
            found[name] = functools.partial(jax.jit(other), q, k, v)
    return found


def measure_row(case: Case, dtype: Any, rounds: int) -> dict[str, Any]:
    """Bandwidths, the share, and what ran."""
    timed, refused, results = {}, {}, {}
    forget()
    for name, call in calls(case, dtype).items():
        try:
            results[name] = jax.block_until_ready(call())
        except (ValueError, NotImplementedError, RuntimeError) as e:  # jax.nn refuses with any of these
            refused[name] = str(e).splitlines()[0]
            continue
        timed[name] = functools.partial(_several, call)
    ours = results["ours"][0]
    for name in set(results) - {"sum", "ours"}:
        apart = float(jnp.linalg.norm(ours - results[name]) / jnp.linalg.norm(ours))
        if not apart < 0.03:
            raise SystemExit(f"{case.name}: ours and '{name}' are {apart:.3g} apart")
    runs = chosen("decode_attention")[-1]
    results.clear()
    wall = {name: [w / CALLS for w in t.wall] for name, t in measure.interleaved(timed, rounds).items()}
    against = {name: dataclasses.asdict(measure.ratio(wall[name], wall["ours"])) for name in wall if name != "ours"}
    return dataclasses.asdict(case) | {
        "runs": runs.implementation,
        "why": [list(x) for x in runs.why_not],
        "refused": refused,
        "gigabytes_per_second": {n: case.bytes / statistics.median(w) / 1e9 for n, w in wall.items()},
        "share": against.pop("sum"),
        "ratios": against,
        "timings": wall,
    }


def _several(call: Callable[[], Any]) -> None:
    out = None
    for _ in range(CALLS):
        out = call()  # the one before may go while this one is on its way
    jax.block_until_ready(out)


def line(row: dict[str, Any], judged: bool) -> str:
    """A row of the table."""
    share, speeds = row["share"], row["gigabytes_per_second"]
    others = ", ".join(f"{r['median']:.3g}× {n}" for n, r in row["ratios"].items())
    others += "".join(f", {n} refused" for n in row["refused"])
    verdict = f"target {row['target']}: {'met' if share['median'] >= row['target'] else 'missed'}" if judged else ""
    return (
        f"{row['name']:26s} {row['runs']:10s} sum {speeds['sum']:8.1f} GB/s  ours {speeds['ours']:8.1f} GB/s  "
        f"share {share['median']:.3f} ({share['low']:.3f}–{share['high']:.3f})  {others}  {verdict}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="write every timing there")
    parser.add_argument("--only", help="rows whose name holds this")
    parser.add_argument("--rounds", type=int, default=30, help="timings of each")
    args = parser.parse_args()
    device = jax.devices()[0]
    judged, small = "H200" in device.device_kind, device.platform == "cpu"
    dtype = jnp.float32 if small else jnp.bfloat16
    if not judged:
        print(f"on {device.device_kind}: sizes are {'small, ' if small else ''}no target applies")
    rows = []
    for case in cases(small):
        if args.only and args.only not in case.name:
            continue
        rows.append(measure_row(case, dtype, args.rounds))
        jax.clear_caches()
        print(line(rows[-1], judged), flush=True)
    if not rows:
        raise SystemExit(f"no row's name holds '{args.only}'")
    if args.json:
        result = {**measure.facts(device.device_kind), "dtype": jnp.dtype(dtype).name, "judged": judged, "rows": rows}
        args.json.write_text(json.dumps(measure.rounded(result), indent=2) + "\n")


if __name__ == "__main__":
    main()
