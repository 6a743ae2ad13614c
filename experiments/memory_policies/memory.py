"""Memory and extra FLOPs of each memory policy for Llama 3 8B, from 8k to 1M tokens a row.

    python experiments/memory_policies/memory.py                 # compile cell by cell, in order
    python experiments/memory_policies/memory.py --hardware H200 # cells for GPUs; Python 3.12, EXTRAS=gpu-aot
    python experiments/memory_policies/memory.py --table         # the README's tables from cells.jsonl; or --picture

Needs `make install EXTRAS=tpu` on Python 3.12; two to six minutes a compilation on two cores. Each compiled cell is a
line of cells.jsonl, written at once; the next call continues with the missing cells.
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
"""Name -> topology of eight, and the bytes that a step may use on one: the limit of the TPU's compiler, and about the
free memory of an H200."""

REVERSIBLE = "reversible"
TILES = ("norm", "mlp_hidden")
LAYOUTS: dict[str, tuple[js.Layout, int]] = {
    "fsdp=8": (js.Layout("fsdp=8"), 8),
    "tensor=8, sequence split between blocks": (js.Layout("tensor=8", sequence_sharded=True), 1),
}
"""Name -> layout and batch rows: one for each device, or one in all."""

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
"""Cells to compile, most informative first."""


def config_of(layout: str, policy: str, seq_len: int, **changes: Any) -> js.TrainConfig:
    """Return the config of a cell."""
    where, rows = LAYOUTS[layout]
    model_kwargs: dict[str, Any] = (
        {"memory": "none", "stack": ReversibleRun} if policy == REVERSIBLE else {"memory": policy}
    )
    if policy == REVERSIBLE:
        model_kwargs["memory"] = MemoryPolicy(rest="keep", tile=TILES)
    model = llama3_8b(attention=flash_attention, **model_kwargs, **changes)
    return js.TrainConfig(model=model, layout=where, batch_size=rows, seq_len=seq_len, segments=False)


def arithmetic(layout: str, policy: str, seq_len: int) -> dict[str, Any]:
    """Estimate a cell without compiling; the estimate is the same for all hardware.

    Reversible layers count as recomputation in tiles, with two float32 streams and two cotangents between layers.
    """
    topology, _ = HARDWARE["v5p"]
    config = config_of(layout, "full" if policy == REVERSIBLE else policy, seq_len)
    if policy == REVERSIBLE:
        config = dataclasses.replace(config, model=dataclasses.replace(config.model, memory=MemoryPolicy(tile=TILES)))
    estimated = estimate(config, topology)
    if policy == REVERSIBLE:
        stream = estimated.saved // config.model.depth
        estimated = dataclasses.replace(estimated, peak=estimated.peak - estimated.saved + 7 * stream)
    return {"bytes": estimated.device, "host": estimated.host, "extra_flops": round(estimated.extra_flops, 4)}


def compiled(hardware: str, layout: str, policy: str, seq_len: int) -> dict[str, Any]:
    """Compile a cell; a step that does not fit a TPU has the size from the compiler's error."""
    topology, _ = HARDWARE[hardware]
    start = time.perf_counter()
    size = compiled_bytes(config_of(layout, policy, seq_len), topology)
    return {"bytes": size, "compile_seconds": round(time.perf_counter() - start)}


def read() -> dict[tuple[str, str, str, int], dict[str, Any]]:
    """Return the cells compiled so far."""
    if not CELLS.exists():
        return {}
    rows = [json.loads(line) for line in CELLS.read_text().splitlines()]
    return {(r["hardware"], r["layout"], r["policy"], r["seq_len"]): r for r in rows}


def tables() -> str:
    """Return the README's tables: bytes of every cell, the longest sequence that fits, estimated and compiled bytes."""
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
    """Return the longest sequence that compiled and fits, or "at most" the longest that the estimate allows."""
    _, capacity = HARDWARE[hardware]
    done = {n: r["bytes"] for (h, lay, p, n), r in read().items() if (h, lay, p) == (hardware, layout, policy)}
    over = min((n for n, size in done.items() if size > capacity), default=LENGTHS[-1] + 1)
    possible = [n for n in LENGTHS if n < over and sizes[n] <= capacity]
    if not possible:
        return "-"
    return f"{possible[-1] // 1024}k" if possible[-1] in done else f"at most {possible[-1] // 1024}k"


def picture() -> None:
    """Draw table.png: estimates as lines, compiled cells as dots, and the memory of a chip."""
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
    """Compile missing cells, or print the tables, or draw the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hardware", choices=HARDWARE, default="v5p")
    parser.add_argument("--compile", type=int, default=100, help="compile at most this many cells")
    parser.add_argument("--minutes", type=float, default=1e9, help="start no compilation after this time")
    parser.add_argument("--table", action="store_true", help="only print the README's tables")
    parser.add_argument("--picture", action="store_true", help="only draw table.png")
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
        cell = compiled(args.hardware, layout, policy, seq_len)
        row = {"hardware": args.hardware, "layout": layout, "policy": policy, "seq_len": seq_len, **cell, **about}
        with CELLS.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(f"{policy:17s} {seq_len:8d} {layout}: {row['bytes'] / 2**30:.1f} GiB", flush=True)


if __name__ == "__main__":
    main()
