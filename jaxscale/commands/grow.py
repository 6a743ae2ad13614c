"""`jaxscale grow`: a deeper or wider model, or one of experts, from a trained one."""

from __future__ import annotations

import argparse
from typing import Any

from jaxscale.commands.shared import TEXT, accept_argument, import_argument, imports_of, no_bindings

BALANCE = "model_mlp/MixtureOfExperts.balance_loss"
"""The weight of the load-balance loss by its name in a grown run's `config.gin`."""


def add(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "grow",
        help="make a run into one with more layers, wider ones or experts, in a new run folder",
        description="Writes a new run folder with a larger model, whose weights and optimizer state are made from a "
        "trained run's.\nTraining continues at the same step.\n\n"
        "  jaxscale grow runs/small --layers 12 --out runs/large\n"
        "  jaxscale train --resume runs/large --gin.train.steps=2000\n"
        "  jaxscale grow runs/small --width 512 --out runs/wide --weights-only\n"
        "  jaxscale train --from runs/wide my.gin\n"
        "  jaxscale grow runs/small --experts 8 --out runs/experts --weights-only",
        formatter_class=TEXT,
    )
    parser.add_argument("run", metavar="RUN", help="the trained run")
    accept_argument(parser)
    parser.add_argument("--out", required=True, metavar="NEWRUN", help="the run folder to write")
    import_argument(parser)
    parser.add_argument("--layers", type=int, metavar="N", help="number of layers of the new model")
    parser.add_argument(
        "--method",
        default="stack",
        metavar="NAME",
        help="where new layers are from: stack (1 2 1 2, the default), interpolate (1 1 2 2), or identity (copies on "
        "top that change nothing until they are trained)",
    )
    parser.add_argument(
        "--width", type=int, metavar="N", help="width of the residual stream, a multiple; the output stays the same"
    )
    parser.add_argument("--hidden", type=int, metavar="N", help="hidden width of the feed-forward layers")
    parser.add_argument("--heads", type=int, metavar="N", help="number of query heads; both grow as --width by default")
    parser.add_argument(
        "--noise",
        type=float,
        metavar="X",
        help="noise that makes copies of a feature different, relative to its weights; it cancels in the output "
        "(default: 0.1)",
    )
    parser.add_argument(
        "--experts", type=int, metavar="N", help="experts that each feed-forward layer becomes; with --weights-only"
    )
    parser.add_argument("--top-k", type=int, metavar="K", help="experts per token (default: 2)")
    parser.add_argument(
        "--redraw",
        type=float,
        default=0.0,
        metavar="X",
        help="share of each expert's hidden features to draw anew, so that experts differ (default: 0)",
    )
    parser.add_argument("--step", type=int, metavar="N", help="step of the checkpoint (default: the newest)")
    parser.add_argument(
        "--weights-only",
        action="store_true",
        help="write no optimizer state; new runs can start from it",
    )
    parser.add_argument("--layout", metavar="SIZES", help='mesh to compute on, such as "tensor=4"')
    parser.add_argument("--devices", type=int, metavar="N", help="simulate N devices on this machine's CPU")
    parser.set_defaults(run_command=run)


def run(args: argparse.Namespace, bindings: list[str]) -> int:
    """Grow the run and print the result; returns the exit code 0."""
    no_bindings(args, bindings)
    from jaxscale.convert.grow import grow
    from jaxscale.layout import Layout
    from jaxscale.run import Run
    from jaxscale.step.rates import parameter_count

    source = Run(args.run)
    _ = source.info  # raises for a folder that is no run
    layout = None if args.layout is None else Layout(args.layout)
    sizes = dict(layers=args.layers, width=args.width, hidden=args.hidden, heads=args.heads)
    more: dict[str, Any] = dict(method=args.method, noise=args.noise, step=args.step, layout=layout)
    more |= dict(experts=args.experts, top_k=args.top_k, redraw=args.redraw)
    grown = grow(source, args.out, weights_only=args.weights_only, **sizes, **more)
    own = imports_of(grown)
    then = f"train --from {grown.place} CONFIG{own}"
    if not args.weights_only:
        then = f"train --resume {grown.place} --gin.train.steps={2 * grown.config.steps}{own}"
    elif args.experts is not None:  # in whose own settings the weight of the load-balance loss is 0
        then = f"train {grown.place}/config.gin --from {grown.place}{own} --gin.{BALANCE}=0.01"
    was, now = parameter_count(source.config), parameter_count(grown.config)
    print(f"{grown.place}: {now:,} parameters, grown from {was:,}; jaxscale {then}")
    return 0
