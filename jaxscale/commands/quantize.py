"""`jaxscale quantize`: writes a run whose matrices are stored in few bits."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from jaxscale.commands.shared import TEXT, calibration_arguments, continuing, layout_of


def add(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "quantize",
        help="round a run's matrices to few bits by a recipe, in a new run folder",
        description="Writes a new run whose checkpoint holds the matrices of layers in few bits. A recipe with "
        "calibration reads rows of the run's\ntraining corpus, or of text files, and rounds one layer after the "
        "other. Started again after an interruption, it continues.\n\n"
        "  jaxscale quantize runs/demo-1 runs/demo-int4 --recipe '@GPTQ(bits=4, group=32)'\n"
        "  jaxscale quantize runs/demo-1 runs/demo-nf4 --recipe '@RoundToNearest(weights=@nf4())'\n"
        "  jaxscale quantize runs/demo-1 runs/demo-awq --recipe '@AWQ(group=32)' --data 'texts/*.txt' --rows 128",
        formatter_class=TEXT,
    )
    parser.add_argument("run", metavar="RUN", help="a run, trained or imported")
    parser.add_argument("out", metavar="OUT", help="the run folder to write")
    parser.add_argument(
        "--recipe",
        required=True,
        metavar="RECIPE",
        help="RoundToNearest, GPTQ, AWQ, SmoothQuant, HQQ, EoRA, AllocatedBits, COMET, FlexQ, BitStack, BlockPruning, "
        "LowRank, BCT, QMoE or D2MoE, as '@GPTQ(bits=4, group=64)'; also set by --gin.GPTQ.bits=4",
    )
    parser.add_argument("--data", metavar="GLOB", help="calibration text files (default: the run's training corpus)")
    calibration_arguments(parser)
    parser.set_defaults(run_command=run)


def run(args: argparse.Namespace, bindings: list[str]) -> int:
    """Quantise and print the result; returns the exit code 0."""
    from jaxscale.convert.quantize import quantize
    from jaxscale.data import text_files
    from jaxscale.run import Run
    from jaxscale.step.rates import parameter_count
    from jaxscale.units import human_bytes

    source = Run(Path(args.run))
    _ = source.info  # raises for a folder that is no run
    recipe = recipe_of(args.recipe, bindings)
    data = None if args.data is None else text_files(args.data, heldout=0.0)

    def say(line: str) -> None:
        print(f"jaxscale: {line}", file=sys.stderr)

    options: dict[str, Any] = {name: getattr(args, name) for name in ("rows", "batch", "step")}
    new = quantize(source, args.out, recipe, data=data, layout=layout_of(args), say=say, **options)
    leaves = new.checkpoints.manifest(0)["leaves"].values()
    size = sum(_bytes(leaf) for leaf in leaves)
    print(f"{new.path}: {parameter_count(new.config):,} parameters in {human_bytes(size)}; {continuing(new)}")
    return 0


def _bytes(leaf: dict[str, Any]) -> int:
    import math

    from jaxscale.train.checkpoints.read import dtype_named

    return math.prod(leaf["shape"]) * dtype_named(leaf["dtype"]).itemsize


def recipe_of(text: str, bindings: list[str]) -> Any:
    """Return the recipe of `--recipe`.

    Args:
      text: its name, with "@" and settings in brackets if there are any.
      bindings: gin bindings of its settings.

    Raises:
      ConfigError: there is no such recipe, or a setting that it does not have.
    """
    from jaxscale import config as gin_config
    from jaxscale.convert.recipes import Recipe
    from jaxscale.errors import ConfigError, near

    name, bracket, settings = text.strip().removeprefix("@").partition("(")
    known = [n for n, o in gin_config.registered().items() if isinstance(o, type) and issubclass(o, Recipe)]
    if name not in known:
        raise ConfigError(f"--recipe {text}: there is no recipe '{name}'{near(name, known)}")
    if bracket and not settings.endswith(")"):
        raise ConfigError(f"--recipe {text}: the closing bracket is missing; write '@{name}(bits=4)'")
    own = [f"{name}.{part.strip()}" for part in _split(settings.removesuffix(")")) if part.strip()]
    with gin_config.isolated():
        gin_config.load([], [*own, *bindings])
        recipe = gin_config.call(name)
        unread = gin_config.unused()
    if unread:
        raise ConfigError(f"--gin.{unread[0]} is not part of --recipe {name}; leave it out")
    return recipe


def _split(text: str) -> list[str]:
    """Split at the commas outside of brackets."""
    parts, depth = [""], 0
    for c in text:
        depth += (c in "([{") - (c in ")]}")
        if c == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += c
    return parts
