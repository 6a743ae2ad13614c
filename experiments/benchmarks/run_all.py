"""Run every accelerator benchmark within a time budget, most valuable first, and print one table.

    python experiments/benchmarks/run_all.py --out DIR                 eight minutes of measuring
    python experiments/benchmarks/run_all.py --out DIR --minutes 20 --only attention,softmax
    python experiments/benchmarks/run_all.py --out DIR --resume        the rows for which there was no time
    python experiments/benchmarks/run_all.py --out DIR --correctness   check results on this device; measure no speed
    python experiments/benchmarks/run_all.py --publish DIR             copy into results/ and the READMEs' tables

Each benchmark is a process of its own. A row that hangs or ends its process is recorded as lost, and the benchmark
continues with the next row. `DIR/results.json` is complete after every row, `DIR/log.txt` has all output,
`DIR/table.txt` the table. Time that a benchmark does not use goes to those after it.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import importlib.util
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import measure
import record

MINUTES = 8.0
RESTARTS = 10


@dataclasses.dataclass(frozen=True)
class Job:
    """A benchmark.

    Args:
      name: name of its script, without ".py".
      share: share of the time, relative to the other benchmarks.
      row_seconds: a row that takes longer counts as hanging.
      options: further options of the script.
    """

    name: str
    share: float
    row_seconds: float = 75.0
    options: tuple[str, ...] = ()

    def command(self, into: Path, seconds: float) -> list[str]:
        """Return the command, which writes `into` and starts no row after `seconds`."""
        script = str(measure.FOLDER / f"{self.name}.py")
        return [sys.executable, script, "--json", str(into), "--seconds", f"{seconds:.0f}", "--resume", *self.options]


JOBS = (
    Job("attention", 3.0),
    Job("train_gpu", 4.0, 500.0),
    Job("adamw8bit", 1.0),
    Job("cross_entropy", 1.0),
    Job("decode_attention", 1.0),
    Job("stored_matmul", 0.5),
    Job("grouped_matmul", 1.0),
    Job("grouped_stored_matmul", 0.5),
    Job("softmax", 1.5),
    Job("recurrence", 1.0),
    Job("generate_share", 1.0, 150.0),
)
"""Most valuable first."""


class Run:
    """Runs benchmarks one after another and writes their results into a folder.

    Args:
      out: the folder.
      deadline: in `time.monotonic` seconds; nothing runs after it.
      results: benchmark name to results of an earlier run that is continued.
    """

    def __init__(self, out: Path, deadline: float, results: dict[str, dict[str, Any]]):
        self.out, self.deadline, self.results = out, deadline, results
        self.parts = Path(tempfile.mkdtemp(prefix="jaxscale-benchmarks-"))

    def job(self, job: Job, seconds: float) -> None:
        """Run a benchmark for about so many seconds; start it again after every row that ends its process."""
        start, part = time.monotonic(), self.parts / f"{job.name}.json"
        if "device" in self.results.get(job.name, {}):
            part.write_text(json.dumps(self.results[job.name]))
        problem = record.LATE
        for _ in range(RESTARTS):
            left = min(seconds - (time.monotonic() - start), self.deadline - time.monotonic())
            if left < 5:
                break
            problem = self._process(job, part, left)
            self._gather(job.name, part)
            content = self.results.get(job.name)
            if content is None or content["complete"]:
                break
        self._end(job.name, problem)

    def _end(self, name: str, problem: str) -> None:
        """Record a problem for the row that a benchmark did not finish, or for the benchmark where it has no rows."""
        content = self.results.setdefault(name, {"rows": {}, "running": None, "complete": False})
        lost = content["running"] or (None if content["rows"] else name)
        if lost:
            lines = [dataclasses.asdict(record.Line(lost, verdict=problem))]
            content["rows"][lost] = {"problem": problem, "lines": lines}
            print(f"{lost}: {problem}", flush=True)
        content["running"] = None
        self._write()

    def _process(self, job: Job, part: Path, seconds: float) -> str:
        """Run a benchmark until it ends, a row hangs or time is up; return the problem of an unfinished row."""
        with (self.out / "log.txt").open("a+", errors="replace") as log:
            log.write(f"\n# {job.name}, {seconds:.0f} s\n")
            log.flush()
            begun, over = time.time(), False
            process = subprocess.Popen(
                job.command(part, seconds), stdout=log, stderr=subprocess.STDOUT,
                env=measure.environment() | {"PYTHONUNBUFFERED": "1"}, start_new_session=True,
            )  # fmt: skip
            try:
                while process.poll() is None:
                    time.sleep(0.2)
                    self._gather(job.name, part)
                    touched = max(begun, part.stat().st_mtime if part.exists() else 0.0)  # as each row begins
                    over = time.monotonic() > self.deadline
                    if time.time() - touched > job.row_seconds or over:
                        break
            except KeyboardInterrupt:
                self._gather(job.name, part)
                self._end(job.name, record.LATE)
                raise
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            if over:
                return record.LATE
            return record.LOST if part.exists() else f"did not start: {_last_line(log)}"

    def _gather(self, name: str, part: Path) -> None:
        """Copy and print the rows that a benchmark has written since the last call."""
        if not part.exists():
            return
        content = json.loads(part.read_text())
        known = self.results.get(name, {"rows": {}})["rows"]
        new = [line for row, entry in content["rows"].items() if known.get(row) != entry for line in entry["lines"]]
        self.results[name] = content
        if new:
            self._write()
        for line in new:
            print("  ".join(cell for cell in record.cells(line) if cell), flush=True)

    def _write(self) -> None:
        whole = self.out / "results.part"
        whole.write_text(json.dumps(self.results, indent=1) + "\n")
        whole.replace(self.out / "results.json")


def _last_line(log: IO[str]) -> str:
    log.seek(0)
    lines = [line for line in log.read().splitlines() if line.strip()]
    return lines[-1][:300] if lines else ""


def run(
    jobs: Sequence[Job], out: Path, minutes: float, results: dict[str, dict[str, Any]] | None = None
) -> dict[str, dict[str, Any]]:
    """Run benchmarks within a time budget, each with its share of the remaining time; return their results.

    Args:
      jobs: most valuable first.
      out: an existing folder.
      minutes: for all of them.
      results: of an earlier run that is continued.
    """
    begun = time.monotonic()
    todo, runs = list(jobs), Run(out, begun + 60 * minutes, results or {})
    try:
        while todo:
            left = 60 * minutes - (time.monotonic() - begun)
            job = todo.pop(0)
            runs.job(job, left * job.share / (job.share + sum(j.share for j in todo)))
    except KeyboardInterrupt:
        print(f"interrupted; {out / 'results.json'} has what was measured, and --resume continues", flush=True)
    finally:
        shutil.rmtree(runs.parts, ignore_errors=True)
    return runs.results


def earlier(out: Path, resume: bool) -> dict[str, dict[str, Any]]:
    """Return the results of an earlier run in a folder, to continue with.

    Raises:
      SystemExit: the folder has results and `resume` is false, or they are of another commit.
    """
    file = out / "results.json"
    if not file.exists():
        return {}
    results = record.read(file)
    if not resume:
        raise SystemExit(f"{file} is of a run on {device_of(results)}: --resume continues it, or choose another folder")
    commits = {one["commit"] for one in results.values() if "commit" in one} - {measure.commit()}
    if commits:
        raise SystemExit(f"{file} is of commit {min(commits)}, and this is {measure.commit()}: choose another folder")
    return results


def lines_of(results: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Return all lines of all benchmarks."""
    return [line for one in results.values() for row in one["rows"].values() for line in row["lines"]]


