"""Ways in which somebody else's folder may be wrong: damaged bytes, and valid text with strange values."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

Undo = Callable[[], None]

EVIL: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, -(10**6), 10**6, 2**31, 2**53 + 1, 10**18, 10**400, 0.0, 0.5, -1.5, 1e308,
    float("nan"),
    float("inf"), -float("inf"), "", "a", "0", "-1", "nan", "../../etc/passwd", "/dev/zero", "\ud800", "$x^_{",
    "a\0b",
    "x" * 5000, "\n", [], {}, [None], [[]], [-1], [0] * 40, [10**12] * 3, ["a", 1], {"a": {"b": []}}, {"": ""},
)  # fmt: skip
"""Values that replace another."""

GIN = (
    "None", "True", "0", "-1", "1000000", "10**9", "1e999", "-1e999", "0.5", "''", "'a'", "'\\ud800'", "()",
    "(1,)", "[]",
    "{}", "{1: 2}", "@nothing()", "@AdamW", "@AdamW()", "@train()", "%nothing", "%a", "1, 2", "(", "'", "nan",
    "1 2", "{[]: 1}",
    "9" * 5000, "'" + "x" * 5000 + "'", "b'x'", "1j", "...", "lambda: 1", "@a/@b", "gin.REQUIRED", "%gin.REQUIRED",
    "[" * 3000 + "]" * 3000, "(" * 150 + ")" * 150, "-" * 3000 + "1", "{1: " * 3000 + "1" + "}" * 3000,
)  # fmt: skip
LINES = (
    "a = %a", "a = %b\nb = %a", "include 'config.gin'", "include '/dev/zero'", "import os", "from os import path",
    "import a.b.c", "train.nothing = 1", "nothing.x = 1", "train:", "train:\n  steps = 5", "=", "a b c", "\x00",
    "train.steps",
    "AdamW.b1 = [[[[[", "/train.steps = 1", "x/y/train.steps = 1", "train/x.steps = 1", "train.model = @train()",
    "\t\tx = 1",
)  # fmt: skip


def mutate(folder: Path, names: list[str], rng: random.Random, spare: Path) -> tuple[str, Undo]:
    """Change one file of a folder.

    Args:
      folder: the folder.
      names: files that may be changed.
      rng: random numbers that choose the change.
      spare: an unused path beside the folder.

    Returns:
      A description of the change, and a function that undoes it.
    """
    name = rng.choice(names)
    path = folder / name
    content = path.read_bytes()
    ways = [_bytes] * 3 + [_kind] + _TEXTS.get(path.suffix, []) * 8
    ways += [_header] * 8 if path.suffix == ".safetensors" else []
    change = rng.choice(ways)(path, rng)

    def undo() -> None:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
        path.write_bytes(content)

    return f"{name}: {change}", undo


# --- bytes, and things that are not files -----------------------------------------------------------------------------


def _bytes(path: Path, rng: random.Random) -> str:
    data = bytearray(path.read_bytes())
    at = rng.randrange(max(1, len(data)))
    end = min(len(data), at + rng.choice((1, 4, 64, 1000)))
    kind = rng.choice(("bit", "truncated", "cut", "twice", "noise", "zeros", "empty", "appended", "nested", "latin"))
    if kind == "bit":
        data[at] ^= 1 << rng.randrange(8)
    elif kind == "truncated":
        del data[at:]
    elif kind == "cut":
        del data[at:end]
    elif kind == "twice":
        data[at:at] = data[at:end]
    elif kind == "noise":
        data[at:end] = rng.randbytes(end - at)
    elif kind == "zeros":
        data[at:end] = bytes(end - at)
    elif kind == "empty":
        data.clear()
    elif kind == "appended":
        data += rng.randbytes(rng.choice((1, 8, 500)))
    elif kind == "nested":
        data[:] = rng.choice((b"[", b'{"a":', b"a = [", b"((")) * 3000
    else:
        data[at:end] = "é\u2028".encode("utf-16")
    path.write_bytes(bytes(data))
    return f"{kind} at {at}"


def _kind(path: Path, rng: random.Random) -> str:
    kind = rng.choice(("missing", "pipe", "folder", "device", "loop", "dangling", "elsewhere", "unreadable"))
    if kind == "unreadable":
        path.chmod(0)
        return kind
    path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind != "missing":
        to = {"device": "/dev/zero", "loop": path, "dangling": "/nowhere", "elsewhere": "/etc/hostname"}[kind]
        path.symlink_to(to)
    return kind


# --- JSON -------------------------------------------------------------------------------------------------------------


def changed_json(value: Any, rng: random.Random) -> tuple[str, str]:
    """Return a JSON text that differs from a value in one place, and a description of the difference."""
    value = json.loads(json.dumps(value))
    places = _places(value)
    if not places:
        return json.dumps(rng.choice(EVIL)), "other"
    holder, key = rng.choice(places)
    kind = rng.choice(("swap", "swap", "swap", "delete", "rename", "twice", "number", "nest", "copy", "add", "root"))
    mark = "\ue000"
    evil = rng.choice(EVIL)
    text = ""
    if kind == "root":
        return json.dumps(evil), f"all is {evil!r:.40}"
    if kind == "delete":
        del holder[key]
    elif kind == "rename" and isinstance(holder, dict):
        holder[f"{key}x" if rng.random() < 0.5 else ""] = holder.pop(key)
    elif kind == "twice" and isinstance(holder, dict):
        holder[mark] = evil
        text = json.dumps(value).replace(json.dumps(mark), json.dumps(key))
    elif kind == "number" and isinstance(holder[key], int | float) and not isinstance(holder[key], bool):
        factor = rng.choice((-1, 0, 2, 0.5, 10**6, 10**12, float("nan")))
        new = holder[key] * factor
        holder[key] = int(new) if isinstance(holder[key], int) and new == new and rng.random() < 0.7 else new
    elif kind == "nest":
        opening, closing = rng.choice((("[", "]"), ('{"a": ', "}")))
        holder[key] = mark
        deep = rng.choice((60, 150, 950, 3000, 100_000))
        text = json.dumps(value).replace(json.dumps(mark), opening * deep + "0" + closing * deep)
    elif kind == "copy":
        other, name = rng.choice(places)
        holder[key] = other[name]
        try:
            text = json.dumps(value)
        except ValueError:  # a value that contains itself
            holder[key] = 0
    elif kind == "add":
        target = holder if isinstance(holder, dict) else None
        if target is not None:
            target[rng.choice(("x", "", "a/b", "../x", "\ud800", "y" * 300))] = evil
        else:
            holder.insert(rng.randrange(len(holder) + 1), evil)
    else:
        kind = "swap"
        holder[key] = evil
    return text or json.dumps(value), f"{kind} {key!r:.40} {evil!r:.40}"


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Return every (container, key) in a value."""
    places: list[tuple[Any, Any]] = []
    todo = [value]
    while todo:
        one = todo.pop()
        keys = list(one) if isinstance(one, dict) else range(len(one)) if isinstance(one, list) else ()
        places += [(one, key) for key in keys]
        todo += [one[key] for key in keys]
    return places


