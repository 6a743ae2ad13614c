"""Kernels for TPU and GPU, each with a float32 reference. Imports JAX and nothing of jaxscale.

Ops: `pallas_kernels.softmax`, `pallas_kernels.blockwise`, `pallas_kernels.flash_attention`,
`pallas_kernels.cut_cross_entropy`, `pallas_kernels.decode_attention`. Each op takes `implementation=`: `None` chooses
the best implementation for the platform that a program is lowered for; a name selects that implementation or raises.
`chosen()` returns what was chosen and why.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pallas_kernels.cpu import avoid_fault
from pallas_kernels.errors import KernelError, did_you_mean

if TYPE_CHECKING:
    from pallas_kernels.dispatch import Choice, chosen, forget

__all__ = ["Choice", "KernelError", "chosen", "forget", "parity"]

avoid_fault()


def parity(**cells: str) -> list[dict[str, str]]:
    """Return rows of `PARITY.md`: what was checked on which backend, its error, and what is not supported.

    Args:
      **cells: values by column, as `op="softmax", backend="mosaic_gpu"`; without any, all rows are returned.

    Raises:
      KernelError: the table has no such column, or the column has no such value.
    """
    lines = (Path(__file__).parent / "PARITY.md").read_text().splitlines()
    head, _, *rows = ([cell.strip() for cell in line.strip("| ").split(" | ")] for line in lines if line[:2] == "| ")
    table = [dict(zip(head, row, strict=True)) for row in rows]

    def check(name: str, known: list[str], what: str) -> None:
        if name not in known:
            hint = did_you_mean(name, known)
            raise KernelError(f"the parity table has no {what} '{name}'; it has {', '.join(known)}{hint}")

    for column, value in cells.items():
        check(column, head, "column")
        check(value, sorted({row[column] for row in table}), column)
    return [row for row in table if all(row[column] == value for column, value in cells.items())]


def __getattr__(name: str) -> Any:
    if name in (
        "Choice",
        "chosen",
        "forget",
    ):  # imported late: they need JAX, and importing this package does not start it
        return getattr(importlib.import_module("pallas_kernels.dispatch"), name)
    raise AttributeError(f"module 'pallas_kernels' has no attribute '{name}'")
