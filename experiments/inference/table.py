"""Generation over several devices: bytes sent, memory, padding and idle time, by counts and by two simple models.

    python -m experiments.inference.table            # a minute on two cores; writes results/table.json

Nothing here is a time of this machine. Bytes sent are read from compiled programs (eight simulated devices), passes and
tokens are counted by the engine, and the two results marked SIM are simulations that README.md explains.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jaxscale as js
from jaxscale.infer.cache import Contiguous, Paged, cache_bytes, generating, init_cache
from jaxscale.infer.engine import Cached, Engine, Request
from jaxscale.infer.forward import forward, one_per_batch_row
from jaxscale.infer.sampling import Sampling
from jaxscale.infer.streaming import Layers, OnHost, Streamed
from jaxscale.layout import Layout, shardings_of
from jaxscale.models import TransformerConfig
from jaxscale.plan.collectives import collectives
from jaxscale.step import describe_model, make_params
from pallas_kernels.decode_attention.inputs import Inputs, Settings
from pallas_kernels.decode_attention.split import Tiles, shares
from pallas_kernels.flash_attention.inputs import Score

OUT = Path(__file__).parent / "results" / "table.json"
CONFIG = TransformerConfig(depth=2, vocab=256, width=256, heads=8, kv_heads=2, hidden=512)


def sent_over_context(devices: int, length: int) -> dict[str, Any]:
    """Count, for a decode step of one sequence sharded over devices, the bytes sent and the cache (row 215)."""
    layout = generating(Layout(f"context={devices}"))
    graphdef, infos = describe_model(CONFIG)
    model, cache = nnx.merge(graphdef, infos), Contiguous()

    def step(params: Any, states: Any, token: Any, start: Any) -> Any:
        packed = one_per_batch_row(start, jnp.ones_like(start), 1)
        return forward(nnx.merge(graphdef, params), token, packed, cache, states)

    with layout:
        states = jax.eval_shape(lambda: init_cache(model, cache, 1, 1, length))
        shapes = jax.tree.map(lambda i: jax.ShapeDtypeStruct(i.shape, i.dtype), infos)
        inputs = shapes, states, jax.ShapeDtypeStruct((1, 1), jnp.int32), jax.ShapeDtypeStruct((1,), jnp.int32)
        # the cache keeps its sharding, so that only the step itself sends
        lay = lambda x: layout.sharding(Contiguous.axes, x.shape, kind="activations")  # noqa: E731
        placed = jax.tree.map(lay, states)
        compiled = (
            jax.jit(step, in_shardings=(shardings_of(infos, layout), placed, None, None), out_shardings=(None, placed))
            .lower(*inputs)
            .compile()
        )
    sent = sum(c.sent for c in collectives(compiled, layout.sizes))
    return {"devices": devices, "length": length, "sent": sent, "cache": cache_bytes(model, cache, 1, 1, length)}


def idle(workers: int, lengths: tuple[int, ...]) -> dict[str, Any]:
    """Return the share of time that workers wait for the slowest, for three ways to distribute keys (row 54)."""
    page, heads = 64, 8
    most = -(-max(lengths) // page)
    tables = np.full((len(lengths), most), -1, np.int32)
    positions = np.asarray(lengths, np.int32)[:, None] - 1
    k = np.zeros((1, page, heads, 8), np.float32)
    q = np.zeros((len(lengths), 1, heads, 8), np.float32)
    inputs = Inputs(q=q, k=k, v=k, tables=tables, positions=positions, first=np.int32(0))  # type: ignore[arg-type]
    settings = Settings(Score("softmax", 1.0, None, 0.0), None, 8, 1)
    split = shares(Tiles.of(inputs, settings, page), inputs, settings, workers=workers, heads=heads)
    dealt = np.diff(np.asarray(split.begin))
    tiles = np.repeat(-(-np.asarray(lengths) // page), heads)
    fixed = np.concatenate([np.full(8, -(-t // 8)) for t in tiles])  # every row and head in eight (flash-decoding)
    total = tiles.sum()

    def waits(jobs: np.ndarray) -> float:
        """Give each job, in order, to the worker that is free first; return the share of idle time."""
        load = np.zeros(workers)
        for job in jobs:
            load[load.argmin()] += job
        return 1 - total / (workers * load.max())

    return {
        "lengths": lengths,
        "workers": workers,
        "a worker a row and head": waits(tiles),
        "every row in eight": waits(fixed),
        "dealt evenly": 1 - total / (workers * dealt.max()),
    }


def arrivals(rate: float, count: int = 60) -> dict[str, Any]:
    """Serve requests that arrive at random; count passes through the model, and padding (rows 11 and 22)."""
    random = np.random.default_rng(0)
    graphdef, _ = describe_model(CONFIG)
    params = jax.jit(make_params, static_argnums=(0, 1))(CONFIG, 0)
    engine = Engine(Cached(graphdef, params, cache=Paged(16), rows=8, length=128, budget=128))
    prompts = [tuple(random.integers(1, 256, random.integers(4, 64)).tolist()) for _ in range(count)]
    requests = [
        Request(p, Sampling(max_tokens=int(random.integers(4, 48)), ignore_end=True), i) for i, p in enumerate(prompts)
    ]
    waiting = list(requests)
    while waiting or engine.busy:
        for _ in range(random.poisson(rate * 8)):  # one call of the engine may do eight steps
            if waiting:
                engine.submit(waiting.pop(0))
        engine.step()
    stats = engine.stats
    # for comparison: batches of eight in order of arrival, padded to the longest prompt, run to the longest completion
    batches = [requests[i : i + 8] for i in range(0, count, 8)]
    longest = [(max(len(r.prompt) for r in b), max(r.sampling.max_tokens for r in b)) for b in batches]
    return {
        "texts a step": rate,
        "passes": stats.steps,
        "one after the other": sum(r.sampling.max_tokens for r in requests),
        "in batches": sum(new for _, new in longest),
        "tokens": stats.computed,
        "places": stats.columns,
        "places in batches": sum(8 * (prompt + new - 1) for prompt, new in longest),
    }


def resident(depth: int) -> dict[str, Any]:
    """Return the most bytes of parameters on the device while layers are streamed from the host (row 2)."""
    config = TransformerConfig(depth=depth, vocab=256, width=256, heads=8, kv_heads=2, hidden=1024)
    graphdef, infos = describe_model(config)
    params = jax.jit(make_params, static_argnums=(0, 1))(config, 0)
    arrays = {i.path: np.array(x) for i, x in zip(jax.tree.leaves(infos), jax.tree.leaves(params), strict=True)}
    layers = Layers(infos, OnHost(arrays))
    engine = Engine(Streamed(graphdef, layers, cache=Paged(16), rows=1, length=64, budget=64))
    engine.submit(Request(tuple(range(1, 20)), Sampling(max_tokens=4, ignore_end=True), 0))
    while engine.busy:
        engine.step()
    resident = engine.stepper.resident
    return {"depth": depth, "peak": resident.peak, "whole": resident.whole}


def star(devices: int, latency: float, bandwidth: float, payload: int) -> dict[str, Any]:
    """SIM: return the seconds of an all-reduce by a ring, and by a star with one device as its centre (row 2)."""
    ring = 2 * (devices - 1) * (latency + payload / devices / bandwidth)
    # all devices send to the centre, whose link receives one after the other; then the centre sends the sum
    return {
        "devices": devices,
        "latency": latency,
        "bandwidth": bandwidth,
        "payload": payload,
        "ring": ring,
        "star": 2 * latency + 2 * (devices - 1) * payload / bandwidth,
    }


def borrowed(devices: int, pages: int = 512, sequences: int = 2000) -> dict[str, Any]:
    """SIM: return the share of pages in use when a sequence first does not fit, with own and shared pages (row 215)."""
    random, used = np.random.default_rng(0), {"own": [], "shared": []}
    for _ in range(50):
        needs = np.ceil(random.pareto(1.2, sequences) * 8 + 1).astype(int)
        for kind, pools in (("own", np.full(devices, pages)), ("shared", np.array([devices * pages]))):
            left = pools.copy()
            for need in needs:
                if left.max() < need:
                    break
                left[left.argmax()] -= need
            used[kind].append(1 - left.sum() / pools.sum())
    return {"devices": devices, "pages": pages} | {k: statistics.mean(v) for k, v in used.items()}


def main() -> None:
    """Compute everything, write the file and print it."""
    js.simulate_devices(8)
    links = ((1e-3, 1e8 / 8), (1e-3, 1e9 / 8), (3.4e-6, 4.5e11))
    results = {
        "context": [sent_over_context(d, n) for d in (2, 4, 8) for n in (1024, 8192)],
        "idle": [
            idle(132, (4096,) * 8),
            idle(132, (16384, 8192, 4096, 1024, 512, 300, 200, 100)),
            idle(132, (65536,)),
        ],
        "arrivals": [arrivals(rate) for rate in (0.05, 0.2, 1.0)],
        "resident": [resident(depth) for depth in (4, 8, 16, 32)],
        "star": [star(n, latency, bandwidth, 16384) for n in (2, 4, 8) for latency, bandwidth in links],
        "borrowed": [borrowed(n) for n in (2, 4, 8)],
        "jax": jax.__version__,
    }
    OUT.parent.mkdir(exist_ok=True)
    OUT.write_text(json.dumps(results, indent=1) + "\n")
    for name, rows in results.items():
        if isinstance(rows, list):
            print(f"\n{name}")
            for row in rows:
                print("  " + "  ".join(f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}" for k, v in row.items()))


if __name__ == "__main__":
    main()
