"""`jaxscale replay`: repeats a step of a run, and finds the module where its numbers stop being finite."""

from __future__ import annotations

import argparse
from typing import Any

from jaxscale.commands.shared import TEXT, accept_argument, import_argument, no_bindings


def add(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "replay",
        help="repeat a step of a run, and find the module where its numbers stop being finite",
        description="Trains from the checkpoint before a step up to that step, on the run's layout, and compares loss "
        "and gradients bit by bit\nwith the recorded ones. If they are not finite, it names the first module, forward "
        "or backward, whose inputs are finite\nand whose output is not. Skipped steps are listed in the run's "
        "skipped.jsonl. The run is not changed.",
        formatter_class=TEXT,
    )
    parser.add_argument("config", metavar="RUN", help="a run folder, such as runs/demo-1")
    parser.add_argument("--step", type=int, required=True, metavar="N", help="the step, from 1")
    import_argument(parser)
    accept_argument(parser)
    parser.add_argument("--devices", type=int, metavar="N", help="simulate N devices on this machine's CPU")
    parser.set_defaults(run_command=run)


def run(args: argparse.Namespace, bindings: list[str]) -> int:
    """Replay the step and print the result; returns the exit code 0."""
    no_bindings(args, bindings)
    from jaxscale import load
    from jaxscale.train.replay import replay

    print(replay(load(args.config), args.step))
    return 0
