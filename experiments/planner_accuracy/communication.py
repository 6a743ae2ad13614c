"""Communication of a step: the prediction of `jaxscale.plan.communication.predict` beside the TPU's compiled program.

    python experiments/planner_accuracy/communication.py              # compile cell by cell; resume if interrupted
    python experiments/planner_accuracy/communication.py --only ring  # cells whose model-case contains this
    python experiments/planner_accuracy/communication.py --again      # predict again, keep compiled numbers
    python experiments/planner_accuracy/communication.py --table      # print the table of COMMUNICATION.md
    python experiments/planner_accuracy/communication.py --full       # print it for ../parallelism's 8B and 47B models

Needs `make install EXTRAS=plot,tpu` and jax 0.12. Each cell is a line of communication.jsonl.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import jax

import jaxscale as js
from jaxscale.models import TransformerConfig
from jaxscale.nn import (
    GatherAttention,
    MixtureOfExperts,
    MultiHeadLatent,
    RingAttention,
    TokenRingAttention,
    UlyssesAttention,
    dot_product_attention,
    flash_attention,
)
from jaxscale.plan import compile_step
from jaxscale.plan.collectives import Collective, collectives
from jaxscale.plan.communication import predict
from jaxscale.plan.stand_ins import as_compiled

HERE = Path(__file__).parent
CELLS = HERE / "communication.jsonl"
SCALARS = 2048
"""Bytes of norms, losses and counts with their padding; smaller differences are ignored."""

DENSE = TransformerConfig(
    depth=4, width=256, heads=4, kv_heads=4, head_dim=128, hidden=512, vocab=1024, dtype="bfloat16", memory="full",
    attention=flash_attention,
)  # fmt: skip
MODELS = {
    "dense": DENSE,
    "moe": dataclasses.replace(
        DENSE, attention=dot_product_attention, mlp=MixtureOfExperts(experts=8, top_k=2, hidden=256)
    ),
    "latent": dataclasses.replace(
        DENSE, kv_heads=None, head_dim=None, attention_layer=MultiHeadLatent(128, None, 128, 64, 128)
    ),
    "latent-queries": dataclasses.replace(
        DENSE, kv_heads=None, head_dim=None, attention_layer=MultiHeadLatent(128, 192, 128, 64, 128)
    ),
}
BOTH = ("dense", "moe")
LATENT = {
    "latent": (
        "fsdp",
        "hybrid",
        "tensor",
        "sequence",
        "fsdp-tensor",
        "fsdp-sequence",
        "keep",
        "pipeline-fsdp",
        "fsdp-8",
    ),
    "latent-queries": ("fsdp", "tensor", "fsdp-tensor"),
}
"""Cases of models with the multi-head latent attention of DeepSeek-V2-Lite and V3."""


@dataclasses.dataclass(frozen=True)
class Cell:
    """A layout, and changes of the run.

    Args:
      layout: the layout.
      topology: the hardware to compile for.
      model: changes to the model's config.
      run: changes to the run's config.
      only: the models of `BOTH` that it is for.
    """

    layout: js.Layout
    topology: str = "v5p:2x2x1"
    model: dict[str, Any] = dataclasses.field(default_factory=dict)
    run: dict[str, Any] = dataclasses.field(default_factory=dict)
    only: tuple[str, ...] = BOTH


_L = js.Layout
_LONG = {"seq_len": 1024, "batch_size": 8}
CASES: dict[str, Cell] = {
    "data": Cell(_L("data=4", "replicated")),
    "zero2": Cell(_L("data=4", "zero2")),
    "fsdp": Cell(_L("fsdp=4")),
    "hybrid": Cell(_L("data=2,fsdp=2")),
    "hierarchical": Cell(_L("data=2,fsdp=2", "hierarchical")),
    "tensor": Cell(_L("tensor=4")),
    "sequence": Cell(_L("tensor=4", sequence_sharded=True)),
    "overlap": Cell(_L("tensor=4", sequence_sharded=True), model={"overlap": ("attention", "mlp")}, only=("dense",)),
    "fsdp-tensor": Cell(_L("fsdp=2,tensor=2")),
    "fsdp-sequence": Cell(_L("fsdp=2,tensor=2", sequence_sharded=True)),
    "zero2-tensor": Cell(_L("data=2,tensor=2", "zero2")),
    "accumulate": Cell(_L("fsdp=4"), run={"accumulate": 2}),
    "data-accumulate": Cell(_L("data=4", "replicated"), run={"accumulate": 2}, only=("dense",)),
    "hybrid-accumulate": Cell(_L("data=2,fsdp=2"), run={"accumulate": 2}, only=("dense",)),
    "unrolled": Cell(_L("fsdp=2,tensor=2"), model={"scan": False}, only=("dense",)),
    "windows": Cell(_L("fsdp=2,tensor=2"), model={"depth": 5, "windows": (128, None)}, only=("dense",)),
    "tiled": Cell(
        _L("fsdp=2,tensor=2", sequence_sharded=True),
        model={"memory": js.nn.MemoryPolicy(tile=("norm", "mlp_hidden"), tile_size=64)},
        only=("dense",),
    ),
    "gemma": Cell(
        _L("fsdp=2,tensor=2", sequence_sharded=True), model={"post_norm": True, "qk_norm": True}, only=("dense",)
    ),
    "keep": Cell(_L("fsdp=2,tensor=2", sequence_sharded=True), model={"memory": "none"}),
    "attention-only": Cell(_L("fsdp=2,tensor=2"), model={"memory": "attention_only"}),
    "dots": Cell(_L("fsdp=2,tensor=2"), model={"memory": "dots"}),
    "cut": Cell(_L("fsdp=2,tensor=2"), model={"vocab": 32768}, only=("dense",)),
    "tied": Cell(_L("fsdp=2,tensor=2"), model={"tied": True}, only=("dense",)),
    "parallel": Cell(_L("tensor=4"), model={"parallel": True, "qkv_bias": True}, only=("dense",)),
    "reversible": Cell(_L("tensor=4"), model={"stack": js.nn.ReversibleRun, "memory": "none"}, only=("dense",)),
    "ring": Cell(_L("context=4"), model={"attention": RingAttention()}, run=_LONG, only=("dense",)),
    "ring-window": Cell(
        _L("context=4"), model={"attention": RingAttention(zigzag=False), "windows": (256,)}, run=_LONG, only=("dense",)
    ),
    "token-ring": Cell(_L("context=4"), model={"attention": TokenRingAttention()}, run=_LONG, only=("dense",)),
    "ulysses": Cell(_L("context=4"), model={"attention": UlyssesAttention()}, run=_LONG, only=("dense",)),
    "gather": Cell(_L("context=4"), model={"attention": GatherAttention()}, run=_LONG, only=("dense",)),
    "fsdp-ring": Cell(_L("fsdp=2,context=2"), model={"attention": RingAttention()}, run=_LONG),
    "expert": Cell(_L("expert=4"), only=("moe",)),
    "fsdp-expert": Cell(_L("fsdp=2,expert=2"), only=("moe",)),
    "expert-tensor": Cell(_L("expert=2,tensor=2"), only=("moe",)),
    "folded": Cell(_L("expert=2,tensor=2", "folded"), only=("moe",)),
    "capacity": Cell(_L("fsdp=2,expert=2"), model={"mlp": MixtureOfExperts(8, 2, 256, capacity=1.25)}, only=("moe",)),
    "pipeline": Cell(_L("pipeline=4", pipeline="gpipe:4")),
    "pipeline-fsdp": Cell(_L("pipeline=2,fsdp=2", pipeline="1f1b:4")),
    "pipeline-cut": Cell(_L("pipeline=2,fsdp=2", pipeline="gpipe:4"), model={"vocab": 32768}, only=("dense",)),
    "pipeline-tensor": Cell(_L("pipeline=2,tensor=2", pipeline="lockstep:4")),
    "pipeline-ring": Cell(
        _L("pipeline=2,context=2", pipeline="gpipe:2"), model={"attention": RingAttention()}, run=_LONG, only=("dense",)
    ),
    "zero-bubble": Cell(_L("pipeline=2,fsdp=2", pipeline="zb-h1:4"), only=("dense",)),
    "fsdp-8": Cell(_L("fsdp=8"), "v5p:2x2x2"),
    "fsdp-8-flat": Cell(_L("fsdp=8"), "v5e:2x4", only=("dense",)),
    "fsdp-16": Cell(_L("fsdp=16"), "v5e:4x4", only=("dense",)),
    "fsdp-32": Cell(_L("fsdp=32"), "v5e:4x8", run={"batch_size": 32}, only=("dense",)),
    "fsdp-64": Cell(_L("fsdp=64"), "v5p:4x4x4", run={"batch_size": 64}),
    "fsdp-tensor-16": Cell(_L("fsdp=4,tensor=4", sequence_sharded=True), "v5e:4x4"),
    "fsdp-tensor-64": Cell(_L("fsdp=16,tensor=4"), "v5p:4x4x4", run={"batch_size": 64}, only=("dense",)),
    "fsdp-expert-64": Cell(_L("fsdp=16,expert=4"), "v5p:4x4x4", run={"batch_size": 64}, only=("moe",)),
    "interleaved": Cell(_L("pipeline=2,fsdp=2", pipeline="interleaved:4:2"), only=("dense",)),
}


def cells() -> list[tuple[str, str]]:
    """Return model and case of each cell, dense models first."""
    pairs = [(model, name) for model in BOTH for name, cell in CASES.items() if model in cell.only]
    return pairs + [(model, name) for model, names in LATENT.items() for name in names]


def config_of(model: str, case: str) -> js.TrainConfig:
    """Return the run of a cell."""
    cell = CASES[case]
    run = {"batch_size": 16, "seq_len": 256, "segments": False, "prompt": None} | cell.run
    return js.TrainConfig(model=dataclasses.replace(MODELS[model], **cell.model), layout=cell.layout, **run)


def summed(collectives: list[Collective]) -> list[dict[str, Any]]:
    """Sum collectives by kind and axes: payload of all executions, bytes that a device sends, executions."""
    rows: dict[tuple[Any, ...], dict[str, int]] = defaultdict(lambda: {"bytes": 0, "sent": 0, "times": 0})
    for c in collectives:
        row = rows[c.kind, c.axes]
        row["bytes"] += c.payload * c.times
        row["sent"] += c.sent
        row["times"] += c.times
    return [{"kind": k, "axes": list(a), **row} for (k, a), row in sorted(rows.items())]


def predicted(model: str, case: str) -> dict[str, Any]:
    """Predict a cell's collectives: with all branches of a pipeline, as in the compiled text, and as executed."""
    config, topology = config_of(model, case), CASES[case].topology
    start = time.perf_counter()
    sent = predict(config, topology, every_branch=True)
    seconds = time.perf_counter() - start
    row: dict[str, Any] = {"predicted": summed(sent), "predict_seconds": round(seconds, 3)}
    row["stood_in"] = summed(as_compiled(sent, topology))
    if config.layout is not None and config.layout.stages > 1:
        row["predicted_taken"] = summed(predict(config, topology))
    return row


