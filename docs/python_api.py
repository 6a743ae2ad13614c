"""The pages of the Python API: one for each package, reStructuredText with autodoc's directives."""

from __future__ import annotations

import ast
import dataclasses
import functools
import importlib
import inspect
import re
import sys
import types
from collections.abc import Mapping
from pathlib import Path

import jaxscale
import pallas_kernels
from jaxscale.config_docs import parse, words
from jaxscale.config_types import parameters

ROOMS = ("jaxscale", *(f"jaxscale.{name}" for name in jaxscale._ROOMS), "pallas_kernels")
OPS = tuple(
    f"pallas_kernels.{p.parent.name}" for p in sorted(Path(pallas_kernels.__file__).parent.glob("*/__init__.py"))
)


def api() -> dict[str, str]:
    """A page for each package, with what its `__all__` names."""
    modules = {name: importlib.import_module(name) for name in (*ROOMS, *OPS)}
    index = "Python API\n==========\n\n.. list-table::\n   :header-rows: 1\n\n   * - package\n     - what it is for\n"
    written = {}
    for name, module in modules.items():
        index += f"   * - :doc:`{name} <api/{name}>`\n     - {rst(parse(module.__doc__).summary)}\n"
        written[f"reference/api/{name}.rst"] = _package(name, module, modules)
    index += "\n.. toctree::\n   :hidden:\n   :titlesonly:\n\n" + "".join(f"   api/{name}\n" for name in modules)
    return {"reference/api.rst": index, **written}


def rst(text: str) -> str:
    """Prose of a docstring as reStructuredText: what it has outside of `code` is no markup."""
    parts = re.split(r"(`+[^`]*`+)", text)
    for i, part in enumerate(parts):
        if i % 2 == 0:
            parts[i] = re.sub(r"([*|\\]|(?<=\w)_(?!\w))", r"\\\1", part)
        else:  # a letter beside code has to be kept apart: `Array`s
            before, after = re.search(r"\w$", parts[i - 1]), re.match(r"\w", parts[i + 1])
            parts[i] = "\\ " * bool(before) + part + "\\ " * bool(after)
    return "".join(parts)


def public(name: str, module: types.ModuleType) -> list[str]:
    """Public names of a package: `__all__`, or what a module without one defines."""
    listed = getattr(module, "__all__", None)
    if listed is None:
        listed = [n for n, o in vars(module).items() if getattr(o, "__module__", None) == name and n[0] != "_"]
    return [n for n in listed if not n.startswith("_") and not isinstance(getattr(module, n), types.ModuleType)]


def _package(name: str, module: types.ModuleType, modules: Mapping[str, types.ModuleType]) -> str:
    """Summary table, then each name. What belongs to another package of the list is documented there."""
    names = sorted(public(name, module), key=str.lower)
    homes = {
        n: other
        for other, m in modules.items()
        for n in public(other, m)
        if n in names
        and other not in ("jaxscale", name)
        and getattr(m, n) is getattr(module, n)
        and _below(getattr(m, n), other)
    }
    entries, rows = [], []
    for each in names:
        obj = getattr(module, each)
        home = homes.get(each, name)
        what = parse(obj.__doc__).summary if _has_docstring(obj) else _constant(obj, each)
        rows.append(f"   * - :py:obj:`{each} <{home}.{each}>`\n     - {rst(what)}\n")
        if home == name:
            entries.append(_entry(name, each, obj, what))
    doc = inspect.cleandoc(module.__doc__ or "")
    text = f"{name}\n{'=' * len(name)}\n\n.. py:module:: {name}\n\n{literal_blocks(doc)}\n\n"
    if rows:
        text += ".. list-table::\n   :header-rows: 1\n   :class: api-summary\n\n   * - name\n     - what it is\n"
    return text + "".join(rows) + "\n" + "\n".join(entries)


def _below(obj: object, package: str) -> bool:
    return f"{getattr(obj, '__module__', '')}.".startswith(f"{package}.")


def _entry(package: str, name: str, obj: object, what: str) -> str:
    if inspect.isclass(obj):
        return f".. autoclass:: {package}.{name}\n   :members:\n   :member-order: bysource\n"
    if _has_docstring(obj):
        return f".. autofunction:: {package}.{name}\n"
    value = repr(obj)
    option = f"   :value: {value}\n" if len(value) < 100 and " at 0x" not in value and "\n" not in value else ""
    return f".. py:data:: {package}.{name}\n{option}\n   {rst(what)}\n"


def _constant(obj: object, name: str) -> str:
    """The docstring below a constant, in whichever module it stands."""
    for module in [m for n, m in sorted(sys.modules.items()) if n.startswith(("jaxscale", "pallas_kernels"))]:
        if vars(module).get(name) is obj and name in constants(module):
            return parse(constants(module)[name]).summary
    return ""


def _has_docstring(obj: object) -> bool:
    """Whether an object is a class or a function; of any other, the docstring is that of its type."""
    return callable(obj) and hasattr(obj, "__name__") and not isinstance(obj, types.GenericAlias)


def literal_blocks(doc: str) -> str:
    """A docstring with its code marked as reStructuredText has it: a block that is indented behind an empty line.

    Sections (`Args:`) are indented too and stay as they are.
    """
    lines, out, inside, section = doc.splitlines(), [], False, False
    for i, line in enumerate(lines):
        depth = len(line) - len(line.lstrip())
        if line.strip() and depth == 0:
            inside, section = False, bool(re.fullmatch(r"[A-Z]\w+:", line))
        starts = line.strip() and depth >= 2 and not inside and not section and i > 0 and not lines[i - 1].strip()
        if starts and any(out):
            out += ["::", ""]
            inside = True
        entry = re.match(r"\s+\*{0,2}\w+(, \*{0,2}\w+)*( \([^)]*\))?:", line)
        names = entry[0] if entry and section else ""  # napoleon escapes these
        out.append(line if inside else names + rst(line[len(names) :]))
    return "\n".join(out)


def class_signature(obj: object) -> str | None:
    """The constructor's signature of a class that Python's `inspect` shows badly; `None` for anything else.

    These are dataclasses, whose defaults are written as `AdamW()`, and classes whose metaclass has a `__call__` that
    hides the constructor (Flax modules).
    """
    if not isinstance(obj, type):
        return None
    if not dataclasses.is_dataclass(obj) and type(obj).__call__ is type.__call__:
        return None
    fields = {field.name: field for field in dataclasses.fields(obj)} if dataclasses.is_dataclass(obj) else {}
    each, named = [], False
    for name, parameter in parameters(obj).items():
        default = parameter.default
        if name in fields and fields[name].default_factory is not dataclasses.MISSING:
            default = fields[name].default_factory()  # type: ignore[misc]
        if parameter.kind is parameter.KEYWORD_ONLY and not named:
            each.append("*")
        named = named or parameter.kind in (parameter.KEYWORD_ONLY, parameter.VAR_POSITIONAL)
        text = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "") + name
        text += f": {parameter.annotation}" if isinstance(parameter.annotation, str) else ""
        each.append(text if default is parameter.empty else f"{text} = {words(default).replace('@', '')}")
    return f"({', '.join(each)})"


@functools.cache
def constants(module: types.ModuleType) -> dict[str, str]:
    """Module-level names with a docstring below them -> that docstring."""
    body = ast.parse(inspect.getsource(module)).body
    texts = {}
    for node, after in zip(body, body[1:], strict=False):
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        if isinstance(target, ast.Name) and isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            texts[target.id] = inspect.cleandoc(str(after.value.value))
    return texts
