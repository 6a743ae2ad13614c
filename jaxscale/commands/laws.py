"""`jaxscale laws`: fits scaling laws to a sweep's table, and asks fitted ones."""

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
"""Of `jaxscale.plan.laws.LAWS`, which takes too long to import for a help text."""


def add(commands: Any) -> None:
    """Adds the command."""
    parser = commands.add_parser(
        "laws",
        help="fit scaling laws to a sweep, and predict from them",
        description="Fits Chinchilla's and Farseer's loss surfaces, isoFLOP valleys, the Step Law of learning rate and "
        "batch, and exponents in and out of distribution to a sweep's results.csv, with bootstrap intervals and the "
        "error on runs that were held out; and answers from what was fitted.\n\n"
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
    known = ", ".join(NAMES)
    fit.add_argument("--law", metavar="NAME,...", default="chinchilla", help=f"which of {known} (default: %(default)s)")
    fit.add_argument("--body", action="store_true", help="N leaves out embeddings and the output head")
    fit.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a setting of the laws that have it, as loss=loss, lr=train.lr, delta=0.01, of=tokens",
    )
    fit.add_argument(
        "--hold-out",
        metavar="COLUMN[:COUNT]",
        help="also fit without the COUNT (1) largest values of a column, and tell the error on their runs",
    )
    fit.add_argument("--samples", type=int, default=200, metavar="N", help="of the bootstrap (default: 200)")
    fit.add_argument("--level", type=float, default=0.9, metavar="P", help="of the intervals (default: 0.9)")
    fit.add_argument("--out", metavar="DIR", help="write LAW.json, which predict reads, and LAW.png")
    fit.add_argument("--json", action="store_true", help="print JSON")
    fit.set_defaults(run_command=run_fit)
    predict = actions.add_parser("predict", help="ask a fitted law", formatter_class=TEXT)
    predict.add_argument("fit", metavar="FIT.json", help="what fit --out wrote")
    for name, what in (("parameters", "N"), ("tokens", "D"), ("flops", "C")):
        predict.add_argument(f"--{name}", metavar=what, help="as 1e9, 300M or 1.5T")
    predict.add_argument(
        "--six-nd", action="store_true", help="a budget pays 6 N D, not what the fitted runs' models count"
    )
    predict.add_argument("--json", action="store_true", help="print JSON")
    predict.set_defaults(run_command=run_predict)


def run_fit(args: argparse.Namespace, bindings: list[str]) -> int:
    """`laws fit`."""
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
        found = [fit.to_json() | {"fitted_errors": _means(fit.errors(table))} for fit in fits]
        for one, other in zip(found, judged, strict=False):
            one["held_out"] = {"column": other.column, "above": other.above, "runs": other.judged, "error": other.mean}
        print(json.dumps(found, indent=2))
    else:
        _show(fits, judged, table, out)
    return 0


def run_predict(args: argparse.Namespace, bindings: list[str]) -> int:
    """`laws predict`."""
    no_bindings(args, bindings)
    from jaxscale.plan.laws import Cost, load_fit, optimum
    from jaxscale.plan.laws.surface import Surface
    from jaxscale.plan.laws.tables import optimum_table, prediction_table
    from jaxscale.plan.planner import count_of

    fit = load_fit(args.fit)
    given = {n: count_of(getattr(args, n)) for n in ("parameters", "tokens", "flops") if getattr(args, n) is not None}
    if not given:
        raise ConfigError("ask for something: --parameters N --tokens D, or --flops C")
    if isinstance(fit.law, Surface) and given.keys() == {"flops"}:
        best = optimum(fit, given["flops"], Cost() if args.six_nd else None)
        shown, found = optimum_table(fit, best), best.to_json()
        far = fit.beyond(**given, parameters=best.parameters.value, tokens=best.tokens.value)
    else:
        values = fit.predict(**given)
        places = ", ".join(f"{name} = {x:.4g}" for name, x in given.items())
        shown, found = (
            prediction_table(f"at {places}", fit, values),
            {n: dataclasses.asdict(i) for n, i in values.items()},
        )
        far = fit.beyond(**given)
    if args.json:
        print(json.dumps(found | {"notes": far}, indent=2))
    else:
        console = _console()
        console.print(shown)
        for sentence in far:
            console.print(f"warning: {sentence}")
    return 0


def _laws(args: argparse.Namespace) -> list[Law]:
    """Those that `--law` names, with their settings."""
    from jaxscale.plan.laws import BODY, LAWS

    names = [name.strip() for name in args.law.split(",")]
    for name in names:
        if name not in LAWS:
            raise ConfigError(f"there is no law '{name}'{near(name, LAWS)}")
    fields = {name: {f.name: f for f in dataclasses.fields(LAWS[name])} for name in names}
    settings: dict[str, Any] = {"parameters": BODY} if args.body else {}
    for given in args.set:
        name, _, text = given.partition("=")
        known = {field for of in fields.values() for field in of}
        if name not in known:
            raise ConfigError(f"--set {given}: no law here has a setting '{name}'{near(name, known)}")
        settings[name] = _value(text)
        for default in (of[name].default for of in fields.values() if name in of):
            if isinstance(default, str | bool | float) and type(settings[name]) is not type(default):
                raise ConfigError(f"--set {given}: give {_KINDS[type(default)]}, such as {name}={default}")
    return [LAWS[name](**{k: v for k, v in settings.items() if k in fields[name]}) for name in names]


_KINDS: dict[type, str] = {float: "a number", bool: "True or False", str: "a column or a word"}


def _value(text: str) -> Any:
    """A number, a truth, several words, or a word."""
    if text in ("True", "False"):
        return text == "True"
    try:
        return float(text)
    except ValueError:
        return tuple(map(_value, text.split(","))) if "," in text else text


def _hold_out(text: str) -> tuple[str, int]:
    column, _, count = text.partition(":")
    if count and not count.isdigit():
        raise ConfigError(f"--hold-out {text} is not of the form COLUMN or COLUMN:COUNT, as parameters:2")
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
