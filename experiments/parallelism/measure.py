"""Memory and communication of each layout: steps of Llama 3 8B and Mixtral 8x7B, compiled for 64 chips.

    python experiments/parallelism/measure.py              # compile cell by cell; continues where it stopped
    python experiments/parallelism/measure.py --cells 1    # compile one more
    python experiments/parallelism/measure.py --table      # the README's tables, from cells.jsonl; --plot: the picture

Needs `make install EXTRAS=plot,tpu`. Each cell is a line of cells.jsonl, written at once.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import re
import subprocess
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

import jaxscale as js
from jaxscale.layout import describe
from jaxscale.models import presets
from jaxscale.nn import RingAttention, UlyssesAttention, flash_attention
from jaxscale.optim import state_infos
from jaxscale.plan import compile_step, topology_devices
from jaxscale.plan.collectives import Collective, collectives
from jaxscale.step import blueprint_of

HERE = Path(__file__).parent
CELLS = HERE / "cells.jsonl"
TOPOLOGY, CHIPS = "v5p:4x4x4", 64
ROWS, TOKENS = 64, 4096
"""Batch rows of every cell, and tokens of a row: a quarter of a million tokens."""

MODELS = ("llama3_8b", "mixtral_8x7b")


@dataclasses.dataclass(frozen=True)
class Case:
    """A layout, and the settings of the model that it needs.

    Args:
      layout: arguments of `Layout`.
      what: short description.
      model: changes to the model's config.
      topology: hardware to compile for.
    """

    layout: dict[str, Any]
    what: str
    model: dict[str, Any] = dataclasses.field(default_factory=dict)
    topology: str = TOPOLOGY


def _on(mesh: str, rules: str = "fsdp_tensor", **rest: Any) -> dict[str, Any]:
    return {"mesh": mesh, "rules": rules, **rest}


_SPLIT = _on("fsdp=16,tensor=4", sequence_sharded=True)
CASES: dict[str, Case] = {
    "data": Case(_on("data=64", "replicated"), "data parallelism"),
    "zero2": Case(_on("data=64", "zero2"), "ZeRO-1 and -2"),
    "fsdp": Case(_on("fsdp=64"), "ZeRO-3"),
    "hierarchical": Case(_on("data=4,fsdp=16", "hierarchical"), "hierarchical"),
    "tensor": Case(_on("fsdp=16,tensor=4"), "ZeRO-3 x tensor"),
    "sequence": Case(_SPLIT, "the same, residual stream cut along the sequence"),
    "overlap": Case(_SPLIT, "the same, products overlapped", {"overlap": ("attention", "mlp")}),
    "ring": Case(_on("fsdp=16,context=4"), "ZeRO-3 x ring attention", {"attention": RingAttention()}),
    "ulysses": Case(_on("fsdp=16,context=4"), "ZeRO-3 x all-to-all attention", {"attention": UlyssesAttention()}),
    "pipeline": Case(_on("pipeline=4,fsdp=16", pipeline="1f1b:4"), "ZeRO-3 x pipeline"),
    "product": Case(
        _on("pipeline=4,fsdp=4,tensor=4", sequence_sharded=True, pipeline="lockstep:16"), "ZeRO-3 x tensor x pipeline"
    ),
    "expert": Case(_on("fsdp=16,expert=4"), "ZeRO-3 x experts"),
}
"""The twelve layouts."""

FEW = {
    "data, 4": Case(_on("data=4", "replicated"), "data parallelism", topology="v5p:2x2x1"),
    "zero2, 4": Case(_on("data=4", "zero2"), "ZeRO-1 and -2", topology="v5p:2x2x1"),
    "fsdp, 4": Case(_on("fsdp=4"), "ZeRO-3", topology="v5p:2x2x1"),
}
"""ZeRO on four chips, where the compiler uses the collectives of the ZeRO paper."""

_LLAMA, _MIXTRAL = MODELS
ORDER: list[tuple[str, str, int]] = [
    (_LLAMA, "fsdp", 32),
    (_LLAMA, "zero2", 32),
    (_LLAMA, "sequence", 32),
    (_MIXTRAL, "expert", 32),
    (_LLAMA, "pipeline", 32),
    (_LLAMA, "ring", 32),
    *((_LLAMA, name, 2) for name in FEW),
    (_LLAMA, "data", 16),
    (_LLAMA, "tensor", 32),
    (_LLAMA, "product", 32),
    (_LLAMA, "ulysses", 32),
    (_LLAMA, "overlap", 32),
    (_LLAMA, "hierarchical", 32),
    (_MIXTRAL, "fsdp", 32),
    (_MIXTRAL, "pipeline", 32),
    (_MIXTRAL, "sequence", 32),
    (_MIXTRAL, "ring", 32),
    (_MIXTRAL, "hierarchical", 32),
    (_MIXTRAL, "ulysses", 32),
    (_MIXTRAL, "tensor", 32),
]
"""(model, layout, layers) of the cells, most informative first. Plain data parallelism has half of Llama's layers: with
all of them it does not fit on a chip. Mixtral has no such cells, because its parameters alone do not fit on one chip;
Llama has no experts."""


def _case(name: str) -> Case:
    return {**CASES, **FEW}[name]


def config_of(model: str, case: str, depth: int) -> js.TrainConfig:
    """Return the config of a cell."""
    chosen = _case(case)
    make: Callable[..., Any] = getattr(presets, model)
    whole = make(depth=depth, **{"attention": flash_attention, **chosen.model})
    layout = js.Layout(**chosen.layout)
    return js.TrainConfig(model=whole, layout=layout, batch_size=ROWS, seq_len=TOKENS, segments=False)


def state_bytes(config: js.TrainConfig, topology: str) -> dict[str, int]:
    """Return the bytes per device of parameters, gradients and optimizer state, computed from the rules."""
    assert config.layout is not None
    layout = config.layout.on(topology_devices(topology))
    blueprint, _ = blueprint_of(dataclasses.replace(config, layout=layout))
    state = state_infos(blueprint.tx, blueprint.infos)
    parts = {"params": blueprint.infos, "grads": blueprint.infos, "opt_state": state}
    return {k: sum(r.bytes_per_device for r in describe(t, layout, k)) for k, t in parts.items()}  # type: ignore[arg-type]


def summed(instructions: list[Collective]) -> list[dict[str, Any]]:
    """Merge collectives of one kind over the same axes: instructions, executions a step, bytes that a device sends."""
    rows: dict[tuple[Any, ...], dict[str, Any]] = defaultdict(lambda: {"instructions": 0, "times": 0, "sent": 0})
    for c in instructions:
        row = rows[c.kind, c.axes, c.devices, c.ring, c.certain]
        row["instructions"] += 1
        row["times"] += c.times
        row["sent"] += c.sent
    keys = ("kind", "axes", "devices", "ring", "certain")
    return [dict(zip(keys, k, strict=True)) | v for k, v in rows.items()]


def measure(model: str, case: str, depth: int, keep: Path | None) -> dict[str, Any]:
    """Compile a cell; a step that does not fit has the size from the compiler's error."""
    config, topology, start = config_of(model, case, depth), _case(case).topology, time.perf_counter()
    row: dict[str, Any] = {
        "model": model,
        "layout": case,
        "mesh": str(config.layout),
        "depth": depth,
        "topology": topology,
        "params": config.model.param_count(),  # type: ignore[attr-defined]
        "state": state_bytes(config, topology),
    }
    try:
        compiled = compile_step(config, topology)
    except jax.errors.JaxRuntimeError as e:
        size = re.search(r"(?:Used |temporaries \()([\d.]+)([KMGT])", str(e))
        if size is None:
            raise
        return row | {"does_not_fit": int(float(size[1]) * 1024 ** (1 + "KMGT".index(size[2])))}
    if keep is not None:
        (keep / f"{model}.{case}.{depth}.hlo").write_text(compiled.as_text())
    memory = compiled.memory_analysis()
    assert config.layout is not None
    return row | {
        "arguments": memory.argument_size_in_bytes,
        "temporaries": memory.temp_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes,
        "collectives": summed(collectives(compiled, config.layout.sizes)),
        "compile_seconds": round(time.perf_counter() - start),
    }


