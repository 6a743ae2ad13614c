"""Bytes per device of training steps: `jaxscale.plan.estimate` beside compilers for TPUs and GPUs.

    python experiments/planner_accuracy/memory.py             # compile cell by cell; resume if interrupted
    python experiments/planner_accuracy/memory.py --cells 1   # compile one; --only NAME; --whole to the end
    python experiments/planner_accuracy/memory.py --predict   # predict all compiled cells again
    python experiments/planner_accuracy/memory.py --table     # print the table of MEMORY.md; --why NAME
    python experiments/planner_accuracy/memory.py --calibrate # write jaxscale/plan/error_bars.json, and test it

Needs `make install EXTRAS=tpu,gpu-aot` on Python 3.12: jax 0.10.2 reports more temporaries than a TPU allocates. For
GPUs, set JAX_PLATFORMS=cpu. Each compiled cell is a line of memory.jsonl, written as soon as it is known. A compiler is
stopped after buffer assignment, because code generation takes most of its time and does not change memory. Held-out
cells were chosen before any of them was compiled; `opened` is their ratio when they were first compared.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import hashlib
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax

import jaxscale as js
from jaxscale import optim
from jaxscale.hardware import topology
from jaxscale.layout.mesh import parse_mesh
from jaxscale.models import presets
from jaxscale.nn import GatherAttention, RingAttention, UlyssesAttention, dot_product_attention, flash_attention
from jaxscale.plan import compiled_bytes, error_bars, estimate
from jaxscale.plan.by_tracing import traced_plan
from jaxscale.plan.planner import on_hardware
from jaxscale.step import LoRA
from jaxscale.train import FromRun

HERE = Path(__file__).parent
ROWS = HERE / "memory.jsonl"
PAIRS = HERE / "memory_pairs.txt"
"""Names of cells that cover pairs of model, optimizer, accumulation, packing, policy, mesh, chip and adapters."""
HELD_OUT = HERE / "memory_held_out.txt"
"""Names of cells drawn at random from the values of `PAIRS`, committed before any of them was compiled or predicted."""
GPUS = HERE / "memory_gpus.txt"
"""Names of cells for GPUs, chosen before any of them was compiled."""
BEFORE = HERE.parent / "memory_policies" / "cells.jsonl"
"""Cells that were compiled before, all of them Llama 3 8B on a v5p of eight chips."""

ATTENTION = {
    "flash": flash_attention,
    "dense": dot_product_attention,
    "ring": RingAttention(),
    "ulysses": UlyssesAttention(),
    "gather": GatherAttention(),
}


@dataclasses.dataclass(frozen=True)
class Cell:
    """A training step that is predicted and compiled.

    Args:
      model: name of a preset.
      depth: number of layers.
      mesh: as `Layout.mesh`.
      topology: the hardware to compile for.
      rows: rows of the batch.
      seq: tokens of a row.
      policy: the memory policy.
      rules: "fsdp_tensor" or another preset; with the suffix "+seq" the residual stream is sharded over its sequence.
      pipeline: the pipeline schedule.
      attention: a key of `ATTENTION`.
      lora: rank of adapters on every projection of a model that is frozen in bfloat16; 0 trains the model itself.
      optimizer: name of a class of `jaxscale.optim`, which has its defaults.
      accumulate: number of accumulated micro-batches.
      segments: whether sequences are packed.
      held_out: whether the cell was predicted before its compiled size was known.
    """

    model: str
    depth: int
    mesh: str
    topology: str
    rows: int
    seq: int
    policy: str = "full"
    rules: str = "fsdp_tensor"
    pipeline: str | None = None
    attention: str = "flash"
    lora: int = 0
    optimizer: str = "AdamW"
    accumulate: int = 1
    segments: bool = False
    held_out: bool = False

    @property
    def name(self) -> str:
        """Name of the cell: all fields that are not defaults."""
        more = [self.rules] if self.rules != "fsdp_tensor" else []
        more += [self.pipeline] if self.pipeline else []
        more += [self.attention] if self.attention != "flash" else []
        more += [f"lora:{self.lora}"] if self.lora else []
        more += [self.optimizer] if self.optimizer != "AdamW" else []
        more += [f"accumulate:{self.accumulate}"] if self.accumulate > 1 else []
        more += ["segments"] if self.segments else []
        size = f"{self.rows}x{self.seq}"
        return " ".join([f"{self.model}:{self.depth}", self.topology, self.mesh, *more, size, self.policy])

    @classmethod
    def named(cls, name: str) -> Cell:
        """Parse the name of a cell."""
        model, hardware, mesh, *more, size, policy = name.split(" ")
        rows, _, seq = size.partition("x")
        options: dict[str, Any] = {}
        for word in more:
            key, _, value = word.partition(":")
            if key in ("lora", "accumulate"):
                options[key] = int(value)
            elif word == "segments":
                options[word] = True
            elif word in ATTENTION:
                options["attention"] = word
            elif hasattr(optim, word):
                options["optimizer"] = word
            else:
                options["pipeline" if "pipeline" in parse_mesh(mesh) and value else "rules"] = word
        preset, _, depth = model.partition(":")
        return cls(preset, int(depth), mesh, hardware, int(rows), int(seq), policy, **options)

    @property
    def config(self) -> js.TrainConfig:
        """Config of the run."""
        make = getattr(presets, self.model)
        model = make(depth=self.depth, attention=ATTENTION[self.attention], memory=self.policy)
        rules, cut, _ = self.rules.partition("+")
        layout = js.Layout(self.mesh, rules=rules, sequence_sharded=bool(cut), pipeline=self.pipeline)
        run = js.TrainConfig(
            model=model,
            layout=layout,
            batch_size=self.rows,
            seq_len=self.seq,
            optimizer=getattr(optim, self.optimizer)(),
            accumulate=self.accumulate,
            segments=self.segments,
        )
        if not self.lora:
            return run
        return dataclasses.replace(run, start=FromRun("runs/base"), adapters=LoRA(self.lora, base_dtype="bfloat16"))


def _held(*args: Any, **more: Any) -> Cell:
    return Cell(*args, **more, held_out=True)


CELLS = (
    Cell("llama3_8b", 8, "fsdp=16", "v5e:4x4", 16, 4096),
    Cell("llama3_8b", 8, "pipeline=4,fsdp=4", "v5p:2x2x4", 32, 4096, pipeline="1f1b:8"),
    Cell("mixtral_8x7b", 4, "fsdp=4,expert=4", "v5p:2x2x4", 16, 4096),
    Cell("llama3_8b", 4, "fsdp=4,context=4", "v5e:4x4", 4, 32768, attention="ring"),
    Cell("llama3_8b", 8, "fsdp=8,tensor=2", "v5e:4x4", 8, 8192, rules="fsdp_tensor+seq"),
    _held("qwen3", 8, "fsdp=4,tensor=4", "v5p:2x2x4", 16, 4096),
    _held("gemma3", 12, "fsdp=16", "v6e:4x4", 16, 8192),
    Cell("llama3_8b", 4, "data=4", "v5p:2x2x1", 8, 4096, "dots", rules="replicated"),
    Cell("deepseek_moe_16b", 6, "fsdp=4,expert=4", "v6e:4x4", 16, 4096),
    _held("llama3_70b", 8, "pipeline=4,fsdp=4,tensor=4", "v5p:4x4x4", 64, 4096, pipeline="lockstep:8"),
    _held("mixtral_8x7b", 4, "fsdp=16", "v5p:2x2x4", 16, 4096),
    Cell("llama3_70b", 4, "fsdp=64", "v5p:4x4x4", 64, 8192),
    Cell("llama3_8b", 8, "fsdp=4,context=4", "v5p:2x2x4", 4, 65536, "minimal", attention="ulysses"),
    Cell("llama3_8b", 4, "data=4", "v5p:2x2x1", 8, 4096, rules="zero2"),
    _held("llama3_8b", 4, "fsdp=2,context=8", "v6e:4x4", 2, 131072, "minimal", attention="gather"),
    Cell("gemma3", 12, "fsdp=4,tensor=4", "v5e:4x4", 8, 8192, "attention_only"),
    _held("deepseek_moe_16b", 8, "pipeline=2,fsdp=8", "v5p:2x2x4", 32, 4096, pipeline="1f1b:4"),
    Cell("llama3_8b", 6, "pipeline=4,fsdp=4", "v5p:2x2x4", 32, 4096, pipeline="zb-h1:8"),
    _held("qwen3", 4, "data=4", "v5p:2x2x1", 8, 4096, rules="zero1"),
    Cell("mixtral_8x7b", 4, "fsdp=16,tensor=4", "v5p:4x4x4", 64, 4096, "attention_only", rules="fsdp_tensor+seq"),
    _held("llama3_8b", 16, "fsdp=16", "v6e:4x4", 16, 16384, "none"),
    # held out later, after the cells above were compared and the formulas corrected
    _held("gemma3", 12, "fsdp=16", "v5p:2x2x4", 16, 4096, "offload_residual"),
    _held("mixtral_8x7b", 4, "fsdp=8,expert=2", "v6e:4x4", 16, 4096),
    _held("llama3_8b", 8, "pipeline=2,fsdp=8", "v5e:4x4", 32, 4096, pipeline="interleaved:4:2"),
    _held("qwen3", 6, "fsdp=8,context=2", "v6e:4x4", 8, 16384, attention="ring"),
    # latent attention, whose formulas were written before any such cell was compiled
    _held("deepseek_v2_lite", 6, "fsdp=8", "v5p:2x2x2", 8, 4096),
    _held("deepseek_v3", 3, "fsdp=8,tensor=2", "v5p:2x2x4", 8, 4096),
    _held("deepseek_v2_lite", 6, "fsdp=4,expert=2", "v5p:2x2x2", 8, 4096, "dots_and_attention"),
    _held("deepseek_v3", 3, "fsdp=16", "v6e:4x4", 16, 4096, "none"),
    # adapters: the formulas were derived from the first three
    Cell("llama3_8b", 8, "fsdp=8", "v5p:2x2x2", 8, 4096, lora=16),
    Cell("llama3_8b", 8, "data=1", "v5e:1x1", 1, 4096, lora=16),
    Cell("llama3_8b", 8, "fsdp=2,tensor=4", "v5p:2x2x2", 8, 4096, "dots", lora=16),
    _held("qwen3", 8, "fsdp=4,tensor=4", "v5p:2x2x4", 16, 4096, "attention_only", lora=16),
    _held("gemma3", 12, "fsdp=8", "v5p:2x2x2", 8, 8192, lora=16),
    *map(Cell.named, (*PAIRS.read_text().splitlines(), *HELD_OUT.read_text().splitlines())),
    *map(Cell.named, GPUS.read_text().splitlines()),
)
"""Cells to compile, the most informative first."""


def before() -> dict[Cell, int]:
    """Return the cells that another study compiled, and their bytes."""
    layouts = {"fsdp=8": ("fsdp=8", "fsdp_tensor", 8)}
    layouts["tensor=8, sequence split between blocks"] = ("tensor=8", "fsdp_tensor+seq", 1)
    sizes = {}
    for line in BEFORE.read_text().splitlines():
        r = json.loads(line)
        if r["hardware"] == "v5p" and r["policy"] != "reversible":
            mesh, rules, rows = layouts[r["layout"]]
            sizes[Cell("llama3_8b", 32, mesh, "v5p:2x2x2", rows, r["seq_len"], r["policy"], rules)] = r["bytes"]
    return sizes


def read() -> dict[str, dict[str, Any]]:
    """Return the measured cells by name."""
    lines = ROWS.read_text().splitlines() if ROWS.exists() else []
    return {r["cell"]: r for r in map(json.loads, lines)}


def about() -> dict[str, Any]:
    """Return date, commit and jax version."""
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=HERE).stdout.strip()
    return {"date": datetime.date.today().isoformat(), "commit": commit, "jax": jax.__version__}


def predicted(cell: Cell) -> dict[str, Any]:
    """Predict the bytes of a cell by formulas and by tracing."""
    memory = estimate(cell.config, cell.topology)
    fields = {"state": "state", "gradients": "gradients", "copies": "copies", "kept": "saved"}
    fields |= {"working": "working", "host": "host"}  # keys of memory.jsonl: fields of `Estimate`
    parts = {name: getattr(memory, field) for name, field in fields.items()}
    target = topology(cell.topology)
    traced = traced_plan(on_hardware(cell.config, target), target)[0].device
    return {"predicted": memory.device, "traced": traced, "parts": parts}


def assigned(folder: Path) -> int | None:
    """Return bytes of arguments and temporaries in a compiler's dump of its buffer assignment; `None` if not written.

    The few bytes of outputs that are not aliased to arguments are left out.
    """
    files = list(folder.glob("*after_optimizations-buffer-assignment.txt"))
    if not files or time.time() - files[0].stat().st_mtime < 5:  # the compiler may still be writing
        return None
    sizes: dict[str, int] = {"parameter": 0, "preallocated-temp": 0}
    for line in files[0].read_text().splitlines():
        match = re.match(r"allocation \d+: size (\d+), (?:color (\d+), )?.*?(parameter|preallocated-temp)", line)
        if match and match[2] in (None, "0"):
            sizes[match[3]] += int(match[1])
    return sum(sizes.values())


def compiled(cell: Cell, folder: Path, whole: bool) -> dict[str, Any]:
    """Compile a cell in its own process, and return its bytes; the compiler's dumps stay in `folder`."""
    flags = f"--xla_dump_to={folder} --xla_dump_hlo_as_text --xla_dump_hlo_module_re=jit_step"
    start = time.perf_counter()
    command = [sys.executable, __file__, "--compile", cell.name]
    with subprocess.Popen(command, env=os.environ | {"XLA_FLAGS": flags}, stdout=subprocess.PIPE, text=True) as child:
        while child.poll() is None:
            size = assigned(folder)
            if size is not None and not whole:
                child.kill()
                return {"compiled": size, "seconds": round(time.perf_counter() - start), "by": "buffer assignment"}
            time.sleep(1)
        size = int(child.communicate()[0])
    row = {"compiled": size, "seconds": round(time.perf_counter() - start), "by": "memory analysis"}
    return row | {"assigned": assigned(folder)}


