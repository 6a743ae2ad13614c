"""Test whether programs compiled ahead of time, without a GPU, load and run on one.

    JAX_PLATFORMS=cpu python experiments/benchmarks/aot_load.py --make aot.bin --device h200    without a GPU
    python experiments/benchmarks/aot_load.py --load aot.bin --out DIR                          on the GPU

The file has three programs: one without kernels, one with our softmax kernel, one with our attention kernel. Loading
unpickles the file: load only files that you made. Both machines need the same jaxlib. The output says whether each
program loads, whether its result equals that of the same function compiled on the GPU machine, and how long loading
and compiling take.
"""

from __future__ import annotations

import argparse
import json
import pickle
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import jaxlib
import measure
import numpy as np
from jax.experimental import serialize_executable
from jax.sharding import AxisType, Mesh, PartitionSpec

from pallas_kernels import aot
from pallas_kernels.flash_attention import flash_attention
from pallas_kernels.softmax import softmax

BF16 = jnp.bfloat16
RUNS = "loads and runs"
PROGRAMS: dict[str, tuple[Callable[..., Any], tuple[tuple[int, ...], ...]]] = {
    "XLA alone": (lambda x, w: jax.nn.gelu(x @ w).astype(BF16), ((512, 1024), (1024, 2048))),
    "softmax kernel": (softmax, ((256, 16384),)),
    "attention kernel": (
        lambda q, k, v: flash_attention(q, k, v, causal=True),
        ((1, 2048, 8, 128), (1, 2048, 2, 128), (1, 2048, 2, 128)),
    ),
}


def programs(devices: list[Any]) -> dict[str, Any]:
    """Return the programs lowered for the first of the devices, which may be absent."""
    mesh = Mesh(np.array(devices[:1]), ("device",), axis_types=(AxisType.Auto,))
    whole = jax.NamedSharding(mesh, PartitionSpec())
    lowered = {}
    with jax.set_mesh(mesh):
        for name, (fn, shapes) in PROGRAMS.items():
            mapped = jax.shard_map(fn, in_specs=PartitionSpec(), out_specs=PartitionSpec(), check_vma=False)
            arguments = [jax.ShapeDtypeStruct(shape, BF16, sharding=whole) for shape in shapes]
            lowered[name] = jax.jit(mapped).lower(*arguments)
    return lowered


def make(file: Path, device: str) -> None:
    """Compile the programs for an absent device and write them to a file."""
    devices = list(aot.devices_of(device))
    made = {}
    for name, lowered in programs(devices).items():
        compiled = aot.compile_lowered(lowered, devices)
        kernel = "mosaic_gpu" in lowered.as_text()
        if kernel != ("kernel" in name):
            raise SystemExit(f"{name}: the program has {'a' if kernel else 'no'} kernel")
        made[name] = serialize_executable.serialize(compiled)
    file.write_bytes(pickle.dumps({"device": device, "jaxlib": jaxlib.__version__, "programs": made}))
    print(f"{len(made)} programs for {aot.kind_of(device)}, {file.stat().st_size / 2**20:.1f} MiB: {file}")


def load(file: Path, out: Path | None) -> int:
    """Load the programs of a file, run them on random data, and compare with the same programs compiled here.

    Args:
      file: written by `make`.
      out: folder for the answers, `aot_load.json`, which is complete after each program; or `None`.

    Returns:
      Exit status: 1 where a program does not load or run, or is wrong, else 0.

    Raises:
      SystemExit: the file was not written by `make`, or by another jaxlib.
    """
    try:
        content = pickle.loads(file.read_bytes())
    except (OSError, pickle.UnpicklingError, EOFError) as e:
        raise SystemExit(f"{file} was not written by --make: {e}") from None
    if content["jaxlib"] != jaxlib.__version__:
        raise SystemExit(
            f"{file} was made with jaxlib {content['jaxlib']}, and this is jaxlib {jaxlib.__version__}: make it again"
        )
    devices = jax.devices()[:1]
    rows: dict[str, dict[str, Any]] = {}
    for name in PROGRAMS:
        keys = jax.random.split(jax.random.key(0), 4)
        inputs = [jax.random.normal(k, s, BF16) for k, s in zip(keys, PROGRAMS[name][1], strict=False)]
        inputs = [jax.device_put(x, devices[0]) for x in inputs]
        row: dict[str, Any] = {}
        try:
            begun = time.perf_counter()
            program = serialize_executable.deserialize_and_load(*content["programs"][name], execution_devices=devices)
            row["load_seconds"] = time.perf_counter() - begun
            got = np.asarray(program(*inputs), np.float32)
            jax.clear_caches()
            begun = time.perf_counter()
            here = programs(devices)[name].compile()
            row["compile_seconds"] = time.perf_counter() - begun
            want = np.asarray(here(*inputs), np.float32)
            apart = float(np.linalg.norm(got - want) / np.linalg.norm(want))
            row |= {"apart": apart, "answer": RUNS if apart < 0.01 else "loads, and is WRONG"}
        except Exception as e:  # failing to load is an answer too
            row["answer"] = f"{type(e).__name__}: {str(e).strip().splitlines()[0][:300] if str(e) else ''}"
        print(f"{name}: {row}", flush=True)
        rows[name] = row
        if out is not None:
            out.mkdir(parents=True, exist_ok=True)
            result = {**measure.facts(devices[0].device_kind), "jaxlib": content["jaxlib"], "programs": rows}
            (out / "aot_load.json").write_text(json.dumps(measure.rounded(result), indent=1) + "\n")
    loads = sum(row["answer"] == RUNS for row in rows.values())
    print(f"{loads} of {len(rows)} programs load and run")
    return int(loads < len(rows))


def main() -> int:
    """Compile the programs, or load and run them; return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--make", type=Path, metavar="FILE", help="compile for --device and write the programs to FILE")
    parser.add_argument("--device", default="h200", choices=("h100", "h200"))
    parser.add_argument("--load", type=Path, metavar="FILE", help="load FILE's programs and run them here")
    parser.add_argument("--out", type=Path, help="folder for aot_load.json, the result")
    args = parser.parse_args()
    if (args.make is None) == (args.load is None):
        parser.error("give either --make FILE or --load FILE")
    if args.make:
        try:
            make(args.make, args.device)
        except aot.KernelError as e:
            raise SystemExit(str(e)) from None
        return 0
    return load(args.load, args.out)


if __name__ == "__main__":
    sys.exit(main())
