"""Printing of results: rich tables in a terminal, the same tables in a notebook, text in a string."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

from jaxscale.units import WIDTH

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table


class Printable:
    """Mixin that gives a class with a `__rich_console__` a `str` and an HTML form for notebooks."""

    def __str__(self) -> str:
        return self._repr_mimebundle_()["text/plain"]

    def _repr_mimebundle_(self, **_: object) -> dict[str, str]:
        console = _recorded(self)
        html = console.export_html(inline_styles=True, code_format=_HTML, clear=False)
        return {"text/plain": console.export_text(), "text/html": html}


_HTML = '<pre style="line-height: normal; overflow-x: auto; font-family: monospace">{code}</pre>'
"""Has no background and text colours, so that it is readable on dark and light pages."""


def text_of(table: RenderableType) -> str:
    """Return a rich table as text."""
    return _recorded(table).export_text()


def table_of(title: str, *columns: str) -> Table:
    """Return an empty rich table in our style.

    Args:
      title: the table's title.
      columns: column headers; the first column is left-aligned, the others are right-aligned.
    """
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for i, name in enumerate(columns):
        table.add_column(name, justify="right" if i else "left", no_wrap=not i)
    return table


def _recorded(what: object) -> Console:
    from rich.console import Console

    # Write to a string, because in a notebook the console would also display its output.
    console = Console(record=True, file=io.StringIO(), width=WIDTH, force_jupyter=False)
    console.print(what)
    return console
