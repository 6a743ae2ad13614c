"""`jaxscale plan`: what a run takes of hardware that need not be here, and which layout takes the least."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from jaxscale.commands.shared import TEXT, config_arguments, load
from jaxscale.errors import ConfigError


def add(commands: Any) -> None:
    """Adds the command."""
    parser = commands.add_parser(
        "plan",
        help="estimate a step on hardware that is not here, or search for the layout that suits it",
        description="Prints what a gin file's training step takes of named hardware: bytes per device, FLOPs, traffic, "
        "seconds, MFU, tokens/s. Compiles where the hardware's compiler is installed, and says so; else by arithmetic."
        "\n\n"
        "  jaxscale plan experiments/llama3_8b.gin --topology v5p:4x4x4 --tokens 1T --price 4.2\n"
        '  jaxscale plan experiments/llama3_8b.gin --topology h100:8x8 --mesh "fsdp=-1" --analytic\n'
        "  jaxscale plan experiments/llama3_8b.gin --topology v5p:4x4x4 --search --write winner.gin",
        formatter_class=TEXT,
    )
    config_arguments(parser)
    parser.add_argument(
        "--topology",
        metavar="NAME",
        required=True,
        help="a TPU slice as v5p:8x8x8 (two of them: v5p:8x8x8*2), GPUs as h200:8 or h100:8x4 (four hosts), cpu:8, or "
        "a hardware file of yours, as my_chip.json:8",
    )
    parser.add_argument("--tokens", metavar="N", help="what training on so many takes, as 300B or 1.5T")
    parser.add_argument("--price", type=float, metavar="X", help="of one device for an hour")
    parser.add_argument("--watts", type=float, metavar="W", help="of one device (default: its data sheet's)")
    parser.add_argument("--analytic", action="store_true", help="by arithmetic alone: compile nothing")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run_command=run)


def run(args: argparse.Namespace, bindings: list[str]) -> int:
    """Does it."""
    import jax

    # planning needs no accelerator, and must not wait for one that is busy or is not there
    jax.config.update("jax_platforms", "cpu")
    from jaxscale.plan import plan_for
    from jaxscale.plan.planner import count_of

    path = Path(args.config) if args.config else None
    own = path / "config.gin" if path is not None and path.is_dir() else None
    config = load(own, args, bindings)
    tokens = None if args.tokens is None else count_of(args.tokens)
    if tokens is None and args.price is not None:
        raise ConfigError("--price is of a number of tokens; give --tokens, as 1T")
    compile = "never" if args.analytic else "auto"
    show(plan_for(config, args.topology, tokens=tokens, price=args.price, watts=args.watts, compile=compile), args.json)
    return 0


def show(found: Any, as_json: bool) -> None:
    """Prints what a command found."""
    from rich.console import Console

    from jaxscale.train.report import WIDTH

    if as_json:
        print(json.dumps(found.to_json(), indent=2))
    else:
        Console(highlight=False, width=None if sys.stdout.isatty() else WIDTH).print(found)
