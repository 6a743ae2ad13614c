"""The parity table: every op, backend, feature and dtype, with its error and that of a plain implementation.

    python -m tests.pallas_kernels.parity            # writes pallas_kernels/PARITY.md (jax 0.11 or newer)
    python -m tests.pallas_kernels.parity --op softmax   # measures these rows and keeps the others

Errors are against float64: the norm of the deviation over the norm of the value. No tolerance is chosen by hand: our
error may be twice that of a plain jax.numpy implementation in the same dtype, or, where that one happens to be more
exact, one unit in the last place of the output; two for float32, which is the error of an accelerator's own exp2
(2**-22, PTX ISA, ex2.approx).

Attention 256 wide is compared in 16 bits only: in tiles as large as a kernel's, a CPU sums 256 float32 products with
twice the error that it has in the small matrices of the plain implementation, which does not depend on the kernel.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np

from jaxscale.testing.ops import allowed, error_of
from pallas_kernels import dispatch
from pallas_kernels.command_line import Parser
from pallas_kernels.dispatch import KernelError
from pallas_kernels.errors import did_you_mean
from tests.pallas_kernels.comparison import Case, lines
from tests.pallas_kernels.works import works

TABLE = Path(dispatch.__file__).parent / "PARITY.md"
BACKENDS = ("xla", "mosaic_tpu", "mosaic_gpu")
MORE = {"grouped_matmul": ("xla_tiles",), "grouped_stored_matmul": ("xla_chunks",)}
"""Further implementations of an op."""
THREADS = 8
"""Devices to simulate: the CPU client has this many threads, or one per core. Each warpgroup of an interpreted GPU
kernel takes one of them and waits for the others; with too few they deadlock.
"""
HEAD = ("op", "feature", "dtype", "direction", "backend", "error", "plain error", "verdict")


@dataclasses.dataclass(frozen=True)
class Row:
    """A line of the table. Without an error, `verdict` is the reason why it is not supported."""

    case: Case
    backend: str
    error: float | None
    plain: float | None
    verdict: str

    @property
    def cells(self) -> tuple[str, ...]:
        """The row as strings, in the order of `HEAD`."""
        c, number = self.case, lambda x: "" if x is None else f"{x:.1e}"
        errors = (number(self.error), number(self.plain))
        return (c.op, c.feature, c.dtype, c.direction, self.backend, *errors, self.verdict)


def measure(case: Case, backend: str) -> Row:
    """Run a case on a backend: compiled for "xla", else as for its device, kernels interpreted with race detection."""
    truth = case.truth()
    error = functools.partial(error_of, truth=truth)
    try:
        if backend == "xla":
            got = case.ours(backend)
        else:
            with dispatch.interpreted(races=True):
                got = case.ours(backend)
    except KernelError as e:
        return Row(case, backend, None, None, f"not supported: {str(e).partition('not supported here: ')[2] or e}")
    ours, plain = error(got), error(case.plain())
    return Row(case, backend, ours, plain, "ok" if ours <= allowed(plain, np.asarray(got).dtype) else "WRONG")


def cases() -> Iterator[Case]:
    """Yield every line, in the order of the table."""
    for work in works():
        yield from lines(work)


def backends(op: str) -> tuple[str, ...]:
    """Return the implementations of an op that have rows, in the order of the table."""
    return (*BACKENDS, *MORE.get(op, ()))


def committed() -> dict[tuple[str, ...], tuple[str, ...]]:
    """Return the committed table: a row's name -> its cells."""
    lines = (line.strip("| ").split(" | ") for line in TABLE.read_text().splitlines() if line.startswith("| "))
    _, _, *rows = (tuple(cell.strip() for cell in line) for line in lines)
    return {cells[:5]: cells for cells in rows}


def main() -> int:
    """Run the command line."""
    parser = Parser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--op", help="measure this op alone; the table's other rows stay")
    args = parser.parse_args()
    every = list(cases())
    if args.op and args.op not in (ops := dict.fromkeys(case.op for case in every)):
        parser.error(f"--op {args.op}: the table has {', '.join(ops)}{did_you_mean(args.op, ops)}")
    if dispatch.JAX_VERSION < (0, 11):
        sys.exit(f"the table needs the GPU interpreter of jax 0.11 or newer, and this is jax {jax.__version__}")
    jax.config.update("jax_num_cpu_devices", THREADS)
    if args.op and f"jax {jax.__version__}:" not in TABLE.read_text():
        sys.exit(f"the table is not of jax {jax.__version__}, so none of its rows can stay; leave --op out")
    measured = committed() if args.op else {}
    rows: list[tuple[str, ...]] = []
    for case in every:
        for backend in backends(case.op):
            name = (case.op, case.feature, case.dtype, case.direction, backend)
            if case.op == args.op or name not in measured:
                measured[name] = measure(case, backend).cells
                print(" ".join(measured[name]), flush=True)
            rows.append(measured[name])
    width = [max(len(r[i]) for r in [HEAD, *rows]) for i in range(7)]
    line = lambda cells: "| " + " | ".join(c.ljust(w) for c, w in zip(cells, [*width, 0], strict=True)) + " |"  # noqa: E731
    text = (__doc__ or "").split("\n\n", 2)[2]
    TABLE.write_text(
        "# Parity\n\n"
        "Made by `python -m tests.pallas_kernels.parity`; do not edit. `xla` and `xla_tiles` ran compiled on a\n"
        f"CPU, the kernels in their interpreters with race detection, jax {jax.__version__}: numbers, no speed, no "
        f"hardware.\n\n{text}\n"
        + "\n".join([line(HEAD), line(["-" * max(3, w) for w in [*width, 3]]), *map(line, rows)])
        + "\n"
    )
    wrong = [row for row in rows if row[-1] == "WRONG"]
    print(f"{len(rows)} rows, {len(wrong)} wrong, {sum(not row[5] for row in rows)} not supported: {TABLE}")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
