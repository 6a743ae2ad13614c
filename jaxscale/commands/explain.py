"""`jaxscale explain`: the sharding of every tensor and its reason; what a step computes, stores and communicates."""

from __future__ import annotations

import argparse
from typing import Any

from jaxscale.commands.shared import TEXT, accept_argument, config_arguments, load
from jaxscale.working_copy import local


def add(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "explain",
        help="print the sharding of every tensor and its reason; what a step computes, stores and communicates",
        description="Prints the tensor table of a gin file or a run: shape, logical axes, spec, bytes per device and "
        "the rules that applied; the loss and the kernels that run; FLOPs by module. Nothing is compiled and no device "
        "is needed.\nWith --topology or --compile the step is compiled, and the output has its memory by tensor and "
        "its collectives by\nsource line.\n\n"
        '  jaxscale explain experiments/demo.gin --mesh "fsdp=8"\n'
        "  jaxscale explain experiments/demo.gin --devices 8 --compile\n"
        '  jaxscale explain experiments/demo.gin --mesh "fsdp=4" --topology v5e:2x2 --json',
        formatter_class=TEXT,
    )
    config_arguments(parser)
    accept_argument(parser)
    parser.add_argument(
        "--topology", metavar="NAME", help="compile for hardware that need not be present: v5p:8x8x8, h200:8"
    )
    parser.add_argument("--compile", action="store_true", help="compile for the devices of this machine")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run_command=run)


def run(args: argparse.Namespace, bindings: list[str]) -> int:
    """Print the explanation; returns the exit code 0."""
    from jaxscale.commands.plan import show
    from jaxscale.plan import explain

    if args.topology is not None:
        import jax

        # Compiling for absent hardware must not initialise or wait for the devices of this machine.

        jax.config.update("jax_platforms", "cpu")

    path = local(args.config) if args.config else None
    own = path / "config.gin" if path is not None and path.is_dir() else None
    show(explain(load(own, args, bindings), args.topology, compile=args.compile), args.json)
    return 0
