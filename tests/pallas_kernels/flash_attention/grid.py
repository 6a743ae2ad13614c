"""The full grid of attention's features against float64: 2,304 cases, in a run that can be stopped and gone on with.

    python -m tests.pallas_kernels.flash_attention.grid                          # "xla", a quarter of an hour
    python -m tests.pallas_kernels.flash_attention.grid --backend mosaic_tpu --dtype bfloat16 --limit 3600

Three dtypes, six widths of a head, and seven features with and without: causal, grouped heads, segments, a window, a
soft-cap, odd lengths, S different from T. The first 60 have every pair of features, the first 233 every three. What is
measured is appended to `runs/flash_attention_grid/<backend>.jsonl` and not measured again while jax and the backend's
sources stay what they were; every run writes its backend's part of `pallas_kernels/flash_attention/GRID.md`. Errors and
the rule are those of the parity table.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import hashlib
import inspect
import itertools
import json
import math
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # before JAX is imported
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # threads of float64 products compete
    # Every program is compiled for a single run of a millisecond.
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_backend_optimization_level=0".strip()

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

from experiments.benchmarks.measure import commit  # noqa: E402
from jaxscale.testing.ops import allowed  # noqa: E402
from pallas_kernels import dispatch, flash_attention  # noqa: E402
from pallas_kernels.flash_attention import xla  # noqa: E402
from tests.pallas_kernels.comparison import Program, Work, draws, lines  # noqa: E402
from tests.pallas_kernels.flash_attention import cases as shared  # noqa: E402
from tests.pallas_kernels.parity import THREADS, Row, measure  # noqa: E402

FEATURES: dict[str, tuple[Any, ...]] = {
    "dtype": ("float32", "bfloat16", "float16"),
    "D": (64, 80, 96, 128, (192, 128), 256),
    "grouped": (False, True),
    "odd": (False, True),
    "S≠T": (False, True),
    "softcap": (False, True),
    "causal": (False, True),
    "segments": (False, True),
    "window": (False, True),
}
LENGTHS = {(False, False): (64, 64), (False, True): (48, 80), (True, False): (53, 53), (True, True): (75, 41)}
"""(odd, S≠T) -> S and T; in the last, the first queries of a causal mask see nothing."""
PARTS = ("out", "lse", "dq", "dk", "dv")
SOURCES = {"xla": "xla", "mosaic_tpu": "tpu", "mosaic_gpu": "gpu"}
"""A backend -> how the names of its own files start."""
TABLE = Path(flash_attention.__file__).parent / "GRID.md"
ROOT = TABLE.parents[2]
RUNS = ROOT / "runs" / "flash_attention_grid"
TILE = 16
"""Of "xla", so that there are several tiles."""
PADDED = 128
"""Tokens that plain attention is padded to where a kernel is compared with it: a CPU sums float32 products in matrices
as large as a kernel's tile with up to twice the error that it has in those of 41 to 80 tokens."""


def grid() -> list[dict[str, Any]]:
    """Return every case: the value of each feature."""
    return [dict(zip(FEATURES, values, strict=True)) for values in itertools.product(*FEATURES.values())]