def measure(model: str, case: str, keep: Path | None) -> dict[str, Any]:
    """Predict and compile a cell."""
    config, topology, start = config_of(model, case), CASES[case].topology, time.perf_counter()
    assert config.layout is not None
    compiled = compile_step(config, topology)
    if keep is not None:
        (keep / f"{model}.{case}.hlo").write_text(compiled.as_text())
    about = {"model": model, "case": case, "layout": str(config.layout), "topology": topology}
    sent = collectives(compiled, config.layout.sizes)
    seconds = round(time.perf_counter() - start, 1)
    return about | predicted(model, case) | {"compiled": summed(sent), "compile_seconds": seconds}


def read() -> dict[tuple[str, str], dict[str, Any]]:
    """Return the measured cells."""
    if not CELLS.exists():
        return {}
    return {(r["model"], r["case"]): r for r in map(json.loads, CELLS.read_text().splitlines())}


def write(rows: dict[tuple[str, str], dict[str, Any]]) -> None:
    """Write all measured cells in order."""
    order = [c for c in cells() if c in rows]
    CELLS.write_text("".join(json.dumps(rows[c]) + "\n" for c in order))


def by_axes(rows: list[dict[str, Any]], what: str = "sent") -> dict[str, int]:
    """Sum bytes by mesh axes."""
    total: dict[str, int] = defaultdict(int)
    for row in rows:
        total["·".join(row["axes"])] += row[what]
    return dict(total)


