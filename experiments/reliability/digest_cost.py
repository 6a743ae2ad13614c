"""Time of digests: the same state is saved with each digest and without one, in turns.

python -m experiments.reliability.digest_cost --megabytes 256
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
import time
from pathlib import Path
from statistics import median

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import numpy as np

from jaxscale.train.checkpoints import Checkpoints, digest
from jaxscale.train.checkpoints.chunks import to_host

RESULTS = Path(__file__).parent / "results" / "digest_cost.json"


def main() -> None:
    """Measure, print and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args()
    print(f"seed {args.seed}, load {os.getloadavg()[0]:.1f}")
    values = np.random.default_rng(args.seed).standard_normal((args.megabytes, 2**18), np.float32)
    arrays = to_host({"weight": jax.device_put(values)})
    about = {"shape": list(values.shape), "dtype": "float32", "axes": None, "chunk": list(arrays["weight"].chunk)}
    digest.DIGESTS["none"] = lambda data: ""
    names = [name for name in ("none", "xxh3_64", "crc32") if name in digest.DIGESTS]
    seconds: dict[str, list[float]] = {name: [] for name in names}
    processor: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(args.rounds):
        for name in names if turn % 2 else reversed(names):
            digest.NEW = name
            folder = Path(tempfile.mkdtemp(prefix="jaxscale-digest-"))
            began = time.perf_counter(), time.process_time()
            checkpoints = Checkpoints(folder)
            checkpoints.save_host(0, arrays, {"leaves": {"weight": about}})
            checkpoints.close()
            seconds[name].append(time.perf_counter() - began[0])
            processor[name].append(time.process_time() - began[1])
            shutil.rmtree(folder)
    alone: dict[str, float] = {}
    chunk = values.view(np.uint8).reshape(-1)[: 64 * 2**20]
    for name in names:
        times = []
        for _ in range(args.rounds):
            start = time.process_time()
            digest.DIGESTS[name](chunk)
            times.append(time.process_time() - start)
        alone[name] = min(times) * values.nbytes / chunk.nbytes
    for name in names:
        ratios = [a / b for a, b in zip(seconds[name], seconds["none"], strict=True)]
        print(
            f"{name}: save {median(seconds[name]):.2f} s ({values.nbytes / median(seconds[name]) / 1e9:.2f} GB/s), "
            f"{median(ratios):.3f} of none (pairs in one turn), processor {median(processor[name]):.2f} s, "
            f"of which the digest {alone[name]:.3f} s, {alone[name] / median(seconds['none']):.1%} of the save"
        )
    report = {"bytes": values.nbytes, "seconds": seconds, "processor": processor, "digest alone": alone}
    args.results.write_text(json.dumps({**report, "load": os.getloadavg()}, indent=1) + "\n")


if __name__ == "__main__":
    main()
