"""Held-out loss of processes that train apart, beside synchronous training; one is killed, and one joins.

python experiments/slow_links/peers.py          # twenty minutes on two busy cores; resumes
python experiments/slow_links/peers.py --table  # train nothing; the table from results/peers.json
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jaxscale as js
from jaxscale.parallel import Float32Wire, IntegerWire
from jaxscale.peers import Coordinator
from jaxscale.step import PeerDiLoCo

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "peers.json"
STEPS, ROWS, SEQ, EVERY, PEERS = 300, 32, 64, 20, 4
WIRES = {"float32": Float32Wire(), "8 bits": IntegerWire()}
CASES = {"one killed, one joins": "float32", "4 processes": "float32", "4 processes, 8 bits": "8 bits"}
KILLED, JOINED = 5, 10  # rounds


@dataclasses.dataclass(frozen=True)
class Hold(js.step.Callback):
    """Waits before the end of a round until a file exists, so that a process that starts slowly joins at that round."""

    file: str

    def on_step(self, step: int, row: Any, run: Any) -> None:
        """Wait."""
        while step == JOINED * EVERY - 1 and not Path(self.file).exists():
            time.sleep(0.1)


def train(address: str, wire: str, run: str, *hold: str) -> None:
    """Train one process: the settings of train.py, and a fourth of the rows."""
    config = js.TrainConfig(
        model=js.models.Transformer.Config(depth=2, width=64, heads=4, vocab=256),
        algorithm=PeerDiLoCo(coordinator=address, shares=PEERS, every=EVERY, wire=WIRES[wire]),
        layout=None,
        steps=STEPS,
        batch_size=ROWS // PEERS,
        seq_len=SEQ,
        lr=3e-3,
        eval_every=EVERY,
        eval_batches=8 * PEERS,  # the same held-out rows as in train.py
        callbacks=tuple(map(Hold, hold)),
    )
    js.fit(config, run=run, quiet=True)


@contextlib.contextmanager
def coordinated(say: Callable[[str], None]) -> Iterator[Coordinator]:
    """Serve a coordinator in a thread."""
    coordinator, over = Coordinator(least=PEERS, patience=3600, say=say), threading.Event()
    thread = threading.Thread(target=coordinator.serve, args=(over.is_set,))
    thread.start()
    try:
        yield coordinator
    finally:
        over.set()
        thread.join()


def wait_for(coordinator: Coordinator, round: int, started: list[subprocess.Popen[bytes]]) -> None:
    """Wait until a round has ended, as long as processes live."""
    while coordinator.round < round:
        assert any(p.poll() is None for p in started), "all processes have ended"
        time.sleep(0.01)


def measure(name: str, folder: Path) -> dict[str, Any]:
    """Train the processes of a case; the curve is that of one which is there from first to last."""
    folder.mkdir()
    lines: list[str] = []
    with coordinated(lines.append) as coordinator:
        address = "{}:{}".format(*coordinator.address)

        def start(run: str) -> subprocess.Popen[bytes]:
            words = [sys.executable, __file__, "--train", address, CASES[name], str(folder / run)]
            words += [str(folder / "go")] if "killed" in name else []
            programs = {"JAX_COMPILATION_CACHE_DIR": str(folder.parent / "programs")}
            return subprocess.Popen(words, env=programs | os.environ)

        started = [start(str(i)) for i in range(PEERS)]
        try:
            if "killed" in name:
                wait_for(coordinator, KILLED, started)
                started[-1].send_signal(signal.SIGKILL)
                started.append(start("new"))
                while not any("new has joined" in line for line in lines):
                    time.sleep(0.1)
                (folder / "go").touch()
            codes = [p.wait() for p in started]
        finally:
            for p in started:
                p.kill()
    rows = js.Run(folder / "0").metrics()
    rounds = [r for r in rows if "peers" in r]
    ends = {run: js.Run(folder / run).metrics()[-1]["shared_digest"] for run in ("0", "1", "2")}
    if "killed" in name:
        ends["new"] = js.Run(folder / "new").metrics()[-1]["shared_digest"]
    assert len(set(ends.values())) == 1, ends
    return {
        "heldout": [(r["step"], round(r["eval_loss"], 4)) for r in rows if "eval_loss" in r],
        "peers": [int(r["peers"]) for r in rounds],
        "bytes": sum(r["outer_bytes_sent"] for r in rounds) / STEPS,
        "attempts": [int(r["outer_attempts"]) for r in rounds],
        "seconds": sorted(r["outer_seconds"] for r in rounds)[len(rounds) // 2],
        "tokens": sum(int(r["peers"]) for r in rounds) * EVERY * ROWS // PEERS * SEQ,
        "codes": codes,
    }


def table() -> None:
    """Print the README's table."""
    results = json.loads(RESULTS.read_text())
    others = json.loads((HERE / "results" / "curves.json").read_text())
    print("| | held-out nats per byte | thousand tokens | bytes a step | processes in the rounds |")  # noqa: T201
    print("|---|---|---|---|---|")  # noqa: T201
    for name in ("synchronous", "DiLoCo", "DiLoCo, 8 bits"):
        loss, sent = others[name]["heldout"][-1][1], others[name]["bytes"]
        print(f"| {name}, on one mesh | {loss:.4f} | {STEPS * ROWS * SEQ / 1e3:.0f} | {sent:,.0f} | |")  # noqa: T201
    for name, of in results.items():
        counts = "".join(map(str, of["peers"]))
        print(f"| {name} | {of['heldout'][-1][1]:.4f} | {of['tokens'] / 1e3:.0f} | {of['bytes']:,.0f} | {counts} |")  # noqa: T201


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--table", action="store_true", help="do not train")
    parser.add_argument("--train", nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.train:
        train(*args.train)
        sys.exit()
    if not args.table:
        results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
        with tempfile.TemporaryDirectory() as folder:
            for i, name in enumerate(CASES):
                if name not in results:
                    results[name] = measure(name, Path(folder) / str(i))
                    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    table()
