"""Rows of the accelerator benchmarks, their verdicts, and a result file that is complete after every row.

Benchmarks of kernels and of training steps return their rows as `Line`s; `run_all.py` puts them into one table.
Nothing here imports JAX.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import measure

JUDGED = ("H100", "H200")
"""Devices that targets apply to: they were set for an H200, as shares, so that they hold for an H100 too."""

BROKEN = ("CUDA_ERROR", "illegal memory access", "launch failure", "device-side assert")
"""Words of errors after which a process cannot use its GPU any more."""

LATE, LOST = "no time left", "its process ended or hung"

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Line:
    """A line of the table that all accelerator benchmarks share.

    Args:
      what: what was measured.
      runs: the implementation that ran as "ours".
      unit: of `ours` and `others`: "TFLOP/s", "GB/s", "ms", "tokens/s".
      ours: the median.
      others: name to median of each implementation that ours is compared with.
      refused: name to reason of each implementation that did not run.
      ratio: ours over `against`, above 1 where ours is better, or `None`.
      against: a name in `others`, or "matmul" or "copy", measured in the same run.
      target: the smallest acceptable ratio, or `None`.
      floor: a smaller ratio that is reported as "above the floor", or `None`.
      verdict: of `judge`; or why there is no figure.
      matmul: TFLOP/s of a square matrix product in the same turns, or `None`.
      copy: GB/s of a copy (read and written) or of a sum (read) in the same turns, or `None`.
    """

    what: str
    runs: str = ""
    unit: str = ""
    ours: float | None = None
    others: Mapping[str, float] = dataclasses.field(default_factory=dict)
    refused: Mapping[str, str] = dataclasses.field(default_factory=dict)
    ratio: Mapping[str, Any] | None = None
    against: str = ""
    target: float | None = None
    floor: float | None = None
    verdict: str = ""
    matmul: float | None = None
    copy: float | None = None


def judge(ratio: Mapping[str, Any] | None, target: float | None, floor: float | None, device: str) -> str:
    """Return "met", "above the floor", "missed" or "not measured"; "" where no target applies to this device."""
    if target is None or not any(name in device for name in JUDGED):
        return ""
    if ratio is None:
        return "not measured"
    if ratio["median"] >= target:
        return "met"
    return "above the floor" if floor is not None and ratio["median"] >= floor else "missed"


HEADER = ("what", "runs", "ours", "others", "machine", "ratio", "target", "verdict")


def cells(line: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the cells of a `Line`, which is a dict here, in the order of `HEADER`."""
    others = [f"{name} {float(v):.4g}" for name, v in line["others"].items()]  # a file has "nan" and "inf" as words
    others += [f"{name} –" for name in line["refused"]]
    machine = [f"matmul {float(line['matmul']):.3g} TF/s"] if line["matmul"] else []
    machine += [f"copy {float(line['copy']):,.0f} GB/s"] if line["copy"] else []
    ratio, aim = line["ratio"], ""
    if line["target"] is not None and line["verdict"]:
        aim = f"≥ {line['target']:.3g}" + (f", floor {line['floor']:.3g}" if line["floor"] else "")
    return (
        line["what"],
        line["runs"],
        f"{float(line['ours']):.4g} {line['unit']}" if line["ours"] is not None else "–",
        ", ".join(others),
        ", ".join(machine),
        "{:.3g} ({:.3g}–{:.3g}) {}".format(*(float(ratio[k]) for k in ("median", "low", "high")), line["against"])
        if ratio
        else "–",
        aim,
        line["verdict"],
    )


def options(parser: argparse.ArgumentParser) -> None:
    """Add the command-line options of a benchmark that writes `Results`."""
    parser.add_argument("--json", type=Path, help="write every row to this file as soon as it is measured")
    parser.add_argument("--only", help="rows whose name contains this")
    parser.add_argument("--rounds", type=int, default=30, help="timed calls of each (default %(default)s)")
    parser.add_argument("--seconds", type=float, help="start no row after this many seconds")
    parser.add_argument("--resume", action="store_true", help="skip the rows that the --json file already has")


