"""`jaxscale tune`: tunes the codes and scales of a run that is stored in few bits."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from jaxscale.commands.shared import TEXT, calibration_arguments, continuing, layout_of, no_bindings


def add(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "tune",
        help="tune the codes and scales of a run that is stored in few bits, in a new run folder",
        description="Writes a new run with the codes, scales and other parameters of a run that `jaxscale quantize` "
        "wrote, tuned by\nPV-Tuning on rows of its training corpus. Their loss never rises from one step to the next."
        "\n\n"
        "  jaxscale tune runs/demo-int2 runs/demo-int2-tuned --steps 40",
        formatter_class=TEXT,
    )
    parser.add_argument("run", metavar="RUN", help="a run whose matrices are stored in few bits")
    parser.add_argument("out", metavar="OUT", help="the run folder to write")
    parser.add_argument("--steps", type=int, default=20, metavar="N", help="steps (20)")
    parser.add_argument("--codes", type=float, default=0.01, metavar="SHARE", help="codes to move at first (0.01)")
    parser.add_argument("--lr", type=float, default=0.01, metavar="LR", help="first step of scales and floats (0.01)")
    calibration_arguments(parser)
    parser.set_defaults(run_command=run)


def run(args: argparse.Namespace, bindings: list[str]) -> int:
    """Tune and print the result; returns the exit code 0."""
    no_bindings(args, bindings)
    from jaxscale.convert.tune import PVTuning, tune
    from jaxscale.run import Run

    source = Run(Path(args.run))
    _ = source.info  # raises for a folder that is no run

    def say(line: str) -> None:
        print(f"jaxscale: {line}", file=sys.stderr)

    options: dict[str, Any] = {name: getattr(args, name) for name in ("rows", "batch", "step")}
    method = PVTuning(steps=args.steps, codes=args.codes, lr=args.lr)
    new = tune(source, args.out, method, layout=layout_of(args), say=say, **options)
    losses = new.info["tuned"]["losses"]
    print(f"{new.path}: loss of the calibration rows {losses[0]:.4f} before, {losses[-1]:.4f} after; {continuing(new)}")
    return 0
