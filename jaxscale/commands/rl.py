"""`jaxscale rl`: trains a model by rewards."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, cast

from jaxscale.commands.shared import TEXT, config_arguments, load
from jaxscale.errors import ConfigError
from jaxscale.interrupts import STOPS


def add(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "rl",
        help="train a model on its own samples, by rewards (GRPO, DAPO, ...) or a teacher; leaves a run folder",
        description="Samples completions of prompts, rewards them and trains the model on them, with the settings "
        "train.* and rl.* of a\ngin file: train.data are the prompts, train.objective is the method, rl.reward is the "
        "function, which\n@OnPolicyDistill() with its teacher does not need.\n"
        "Ctrl-C and SIGTERM stop after the current step, with a checkpoint.\n\n"
        "  jaxscale rl sums.gin --from runs/base\n"
        "  jaxscale rl my.gin --from runs/base --run runs/better --continue",
        formatter_class=TEXT,
    )
    config_arguments(parser)
    parser.add_argument("--from", dest="start", metavar="RUN", help="start from the parameters of a run")
    parser.add_argument("--run", metavar="DIR", help="the run folder (default: a new one, runs/<name of the file>-<n>)")
    parser.add_argument(
        "--continue", dest="go_on", action="store_true", help="continue from a checkpoint in --run DIR if there is one"
    )
    parser.add_argument("--quiet", action="store_true", help="print nothing but warnings and errors")
    parser.set_defaults(run_command=run)


def run(args: argparse.Namespace, bindings: list[str]) -> int:
    """Train; returns the exit code."""
    from jaxscale import config as gin_config
    from jaxscale.rl import RLConfig, reinforce

    if args.config is None:
        raise ConfigError("name a gin file with train.data, train.objective and rl.reward")
    if args.run == "":
        raise ConfigError("the name of the run folder is empty; check that the shell variable is set")
    config = load(None, args, bindings, also=("rl",))
    settings = cast("RLConfig", gin_config.call("rl"))
    resume = "newest" if args.go_on else False
    trained = reinforce(config, settings, folder=args.run, resume=resume, name=Path(args.config).stem, quiet=args.quiet)
    if not args.quiet and trained.is_main:
        name = "divergence" if config.objective.teacher is not None else "reward"
        values = [row[name] for row in trained.metrics() if name in row]
        last = f": {name} {values[0]:.3f} at first, {values[-1]:.3f} at last" if values else ""
        print(f"the run is in {trained.place}{last}\nnext step:\n  jaxscale sample {trained.place}")
    return 0 if trained.stopped_by is None else STOPS[trained.stopped_by]
