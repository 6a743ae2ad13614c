"""What a device holds of ring attention: one layer's attention of Llama 3 8B, forward and backward, on 1 to 8 chips.

    python experiments/long_context/rings.py            # compiles for TPUs; writes rings.json
    python experiments/long_context/rings.py --table    # the README's table

Needs `make install EXTRAS=tpu`. Bytes are of the compiler's buffer assignment, arrays are those that live at its peak.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from longest import compiled, live

HERE = Path(__file__).resolve().parent
OUT = HERE / "rings.json"
TOPOLOGIES = {1: "v5p:2x2x1", 2: "v5p:2x2x1", 4: "v5p:2x2x1", 8: "v5p:2x2x2"}
"""Chips -> topology to compile for."""

TOKENS, HEADS, KV_HEADS, HEAD_DIM = 65536, 32, 8, 128
"""Llama 3 8B's attention, for one row."""


def compile_here(chips: int) -> None:
    """Compile the attention in this process, and print its bytes."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding

    from jaxscale.layout import Layout
    from jaxscale.nn import RingAttention
    from jaxscale.plan import compile_for, topology_devices
    from jaxscale.plan.compile import bytes_of

    topology = TOPOLOGIES[chips]
    layout = Layout(f"context={chips}").on(topology_devices(topology)[:chips])
    where = NamedSharding(layout.device_mesh, layout.spec(("batch", "seq"), kind="activations"))
    shapes = {n: (1, TOKENS, n, HEAD_DIM) for n in (HEADS, KV_HEADS)}
    q, k = (jax.ShapeDtypeStruct(s, jnp.bfloat16, sharding=where) for s in shapes.values())

    def both(q: Any, k: Any, v: Any, dout: Any) -> tuple[Any, ...]:
        y, pull = jax.vjp(RingAttention(), q, k, v)
        return y, *pull(dout)

    program = compile_for(both, topology, q, k, k, q, layout=layout)
    print(json.dumps({"bytes": bytes_of(program), "by": "program"}))


def table(rows: list[dict[str, Any]]) -> str:
    """Return the README's table: bytes, and arrays in units of a chip's queries."""
    out = ["| chips | GiB | of one chip's | arrays at the peak, in a chip's queries (bfloat16) |", "|" + "---|" * 4]
    for row in rows:
        queries = 2 * TOKENS * HEADS * HEAD_DIM // row["chips"]
        arrays: dict[str, float] = {}
        for size, what in row["live"]:
            dtype = what.partition("[")[0]
            arrays[dtype] = arrays.get(dtype, 0) + size / queries
        held = ", ".join(f"{n:.1f} {dtype}" for dtype, n in sorted(arrays.items()) if n >= 0.05)
        share = row["bytes"] / rows[0]["bytes"]
        out += [f"| {row['chips']} | {row['bytes'] / 2**30:.2f} | {share:.3f} | {held} |"]
    return "\n".join(out)


def main() -> None:
    """Compile for every number of chips, or print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--table", action="store_true", help="only print the README's table")
    parser.add_argument("--compile", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.compile:
        compile_here(args.compile)
        return
    if args.table:
        print(table(json.loads(OUT.read_text())["rows"]))
        return
    import jax

    rows: list[dict[str, Any]] = []
    for chips in TOPOLOGIES:
        with tempfile.TemporaryDirectory() as folder:
            row = compiled([sys.executable, __file__, "--compile", str(chips)], Path(folder), 1800, "jit_both")
            row |= {"chips": chips, "live": live(Path(folder), 40) if row["bytes"] is not None else []}
        rows.append(row)
        print(chips, row["bytes"], row["seconds"], "s", flush=True)
        about = {"date": datetime.date.today().isoformat(), "jax": jax.__version__, "tokens": TOKENS}
        OUT.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
