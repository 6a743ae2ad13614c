"""`jaxscale prune`: a run whose mixtures have fewer experts."""

from __future__ import annotations

import argparse
from typing import Any

from jaxscale.commands.shared import TEXT, accept_argument, import_argument, imports_of, no_bindings


def add(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "prune",
        help="drop or merge the experts of a run that are chosen least, in a new run folder",
        description="Writes a new run with fewer experts in each layer: those that were chosen most often in the last "
        "tenth of\nexperts.jsonl. The others are dropped, or merged into them. Train the new run for some steps.\n\n"
        "  jaxscale prune runs/experts-1 runs/fewer --experts 6\n"
        "  jaxscale prune runs/experts-1 runs/merged --experts 4 --method merge\n"
        "  jaxscale train runs/fewer/config.gin --from runs/fewer",
        formatter_class=TEXT,
    )
    parser.add_argument("run", metavar="RUN", help="a trained run with experts")
    accept_argument(parser)
    parser.add_argument("out", metavar="OUT", help="the run folder to write")
    import_argument(parser)
    parser.add_argument("--experts", type=int, required=True, metavar="N", help="experts of each layer that remain")
    parser.add_argument("--method", default="drop", metavar="NAME", help="drop (the default) or merge")
    parser.add_argument("--step", type=int, metavar="N", help="step of the checkpoint (default: the newest)")
    parser.set_defaults(run_command=run)


def run(args: argparse.Namespace, bindings: list[str]) -> int:
    """Prune and print the result; returns the exit code 0."""
    no_bindings(args, bindings)
    from jaxscale.convert.fewer_experts import fewer_experts
    from jaxscale.run import Run
    from jaxscale.step.rates import parameter_count

    source = Run(args.run)
    _ = source.info  # raises for a folder that is no run
    new = fewer_experts(source, args.out, args.experts, method=args.method, step=args.step)
    was, now = parameter_count(source.config), parameter_count(new.config)
    then = f"jaxscale train {new.place}/config.gin --from {new.place}{imports_of(new)}"
    print(f"{new.place}: {now:,} parameters of {was:,}; {then}")
    return 0
