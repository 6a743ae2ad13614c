"""`jaxscale laws`: fits scaling laws to a sweep's table, and predicts from them."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxscale.commands.shared import TEXT, accept_argument, import_argument, no_bindings
from jaxscale.errors import ConfigError, near

if TYPE_CHECKING:
    from jaxscale.plan.laws import HeldOut, Law, Table

NAMES = ("chinchilla", "isoflop", "farseer", "steplaw", "ood")
"""The keys of `jaxscale.plan.laws.LAWS`, which is slow to import for `--help`."""


def add(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "laws",
        help="fit scaling laws to a sweep, and predict from them",
        description="Fits Chinchilla's and Farseer's loss surfaces, isoFLOP minima, the Step Law of learning rate and "
        "batch size, and\nexponents in and out of distribution to a sweep's results.csv, with bootstrap intervals and "
        "errors on held-out runs.\nThen predicts from a fitted law.\n\n"
        "  jaxscale laws fit runs/scaling --law chinchilla,farseer --hold-out parameters --out laws\n"
        "  jaxscale laws fit results.csv --law steplaw --set lr=train.lr --json\n"
        "  jaxscale laws predict laws/chinchilla.json --parameters 1e9 --tokens 20e9\n"
        "  jaxscale laws predict laws/chinchilla.json --flops 1e21",
        formatter_class=TEXT,
    )
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    fit = actions.add_parser("fit", help="fit laws to a table", formatter_class=TEXT)
    import_argument(fit)
    accept_argument(fit)
    fit.add_argument("table", metavar="SWEEP|CSV", help="a sweep's folder, or a CSV with a row per run")
    names = ", ".join(NAMES)
    fit.add_argument("--law", metavar="NAME,...", default="chinchilla", help=f"some of {names} (default: %(default)s)")
    fit.add_argument("--body", action="store_true", help="do not count embeddings and the output head in N")
    fit.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a setting of the laws that have it: loss=loss, lr=train.lr, delta=0.01, of=tokens",
    )
    fit.add_argument(
        "--hold-out",
        metavar="COLUMN[:COUNT]",
        help="also fit without the runs with the COUNT (default 1) largest values of a column; print the error on them",
    )
    fit.add_argument("--samples", type=int, default=200, metavar="N", help="bootstrap samples (default: 200)")
    fit.add_argument("--level", type=float, default=0.9, metavar="P", help="level of the intervals (default: 0.9)")
    fit.add_argument("--out", metavar="DIR", help="folder to write LAW.json, which predict reads, and LAW.png")
    fit.add_argument("--json", action="store_true", help="print JSON")
    fit.set_defaults(run_command=run_fit)
    predict = actions.add_parser("predict", help="predict from a fitted law", formatter_class=TEXT)
    predict.add_argument("fit", metavar="FIT.json", help="a file that fit --out wrote")
    for name, metavar in (("parameters", "N"), ("tokens", "D"), ("flops", "C")):
        predict.add_argument(f"--{name}", metavar=metavar, help="such as 1e9, 300M or 1.5T")
    predict.add_argument(
        "--six-nd", action="store_true", help="take 6 N D as the FLOPs of training, not the fitted runs' own counts"
    )
    predict.add_argument("--json", action="store_true", help="print JSON")
    predict.set_defaults(run_command=run_predict)


def run_fit(args: argparse.Namespace, bindings: list[str]) -> int:
    """Fit laws, print them and write their files; returns the exit code 0."""
    no_bindings(args, bindings)
    from jaxscale.plan.laws import held_out, read_table
    from jaxscale.train.run import read_config

    laws = _laws(args)
    loss = next((law.loss for law in laws if hasattr(law, "loss")), "eval_loss")
    table = read_table(args.table, loss=loss, body=read_config if args.body else None)
    if args.samples < 0:
        raise ConfigError(f"--samples {args.samples}: use 0 for no intervals, or a number such as 200")
    out = None if args.out is None else Path(args.out)
    if out is not None and not out.parent.is_dir():
        raise ConfigError(f"--out {out}: there is no folder {out.parent}")
    if out is not None and out.exists() and not out.is_dir():
        raise ConfigError(f"--out {out} is a file; name a folder")
    fits = [law.fit(table, samples=args.samples, level=args.level) for law in laws]
    judged = [] if args.hold_out is None else [held_out(law, table, *_hold_out(args.hold_out)) for law in laws]
    if out is not None:
        out.mkdir(exist_ok=True)
        for fit in fits:
            fit.write(out / f"{fit.law.name}.json")
            fit.law.picture(fit, table).savefig(out / f"{fit.law.name}.png")
    if args.json:
        rows = [fit.to_json() | {"fitted_errors": _means(fit.errors(table))} for fit in fits]
        for row, other in zip(rows, judged, strict=False):
            row["held_out"] = {"column": other.column, "above": other.above, "runs": other.judged, "error": other.mean}
        print(json.dumps(rows, indent=2))
    else:
        _show(fits, judged, table, out)
    return 0


def run_predict(args: argparse.Namespace, bindings: list[str]) -> int:
    """Print the predictions of a fitted law; returns the exit code 0."""
    no_bindings(args, bindings)
    from jaxscale.plan.laws import Cost, load_fit, optimum
    from jaxscale.plan.laws.surface import Surface
    from jaxscale.plan.laws.tables import optimum_table, prediction_table
    from jaxscale.plan.planner import count_of

    fit = load_fit(args.fit)
    sizes = {n: count_of(getattr(args, n)) for n in ("parameters", "tokens", "flops") if getattr(args, n) is not None}
    if not sizes:
        raise ConfigError("name the size to predict for: --parameters N --tokens D, or --flops C")
    if isinstance(fit.law, Surface) and sizes.keys() == {"flops"}:
        best = optimum(fit, sizes["flops"], Cost() if args.six_nd else None)
        table, fields = optimum_table(fit, best), best.to_json()
        notes = fit.beyond(**sizes, parameters=best.parameters.value, tokens=best.tokens.value)
    else:
        values = fit.predict(**sizes)
        place = ", ".join(f"{name} = {x:.4g}" for name, x in sizes.items())
        table = prediction_table(f"at {place}", fit, values)
        fields = {name: dataclasses.asdict(interval) for name, interval in values.items()}
        notes = fit.beyond(**sizes)
    if args.json:
        print(json.dumps(fields | {"notes": notes}, indent=2))
    else:
        console = _console()
        console.print(table)
        for note in notes:
            console.print(f"warning: {note}")
    return 0


def _laws(args: argparse.Namespace) -> list[Law]:
    """The laws of `--law`, with the settings of `--set`."""
    from jaxscale.plan.laws import BODY, LAWS

    names = [name.strip() for name in args.law.split(",")]
    for name in names:
        if name not in LAWS:
            raise ConfigError(f"there is no law '{name}'{near(name, LAWS)}")
    fields = {name: {f.name: f for f in dataclasses.fields(LAWS[name])} for name in names}
    settings: dict[str, Any] = {"parameters": BODY} if args.body else {}
    for setting in args.set:
        name, _, text = setting.partition("=")
        known = {field for of in fields.values() for field in of}
        if name not in known:
            raise ConfigError(f"--set {setting}: no law here has a setting '{name}'{near(name, known)}")
        settings[name] = _value(text)
        for default in (of[name].default for of in fields.values() if name in of):
            if isinstance(default, str | bool | float) and type(settings[name]) is not type(default):
                raise ConfigError(f"--set {setting}: give {_KINDS[type(default)]}, such as {name}={default}")
    return [LAWS[name](**{k: v for k, v in settings.items() if k in fields[name]}) for name in names]


_KINDS: dict[type, str] = {float: "a number", bool: "True or False", str: "a column or a word"}


def _value(text: str) -> Any:
    """Parse a setting: a number, True or False, a tuple of words, or a word."""
    if text in ("True", "False"):
        return text == "True"
    try:
        return float(text)
    except ValueError:
        return tuple(map(_value, text.split(","))) if "," in text else text


def _hold_out(text: str) -> tuple[str, int]:
    column, _, count = text.partition(":")
    if count and not count.isdigit():
        raise ConfigError(f"--hold-out {text} is not of the form COLUMN or COLUMN:COUNT, such as parameters:2")

    return column, int(count or 1)


def _means(errors: dict[str, Any]) -> dict[str, float]:
    return {name: float(abs(e).mean()) for name, e in errors.items()}


def _show(fits: list[Any], judged: list[HeldOut], table: Table, out: Path | None) -> None:
    from jaxscale.plan.laws.tables import error_table, held_out_words

    console = _console()
    rows = []
    for i, fit in enumerate(fits):
        console.print(fit)
        rows.append((fit.law.name, "the runs it is fitted on", len(table), fit.errors(table)))
        if judged:
            rows.append((fit.law.name, held_out_words(judged[i]), judged[i].judged, judged[i].errors))
    console.print(error_table(rows))
    if out is not None:
        console.print(f"written to {out}: {', '.join(f'{f.law.name}.json, {f.law.name}.png' for f in fits)}")


def _console() -> Any:
    from rich.console import Console

    from jaxscale.units import WIDTH

    return Console(highlight=False, width=None if sys.stdout.isatty() else WIDTH)
