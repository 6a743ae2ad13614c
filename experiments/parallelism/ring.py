"""Memory of ring attention on each of 1 to 8 chips: one layer's attention, forward and backward.

    python experiments/parallelism/ring.py      # writes a line of ring.jsonl for each number of chips

Needs `make install EXTRAS=tpu`.
"""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from jaxscale.layout import Layout
from jaxscale.nn import RingAttention
from jaxscale.plan import compile_for, topology_devices

OUT = Path(__file__).with_name("ring.jsonl")
TOPOLOGY, TOKENS, HEADS, KV_HEADS, HEAD_DIM = "v5p:2x2x2", 65536, 32, 8, 128
"""Llama 3 8B's attention, for one row."""


def measure(chips: int) -> dict[str, Any]:
    """Return the bytes on each chip."""
    layout = Layout(f"context={chips}").on(topology_devices(TOPOLOGY)[:chips])
    where = NamedSharding(layout.device_mesh, layout.spec(("batch", "seq"), kind="activations"))
    shapes = {n: (1, TOKENS, n, HEAD_DIM) for n in (HEADS, KV_HEADS)}
    q, k = (jax.ShapeDtypeStruct(s, jnp.bfloat16, sharding=where) for s in shapes.values())

    def both(q: Any, k: Any, v: Any, dout: Any) -> tuple[Any, ...]:
        y, pull = jax.vjp(RingAttention(), q, k, v)
        return y, *pull(dout)

    memory = compile_for(both, TOPOLOGY, q, k, k, q, layout=layout).memory_analysis()
    held = {"arguments": memory.argument_size_in_bytes, "outputs": memory.output_size_in_bytes}
    return held | {"temporaries": memory.temp_size_in_bytes}


def read() -> dict[int, dict[str, Any]]:
    """Return chips -> row, of the rows measured so far."""
    lines = OUT.read_text().splitlines() if OUT.exists() else []
    return {r["chips"]: r for r in map(json.loads, lines)}


if __name__ == "__main__":
    about = {"topology": TOPOLOGY, "tokens": TOKENS, "jax": jax.__version__, "date": datetime.date.today().isoformat()}
    for chips in (1, 2, 4, 8):
        if chips not in read():
            row = {"chips": chips, **measure(chips), **about}
            with OUT.open("a") as file:
                file.write(json.dumps(row) + "\n")
