"""`jaxscale merge`: adds adapters to the weights."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from jaxscale.commands.shared import TEXT, accept_argument, continuing, import_argument, no_bindings


def add(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "merge",
        help="add a run's adapters to its weights, in a new run folder",
        description="Writes a run's parameters to a new run folder, with adapters added to the weights. The other "
        "files of an imported\ncheckpoint are copied.\n\n"
        "  jaxscale merge runs/lora-1 runs/merged\n"
        "  jaxscale merge runs/lora-1 runs/merged --layout tensor=4 --devices 4",
        formatter_class=TEXT,
    )
    parser.add_argument("run", metavar="RUN", help="a run with adapters (for a run without, parameters are copied)")
    accept_argument(parser)
    parser.add_argument("out", metavar="OUT", help="the run folder to write")
    import_argument(parser)
    parser.add_argument("--step", type=int, metavar="N", help="step of the checkpoint (default: the newest)")
    parser.add_argument(
        "--formats",
        metavar="N",
        help="of a run with BitAdapters: the format to merge, counted from 0, or one for each layer, as 0,2,2",
    )
    parser.add_argument("--layout", metavar="SIZES", help='mesh to compute on, such as "tensor=4"')
    parser.add_argument("--devices", type=int, metavar="N", help="simulate N devices on this machine's CPU")
    parser.set_defaults(run_command=run)


def run(args: argparse.Namespace, bindings: list[str]) -> int:
    """Merge and print the result; returns the exit code 0."""
    no_bindings(args, bindings)
    from jaxscale.convert.merge import merge, serving
    from jaxscale.layout import Layout
    from jaxscale.run import Run
    from jaxscale.step.rates import parameter_count

    source = Run(args.run)
    _ = source.info  # raises for a folder that is no run
    if args.formats is not None:
        source = serving(source, args.formats)
    if source.config.adapters is None:
        print(f"jaxscale: {source.place} has no adapters; copying its parameters", file=sys.stderr)
    layout = None if args.layout is None else Layout(args.layout)
    merged = merge(source, args.out, step=args.step, layout=layout)
    print(f"{merged.path}: {parameter_count(merged.config):,} parameters; {continuing(merged)}")

    return 0
