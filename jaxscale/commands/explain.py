"""`jaxscale explain`: where every tensor lives, and why."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from jaxscale.commands.shared import TEXT, config_arguments, load


def add(commands: Any) -> None:
    """Adds the command."""
    parser = commands.add_parser(
        "explain",
        help="show where every tensor lives, and why",
        description="Prints the tensor table of a gin file or a run: shape, logical axes, spec, bytes per device and "
        "the rules that fired; then which loss and which attention kernel run. Nothing is compiled and no device is "
        "needed.",
        formatter_class=TEXT,
    )
    config_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run_command=run)


def run(args: argparse.Namespace, bindings: list[str]) -> int:
    """Does it."""
    from rich.console import Console

    from jaxscale.plan import explain
    from jaxscale.train.report import WIDTH

    path = Path(args.config) if args.config else None
    own = path / "config.gin" if path is not None and path.is_dir() else None
    found = explain(load(own, args, bindings))
    if args.json:
        print(json.dumps(found.to_json(), indent=2))
    else:
        Console(highlight=False, width=None if sys.stdout.isatty() else WIDTH).print(found)
    return 0
