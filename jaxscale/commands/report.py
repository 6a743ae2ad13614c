"""`jaxscale report`: compares runs."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from jaxscale.commands.shared import TEXT, accept_argument, import_argument
from jaxscale.errors import ConfigError


def add(commands: Any) -> None:
    """Adds the command."""
    parser = commands.add_parser(
        "report",
        help="compare runs in one HTML page",
        description="Writes report.html, one file that needs nothing but itself, with curves.png and parallel.png "
        "beside it: curves with seeds as bands, what differs in config and what came of it, samples, failures, "
        "hardware, versions and time.\nRuns are read from their folders, also while they run and when they are "
        "damaged.\n\n"
        "  jaxscale report runs/demo-1\n"
        "  jaxscale report runs/lr-* --out comparing",
        formatter_class=TEXT,
    )
    parser.add_argument("runs", nargs="*", metavar="RUN", help="run folders, sweep folders, or patterns of them")
    parser.add_argument(
        "--out", metavar="DIR", help="where to write (default: into the one folder that is named, else ./report)"
    )
    parser.add_argument("--metric", metavar="NAME", help="what runs are judged by (default: the held-out loss)")
    parser.add_argument("--prompt", help="also continue this text with each run's newest checkpoint")
    import_argument(parser)
    accept_argument(parser)
    parser.set_defaults(run_command=run)


def run(args: argparse.Namespace, bindings: list[str]) -> int:
    """Does it."""
    if bindings:
        raise ConfigError(f"report reads runs as they are; leave out --gin.{bindings[0].partition(' =')[0]}")
    from jaxscale.sweep.comparing.report import report

    def tell(text: str) -> None:
        print(f"jaxscale: warning: {text}", file=sys.stderr)

    print(report(args.runs, args.out, metric=args.metric, prompt=args.prompt, tell=tell))
    return 0
