"""`jaxscale coordcheck`: checks that activations keep their size as the model gets wider (µP)."""

from __future__ import annotations

import argparse
import json
from typing import Any

from jaxscale.commands.shared import TEXT, config_arguments, load, on_disk
from jaxscale.errors import ConfigError

NOT_FLAT = 1
"""Exit code if the size of an activation or of its change depends on the width."""


def add(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "coordcheck",
        help="check that activations keep their size as the model gets wider (µP)",
        description="Trains a config's model for a few steps at several widths, on one device, and prints for every "
        "module the size of\nits output at the start and of the change by training. Exits with 1 if one of these "
        "depends on the width\n(its slope is not flat): then no learning rate suits two widths. Logits and attention "
        "scores may shrink.\n\n"
        "  jaxscale coordcheck experiments/mup_transfer/mup.gin\n"
        "  jaxscale coordcheck my.gin --widths 64,128,256,512 --gin.train.lr=1e-3 --out checks",
        formatter_class=TEXT,
    )
    config_arguments(parser)
    parser.add_argument(
        "--widths", metavar="W,W,...", default="32,64,128,256", help="residual widths (default %(default)s)"
    )
    parser.add_argument("--steps", type=int, default=4, metavar="N", help="steps of training (default %(default)s)")
    parser.add_argument("--seeds", type=int, default=2, metavar="N", help="runs of each width (default %(default)s)")
    parser.add_argument("--tolerance", type=float, metavar="SLOPE", help="largest slope that is flat (default 0.15)")
    parser.add_argument("--out", metavar="DIR", help="also write coordcheck.png and coordcheck.json to this folder")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run_command=run)


def run(args: argparse.Namespace, bindings: list[str]) -> int:
    """Run the check; returns 0, or `NOT_FLAT`."""
    from jaxscale.commands.plan import progress, show
    from jaxscale.plan.coordcheck import TOLERANCE, coordcheck

    widths = _widths(args.widths)
    out = None if args.out is None else on_disk(args.out)
    if out is not None and out.exists() and not out.is_dir():
        raise ConfigError(f"--out {out} is a file; name a folder")
    config = load(None, args, bindings)
    with progress() as tell:
        result = coordcheck(
            config,
            widths,
            steps=args.steps,
            seeds=args.seeds,
            tolerance=TOLERANCE if args.tolerance is None else args.tolerance,
            tell=tell,
        )
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        result.draw(out / "coordcheck.png")
        (out / "coordcheck.json").write_text(json.dumps(result.to_json(), indent=2) + "\n")
    show(result, args.json)
    return 0 if result.flat else NOT_FLAT


def _widths(text: str) -> list[int]:
    try:
        return [int(w) for w in text.split(",")]
    except ValueError:
        raise ConfigError(f"--widths {text} is not of the form 32,64,128") from None
