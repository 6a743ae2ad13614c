"""What bounds kernels on TPUs and GPUs, by the code that the compilers make: cycles of a step for each unit.

python -m tests.pallas_kernels.bounds            # writes pallas_kernels/BOUNDS.md; needs the extras [tpu] and
                                                 # [gpu-aot] with jax 0.11, and no device
python -m tests.pallas_kernels.bounds --check    # compares with it: 1 if a step or a bound has 5% more cycles
python -m tests.pallas_kernels.bounds --check --share 2/6    # the same for the second of the six chips
python -m tests.pallas_kernels.bounds --only dropout    # writes (or checks) the rows of these kernels; the others stay
"""

from __future__ import annotations

import multiprocessing
import re
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import jax

from pallas_kernels import dispatch
from pallas_kernels.aot import why_no_gpu, why_no_tpu
from pallas_kernels.command_line import Parser
from pallas_kernels.gate import GPUS, TPUS, configurations, gpus, operations
from pallas_kernels.registers import registers_move
from tests.pallas_kernels import bundles, loops

TABLE = Path(dispatch.__file__).parent / "BOUNDS.md"
WORSE = 1.05
CHIPS = (*TPUS, *GPUS)
GPU_CASES = {
    "blockwise": ("adamw bfloat16 mlp, fsdp=8", "adamw float32 mlp, fsdp=8"),
    "chunked_recurrence": ("Gated DeltaNet bfloat16 forward", "Kimi Delta Attention bfloat16 forward"),
    "cut_cross_entropy": (
        "bfloat16 4096 ve 128256",
        "bfloat16 4096 ve 128256 backward",
        "bfloat16 4096 ve 128256 softcap backward",
        "bfloat16 4096 ve 128256 sum entropy",
        "bfloat16 4096 ve 128256 sum entropy backward",
    ),
    "decode_attention": ("128/128 contiguous", "128/128 pages of 16, dealt"),
    "flash_attention": tuple(
        f"{width} {name}"
        for width in ("64/64", "128/128", "256/256")
        for name in ("causal forward", "causal backward", "packed backward")
    )
    + ("128/128 dropout forward", "128/128 dropout backward"),
    "grouped_matmul": ("qwen3 forward", "qwen3 kernel gradient"),
    "softmax": ("rows_once float32 32768 softmax", "row_sums bfloat16 262144"),
    "stored_matmul": ("int4, groups of 128, 16 rows", "int8, 16 rows", "int4, groups of 128, 1024 rows"),
}
"""Configurations of the gate that the table has; of an op that is not here, the first one."""

HEADS = {
    "attention": ("kernel", "TPU", "bundles", "masked", *bundles.INSTRUCTIONS, "bound", "of the step"),
    "others": ("kernel", "TPU", "bundles", *bundles.INSTRUCTIONS, "copied (KiB)", "bound", "of the step"),
    "gpu": ("kernel", "GPU", "instructions", "products", "exps", "bound", "registers", "spilled"),
}


def gpu_rows(gpu: str, only: str = "") -> Iterator[tuple[str, str]]:
    """Yield (table, line) for each loop of each kernel for a GPU.

    Args:
      gpu: one of `GPUS`.
      only: compile kernels whose name contains this.
    """
    for op in (op for op in operations("gpu") if gpu in gpus(op)):
        every = {name: (fn, shapes) for name, fn, shapes in configurations(op, "gpu")}
        for name in (one for one in GPU_CASES.get(op, tuple(every)[:1]) if only in f"{op}: {one}"):
            compiled = loops.kernels(*every[name], gpu)
            for k, kernel in enumerate(compiled):
                for n, loop in enumerate(kernel.loops):
                    parts = [f"kernel {k + 1}"] * (len(compiled) > 1) + [f"loop {n + 1}"] * (len(kernel.loops) > 1)
                    numbers = (f"{x:,}" for x in loop)
                    unit, cycles = loop.bound
                    cells = (f"{op}: {', '.join([name, *parts])}", gpu, *numbers, f"{unit}: {cycles:,}")
                    yield "gpu", f"| {' | '.join([*cells, str(kernel.registers), f'{kernel.spills:,}'])} |"


def rows(chip: str, only: str = "") -> Iterator[tuple[str, str]]:
    """Yield (table, line) for a chip.

    Args:
      chip: one of `CHIPS`.
      only: compile kernels whose name contains this.
    """
    if chip not in GPUS:
        yield from bundles.rows(chip, only)
        return
    # In a process of its own, which compiles kernels for one architecture (see `aot`).
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield from pool.submit(_gpu_rows, chip, only).result()


def _gpu_rows(gpu: str, only: str) -> list[tuple[str, str]]:
    return list(gpu_rows(gpu, only))


def committed() -> list[tuple[str, str]]:
    """Return (table, line) for each row of the committed document."""
    sections = zip(HEADS, TABLE.read_text().split("\n## ")[1:], strict=True)
    return [(name, line) for name, text in sections for line in text.splitlines() if _has_numbers(line)]


