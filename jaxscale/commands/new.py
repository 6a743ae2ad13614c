"""`jaxscale new`: writes an experiment to start from."""

from __future__ import annotations

import argparse
import importlib.util
import keyword
import re
import shlex
from importlib import resources
from pathlib import Path
from typing import Any

from jaxscale.commands.shared import TEXT, no_bindings, on_disk
from jaxscale.errors import ConfigError

TEMPLATES = {".py": "experiment.py", ".gin": "experiment.gin.txt", ".ipynb": "experiment.ipynb"}
"""File suffix -> file in `jaxscale/templates`; the template of the gin file is not a valid one."""
MODULE, CLASS = "NAME", "CLASS"
"""What the templates have in place of the module's name, and of the first part of names in gin."""


def add(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "new",
        help="write an experiment of your own to start from",
        description="Writes a folder with an experiment in one Python file (a model, an objective, a training step on "
        "any layout), a gin file that trains it with jaxscale's own loop, and a notebook. They run as they are.\n\n"
        "  jaxscale new my_study\n"
        "  cd my_study\n"
        "  python my_study.py\n"
        "  jaxscale train my_study.gin --devices 8",
        formatter_class=TEXT,
    )
    parser.add_argument("folder", metavar="DIR", help="where to write; its last part names the files")
    parser.set_defaults(run_command=run)


def run(args: argparse.Namespace, bindings: list[str]) -> int:
    """Write the files and print what to run next; returns the exit code 0."""
    no_bindings(args, bindings)
    folder = on_disk(args.folder)
    paths = write(folder)
    print("wrote " + ", ".join(str(path) for path in paths))
    print(f"next:\n  cd {shlex.quote(str(folder))}")
    print(f"  python {paths[0].name}\n  jaxscale train {paths[1].name} --devices 8")
    return 0


def write(folder: Path) -> list[Path]:
    """Write an experiment's three files.

    Args:
      folder: made if it does not exist. Its last part becomes the module's name, `-` and other signs as `_`.

    Returns:
      the Python file, the gin file and the notebook.

    Raises:
      ConfigError: the name is no module name or that of an installed module, or a file exists already. Nothing is
        written then.
    """
    name = re.sub(r"\W", "_", folder.resolve().name)
    if not name.isidentifier() or keyword.iskeyword(name):
        raise ConfigError(f"'{folder.resolve().name}' cannot name a Python module; choose another, such as 'my_study'")
    try:
        installed = importlib.util.find_spec(name)
        hides = installed is not None and installed.origin is not None
    except ValueError:  # `__main__`, which has no spec
        hides = True
    if hides:
        raise ConfigError(f"'{name}' is the name of an installed module, which it would hide; choose '{name}_study'")
    prefix = "".join(part[:1].upper() + part[1:] for part in name.split("_"))
    paths = [folder / f"{name}{suffix}" for suffix in TEMPLATES]
    existing = [path for path in paths if path.exists()]
    if existing or (folder.exists() and not folder.is_dir()):
        raise ConfigError(f"{(existing or [folder])[0]} exists already; name a new folder")
    templates = resources.files("jaxscale") / "templates"
    names, texts = {MODULE: name, CLASS: prefix}, {}
    for path in paths:
        template = (templates / TEMPLATES[path.suffix]).read_text(encoding="utf-8")
        texts[path] = re.sub(f"{MODULE}|{CLASS}", lambda match: names[match[0]], template)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path, text in texts.items():
            path.write_text(text, encoding="utf-8")
    except OSError as e:
        raise ConfigError(f"{folder} cannot be written: {e.strerror}; name another folder") from None
    return paths
