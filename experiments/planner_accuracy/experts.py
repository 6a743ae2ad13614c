"""Bytes per device of training steps of experts by dispatcher: predicted by formulas and tracing, beside a compiler.

    python experiments/planner_accuracy/experts.py            # compile cell by cell; resume if interrupted
    python experiments/planner_accuracy/experts.py --predict  # predict all compiled cells again
    python experiments/planner_accuracy/experts.py --table    # print the table of EXPERTS.md

Two layers with the shapes of published models, their experts reduced in number where a chip would not hold them, and
a vocabulary of 8192. Needs `make install EXTRAS=tpu,gpu-aot` on Python 3.12, and JAX_PLATFORMS=cpu. Each compiled cell
is a line of experts.jsonl. A compiler is stopped after buffer assignment, as in memory.py.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from memory import about, assigned

import jaxscale as js
from jaxscale.hardware import topology
from jaxscale.models import Transformer, presets
from jaxscale.nn import MixtureOfExperts, QKNorm, Rotary, SoftmaxRouter, flash_attention
from jaxscale.parallel.dispatch import AllGatherDispatch, Dispatcher, HierarchicalDispatch
from jaxscale.plan import compiled_bytes, estimate
from jaxscale.plan.by_tracing import better_traced, traced_plan
from jaxscale.plan.covered import NotCovered
from jaxscale.plan.planner import on_hardware

ROWS = Path(__file__).with_name("experts.jsonl")
LIMIT = 2400
"""Seconds after which a compiler is stopped whatever it does."""


def qwen3_30b_a3b(**changes: Any) -> Any:
    """Return Qwen3-30B-A3B (Yang et al. 2025)."""
    experts = MixtureOfExperts(128, 8, hidden=768, router=SoftmaxRouter(normalized=True), balance_loss=0.001)
    own = Transformer.Config(
        depth=48, vocab=151936, width=2048, heads=32, kv_heads=4, head_dim=128, hidden=6144, norm_eps=1e-6,
        mlp=experts, positions=Rotary(1000000.0), qk_norm=QKNorm(), dtype="bfloat16", memory="full",
    )  # fmt: skip
    return dataclasses.replace(own, **changes)


MODELS = {
    "mixtral": (presets.mixtral_8x7b, 8),
    "qwen3_30b_a3b": (qwen3_30b_a3b, 128),
    "deepseek_v3": (functools.partial(presets.deepseek_v3, dense_layers=1), 32),
    "gpt_oss": (presets.gpt_oss_20b, 32),
}
"""By name: the model, and how many experts its cells have."""
DISPATCHERS: dict[str, Dispatcher | None] = {
    "dropless": None,
    "slots": None,  # the default with a capacity
    "gathered": AllGatherDispatch(),
    "hierarchical": HierarchicalDispatch(),
}
CAPACITY = 1.25
CHIPS = {"v5e": "v5e:2x4", "v5p": "v5p:2x2x2", "v6e": "v6e:2x4", "tpu7x": "tpu7x:2x2x1", "h200": "h200:8"}
CHIPS |= {"b200": "b200:8"}
LAYOUTS = {"dropless": "fsdp=2,expert=4", "slots": "fsdp=2,expert=4", "gathered": "fsdp=2,expert=4"}
LAYOUTS |= {"hierarchical": "expert=2,tensor=4"}


@dataclasses.dataclass(frozen=True)
class Cell:
    """A training step of two layers with experts.

    Args:
      model: a key of `MODELS`.
      chip: a key of `CHIPS`.
      dispatcher: a key of `DISPATCHERS`.
      mesh: as `Layout.mesh`.
    """

    model: str
    chip: str
    dispatcher: str
    mesh: str

    @property
    def name(self) -> str:
        """Name of the cell."""
        return f"{self.model} {self.chip} {self.dispatcher} {self.mesh}"

    @property
    def config(self) -> js.TrainConfig:
        """Settings of the run."""
        make, experts = MODELS[self.model]
        capacity = CAPACITY if self.dispatcher == "slots" else None
        whole = make()
        mlp = dataclasses.replace(
            whole.mlp, experts=experts, capacity=capacity, dispatcher=DISPATCHERS[self.dispatcher]
        )
        depth = 3 if whole.dense_layers else 2
        model = dataclasses.replace(whole, depth=depth, vocab=8192, mlp=mlp, attention=flash_attention)
        folded = self.dispatcher == "hierarchical"
        layout = js.Layout(self.mesh, rules="folded" if folded else "fsdp_tensor", sequence_sharded=folded)
        return js.TrainConfig(model=model, layout=layout, batch_size=8, seq_len=2048, segments=False)


CELLS = tuple(
    Cell(model, chip, dispatcher, LAYOUTS[dispatcher])
    for model, chip, dispatcher in (
        ("qwen3_30b_a3b", "v5e", "dropless"),
        ("qwen3_30b_a3b", "v5e", "slots"),
        ("mixtral", "v5p", "gathered"),
        ("deepseek_v3", "v6e", "dropless"),
        ("qwen3_30b_a3b", "tpu7x", "gathered"),
        ("gpt_oss", "v6e", "slots"),
        ("gpt_oss", "h200", "slots"),
        ("mixtral", "h200", "dropless"),
        ("deepseek_v3", "tpu7x", "dropless"),
        ("deepseek_v3", "v5p", "gathered"),
        ("mixtral", "v6e", "hierarchical"),
        ("qwen3_30b_a3b", "h200", "gathered"),
        ("mixtral", "b200", "dropless"),
        ("qwen3_30b_a3b", "v5p", "hierarchical"),
        ("gpt_oss", "v5p", "gathered"),
        ("mixtral", "v5p", "dropless"),
    )
)
"""Cells to compile, the most informative first."""
SEEN = frozenset(cell.name for cell in CELLS if cell.chip == "v5e")
"""Cells that were compared before the others were chosen."""


def predicted(cell: Cell) -> dict[str, Any]:
    """Predict the bytes of a cell by formulas, `None` where none covers it, and by tracing; name the plan's method."""
    target = topology(CHIPS[cell.chip])
    try:
        formulas = estimate(cell.config, target).device
    except NotCovered:
        formulas = None
    traced = traced_plan(on_hardware(cell.config, target), target)[0].device
    method = "traced" if formulas is None or better_traced(cell.config, target) else "formulas"
    return {"formulas": formulas, "traced": traced, "method": method}


