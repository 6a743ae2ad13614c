"""`jaxscale sweep`: the runs that a gin file with axes describes, and a table of what came of them."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import Any

from jaxscale.commands.shared import TEXT, accept_argument, import_argument
from jaxscale.errors import INTERRUPTED, ConfigError, RunError
from jaxscale.interrupts import STOPS


def add(commands: Any) -> None:
    """Adds the command."""
    parser = commands.add_parser(
        "sweep",
        help="train many runs that differ in some bindings; leaves a table",
        description="Trains what a gin file with sweep.axes describes, and leaves a folder: results.csv and a run "
        "folder per trial.\nThe same command with the same --run goes on where it was stopped or killed.",
        formatter_class=TEXT,
    )
    import_argument(parser)
    accept_argument(parser)
    parser.add_argument("config", metavar="FILE", help="a gin file with sweep.axes")
    parser.add_argument(
        "--gin.NAME=VALUE", action="store_true", dest="unused", help="change a binding, as --gin.train.steps=100"
    )
    parser.add_argument("--run", metavar="DIR", help="the sweep's folder (default: a new one, runs/<file>-<n>)")
    parser.add_argument(
        "--storage",
        metavar="URL",
        help="pull trials from what other machines pull from too: journal:///path/file, or postgresql://user@host/name",
    )
    parser.add_argument(
        "--retry-failed", action="store_true", help="of the sweep in --run, try what has failed once more"
    )
    parser.add_argument("--devices", type=int, metavar="N", help="simulate N devices on this machine's CPU")
    parser.add_argument("--dry-run", action="store_true", help="list the runs and what they come to, and start none")
    parser.add_argument("--quiet", action="store_true", help="print nothing but errors")
    parser.set_defaults(run_command=run)


def run(args: argparse.Namespace, bindings: list[str]) -> int:
    """Does it."""
    if args.run == "":
        raise ConfigError("the name of the sweep's folder is empty; was a variable of the shell not set?")
    if args.retry_failed and args.run is None:
        raise ConfigError("--retry-failed tries runs of a sweep once more; name its folder with --run DIR")
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
    how = {"name": Path(args.config).stem, "quiet": args.quiet, "imports": modules}
    result = prepared.run(args.run, **how, retry_failed=args.retry_failed)
    if not result.done():
        return STOPS.get(result.stopped_by or "", INTERRUPTED)
    tell = (lambda text: None) if args.quiet else print
    try:
        tell(f"the page that compares them is {report(result.path, metric=result.objective, tell=tell)}")
    except RunError as e:  # the runs are done all the same
        tell(f"warning: {e}")
    return 0
