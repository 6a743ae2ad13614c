"""Try tiles: compile every candidate through the gate, and time it where the device is present.

A tile whose result differs from that of the first one is rejected, however fast it is.
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
import numpy as np

from pallas_kernels.aot import GPUS, SMALLEST, kernel_reports, kind_of
from pallas_kernels.dispatch import KernelError
from pallas_kernels.gate import gate_gpu, gate_tpu, gpus, operations

ROUNDS = 15
CALLS = 8
"""Calls in one timing, so that the time to start them counts for little."""
AGREE = 0.05
"""Largest relative difference allowed between the results of two tiles."""
Say = Callable[[str], Any]


@dataclasses.dataclass(frozen=True)
class Attempt:
    """A candidate tile and the result of trying it.

    Args:
      op: name of the op.
      device: the device kind.
      key: what the tile depends on, as in `tiles.json`.
      tile: the tile sizes, as in `tiles.json`.
      seconds: time of a call, or `None` where the device is not present.
      problem: why the tile is rejected, or `None`.
      source: "measured ..." or "compiled"; `from` in `tiles.json`.
    """

    op: str
    device: str
    key: dict[str, Any]
    tile: dict[str, Any]
    seconds: float | None
    problem: str | None
    source: str

    def __str__(self) -> str:
        what = self.problem or ("compiles" if self.seconds is None else f"{self.seconds * 1e6:.1f} us")
        return f"{self.op} {self.key} {self.tile}: {what}"


def tune(op: str, topology: str, *, limit: int | None = None, say: Say = print) -> list[dict[str, Any]]:
    """Return the best tile of every key of an op on a device.

    Args:
      op: a folder of `pallas_kernels` with a `tuning.py`: `keys(platform)`, `candidates(platform, key)`, best first,
        and `build(platform, key, tile)`, which returns a function and its `jax.ShapeDtypeStruct`s.
      topology: "h200", "v5e", ...: what to compile for.
      limit: number of candidates to try for each key.
      say: receives lines of progress.

    Returns:
      entries for `tiles.write`. A key without a passing candidate is left out, with a line of progress.

    Raises:
      KernelError: no compiler for the device is installed.
    """
    tried = [a for key in tuning(op).keys(platform_of(topology)) for a in attempts(op, topology, key, limit, say=say)]
    return best(tried, say=say)[op]


def tuning(op: str) -> Any:
    """Return the module `tuning` of an op."""
    return importlib.import_module(f"pallas_kernels.{op}.tuning")


def tunable(topology: str) -> tuple[str, ...]:
    """Return the ops that have a kernel with tiles for a device.

    Args:
      topology: "h200", "v5e", ...: one device of named hardware.
    """
    platform, gpu = platform_of(topology), {"h100": "h200"}.get(topology, topology)  # one of each architecture
    having = [op for op in operations(platform) if platform == "tpu" or gpu in gpus(op)]
    return tuple(op for op in having if any(tuning(op).keys(platform)))


def why_not_tunable(ops: Sequence[str], topology: str) -> str | None:
    """Return why one of some ops cannot be tuned for a device, or `None`.

    Args:
      ops: names of ops.
      topology: as for `tunable`.
    """
    here = tunable(topology)
    unfit = next((op for op in ops if op not in here), None)
    known = f"only {', '.join(here)}" if here else "nor has any other op"
    return f"{unfit} has no kernel with tiles for {topology}, {known}" if unfit else None


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
    """Try the candidates of a key; where the device is not present, stop at the first that compiles.

    Args:
      op: a folder of `pallas_kernels`.
      topology: "h200", "v5e", ...: what to compile for.
      key: one of the op's keys.
      limit: number of candidates to try.
      known: tiles that were tried before, which are skipped.
      before: called with each tile before it is tried.
      turn: context that is entered while something is timed.
      say: receives lines of progress.

    Yields:
      each attempt.

    Raises:
      KernelError: as `tune`; or another accelerator is present.
    """
    platform, kind = platform_of(topology), kind_of(topology)
    device = jax.devices()[0]
    here = device.device_kind == kind
    if device.platform != "cpu" and not here:
        raise KernelError(f"this machine has a {device.device_kind}, not a {kind}; leave --device out")
    source = f"measured {datetime.date.today()}, jax {jax.__version__}" if here else "compiled"
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
        attempt = Attempt(op, kind, key, tile, seconds, problem, source)
        say(str(attempt))
        yield attempt
        if problem is None and not here:
            return  # without timings, the first candidate that compiles is the best


def best(tried: Sequence[Attempt], *, say: Say = print) -> dict[str, list[dict[str, Any]]]:
    """Return entries for `tiles.write` by op: for each key the fastest attempt, or the first where nothing was timed.

    Args:
      tried: the attempts.
      say: receives a line for each key without a passing candidate or with contradicting results.
    """
    keys: dict[tuple[str, str, str], list[Attempt]] = {}
    for one in tried:
        keys.setdefault((one.op, one.device, json.dumps(one.key, sort_keys=True)), []).append(one)
    by_op: dict[str, list[dict[str, Any]]] = {op: [] for op, _, _ in keys}
    for (op, device, _), of_key in keys.items():
        passed = [a for a in of_key if a.problem is None]
        if not passed:
            say(f"{op} {of_key[0].key}: no candidate passes")
            continue
        if sum("that of the first tile" in (a.problem or "") for a in of_key) > len(passed):
            say(f"{op} {of_key[0].key}: most tiles disagree with the result of the first tile, which may be wrong")
        chosen = min(passed, key=lambda a: (a.seconds is None, a.seconds or 0.0))
        by_op[op].append({"device": device, "key": chosen.key, "tile": chosen.tile, "from": chosen.source})
    return by_op


def platform_of(topology: str) -> str:
    """Return "gpu" or "tpu", the platform of a topology."""
    return "gpu" if topology.partition(":")[0] in GPUS else "tpu"


def topology_here() -> str | None:
    """Return the name of this machine's accelerator, as `tune` takes it; `None` on a CPU.

    Raises:
      KernelError: the accelerator has no such name.
    """
    device = jax.devices()[0]
    if device.platform == "cpu":
        return None
    for name in GPUS if device.platform == "gpu" else SMALLEST:
        if kind_of(name) == device.device_kind:
            return name
    raise KernelError(f"no kernel has tiles for a {device.device_kind}; on a CPU, --device NAME compiles for NAME")


def _problem_here(fn: Callable[..., Any], shapes: tuple[Any, ...], platform: str) -> str | None:
    """Return why this machine's compiler refuses a function, or `None`; errors of a TPU show when it runs."""
    if platform == "tpu":
        return None
    try:
        return next((r.problem for r in kernel_reports(fn, *shapes, topology=None) if r.problem), None)
    except KernelError:
        return None  # it compiles, but its report cannot be read
    except Exception as e:  # the compiler raises many types
        return f"does not compile: {_first_line(e)}"