def compiled(cell: Cell, folder: Path) -> dict[str, Any]:
    """Compile a cell in its own process until its buffers are assigned, and return its bytes."""
    flags = f"--xla_dump_to={folder} --xla_dump_hlo_as_text --xla_dump_hlo_module_re=jit_step"
    start = time.perf_counter()
    command = [sys.executable, __file__, "--compile", cell.name]
    with subprocess.Popen(command, env=os.environ | {"XLA_FLAGS": flags}) as child:
        size = None
        while child.poll() is None and size is None and time.perf_counter() - start < LIMIT:
            time.sleep(1)
            size = assigned(folder)
        child.kill()
    return {"compiled": size, "seconds": round(time.perf_counter() - start)}


def read() -> dict[str, dict[str, Any]]:
    """Return the compiled cells by name."""
    return {r["cell"]: r for r in map(json.loads, ROWS.read_text().splitlines())} if ROWS.exists() else {}


def table() -> str:
    """Return the table of cells, and for held-out ones the errors of both methods and of the one that a plan uses."""
    rows = list(read().values())
    head = ("model", "chip", "dispatcher", "mesh", "compiled, GiB", "formulas", "traced", "first compared")
    out = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for r in rows:
        ratios = {name: f"{r[name] / r['compiled']:.3f}" if r[name] else "" for name in ("formulas", "traced")}
        ratios[r["method"]] = f"**{ratios[r['method']]}**"
        size, opened = f"{r['compiled'] / 2**30:.2f}", f"{r['opened']:.3f}" if "opened" in r else ""
        out.append(f"| {' | '.join((*r['cell'].split(' '), size, *ratios.values(), opened))} |")
    rows = [r for r in rows if "opened" in r]
    of = {name: [r[name] / r["compiled"] for r in rows if r[name]] for name in ("formulas", "traced")}
    of |= {"plan": [r[r["method"]] / r["compiled"] for r in rows], "plan, first compared": [r["opened"] for r in rows]}
    for name, each in of.items():
        errors = [abs(ratio - 1) for ratio in each]
        within, median, worst = sum(e <= 0.1 for e in errors), statistics.median(errors), max(errors)
        out.append(f"\n{name}: {within} of {len(errors)} within 10%, median {median:.1%}, worst {worst:.1%}")
    return "\n".join(out)


def main() -> None:
    """Compile, predict or print cells."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--predict", action="store_true", help="predict again, compile nothing")
    parser.add_argument("--table", action="store_true", help="print the table, and compile nothing")
    parser.add_argument("--dumps", type=Path, help="folder for the compiler's dumps, with a folder for each cell")
    parser.add_argument("--compile", help=argparse.SUPPRESS)
    args = parser.parse_args()
    cells = {cell.name: cell for cell in CELLS}
    if args.compile:
        compiled_bytes(cells[args.compile].config, CHIPS[cells[args.compile].chip])
    elif args.table:
        print(table())
    elif args.predict:
        rows = [r | predicted(cells[name]) | {"predicted_at": about()["commit"]} for name, r in read().items()]
        ROWS.write_text("".join(json.dumps(r) + "\n" for r in rows))
    else:
        for name in [name for name in cells if name not in read()]:
            with tempfile.TemporaryDirectory() as scratch:
                folder = Path(scratch) if args.dumps is None else args.dumps / name.replace(" ", "_")
                row = compiled(cells[name], folder)
            if row["compiled"] is None:
                print(f"{name}: not compiled in {row['seconds']} s", flush=True)
                continue
            row = {"cell": name, **row, **about(), **predicted(cells[name])}
            if name not in SEEN:
                row["opened"] = round(row[row["method"]] / row["compiled"], 4)
            with ROWS.open("a") as file:
                file.write(json.dumps(row) + "\n")
            print(row, flush=True)


if __name__ == "__main__":
    main()
