"""`jaxscale sweep`: trains the runs of a gin file with sweep axes, and writes a table of their results."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import Any

from jaxscale.commands.shared import TEXT, accept_argument, import_argument
from jaxscale.errors import INTERRUPTED, ConfigError, RunError
from jaxscale.interrupts import STOPS
from jaxscale.working_copy import as_named


def add(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "sweep",
        help="train many runs that differ in some bindings, and write a table of results",
        description="Trains the runs of a gin file with sweep.axes, and writes a folder with results.csv and a run "
        "folder per trial.\nThe same command with the same --run continues a sweep that was stopped or killed.",
        formatter_class=TEXT,
    )
    import_argument(parser)
    accept_argument(parser)
    parser.add_argument("config", metavar="FILE", help="a gin file with sweep.axes")
    parser.add_argument(
        "--gin.NAME=VALUE", action="store_true", dest="unused", help="change a binding, such as --gin.train.steps=100"
    )
    parser.add_argument("--run", metavar="DIR", help="the sweep's folder (default: a new one, runs/<file>-<n>)")
    parser.add_argument(
        "--storage",
        metavar="URL",
        help="take trials from a store that other machines share: journal:///path/file or postgresql://user@host/name",
    )
    parser.add_argument("--retry-failed", action="store_true", help="run the failed trials of the sweep in --run again")
    parser.add_argument("--devices", type=int, metavar="N", help="simulate N devices on this machine's CPU")
    parser.add_argument("--dry-run", action="store_true", help="list the runs with their size, and start none")
    parser.add_argument("--quiet", action="store_true", help="print nothing but errors")
    parser.set_defaults(run_command=run)


def run(args: argparse.Namespace, bindings: list[str]) -> int:
    """Run the sweep; returns the exit code."""
    if args.run == "":
        raise ConfigError("the name of the sweep's folder is empty; check that the shell variable is set")
    if args.retry_failed and args.run is None:
        raise ConfigError("--retry-failed needs the folder of a sweep; name it with --run DIR")
    from jaxscale import config as gin_config
    from jaxscale.sweep import Prepared, sweep_of
    from jaxscale.sweep.axes import check_bindings, space_of
    from jaxscale.sweep.comparing.report import report
    from jaxscale.sweep.programs import keep_programs

    keep_programs()

    text = gin_config.load([args.config], bindings)
    sweep = sweep_of(text)
    check_bindings(bindings, space_of(sweep.axes, sweep.seeds))
    if args.storage is not None:
        sweep = dataclasses.replace(sweep, storage=args.storage)
    prepared = Prepared(sweep, text)
    if args.dry_run:
        from jaxscale.sweep.dry import table_of
        from jaxscale.train.report import Reporter

        storage = prepared.storage()
        if storage is not None:
            storage.check(prepared.text)
        Reporter().console.print(table_of(prepared))
        return 0
    modules = tuple(args.modules or ())
    options = {"name": Path(args.config).stem, "quiet": args.quiet, "imports": modules}
    result = prepared.run(args.run, **options, retry_failed=args.retry_failed)
    if not result.done():
        return STOPS.get(result.stopped_by or "", INTERRUPTED)
    tell = (lambda text: None) if args.quiet else print
    try:
        page = report(result.path, metric=result.objective, tell=tell)
        tell(f"the page that compares them is {as_named(page)}")
    except RunError as e:  # the runs themselves are complete
        tell(f"warning: {e}")
    return 0
