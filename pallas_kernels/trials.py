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
import numpy as np

from pallas_kernels.aot import GPUS, SMALLEST, kernel_reports, kind_of
from pallas_kernels.dispatch import KernelError
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

    Raises:
      KernelError: as `tune`; or an accelerator is here, and it is another.
    """
    platform, kind = platform_of(topology), kind_of(topology)
    found_here = jax.devices()[0]
    here = found_here.device_kind == kind
    if found_here.platform != "cpu" and not here:
        raise KernelError(f"the device here is {found_here.device_kind}, and not {kind}; leave --device out")
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
        if sum("that of the first tile" in (a.problem or "") for a in of_key) > len(passed):
            say(f"{op} {of_key[0].key}: most tiles have another result than the first one, which may be the wrong one")
        chosen = min(passed, key=lambda a: (a.seconds is None, a.seconds or 0.0))
        found[op].append({"device": device, "key": chosen.key, "tile": chosen.tile, "from": chosen.how})
    return found


def platform_of(topology: str) -> str:
    """ "gpu" or "tpu"."""
    return "gpu" if topology.partition(":")[0] in GPUS else "tpu"


def topology_here() -> str | None:
    """The name of the accelerator that is here, as `tune` takes it; `None` on a CPU.

    Raises:
      KernelError: an accelerator that has no name.
    """
    device = jax.devices()[0]
    if device.platform == "cpu":
        return None
    for name in GPUS if device.platform == "gpu" else SMALLEST:
        if kind_of(name) == device.device_kind:
            return name
    raise KernelError(f"there are no tiles to tune for a {device.device_kind}; --device NAME compiles on a CPU")


def _problem_here(fn: Callable[..., Any], shapes: tuple[Any, ...], platform: str) -> str | None:
    """What the compiler of the device that is here says against a function; on a TPU it says so when it runs."""
    if platform == "tpu":
        return None
    try:
        return next((r.problem for r in kernel_reports(fn, *shapes, topology=None) if r.problem), None)
    except KernelError:
        return None  # it compiles, and its report cannot be read: time will tell
    except Exception as e:  # what the compiler refuses comes as many types
        return f"does not compile: {_first_line(e)}"


def _timed(fn: Callable[..., Any], shapes: tuple[Any, ...], first: Any) -> tuple[float | None, str | None, Any]:
    """The median time of a call on random data, why it is not to be used, and a sample of the result for the others."""

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
                out = jitted(*args)  # the one before may go while this one is on its way
            jax.block_until_ready(out)
            times.append((time.perf_counter() - start) / CALLS)
    except Exception as e:
        return None, f"does not run: {_first_line(e)}", first
    return statistics.median(times), None, got if first is None else first


def _first_line(e: Exception) -> str:
    return (str(e).strip().splitlines() or [type(e).__name__])[0][:200]


def _sample(tree: Any) -> list[np.ndarray]:
    """About a million numbers of each array, evenly spread, in the host's memory."""

    def spread(x: jax.Array) -> jax.Array:
        return x.ravel()[:: x.size // 2**20 | 1].astype(jnp.float32)

    return [np.asarray(x) for x in jax.jit(lambda tree: [spread(x) for x in jax.tree.leaves(tree)])(tree)]


def _apart(a: list[np.ndarray], b: list[np.ndarray]) -> float:
    """The largest relative difference of samples; places where both are NaN, of made-up statistics, agree."""

    def one(x: np.ndarray, y: np.ndarray) -> float:
        same = (np.isnan(x) & np.isnan(y)) | (x == y)
        off = np.linalg.norm(np.where(same, 0.0, x.astype(np.float64) - y))
        return float(off / (np.linalg.norm(np.where(same, 0.0, x.astype(np.float64))) + 1e-30)) if off else 0.0

    with np.errstate(invalid="ignore"):
        return max(map(one, a, b), default=0.0)