def merged(old: Sequence[tuple[str, str]], new: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return the rows of a document in which those of the same kernel and chip are replaced.

    Args:
      old: (table, line) for each row.
      new: the same, of some kernels.
    """
    return list({(table, numbers(line)[0]): (table, line) for table, line in (*old, *new)}.values())


def _order(of: tuple[str, str]) -> tuple[str, int]:
    kernel, chip, *_ = of[1].removeprefix("| ").split(" | ")
    return f"| {kernel}", CHIPS.index(chip)


def _versions() -> str:
    import libtpu

    return f"jax {jax.__version__}, libtpu {libtpu.__version__}"


def document(lines: Sequence[tuple[str, str]]) -> str:
    """Return the whole document.

    Args:
      lines: of every chip.
    """

    def table(name: str) -> str:
        head = HEADS[name]
        body = [line for _, line in sorted((one for one in lines if one[0] == name), key=_order)]
        return "\n".join([f"| {' | '.join(head)} |", "|" + "---|" * len(head), *body])

    compiler = "ptxas" if registers_move() else "nvJitLink, which moves no registers between warpgroups"
    return f"""# What bounds kernels

Generated by `python -m tests.pallas_kernels.bounds` with {_versions()}, from what the
compilers made for absent hardware. Nothing here was timed. `--check` prints each difference from this file.

## Attention on TPUs

Causal bfloat16 attention {bundles.WIDTH} wide: a step on {bundles.TILE:,} queries and {bundles.TILE:,} keys of one
head, in the final schedule of the compiler. *Bundles* are cycles of a core if nothing waits for memory; a step that
masks has more (*masked*). The other numbers are instructions of an unmasked step: registers of results from the matrix
units (of 8 by 128 numbers), registers of exponentials, of other arithmetic, and stores, of which some only because
registers ran out (*spills*). *splash* is `jax.experimental.pallas.ops.tpu.splash_attention` with tiles of that size.
*With dropout*, a step makes the bits of its weights, too (13 rounds of Threefry), whose shifts and exclusive ors are
not counted as arithmetic: that bound is too low there.

*Bound* names the unit that needs the most cycles for its instructions alone, and the last column is its share of the
step: what a perfect overlap of all units could still gain. A core takes one register of exponentials and four of
arithmetic a cycle, and the matrix units of a v6e or TPU7x return one register of results. By data sheets those of
a v5e or v5p return half a register, but the compiler schedules more, so its bundles are fewer than cycles there, and no
bound is given.

{table("attention")}

## Other kernels on TPUs

The same numbers, of the region of a kernel without jumps that computes most: a step of its grid, or a part of one.
*Copied* are the KiB that a step brings from memory and writes to it, at most, where that region is the whole step;
there, memory is one of the units (the data sheet's bytes a second over the clock, which is the peak over the size of a
result). A share above 1 says that a step that makes all of its copies waits for them; a tile that stays from one step
to the next is not copied again.

{table("others")}

## GPUs

For an H200, and for a B200 the kernels that it has, too, by {compiler}:
each loop that multiplies or takes exponentials, without the loops inside it, or else the largest loop.
*Instructions* are those of one warp; a quarter of a multiprocessor, on which a warp of each warpgroup runs, issues one
a cycle. *Products* are cycles of the tensor cores (2,048 multiply-adds of 16 bits a cycle), *exps* those of the unit of
exponentials, reciprocals and logarithms (16 results a cycle), all for one warpgroup. Copies are not counted.
*Registers* are those of a thread at its start, and *spilled* bytes those that did not fit.

{table("gpu")}
"""


def check(chips: Sequence[str], only: str = "") -> int:
    """Print how steps and bounds differ from the table's, and return 1 if one has 5% more cycles.

    Args:
      chips: some of `CHIPS`.
      only: check kernels whose name contains this.
    """
    before = dict(map(numbers, filter(_has_numbers, TABLE.read_text().splitlines())))
    worse = 0
    for chip in chips:
        for _, line in rows(chip, only):
            key, now = numbers(line)
            old = before.get(key)
            if old is None:
                print(f"{key}: not in the table")
                continue
            for what, a, b in zip(("step", "bound"), old, now, strict=True):
                worse |= b > WORSE * a
                if a != b or what == "step":
                    print(f"{key:64s} {what:5s} {a:6,} -> {b:6,}  {b / max(a, 1) - 1:+.1%}")
    return int(worse)


def numbers(line: str) -> tuple[str, tuple[int, int]]:
    """Return a line's kernel and chip, and the cycles of its step and of its bound.

    Args:
      line: of a table.
    """
    cells = [cell.strip() for cell in line.strip("| ").split(" | ")]
    bound = re.search(r"\w+: ([\d,]+)", " ".join(cells[3:]))
    return f"{cells[0]}, {cells[1]}", (_number(cells[2]), _number(bound[1]) if bound else 0)


def _number(text: str) -> int:
    return int(text.replace(",", ""))


def _has_numbers(line: str) -> bool:
    cells = [cell.strip() for cell in line.strip("| ").split(" | ")]
    return line.startswith("| ") and len(cells) > 2 and cells[2].replace(",", "").isdigit()


def main(argv: list[str] | None = None) -> int:
    """Run the command line.

    Args:
      argv: arguments; those of the process by default.
    """
    parser = Parser(prog="python -m tests.pallas_kernels.bounds", description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare with the table instead of writing it")
    parser.add_argument("--share", default="1/1", metavar="K/N", help="check every Nth chip, from the Kth on")
    parser.add_argument("--only", default="", metavar="TEXT", help="only kernels whose name contains this")
    options = parser.parse_args(argv)
    part, _, parts = options.share.partition("/")
    if not (part.isdigit() and parts.isdigit() and 1 <= int(part) <= int(parts)):
        parser.error(f"--share {options.share}: it is K/N with 1 <= K <= N, such as 2/5")
    if why := why_no_tpu() or why_no_gpu():
        print(f"bounds: {why}", file=sys.stderr)
        return 2
    if options.check:
        return check(CHIPS[int(part) - 1 :: int(parts)], options.only)
    if options.only and f"with {_versions()}," not in TABLE.read_text():
        parser.error(f"the table is not of {_versions()}, so no row can stay; leave --only out")
    lines = [line for chip in CHIPS for line in rows(chip, options.only)]
    TABLE.write_text(document(merged(committed(), lines) if options.only else lines), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
