"""`jaxscale settings`: the names that a config may use, and the settings of each."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import importlib
import json
import re
from typing import TYPE_CHECKING, Any

from jaxscale.commands.shared import TEXT, import_argument, no_bindings
from jaxscale.errors import ConfigError, near
from jaxscale.other_names import fold, same

if TYPE_CHECKING:
    from jaxscale.config_docs import Described, Setting

REGISTERING = ("train", "sweep", "rl", "infer.engine", "infer.cache", "infer.sampling", "convert.recipes")
"""Packages whose import registers every name of jaxscale's own."""


def add(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "settings",
        help="look up what a config may set: type, default, meaning",
        description="Prints the type, the default and the meaning of settings, as the docstrings have them. Without a "
        "name, lists every name that a config may use.\n\n"
        "  jaxscale settings\n"
        "  jaxscale settings AdamW\n"
        "  jaxscale settings train.lr",
        formatter_class=TEXT,
    )
    parser.add_argument("name", nargs="?", metavar="NAME", help="a name, as AdamW, or one of its settings, as train.lr")
    import_argument(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run_command=run)


def run(args: argparse.Namespace, bindings: list[str]) -> int:
    """Print the look-up.

    Raises:
        ConfigError: There is no such name or setting.
    """
    no_bindings(args, bindings)
    register_all()
    from rich.console import Console

    from jaxscale.config_docs import described

    console = Console()
    if args.name is None:
        if args.json:
            names = [{"name": item.name, "family": item.family, "summary": item.summary} for item in described()]
            print(json.dumps(names, indent=1))
        else:
            _list(described(), console)
        return 0
    item, setting = look_up(args.name)
    if args.json:
        print(json.dumps(dataclasses.asdict(setting or item), indent=1))
    elif setting is not None:
        _settings(item, (setting,), console)
    else:
        _show(item, console)
    return 0


def register_all() -> None:
    """Import every package of jaxscale that registers names, so that the look-up is complete."""
    for package in REGISTERING:
        importlib.import_module(f"jaxscale.{package}")


def look_up(name: str) -> tuple[Described, Setting | None]:
    """What a name or a setting's full name stands for.

    Args:
        name: As a config writes it: `AdamW`, `@AdamW()`, `train.lr`, `scope/Rotary.theta`.

    Returns:
        The registered object, and the setting where the name has one.

    Raises:
        ConfigError: There is no such name or setting; the message has the nearest ones.
    """
    from jaxscale.config_docs import describe
    from jaxscale.config_registry import registered

    bare = re.sub(r"^@|\(\)$", "", name.strip()).rpartition("/")[2]
    of, _, field = bare.partition(".")
    if not field and of not in registered():
        close = _near(of)
        hint = f"; did you mean {' or '.join(map(repr, close))}?" if close else "; `jaxscale settings` lists all names"
        raise ConfigError(f"there is no setting or registered name '{of}'{hint}")
    item = describe(of)
    if not field:
        return item, None
    by_name = {setting.name: setting for setting in item.settings}
    if field not in by_name:
        raise ConfigError(f"{of} has no setting '{field}'{near(field, by_name, bindings=True)}")
    return item, by_name[field]


def _near(word: str) -> list[str]:
    """Up to three registered names or settings that a word may mean, the likeliest only."""
    from jaxscale.config_docs import describe, described

    train = [setting.name for setting in describe("train").settings]
    meant = [name if "." in name else f"train.{name}" for name in same(word, train, bindings=True)]
    items = described()
    settings = [f"{item.name}.{s.name}" for item in items for s in item.settings if not s.name.startswith("*")]
    exact = [name for name in settings if fold(name.partition(".")[2]) == fold(word)]
    if meant or exact:
        return list(dict.fromkeys([*meant, *exact]))[:3]
    ends: dict[str, list[str]] = {}
    for name in [*(item.name for item in items), *settings]:
        ends.setdefault(name.rpartition(".")[2], []).append(name)
    matches = same(word, ends) or difflib.get_close_matches(word, ends, 3, 0.6)
    return [name for match in matches for name in ends[match]][:3]


def _list(items: list[Described], console: Any) -> None:
    from rich.table import Table
    from rich.text import Text

    for family in dict.fromkeys(item.family for item in items):
        table = Table.grid(padding=(0, 2))
        for item in items:
            if item.family == family:
                table.add_row(Text(item.name), Text(item.summary))
        console.print(Text(family, style="bold"))
        console.print(table)
        console.print()
    console.print(Text("jaxscale settings NAME prints the settings of one."))


def _show(item: Described, console: Any) -> None:
    from rich.text import Text

    console.print(Text(item.name, style="bold"), Text(f"({item.family}; {item.path})"))
    console.print(Text(item.summary))
    if item.description:
        console.print(Text(f"\n{item.description}"))
    console.print()
    _settings(item, item.settings, console)
    for error, when in item.raises.items():
        console.print(Text(f"raises {error}: {when}" if error else when))


def _settings(item: Described, settings: tuple[Setting, ...], console: Any) -> None:
    from rich.padding import Padding
    from rich.text import Text

    if not settings:
        console.print(Text(f"{item.name} has no settings."))
    for setting in settings:
        default = "required" if setting.default is None else f"= {setting.default}" if setting.default else ""
        line = Text(setting.name if setting.name.startswith("*") else f"{item.name}.{setting.name}", style="bold")
        console.print(line, Text(f"{default}  ({setting.type})" if setting.type else default))
        if setting.meaning:
            console.print(Padding(Text(setting.meaning), (0, 0, 0, 4)))
        if setting.choices:
            console.print(Padding(Text(f"one of: {', '.join(setting.choices)}"), (0, 0, 0, 4)))
