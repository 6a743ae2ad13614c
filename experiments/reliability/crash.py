"""Kill a training run (SIGKILL) at random moments and restart it: test that nothing is lost and no file left behind.

    python -m experiments.reliability.crash --kills 200

A run saves every 100 steps and keeps two checkpoints. Each trial waits for one of four moments (between saves; while a
checkpoint is written; while it is committed; while an old one is deleted), which it recognises by file names in the run
folder, waits a random time, and kills one process of two, the coordinator, or all. It records the state of the folder,
and starts the same command again. Processes whose partner was killed have two seconds to notice.
"""

from __future__ import annotations

import argparse
import functools
import json
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import jaxscale as js
from experiments.reliability import lives
from jaxscale.train.checkpoints.manifest import read_manifest
from tests.truth.runs import bigram

RESULTS = Path(__file__).parent / "results" / "crash.jsonl"
EVERY, KEEP = 100, 2
MOMENTS = ("step", "save", "commit", "deletion")
VICTIMS = ("all", "all", "all", "all", "one of two", "coordinator", "all of two")
"""Runs of one process are more frequent, because two processes take three times as long to start."""


def main() -> None:
    """Run the trials that the results file lacks, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=200, help="number of trials (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--results", type=Path, default=RESULTS, help="trials in this file are not repeated")
    args = parser.parse_args()
    print(f"seed {args.seed}")
    rows = [json.loads(line) for line in args.results.read_text().splitlines()] if args.results.exists() else []
    folder = Path(tempfile.mkdtemp(prefix="jaxscale-crash-"))
    lives.configure(folder / "cache")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # exits through `except`, which kills the children
    world = World(folder)
    try:
        with args.results.open("a") as file:
            for trial in range(len(rows), args.kills):
                row = world.trial(trial, random.Random(f"{args.seed} {trial}"))
                rows.append(row)
                file.write(json.dumps(row) + "\n")
                file.flush()
                print(row, flush=True)
    except BaseException:
        lives.kill(world.children)
        print(f"the run remains in {folder}")
        raise
    shutil.rmtree(folder)
    print(table(rows))
    if any(row["faults"] for row in rows):
        raise SystemExit(1)


class World:
    """A run that is killed and restarted again and again."""

    def __init__(self, folder: Path):
        self.run, self.log = folder / "run", folder / "log"
        self.before: list[dict[str, Any]] = []
        self.had: list[int] = []
        self.children: list[int] = []
        self.fit = functools.partial(_fit, self.run)

    def trial(self, number: int, random: random.Random) -> dict[str, Any]:
        """Start the run, kill it, and compare where it resumed with what the kill before left on disk."""
        moment = random.choice(MOMENTS)
        victim = random.choice(VICTIMS)
        processes = 1 if victim == "all" else 2
        shutil.rmtree(self.log, ignore_errors=True)
        self.log.unlink(missing_ok=True)
        began = time.monotonic()
        self.children = children = lives.start(self.fit, processes, 2 // processes, self.log)
        rows_before = len(self._rows())
        faults = []
        # before it is killed, it has to take steps and finish a checkpoint of its own
        alive = lives.until(lambda: len(self._rows()) > rows_before, children)
        restart = time.monotonic() - began
        target = max(self._finished(), default=0)
        alive = alive and lives.until(lambda: max(self._finished(), default=0) > target, children)
        alive = alive and lives.until(lambda: self._seen(moment), children)
        time.sleep(random.random() * {"step": 0.3, "save": 0.01, "commit": 0.002, "deletion": 0.001}[moment])
        if not alive:
            faults.append("did not get that far: " + " ".join(self.log.read_text().splitlines()[-3:]))
        killed = {"one of two": children[1:], "coordinator": children[:1]}.get(victim, children)
        lives.kill(killed)
        lives.until(lambda: all(map(lives.is_dead, children)), [], 2)
        lives.kill(children)
        lives.wait(children)
        self.children = []

        rows = self._rows()[rows_before:]
        first, last = rows[0]["step"] if rows else 0, rows[-1]["step"] if rows else 0
        lost = self.before[-1]["step"] - (first - 1) if self.before else 0
        if self.before and first - 1 != max(self.had):
            faults.append(f"resumed from {first - 1} instead of {max(self.had)}, the newest on disk")
        known = {row["step"]: row["loss"] for row in self.before}
        if any(known.get(row["step"], row["loss"]) != row["loss"] for row in rows):
            faults.append("a step that ran twice has two losses")
        left = sorted(p.name for p in self._folder().iterdir() if "." in p.name)
        self.before, self.had = rows, self._finished()
        for step in self.had:
            faults += [str(f) for f in js.train.Checkpoints(self._folder()).arrays(step).faults()]
            read_manifest(self._folder() / str(step))
        if lost > 2 * EVERY:  # since the last commit, while the next save was being written
            faults.append(f"lost {lost} steps")
        if len(self.had) > KEEP + 1:
            faults.append(f"too many checkpoints: {self.had}")
        if len({name.rpartition("-")[2] for name in left}) > 1:
            faults.append(f"leftovers were not deleted: {left}")
        return {
            "trial": number,
            "victim": victim,
            "aimed at": moment,
            "hit": _hit(self._folder(), left),
            "from step": first - 1,
            "to step": last,
            "lost by the kill before": lost,
            "seconds to the first step": round(restart, 2),
            "faults": faults,
        }

    def _folder(self) -> Path:
        return self.run / "checkpoints"

    def _finished(self) -> list[int]:
        return js.train.Checkpoints(self._folder()).steps()

    def _rows(self) -> list[dict[str, Any]]:
        path = self.run / "metrics.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}")]

    def _seen(self, moment: str) -> bool:
        names = [p for p in self._folder().iterdir() if "." in p.name]
        partial = [p for p in names if ".partial-" in p.name]
        return {
            "step": lambda: not partial,
            "save": lambda: bool(partial),
            "commit": lambda: any((p / "manifest.json").exists() for p in partial),
            "deletion": lambda: any(".deleted-" in p.name for p in names),
        }[moment]()


def _hit(folder: Path, left: list[str]) -> str:
    """Return what the kill interrupted, from the files that it left."""
    if any(".deleted-" in name for name in left):
        return "deletion"
    for name in left:
        if ".partial-" in name:
            return "commit" if (folder / name / "manifest.json").exists() else "save"
    return "step"


def _fit(run: Path) -> None:
    settings = bigram(layout=js.Layout("data=-1"), steps=10**6, checkpoint_every=EVERY, keep=KEEP)
    js.fit(js.TrainConfig(**settings), run=run, resume="newest", quiet=True)


def table(rows: list[dict[str, Any]]) -> str:
    """Return the results as Markdown."""
    hits = Counter((row["hit"], row["victim"]) for row in rows)
    victims = sorted({row["victim"] for row in rows})
    lines = ["| interrupted | " + " | ".join(victims) + " |", "|---" * (len(victims) + 1) + "|"]
    for hit in MOMENTS:
        lines.append(f"| {hit} | " + " | ".join(str(hits[hit, victim]) for victim in victims) + " |")
    lost = sorted(row["lost by the kill before"] for row in rows[1:])
    good = sum(not row["faults"] for row in rows)
    within = sum(n <= EVERY for n in lost)
    lines += [
        "",
        f"{good} of {len(rows)} lives without a fault. Steps lost by a kill: median {lost[len(lost) // 2]}, at most "
        f"{lost[-1]}; {within} of {len(lost)} at most one interval of {EVERY} steps, the others were killed while the "
        "next checkpoint was being written.",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
