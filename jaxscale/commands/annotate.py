"""`jaxscale annotate`: computes what an objective reads of another model, once."""

from __future__ import annotations

import argparse
from typing import Any

from jaxscale.commands.shared import TEXT, accept_argument, import_argument, layout_arguments, layout_of, load


def add(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "annotate",
        help="compute a teacher's or a reference's log-probabilities of a corpus, once",
        description="Writes a folder with what the config's objective reads of another model, for every row of its "
        "data: with Distill.top the\nteacher's most likely tokens, with DPO.cached (also IPO, KTO) the reference's "
        "log-probabilities. The config reads it as\ntrain.data = @annotated(). The other model has a layout of its "
        "own.\n\n"
        "  jaxscale annotate distill.gin --by runs/teacher\n"
        '  jaxscale annotate dpo.gin --by runs/base --mesh "fsdp=8" --rows 64',
        formatter_class=TEXT,
    )
    parser.add_argument("config", metavar="CONFIG", help="the gin file of the run that reads it")
    parser.add_argument(
        "--gin.NAME=VALUE", action="store_true", dest="unused", help="change a binding, such as --gin.Distill.top=64"
    )
    parser.add_argument("--by", metavar="RUN", required=True, help="the run of the teacher or reference")
    parser.add_argument("--out", metavar="FOLDER", help="the folder to write (default: annotated.folder of the config)")
    parser.add_argument("--step", type=int, metavar="N", help="step of its checkpoint (default: the newest)")
    parser.add_argument("--rows", type=int, default=8, metavar="N", help="rows of a batch (default 8)")
    import_argument(parser)
    accept_argument(parser)
    layout_arguments(parser)
    parser.set_defaults(run_command=run)


def run(args: argparse.Namespace, bindings: list[str]) -> int:
    """Compute and print the folder; returns the exit code 0."""
    from jaxscale.infer.annotate import annotate
    from jaxscale.run import Run

    settings = load(None, argparse.Namespace(config=args.config, mesh=None, pipeline=None), bindings)
    by = Run(args.by)
    _ = by.info  # raises for a folder that is no run
    folder = annotate(settings, by, args.out, layout=layout_of(args), step=args.step, rows=args.rows)
    print(f"written to {folder}; read it with train.data = @annotated() and annotated.folder = '{folder}'")
    return 0