def measure(cell: Cell, folder: Path | None, whole: bool) -> dict[str, Any]:
    """Compile and predict a cell."""
    with tempfile.TemporaryDirectory() as scratch:
        row = compiled(cell, Path(scratch) if folder is None else folder, whole)
    row = {"cell": cell.name, "held_out": cell.held_out, **row, **about(), **predicted(cell)}
    ratio = round(row["predicted"] / row["compiled"], 4)
    return row | {"ratio": ratio} | ({"opened": ratio} if cell.held_out else {})


def write(rows: Iterable[dict[str, Any]]) -> None:
    """Write all cells."""
    ROWS.write_text("".join(json.dumps(r) + "\n" for r in rows))


def again() -> None:
    """Predict every compiled cell again, including those that another study compiled."""
    rows, pairs = read(), []
    for cell, size in before().items():
        row = rows.get(cell.name) or {"cell": cell.name, "held_out": False, "compiled": size, "from": "memory_policies"}
        pairs.append((cell, row))
    pairs += [(cell, rows[cell.name]) for cell in CELLS if cell.name in rows]
    now = []
    for cell, row in pairs:
        row = row | predicted(cell) | {"predicted_at": about()["commit"]}
        now.append(row | {"ratio": round(row["predicted"] / row["compiled"], 4)})
    write(now)


