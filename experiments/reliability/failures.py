"""Measure how soon the processes of a run notice that another failed, and what they report.

    python experiments/reliability/failures.py         # every fault at every process of two, and a restart
    python experiments/reliability/failures.py --fault stop --process 1

Two local processes train; at step 6 one of them is killed (SIGKILL), stopped (SIGSTOP), sleeps for ever while it
fetches data, or raises. Measured are the seconds until the other process has ended, its report and its exit code; and
under `jaxscale launch` the seconds until the first step after the restart. Nothing is random. Results are written to
results/failures.json after each trial; trials in that file are not repeated.
"""

from __future__ import annotations

import argparse
import functools
import importlib.metadata
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "failures.json"
STEP = 6
FAULTS = ("kill", "stop", "sleep", "raise")

CHILD = """
import os, signal, sys, time
fault, victim, address, process, folder = sys.argv[1:]
import jaxscale as js
js.simulate_devices(2)
js.init_distributed(address, 2, int(process))
from jaxscale.train.loop import Loop
place = Loop._place

def placed(self, done):
    if done + 1 == {step} and process == victim:
        print("fault", time.time(), flush=True)
        if fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        if fault == "sleep":
            time.sleep(1e6)
        if fault == "raise":
            raise OSError("the disk with the tokens went away")
    return place(self, done)

Loop._place = placed
model = js.models.Transformer.Config(depth=1, width=32, heads=2, hidden=64)
js.fit(model=model, data=js.data.synthetic(256, documents=64, length=64), layout=js.Layout("data=4"), steps=10**6,
       batch_size=8, seq_len=16, eval_batches=0, checkpoint_every=5, run=folder, quiet=True)
""".replace("{step}", str(STEP))


GIN = """
import fault
train.model = @Transformer()
Transformer.depth = 1
Transformer.width = 32
Transformer.heads = 2
Transformer.hidden = 64
train.data = @synthetic()
synthetic.vocab_size = 256
synthetic.documents = 64
synthetic.length = 64
train.layout = @Layout()
Layout.mesh = "data=-1"
train.steps = 40
train.batch_size = 8
train.seq_len = 16
train.eval_batches = 0
train.checkpoint_every = 5
"""

FAULT = """
import os, signal, time
import jax
from jaxscale.train.loop import Loop
place = Loop._place

def placed(self, done):
    if done + 1 == 18 and jax.process_index() == 1 and not os.path.exists("fault"):
        open("fault", "w").write(str(time.time()))
        os.kill(os.getpid(), signal.SIGKILL)
    return place(self, done)

Loop._place = placed
"""


def environment(folder: str) -> dict[str, str]:
    """Return the environment of the training processes, whose compilation cache all trials share."""
    cache = {"JAX_COMPILATION_CACHE_DIR": f"{folder}/jax", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    return {**os.environ, **cache, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(HERE.parents[1])}


def trial(fault: str, victim: int, cache: str, limit: float = 120.0) -> dict[str, object]:
    """Cause one fault; return the seconds until the other process ended, its exit code and its report."""
    with socket.socket() as free, tempfile.TemporaryDirectory() as folder:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
        free.close()
        words = lambda i: [sys.executable, "-c", CHILD, fault, str(victim), address, str(i), f"{folder}/run"]  # noqa: E731
        started = [
            subprocess.Popen(
                words(i), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(cache)
            )
            for i in range(2)
        ]
        survivor = started[1 - victim]
        try:
            lines = iter(started[victim].stdout)  # type: ignore[arg-type]
            begun = float(next(line for line in lines if line.startswith("fault ")).split()[1])
            _, errors = survivor.communicate(timeout=limit)
            seconds = time.time() - begun
        except subprocess.TimeoutExpired:
            seconds, errors = limit, "still running"
        finally:
            for p in started:
                p.send_signal(signal.SIGKILL)
        reports = [line for line in errors.splitlines() if line.startswith("jaxscale: ")]
        outcome = {"fault": fault, "process": victim, "seconds": round(seconds, 1), "exit_code": survivor.returncode}
        return {**outcome, "reports": [r.replace(folder, "") for r in reports]}


def restart(cache: str) -> dict[str, object]:
    """Kill a process under `jaxscale launch`; return the seconds until the first step after the restart ended."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "small.gin").write_text(GIN)
        Path(folder, "fault.py").write_text(FAULT)
        words = ["launch", "--nproc", "2", "--", "train", "small.gin", "--devices", "2", "--run", "run"]
        done = subprocess.run(
            [sys.executable, "-m", "jaxscale.cli", *words], cwd=folder, env=environment(cache), text=True,
            capture_output=True, timeout=900,
        )  # fmt: skip
        if not Path(folder, "fault").exists():
            raise SystemExit(f"the run ended before its fault: {done.stderr}")
        begun = float(Path(folder, "fault").read_text())
        rows = [json.loads(line) for line in Path(folder, "run", "metrics.jsonl").read_text().splitlines()]
        after = [row for row in rows if row["time"] > begun + 1]
        reports = [line for line in done.stderr.splitlines() if line.startswith("jaxscale launch: ")]
        seconds = round(after[0]["time"] - begun, 1)
        outcome = {"fault": "kill under launch", "process": 1, "seconds": seconds, "exit_code": done.returncode}
        return {**outcome, "resumed_with_step": after[0]["step"], "last_step": rows[-1]["step"], "reports": reports}


def main() -> None:
    """Run one trial and print it, or every trial that the results lack and write them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fault", choices=FAULTS)
    parser.add_argument("--process", type=int, choices=(0, 1))
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as cache:
        if args.fault is not None:
            print(json.dumps(trial(args.fault, args.process or 0, cache)))
            return
        trials = {f"{f} {p}": functools.partial(trial, f, p, cache) for f in FAULTS for p in (1, 0)}
        results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
        for name, run in {**trials, "restart": functools.partial(restart, cache)}.items():
            if name not in results:
                about = {
                    "date": time.strftime("%Y-%m-%d"),
                    "cores": os.cpu_count(),
                    "load": round(os.getloadavg()[0], 1),
                }
                results[name] = {**run(), **about, "jax": importlib.metadata.version("jax")}
                RESULTS.parent.mkdir(exist_ok=True)
                RESULTS.write_text(json.dumps(results, indent=1) + "\n")
            print(json.dumps(results[name]), flush=True)


if __name__ == "__main__":
    main()
