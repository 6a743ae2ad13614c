"""`jaxscale merge`: adapters into the weights."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from jaxscale.commands.shared import TEXT, accept_argument, continuing, import_argument, no_bindings


def add(commands: Any) -> None:
    """Adds the command."""
    parser = commands.add_parser(
        "merge",
        help="add a run's adapters to its weights: an ordinary run folder",
        description="Writes the parameters that a run is used with as a run folder of its own. Adapters are added to "
        "the weights they are on,\nand what came with an imported checkpoint comes along.\n\n"
        "  jaxscale merge runs/lora-1 runs/merged\n"
        "  jaxscale merge runs/lora-1 runs/merged --layout tensor=4 --devices 4",
        formatter_class=TEXT,
    )
    parser.add_argument("run", metavar="RUN", help="a run with adapters (another one's parameters are written too)")
    accept_argument(parser)
    parser.add_argument("out", metavar="OUT", help="the run folder to make")
    import_argument(parser)
    parser.add_argument("--step", type=int, metavar="N", help="of which checkpoint (default: the newest)")
    parser.add_argument("--layout", metavar="SIZES", help='where they are put together, as "tensor=4"')
    parser.add_argument("--devices", type=int, metavar="N", help="simulate N devices on this machine's CPU")
    parser.set_defaults(run_command=run)


def run(args: argparse.Namespace, bindings: list[str]) -> int:
    """Does it."""
    no_bindings(args, bindings)
    from jaxscale.convert.merge import merge
    from jaxscale.layout import Layout
    from jaxscale.run import Run
    from jaxscale.step.rates import parameter_count

    whole = Run(Path(args.run))
    _ = whole.info
    if whole.config.adapters is None:
        print(f"jaxscale: {whole.path} has no adapters; its parameters are written as they are", file=sys.stderr)
    layout = None if args.layout is None else Layout(args.layout)
    made = merge(whole, args.out, step=args.step, layout=layout)
    print(f"{made.path}: {parameter_count(made.config):,} parameters; {continuing(made)}")
    return 0