def order(cases: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return cases in a fixed order that looks random, so that a part of the grid has all pairs of features early."""
    return sorted(cases, key=lambda case: hashlib.sha256(name_of(case).encode()).digest())


def tuples(case: dict[str, Any], n: int) -> set[tuple[Any, ...]]:
    """Return all combinations of `n` features of a case, with their values."""
    return set(itertools.combinations(((name, str(value)) for name, value in case.items()), n))


def name_of(case: dict[str, Any]) -> str:
    """Return a case's name: dtype, width and the features that it has."""
    words = [name for name, value in case.items() if value is True]
    return " ".join([case["dtype"], f"D={width_of(case)}", *words])


def width_of(case: dict[str, Any]) -> str:
    """Return a case's width, or those of keys and values."""
    return "/".join(map(str, case["D"])) if isinstance(case["D"], tuple) else str(case["D"])


def work_of(case: dict[str, Any], deterministic: bool = False, multiple: int = 1) -> Work:
    """Return a case as work of the parity table: output, log-sum-exp and three gradients are parts of one run.

    Args:
      case: of `grid`.
      deterministic: the op's option.
      multiple: of which plain attention's numbers of queries and keys are.
    """
    make = functools.partial(_program, case, deterministic, multiple)
    return Work("flash_attention", name_of(case), case["dtype"], PARTS, make)


def _program(case: dict[str, Any], deterministic: bool, multiple: int, seed: int | None) -> Program:
    arrays, options = shared.make(
        dict.fromkeys(shared.FEATURES)
        | {
            "dtype": case["dtype"],
            "widths": case["D"] if isinstance(case["D"], tuple) else (case["D"], case["D"]),
            "heads": (4, 2) if case["grouped"] else (2, 2),
            "lengths": LENGTHS[case["odd"], case["S≠T"]],
            "causal": case["causal"],
            "segments": case["segments"],
            "window": 7 if case["window"] else None,
            "softcap": 2.0 if case["softcap"] else None,
            "kind": "softmax",
        },
        draws(0, seed),
    )
    q, k, v, _ = arrays
    (b, s, h, _), t = q.shape, k.shape[1]
    random = np.random.default_rng(draws(9, seed))
    dout = jnp.asarray(random.normal(size=(b, s, h, v.shape[3])), q.dtype)
    dlse = jnp.asarray(random.normal(size=(b, s, h)), jnp.float32)
    seen = np.asarray(shared.seen_at_once(options, b, s, t))
    more, more_keys = -s % multiple, -t % multiple

    def ours(backend: str) -> Any:
        kwargs = options | {"return_lse": True, "deterministic": deterministic, "implementation": backend}
        return functools.partial(both, functools.partial(flash_attention.flash_attention, **kwargs))

    def truth() -> tuple[Any, ...]:
        out, lse, grads = shared.truth(arrays, options, dout, dlse)
        return _five((out, lse, *grads[:3]))

    def plain() -> tuple[Any, ...]:
        longer = [
            _longer(x, n) for x, n in zip((q, k, v, dout, dlse), (more, more_keys, more_keys, more, more), strict=True)
        ]
        visible = np.pad(seen, ((0, 0), (0, more), (0, more_keys)))
        results = _plain(options["softcap"])(*longer, jnp.asarray(visible))
        return _five([x[:, :n] for x, n in zip(results, (s, s, s, t, t), strict=True)])

    return Program(ours, (q, k, v, dout, dlse), _five, plain, truth)


def both(op: Any, q: Any, k: Any, v: Any, dout: Any, dlse: Any) -> tuple[Any, ...]:
    """Return the output, the log-sum-exp and the gradients of q, k and v."""
    (out, lse), pull = jax.vjp(op, q, k, v)
    return out, lse, *pull((dout, dlse))


@functools.cache
def _plain(softcap: float | None) -> Any:
    """Return one program for every mask."""

    def run(q: Any, k: Any, v: Any, dout: Any, dlse: Any, seen: Any) -> tuple[Any, ...]:
        op = functools.partial(shared.plain, bias=None, seen=seen, options={"softcap": softcap})
        return both(op, q, k, v, dout, dlse)

    return jax.jit(run)


def _longer(x: Any, more: int) -> Any:
    """Append tokens of zeros to (B, S, ...)."""
    return jnp.pad(x, ((0, 0), (0, more), *[(0, 0)] * (x.ndim - 2)))


def _five(results: Sequence[Any]) -> tuple[Any, ...]:
    """Replace a log-sum-exp of -inf by 0, so that errors can be computed; a missing -inf still shows."""
    out, lse, *grads = map(np.asarray, results)
    return out, np.where(np.isneginf(lse), 0, lse).astype(lse.dtype), *grads


# measuring -------------------------------------------------------------------------------------------------------


def check(case: dict[str, Any], backend: str) -> dict[str, Any]:
    """Return a line of the file: a case's name and each part's error, plain error and verdict, or the refusal.

    A case that is off by more than is allowed is judged by the mean errors on three draws of its arrays.
    """
    line = _once(case, backend, None)
    if all(line[part][2] == "ok" for part in PARTS if part in line):
        return line
    draws = [line, *(_once(case, backend, seed) for seed in (1, 2))]
    for part in PARTS:
        error, plain = (float(np.mean([one[part][n] for one in draws])) for n in (0, 1))
        dtype = np.dtype(np.float32) if part == "lse" else jnp.dtype(case["dtype"])
        line[part] = [error, plain, "ok" if error <= allowed(plain, dtype) else "WRONG"]
    return line


def _once(case: dict[str, Any], backend: str, seed: int | None) -> dict[str, Any]:
    line: dict[str, Any] = {"case": name_of(case)}
    work = work_of(case, multiple=1 if backend == "xla" else PADDED)
    for part in lines(dataclasses.replace(work, make=lambda _: work.make(seed))):
        row: Row = measure(part, backend)
        if row.error is None:
            return line | {"refused": row.verdict.partition(": ")[2]}
        line[part.direction] = [row.error, row.plain, row.verdict]
    return line


def fingerprint(backend: str) -> str:
    """Return a digest of JAX's version and a backend's sources; lines with another digest are measured again."""
    files = [
        *sorted(TABLE.parent.glob(f"{SOURCES[backend]}*.py")),
        TABLE.parent / "inputs.py",
        TABLE.parent / "masks.py",
    ]
    text = "".join(path.read_text() for path in [*files, Path(shared.__file__)])
    text += inspect.getsource(_program) + repr((FEATURES, LENGTHS, TILE))
    return f"{jax.__version__}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"


def measured(backend: str) -> dict[str, dict[str, Any]]:
    """Return the file's lines with this digest: a case's name -> its line."""
    path, mark = RUNS / f"{backend}.jsonl", fingerprint(backend)
    lines = []
    for text in path.read_text().splitlines() if path.exists() else ():
        try:
            lines.append(json.loads(text))
        except json.JSONDecodeError:  # incomplete: the run was stopped
            continue
    return {line["case"]: line for line in lines if line["fingerprint"] == mark}


def run(backend: str, cases: Sequence[dict[str, Any]], limit: float) -> None:
    """Measure missing cases, for so many seconds, in `order`."""
    path, mark, have, start = RUNS / f"{backend}.jsonl", fingerprint(backend), measured(backend), time.monotonic()
    path.parent.mkdir(parents=True, exist_ok=True)
    missing = order([case for case in cases if name_of(case) not in have])
    print(f"{backend}: {len(cases) - len(missing)} of {len(cases)} cases are there", flush=True)
    for n, case in enumerate(missing):
        if time.monotonic() - start > limit:
            return
        line = check(case, backend)
        with path.open("a") as file:
            file.write(json.dumps({"fingerprint": mark, **line}) + "\n")
        if any(value[2] != "ok" for value in map(line.get, PARTS) if value):
            print(line, flush=True)
        if n % 64 == 63:
            jax.clear_caches()
            print(f"{n + 1} of {len(missing)}, {time.monotonic() - start:.0f} s", flush=True)


# the table -------------------------------------------------------------------------------------------------------

HEAD = ("dtype", "D", "cases", "ok", "not supported", "WRONG", *PARTS, "the worst ratio's case", "why not supported")


def summary(backend: str) -> list[tuple[str, ...]]:
    """Return the table's rows: counts for each dtype and width, and the largest ratio of our error to the plain one."""
    have, rows = measured(backend), []
    by_row = itertools.groupby(grid(), lambda case: (case["dtype"], width_of(case)))
    for (dtype, width), group in by_row:
        names = [name_of(case) for case in group]
        lines = [have[name] for name in names if name in have]
        refused = [line["refused"] for line in lines if "refused" in line]
        ran = [line for line in lines if "refused" not in line]
        wrong = [line for line in ran if any(line[part][2] != "ok" for part in PARTS)]
        worst = {part: max(((_ratio(line[part]), line["case"]) for line in ran), default=None) for part in PARTS}
        worst_of = {part: w for part, w in worst.items() if w is not None}
        part = max(worst_of, key=lambda p: worst_of[p], default=None)
        rows.append(
            (
                dtype,
                width,
                f"{len(lines)} of {len(names)}",
                str(len(ran) - len(wrong)),
                str(len(refused)),
                str(len(wrong)),
                *(f"{worst_of[p][0]:.2f}" if p in worst_of else "" for p in PARTS),
                ""
                if part is None
                else f"{part}: {' '.join(worst_of[part][1].split(' ')[2:]) or 'none of the features'}",
                "; ".join(sorted(set(refused))),
            )
        )
    return rows


def _ratio(part: tuple[float, float, str]) -> float:
    error, plain, _ = part
    return error / plain if plain else math.inf if error else 0.0


def write(backend: str, of: str) -> str:
    """Write a backend's part of the table, keep the others', and return a summary."""
    rows = summary(backend)
    counts = [sum(int(row[i].partition(" ")[0]) for row in rows) for i in (2, 3, 4, 5)]
    sentence = "{} of {} cases: {} ok, {} not supported, {} wrong".format(counts[0], len(grid()), *counts[1:])
    width = [max(len(row[i]) for row in [HEAD, *rows]) for i in range(len(HEAD))]
    line = lambda cells: "| " + " | ".join(c.ljust(w) for c, w in zip(cells, width, strict=True)) + " |"  # noqa: E731
    mode = "compiled on a CPU" if backend == "xla" else "in its interpreter with race detection"
    part = (
        f"## {backend}\n\n{sentence}. Run {mode}, {time.strftime('%Y-%m-%d')}, jax {jax.__version__}, Python "
        f"{sys.version.split()[0]}, commit {of}.\n\n"
        + "\n".join([line(HEAD), line(["-" * w for w in width]), *map(line, rows)])
        + "\n"
    )
    _, *others = (TABLE.read_text() if TABLE.exists() else "").split("\n## ")
    parts = {text.split("\n", 1)[0]: "## " + text.rstrip("\n") + "\n" for text in others} | {backend: part}
    TABLE.write_text("\n".join([HEADING, *(parts[b] for b in SOURCES if b in parts)]))
    return sentence


HEADING = """# The full grid

Made by `python -m tests.pallas_kernels.flash_attention.grid`; do not edit. Three dtypes, six widths of a head (of
queries and keys / of values), and causal, grouped heads (4 on 2), segments (some queries find none of theirs), a window
of 7, a soft-cap of 2, odd lengths and S≠T, each with and without: 2,304 cases on 41 to 80 tokens, forward and gradients
with a cotangent of the log-sum-exp.

Errors are norms against float64. A case is ok when each of its five results is off by at most twice what plain
jax.numpy in the same dtype is off by, or by one unit in the last place (two of float32); a case that is off by more is
judged by the mean errors on three draws of its arrays. The columns `out` to `dv` hold the largest of (our error / the
plain one's); one above 2 that is ok is below the unit. Where kernels are compared, plain attention is padded to 128
tokens, as a kernel's tile is: a CPU sums float32 products in larger matrices with up to twice the error.
"""


def main() -> int:
    """Run the command line and return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--backend", choices=SOURCES, default="xla")
    parser.add_argument("--dtype", choices=FEATURES["dtype"], help="measure only cases of this dtype")
    parser.add_argument("--limit", type=float, default=math.inf, metavar="SECONDS", help="stop after so long")
    args = parser.parse_args()
    if args.backend not in {one.name for one in flash_attention.IMPLEMENTATIONS}:
        sys.exit(f"flash_attention has no implementation '{args.backend}' yet; use --backend xla")
    if args.backend != "xla" and dispatch.JAX_VERSION < (0, 11):
        sys.exit(f"races are errors from jax 0.11 on, and this is jax {jax.__version__}")
    if args.backend == "mosaic_gpu":
        jax.config.update("jax_num_cpu_devices", THREADS)
    xla.TILE = TILE
    of = commit()
    run(args.backend, [case for case in grid() if args.dtype in (None, case["dtype"])], args.limit)
    print(f"{write(args.backend, of)}: {TABLE}")
    return any(int(row[5]) for row in summary(args.backend))


if __name__ == "__main__":
    sys.exit(main())
