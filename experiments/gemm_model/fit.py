"""Time matrix products of many shapes, fit `jaxscale.plan.gemm` to two thirds and predict the rest.

taskset -c 0 python experiments/gemm_model/fit.py --own-time        # on one CPU core
python experiments/gemm_model/fit.py --largest 8192 --dtypes bfloat16 float8_e4m3fn     # on a GPU
python experiments/gemm_model/fit.py --read experiments/gemm_model/cpu.json             # fit again, without timing
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from pathlib import Path

import jax

from jaxscale.plan import gemm
from jaxscale.plan.clock import STEADY, own_time


def main() -> None:
    """Print a line per dtype, and write measurements, models and scores."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--shapes", type=int, default=90)
    parser.add_argument("--largest", type=int, default=768)
    parser.add_argument("--own-time", action="store_true", help="processor time, for a busy CPU")
    parser.add_argument("--read", metavar="FILE", help="fit earlier measurements in this file")
    parser.add_argument("--out", metavar="FILE")
    args = parser.parse_args()
    if args.read:
        old = json.loads(Path(args.read).read_text())
        measured = {d: [gemm.Gemm(**g) for g in entry["products"]] for d, entry in old["dtypes"].items()}
    else:
        timer = own_time if args.own_time else time.perf_counter
        sizes = gemm.shapes(args.shapes, args.largest)
        measured = {d: gemm.measure(sizes, d, timer=timer) for d in args.dtypes}
    cores = (1, *([n] if (n := getattr(jax.devices()[0], "core_count", None)) else []))
    dtypes = {}
    for dtype, products in measured.items():
        seen, unseen = gemm.split(products)
        model = gemm.fit(seen, cores=cores)
        fitted, held_out = gemm.score(model, seen), gemm.score(model, unseen)
        print(f"{dtype}: {model}\n  fitted on   {fitted}\n  not fitted  {held_out}")
        dtypes[dtype] = {
            "model": model.to_json(),
            "fitted": fitted.to_json(),
            "held_out": held_out.to_json(),
            "unsteady": sum(p.spread > STEADY for p in products),
            "products": [dataclasses.asdict(p) for p in products],
        }
    if args.out:
        about = {"device": jax.devices()[0].device_kind, "jax": jax.__version__, "own_time": args.own_time}
        Path(args.out).write_text(json.dumps(about | {"dtypes": dtypes}, indent=1) + "\n")


if __name__ == "__main__":
    main()
