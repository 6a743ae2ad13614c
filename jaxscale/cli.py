"""The command line: `jaxscale train | sample | explain | schedule`."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import logging
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, cast

from jaxscale.errors import ConfigError, JaxscaleError
from jaxscale.version import __version__
from pallas_kernels.errors import KernelError

if TYPE_CHECKING:
    from jaxscale.train import Run, TrainConfig

_DESCRIPTION = """\
Train, sample and explain sharded models.

A configuration is a gin file; any binding in it can be changed from here:

  jaxscale train experiments/demo.gin --devices 8
  jaxscale train experiments/demo.gin --gin.train.steps=50 --mesh "data=2,tensor=4" --devices 8
  jaxscale train --resume runs/demo-1
  jaxscale explain experiments/demo.gin --mesh "fsdp=8"
  jaxscale sample runs/demo-1 --prompt "def "
  jaxscale schedule 1f1b --stages 4 --microbatches 8
"""


class _Parser(argparse.ArgumentParser):
    """Mistakes are errors of ours: one sentence, exit code 2."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see {self.prog} --help")


def _parser() -> argparse.ArgumentParser:
    text = argparse.RawDescriptionHelpFormatter
    parser = _Parser(prog="jaxscale", description=_DESCRIPTION, formatter_class=text)
    parser.add_argument("--version", action="version", version=f"jaxscale {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=_Parser)

    train = commands.add_parser(
        "train",
        help="train a model; leaves a run folder",
        description="Trains what a gin file describes and leaves a run folder: config.gin, run.json, metrics.jsonl, "
        "checkpoints/, loss.png.\nA folder is never overwritten: a new run gets a new one, and --resume goes on in "
        "the old one.",
        formatter_class=text,
    )
    _config_arguments(train)
    train.add_argument("--run", metavar="DIR", help="the run folder (default: a new one, runs/<name of the file>-<n>)")
    train.add_argument("--resume", metavar="RUN", help="go on from a run's newest checkpoint, with its own config.gin")
    train.add_argument(
        "--continue",
        dest="go_on",
        action="store_true",
        help="go on from a checkpoint where there is one: in --run DIR, else in the newest unfinished runs/<name>-<n> "
        "of these very settings; start anew where there is none",
    )
    train.add_argument("--profile", metavar="FIRST:LAST", help="write a profile of these steps, as 10:15")
    train.add_argument("--quiet", action="store_true", help="print nothing but errors")

    explain = commands.add_parser(
        "explain",
        help="show where every tensor lives, and why",
        description="Prints the tensor table of a gin file or a run: shape, logical axes, spec, bytes per device and "
        "the rules that fired; then which loss and which attention kernel run. Nothing is compiled and no device is "
        "needed.",
        formatter_class=text,
    )
    _config_arguments(explain)
    explain.add_argument("--json", action="store_true", help="print JSON")

    sample = commands.add_parser(
        "sample",
        help="continue a text with a trained model",
        description="Continues a text with the newest checkpoint of a run.",
        formatter_class=text,
    )
    sample.add_argument("run", metavar="RUN", help="a run folder, as runs/demo-1")
    _import_argument(sample)
    sample.add_argument("--prompt", default="", help="text to continue (default: start a new document)")
    sample.add_argument("--tokens", type=int, default=400, help="how many tokens to add (default 400)")
    sample.add_argument("--temperature", type=float, default=0.8, help="0 takes the likeliest token (default 0.8)")
    sample.add_argument("--top-k", type=int, help="sample among this many likeliest tokens")
    sample.add_argument("--seed", type=int, default=0, help="of the choice (default 0)")

    schedule = commands.add_parser(
        "schedule",
        help="draw a pipeline schedule",
        description="Draws a pipeline schedule, a line per stage and a column per tick (F3 is the forward of "
        "micro-batch 3, F3.1 of its chunk 1; B its backward, W its weight gradients where those are apart), and says "
        "what it costs: its bubble, and how many micro-batches' activations each stage holds at most.",
        formatter_class=text,
    )
    schedule.add_argument(
        "name", metavar="NAME", help="gpipe, 1f1b, interleaved, zb-h1, lockstep, lockstep-zb or a .csv"
    )
    schedule.add_argument("--stages", type=int, default=4, help="(default 4)")
    schedule.add_argument("--microbatches", type=int, help="(default 2 per stage)")
    schedule.add_argument("--chunks", type=int, help="pieces of the model per stage (interleaved; default 2)")
    schedule.add_argument("--csv", metavar="FILE", help="also write the table, as Pipeline reads it")
    schedule.add_argument(
        "--plot", metavar="FILE", help="also draw it as a picture, as schedule.png (needs matplotlib)"
    )
    return parser


def _import_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--import",
        dest="modules",
        action="append",
        metavar="MODULE",
        help="import a module of yours first, whose layers, corpora or optimizers the config names",
    )


