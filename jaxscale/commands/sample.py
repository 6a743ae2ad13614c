"""`jaxscale sample`: continues a text with a trained model."""

from __future__ import annotations

import argparse
from typing import Any

from jaxscale.commands.shared import TEXT, import_argument, no_bindings


def add(commands: Any) -> None:
    """Adds the command."""
    parser = commands.add_parser(
        "sample",
        help="continue a text with a trained model",
        description="Continues a text with the newest checkpoint of a run.",
        formatter_class=TEXT,
    )
    parser.add_argument("run", metavar="RUN", help="a run folder, as runs/demo-1")
    import_argument(parser)
    parser.add_argument("--prompt", default="", help="text to continue (default: start a new document)")
    parser.add_argument("--tokens", type=int, default=400, help="how many tokens to add (default 400)")
    parser.add_argument("--temperature", type=float, default=0.8, help="0 takes the likeliest token (default 0.8)")
    parser.add_argument("--top-k", type=int, help="sample among this many likeliest tokens")
    parser.add_argument("--seed", type=int, default=0, help="of the choice (default 0)")
    parser.set_defaults(run_command=run)


def run(args: argparse.Namespace, bindings: list[str]) -> int:
    """Does it."""
    no_bindings(args, bindings)
    from jaxscale import load
    from jaxscale.infer import sample_text

    trained = load(args.run)
    options = {"temperature": args.temperature, "top_k": args.top_k, "seed": args.seed}
    print(sample_text(trained, args.prompt, args.tokens, **options))
    return 0