def _timed(fn: Callable[..., Any], shapes: tuple[Any, ...], first: Any) -> tuple[float | None, str | None, Any]:
    """Time a function on random data.

    Returns:
      the median seconds of a call or `None`, why the tile is rejected or `None`, and a sample of the first result.
    """

    def fill(s: jax.ShapeDtypeStruct) -> jax.Array:
        if not jnp.issubdtype(s.dtype, jnp.floating):
            return jnp.zeros(s.shape, s.dtype)
        return jax.random.normal(jax.random.key(0), s.shape).astype(s.dtype)

    jitted = jax.jit(fn)
    try:
        args = jax.tree.map(jax.jit(fill, static_argnums=0), shapes)
        got = _sample(jitted(*args))
        if first is not None and not (apart := _apart(first, got)) < AGREE:
            return None, f"its result is {apart:.3g} from that of the first tile", first
        times = []
        for _ in range(ROUNDS):
            start = time.perf_counter()
            for _ in range(CALLS):
                out = jitted(*args)  # dropping the last output frees it while this call runs
            jax.block_until_ready(out)
            times.append((time.perf_counter() - start) / CALLS)
    except Exception as e:
        return None, f"does not run: {_first_line(e)}", first
    return statistics.median(times), None, got if first is None else first


def _first_line(e: Exception) -> str:
    return (str(e).strip().splitlines() or [type(e).__name__])[0][:200]


def _sample(tree: Any) -> list[np.ndarray]:
    """Return about a million numbers of each array, evenly spaced, in the host's memory."""

    def spread(x: jax.Array) -> jax.Array:
        return x.ravel()[:: x.size // 2**20 | 1].astype(jnp.float32)

    return [np.asarray(x) for x in jax.jit(lambda tree: [spread(x) for x in jax.tree.leaves(tree)])(tree)]


def _apart(a: list[np.ndarray], b: list[np.ndarray]) -> float:
    """Return the largest relative difference of two samples; two NaNs agree (statistics are made up here)."""

    def one(x: np.ndarray, y: np.ndarray) -> float:
        same = (np.isnan(x) & np.isnan(y)) | (x == y)
        off = np.linalg.norm(np.where(same, 0.0, x.astype(np.float64) - y))
        return float(off / (np.linalg.norm(np.where(same, 0.0, x.astype(np.float64))) + 1e-30)) if off else 0.0

    with np.errstate(invalid="ignore"):
        return max(map(one, a, b), default=0.0)