def _config_arguments(parser: argparse.ArgumentParser) -> None:
    _import_argument(parser)
    parser.add_argument("config", nargs="?", metavar="CONFIG", help="a gin file (explain takes a run, too)")
    parser.add_argument(
        "--gin.NAME=VALUE", action="store_true", dest="unused", help="change a binding, as --gin.train.lr=3e-4"
    )
    parser.add_argument("--mesh", metavar="SIZES", help='the mesh, as "data=2,fsdp=2,tensor=2"; one size may be -1')
    parser.add_argument(
        "--pipeline",
        metavar="SCHEDULE",
        help='the schedule of a pipeline axis, as "1f1b" or with micro-batches "1f1b:8"',
    )
    parser.add_argument("--devices", type=int, metavar="N", help="simulate N devices on this machine's CPU")
    parser.add_argument(
        "--distributed",
        nargs="?",
        const="auto",
        metavar="HOST:PORT,N,I",
        help="join the other hosts: alone on SLURM, Cloud TPU and GKE; elsewhere with the address of process 0, the "
        "number of processes, and this one's",
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; returns the exit code, 2 for a mistake of the user's."""
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    try:
        return _run(list(sys.argv[1:] if argv is None else argv))
    except (JaxscaleError, KernelError) as e:
        print(f"jaxscale: {e}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        return 1
    except KeyboardInterrupt:
        print("jaxscale: interrupted", file=sys.stderr)
        return 130


def _run(argv: list[str]) -> int:
    from jaxscale.config import split_overrides

    sys.path.insert(0, os.getcwd())  # a config may import a module beside it, as a script may
    bindings, rest = split_overrides(argv)
    parser = _parser()
    args = parser.parse_args(rest)
    if args.command is None:
        parser.print_help()
        return 0
    for module in getattr(args, "modules", None) or []:
        _import(module)
    if args.command == "sample":
        if bindings:
            raise ConfigError(f"sample takes a run as it is; leave out --gin.{bindings[0].partition(' =')[0]}")
        return _sample(args)
    if args.command == "schedule":
        return _schedule(args)
    if args.devices is not None:
        from jaxscale.layout import simulate_devices

        simulate_devices(args.devices)
    if args.distributed is not None:
        _join(args.distributed)
    return _train(args, bindings) if args.command == "train" else _explain(args, bindings)


def _train(args: argparse.Namespace, bindings: list[str]) -> int:
    from jaxscale.train import fit

    if args.resume == "" or args.run == "":
        raise ConfigError("the name of the run folder is empty; was a variable of the shell not set?")
    if args.resume and (args.run or args.go_on or args.config):
        raise ConfigError("--resume names a run, which has its own config.gin; leave out CONFIG, --run and --continue")
    config = _load(args.resume and Path(args.resume) / "config.gin", args, bindings)
    run = fit(
        config,
        run=args.resume or args.run,
        resume=True if args.resume else "newest" if args.go_on else False,
        name=Path(args.config).stem if args.config else "run",
        profile=_window(args.profile),
        quiet=args.quiet,
    )
    if not args.quiet and run.is_main:
        print(_next_steps(run, config))
    return 0


def _explain(args: argparse.Namespace, bindings: list[str]) -> int:
    from rich.console import Console

    from jaxscale.plan import explain
    from jaxscale.train.report import WIDTH

    path = Path(args.config) if args.config else None
    own = path / "config.gin" if path is not None and path.is_dir() else None
    found = explain(_load(own, args, bindings))
    if args.json:
        print(json.dumps(found.to_json(), indent=2))
    else:
        Console(highlight=False, width=None if sys.stdout.isatty() else WIDTH).print(found)
    return 0


def _sample(args: argparse.Namespace) -> int:
    from jaxscale import load
    from jaxscale.infer import sample_text

    run = load(args.run)
    options = {"temperature": args.temperature, "top_k": args.top_k, "seed": args.seed}
    print(sample_text(run, args.prompt, args.tokens, **options))
    return 0


def _schedule(args: argparse.Namespace) -> int:
    from jaxscale.layout import Pipeline, simulate
    from jaxscale.layout.table import draw_figure, draw_text, to_csv

    for option in ("stages", "microbatches"):
        if getattr(args, option) is not None and getattr(args, option) < 1:
            raise ConfigError(f"--{option} {getattr(args, option)}: must be at least 1")
    pipeline = Pipeline(args.name, args.microbatches, args.chunks)
    table = pipeline.table(*pipeline.sizes_or(args.stages, 2 * args.stages))
    found = simulate(table)
    print(draw_text(table))
    work = ", ".join(("forward 1", "backward 2") if table.phases == 2 else ("F 1", "B 1", "W 1"))
    print(
        f"\n{table.name}: {table.stages} stages, {table.microbatches} micro-batches, {table.chunks} chunk(s), "
        f"{found.ticks} ticks\n"
        f"bubble {found.bubble:.3f} of each stage's time ({work}), every stage on its own clock\n"
        f"bubble {found.lockstep_bubble:.3f} where stages wait for one another in each phase (layers split over "
        "devices as well)\n"
        f"peak activations, in micro-batches{' x chunks' if table.chunks > 1 else ''}, by stage: "
        f"{', '.join(map(str, found.stash))}"
    )
    if args.csv is not None:
        Path(args.csv).write_text(to_csv(table))
    if args.plot is not None:
        draw_figure(table).savefig(args.plot)
    return 0


def _load(own: Path | None, args: argparse.Namespace, bindings: list[str]) -> TrainConfig:
    """The settings in a gin file, or a run's own `config.gin`, with what the command line changes."""
    from jaxscale import config as gin_config
    from jaxscale.layout import Layout
    from jaxscale.train import read_config

    if own is not None:
        settings = read_config(own.parent, bindings)
    elif args.config is not None:
        gin_config.load([args.config], bindings)
        settings = cast("TrainConfig", gin_config.call("train"))
        for name in gin_config.unused():
            print(f"jaxscale: warning: nothing reads the binding {name}", file=sys.stderr)
    else:
        raise ConfigError("name a gin file, as experiments/demo.gin, or a run (explain RUN, train --resume RUN)")
    given = {name: getattr(args, name) for name in ("mesh", "pipeline") if getattr(args, name) is not None}
    if given:
        layout = settings.layout if settings.layout is not None else Layout()
        settings = dataclasses.replace(settings, layout=dataclasses.replace(layout, **given))
    return settings


def _import(module: str) -> None:
    try:
        importlib.import_module(module)
    except ImportError as e:
        raise ConfigError(f"--import {module}: {e}") from e


def _join(spec: str) -> None:
    from jaxscale.layout import init_distributed

    if spec == "auto":
        init_distributed()
        return
    try:
        address, processes, process = spec.split(",")
        numbers = int(processes), int(process)
    except ValueError:
        raise ConfigError(f"--distributed {spec} is not of the form host:port,processes,process") from None
    init_distributed(address, *numbers)


def _window(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    try:
        first, last = map(int, text.split(":"))
    except ValueError:
        raise ConfigError(f"--profile {text} is not of the form first:last, as 10:15") from None
    return first, last


def _next_steps(run: Run, config: TrainConfig) -> str:
    import jax

    program = os.path.relpath(sys.argv[0])
    name = "jaxscale" if shutil.which("jaxscale") else f"python {program}" if program.endswith(".py") else program
    devices = jax.device_count()
    simulated = f" --devices {devices}" if jax.default_backend() == "cpu" and devices > 1 else ""
    mesh = f"fsdp={devices // 2},tensor=2" if devices % 2 == 0 else "data=-1"
    stopped = run.info.get("status") == "stopped"
    more = "" if stopped else f" --gin.train.steps={config.steps * 2}"
    return (
        f"the run is in {run.path}: loss.png, metrics.jsonl, config.gin, run.json, checkpoints/\n"
        f"next, try:\n"
        f'  {name} sample {run.path} --prompt "class "\n'
        f"  {name} train --resume {run.path}{more}{simulated}\n"
        f'  {name} explain {run.path} --mesh "{mesh}"'
    )


if __name__ == "__main__":
    sys.exit(main())
