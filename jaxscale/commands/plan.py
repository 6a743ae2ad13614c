"""`jaxscale plan`: memory, time and cost of a run on hardware that need not be present, and a search for layouts."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxscale.commands.shared import (
    TEXT,
    accept_argument,
    cache_argument,
    cache_of,
    config_arguments,
    load,
    weights_argument,
    weights_of,
)
from jaxscale.errors import ConfigError
from jaxscale.working_copy import local

if TYPE_CHECKING:
    from jaxscale.plan import Measured, Restarts, Serving
    from jaxscale.plan.expert_loads import Loads
    from jaxscale.plan.search_front import Tell
    from jaxscale.step import TrainConfig

RESTARTS = (
    ("device-mtbf", "HOURS", "mean time between failures of one device (default 50,677: Llama 3's run on H100s)"),
    ("restart-time", "MINUTES", "time from a failure until training continues (default 10)"),
    (
        "write-speed",
        "GB/S",
        "checkpoint write speed of all devices together (default 0.122 each: Llama 3's storage)",
    ),
    ("save-every", "MINUTES", "training between checkpoints (default: the interval that loses the least time)"),
)
"""Options about failures and checkpoints, for plans of a number of tokens."""
EVERY = 10.0
"""Seconds between lines of progress in a log."""


def add(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "plan",
        help="estimate a step on hardware that is not present, or search for its best layout",
        description="Estimates the training step of a gin file on named hardware: bytes per device, FLOPs, "
        "communication, seconds, MFU, tokens/s.\nThe step is compiled if the compiler for the hardware is installed; "
        "otherwise the estimate is analytic. The output says which.\n\n"
        "  jaxscale plan experiments/llama3_8b.gin --topology v5p:4x4x4 --tokens 1T --price 4.2\n"
        '  jaxscale plan experiments/llama3_8b.gin --topology h100:8x8 --mesh "fsdp=-1" --analytic\n'
        "  jaxscale plan experiments/llama3_8b.gin --topology v5p:4x4x4 --search --write winner.gin\n"
        "  jaxscale plan experiments/llama3_8b.gin --topology v5p:4x4x4 --compare mine.gin\n"
        "  jaxscale plan experiments/llama3_8b.gin --fit-on v5p:4x4x4\n"
        "  jaxscale plan runs/demo --measured\n"
        "  jaxscale plan experiments/llama3_8b.gin --topology v5e:2x2 --mesh tensor=4 --serve --weights int4\n"
        '  jaxscale plan experiments/llama3_8b.gin --fit-on v5e,v5p --mesh "fsdp=-1" --tokens 1T --days 30 '
        "--price v5e=1.2,v5p=4.2",
        formatter_class=TEXT,
    )
    config_arguments(parser)
    accept_argument(parser)
    parser.add_argument(
        "--topology",
        metavar="NAME",
        help="a TPU slice such as v5p:8x8x8 (two slices: v5p:8x8x8*2), GPUs such as h200:8 or h100:8x4 (four hosts), "
        "cpu:8, or your own hardware file, such as my_chip.json:8",
    )
    parser.add_argument(
        "--measured",
        action="store_true",
        help="for a run trained with --profile: print the time that each term of a step took beside the plan for the "
        "hardware of the run (or --topology)",
    )
    parser.add_argument("--tokens", metavar="N", help="also print time and cost of training on N tokens: 300B, 1.5T")
    parser.add_argument(
        "--price", metavar="X", help="price of one device for an hour; with --fit-on of several chips v5e=1.2,v5p=4.2"
    )
    parser.add_argument("--watts", type=float, metavar="W", help="power of one device (default: from its data sheet)")
    for name, metavar, what in RESTARTS:
        parser.add_argument(f"--{name}", type=float, metavar=metavar, help=what)
    parser.add_argument("--analytic", action="store_true", help="compile nothing; estimate analytically")
    parser.add_argument(
        "--loads",
        metavar="LOADS",
        help="how often each expert is chosen, for the time of the device with the most rows: even, zipf:1.2, or the "
        "folder of a run, whose experts.jsonl has them",
    )
    parser.add_argument(
        "--search",
        action="store_true",
        help="find the layout, memory policy, micro-batches and schedule that train fastest in the available memory",
    )
    parser.add_argument(
        "--write",
        metavar="FILE",
        help="gin file that --search writes its result to; it must not exist (default: nothing is written)",
    )
    parser.add_argument("--compiles", type=int, metavar="N", help="--search compiles at most N candidates (default 4)")
    parser.add_argument(
        "--compare",
        metavar="OTHER",
        help="plan another gin file (or run) on the same hardware with the same options, and print the differences",
    )
    parser.add_argument(
        "--fit-on",
        metavar="NAME",
        help="instead of --topology: print the most layers, the greatest width, the longest sequence and the largest "
        "batch that fit this hardware, each with the other settings unchanged",
    )
    parser.add_argument(
        "--days",
        type=float,
        metavar="X",
        help="with --fit-on CHIP[,CHIP] and --tokens: print the cheapest topology of these chips that takes X days at "
        "most",
    )
    parser.add_argument(
        "--budget", type=float, metavar="X", help="likewise: print the fastest topology that costs X at most"
    )
    parser.add_argument(
        "--serve",
        action="store_true",
        help="in place of a training step: bytes of parameters and KV cache, and the least time of generation",
    )
    weights_argument(parser)
    cache_argument(parser)
    parser.add_argument(
        "--rows",
        type=int,
        metavar="N",
        help="with --serve: sequences decoded at once on each device that shards the batch (default 8)",
    )
    parser.add_argument("--length", type=int, metavar="N", help="with --serve: tokens of each (default: seq_len)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run_command=run)


def run(args: argparse.Namespace, bindings: list[str]) -> int:
    """Print the plan; returns the exit code 0."""
    _check(args)
    import jax

    # Planning needs no accelerator and must not wait for one that is busy or absent.
    jax.config.update("jax_platforms", "cpu")
    from jaxscale.config import clear, isolated
    from jaxscale.plan import as_gin, cheapest, compare, fit_on, plan_for, search
    from jaxscale.plan.planner import count_of, with_budget
    from jaxscale.plan.search import COMPILES

    path = local(args.config) if args.config else None
    if args.measured:
        show(_measured(path, args, bindings), args.json)
        return 0
    config = _load(path, args, bindings)
    if args.serve:
        show(_serving(config, args), args.json)
        return 0
    tokens = None if args.tokens is None else count_of(args.tokens)
    if tokens is None and args.price is not None:
        raise ConfigError("--price gives the cost of training on a number of tokens; give --tokens, such as 1T")
    restarts = _restarts(args)
    if args.fit_on is not None:
        chips = [name.strip() for name in args.fit_on.split(",")]
        with progress() as tell:
            if tokens is None:
                show(fit_on(config, args.fit_on, tell=tell), args.json)
            else:
                limits = {"days": args.days, "budget": args.budget, "prices": _prices(args.price, chips)}
                show(cheapest(config, chips, tokens, **limits, restarts=restarts, tell=tell), args.json)
        return 0
    options: dict[str, Any] = {"tokens": tokens, "price": _price("--price", args.price), "watts": args.watts}
    loads = None if args.loads is None else _loads(config, args.loads)
    compile = "never" if args.analytic else "auto"
    if not args.search:
        for name in ("write", "compiles"):
            if getattr(args, name) is not None:
                raise ConfigError(f"--{name} is an option of --search; add --search or leave it out")
        if args.compare is not None:
            with isolated():
                clear()  # neither gin file gets the other's bindings
                other = _load(Path(args.compare), argparse.Namespace(**vars(args) | {"config": args.compare}), bindings)
            names = (args.config, args.compare)
            if loads is not None:
                raise ConfigError("--compare plans experts that are chosen equally often; leave out --loads")
            options |= {"compile": compile, "restarts": restarts}
            show(compare(config, other, args.topology, names=names, **options), args.json)
            return 0
        options |= {"compile": compile, "restarts": restarts, "loads": loads}
        show(plan_for(config, args.topology, **options), args.json)
        return 0
    file = None if args.write is None else Path(args.write)
    if file is not None:
        if file.exists():
            raise ConfigError(f"--write {file} exists already; choose another name")
        if not file.parent.is_dir():
            raise ConfigError(f"--write {file}: there is no folder {file.parent}")
        as_gin(config)  # raises for settings that gin cannot express, before the search
    compiles = COMPILES if args.compiles is None else args.compiles
    with progress() as tell:
        result = search(config, args.topology, compile=compile, compiles=compiles, loads=loads, tell=tell, **options)
    result = dataclasses.replace(result, winner=with_budget(result.winner, restarts=restarts, **options))
    about = f"Found by: jaxscale plan {args.config} --topology {args.topology} --search\n{result.winner.config.layout}"
    show(result, args.json)
    if file is None:
        if not args.json:
            print("\nto write the fastest as a gin file that trains as it is, add --write winner.gin")
        return 0
    try:
        file.write_text(as_gin(result.winner.config, about))
    except OSError as e:
        raise ConfigError(f"--write {file}: {e.strerror}") from e
    if not args.json:
        print(f"\nwritten to {file}; train it with:\n  jaxscale train {file}")
    return 0


def _loads(config: TrainConfig, text: str) -> Loads:
    """Loads of experts from `--loads`.

    Raises:
      ConfigError: the model has no experts, or unlike ones, or the text is neither a distribution nor the folder of a
        run with loads.
    """
    from jaxscale.plan.expert_loads import Loads, loads_of, mixture_of
    from jaxscale.train import expert_load

    try:
        moe = mixture_of(config.model)
    except ConfigError as e:
        raise ConfigError(f"--loads: {e}") from None
    folder = local(text)
    if not folder.is_dir():
        return loads_of(text, moe.experts)
    steps = expert_load.read_experts(folder / expert_load.FILE)
    return Loads.counted({step: {n: at.load for n, at in layers.items()} for step, layers in steps.items()}, text)


def _serving(config: TrainConfig, args: argparse.Namespace) -> Serving:
    from jaxscale.infer.cache import Paged
    from jaxscale.plan import serving

    sizes = {"rows": 8 if args.rows is None else args.rows, "length": args.length}
    return serving(config, args.topology, Paged(**cache_of(args)), weights=weights_of(args, []), **sizes)


def _check(args: argparse.Namespace) -> None:
    """Raise `ConfigError` for options that exclude each other."""
    for name in ("weights", "kv_cache", "ring", "rows", "length"):
        if getattr(args, name) is not None and not args.serve:
            option = f"--{name.replace('_', '-')}"
            raise ConfigError(f"{option} is for plans of serving; add --serve, or leave it out")
    if args.serve:
        others = "measured search tokens price watts write compiles compare fit-on days budget analytic loads"
        for name in [*others.split(), *(name for name, _, _ in RESTARTS)]:
            if getattr(args, name.replace("-", "_")) not in (None, False):
                raise ConfigError(f"--serve plans generation; leave out --{name}")
    if args.measured:
        return
    if args.topology is None and args.fit_on is None:  # argparse's check would hide the message for a misspelt option
        raise ConfigError("name the hardware, such as --topology v5p:4x4x4")
    if args.compare is not None and args.search:
        raise ConfigError("--compare plans two configs as they are; leave out --search")
    limited = args.days is not None or args.budget is not None
    if args.fit_on is None:
        if limited:
            raise ConfigError("--days and --budget choose hardware; name chips, such as --fit-on v5e,v5p")
        return
    for name in ("topology", "search", "compare", "watts", "compiles", "write", "loads"):
        if getattr(args, name) not in (None, False):
            raise ConfigError(f"--fit-on names the hardware and plans analytically; leave out --{name}")
    if limited != (args.tokens is not None):
        raise ConfigError("--fit-on chooses hardware by --tokens and either --days or --budget; give both or neither")
    if not limited and "," in args.fit_on:
        raise ConfigError(
            f"--fit-on {args.fit_on}: to choose between several chips, give --tokens and --days or --budget"
        )


def _measured(path: Path | None, args: argparse.Namespace, bindings: list[str]) -> Measured:
    """The measured step of a run, for `--measured`.

    Raises:
      ConfigError: no run is named, or an option would change the run.
    """
    from jaxscale import load as load_run
    from jaxscale.plan import measured

    if path is None or path.is_file():
        raise ConfigError(
            f"--measured reads the profile of a run; name its folder{'' if path is None else f', not {path}'}"
        )
    changes = [f"--gin.{bindings[0].partition(' =')[0]}"] if bindings else []
    others = (
        "mesh pipeline devices distributed tokens price watts search write compiles compare fit-on days budget loads"
    )
    names = [*others.split(), *(name for name, _, _ in RESTARTS)]
    changes += [f"--{name}" for name in names if getattr(args, name.replace("-", "_")) not in (None, False)]
    if changes:
        raise ConfigError(f"--measured takes a run as it was trained; leave out {changes[0]}")
    return measured(load_run(str(path)), args.topology, compile="never" if args.analytic else "auto")


def _price(option: str, text: str | None) -> float | None:
    try:
        return None if text is None else float(text)
    except ValueError:
        raise ConfigError(f"{option} {text}: must be a number, the price of one device for an hour") from None


def _prices(text: str | None, names: Sequence[str]) -> dict[str, float]:
    """Prices by chip: `v5e=1.2,v5p=4.2`, or a number if there is one chip."""
    from jaxscale.plan.fit_on import chip_name

    kinds = {chip_name(name) for name in names}
    if text is None or ("=" not in text and len(kinds) == 1):
        price = _price("--price", text)
        return {} if price is None else dict.fromkeys(kinds, price)
    prices: dict[str, float] = {}
    for part in text.split(","):
        name, equals, value = part.partition("=")
        if not equals:
            raise ConfigError(f"--price {text}: write a price for each chip, such as v5e=1.2,v5p=4.2")
        price = _price(f"--price {name}=", value)
        assert price is not None
        prices[chip_name(name)] = price
    return prices


def _load(path: Path | None, args: argparse.Namespace, bindings: list[str]) -> TrainConfig:
    """The settings of a gin file, or of the run in a folder."""
    return load(path / "config.gin" if path is not None and path.is_dir() else None, args, bindings)


def _restarts(args: argparse.Namespace) -> Restarts:
    """Failure rate and checkpoint settings of the options."""
    from jaxscale.plan import Restarts

    names = {
        "device_mtbf": ("device_mtbf", 1.0),
        "restart_time": ("restart_time", 60.0),
        "write_speed": ("write_bandwidth", 1e9),
        "save_every": ("save_every", 60.0),
    }
    options = {name: value for name in names if (value := getattr(args, name)) is not None}
    for name, value in options.items():
        option = f"--{name.replace('_', '-')}"
        if args.tokens is None:
            raise ConfigError(f"{option} changes the time to train on a number of tokens; give --tokens, such as 1T")
        if not value > 0:
            raise ConfigError(f"{option} {value:g}: must be above 0")
    return Restarts(**{names[name][0]: value * names[name][1] for name, value in options.items()})


@contextlib.contextmanager
def progress() -> Iterator[Tell]:
    """Print the progress of a search to stderr: one live line on a terminal, elsewhere a line every few seconds."""
    from rich.console import Console

    console, last, best_yet = Console(stderr=True, highlight=False), (0.0, ""), ""

    def line(what: str, done: int, total: int, best: str) -> str:
        nonlocal best_yet
        best_yet = best or best_yet
        return f"{what} {done:,}" + (f" of {total:,}" if total else "") + (f"; best so far {best}" if best else "")

    def say(what: str, done: int, total: int, best: str = "") -> None:
        nonlocal last
        text, now = line(what, done, total, best), time.monotonic()
        if now - last[0] > EVERY or what != last[1]:
            last = now, what
            print(text, file=sys.stderr, flush=True)

    try:
        if console.is_terminal:
            with console.status("laying out") as status:
                yield lambda what, done, total, best="": status.update(line(what, done, total, best))
        else:
            yield say
    except KeyboardInterrupt:
        if best_yet:
            print(f"the best so far: {best_yet}; no file was written", file=sys.stderr)
        raise


def show(result: Any, as_json: bool) -> None:
    """Print the result of a command, as JSON or as tables."""
    from rich.console import Console

    from jaxscale.units import WIDTH

    if as_json:
        print(json.dumps(result.to_json(), indent=2))
    else:
        Console(highlight=False, width=None if sys.stdout.isatty() else WIDTH).print(result)
