"""Temporary memory of attention as the sequence grows, from compiled programs.

    python experiments/flash_attention/memory.py      # for the CPU, and for absent TPUs

Needs `make install EXTRAS=plot,tpu` for the TPUs; ten minutes on two cores. Programs are compiled but not run: one
sequence, 8 query heads and 2 key-value heads of dim 64, bfloat16, causal. The slope from one length to its double is
the power of the length that bytes grow with: 1 is linear, 2 means a stored matrix of scores. Writes memory.json and
memory.png.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import json
import math
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from matplotlib.figure import Figure

from pallas_kernels import KernelError, chosen, forget
from pallas_kernels.aot import compile_kernel
from pallas_kernels.flash_attention import flash_attention

HERE = Path(__file__).parent
LENGTHS = tuple(1024 * 2**i for i in range(7))
LONGER = (2**17, 2**18)
"""Further lengths for TPUs: on a v5e short sequences need no temporaries in HBM."""
HEADS, KEY_HEADS, WIDTH = 8, 2, 64
DIRECTIONS = ("forward", "forward and backward")


def program(direction: str, implementation: str | None) -> Callable[..., Any]:
    """Return a function of q, k, v and a cotangent that computes the output, or the output and the gradients."""
    op = functools.partial(flash_attention, causal=True, implementation=implementation)

    def both(q: Any, k: Any, v: Any, g: Any) -> Any:
        out, pull = jax.vjp(op, q, k, v)
        return out, pull(g)

    return both if direction != "forward" else lambda q, k, v, g: op(q, k, v)


def compiled(where: str, direction: str, implementation: str | None, s: int) -> dict[str, Any]:
    """Compile one program; return its temporary bytes and the implementation in it.

    Raises:
      jax.errors.JaxRuntimeError: the program does not compile.
      ValueError: likewise.
    """
    forget()
    jax.clear_caches()
    wide, narrow = (jax.ShapeDtypeStruct((1, s, h, WIDTH), jnp.bfloat16) for h in (HEADS, KEY_HEADS))
    shapes, fn, start = (wide, narrow, narrow, wide), program(direction, implementation), time.perf_counter()
    made = jax.jit(fn).lower(*shapes).compile() if where == "cpu" else compile_kernel(fn, *shapes, topology=where)
    return {
        "where": where,
        "direction": direction,
        "implementation": " and ".join(sorted({c.implementation for c in chosen("flash_attention")})),
        "asked_for": implementation,
        "length": s,
        "temporary_bytes": made.memory_analysis().temp_size_in_bytes,
        "compile_seconds": round(time.perf_counter() - start, 1),
    }


def lines(topologies: list[str]) -> Iterator[tuple[str, str, str | None]]:
    """Yield (device, direction, implementation): "xla" and "dense" on the CPU, the default (`None`) elsewhere."""
    for where, implementation in [("cpu", "xla"), ("cpu", "dense"), *((t, None) for t in topologies)]:
        for direction in DIRECTIONS:
            yield where, direction, implementation


def line_of(where: str, direction: str, implementation: str | None, lengths: list[int]) -> list[dict[str, Any]]:
    """Return rows of growing length, up to the first that does not compile, with slopes."""
    rows: list[dict[str, Any]] = []
    for s in lengths:
        try:
            row = compiled(where, direction, implementation, s)
        except KernelError as e:
            print(f"{where} {direction}: {e}", flush=True)
            return rows
        except (jax.errors.JaxRuntimeError, ValueError) as e:
            print(
                f"{where} {direction} {implementation or ''} {s}: does not compile: {str(e).splitlines()[0]}",
                flush=True,
            )
            return rows
        if rows and rows[-1]["temporary_bytes"]:  # on a TPU short sequences may fit into VMEM
            before = rows[-1]
            row["slope"] = round(
                math.log2(row["temporary_bytes"] / before["temporary_bytes"]) / math.log2(s / before["length"]), 3
            )
        rows.append(row)
        print(
            f"{where:4s} {direction:20s} {row['implementation']:10s} S {s:6d}: {row['temporary_bytes'] / 2**20:11.1f} "
            f"MiB of temporaries, slope {row.get('slope', '')}",
            flush=True,
        )
    return rows


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Draw temporaries over lengths, both logarithmic."""
    figure = Figure(figsize=(13, 3.6), dpi=110, layout="constrained")
    colours = {"xla": "#3d7ea6", "dense": "#b8b8b8"}
    for ax, direction in zip(figure.subplots(1, 2, sharey=True), DIRECTIONS, strict=True):
        groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
        for row in rows:
            if row["direction"] == direction:
                groups.setdefault((row["where"], row["implementation"]), []).append(row)
        for (where, implementation), group in groups.items():
            xs, ys = zip(
                *((r["length"], r["temporary_bytes"] / 2**20) for r in group if r["temporary_bytes"]), strict=True
            )
            style = {"cpu": "o-", "v5e": "s--", "v5p": "^:"}.get(where, "d-.")
            colour = colours.get(implementation, "#d1495b")
            ax.plot(xs, ys, style, color=colour, markersize=4, label=f"{implementation} on {where}")
        ax.set(title=direction, xlabel="S = T", xscale="log", yscale="log")
        ticks = (*LENGTHS, *LONGER)
        ax.set_xticks(ticks, [f"{n // 1024}k" for n in ticks])
        ax.minorticks_off()
        ax.grid(alpha=0.25)
        ax.legend(frameon=False)
        ax.set_ylabel("MiB of temporaries")
    figure.savefig(path)


def main() -> None:
    """Compile every program, and write memory.json and memory.png."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--topology", nargs="*", default=["v5e", "v5p"])
    parser.add_argument("--lengths", nargs="*", type=int, help="instead of 1k to 64k")
    args = parser.parse_args()
    rows = []
    for where, direction, implementation in lines(args.topology):
        lengths = args.lengths or [*LENGTHS, *(LONGER if where != "cpu" else ())]
        rows += line_of(where, direction, implementation, lengths)
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=HERE).stdout.strip()
    result = {
        "what": f"temporary bytes of compiled causal attention, {HEADS} heads on {KEY_HEADS}, {WIDTH} wide, bf16",
        "date": datetime.date.today().isoformat(),
        "commit": commit,
        "jax": jax.__version__,
        "rows": rows,
    }
    (HERE / "memory.json").write_text(json.dumps(result, indent=1) + "\n")
    draw(rows, HERE / "memory.png")


if __name__ == "__main__":
    main()
