"""What experts compile to for absent GPUs, with kernels and without: memory, operations, and the kernels' resources.

    JAX_PLATFORMS=cpu python experiments/grouped_hopper/compiled.py

Programs are compiled, not run: it needs `make install EXTRAS=plot,gpu-aot` and Python 3.12, and no GPU. Writes
compiled.json.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import math
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import aot
from pallas_kernels.aot import compile_kernel
from pallas_kernels.dispatch import Target
from pallas_kernels.grouped_matmul import examples, gpu, grouped_matmul
from pallas_kernels.grouped_matmul.inputs import Facts

HERE = Path(__file__).parent
MIB = 2**20
_read_report = aot._read_report
MODELS = ("mixtral", "qwen3", "gpt-oss")
SMALL = (8192, 8, 2048, 7168)
"""Rows, groups, inputs and outputs of a layer with half of Mixtral's widths, as in experiments/grouped_experts."""


def product(implementation: str) -> Callable[..., Any]:
    """Return a function of rows, matrices and dy: the product and both gradients."""

    def run(x: jax.Array, w: jax.Array, dy: jax.Array, sizes: jax.Array) -> Any:
        y, pull = jax.vjp(lambda x, w: grouped_matmul(x, w, sizes, implementation=implementation), x, w)
        return y, *pull(dy)

    return run


def layer(implementation: str) -> Callable[..., Any]:
    """Return a function of rows, three stacks of matrices and dy: a gated layer of experts and its gradients."""

    def run(x: jax.Array, gate: jax.Array, up: jax.Array, down: jax.Array, dy: jax.Array, sizes: jax.Array) -> Any:
        def forward(x: jax.Array, gate: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
            of = lambda a, w: grouped_matmul(a, w, sizes, implementation=implementation)  # noqa: E731
            return of(jax.nn.silu(of(x, gate)) * of(x, up), down)

        y, pull = jax.vjp(forward, x, gate, up, down)
        return y, *pull(dy)

    return run


def memory(model: str, what: str, implementation: str, topology: str = "h200") -> dict[str, Any]:
    """Compile a program and return its row."""
    m, groups, k, n = examples.MODELS.get(model, SMALL)
    like = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)  # noqa: E731
    sizes, up, down = jax.ShapeDtypeStruct((groups,), jnp.int32), like(groups, k, n), like(groups, n, k)
    if what == "product":
        made = compile_kernel(product(implementation), like(m, k), up, like(m, n), sizes, topology=topology)
    else:
        made = compile_kernel(layer(implementation), like(m, k), up, up, down, like(m, k), sizes, topology=topology)
    used = made.memory_analysis()
    assert used is not None
    outside = used.argument_size_in_bytes + used.output_size_in_bytes
    needed = 6 * m * k * n * (1 if what == "product" else 3)
    without_kernels = {"topology": topology, "of_needed": round(multiplied(made.as_text() or "") / needed, 3)}
    return {
        "model": model,
        "program": what,
        "implementation": implementation,
        **({} if implementation == "mosaic_gpu" else without_kernels),
        "outside_mib": round(outside / MIB, 1),
        "temporary_mib": round(used.temp_size_in_bytes / MIB, 1),
        "ratio": round((outside + used.temp_size_in_bytes) / outside, 3),
    }


def multiplied(text: str) -> int:
    """Return the operations of the matrix products of a compiled program, which has no kernels.

    Args:
      text: the program, in HLO; loops have known lengths.
    """
    bodies = {m[1]: m[2] for m in re.finditer(r"^(?:ENTRY )?(%\S+) \(.*?\{\n(.*?)^\}", text, re.MULTILINE | re.DOTALL)}

    def of(name: str) -> int:
        shapes = dict(re.findall(r"(%\S+) = \w+\[([\d,]*)\]", bodies[name]))
        total = 0
        for line in bodies[name].splitlines():
            if dot := re.search(r"(%\S+) = \S+ dot\((%[^,]+), .*?lhs_contracting_dims=\{([\d,]+)\}", line):
                left = _dims(shapes[dot[2]])
                total += 2 * math.prod(_dims(shapes[dot[1]])) * math.prod(left[d] for d in _dims(dot[3]))
            elif loop := re.search(r" while\(.*body=(%[^,\s]+).*known_trip_count\D+(\d+)", line):
                total += int(loop[2]) * of(loop[1])
            elif called := re.search(r" fusion\(.*calls=(%[^,\s]+)", line):
                total += of(called[1])
            elif "gemm" in line and "custom-call" in line:
                raise ValueError(f"this product is not counted: {line[:200]}")
        return total

    entry = re.search(r"^ENTRY (%\S+)", text, re.MULTILINE)
    assert entry is not None
    return of(entry[1])


