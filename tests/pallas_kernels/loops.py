"""Loops of a Hopper kernel's machine code: instructions, and the least cycles that each unit needs for them.

Mosaic writes the code that ptxas made, disassembled, if nvdisasm is beside it (the extra [gpu-aot] brings both).
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax

from pallas_kernels.aot import compile_kernel
from pallas_kernels.errors import KernelError

SMALLEST = 40
"""Instructions of the smallest loop that is counted; smaller ones wait for a barrier."""
PRODUCTS = 2048
"""Multiply-adds of 16-bit numbers that the tensor cores of a multiprocessor make in a cycle (data sheet: 989 TFLOP/s
by 132 multiprocessors at 1.83 GHz). Those of 8-bit numbers are twice as many."""
SPECIAL = 8
"""Cycles of a quarter of a multiprocessor for an exp2, reciprocal or logarithm of a warp: 16 results a cycle in all."""


class Loop(NamedTuple):
    """A loop without the loops inside it, for one warp of each warpgroup that runs it.

    Args:
      instructions: of the loop; a quarter of a multiprocessor issues one a cycle.
      products: cycles of the tensor cores.
      special: cycles of the unit of exp2, reciprocals and logarithms.
    """

    instructions: int
    products: int
    special: int

    @property
    def bound(self) -> tuple[str, int]:
        """The unit that needs the most cycles, and these."""
        return max(
            (("products", self.products), ("exps", self.special), ("instructions", self.instructions)),
            key=lambda unit: unit[1],
        )


_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P[0-9T]+\s+)?([A-Z][A-Za-z0-9_.]*)(.*)")
_LABEL = re.compile(r"(\.L_x_\d+):")
_PRODUCT = re.compile(r"[HIQ]GMMA\.64x(\d+)x(\d+)")


def loops(code: str) -> list[Loop]:
    """Return the loops of a kernel that multiply or take exps; if none does, the one with the most instructions.

    Args:
      code: of nvdisasm.
    """
    labels: dict[str, int] = {}
    instructions: list[tuple[str, str]] = []
    for line in code.splitlines():
        if label := _LABEL.match(line):
            labels[label[1]] = len(instructions)
        elif matched := _INSTRUCTION.search(line):
            instructions.append((matched[1], matched[2]))
    spans = []
    for at, (name, arguments) in enumerate(instructions):
        target = re.search(r"\((\.L_x_\d+)\)", arguments)
        if name.startswith("BRA") and target and labels.get(target[1], at + 1) <= at:
            span = range(labels[target[1]], at + 1)
            # After an EXIT stand the waits of barriers, which return to the code before.
            if len(span) >= SMALLEST and not any(instructions[i][0] == "EXIT" for i in span):
                spans.append(span)
    every = [_loop([instructions[i][0] for i in _own(span, spans)]) for span in sorted(spans, key=lambda s: s.start)]
    working = [loop for loop in every if loop.products or loop.special]
    return working or sorted(every, reverse=True)[:1]


def _own(span: range, spans: list[range]) -> list[int]:
    """Return the places of a loop that are in no loop inside it."""
    inner = [s for s in spans if s != span and s.start >= span.start and s.stop <= span.stop]
    return [i for i in span if not any(i in s for s in inner)]


def _loop(names: list[str]) -> Loop:
    shapes = [_PRODUCT.match(name) for name in names]
    # 64 rows by N columns by K, whose bytes are always 32: twice as many numbers of 8 bits take the same cycles.
    products = sum(64 * int(shape[1]) * 16 // PRODUCTS for shape in shapes if shape)
    return Loop(len(names), products, SPECIAL * sum(name.startswith("MUFU") for name in names))


class Kernel(NamedTuple):
    """A compiled kernel.

    Args:
      name: of the kernel.
      loops: its loops.
      registers: of a thread.
      spills: bytes of registers that are stored and loaded because there are too few.
    """

    name: str
    loops: list[Loop]
    registers: int
    spills: int


def kernels(fn: Callable[..., Any], shapes: tuple[Any, ...], gpu: str) -> list[Kernel]:
    """Compile a function and return its kernels.

    Args:
      fn: the function that one device runs.
      shapes: `jax.ShapeDtypeStruct`s of its arguments.
      gpu: as for `pallas_kernels.aot.devices_of`.

    Raises:
      KernelError: nothing is disassembled.
    """
    with tempfile.TemporaryDirectory() as folder:
        flags = {"MOSAIC_GPU_DUMP_SASS": "1", "MOSAIC_GPU_DUMP_PTXAS": "1", "MOSAIC_GPU_DUMP_TO": folder}
        os.environ.update(flags)
        jax.clear_caches()
        try:
            compile_kernel(fn, *shapes, topology=gpu)
        finally:
            for name in flags:
                del os.environ[name]
        results = [_kernel(path) for path in sorted(Path(folder).glob("*.sass*"))]
    if not results:
        raise KernelError("Mosaic wrote no machine code; nvdisasm has to be beside ptxas: make install EXTRAS=gpu-aot")
    return results


def _kernel(path: Path) -> Kernel:
    report = path.with_suffix(".ptxas").read_text()
    registers = re.search(r"Used (\d+) registers", report)
    spills = sum(int(n) for n in re.findall(r"(\d+) bytes spill", report))
    return Kernel(path.stem.rpartition("_")[0], loops(path.read_text()), int(registers[1]) if registers else 0, spills)
