"""Memory that 8-bit optimizer states save: bytes of the arrays, and memory of the compiled step.

    python experiments/eight_bit_states/memory.py      # Llama 3 8B, compiled for 8 absent v5p chips

Needs `make install EXTRAS=tpu`; about two minutes a row on two cores. Writes memory.json.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import math
import subprocess
import time
from pathlib import Path
from typing import Any

import jax

import jaxscale as js
from jaxscale.models.presets import llama3_8b
from jaxscale.optim import AdamW, AdamW8bit, is_quantized
from jaxscale.plan import compile_step
from jaxscale.step import blueprint_of
from pallas_kernels import chosen, forget

HERE = Path(__file__).parent
STATES = {"32-bit": AdamW(), "8-bit": AdamW8bit()}
GIB = 2**30


def counted(config: js.TrainConfig) -> dict[str, Any]:
    """Count the bytes of optimizer state from its arrays: of all arrays, and of the 8-bit ones."""
    blueprint, _ = blueprint_of(config)
    state = blueprint.abstract_state().opt_state
    size = lambda tree: sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))  # noqa: E731
    eight = [q for q in jax.tree.leaves(state, is_leaf=is_quantized) if is_quantized(q)]
    params = sum(i.size for i in jax.tree.leaves(blueprint.infos))
    result = {"parameters": params, "state_bytes": size(state), "state_bytes_per_parameter": size(state) / params}
    if eight:
        covered = sum(math.prod(q.shape) for q in eight) // 2  # two moments each
        result |= {"parameters_in_8_bits": covered, "bytes_per_parameter_in_8_bits": size(eight) / covered}
    return result


def compiled(config: js.TrainConfig, topology: str) -> dict[str, Any]:
    """Return the memory per device of the compiled training step."""
    forget()
    start = time.perf_counter()
    memory = compile_step(config, topology).memory_analysis()
    return {
        "arguments_gib": memory.argument_size_in_bytes / GIB,
        "temporaries_gib": memory.temp_size_in_bytes / GIB,
        "total_gib": (memory.argument_size_in_bytes + memory.temp_size_in_bytes + memory.output_size_in_bytes
                      - memory.alias_size_in_bytes) / GIB,
        "compile_seconds": time.perf_counter() - start,
        "kernels": sorted({str(c) for c in chosen("blockwise")}),
    }  # fmt: skip


def main() -> None:
    """Count and compile every case, print a line each and write memory.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--topology", default="v5p:2x2x2")
    parser.add_argument("--depth", type=int, default=32)
    parser.add_argument("--mesh", nargs="*", default=["fsdp=8", "tensor=8"])
    args = parser.parse_args()
    rows = []
    for mesh in args.mesh:
        for name, optimizer in STATES.items():
            config = js.TrainConfig(
                model=llama3_8b(depth=args.depth),
                layout=js.Layout(mesh),
                batch_size=8,
                seq_len=2048,
                optimizer=optimizer,
            )
            row = {"mesh": mesh, "states": name, **counted(config), **compiled(config, args.topology)}
            rows.append(row)
            print(
                f"{mesh:10s} {name:7s} {row['state_bytes_per_parameter']:.3f} bytes of state a parameter"
                f" ({row.get('bytes_per_parameter_in_8_bits', 8):.3f} where 8-bit), per chip: arguments "
                f"{row['arguments_gib']:.2f} + temporaries {row['temporaries_gib']:.2f} GiB, compiled in "
                f"{row['compile_seconds']:.0f} s",
                flush=True,
            )
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=HERE).stdout.strip()
    result = {
        "what": f"Llama 3 8B shapes ({args.depth} layers), 8 x 2048 tokens a step, float32 parameters, bf16 arithmetic",
        "topology": args.topology,
        "date": datetime.date.today().isoformat(),
        "commit": commit,
        "jax": jax.__version__,
        "libtpu": importlib.metadata.version("libtpu"),
        "rows": rows,
    }
    (HERE / "memory.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
