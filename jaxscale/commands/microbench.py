"""`jaxscale microbench`: measures this machine, and writes a hardware file for `jaxscale plan`."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from jaxscale.commands.shared import TEXT, no_bindings
from jaxscale.errors import ConfigError


def add(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "microbench",
        help="measure this machine, and write a hardware file",
        description="Measures matrix products, copies, transfers to the host and collectives on all devices of this "
        "machine at the same time,\nand notes measurements that did not repeat. With --out it writes a hardware file, "
        "which --topology FILE:8 uses\n(after measuring a single device only FILE:1, since there were no links).",
        formatter_class=TEXT,
    )
    parser.add_argument("--out", metavar="FILE", help="hardware file to write, such as my.json")
    parser.add_argument("--quick", action="store_true", help="fewer sizes and repeats")
    parser.add_argument(
        "--cpu-time", action="store_true", help="on a CPU that is busy with other work: use CPU time of this process"
    )
    parser.add_argument("--devices", type=int, metavar="N", help="simulate N devices on this machine's CPU")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run_command=run)


def run(args: argparse.Namespace, bindings: list[str]) -> int:
    """Measure and print; returns the exit code 0."""
    no_bindings(args, bindings)
    if args.out is not None and (not args.out.endswith(".json") or not Path(args.out).parent.is_dir()):
        raise ConfigError(f"--out {args.out}: name a file that ends in .json, in an existing folder")
    from rich.console import Console

    from jaxscale.plan.microbench import microbench
    from jaxscale.units import WIDTH

    measured = microbench(quick=args.quick, cpu_time=args.cpu_time, say=lambda what: print(what, file=sys.stderr))
    if args.json:
        print(json.dumps(measured.to_json(), indent=2))
    else:
        Console(highlight=False, width=None if sys.stdout.isatty() else WIDTH).print(measured)
    if args.out is not None:
        print(f"written to {measured.write(args.out)}", file=sys.stderr)

    return 0