def table(rows: dict[tuple[str, str], dict[str, Any]]) -> str:
    """Return a table of bytes that a device sends, by axes: by the rules, with the compiler's stand-ins, compiled."""
    lines = ["| model | case | layout, topology | axes | rules | with stand-ins | compiled | difference |"]
    lines += ["|---|---|---|---|---|---|---|---|"]
    for cell in (c for c in cells() if c in rows):
        row = rows[cell]
        a, s, b = (by_axes(row[k]) for k in ("predicted", "stood_in", "compiled"))
        for axes in sorted(a | b, key=lambda x: -b.get(x, 0)):
            rules, ours, theirs = a.get(axes, 0), s.get(axes, 0), b.get(axes, 0)
            if max(ours, theirs) < SCALARS:
                continue
            more = theirs - ours
            share = "0" if abs(more) < SCALARS else f"{more:+,} ({more / theirs:+.2%})"
            where = f"| {row['model']} | {row['case']} | {row['layout']}, {row['topology']} | {axes} |"
            lines.append(f"{where} {rules:,} | {ours:,} | {theirs:,} | {share} |")
    return "\n".join(lines)


def full_table() -> str:
    """Return the table of the full-size models that `experiments/parallelism` compiled for 64 chips."""
    sys.path.insert(0, str(HERE.parent / "parallelism"))
    import measure as parallelism  # a script in the folder that was just added to sys.path

    lines = ["| model | mesh | axes | with stand-ins | compiled | difference |", "|---|---|---|---|---|---|"]
    for (model, case, depth), row in parallelism.read().items():
        config = parallelism.config_of(model, case, depth)
        sent = as_compiled(predict(config, row["topology"], every_branch=True), row["topology"])
        a, b = by_axes(summed(sent)), by_axes(row["collectives"])
        for axes in sorted((x for x in a | b if b.get(x, 0) > 2**20), key=lambda x: -b[x]):
            share = f"{b[axes] / a.get(axes, 1) - 1:+.2%}"
            lines.append(f"| {model} | {row['mesh']} | {axes} | {a.get(axes, 0):,} | {b[axes]:,} | {share} |")
    return "\n".join(lines)


def main() -> None:
    """Compile or predict cells, or print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", type=int, default=len(cells()), help="compile at most this many")
    parser.add_argument("--only", default="", help="only cells whose model-case contains this")
    parser.add_argument("--hlo", type=Path, help="folder to write the compiled programs' text to")
    parser.add_argument("--again", action="store_true", help="predict again, keep compiled numbers")
    parser.add_argument("--table", action="store_true", help="print the table")
    parser.add_argument("--full", action="store_true", help="print the table of full-size models")
    args = parser.parse_args()
    rows = read()
    if args.table or args.full:
        print(table(rows) if args.table else full_table())
        return
    if args.again:
        write({cell: row | predicted(*cell) for cell, row in rows.items()})
        return
    here = Path(js.__file__).parent
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=here).stdout.strip()
    left = args.cells
    for cell in cells():
        if cell in rows or not left or args.only not in "-".join(cell):
            continue
        left -= 1
        about = {"commit": commit, "jax": jax.__version__, "date": datetime.date.today().isoformat()}
        rows[cell] = measure(*cell, args.hlo) | about
        write(rows)
        print(*cell, rows[cell]["compile_seconds"], flush=True)


if __name__ == "__main__":
    main()