def _dims(text: str) -> list[int]:
    return [int(d) for d in text.split(",") if d]


def kernel(model: str, what: str) -> dict[str, Any]:
    """Compile a product and return its kernel's resources, and the wgmma in its code."""
    target = Target("NVIDIA H200", "cuda")
    fn, shapes = examples.case(gpu.run, what, examples.MODELS[model], target=target)
    counts: list[int] = []

    def read(path: Path) -> aot.Report:
        counts.append(path.with_suffix(".ptx").read_text().count("wgmma.mma_async.sync"))
        return _read_report(path)

    with mock.patch.object(aot, "_read_report", read):
        (report,) = aot.kernel_reports(fn, *shapes)
    columns, slots, buffers = _tile(target, model, what)
    return {
        "model": model,
        "product": what,
        "columns": columns,
        "slots": slots,
        "buffers": buffers,
        "registers": report.registers,
        "spilled": report.spill_bytes,
        "serialised": report.wgmma_serialised,
        "shared_memory": report.shared_memory,
        "wgmma": counts[0],
    }


def _tile(target: Target, model: str, what: str) -> tuple[int, int, int]:
    m, groups, k, n = examples.MODELS[model]
    k, n = (n, k) if what == "input gradient" else (k, n)
    product: Any = "outer" if what == "kernel gradient" else "matmul"
    dtypes = ("bfloat16",) * 3
    return gpu.tile_of(target, Facts(product, groups, m, k, n, *dtypes, what == "input gradient"))


def rounding(model: str, name: str, concentration: float) -> dict[str, Any]:
    """Return the rows that the kernel multiplies over those that are routed, for drawn loads of experts."""
    m, groups, _, _ = examples.MODELS[model]
    random = np.random.default_rng(0)
    ratios = []
    for _ in range(20):
        shares = np.ones(groups) / groups if not concentration else random.dirichlet(np.full(groups, concentration))
        sizes = random.multinomial(m, shares)
        ratios.append(gpu.multiplied_rows(sizes, m) / m)
    return {"model": model, "load": name, "ratio": round(float(np.mean(ratios)), 3)}


def main() -> None:
    """Compile every program and write compiled.json."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--part", choices=["kernels", "memory", "tiles"], action="append", default=[])
    # kernels first: one that was compiled before has no report
    parts = parser.parse_args().part or ["kernels", "memory", "tiles"]
    path = HERE / "compiled.json"
    rows: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    rows |= {part: [] for part in parts}
    for part in parts:
        for model in (*MODELS, "half") if part == "tiles" else MODELS:
            if part == "tiles":
                for topology, what in itertools.product(("b200", "a100", "h200"), ("product", "layer")):
                    if what == "product" or (topology == "b200" and model in MODELS):
                        rows[part] += [memory(model, what, name, topology) for name in ("xla", "xla_tiles")]
            elif part == "kernels":
                rows[part] += [kernel(model, what) for what in examples.PRODUCTS]
            else:
                cases = itertools.product(("product", "layer"), ("mosaic_gpu", "xla"))
                rows[part] += [memory(model, *case) for case in cases]
            print(*rows[part], sep="\n", flush=True)
    loads = (("even", 0.0), ("skewed", 0.3))
    rows["rounding"] = [rounding(model, *load) for model in MODELS for load in loads]
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=HERE)
    made = {"date": str(datetime.date.today()), "jax": jax.__version__, "commit": commit.stdout.strip()}
    rows["made"] = rows.get("made", {}) | dict.fromkeys(parts, made)
    path.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
