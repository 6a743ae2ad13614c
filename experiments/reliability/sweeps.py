"""Kill a sweep (SIGKILL), its workers or both at random moments: test that no trial is lost, repeated or different.

    python -m experiments.reliability.sweeps --kills 20

Sweeps of six trials on a pool of two processes, each killed again and again until it is done. Its folder is then
compared with that of an undisturbed sweep: the loss of every step, bit for bit; the proposed trials; and that no file
of a finished trial was written again. Sweeps in the results file are not repeated.
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
    """Run sweeps until they were killed often enough, and print a summary."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=20, help="in all sweeps (default %(default)s)")
    parser.add_argument(
        "--between",
        type=float,
        nargs=2,
        default=(2, 12),
        metavar="SECONDS",
        help="shortest and longest time between two kills",
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
        f" {sum(row['lost'] for row in rows)} trials lost | {sum(row['twice'] for row in rows)} proposed twice |",
        end="",
    )
    touched_late, other = sum(row["touched"] for row in rows), sum(row["other"] for row in rows)
    print(f" {touched_late} written after their end | {other} different |")


def start(folder: Path, run: str) -> subprocess.Popen[bytes]:
    """Start `jaxscale sweep` in a process of its own."""
    words = ["sweep", "lr.gin", "--run", run, "--import", "tests.truth.sweeps", "--quiet"]
    variables = environment(JAX_PLATFORMS="cpu", JAXSCALE_CACHE=str(folder / "cache"))
    return subprocess.Popen([sys.executable, "-m", "jaxscale.cli", *words], cwd=folder, env=variables)


def disturbed(
    folder: Path, number: int, chance: random.Random, between: tuple[float, float], most: int
) -> dict[str, object]:
    """Run one sweep and kill it until it is done, at most `most` times; return what was lost or repeated.

    Choose `between` for the machine: where a process takes as long to start as the time between two kills, no trial
    makes progress, and a trial that ends three times at the same step counts as failed.
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
    proposed = Counter(json.loads(line)["id"] for line in (path / "trials.jsonl").read_text().splitlines())
    rows = got.table()
    return {
        "kills": dict(kills),
        "starts": starts,
        "lost": TRIALS - sum(row["state"] == "finished" for row in rows),
        "twice": sum(count > 1 for count in proposed.values()),
        "touched": sum(touched(run) != before for run, before in ended.items()),
        "other": sum(losses(got, a) != losses(whole, b) for a, b in zip(rows, whole.table(), strict=True)),
        "seconds": round(time.time() - began),
        "between": list(between),
    }


def losses(result: Result, row: dict[str, object]) -> list[float]:
    """Return the loss of every step of a run."""
    return [r["loss"] for r in result.run(row).metrics()]


def finished(path: Path) -> list[Path]:
    """Return the folders of finished trials."""
    return [p.parent for p in path.glob("*/outcome.json") if json.loads(p.read_text())["state"] == "finished"]


def touched(run: Path) -> tuple[int, ...]:
    """Return when each file of a run was last written."""
    return tuple(p.stat().st_mtime_ns for p in sorted(run.rglob("*")) if p.is_file())


def children(pid: int) -> list[int]:
    """Return the ids of the processes that any thread of a process has started."""
    with contextlib.suppress(OSError):
        tasks = Path(f"/proc/{pid}/task").iterdir()
        return [int(word) for task in tasks for word in (task / "children").read_text().split()]
    return []


if __name__ == "__main__":
    main()
