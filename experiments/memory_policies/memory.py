"""What each memory policy costs Llama 3 8B, from 8k to 1M tokens a row: bytes per chip, host bytes, extra FLOPs.

    python experiments/memory_policies/memory.py                 # compiles cell by cell, in order
    python experiments/memory_policies/memory.py --hardware H200 # the cells for GPUs; Python 3.12, EXTRAS=gpu-aot
    python experiments/memory_policies/memory.py --table         # the tables of the README, from cells.jsonl; --picture

Needs `make install EXTRAS=tpu` on Python 3.12; two to six minutes a compilation on two cores. Each compiled cell is a
line of cells.jsonl, written as soon as it is known: started again, it goes on with the cells that are missing.
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
HARDWARE = {"v5p": ("v5p:2x2x2", int(95.74 * 2**30)), "H200": ("h200:8", int(139 * 2**30))}
"""Name -> eight of it, and the bytes that a step may take of one: what the TPU's compiler allows, and about what an
H200 shows as free."""

REVERSIBLE = "reversible"
TILES = ("norm", "mlp_hidden")
LAYOUTS: dict[str, tuple[js.Layout, int]] = {
    "fsdp=8": (js.Layout("fsdp=8"), 8),
    "tensor=8, sequence split between blocks": (js.Layout("tensor=8", sequence_sharded=True), 1),
}
"""Name -> the layout, and rows of a batch: one a device, or one in all."""

LENGTHS = tuple(2**k for k in range(13, 21))
FSDP, TENSOR = LAYOUTS
ALL = (*POLICIES, REVERSIBLE)
ORDER: dict[str, list[tuple[str, str, int]]] = {
    "v5p": [
        *(
            (FSDP, policy, 16384)
            for policy in ("full", "none", "minimal", "dots", "attention_only", "offload_residual")
        ),
        (FSDP, REVERSIBLE, 16384),
        (FSDP, "minimal", 65536),
        (TENSOR, "minimal", 1048576),
        (FSDP, "full", 65536),
        (TENSOR, "full", 131072),
        (FSDP, "offload_residual", 65536),
        (FSDP, REVERSIBLE, 65536),
        (FSDP, "none", 8192),
        (TENSOR, "full", 1048576),
    ],
    "H200": [(FSDP, "full", 16384), (FSDP, "attention_only", 16384)],
}
"""What is compiled, most telling first."""


def config_of(layout: str, policy: str, seq_len: int, **changes: Any) -> js.TrainConfig:
    """The run of a cell."""
    where, rows = LAYOUTS[layout]
    how: dict[str, Any] = {"memory": "none", "stack": ReversibleRun} if policy == REVERSIBLE else {"memory": policy}
    if policy == REVERSIBLE:
        how["memory"] = MemoryPolicy(rest="keep", tile=TILES)
    model = llama3_8b(attention=flash_attention, **how, **changes)
    return js.TrainConfig(model=model, layout=where, batch_size=rows, seq_len=seq_len, segments=False)


def arithmetic(layout: str, policy: str, seq_len: int) -> dict[str, Any]:
    """A cell without compiling, the same for all hardware.

    Reversible runs are counted as recomputation in tiles whose layers hand on two streams and two cotangents, float32.
    """
    topology, _ = HARDWARE["v5p"]
    config = config_of(layout, "full" if policy == REVERSIBLE else policy, seq_len)
    if policy == REVERSIBLE:
        config = dataclasses.replace(config, model=dataclasses.replace(config.model, memory=MemoryPolicy(tile=TILES)))
    found = estimate(config, topology)
    if policy == REVERSIBLE:
        stream = found.saved // config.model.depth
        found = dataclasses.replace(found, peak=found.peak - found.saved + 7 * stream)
    return {"bytes": found.device, "host": found.host, "extra_flops": round(found.extra_flops, 4)}


def compiled(hardware: str, layout: str, policy: str, seq_len: int) -> dict[str, Any]:
    """A cell as the compiler sees it; a step that does not fit a TPU has the size its compiler names."""
    topology, _ = HARDWARE[hardware]
    start = time.perf_counter()
    size = compiled_bytes(config_of(layout, policy, seq_len), topology)
    return {"bytes": size, "compile_seconds": round(time.perf_counter() - start)}


def read() -> dict[tuple[str, str, str, int], dict[str, Any]]:
    """The compiled cells so far."""
    if not CELLS.exists():
        return {}
    rows = [json.loads(line) for line in CELLS.read_text().splitlines()]
    return {(r["hardware"], r["layout"], r["policy"], r["seq_len"]): r for r in rows}


def tables() -> str:
    """The README's tables: bytes of every cell, the longest sequence that fits, and arithmetic beside compilers."""
    done, out = read(), []
    gib = lambda n: f"{n / 2**30:,.0f}"  # noqa: E731
    for layout in LAYOUTS:
        out += [f"\n{layout}: GiB per chip by arithmetic / compiled for v5p\n"]
        longest = " | ".join(f"longest, {name}" for name in HARDWARE)
        out += ["| policy | extra FLOPs | " + " | ".join(f"{n // 1024}k" for n in LENGTHS) + f" | {longest} |"]
        out += ["|---|---|" + "---|" * (len(LENGTHS) + len(HARDWARE))]
        for policy in ALL:
            grid = {n: arithmetic(layout, policy, n) for n in LENGTHS}
            cells = []
            for n, a in grid.items():
                r = done.get(("v5p", layout, policy, n))
                cells.append(gib(a["bytes"]) + (f" / **{gib(r['bytes'])}**" if r else ""))
            cells += [_longest(name, layout, policy, {n: a["bytes"] for n, a in grid.items()}) for name in HARDWARE]
            out += [f"| {policy} | {100 * grid[LENGTHS[0]]['extra_flops']:.1f}% | " + " | ".join(cells) + " |"]
    out += ["\n| hardware | layout | policy | tokens a row | arithmetic, GiB | compiled, GiB | ratio |"]
    out += ["|---|---|---|---|---|---|---|"]
    for (hardware, layout, policy, n), r in done.items():
        a = arithmetic(layout, policy, n)["bytes"]
        sizes = f"{a / 2**30:.1f} | {r['bytes'] / 2**30:.1f} | {a / r['bytes']:.2f}"
        out += [f"| {hardware} | {layout.partition(',')[0]} | {policy} | {n // 1024}k | {sizes} |"]
    return "\n".join(out)


