"""Trying tiles: every candidate passes the compile gate, and is timed where the device is here.

One whose result is another than the first one's is refused: a fast wrong tile is no tile.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import importlib
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.aot import GPUS, kernel_reports, kind_of
from pallas_kernels.gate import gate_gpu, gate_tpu

ROUNDS = 15
CALLS = 8
"""In a timing, so that starting them counts for little."""
AGREE = 0.05
"""How far apart, relatively, the results of two tiles may be."""
Say = Callable[[str], Any]


@dataclasses.dataclass(frozen=True)
class Attempt:
    """A candidate, and what became of it.

    Args:
      op: whose.
      device: the device kind.
      key, tile: as in `tiles.json`.
      seconds: of a call, or `None` where the device is not here.
      problem: why it is not to be used, or `None`.
      how: "measured ..." or "compiled".
    """

    op: str
    device: str
    key: dict[str, Any]
    tile: dict[str, Any]
    seconds: float | None
    problem: str | None
    how: str

    def __str__(self) -> str:
        what = self.problem or ("compiles" if self.seconds is None else f"{self.seconds * 1e6:.1f} us")
        return f"{self.op} {self.key} {self.tile}: {what}"


def tune(op: str, topology: str, *, limit: int | None = None, say: Say = print) -> list[dict[str, Any]]:
    """The best tile of every key of an op on a device.

    Args:
      op: a folder of `pallas_kernels` with a `tuning.py`: `keys(platform)`, `candidates(platform, key)`, best first,
        and `build(platform, key, tile)`, which gives a function and its `jax.ShapeDtypeStruct`s.
      topology: "h200", "v5e", ...: what to compile for.
      limit: candidates to try of each key.
      say: takes a line of progress.

    Returns:
      entries for `tiles.write`; a key none of whose candidates passes is left out, and said.

    Raises:
      KernelError: no compiler for the device is installed.
    """
    tried = [a for key in tuning(op).keys(platform_of(topology)) for a in attempts(op, topology, key, limit, say=say)]
    return best(tried, say=say)[op]


def tuning(op: str) -> Any:
    """An op's `tuning.py`."""
    return importlib.import_module(f"pallas_kernels.{op}.tuning")


def attempts(
    op: str,
    topology: str,
    key: dict[str, Any],
    limit: int | None = None,
    *,
    known: Sequence[dict[str, Any]] = (),
    before: Callable[[dict[str, Any]], Any] = lambda tile: None,
    turn: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
    say: Say = print,
) -> Iterator[Attempt]:
    """Tries the candidates of a key; where the device is not here, up to the first that compiles.

    Args:
      op, topology, limit, say: as for `tune`.
      key: one of the op's.
      known: tiles that were tried before.
      before: told each tile when its turn comes.
      turn: held while something is timed.
    """
    platform, kind = platform_of(topology), kind_of(topology)
    here = jax.devices()[0].device_kind == kind
    how = f"measured {datetime.date.today()}, jax {jax.__version__}" if here else "compiled"
    first: Any = None
    for tile in list(tuning(op).candidates(platform, key))[:limit]:
        if tile in known:
            continue
        before(tile)
        fn, shapes = tuning(op).build(platform, key, tile)
        seconds = None
        if here:
            problem = _problem_here(fn, shapes, platform)
            if problem is None:
                with turn():
                    seconds, problem, first = _timed(fn, shapes, first)
        else:
            problem = gate_gpu(fn, shapes, topology)[1] if platform == "gpu" else gate_tpu(fn, shapes, topology)
        found = Attempt(op, kind, key, tile, seconds, problem, how)
        say(str(found))
        yield found
        if problem is None and not here:
            return  # nothing to compare: the op's first choice that compiles


def best(tried: Sequence[Attempt], *, say: Say = print) -> dict[str, list[dict[str, Any]]]:
    """By op, entries for `tiles.write`: of each key the fastest attempt, or the first where nothing was timed."""
    keys: dict[tuple[str, str, str], list[Attempt]] = {}
    for one in tried:
        keys.setdefault((one.op, one.device, json.dumps(one.key, sort_keys=True)), []).append(one)
    found: dict[str, list[dict[str, Any]]] = {op: [] for op, _, _ in keys}
    for (op, device, _), of_key in keys.items():
        passed = [a for a in of_key if a.problem is None]
        if not passed:
            say(f"{op} {of_key[0].key}: no candidate passes")
            continue
        chosen = min(passed, key=lambda a: a.seconds or 0.0)
        found[op].append({"device": device, "key": chosen.key, "tile": chosen.tile, "from": chosen.how})
    return found


def platform_of(topology: str) -> str:
    return "gpu" if topology.partition(":")[0] in GPUS else "tpu"


def _problem_here(fn: Callable[..., Any], shapes: tuple[Any, ...], platform: str) -> str | None:
    """What the compiler of the device that is here says against a function; on a TPU it says so when it runs."""
    if platform == "tpu":
        return None
    try:
        return next((r.problem for r in kernel_reports(fn, *shapes, topology=None) if r.problem), None)
    except Exception as e:  # what the compiler refuses comes as many types
        return f"does not compile: {str(e).strip().splitlines()[0][:200]}"


def _timed(fn: Callable[..., Any], shapes: tuple[Any, ...], first: Any) -> tuple[float | None, str | None, Any]:
    """The median time of a call on random data, why it is not to be used, and the result to compare others with."""

    def fill(s: jax.ShapeDtypeStruct) -> jax.Array:
        if not jnp.issubdtype(s.dtype, jnp.floating):
            return jnp.zeros(s.shape, s.dtype)
        return jax.random.normal(jax.random.key(0), s.shape).astype(s.dtype)

    args = jax.tree.map(fill, shapes)
    jitted = jax.jit(fn)
    try:
        got = jax.block_until_ready(jitted(*args))
        if first is not None and not (apart := _apart(first, got)) < AGREE:
            return None, f"its result is {apart:.3g} from that of the first tile", first
        times = []
        for _ in range(ROUNDS):
            start = time.perf_counter()
            for _ in range(CALLS):
                out = jitted(*args)  # the one before may go while this one is on its way
            jax.block_until_ready(out)
            times.append((time.perf_counter() - start) / CALLS)
    except Exception as e:
        return None, f"does not run: {str(e).strip().splitlines()[0][:200]}", first
    return statistics.median(times), None, got if first is None else first


def _apart(a: Any, b: Any) -> float:
    """The largest relative difference of two trees' arrays; places where both are NaN, of made-up statistics, agree."""

    def one(x: jax.Array, y: jax.Array) -> float:
        x, y = x.astype(jnp.float32), y.astype(jnp.float32)
        same = (jnp.isnan(x) & jnp.isnan(y)) | (x == y)
        off = jnp.linalg.norm(jnp.where(same, 0.0, x - y).ravel())
        return float(off / (jnp.linalg.norm(jnp.where(same, 0.0, x).ravel()) + 1e-30)) if off else 0.0

    return max(map(one, jax.tree.leaves(a), jax.tree.leaves(b)), default=0.0)
