"""The commands and bindings in hand-written pages exist (tests/test_links.py checks their links)."""

from __future__ import annotations

import argparse
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from jaxscale import cli
from jaxscale.commands.settings import register_all
from jaxscale.config_docs import described

ROOT = Path(__file__).resolve().parents[1]
GENERATED = (
    "changelog results flash_attention_grid attention_bounds pallas_kernels "
    "compiled_configs studies reference notebooks"
).split()
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md"] + [
    page
    for page in sorted(ROOT.glob("docs/**/*.md"))
    if not {*page.relative_to(ROOT).parts, page.stem} & {*GENERATED, "_build"}
]
READERS_OWN = {"MyFormat", "MyRecurrence", "NAME"}
"""Names in examples that stand for the reader's own parts."""


def blocks(text: str) -> str:
    """The blocks of code, with continued lines joined."""
    return "\n".join(re.findall(r"^ *```.*?\n(.*?)^ *```", text, flags=re.S | re.M)).replace("\\\n", " ")


def prose(text: str) -> str:
    return re.sub(r"^ *```.*?^ *```", "", text, flags=re.S | re.M)


def commands() -> dict[str, argparse.ArgumentParser]:
    """Every command's parser; actions have names such as "checkpoint verify"."""

    def below(parser: argparse.ArgumentParser, prefix: str) -> Iterator[tuple[str, argparse.ArgumentParser]]:
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                for name, command in action.choices.items():
                    yield f"{prefix}{name}", command
                    yield from below(command, f"{prefix}{name} ")

    return dict(below(cli._parser(), ""))


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_commands_have_the_options_that_a_page_shows(page):
    known, wrong = commands(), []
    for line in re.split(r"\n|&&|\|\|", blocks(page.read_text())):
        words = re.sub(r"'[^']*'|\s#.*", "", line).split()
        if "jaxscale" not in words or words[0] in ("import", "from"):
            continue
        words = words[words.index("jaxscale") + 1 :]
        if words[:1] == ["launch"] and "--" in words:
            words = words[words.index("--") + 1 :]
        name = next((n for n in (" ".join(words[:2]), *words[:1]) if n in known), None)
        if name is None:
            wrong += [line] if words and words[0].isalpha() and words[0].islower() else []
            continue
        options = {option for action in known[name]._actions for option in action.option_strings}
        used = {word.split("=")[0] for word in words if word.startswith("--") and len(word) > 2}
        wrong += [f"{name} {option}" for option in used - options if not option.startswith("--gin.")]
    assert not wrong


def test_the_install_page_lists_every_extra():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    first = re.findall(r"^\| (`.*?) \|", (ROOT / "docs/start/install.md").read_text(), flags=re.M)
    assert {word for cell in first for word in re.findall("`(.*?)`", cell)} == {*project["optional-dependencies"]}


def test_bindings_in_pages_exist():
    register_all()
    settings = {item.name: {setting.name for setting in item.settings} for item in described()}
    wrong = []
    for page in PAGES:
        text = re.sub(r"^\$ .*", "", page.read_text(), flags=re.M)  # lines with a prompt show errors
        bindings = re.findall(r"^(?:# )?([\w/]+)\.(\w+) = ", blocks(text), flags=re.M)
        bindings += re.findall(r"`([\w/]+)\.(\w+) = [^`]*`", prose(text))
        bindings += re.findall(r"--gin\.([\w/]+)\.(\w+)=", text)
        for name, field in bindings:
            name = name.split("/")[-1]
            if name in settings and field not in settings[name]:
                wrong.append(f"{page.name}: {name}.{field}")
            elif name not in settings and name not in READERS_OWN and not name.islower():
                wrong.append(f"{page.name}: {name}")
    assert not wrong


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


def test_the_api_page_shows_the_constructor_of_flax_modules_and_dataclasses(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    from python_api import class_signature

    from jaxscale.nn import Embedding, QKNorm, RMSNorm

    assert class_signature(RMSNorm) == (
        "(width: int, *, axis: str = 'norm', eps: float = 1e-06, dtype: jnp.dtype = 'float32', "
        "param_dtype: jnp.dtype = 'float32')"
    )
    assert class_signature(QKNorm) == "(norm: Callable[..., nnx.Module] = RMSNorm, across_heads: bool = False)"
    assert "(rows: int, width: int, *, " in class_signature(Embedding) and "args" not in class_signature(Embedding)
    assert class_signature(str) is class_signature(len) is None
