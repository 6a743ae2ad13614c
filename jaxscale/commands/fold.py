"""`jaxscale fold`: a run with fewer layers, of which neighbours share matrices."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from jaxscale.commands.shared import TEXT, calibration_arguments, imports_of, layout_of, no_bindings


def add(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "fold",
        help="remove the layers of a run that matter least, and let neighbours share matrices, in a new run folder",
        description="Writes a new run with fewer parameters. The layers to keep are ranked by gates that are trained "
        "on rows of the run's corpus\nwith its weights frozen. Then train the new run, which is worse at first; best "
        "with the old one as its teacher.\n\n"
        "  jaxscale fold runs/demo-1 runs/shorter --layers 3\n"
        "  jaxscale fold runs/demo-1 runs/folded --uses 2\n"
        "  jaxscale train --from runs/folded my.gin",
        formatter_class=TEXT,
    )
    parser.add_argument("run", metavar="RUN", help="a run, trained or imported")
    parser.add_argument("out", metavar="OUT", help="the run folder to write")
    parser.add_argument("--layers", type=int, metavar="N", help="number of layers to keep (default: all)")
    parser.add_argument(
        "--uses", type=int, default=1, metavar="N", help="layers that share the matrices of the first of them (1)"
    )
    parser.add_argument("--gate-steps", type=int, default=100, metavar="N", help="steps of the gates (100)")
    parser.add_argument("--gate-lr", type=float, default=0.05, metavar="LR", help="learning rate of the gates (0.05)")
    calibration_arguments(parser)
    parser.set_defaults(run_command=run)


def run(args: argparse.Namespace, bindings: list[str]) -> int:
    """Fold and print the result; returns the exit code 0."""
    no_bindings(args, bindings)
    from jaxscale.convert.fold import Gates, fold
    from jaxscale.nn import SharedBlocks
    from jaxscale.run import Run
    from jaxscale.step.rates import parameter_count

    source = Run(Path(args.run))
    _ = source.info  # raises for a folder that is no run

    def say(line: str) -> None:
        print(f"jaxscale: {line}", file=sys.stderr)

    options: dict[str, Any] = {name: getattr(args, name) for name in ("rows", "batch", "step", "layers")}
    options["shared"] = None if args.uses == 1 else SharedBlocks(args.uses)
    gates = Gates(steps=args.gate_steps, lr=args.gate_lr)
    new = fold(source, args.out, gates=gates, layout=layout_of(args), say=say, **options)
    was, now = parameter_count(source.config), parameter_count(new.config)
    remaining = " ".join(map(str, new.info["folded"]["remaining"]))
    print(
        f"{new.place}: {now:,} parameters of {was:,}, from blocks {remaining}; jaxscale train --from {new.place} CONFIG"
        f"{imports_of(new)}"
    )
    return 0
