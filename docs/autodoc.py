"""How autodoc reads our docstrings and signatures."""

from __future__ import annotations

from typing import Any

from python_api import class_signature, literal_blocks
from sphinx.application import Sphinx


def setup_autodoc(app: Sphinx) -> None:
    """Connect what follows; docstrings are changed before napoleon reads them."""
    app.connect("autodoc-process-docstring", _docstring, priority=400)
    app.connect("autodoc-process-signature", _signature)
    app.connect("autodoc-skip-member", _skip)


def _docstring(app: Sphinx, what: str, name: str, obj: object, options: Any, lines: list[str]) -> None:
    lines[:] = literal_blocks("\n".join(lines)).splitlines()


def _signature(
    app: Sphinx, what: str, name: str, obj: Any, options: Any, signature: str | None, returns: str | None
) -> tuple[str | None, str | None] | None:
    text = class_signature(obj)
    return None if text is None else (text, None)


def _skip(app: Sphinx, what: str, name: str, obj: object, skip: bool, options: Any) -> bool | None:
    """Leave out what Python makes of a named tuple's fields; they are described under `Args`."""
    return True if type(obj).__name__ == "_tuplegetter" else None