def device_of(results: dict[str, dict[str, Any]]) -> str:
    """Return the name of the device that was measured."""
    return next((one["device"] for one in results.values() if "device" in one), "no device")


def summary(results: dict[str, dict[str, Any]]) -> list[tuple[str, ...]]:
    """Return for each benchmark how many targets are met, and the worst and the best ratio relative to its target."""
    out = []
    for name, one in results.items():
        lines = [line for row in one["rows"].values() for line in row["lines"]]
        judged = [line for line in lines if line["ratio"] and line["target"] is not None and line["verdict"]]
        of = {v: sum(line["verdict"] == v for line in lines) for v in ("met", "above the floor", "missed")}
        lost = sum(line["ours"] is None for line in lines)
        ends = ["–", "–"]
        if judged:
            ranked = sorted(judged, key=lambda line: line["ratio"]["median"] / line["target"])
            ends = [_short(line) for line in (ranked[0], ranked[-1])]
        out.append((name, *(str(n) for n in of.values()), str(lost), *ends))
    return out


def _short(line: dict[str, Any]) -> str:
    return f"{line['ratio']['median']:.3g} of {line['against']}, target {line['target']:.3g} ({line['what']})"


SUMMARY = ("benchmark", "met", "above the floor", "missed", "no figure", "furthest behind", "furthest ahead")