def _json(path: Path, rng: random.Random) -> str:
    body, seal = _opened(path)
    text, change = changed_json(body, rng)
    if seal is None:
        path.write_text(text)
        return change
    try:
        path.write_text(seal(json.loads(text)))
    except (RecursionError, ValueError, TypeError):  # nested too deep, or not an object
        path.write_text(text)
    return f"sealed, {change}"


def _opened(path: Path) -> tuple[Any, Callable[[Any], str] | None]:
    """Return the value in a JSON file, and the function that seals another value; `None` where it has no seal."""
    from jaxscale import seals

    if path.name == "manifest.json":
        return json.loads(path.read_text())["body"], seals.sealed
    body, is_sealed = seals.open_json(path.read_bytes())
    return body, (lambda value: seals.seal_json(value, 2)) if is_sealed else None


def _lines(path: Path, rng: random.Random) -> str:
    lines = path.read_text().splitlines()
    at = rng.randrange(len(lines))
    kind = rng.choice(("change", "change", "change", "delete", "twice", "swap", "torn", "noise"))
    change = ""
    if kind == "change":
        lines[at], change = changed_json(json.loads(lines[at]), rng)
    elif kind == "delete":
        del lines[at]
    elif kind == "twice":
        lines.insert(at, lines[at])
    elif kind == "swap":
        lines[at], lines[-1] = lines[-1], lines[at]
    elif kind == "torn":
        lines[at] = lines[at][: len(lines[at]) // 2]
    else:
        lines.insert(at, json.dumps(rng.choice(EVIL)))
    path.write_text("\n".join(lines) + "\n")
    return f"line {at} {kind} {change}"


# --- gin, safetensors -------------------------------------------------------------------------------------------------


def _gin(path: Path, rng: random.Random) -> str:
    from jaxscale.seals import open_text, seal_text

    text, sealed = open_text(path.read_bytes())
    lines = text.splitlines()
    at = rng.choice([n for n, line in enumerate(lines) if " = " in line])
    name, _, value = lines[at].partition(" = ")
    kind = rng.choice(("value", "value", "value", "delete", "name", "again", "line", "scope"))
    new = rng.choice(GIN)
    if kind == "value":
        lines[at] = f"{name} = {new}"
    elif kind == "delete":
        del lines[at]
    elif kind == "name":
        cut = rng.randrange(len(name))
        lines[at] = f"{name[:cut]}{name[cut + 1 :]} = {value}"
    elif kind == "again":
        lines.append(f"{name} = {new}")
    elif kind == "scope":
        lines[at] = f"x/{name} = {value}"
    else:
        new = rng.choice(LINES)
        lines.insert(at, new)
    text = "\n".join(lines) + "\n"
    path.write_bytes((seal_text(text) if sealed else text).encode("utf-8", "replace"))
    return f"{kind} {name} {new:.40}"


def _header(path: Path, rng: random.Random) -> str:
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    if rng.random() < 0.15:
        new = rng.choice((0, 1, size - 1, size + 1, 2**31, 2**63, 2**64 - 1, len(data), len(data) - 8))
        path.write_bytes(new.to_bytes(8, "little") + data[8:])
        return f"a header of {new} bytes"
    text, change = changed_json(json.loads(data[8 : 8 + size]), rng)
    header = text.encode("utf-8", "replace")
    path.write_bytes(len(header).to_bytes(8, "little") + header + data[8 + size :])
    return f"header {change}"


_TEXTS: dict[str, list[Callable[[Path, random.Random], str]]] = {".json": [_json], ".jsonl": [_lines], ".gin": [_gin]}
