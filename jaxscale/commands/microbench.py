"""`jaxscale microbench`: measures the machine at hand, as a hardware file for `plan`."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from jaxscale.commands.shared import TEXT, no_bindings
from jaxscale.errors import ConfigError


def add(commands: Any) -> None:
    """Adds the command."""
    parser = commands.add_parser(
        "microbench",
        help="measure this machine, as a hardware file",
        description="Measures matrix products, copies, transfers to the host and collectives on all devices of this "
        "machine, all at work at once, and says where repeats disagree. With --out, writes the hardware file that "
        '"FILE:8" names wherever a topology is asked for ("FILE:1" alone where it was one device, which has no links).',
        formatter_class=TEXT,
    )
    parser.add_argument("--out", metavar="FILE", help="write the hardware file, as my.json")
    parser.add_argument("--quick", action="store_true", help="fewer sizes and repeats")
    parser.add_argument(
        "--cpu-time", action="store_true", help="of a CPU that is busy with other work, count this process's own"
    )
    parser.add_argument("--devices", type=int, metavar="N", help="simulate N devices on this machine's CPU")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run_command=run)


def run(args: argparse.Namespace, bindings: list[str]) -> int:
    """Does it."""
    no_bindings(args, bindings)
    if args.out is not None and (not args.out.endswith(".json") or not Path(args.out).parent.is_dir()):
        raise ConfigError(f"--out {args.out}: a hardware file ends in .json, in a folder that there is")
    from rich.console import Console

    from jaxscale.plan.microbench import microbench
    from jaxscale.units import WIDTH

    found = microbench(quick=args.quick, cpu_time=args.cpu_time, say=lambda what: print(what, file=sys.stderr))
    if args.json:
        print(json.dumps(found.to_json(), indent=2))
    else:
        Console(highlight=False, width=None if sys.stdout.isatty() else WIDTH).print(found)
    if args.out is not None:
        print(f"written to {found.write(args.out)}", file=sys.stderr)
    return 0
