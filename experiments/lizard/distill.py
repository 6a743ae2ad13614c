"""Softmax layers distilled into Lizard's: python experiments/lizard/distill.py [STEPS].

Trains a small model with softmax attention, puts `Lizard` layers with short windows in its place, distils it, and
writes held-out losses to results.jsonl: of the teacher, of the converted model before and after, two seeds each.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import jaxscale as js
from jaxscale.convert.attention import change_attention
from jaxscale.models import TransformerConfig
from jaxscale.nn import Lizard
from jaxscale.step import Distill
from jaxscale.train import FromRun

SEEDS, REACH = (0, 1), 8


def main(steps: str = "120") -> None:
    """Train, convert and distil."""
    rows = []
    for seed in SEEDS:
        options = dict(layout=None, seed=seed, seq_len=128, batch_size=8, eval_batches=32, quiet=True)
        with tempfile.TemporaryDirectory() as folder:
            model = TransformerConfig(depth=2, width=64, heads=2)
            teacher = js.fit(model=model, steps=int(steps), lr=3e-3, run=Path(folder) / "teacher", **options)
            new = change_attention(teacher, Path(folder) / "new", Lizard(reach=REACH, features=32))
            start = FromRun(str(new.path))
            distil = Distill(teacher=FromRun(str(teacher.path)))
            for name, many, rate in (("before", 1, 1e-9), ("after", int(steps) // 2, 1e-3)):
                student = js.fit(
                    model=new.config.model, start=start, objective=distil, steps=many, lr=rate,
                    run=Path(folder) / name, **options,
                )  # fmt: skip
                lines = [json.loads(line) for line in (student.path / "metrics.jsonl").read_text().splitlines()]
                last = {k: v for line in lines for k, v in line.items() if k.startswith("eval_")}
                rows.append({"seed": seed, "student": name, **last})
                print(rows[-1], flush=True)
            lines = [json.loads(line) for line in (teacher.path / "metrics.jsonl").read_text().splitlines()]
            last = {k: v for line in lines for k, v in line.items() if k == "eval_loss"}
            rows.append({"seed": seed, "student": "teacher", "eval_cross_entropy": last["eval_loss"]})
            print(rows[-1], flush=True)
    (Path(__file__).parent / "results.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))


if __name__ == "__main__":
    main(*sys.argv[1:])
