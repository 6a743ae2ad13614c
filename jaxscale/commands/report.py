"""`jaxscale report`: compares runs in an HTML page."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from jaxscale.commands.shared import TEXT, accept_argument, import_argument
from jaxscale.errors import ConfigError
from jaxscale.working_copy import as_named


def add(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "report",
        help="compare runs in one HTML page",
        description="Writes report.html, a self-contained file, with curves.png and parallel.png beside it: loss "
        "curves with seeds as bands,\nsettings that differ and their results, samples, failures, hardware, versions "
        "and time. Folders of unfinished and\ndamaged runs are read as well.\n\n"
        "  jaxscale report runs/demo-1\n"
        "  jaxscale report runs/lr-* --out comparing",
        formatter_class=TEXT,
    )
    parser.add_argument("runs", nargs="*", metavar="RUN", help="run folders, sweep folders, or glob patterns of them")
    parser.add_argument(
        "--out", metavar="DIR", help="folder to write to (default: the one RUN folder, or ./report for several)"
    )
    parser.add_argument("--metric", metavar="NAME", help="metric to compare runs by (default: the held-out loss)")
    parser.add_argument("--prompt", help="also generate from this prompt with each run's newest checkpoint")
    import_argument(parser)
    accept_argument(parser)
    parser.set_defaults(run_command=run)


def run(args: argparse.Namespace, bindings: list[str]) -> int:
    """Write the report and print its path; returns the exit code 0."""
    if bindings:
        raise ConfigError(f"report reads runs as they are; leave out --gin.{bindings[0].partition(' =')[0]}")
    from jaxscale.sweep.comparing.report import report

    def tell(text: str) -> None:
        print(f"jaxscale: warning: {text}", file=sys.stderr)

    print(as_named(report(args.runs, args.out, metric=args.metric, prompt=args.prompt, tell=tell)))
    return 0
