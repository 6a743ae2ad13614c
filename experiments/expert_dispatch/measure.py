"""Bytes that dispatchers send in programs compiled for a TPU, beside what routing makes them send.

python experiments/expert_dispatch/measure.py [DISPATCHER ...]      # writes bytes.json
"""

from __future__ import annotations

import collections
import json
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxscale.layout import Layout
from jaxscale.nn import MixtureOfExperts
from jaxscale.parallel import Arithmetic, Choices, IntegerWire, Weights, expert_mlp
from jaxscale.parallel.dispatch import (
    AllGatherDispatch,
    Dispatcher,
    DroplessDispatch,
    FusedDispatch,
    HierarchicalDispatch,
    SlotDispatch,
)
from jaxscale.parallel.dispatch.payload import row_bytes
from jaxscale.parallel.expert_products import DOWN, UP
from jaxscale.plan import compile_for, topology_devices
from jaxscale.plan.collectives import collectives

HERE = Path(__file__).parent
TOPOLOGY, HOSTS, WITHIN = "v5p:2x2x2", 2, 4
LAYOUT = Layout(f"expert={HOSTS},tensor={WITHIN}", "folded", sequence_sharded=True)
BATCH, SEQ, EMBED, HIDDEN, EXPERTS, TOP, CAPACITY = 8, 512, 1024, 512, 32, 8, 1.25
DEVICES = HOSTS * WITHIN
TOKENS = BATCH * SEQ // DEVICES
CODES = IntegerWire(feedback=False)
DISPATCHERS: dict[str, Dispatcher] = {
    "SlotDispatch": SlotDispatch(),
    "DroplessDispatch": DroplessDispatch(),
    "DroplessDispatch, 8 bits": DroplessDispatch(CODES),
    "FusedDispatch": FusedDispatch(),
    "AllGatherDispatch": AllGatherDispatch(),
    "AllGatherDispatch, 8 bits": AllGatherDispatch(CODES),
    "HierarchicalDispatch": HierarchicalDispatch(),
    "HierarchicalDispatch, 8 bits": HierarchicalDispatch(payload=CODES, within=DroplessDispatch(CODES)),
}
SMALL = 1 << 18
"""Bytes below which a collective is of counts, ids or weights of choices."""


def spread(shape: tuple[int, ...], axes: tuple[str | None, ...], dtype: Any, kind: Any = "activations") -> Any:
    """Return an abstract array on the topology's devices."""
    placed = LAYOUT.on(topology_devices(TOPOLOGY))
    return jax.ShapeDtypeStruct(shape, dtype, sharding=placed.sharding(axes, shape, kind=kind))


def compiled_bytes(dispatcher: Dispatcher) -> dict[str, int]:
    """Return the bytes that each device sends in the compiled gradient of a layer, by mesh axes and kind."""
    config = MixtureOfExperts(experts=EXPERTS, top_k=TOP, capacity=CAPACITY if dispatcher.needs_capacity else None)

    def gradients(x: Any, scale: Any, up: Any, down: Any, ids: Any, d: Any) -> Any:
        def loss(x: Any, scale: Any, up: Any, down: Any) -> Any:
            y = expert_mlp(
                x,
                Choices(ids, scale),
                Weights(None, up, down),
                act=jax.nn.gelu,
                arithmetic=Arithmetic.cast(jnp.bfloat16),
                capacity=config.slots(SEQ // WITHIN),
                dispatcher=dispatcher,
            )
            return jnp.sum(y.astype(jnp.float32) * d)

        return jax.value_and_grad(loss, (0, 1, 2, 3))(x, scale, up, down)

    tokens, choices = ("expert_batch", "expert_seq", "embed"), ("expert_batch", "expert_seq", None)
    arrays = (
        spread((BATCH, SEQ, EMBED), tokens, jnp.bfloat16),
        spread((BATCH, SEQ, TOP), choices, jnp.float32),
        spread((EXPERTS, EMBED, HIDDEN), UP, jnp.bfloat16, "params"),
        spread((EXPERTS, HIDDEN, EMBED), DOWN, jnp.bfloat16, "params"),
        spread((BATCH, SEQ, TOP), choices, jnp.int32),
        spread((BATCH, SEQ, EMBED), tokens, jnp.bfloat16),
    )
    text = compile_for(gradients, TOPOLOGY, *arrays, layout=LAYOUT).as_text()
    total: collections.Counter[str] = collections.Counter()
    for c in collectives(text, LAYOUT.sizes):
        total[f"{'x'.join(c.axes)} {c.kind}" if c.payload >= SMALL else "small"] += c.sent
    return dict(total)


def routing() -> np.ndarray:
    """Return the experts (devices, tokens, k) of tokens: each has different ones at random."""
    random = np.random.default_rng(0)
    return np.argsort(random.random((DEVICES, TOKENS, EXPERTS)), axis=-1)[..., :TOP]


def needed_bytes(dispatcher: Dispatcher, ids: np.ndarray) -> dict[str, float]:
    """Return the bytes that a device sends on average, across hosts and within, that some token needs; 0 to itself."""
    device = ids // (EXPERTS // DEVICES)
    me = np.arange(DEVICES)[:, None, None]
    host, my_host = device // WITHIN, me // WITHIN
    out = getattr(dispatcher, "payload", None)
    # rows to experts and cotangents of outputs in codes; outputs and cotangents of tokens as they are
    both = 2 * (row_bytes(out, EMBED, jnp.bfloat16) + row_bytes(None, EMBED, jnp.bfloat16))
    if isinstance(dispatcher, AllGatherDispatch):
        others = {"across": HOSTS - 1, "within": HOSTS * (WITHIN - 1)}  # across first, and then within
        return {where: both * TOKENS * n for where, n in others.items()}
    if isinstance(dispatcher, SlotDispatch):
        slots = MixtureOfExperts(experts=EXPERTS, top_k=TOP, capacity=CAPACITY).slots(SEQ // WITHIN)
        rows = BATCH // HOSTS * EXPERTS // DEVICES * slots.slots
        return {"across": both * rows * (DEVICES - WITHIN), "within": both * rows * (WITHIN - 1)}
    if isinstance(dispatcher, HierarchicalDispatch):
        once = np.any(host[..., None] == np.arange(HOSTS), axis=2) & (np.arange(HOSTS) != my_host)
        inside = np.sum(device % WITHIN != me % WITHIN)
        return {"across": both * np.sum(once) / DEVICES, "within": both * inside / DEVICES}
    away = device != me
    crosses = host != my_host
    return {"across": both * np.sum(crosses) / DEVICES, "within": both * np.sum(away & ~crosses) / DEVICES}


def measure_bytes(names: list[str]) -> None:
    """Compile dispatchers; write and print what they send, beside what is in the file of others."""
    data = HERE / "bytes.json"
    rows = {row["dispatcher"]: row for row in json.loads(data.read_text())} if data.exists() else {}
    for name in names:
        dispatcher = DISPATCHERS[name]
        needed = {where: round(size) for where, size in needed_bytes(dispatcher, routing()).items()}
        rows[name] = {"dispatcher": name, "compiled": compiled_bytes(dispatcher), "needed": needed}
        print(json.dumps(rows[name]), flush=True)
        ordered = [rows[name] for name in DISPATCHERS if name in rows]
        data.write_text("[\n" + ",\n".join(map(json.dumps, ordered)) + "\n]\n")


if __name__ == "__main__":
    measure_bytes(sys.argv[1:] or list(DISPATCHERS))
