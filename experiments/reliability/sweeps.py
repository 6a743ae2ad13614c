"""kill -9 of a sweep, of its workers or of both, at random moments: is a trial lost, made twice, or made otherwise?

    python -m experiments.reliability.sweeps --kills 20

Sweeps of six trials on a pool of two processes, each killed again and again until it is done. What it then leaves is
compared with a sweep that nobody disturbed: the loss of every step, bit for bit; what was asked for; and that a trial's
folder was not touched any more after it had finished. Sweeps that are in the results are not repeated.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from jaxscale.sweep import Result
from tests.truth.runs import environment
from tests.truth.sweeps import BASE

RESULTS = Path(__file__).parent / "results" / "sweeps.jsonl"
TRIALS, STEPS = 6, 300
TEXT = f"""{BASE}
train.steps = {STEPS}
train.checkpoint_every = 50
sweep.axes = {{"train.lr": {[round(0.01 * (i + 1), 2) for i in range(TRIALS)]}}}
sweep.runner = @Pool()
Pool.workers = 2
"""
VICTIMS = ("sweep", "worker", "both")


def main() -> None:
    """Runs it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument(
        "--between", type=float, nargs=2, default=(2, 12), metavar="SECONDS", help="least and most between two kills"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args()
    print(f"seed {args.seed}")
    args.results.parent.mkdir(exist_ok=True)
    rows = [json.loads(line) for line in args.results.read_text().splitlines()] if args.results.exists() else []
    folder = Path(tempfile.mkdtemp(prefix="jaxscale-sweeps-"))
    (folder / "lr.gin").write_text(TEXT)
    start(folder, "whole").wait()
    while (left := args.kills - sum(sum(row["kills"].values()) for row in rows)) > 0:
        row = disturbed(folder, len(rows), random.Random(f"{args.seed} {len(rows)}"), args.between, left)
        rows.append(row)
        with args.results.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(row, flush=True)
    kills = sum((Counter(row["kills"]) for row in rows), Counter())
    print(f"| {len(rows)} sweeps | {sum(kills.values())} kills: {dict(kills)} |", end="")
    print(
        f" {sum(row['lost'] for row in rows)} trials lost | {sum(row['twice'] for row in rows)} asked for twice |",
        end="",
    )
    print(
        f" {sum(row['touched'] for row in rows)} touched after their end | {sum(row['other'] for row in rows)} other |"
    )


def start(folder: Path, run: str) -> subprocess.Popen[bytes]:
    """The command, in a process of its own."""
    words = ["sweep", "lr.gin", "--run", run, "--import", "tests.truth.sweeps", "--quiet"]
    kept = environment(JAX_PLATFORMS="cpu", JAXSCALE_CACHE=str(folder / "cache"))
    return subprocess.Popen([sys.executable, "-m", "jaxscale.cli", *words], cwd=folder, env=kept)


def disturbed(
    folder: Path, number: int, chance: random.Random, between: tuple[float, float], most: int
) -> dict[str, object]:
    """One sweep, killed until it is done, or `most` times and then left alone.

    Where a start of a process takes as long as the time between two kills, no trial gets any further: a trial that ends
    three times at one step counts as failed. Choose `between` by the machine.
    """
    path, began, kills, starts = folder / f"sweep-{number}", time.time(), Counter[str](), 0
    ended: dict[Path, tuple[int, ...]] = {}
    while True:
        process, starts = start(folder, path.name), starts + 1
        while process.poll() is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(chance.uniform(*between) if kills.total() < most else None)
            if process.poll() is not None:
                break
            ended |= {run: touched(run) for run in finished(path) if run not in ended}
            victim = chance.choice(VICTIMS)
            workers = children(process.pid)
            killed = {"sweep": [process.pid], "worker": workers[:1], "both": [process.pid, *workers]}[victim]
            for pid in killed:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            kills[victim] += bool(killed)
        if process.wait() == 0:
            break
    whole, got = Result(folder / "whole"), Result(path)
    asked = Counter(json.loads(line)["id"] for line in (path / "trials.jsonl").read_text().splitlines())
    rows = got.table()
    return {
        "kills": dict(kills),
        "starts": starts,
        "lost": TRIALS - sum(row["state"] == "finished" for row in rows),
        "twice": sum(count > 1 for count in asked.values()),
        "touched": sum(touched(run) != before for run, before in ended.items()),
        "other": sum(losses(got, a) != losses(whole, b) for a, b in zip(rows, whole.table(), strict=True)),
        "seconds": round(time.time() - began),
        "between": list(between),
    }


def losses(result: Result, row: dict[str, object]) -> list[float]:
    """Of every step of a run."""
    return [r["loss"] for r in result.run(row).metrics()]


def finished(path: Path) -> list[Path]:
    """Folders of the trials that have come to their end."""
    return [p.parent for p in path.glob("*/outcome.json") if json.loads(p.read_text())["state"] == "finished"]


def touched(run: Path) -> tuple[int, ...]:
    """When each of its files was last written."""
    return tuple(p.stat().st_mtime_ns for p in sorted(run.rglob("*")) if p.is_file())


def children(pid: int) -> list[int]:
    """Processes that a process has started, from any of its threads."""
    with contextlib.suppress(OSError):
        tasks = Path(f"/proc/{pid}/task").iterdir()
        return [int(word) for task in tasks for word in (task / "children").read_text().split()]
    return []


if __name__ == "__main__":
    main()
