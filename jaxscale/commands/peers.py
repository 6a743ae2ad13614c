"""`jaxscale peers`: the coordinator of runs that train apart, and may join and leave."""

from __future__ import annotations

import argparse
from typing import Any

from jaxscale.commands.shared import TEXT, no_bindings
from jaxscale.errors import ConfigError


def add(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "peers",
        help="coordinate runs that train apart and may join and leave",
        description="Waits for runs of jaxscale train --peers, and coordinates when they exchange outer gradients "
        "(@PeerDiLoCo()).\nIt holds no parameters and needs no accelerator. A run that is lost is left out; one that "
        "joins later gets\nthe others' parameters. It ends when no run is left and one has finished. Without the "
        "environment variable\nJAXSCALE_PEERS_TOKEN, a secret that all share, it serves this machine alone.",
        epilog="  jaxscale peers --port 29400 --least 2\n"
        "  jaxscale train experiments/demo.gin --devices 8 --gin.PeerDiLoCo.every=20 \\\n"
        "    --peers 127.0.0.1:29400 --run runs/one\n"
        "  jaxscale train experiments/demo.gin --devices 8 --gin.PeerDiLoCo.every=20 \\\n"
        "    --peers 127.0.0.1:29400 --run runs/two",
        formatter_class=TEXT,
    )
    parser.add_argument("--host", default="127.0.0.1", help="the address to listen at (default: 127.0.0.1)")
    parser.add_argument("--port", type=int, default=29400, help="the port; 0 takes a free one (default: 29400)")
    parser.add_argument("--least", type=int, default=2, metavar="N", help="begin when N runs are there (default: 2)")
    parser.add_argument(
        "--patience",
        type=float,
        default=600.0,
        metavar="SECONDS",
        help="remove a run for whose exchange the others have waited so long (default: 600)",
    )
    parser.set_defaults(run_command=run)


def run(args: argparse.Namespace, bindings: list[str]) -> int:
    """Serve until no run is left and one has finished; returns the exit code 0."""
    from jaxscale.peers import Coordinator, token_for

    no_bindings(args, bindings)
    if args.least < 1:
        raise ConfigError(f"--least {args.least}: must be at least 1")
    if not args.patience > 0:
        raise ConfigError(f"--patience {args.patience:g}: must be above 0 seconds")

    def say(line: str) -> None:
        print(line, flush=True)

    coordinator = Coordinator(
        args.host, args.port, token=token_for(args.host), least=args.least, patience=args.patience, say=say
    )
    host, port = coordinator.address
    say(f"waiting for {args.least} runs of jaxscale train CONFIG --peers {host}:{port}")
    coordinator.serve()
    if coordinator.unfinished:
        lost = ", ".join(sorted(coordinator.unfinished))
        say(f"no run is left after {coordinator.round} rounds; lost or refused before its last step: {lost}")
    else:
        say(f"all runs have finished, after {coordinator.round} rounds")
    return 0