class Results:
    """Rows that are printed and written one by one, so that a failure later loses none of them.

    The file has the facts, "rows" (each with its "lines"), and under "running" the row that is being measured: where
    the process ended during that row, `--resume` records it as lost and continues after it.

    Args:
      name: name of the benchmark.
      device: JAX's name of the device.
      args: parsed `options`.
      **extra: further entries of the file.

    Raises:
      SystemExit: an option is wrong, or the file of --resume is of another benchmark, device or commit.
    """

    def __init__(self, name: str, device: str, args: argparse.Namespace, **extra: Any):
        self.device, self.args, self.start = device, args, time.monotonic()
        self.content: dict[str, Any] = {
            **measure.facts(device),
            "benchmark": name,
            **extra,
            "running": None,
            "complete": False,
            "rows": {},
        }
        if args.rounds < 1:
            raise SystemExit(f"--rounds {args.rounds}: at least 1")
        if args.json is not None and not args.json.parent.is_dir():
            raise SystemExit(f"--json {args.json}: the folder {args.json.parent} does not exist")
        if args.resume and args.json is None:
            raise SystemExit("--resume continues the file of --json FILE; add --json FILE")
        if args.resume and args.json.exists():
            before = read(args.json)
            of = {n: before.get(n) for n in ("benchmark", "device", "commit")}
            if of != (here := {n: self.content[n] for n in of}):
                differences = " and ".join(f"{n} is {of[n]}, here {here[n]}" for n in of if of[n] != here[n])
                raise SystemExit(f"--resume cannot continue {args.json}: {differences}")
            self.content["rows"] = before["rows"]
            if before["running"]:
                self._keep(before["running"], {"problem": LOST})

    def each(
        self,
        cases: Iterable[tuple[str, T]],
        run: Callable[[T], tuple[dict[str, Any], Sequence[Line]]],
        *,
        own_process: bool = False,
    ) -> None:
        """Measure the cases that --only selects, in order; record one that raises, and continue with the next.

        Args:
          cases: pairs of a unique name and the argument of `run`.
          run: returns the record of a row, and its lines.
          own_process: `run` measures in another process, which cannot break the GPU for later rows; and the caller
            calls `finish`.

        Raises:
          SystemExit: --only selects no case; or a row broke the GPU's context, and the rows after it need another
            process (`--resume`).
        """
        selected = [(name, case) for name, case in cases if (self.args.only or "") in name]
        if not selected:
            raise SystemExit(f"--only: no row's name contains '{self.args.only}'")
        for name, case in selected:
            if self.content["rows"].get(name, {"problem": LATE}).get("problem") != LATE:
                continue
            if self.args.seconds is not None and time.monotonic() - self.start > self.args.seconds:
                self._keep(name, {"problem": LATE})
                continue
            self.content["running"] = name
            self._write()
            begun, broken = time.monotonic(), False
            try:
                row, lines = run(case)
            except KeyboardInterrupt:
                self.content["running"] = None
                self._write()
                saved = f"; {self.args.json} has the rows before it, and --resume continues" if self.args.json else ""
                raise SystemExit(f"interrupted in '{name}'{saved}") from None
            except Exception as e:  # of a compiler, a driver, another library: later rows are still measured
                problem = f"{type(e).__name__}: {str(e).strip().splitlines()[0][:300] if str(e) else ''}"
                row, lines, broken = {"problem": problem}, (), any(word in str(e) for word in BROKEN)
            row["took_seconds"] = time.monotonic() - begun
            self._keep(name, row | {"lines": [dataclasses.asdict(line) for line in lines]})
            if broken and not own_process:
                raise SystemExit(f"{name} broke the GPU's context; --resume continues after it")
        if not own_process:
            self.finish()

    def finish(self) -> None:
        """Record that every selected row was measured."""
        self.content["complete"] = True
        self._write()

    def _keep(self, name: str, row: dict[str, Any]) -> None:
        if "problem" in row:
            row["lines"] = [dataclasses.asdict(Line(name, verdict=row["problem"]))]
        self.content["rows"][name] = row
        self.content["running"] = None
        self._write()
        for line in row["lines"]:
            print("  ".join(cells(line)), flush=True)

    def _write(self) -> None:
        if self.args.json is not None:
            whole = self.args.json.with_suffix(".part")  # readers never see half a file, even if this process is killed
            whole.write_text(json.dumps(measure.rounded(self.content), indent=1) + "\n")
            whole.replace(self.args.json)

    @property
    def lines(self) -> list[dict[str, Any]]:
        """Return the lines of all rows."""
        return [line for row in self.content["rows"].values() for line in row["lines"]]

    def show(self) -> None:
        """Print the table, and why some implementations did not run."""
        show_lines(f"{self.content['benchmark']} on {self.device}{no_target(self.device)}", self.lines)


def no_target(device: str) -> str:
    """Return a note that no target applies to a device, or "" where targets do."""
    return "" if any(name in device for name in JUDGED) else ", for which there are no targets"


def read(file: Path) -> Any:
    """Return the content of a JSON file.

    Raises:
      SystemExit: it is missing, or is not JSON.
    """
    try:
        return json.loads(file.read_text())
    except (OSError, ValueError) as e:
        raise SystemExit(f"{file} cannot be read: {e}") from None


def show_lines(title: str, lines: Sequence[Mapping[str, Any]], console: Any = None) -> None:
    """Print a table of lines, and why some implementations did not run, to the terminal or to a `rich` console."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for name in HEADER:
        table.add_column(name, justify="right" if name == "ours" else "left")
    for line in lines:
        table.add_row(*cells(line))
    if console is None:
        console = Console(highlight=False, width=None if Console().is_terminal else 180)
    console.print(table)
    for who, why in dict.fromkeys((who, why) for line in lines for who, why in line["refused"].items()):
        console.print(f"{who}: {why[:200]}", markup=False, soft_wrap=True)