def read() -> dict[tuple[str, str, int], dict[str, Any]]:
    """Return the cells compiled so far."""
    if not CELLS.exists():
        return {}
    rows = [json.loads(line) for line in CELLS.read_text().splitlines()]
    return {(r["model"], r["layout"], r["depth"]): r for r in rows}


def main() -> None:
    """Compile missing cells, or print the tables, or draw the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", type=int, default=len(ORDER), help="compile at most this many cells")
    parser.add_argument("--only", help="only cells of this layout")
    parser.add_argument("--hlo", type=Path, help="folder for the text of the compiled programs")
    parser.add_argument("--table", action="store_true", help="only print the README's tables")
    parser.add_argument("--plot", action="store_true", help="only draw layouts.png")
    args = parser.parse_args()
    if args.table or args.plot:
        import report

        print(report.tables(read())) if args.table else report.plot(read(), HERE / "layouts.png")
        return
    here = Path(js.__file__).parent
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=here).stdout.strip()
    about = {"rows": ROWS, "tokens": TOKENS, "commit": commit, "jax": jax.__version__}
    left = args.cells
    for cell in ORDER:
        if cell in read() or not left or not (args.only is None or args.only == cell[1]):
            continue
        left -= 1
        row = measure(*cell, args.hlo) | about | {"date": datetime.date.today().isoformat()}
        with CELLS.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(*cell, row.get("compile_seconds", "does not fit"), flush=True)


if __name__ == "__main__":
    main()