def calibrate() -> str:
    """Write the factors between which 90% of the calibration cells lie, and return a table of the others.

    A cell is for calibration if the first byte of its name's SHA-256 is even. Factors are `error_bars.factors` with
    the greatest as the upper one.
    """
    rows = [r for r in read().values() if "traced" in r]
    cells = {r["cell"]: Cell.named(r["cell"]) for r in rows}
    kinds = {name: error_bars.regime(cell.config, topology(cell.topology)) for name, cell in cells.items()}
    even = {r["cell"]: hashlib.sha256(r["cell"].encode()).digest()[0] % 2 == 0 for r in rows}
    bars: dict[str, dict[str, Any]] = {}
    out = [
        "| method | regime | cells | from | to | held out | of them within | above |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for method, field in (("formulas", "predicted"), ("traced", "traced")):
        for kind in error_bars.REGIMES:
            of = [r for r in rows if kinds[r["cell"]] == kind]
            known = [r["compiled"] / r[field] for r in of if even[r["cell"]]]
            rest = [r["compiled"] / r[field] for r in of if not even[r["cell"]]]
            n, (low, high) = len(known), error_bars.factors(known, greatest=True)
            sizes = [r[field] for r in of]
            bar = {"low": low, "high": high, "cases": n, "smallest": min(sizes), "largest": max(sizes)}
            bar["chips"] = sorted({cells[r["cell"]].topology.partition(":")[0] for r in of})
            bars.setdefault(method, {})[kind] = bar
            within, above = sum(low <= x <= high for x in rest), sum(x > high for x in rest)
            out.append(f"| {method} | {kind} | {n} | {low:.2f} | {high:.2f} | {len(rest)} | {within} | {above} |")
    error_bars.write_bars(bars)
    return "\n".join(out)


def table(held_out: bool | None = None) -> str:
    """Return the table of cells, with the errors of each group of cells."""
    rows = [r for r in read().values() if held_out is None or r["held_out"] == held_out]
    out = ["| cell | compiled, GiB | formulas, GiB | ratio | traced | |", "|---|---|---|---|---|---|"]
    for r in rows:
        sizes = f"{r['compiled'] / 2**30:.2f} | {r['predicted'] / 2**30:.2f} | {r['ratio']:.3f}"
        sizes += f" | {r['traced'] / r['compiled']:.3f}" if "traced" in r else " | "
        opened = f"held out: {r['opened']:.3f}" if r["held_out"] else ""
        out += [f"| {r['cell']} | {sizes} | {opened} |"]
    pairs = PAIRS.read_text().splitlines()
    gpus = [r for r in rows if r["cell"] in GPUS.read_text().splitlines()]
    drawn = [r for r in rows if r["cell"] in HELD_OUT.read_text().splitlines()]
    first = [r for r in rows if r["cell"] not in pairs and r not in gpus and r not in drawn]
    paired = [r for r in rows if r["cell"] in pairs]
    for name, of, field in (
        ("without pairs, looked at, formulas", [r for r in first if not r["held_out"]], "ratio"),
        ("without pairs, held out, when opened, formulas", [r for r in first if r["held_out"]], "opened"),
        ("without pairs, formulas", first, "ratio"),
        ("without pairs, traced", first, "traced"),
        ("pairs, formulas, which were not changed for them", paired, "ratio"),
        ("pairs, traced, whose rules were chosen on them", paired, "traced"),
        ("drawn at random, formulas", drawn, "ratio"),
        ("drawn at random, traced, when opened", drawn, "opened_traced"),
        ("drawn at random, traced", drawn, "traced"),
        ("GPUs, formulas", gpus, "ratio"),
        ("GPUs, traced", gpus, "traced"),
    ):
        of = [r for r in of if field in r]
        errors = [abs((r["traced"] / r["compiled"] if field == "traced" else r[field]) - 1) for r in of]
        if errors:
            within = sum(e <= 0.05 for e in errors)
            median, worst = 100 * statistics.median(errors), 100 * max(errors)
            out += [f"\n{name}: {within} of {len(errors)} within 5%, median {median:.1f}%, worst {worst:.1f}%"]
    return "\n".join(out)


def why(name: str) -> str:
    """Return the buffers of a cell at its predicted peak, in GiB."""
    cell = next(c for c in (*CELLS, *before()) if c.name == name)
    memory = estimate(cell.config, cell.topology)
    lines = [f"{b.size / 2**30:8.3f} at {b.start / 2**30:8.3f}  {b.what}" for b in memory.at_peak if b.size > 2**20]
    return "\n".join([f"{memory.state / 2**30:8.3f} state", *lines])


def main() -> None:
    """Compile, predict, calibrate or print cells."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", type=int, default=len(CELLS), help="compile at most this many")
    parser.add_argument("--only", help="only the cell with this name")
    parser.add_argument("--predict", action="store_true", help="predict again, compile nothing")
    parser.add_argument("--calibrate", action="store_true", help="write error bars from the compiled cells")
    parser.add_argument("--table", action="store_true", help="print the table, and compile nothing")
    parser.add_argument("--seen", action="store_true", help="with --table, only cells that are not held out")
    parser.add_argument("--why", help="print the buffers of the cell with this name at its predicted peak")
    parser.add_argument(
        "--whole", action="store_true", help="let the compiler finish instead of stopping it after buffer assignment"
    )
    parser.add_argument("--dumps", type=Path, help="folder for the compiler's dumps, with a folder for each cell")
    parser.add_argument("--compile", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.compile:
        cell = Cell.named(args.compile)
        print(compiled_bytes(cell.config, cell.topology))
    elif args.why:
        print(why(args.why))
    elif args.predict:
        again()
    elif args.calibrate:
        print(calibrate())
    elif args.table:
        print(table(False if args.seen else None))
    else:
        missing = [c for c in CELLS if c.name not in read() and args.only in (None, c.name)]
        for cell in missing[: args.cells]:
            row = measure(cell, args.dumps and args.dumps / str(CELLS.index(cell)), args.whole)
            with ROWS.open("a") as file:
                file.write(json.dumps(row) + "\n")
            print(cell.name, row["seconds"], "s", "" if cell.held_out else row["ratio"], flush=True)


if __name__ == "__main__":
    main()