def show(results: dict[str, dict[str, Any]], out: Path) -> None:
    """Print the table and the summary, and write the table to `table.txt`."""
    from rich.console import Console

    device = device_of(results)
    title = f"{device}{record.no_target(device)}"
    record.show_lines(title, lines_of(results))
    with (out / "table.txt").open("w") as file:
        record.show_lines(title, lines_of(results), Console(file=file, width=220, highlight=False))
    for cells in (SUMMARY, *summary(results)):
        print(" | ".join(cells))


def publish(folder: Path) -> None:
    """Copy a run's results into `results/` and write the READMEs' tables of all devices measured so far.

    Raises:
      SystemExit: the folder has no results, or they are of a CPU, of several devices or commits, or of no commit.
    """
    file = folder / "results.json"
    if not file.exists():
        raise SystemExit(f"{file} does not exist; run_all.py --out {folder} makes it")
    results = record.read(file)
    device = device_of(results)
    if not any(name in device for name in record.JUDGED):
        raise SystemExit(f"{file} is of {device}; only results of {' or '.join(record.JUDGED)} are published")
    for what in ("device", "commit"):
        if len(several := {one[what] for one in results.values() if what in one}) > 1:
            raise SystemExit(f"{file} has results of more than one {what}: {', '.join(sorted(several))}")
    if "uncommitted" in {one.get("commit") for one in results.values()}:
        raise SystemExit(f"{file} names no commit; set BENCHMARK_COMMIT to the commit and measure again")
    short = next(name for name in record.JUDGED if name in device).lower()
    before = measure.RESULTS / f"kernels_{short}.json"
    results = merged(json.loads(before.read_text()) if before.exists() else {}, results)
    written = [measure.write(before.stem, results)]
    texts: dict[str, list[str]] = {"README.md": [], "experiments/benchmarks/README.md": []}
    for name in record.JUDGED:
        path = measure.RESULTS / f"kernels_{name.lower()}.json"
        results_of_device = json.loads(path.read_text()) if path.exists() else {}
        if not any("device" in one for one in results_of_device.values() if isinstance(one, dict)):
            continue
        sentence = about(results_of_device, path)
        texts["README.md"] += [f"{sentence} [All rows](experiments/benchmarks/README.md).", ""]
        rows = [
            (*record.cells(line), row.get("commit", one.get("commit", ""))[:8])
            for one in results_of_device.values()
            for row in one["rows"].values()
            for line in row["lines"]
            if line["verdict"] != record.LATE
        ]
        header = (*record.HEADER, "commit")
        tables = [measure.table(SUMMARY, summary(results_of_device)), "", measure.table(header, rows)]
        texts["experiments/benchmarks/README.md"] += [sentence, "", *tables, ""]
    texts["pallas_kernels/README.md"] = [
        "Their speed on a GPU, and where others are faster: [`experiments/benchmarks`](../experiments/benchmarks)."
    ]
    for readme, text in texts.items():
        measure.put("gpu", "\n".join(text).rstrip(), measure.ROOT / readme)
        written.append(measure.ROOT / readme)
    if any("tflops" in row for row in results.get("train_gpu", {}).get("rows", {}).values()):
        measure.put("gpu steps", "Measured: the rows in the table above.", measure.FOLDER / "README.md")
    print("written to " + ", ".join(str(path.relative_to(measure.ROOT)) for path in written))


