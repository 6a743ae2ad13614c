"""How autodoc reads our docstrings and signatures."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

from python_api import literal_blocks
from sphinx.application import Sphinx

from jaxscale.config_docs import words
from jaxscale.config_types import parameters


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
    """A dataclass's signature, with annotations as they are written and defaults as `AdamW()`."""
    if not (inspect.isclass(obj) and dataclasses.is_dataclass(obj)):
        return None
    fields = {field.name: field for field in dataclasses.fields(obj)}
    each = []
    for field, parameter in parameters(obj).items():
        default = parameter.default
        if field in fields and fields[field].default_factory is not dataclasses.MISSING:
            default = fields[field].default_factory()  # type: ignore[misc]
        annotation = parameter.annotation if isinstance(parameter.annotation, str) else ""
        text = f"{field}: {annotation}" if annotation else field
        each.append(text if default is parameter.empty else f"{text} = {words(default).replace('@', '')}")
    return f"({', '.join(each)})", None


def _skip(app: Sphinx, what: str, name: str, obj: object, skip: bool, options: Any) -> bool | None:
    """Leave out what Python makes of a named tuple's fields; they are described under `Args`."""
    return True if type(obj).__name__ == "_tuplegetter" else None
