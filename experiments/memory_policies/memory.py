"""What each memory policy costs Llama 3 8B, from 8k to 1M tokens a row: bytes per chip, host bytes, extra FLOPs.

    python experiments/memory_policies/memory.py                 # arithmetic for every cell, then compiles, in order
    python experiments/memory_policies/memory.py --compile 0     # arithmetic only
    python experiments/memory_policies/memory.py --table         # the tables of the README, from cells.jsonl; --picture

Needs `make install EXTRAS=tpu`; one to two minutes a compilation on two cores. Each compiled cell is a line of
cells.jsonl, written as soon as it is known: started again, it goes on with the cells that are missing.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import subprocess
import time
from pathlib import Path
from typing import Any

import jax

import jaxscale as js
from jaxscale.models.presets import llama3_8b
from jaxscale.nn import POLICIES, MemoryPolicy, ReversibleRun, flash_attention
from jaxscale.plan import compiled_bytes, estimate

HERE = Path(__file__).parent
CELLS = HERE / "cells.jsonl"
TOPOLOGY = "v5p:2x2x2"
CAPACITY = int(95.74 * 2**30)
"""Bytes that the compiler allows a step on one of its chips."""

REVERSIBLE = "reversible"
LAYOUTS: dict[str, tuple[js.Layout, int]] = {
    "fsdp=8": (js.Layout("fsdp=8"), 8),
    "tensor=8, sequence split between blocks": (js.Layout("tensor=8", sequence_sharded=True), 1),
}
"""Name -> the layout, and rows of a batch: one a device, or one in all."""

LENGTHS = tuple(2**k for k in range(13, 21))
FSDP, TENSOR = LAYOUTS
ORDER: list[tuple[str, str, int]] = [
    (FSDP, "full", 8192),
    (FSDP, "minimal", 65536),
    (FSDP, "full", 65536),
    (TENSOR, "minimal", 1048576),
    (FSDP, REVERSIBLE, 65536),
    (FSDP, "offload_residual", 65536),
    (FSDP, "none", 8192),
    (TENSOR, "full", 131072),
    (FSDP, "attention_only", 8192),
    (FSDP, "dots", 8192),
    (TENSOR, REVERSIBLE, 1048576),
    (FSDP, "minimal", 131072),
]
"""What is compiled, most telling first."""


def config_of(layout: str, policy: str, seq_len: int, **changes: Any) -> js.TrainConfig:
    """The run of a cell."""
    where, rows = LAYOUTS[layout]
    how: dict[str, Any] = {"memory": "none", "stack": ReversibleRun} if policy == REVERSIBLE else {"memory": policy}
    if policy == REVERSIBLE:
        how["memory"] = MemoryPolicy(rest="keep", tile=("norm", "mlp_hidden"))
    model = llama3_8b(attention=flash_attention, **how, **changes)
    return js.TrainConfig(model=model, layout=where, batch_size=rows, seq_len=seq_len, segments=False)


def arithmetic(layout: str, policy: str, seq_len: int) -> dict[str, Any]:
    """A cell without compiling; reversible runs are counted as `full` recomputation that keeps two streams."""
    if policy == REVERSIBLE:
        found = estimate(config_of(layout, "full", seq_len), TOPOLOGY)
        stream = found.kept // 32
        found = dataclasses.replace(found, kept=2 * 2 * stream)  # two float32 streams of a bfloat16 model
    else:
        found = estimate(config_of(layout, policy, seq_len), TOPOLOGY)
    return {"bytes": found.device, "host": found.host, "extra_flops": round(found.extra_flops, 4)}


def compiled(layout: str, policy: str, seq_len: int) -> dict[str, Any]:
    """A cell as the TPU's compiler sees it; a step that does not fit has the size the compiler names."""
    start = time.perf_counter()
    size = compiled_bytes(config_of(layout, policy, seq_len), TOPOLOGY)
    return {"bytes": size, "compile_seconds": round(time.perf_counter() - start)}