def merged(earlier: dict[str, dict[str, Any]], results: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return results with the rows of an earlier run that they have no figure of; each such row names its commit."""
    together = {}
    names = [job.name for job in JOBS]
    for name in sorted({*earlier, *results}, key=lambda n: names.index(n) if n in names else len(names)):
        old, new = earlier.get(name, {}), results.get(name, {})
        measured = {key: old[key] for key in ("commit", "date") if key in old}
        rows = {row: entry if "commit" in entry else entry | measured for row, entry in old.get("rows", {}).items()}
        for row, entry in new.get("rows", {}).items():
            if row not in rows or any(line["ours"] is not None for line in entry["lines"]):
                rows[row] = entry
        together[name] = {**(new or old), "rows": rows}
    return together


def about(results: dict[str, dict[str, Any]], path: Path) -> str:
    """Return a sentence with dates, device and commits of results, and what has no figure."""
    one = next(one for one in results.values() if "device" in one)
    runs = {
        (row.get("date", each.get("date")), row.get("commit", each.get("commit")))
        for each in results.values()
        for row in each["rows"].values()
        if any(line["ours"] is not None for line in row["lines"])
    }
    dated = " and ".join(f"{date} (commit {commit[:8]})" for date, commit in sorted(runs))
    missing = [
        j.name
        for j in JOBS
        if not any(line["ours"] is not None for line in lines_of({"": results.get(j.name, {"rows": {}})}))
    ]
    late = sum(line["verdict"] == record.LATE for line in lines_of(results))
    rest = f" No time was left for {late} rows." if late else ""
    rest += f" Without a figure: {', '.join(missing)}." if missing else ""
    versions = ", ".join(f"{name} {one['versions'][name]}" for name in ("jax", "torch") if name in one["versions"])
    return f"Measured on one {one['device']}, {versions}, on {dated or one['date']} (`{path.name}`).{rest}"


def correctness(out: Path, minutes: float) -> int:
    """Run the parity table on the present device; return its exit status."""
    names = (f"correctness{n}.jsonl" for n in itertools.chain([""], (f"-{i}" for i in itertools.count(2))))
    file = next(out / name for name in names if not (out / name).exists())  # each run has other random data
    command = [sys.executable, "-m", "tests.pallas_kernels.on_device"]
    command += ["--out", str(file.resolve()), "--seconds", f"{60 * minutes:.0f}"]
    process = subprocess.Popen(command, cwd=measure.ROOT, env=measure.environment())
    while True:
        try:
            return process.wait()
        except KeyboardInterrupt:  # the child got the same signal and is about to end
            continue


def nearest(word: str, words: Sequence[str]) -> str:
    """Return "; did you mean X?" for the most similar word, or "" where none is similar."""
    close = difflib.get_close_matches(word, words, n=1)
    return f"; did you mean {close[0]}?" if close else ""


def main() -> int:
    """Run, resume or publish benchmarks, or check correctness; return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, help="folder for the results")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="time for all benchmarks (default %(default)s)")
    parser.add_argument("--only", help=f"comma-separated names: {', '.join(job.name for job in JOBS)}")
    parser.add_argument("--correctness", action="store_true", help="check results instead of measuring speed")
    parser.add_argument("--resume", action="store_true", help="continue the run in --out")
    parser.add_argument("--publish", type=Path, metavar="DIR", help="copy a run's results into the repository")
    args, unread = parser.parse_known_args()
    if unread:
        options = [name for action in parser._actions for name in action.option_strings]
        parser.error(f"unknown argument {unread[0]}{nearest(unread[0], options)}")
    if args.publish:
        publish(args.publish)
        return 0
    if args.out is None:
        parser.error("--out DIR is required: the folder for the results")
    names = [job.name for job in JOBS]
    chosen = args.only.split(",") if args.only else names
    if unknown := set(chosen) - set(names):
        parser.error(f"--only {min(unknown)}: the benchmarks are {', '.join(names)}{nearest(min(unknown), names)}")
    if args.correctness and (args.only or args.resume):
        parser.error("--correctness checks everything from the start; it does not take --only or --resume")
    if args.minutes <= 0:
        parser.error(f"--minutes {args.minutes:g} has to be positive")
    if lacking := [name for name in ("jax", "flax", "optax", "rich") if importlib.util.find_spec(name) is None]:
        parser.error(
            f"{sys.executable} has no {lacking[0]}; make install PYTHON=python3.12 EXTRAS=gpu, then .venv/bin/python"
        )
    try:
        args.out.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        parser.error(f"--out {args.out}: {e.strerror}")
    if args.correctness:
        return correctness(args.out, args.minutes)
    results = run([job for job in JOBS if job.name in chosen], args.out, args.minutes, earlier(args.out, args.resume))
    show(results, args.out)
    return 0 if any(line["ours"] is not None for line in lines_of(results)) else 1


if __name__ == "__main__":
    sys.exit(main())
