"""`jaxscale train`: trains what a gin file describes."""

from __future__ import annotations

import argparse
import dataclasses
import os
import shutil
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxscale.commands.shared import TEXT, accept_argument, config_arguments, imports_of, load
from jaxscale.errors import CheckpointError, ConfigError, OtherArrays
from jaxscale.interrupts import STOPS

if TYPE_CHECKING:
    from jaxscale.run import Run
    from jaxscale.step import TrainConfig


def add(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "train",
        help="train a model; leaves a run folder",
        description="Trains the model of a gin file and writes a run folder: config.gin, run.json, metrics.jsonl, "
        "checkpoints/, loss.png.\nA folder is never overwritten: a new run gets a new one, and --resume continues in "
        "the old one.\nCtrl-C and SIGTERM stop training after the current step, with a checkpoint and exit code 130 or "
        "143; a second one stops at once.",
        formatter_class=TEXT,
    )
    config_arguments(parser)
    accept_argument(parser)
    parser.add_argument("--run", metavar="DIR", help="the run folder (default: a new one, runs/<name of the file>-<n>)")
    parser.add_argument("--resume", metavar="RUN", help="continue a run from its newest checkpoint with its config.gin")
    parser.add_argument(
        "--continue",
        dest="go_on",
        action="store_true",
        help="continue from a checkpoint if there is one (in --run DIR, else in the newest unfinished runs/<name>-<n> "
        "with the same settings); otherwise start a new run",
    )
    parser.add_argument(
        "--from",
        dest="start",
        metavar="RUN",
        help="start from the parameters of a run's newest checkpoint (trained or imported); model and tokenizer are "
        "the run's unless the config sets them",
    )
    parser.add_argument(
        "--peers",
        metavar="HOST:PORT",
        help="train with other processes that may join and leave (train.algorithm = @PeerDiLoCo()); the address is "
        "that of jaxscale peers",
    )
    parser.add_argument(
        "--profile",
        metavar="FIRST:LAST",
        help="write a profile of these steps, such as 10:15; jaxscale plan RUN --measured reads it",
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="do not train: check all settings, trace and lower one step on the mesh (its devices need not exist), and "
        "print what would run; data is not opened",
    )
    parser.add_argument("--quiet", action="store_true", help="print nothing but errors")
    parser.set_defaults(run_command=run)


def run(args: argparse.Namespace, bindings: list[str]) -> int:
    """Train; returns the exit code."""
    began = time.time()
    from jaxscale.data.prompts import Prompts
    from jaxscale.run import fit
    from jaxscale.step.objectives.sampled import Sampled
    from jaxscale.train.fit import check_profile

    if args.resume == "" or args.run == "":
        raise ConfigError("the name of the run folder is empty; check that the shell variable is set")
    if args.resume and (args.run or args.go_on or args.config):
        raise ConfigError("--resume names a run, which has its own config.gin; leave out CONFIG, --run and --continue")
    if args.resume and args.start:
        raise ConfigError("--resume continues a run and --from starts a new one; leave out one of them")
    profile = _window(args.profile)
    if args.peers is not None and not args.resume:
        bindings = ["train.algorithm = @PeerDiLoCo()", *bindings]
    config = load(args.resume and Path(args.resume) / "config.gin", args, bindings)
    if args.peers is not None:
        config = _with_peers(config, args.peers)
    if args.resume and isinstance(config.objective, Sampled) and isinstance(config.data, Prompts):
        raise ConfigError(
            f"{args.resume} learns from its own samples; continue with jaxscale rl CONFIG --run {args.resume} "
            "--continue, where CONFIG is the gin file with its rl.* settings"
        )
    if args.dry_run:
        from jaxscale.plan import dry_run

        check_profile(profile, config)
        print(dry_run(config))
        return 0
    try:
        trained = fit(
            config,
            run=args.resume or args.run,
            resume=True if args.resume else "newest" if args.go_on else False,
            name=Path(args.config).stem if args.config else "run",
            profile=profile,
            quiet=args.quiet,
            began=began,
        )
    except OtherArrays as e:
        raise _with_settings(e, args, config) from None
    if not args.quiet and trained.is_main:
        print(_next_steps(trained, config))
    return 0 if trained.stopped_by is None else STOPS[trained.stopped_by]