def read() -> dict[tuple[str, str, int], dict[str, Any]]:
    """The compiled cells so far."""
    if not CELLS.exists():
        return {}
    rows = [json.loads(line) for line in CELLS.read_text().splitlines()]
    return {(r["layout"], r["policy"], r["seq_len"]): r for r in rows}


def tables() -> str:
    """The README's tables: bytes of every cell, and the longest sequence that fits."""
    done = read()
    gib = lambda n: f"{n / 2**30:,.0f}"  # noqa: E731
    out = []
    for layout in LAYOUTS:
        out += [f"\n{layout}: GiB per chip, compiled in bold, else (by arithmetic)\n"]
        out += ["| policy | extra FLOPs | " + " | ".join(f"{n // 1024}k" for n in LENGTHS) + " | longest that fits |"]
        out += ["|---|---|" + "---|" * (len(LENGTHS) + 1)]
        for policy in (*POLICIES, REVERSIBLE):
            cells, longest = [], "-"
            grid = [(n, arithmetic(layout, policy, n)) for n in LENGTHS]
            for n, a in grid:
                r = done.get((layout, policy, n))
                size = r["bytes"] if r else a["bytes"]
                cells.append(f"**{gib(r['bytes'])}**" if r else f"({gib(a['bytes'])})")
                if size <= CAPACITY:
                    longest = f"{n // 1024}k" if r else f"at most {n // 1024}k"
            out += [f"| {policy} | {100 * grid[0][1]['extra_flops']:.1f}% | " + " | ".join(cells) + f" | {longest} |"]
    return "\n".join(out)


def picture() -> None:
    """memory.png: arithmetic as lines, compiled cells as dots, against what a chip has."""
    import matplotlib.pyplot as plt

    done = read()
    figure, axes = plt.subplots(1, len(LAYOUTS), figsize=(11, 4.2), sharey=True, layout="constrained")
    for ax, layout in zip(axes, LAYOUTS, strict=True):
        for policy in (*POLICIES, REVERSIBLE):
            (line,) = ax.plot(LENGTHS, [arithmetic(layout, policy, n)["bytes"] / 2**30 for n in LENGTHS], label=policy)
            dots = [(k[2], r["bytes"] / 2**30) for k, r in done.items() if k[:2] == (layout, policy)]
            ax.plot([d[0] for d in dots], [d[1] for d in dots], "o", color=line.get_color())
        ax.axhline(CAPACITY / 2**30, color="black", linestyle=":")
        ax.set(xscale="log", yscale="log", title=layout, xlabel="tokens a row")
        ax.set_xticks(LENGTHS, [f"{n // 1024}k" for n in LENGTHS], minor=False)
    axes[0].set_ylabel("GiB per v5p chip (lines: arithmetic, a lower bound)")
    axes[0].legend()
    figure.savefig(HERE / "memory.png", dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compile", type=int, default=len(ORDER), help="at most so many cells")
    parser.add_argument("--minutes", type=float, default=1e9, help="start no compilation after this time")
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--picture", action="store_true", help="memory.png, from cells.jsonl and arithmetic")
    args = parser.parse_args()
    if args.table or args.picture:
        print(tables()) if args.table else picture()
        return
    until = time.time() + 60 * args.minutes
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=HERE).stdout.strip()
    about = {"topology": TOPOLOGY, "date": datetime.date.today().isoformat(), "commit": commit, "jax": jax.__version__}
    left = args.compile
    for cell in ORDER:
        if cell in read():
            continue
        if not left or time.time() > until:
            break
        left -= 1
        layout, policy, seq_len = cell
        row = {"layout": layout, "policy": policy, "seq_len": seq_len, **compiled(*cell), **about}
        with CELLS.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(f"{policy:17s} {seq_len:8d} {layout}: {row['bytes'] / 2**30:.1f} GiB", flush=True)


if __name__ == "__main__":
    main()
