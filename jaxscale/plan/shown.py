"""How results print: as rich tables in a terminal, as the same tables in a notebook, as text in a string."""

from __future__ import annotations

import io


class Shown:
    """Gives whatever has a `__rich_console__` a `str` and a notebook's HTML."""

    def __str__(self) -> str:
        return self._repr_mimebundle_()["text/plain"]

    def _repr_mimebundle_(self, **_: object) -> dict[str, str]:
        from rich.console import Console

        from jaxscale.train.report import WIDTH

        # into a string even in a notebook, where it would print on the way
        console = Console(record=True, file=io.StringIO(), width=WIDTH, force_jupyter=False)
        console.print(self)
        return {"text/plain": console.export_text(clear=False), "text/html": console.export_html(inline_styles=True)}
