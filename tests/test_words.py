"""Names in the code are the field's: the words of an old private dialect do not come back."""

from __future__ import annotations

import ast
import collections
import pathlib

ROOT = pathlib.Path(__file__).resolve().parent.parent

DIALECT = {
    "told": "inputs, settings, kwargs",
    "given": "what it is: arguments, names",
    "found": "what it is: match, result, path",
    "kept": "saved, remaining",
    "there": "placed, existing",
    "how": "config, settings, options",
    "_how": "config, settings, options",
    "How": "Config, Settings, Options",
    "_How": "Config, Settings, Options",
    "said": "message, warned",
    "says": "message",
    "asked": "requested",
    "wanted": "required, expected",
    "taken": "used, occupied",
    "shown": "displayed, rows",
    "whoever": "what it is",
    "room": "capacity, space, package",
    "rooms": "packages",
    "stroke": "what it is",
}
"""Words that are not used as names -> what to use in their place (see docs/glossary.md)."""


def names_of(tree: ast.AST) -> collections.Counter[str]:
    """How often each identifier is defined in a module: variables, parameters, functions, classes and attributes."""
    names: collections.Counter[str] = collections.Counter()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names[node.id] += 1
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            names[node.attr] += 1
        elif isinstance(node, ast.arg):
            names[node.arg] += 1
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names[node.name] += 1
    return names


def test_no_name_is_of_the_dialect() -> None:
    wrong = []
    for folder in ("jaxscale", "pallas_kernels", "experiments", "tests", "notebooks", "docs"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for name in sorted(names_of(ast.parse(path.read_text())).keys() & DIALECT.keys()):
                wrong.append(f"{path.relative_to(ROOT)}: '{name}'; write {DIALECT[name]}")
    assert wrong == []


def test_the_walk_sees_every_kind_of_definition() -> None:
    source = "def told(given, *, kept=1):\n    found = 1\n    self.said = 2\n    for there in x: ...\nclass How: ..."
    assert names_of(ast.parse(source)).keys() & DIALECT.keys() == {
        "told",
        "given",
        "kept",
        "found",
        "said",
        "there",
        "How",
    }
