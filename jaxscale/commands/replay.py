"""`jaxscale replay`: takes a step of a run again, and says where its numbers went wrong."""

from __future__ import annotations

import argparse
from typing import Any

from jaxscale.commands.shared import TEXT, accept_argument, import_argument, no_bindings


def add(commands: Any) -> None:
    """Adds the command."""
    parser = commands.add_parser(
        "replay",
        help="take a step of a run again, and say where its numbers went wrong",
        description="Goes from the checkpoint before a step to that step, on the run's own layout, compares its "
        "numbers with the recorded ones to the bit, and where they are not finite names the first module, forward or "
        "backward, that makes one of finite numbers.\nWhich steps were skipped is in the run's skipped.jsonl. Nothing "
        "in the run is changed.",
        formatter_class=TEXT,
    )
    parser.add_argument("config", metavar="RUN", help="a run folder, as runs/demo-1")
    parser.add_argument("--step", type=int, required=True, metavar="N", help="which, from 1")
    import_argument(parser)
    accept_argument(parser)
    parser.add_argument("--devices", type=int, metavar="N", help="simulate N devices on this machine's CPU")
    parser.set_defaults(run_command=run)


def run(args: argparse.Namespace, bindings: list[str]) -> int:
    """Does it."""
    no_bindings(args, bindings)
    from jaxscale import load
    from jaxscale.train.replay import replay

    print(replay(load(args.config), args.step))
    return 0