def _with_peers(config: TrainConfig, address: str) -> TrainConfig:
    from jaxscale.peers import address_of

    address_of(address)
    algorithm: Any = config.algorithm
    if not hasattr(algorithm, "coordinator"):
        raise ConfigError(
            f"--peers {address}: {algorithm.describe()} does not exchange anything with other processes; set "
            "train.algorithm = @PeerDiLoCo()"
        )
    return dataclasses.replace(config, algorithm=dataclasses.replace(algorithm, coordinator=address))


def _window(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    try:
        first, last = map(int, text.split(":"))
    except ValueError:
        raise ConfigError(f"--profile {text} is not of the form first:last, such as 10:15") from None
    return first, last


SHAPING = ("model", "optimizer", "adapters", "algorithm", "objective", "tokenizer", "stored")
"""Settings of `train` whose parts decide what arrays a checkpoint has."""


def _with_settings(e: OtherArrays, args: argparse.Namespace, config: TrainConfig) -> CheckpointError:
    """Return an error that begins with the settings in which a run and the command that continues it differ.

    Args:
      e: what was raised because the checkpoint has other arrays.
      args: the parsed options.
      config: the settings of the command.
    """
    from jaxscale.train import read_config

    run = args.resume or args.run
    if not (args.resume or args.go_on) or not run:
        return e
    was, now = _shaping(read_config(run)), _shaping(config)
    names = [n for n in sorted({**was, **now}) if was.get(n) != now.get(n)]
    both = [n for n in names if n in was and n in now] or names
    if not both:
        return e
    each = [f"{n} = {now.get(n, 'not set')} (it has {was.get(n, 'none')})" for n in both]
    first, more = str(e).partition("; ")[0], "" if len(each) < 4 else f" and {len(each) - 3} more"
    leave = "it" if len(each) == 1 else "those of arrays"
    return CheckpointError(
        f"{run} cannot continue with {', '.join(each[:3])}{more}; leave {leave} as before"
        f", or start a new run (of the same model from its parameters: --from {run}). For example, {first}"
    )


def _shaping(config: TrainConfig) -> dict[str, str]:
    """Return the bindings of a run that decide what arrays it has, as text."""
    from jaxscale import config as gin_config

    lines = gin_config.dumps("train", config.values()).splitlines()
    pairs = (line.partition(" = ") for line in lines)
    return {n: v for n, _, v in pairs if n.removeprefix("train.").startswith(SHAPING)}


def _next_steps(run: Run, config: TrainConfig) -> str:
    import jax

    from jaxscale.step.texts import no_texts

    program = os.path.relpath(sys.argv[0])
    if os.path.basename(program) == "__main__.py":  # python -m jaxscale
        program = "-m jaxscale"
    python = program.endswith(".py") or program.startswith("-m")
    name = "jaxscale" if shutil.which("jaxscale") else f"python {program}" if python else program
    devices = jax.device_count()
    simulated = f" --devices {devices}" if jax.default_backend() == "cpu" and devices > 1 else ""
    halves = devices // 2
    mesh = "data=-1" if devices % 2 else f"fsdp={halves},tensor=2" if halves > 1 else "tensor=2"
    stopped = run.info.get("status") == "stopped"
    own = imports_of(run)
    more = "" if stopped else f" --gin.train.steps={config.steps * 2}"
    prompt = ' --prompt "class "' if config.data.name == "python_stdlib" else ""
    look = f"report {run.place}" if no_texts(config) else f"sample {run.place}{prompt}{own}"
    optional = ("loss.png", "experts.png", "experts.jsonl")
    files = "".join(f"{name}, " for name in optional if (run.path / name).exists())
    return (
        f"the run is in {run.place}: {files}metrics.jsonl, config.gin, run.json, checkpoints/\n"
        f"next steps:\n"
        f"  {name} {look}\n"
        f"  {name} train --resume {run.place}{more}{simulated}{own}\n"
        f'  {name} explain {run.place} --mesh "{mesh}"{own}'
    )