def _longest(hardware: str, layout: str, policy: str, sizes: dict[int, int]) -> str:
    """The longest sequence that compiled and fits, else the longest that arithmetic does not rule out."""
    _, capacity = HARDWARE[hardware]
    done = {n: r["bytes"] for (h, lay, p, n), r in read().items() if (h, lay, p) == (hardware, layout, policy)}
    over = min((n for n, size in done.items() if size > capacity), default=LENGTHS[-1] + 1)
    possible = [n for n in LENGTHS if n < over and sizes[n] <= capacity]
    if not possible:
        return "-"
    return f"{possible[-1] // 1024}k" if possible[-1] in done else f"at most {possible[-1] // 1024}k"


def picture() -> None:
    """table.png: arithmetic as lines, compiled cells as dots, against what a chip has."""
    from matplotlib.figure import Figure

    colours = ["#b8b8b8", "#3d7ea6", "#9bb8d8", "#e0a458", "#6a994e", "#d1495b", "#5e548e"]
    done = read()
    figure = Figure(figsize=(13, 4.2), dpi=110, layout="constrained")
    for ax, layout in zip(figure.subplots(1, len(LAYOUTS), sharey=True), LAYOUTS, strict=True):
        for policy, colour in zip(ALL, colours, strict=True):
            sizes = [arithmetic(layout, policy, n)["bytes"] / 2**30 for n in LENGTHS]
            ax.plot(LENGTHS, sizes, color=colour, label=policy)
            for hardware, marker in zip(HARDWARE, "os", strict=True):
                dots = {k[3]: r["bytes"] / 2**30 for k, r in done.items() if k[:3] == (hardware, layout, policy)}
                ax.plot(dots.keys(), dots.values(), marker, color=colour, markersize=5, markerfacecolor="none")
        for hardware, (_, capacity) in HARDWARE.items():
            ax.axhline(capacity / 2**30, color="black", linestyle=":", linewidth=0.8)
            ax.text(LENGTHS[0], capacity / 2**30 * 1.04, hardware, fontsize=8)
        ax.set(xscale="log", yscale="log", title=layout, xlabel="tokens a row")
        ax.set_xticks(LENGTHS, [f"{n // 1024}k" for n in LENGTHS], minor=False)
        ax.minorticks_off()
        ax.grid(alpha=0.25)
        ax.set_ylabel("GiB per chip")
    ax.legend(frameon=False, title="lines: arithmetic\ncircles: compiled for v5p\nsquares: for H200")
    figure.savefig(HERE / "table.png")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hardware", choices=HARDWARE, default="v5p")
    parser.add_argument("--compile", type=int, default=100, help="at most so many cells")
    parser.add_argument("--minutes", type=float, default=1e9, help="start no compilation after this time")
    parser.add_argument("--table", action="store_true", help="print the README's tables, and compile nothing")
    parser.add_argument("--picture", action="store_true", help="draw table.png, and compile nothing")
    args = parser.parse_args()
    if args.table or args.picture:
        print(tables()) if args.table else picture()
        return
    until = time.time() + 60 * args.minutes
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=HERE).stdout.strip()
    about = {"date": datetime.date.today().isoformat(), "commit": commit, "jax": jax.__version__}
    missing = [cell for cell in ORDER[args.hardware] if (args.hardware, *cell) not in read()]
    for layout, policy, seq_len in missing[: args.compile]:
        if time.time() > until:
            break
        found = compiled(args.hardware, layout, policy, seq_len)
        row = {"hardware": args.hardware, "layout": layout, "policy": policy, "seq_len": seq_len, **found, **about}
        with CELLS.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(f"{policy:17s} {seq_len:8d} {layout}: {row['bytes'] / 2**30:.1f} GiB", flush=True)


if __name__ == "__main__":
    main()
