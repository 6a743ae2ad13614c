"""Compile time of a 48-layer model's training step for 8 chips and for 1024, with the same code and layout.

    python experiments/parallelism/scale.py             # scale.json; a few minutes on two idle cores
    python experiments/parallelism/scale.py --rounds 4  # two by default

Needs `make install EXTRAS=tpu`. Every compilation is a process of its own without a compilation cache, and both take
turns, A B then B A, so that other load slows both alike. Two clocks: wall-clock time, and processor time of all
threads, which varies less on a shared machine.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import jax

import jaxscale as js
from jaxscale.models import Transformer
from jaxscale.plan import compile_step

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "benchmarks"))

import measure  # noqa: E402

LIMIT = 2.0
"""Limit of the large compilation's time over the small one's."""

CASES = {
    "8 chips": ("v5p:2x2x2", "data=2,fsdp=2,tensor=2"),
    "1024 chips": ("v5p:8x8x16", "data=16,fsdp=16,tensor=4"),
}
"""Name -> topology and mesh: one layout in two sizes."""

SMALL, LARGE = CASES
PHASES = ("lower", "compile", "both")
CLOCKS = ("wall", "cpu")


def config_of(mesh: str) -> js.TrainConfig:
    """Return the config: 48 layers, width 1024, remat, bfloat16; two rows of 2048 tokens a data-parallel device."""
    sizes = js.Layout(mesh).sizes
    layout = js.Layout(mesh, sequence_sharded=sizes["tensor"] > 1)
    model = Transformer.Config(depth=48, width=1024, heads=8, vocab=32768, dtype="bfloat16", memory="full")
    return js.TrainConfig(model=model, layout=layout, batch_size=2 * sizes["data"] * sizes["fsdp"], seq_len=2048)


def compiled(case: str) -> dict[str, Any]:
    """Compile; return the seconds of each phase on each clock. `lower` is everything before XLA gets the program."""
    topology, mesh = CASES[case]
    clocks = lambda: (time.perf_counter(), time.process_time())  # noqa: E731
    lowered = start = clocks()

    def hear(event: str, duration: float, **_: str | int) -> None:
        nonlocal lowered
        if event.endswith("jaxpr_to_mlir_module_duration"):  # the last such event is the step's
            lowered = clocks()

    jax.monitoring.register_event_duration_secs_listener(hear)
    step = compile_step(config_of(mesh), topology)
    end = clocks()
    assert start < lowered < end
    seconds = zip(*((b - a, c - b, c - a) for a, b, c in zip(start, lowered, end, strict=True)), strict=True)
    phases = {phase: dict(zip(CLOCKS, both, strict=True)) for phase, both in zip(PHASES, seconds, strict=True)}
    argument_bytes = step.memory_analysis().argument_size_in_bytes
    return {**phases, "argument_bytes": argument_bytes, "device": jax.devices()[0].device_kind}


def report(rows: list[dict[str, Any]]) -> None:
    """Print and write the ratios of all complete rounds so far."""
    of = {c: [r for r in rows if r["case"] == c] for c in CASES}
    pairs = list(zip(of[LARGE], of[SMALL], strict=True))
    ratio = {
        phase: {clock: statistics.median(a[phase][clock] / b[phase][clock] for a, b in pairs) for clock in CLOCKS}
        for phase in PHASES
    }
    verdict = "met" if max(ratio["both"].values()) < LIMIT else "missed"
    times = ", ".join(f"{p} {r['wall']:.2f} ({r['cpu']:.2f} of processors)" for p, r in ratio.items())
    print(f"{LARGE} / {SMALL}, median of {len(pairs)}: {times}; below {LIMIT:g}: {verdict}")
    about = measure.facts(rows[0]["device"])
    about["versions"]["libtpu"] = importlib.metadata.version("libtpu")
    result = {**about, "cases": CASES, "limit": LIMIT, "rows": rows, "median_ratio": ratio}
    (HERE / "scale.json").write_text(json.dumps(result, indent=1) + "\n")


def main() -> None:
    """Compile in turns and report after each round."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--case", choices=CASES, help=argparse.SUPPRESS)  # with --into: one compilation in this process
    parser.add_argument("--into", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.case:
        args.into.write_text(json.dumps(compiled(args.case)))
        return
    os.environ["JAX_PLATFORMS"] = "cpu"
    rows: list[dict[str, Any]] = []
    for i in range(args.rounds):
        for case in list(CASES) if i % 2 == 0 else reversed(CASES):
            load = os.getloadavg()[0]
            rows.append({"case": case, "load": load, **measure.in_subprocess(__file__, ["--case", case])})
            last = rows[-1]
            times = ", ".join(f"{p} {last[p]['wall']:.1f} s ({last[p]['cpu']:.1f} of processors)" for p in PHASES)
            print(f"{case}: {times}; load {load:.1f}", flush=True)
        report(rows)


if __name__ == "__main__":
    main()
