"""Compile one training step of every gin file of the repository; the tests only trace and lower them.

python -m tests.truth.gin_compiles            # all files; takes minutes, so the tests do not do it
python -m tests.truth.gin_compiles FILE...    # only these; the other rows stay

The step is that of `jaxscale train` (for a sweep, of the trial with the last value of every axis): loss, gradients,
guards, optimizer, on the file's own mesh of simulated CPU devices. Each file has a process of its own, since a process
fixes its number of devices. Nothing is run and no data is opened. The table is `docs/measured/compiled_configs.md`.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax

from jaxscale.layout import simulate_devices
from jaxscale.plan.compile import compile_step
from jaxscale.step.rates import parameter_count
from jaxscale.units import human_bytes
from tests.truth import golden

TABLE = golden.ROOT / "docs" / "measured" / "compiled_configs.md"
HEADER = ("file", "devices", "parameters", "arguments a device", "temporaries a device", "collectives", "with")
HEAD = f"""# One compiled step of every gin file

`python -m tests.truth.gin_compiles` writes this: each file's training step with its guards (of a sweep, of the trial
with the last value of every axis), compiled for its own mesh of simulated CPU devices. Bytes are what XLA's program for
the CPU wants of each device; collectives are instructions of the program, so one in a loop over layers counts once. A
Pallas kernel is stood in for by its plain form, as on any CPU. A file that does not compile has the reason in its row.

| {" | ".join(HEADER)} |
|{"---|" * len(HEADER)}
"""
_COLLECTIVE = re.compile(r"= \S.* (all-reduce|all-gather|reduce-scatter|collective-permute|all-to-all)(-start)?\(")


def compiled(file: Path) -> dict[str, Any]:
    """Compile a file's step and return its row; call this in a process that has not used JAX yet."""
    run, sweep, text = golden.load(file)
    if sweep is not None:
        *_, run = golden.trials(sweep, text)
    devices = 1 if run.layout is None else run.layout.devices
    simulate_devices(devices)
    program = compile_step(run, None, guards=run.guards)
    memory = program.memory_analysis()
    return {
        "devices": f"{devices:,}",
        "parameters": f"{parameter_count(run):,}",
        "arguments a device": human_bytes(memory.argument_size_in_bytes),
        "temporaries a device": human_bytes(memory.temp_size_in_bytes),
        "collectives": str(sum(bool(_COLLECTIVE.search(line)) for line in program.as_text().splitlines())),
    }


def in_a_process(file: Path) -> dict[str, Any]:
    """Call `compiled` in another process; a failure becomes a row too."""
    command = [sys.executable, "-m", "tests.truth.gin_compiles", "--here", str(file)]
    done = subprocess.run(command, cwd=golden.ROOT, capture_output=True, text=True)
    if done.returncode == 0:
        return json.loads(done.stdout.splitlines()[-1])
    last = (done.stderr.strip() or f"ended with {done.returncode}").splitlines()[-1]
    return {"devices": "failed: " + " ".join(last.split())[:300].replace("|", "/")}


def rows(text: str) -> dict[str, list[str]]:
    """Return file -> row of the table."""
    cells = [[c.strip() for c in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("| ")]
    return {row[0].strip("`"): row for row in cells if row[0].startswith("`")}


def main() -> None:
    """Compile files and write the table after each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("--here", action="store_true", help="compile one file in this process, and print JSON")
    args = parser.parse_args()
    if args.here:
        print(json.dumps(compiled(args.files[0])))
        return
    table_rows = rows(TABLE.read_text()) if TABLE.exists() else {}
    versions = {"with": f"jax {jax.__version__}, {_commit()}"}
    everything = golden.gin_files()
    for file in args.files or everything:
        began = time.time()
        row = {**in_a_process(file), **versions, "file": f"`{file}`"}
        table_rows[str(file)] = [row.get(name, "") for name in HEADER]
        print(f"{time.time() - began:.0f} s  {'  '.join(table_rows[str(file)])}", flush=True)
        lines = [f"| {' | '.join(table_rows[str(f)])} |\n" for f in everything if str(f) in table_rows]
        TABLE.write_text(HEAD + "".join(lines))


def _commit() -> str:
    done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=golden.ROOT, capture_output=True, text=True)
    return done.stdout.strip() or "no commit"


if __name__ == "__main__":
    main()
