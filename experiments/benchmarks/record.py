"""The one form of a row, its verdict, and a result file that is whole after every one of them.

Benchmarks of kernels and of steps on an accelerator give their rows as `Line`s; `run_all.py` puts them into one table.
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
"""The kinds of devices that targets are for: stated for an H200, and as shares, so that they hold on an H100 too."""

BROKEN = ("CUDA_ERROR", "illegal memory access", "launch failure", "device-side assert")
"""What an error says after which a process gets nothing more out of its GPU."""

LATE, LOST = "no time left", "its process ended or hung"

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Line:
    """A line of the table that all benchmarks of kernels share.

    Args:
      what: was measured.
      runs: the implementation that ran as "ours".
      unit: of `ours` and `others`: "TFLOP/s", "GB/s", "ms", "tokens/s".
      ours: the median.
      others: what it is held against, by name, where it could be had.
      refused: by name, why not.
      ratio: ours over `against`, above 1 where ours is better, or `None`.
      against: one of `others`, or "matmul" or "copy": a share of what the same run had of those.
      target: the least ratio that is asked for, or `None`.
      floor: what is still bearable below it, or `None`.
      verdict: see `judge`; or why there is no figure.
      matmul: TFLOP/s of a square product in the same turns, or `None`.
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
    """ "met", "above the floor", "missed", "not measured"; "" where nothing is asked of this device."""
    if target is None or not any(name in device for name in JUDGED):
        return ""
    if ratio is None:
        return "not measured"
    if ratio["median"] >= target:
        return "met"
    return "above the floor" if floor is not None and ratio["median"] >= floor else "missed"


HEADER = ("what", "runs", "ours", "others", "machine", "ratio", "target", "verdict")


def cells(line: Mapping[str, Any]) -> tuple[str, ...]:
    """A `Line`, as a dict, as the cells below `HEADER`."""
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
    """The options of a benchmark that writes `Results`."""
    parser.add_argument("--json", type=Path, help="write every row there as soon as it is measured")
    parser.add_argument("--only", help="rows whose name holds this")
    parser.add_argument("--rounds", type=int, default=30, help="timings of each (default %(default)s)")
    parser.add_argument("--seconds", type=float, help="begin no row later than this")
    parser.add_argument("--resume", action="store_true", help="leave out the rows that the file of --json has")


class Results:
    """Rows that are printed and written as they come, whatever becomes of the next one.

    The file holds the facts, "rows" (each with its "lines"), and under "running" the row that is being measured: where
    a process ended without it, `resume` records that row as lost and goes on behind it.

    Args:
      name: of the benchmark.
      device: JAX's name for it.
      args: parsed `options`.
      **extra: what else the file is to say.

    Raises:
      SystemExit: the file of --resume is not of this benchmark and device.
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
            raise SystemExit(f"--json {args.json}: there is no folder {args.json.parent}")
        if args.resume and args.json is None:
            raise SystemExit("--resume goes on with the file of --json FILE; give that too")
        if args.resume and args.json.exists():
            before = read(args.json)
            of = {n: before.get(n) for n in ("benchmark", "device", "commit")}
            if of != (here := {n: self.content[n] for n in of}):
                said = " and ".join(f"{n} is {of[n]}, here {here[n]}" for n in of if of[n] != here[n])
                raise SystemExit(f"{args.json} is not to be gone on with: {said}")
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
        """Measures the cases that are wanted, most valuable first; one that raises is recorded, and the next follows.

        Args:
          cases: names, which tell them apart, and what `run` is given.
          run: gives what is to be kept of a row, and its lines.
          own_process: `run` measures in another process, so none after it suffers; and `finish` is left to the caller.

        Raises:
          SystemExit: no name holds what --only says; or a row broke the GPU's context, and those after it need another
            process (`--resume`).
        """
        wanted = [(name, case) for name, case in cases if (self.args.only or "") in name]
        if not wanted:
            raise SystemExit(f"no row's name holds '{self.args.only}'")
        for name, case in wanted:
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
                kept = f"; {self.args.json} has the rows before it, and --resume goes on" if self.args.json else ""
                raise SystemExit(f"interrupted in '{name}'{kept}") from None
            except Exception as e:  # of a compiler, a driver, a rival: the rows after it are wanted all the same
                said = f"{type(e).__name__}: {str(e).strip().splitlines()[0][:300] if str(e) else ''}"
                row, lines, broken = {"problem": said}, (), any(word in str(e) for word in BROKEN)
            row["took_seconds"] = time.monotonic() - begun
            self._keep(name, row | {"lines": [dataclasses.asdict(line) for line in lines]})
            if broken and not own_process:
                raise SystemExit(f"{name} broke the GPU's context; --resume goes on behind it")
        if not own_process:
            self.finish()

    def finish(self) -> None:
        """Every row that is wanted is there."""
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
            whole = self.args.json.with_suffix(".part")  # a reader, or the end of this process, meets a whole file
            whole.write_text(json.dumps(measure.rounded(self.content), indent=1) + "\n")
            whole.replace(self.args.json)

    @property
    def lines(self) -> list[dict[str, Any]]:
        """Of all rows."""
        return [line for row in self.content["rows"].values() for line in row["lines"]]

    def show(self) -> None:
        """The table, and why what was refused was."""
        show_lines(f"{self.content['benchmark']} on {self.device}{no_target(self.device)}", self.lines)


def no_target(device: str) -> str:
    """Says that no target is for a device, where none is."""
    return "" if any(name in device for name in JUDGED) else ", which no target is for"


def read(file: Path) -> Any:
    """What a file of JSON holds.

    Raises:
      SystemExit: it is missing, or torn, or something else.
    """
    try:
        return json.loads(file.read_text())
    except (OSError, ValueError) as e:
        raise SystemExit(f"{file} cannot be read: {e}") from None


def show_lines(title: str, lines: Sequence[Mapping[str, Any]], console: Any = None) -> None:
    """Prints a table of lines, and why what was refused was; to a `rich.console.Console`, or to the terminal."""
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
