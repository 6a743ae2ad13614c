"""The table of layouts: every pair of dimensions and every triple trains to one device's numbers.

    python -m tests.parallel.table                # measures what is missing, writes docs/measured/layouts.md
    python -m tests.parallel.table --devices 16   # the products of four dimensions
    python -m tests.parallel.table --only "pipeline"

A row is a layout with a model that uses it: attention across devices where the sequence is cut, experts where there is
an `expert` axis, a schedule where there are stages; packing, tied heads, accumulation, dropout, clipping and the
z-loss alternate over the rows. Compared with one device by `tests.truth.compare`: the loss and the norm of
the gradient at each of five SGD steps, every leaf of the first gradient, every parameter after the last.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import datetime
import itertools
import json
import pathlib
import subprocess
import time

import jax
import numpy as np

from jaxscale.layout import Layout, Pipeline, simulate_devices
from jaxscale.layout.schedules import SCHEDULES
from jaxscale.models import TransformerConfig
from jaxscale.nn import (
    GatherAttention,
    MixtureOfExperts,
    RingAttention,
    TokenRingAttention,
    UlyssesAttention,
    flash_attention,
)
from jaxscale.step import NextToken
from tests.truth.compare import FLOOR, global_norm
from tests.truth.layouts import Trace, random_batch, train

DIMENSIONS = ("data", "fsdp", "tensor", "context", "pipeline", "expert")
STEPS, ROWS, SEQ, VOCAB = 5, 32, 16, 64
ATTENTION = (RingAttention(), UlyssesAttention(), GatherAttention(), TokenRingAttention())
RESULTS = pathlib.Path(__file__).parents[2] / "docs" / "measured" / "layouts.md"
FIELDS = ("losses", "gradient_norms", "gradients", "params")
LINES = pathlib.Path("runs/layouts.jsonl")


@dataclasses.dataclass(frozen=True)
class Row:
    """A layout, and the training run on it.

    Args:
      layout: where.
      attention: an attention kernel.
      packed, tied, dropout: whether rows are packed, the head is the embedding, and layers drop out.
      accumulate: micro-batches.
      vocab: how many words.
    """

    layout: Layout
    attention: object
    packed: bool
    tied: bool
    dropout: bool
    accumulate: int
    vocab: int = VOCAB

    @property
    def name(self) -> str:
        """The layout and the row's other options, as text."""
        with_ = [type(self.attention).__name__] if self.layout.sizes["context"] > 1 else []
        with_ += [w for w in ("packed", "tied", "dropout") if getattr(self, w)]
        with_ += [f"accumulate={self.accumulate}"] if self.accumulate > 1 else []
        with_ += [f"vocab={self.vocab}"] if self.vocab != VOCAB else []
        schedule = f" {self.layout.schedule.name}" if self.layout.sizes["pipeline"] > 1 else ""
        return f"{self.layout}{schedule}" + (f": {', '.join(with_)}" if with_ else "")

    @property
    def model(self) -> TransformerConfig:
        """Four layers, with experts where the layout has an axis for them."""
        experts = MixtureOfExperts(experts=8, top_k=2, balance_loss=0.1, z_loss=1e-3)
        return TransformerConfig(
            depth=4,
            vocab=self.vocab,
            width=32,
            heads=8,
            kv_heads=4,
            head_dim=8,
            hidden=64,
            tied=self.tied,
            attention=self.attention,  # type: ignore[arg-type]
            dropout=0.1 if self.dropout else 0.0,
            **({"mlp": experts} if self.layout.sizes["expert"] > 1 else {}),
        )

    @property
    def microbatches(self) -> int:
        """The pipeline's micro-batches in one accumulation step."""
        layout = self.layout
        if layout.sizes["pipeline"] == 1:
            return 1
        return layout.schedule.microbatches_of(layout.stages, ROWS // self.accumulate, layout.split("batch"))

    def run(self) -> tuple[Trace, Trace]:
        """(on the layout, on one device)."""
        lengths = (7, 2, 4) if self.packed else None
        batch = random_batch(self.vocab, rows=ROWS, seq=SEQ, **({} if lengths is None else {"lengths": lengths}))
        options = dict(batch=batch, objective=NextToken(z_loss=1e-3), steps=STEPS)
        got = train(self.model, self.layout, accumulate=self.accumulate, **options)
        # experts balance their load over a micro-batch, so one device must have the same ones
        plain = dataclasses.replace(self.model, attention=flash_attention)
        return got, train(plain, None, accumulate=self.accumulate * self.microbatches, **options)


def table() -> list[Row]:
    """Singles, pairs, triples, what presets and sequence sharding add; products of four dimensions and of all six."""
    meshes = [f"{d}=4,data=2" if d in ("tensor", "pipeline", "context") else f"{d}=8" for d in DIMENSIONS]
    for a, b in itertools.combinations(DIMENSIONS, 2):
        meshes.append(f"{a}=4,{b}=2" if b == "pipeline" else f"{a}=2,{b}=4")
    meshes += [",".join(f"{d}=2" for d in three) for three in itertools.combinations(DIMENSIONS, 3)]
    schedules = itertools.cycle(sorted(SCHEDULES))
    attention = itertools.cycle(ATTENTION)
    layouts = [Layout(mesh, pipeline=next(schedules) if "pipeline" in mesh else None) for mesh in meshes]
    layouts += [
        Layout("data=8", "replicated"),
        Layout("data=4,fsdp=2", "zero1"),
        Layout("data=2,fsdp=2,tensor=2", "zero2"),
        Layout("data=2,fsdp=2,tensor=2", "hierarchical"),
        Layout("data=2,pipeline=2,fsdp=2", "zero2", pipeline=Pipeline("1f1b", 2)),
        Layout("tensor=4,data=2", sequence_sharded=True),
        Layout("tensor=2,context=2,data=2", sequence_sharded=True),
        Layout("tensor=2,pipeline=2,data=2", sequence_sharded=True, pipeline="zb-h1"),
        Layout("data=2,tensor=2,context=2", "folded"),
        Layout("expert=2,tensor=2,context=2", "folded"),
        Layout("data=2,fsdp=2,tensor=2,pipeline=2", pipeline="1f1b"),
        Layout("fsdp=2,tensor=2,context=2,pipeline=2", pipeline="zb-h1", sequence_sharded=True),
        Layout("data=2,tensor=2,context=2,expert=2"),
        Layout("fsdp=2,context=2,pipeline=2,expert=2", pipeline="interleaved"),
        Layout("data=2,fsdp=2,pipeline=2,expert=2", "zero2", pipeline="lockstep"),
        Layout(",".join(f"{d}=2" for d in DIMENSIONS), pipeline="1f1b"),
    ]
    rows = []
    for i, layout in enumerate(layouts):
        kernel = next(attention) if layout.sizes["context"] > 1 else flash_attention
        rows.append(Row(layout, kernel, i % 2 == 0, i % 3 == 0, i % 5 == 0, 2 if i % 4 == 1 else 1))
    # a vocabulary that devices do not divide
    return [
        *rows,
        Row(Layout("data=2,tensor=2,pipeline=2", pipeline="1f1b"), flash_attention, True, False, False, 1, 61),
    ]


def disagreement(got: Trace, want: Trace) -> dict[str, float]:
    """The worst error of each compared value over its tolerance: 1 is the limit."""
    norm = global_norm(want.gradients)
    out = {}
    for field in FIELDS:
        pairs = zip(jax.tree.leaves(getattr(got, field)), jax.tree.leaves(getattr(want, field)), strict=True)
        floor = FLOOR * (norm if field in ("gradients", "params") else 0.0)
        errors = [
            np.linalg.norm(np.float64(a) - np.float64(b)) / max(np.linalg.norm(np.float64(b)), floor) for a, b in pairs
        ]
        out[field] = float(max(errors)) / 1e-5
    return out


def main() -> None:
    """Measure the rows that have no result for this commit's sources, and write the table."""
    args = argparse.ArgumentParser(description=__doc__.split("\n")[0])  # type: ignore[union-attr]
    args.add_argument("--only", default="", help="rows whose name has this in it")
    args.add_argument("--devices", type=int, default=8, help="rows of so many: 8, 16 or 64")
    args.add_argument("--keep", action="store_true", help="keep good rows that older sources measured")
    options = args.parse_args()
    simulate_devices(options.devices)
    git = lambda *a: subprocess.run(["git", *a], capture_output=True, text=True).stdout.strip()  # noqa: E731
    sources, commit = git("rev-parse", "HEAD:jaxscale"), git("rev-parse", "--short", "HEAD")
    LINES.parent.mkdir(exist_ok=True)
    lines = [json.loads(line) for line in LINES.read_text().splitlines()] if LINES.exists() else []
    seen = {line["name"]: line for line in lines if options.keep or line["sources"] == sources}
    for row in table():
        selected = options.only in row.name and row.layout.devices == options.devices
        if not selected or _agrees(seen.get(row.name, {"error": "not measured"})):
            continue
        begun = time.monotonic()
        try:
            errors: dict[str, object] = dict(disagreement(*row.run()))
        except Exception as e:  # a row that fails is a line of the table
            errors = {"error": f"{type(e).__name__}: {str(e).splitlines()[0][:200]}"}
        line = {
            "name": row.name,
            "sources": sources,
            "commit": commit,
            "seconds": round(time.monotonic() - begun),
            **errors,
        }
        seen[row.name] = line
        with LINES.open("a") as file:
            file.write(json.dumps(line) + "\n")
        print(line, flush=True)
    rows = [seen[row.name] for row in table() if row.name in seen]
    RESULTS.write_text(_markdown(rows))


def _agrees(line: dict) -> bool:
    return "error" not in line and max(line[f] for f in FIELDS) <= 1


def _markdown(rows: list[dict]) -> str:
    commits = ", ".join(f"{c} ({n})" for c, n in collections.Counter(r["commit"] for r in rows).items())
    good, expected = sum(map(_agrees, rows)), len(table())
    agree = f"All {expected} layouts agree" if good == expected else f"{good} of {expected} layouts agree"
    head = [
        "# Layouts against one device",
        "",
        f"{agree}; an error of 1 is the limit. Errors are those of the worst leaf, in units of 1e-5 of the leaf's norm "
        "(or of a thousandth of the gradient's, where that is more).",
        "",
        f"`python -m tests.parallel.table`, simulated devices, float32, jax {jax.__version__}, "
        f"{datetime.date.today()}. Commits (and rows): {commits}.",
        "",
        "| layout | loss | gradient norm | gradients | parameters after 5 steps |",
        "|---|---|---|---|---|",
    ]
    for r in rows:
        if "error" in r:
            head.append(f"| {r['name']} | {r['error']} | | | |")
        else:
            cells = " | ".join(f"{r[f]:.2f}" for f in FIELDS)
            head.append(f"| {r['name']} | {cells} |")
    return "\n".join(head) + "\n"


if __name__ == "__main__":
    main()
