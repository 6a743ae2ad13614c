"""One process of `on_device`: runs work on this machine's device and reports what is wrong with its results.

A program is compiled once and run several times, the last time after the allocator's free memory was filled with 0xFF
bytes, which are NaN in every floating dtype. This reveals elements that a kernel does not write; otherwise they would
hold the right result of the run before.

The process reads lines of JSON with the work to run from its standard input, and writes its answers as lines of JSON to
the file descriptor `--answers`, apart from what libraries print.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxscale.testing.ops import UNIT, allowed
from pallas_kernels import dispatch, withdrawn
from pallas_kernels.errors import KernelError
from tests.pallas_kernels import parity, real_sizes
from tests.pallas_kernels.comparison import Program, Work
from tests.pallas_kernels.flash_attention import grid
from tests.pallas_kernels.works import works as table_works

RERUNS = 3
"""Runs after the first one and before memory is filled."""
PIECE = 1024
"""Most elements of a piece whose error is checked by itself: the norm of millions would hide an unwritten row."""
PIECES = 8.0
"""Limit of the worst piece's error, in errors of the plain implementation or units in the last place.

A piece is compared with its own norm and the usual one, since the norm of few elements may be small by chance.
"""


def works(platform: str) -> list[Work]:
    """Return everything that is checked on a platform: the work of the parity table, and that of real sizes."""
    control = [_control()] if platform == "gpu" else []
    return [*control, *table_works(), *_deterministic(), *real_sizes.works(small=platform == "cpu")]


def _control() -> Work:
    """Return a kernel that writes nothing: "ok" where this is detected, so that UNWRITTEN works."""
    from jax.experimental.pallas import mosaic_gpu

    plgpu: Any = mosaic_gpu  # its names differ between versions

    def ours(implementation: str) -> Any:
        if implementation != "mosaic_gpu":
            raise KernelError("XLA writes all of what it returns")
        out = jax.ShapeDtypeStruct((1024, 128), jnp.float32)
        return plgpu.kernel(lambda x_ref, y_ref: None, out_type=out, grid=(1,), grid_names=("block",))

    def outputs(y: Any) -> tuple[Any, ...]:
        if not np.isnan(y).all():
            raise KernelError("unwritten memory does not hold the poison, so UNWRITTEN cannot be detected here")
        return (np.ones(1, np.float32),)

    def make(seed: int | None) -> Program:
        x = jnp.ones((128,), jnp.float32)
        fill_free_memory()
        return Program(ours, (x,), outputs, lambda: (np.ones(1, np.float32),), lambda: (np.ones(1),))

    return Work("control", "a kernel that writes nothing", "float32", ("shows",), make)


def _deterministic() -> Iterator[Work]:
    """Yield attention cases of the table whose gradient has a faster mode that may differ between runs."""
    for chosen in ({"D": 128, "grouped": True, "causal": True}, {"D": 64, "causal": True, "segments": True}):
        for dtype in ("bfloat16", "float16"):
            case = dict.fromkeys(grid.FEATURES, False) | chosen | {"dtype": dtype}
            made = grid.work_of(case, deterministic=True)
            feature = f"{made.feature.partition(' ')[2]} deterministic"
            yield Work(made.op, feature, dtype, made.parts, made.make)


def may_vary(work: Work, backend: str, part: str) -> bool:
    """Whether results may differ between runs: blocks on Hopper add to dq in the order that they come in.

    This is so for the single kernel for heads of 64 and 128 (`flash_attention.gpu.passes`) without `deterministic`.
    cuDNN's gradient is deterministic on request only, and JAX does not request it.
    """
    if backend == "cudnn":
        return part != "out"
    if (work.op, backend, part) != ("flash_attention", "mosaic_gpu", "dq"):
        return False
    words = work.feature.split()
    return "deterministic" not in words and ("D=128" in words or ("D=64" in words and "softcap" not in words))


def backends(platform: str, kind: str) -> tuple[str, ...]:
    """Return the backends of a device."""
    if platform == "tpu":
        return ("mosaic_tpu", "xla")
    if platform != "gpu":
        return ("xla",)
    return ("mosaic_gpu", "cudnn", "xla_chunks", "xla_tiles", "xla") if "NVIDIA" in kind else ("xla_tiles", "xla")


# one piece of work -------------------------------------------------------------------------------------------------


class Crash(Exception):
    """A run failed in the step `where`; if `fatal`, the process may be unfit for more work."""

    def __init__(self, where: str, error: BaseException, fatal: bool):
        first = next((line for line in str(error).strip().splitlines() if line.strip()), "")
        super().__init__(f"crashed: {where}: {type(error).__name__}: {first[:300]}")
        self.fatal = fatal


def check(
    work: Work, backend: str, made: Program, *, poison: Callable[[], float | None] | None = None
) -> list[dict[str, Any]]:
    """Return a row for each part of a piece of work.

    Args:
      work: the work.
      backend: the implementation to run.
      made: its program, on the data to run it on.
      poison: fills free memory and returns the share that was filled, or `None` where that is not known.

    Returns:
      dicts with verdict, error, plain, allowed, worst and worst_allowed (of the worst piece), same (all reruns have
      the same bits), spread (the largest norm of their differences), poisoned (same bits, finite, and share of the free
      memory that was filled), ran (what dispatch recorded) and seconds.

    Raises:
      Crash: another error than a refusal was raised.
    """
    start = time.monotonic()

    def once() -> tuple[Any, ...]:
        return made.parts(jax.block_until_ready(run(*made.arrays)))

    try:
        with _telling("compile", fatal=False), dispatch.choosing() as ran:
            run = jax.jit(made.ours(backend)).lower(*made.arrays).compile()
        with _telling("run"):
            first = once()
            again = [_apart(first, once()) for _ in range(RERUNS)]
            share = (poison or fill_free_memory)()
            dirty = once()
            poisoned = _apart(first, dirty)
    except KernelError as e:
        why = str(e).partition("not supported here: ")[2] or str(e)
        return [_row(work, backend, part, f"not supported: {why}") for part in work.parts]
    with _telling("the plain implementation"):
        plain = made.plain()
    with _telling("the truth"):
        truth = made.truth()
    rows = []
    with _telling("comparing"):
        for i, part in enumerate(work.parts):
            record = _judged(first[i], dirty[i], plain[i], truth[i])
            record["same"] = all(one[i][0] for one in again)
            record["spread"] = max(one[i][1] for one in again)
            record["poisoned"] |= {"same": poisoned[i][0], "share": share}
            verdict = _verdict(record, may_vary(work, backend, part))
            rows.append(_row(work, backend, part, verdict) | record)
    withdrawn_for = {
        why for c in ran.values() if (why := withdrawn.why(c.op, c.implementation, c.kind, dict(c.case))) is not None
    }
    seconds = round(time.monotonic() - start, 2)
    context = {"ran": sorted({f"{c.op}: {c.implementation}" for c in ran.values()}), "seconds": seconds}
    return [row | context | ({"withdrawn": sorted(withdrawn_for)} if withdrawn_for else {}) for row in rows]


@contextlib.contextmanager
def _telling(where: str, fatal: bool = True) -> Iterator[None]:
    try:
        yield
    except KernelError:
        raise
    except Exception as e:  # compilers and devices raise many types
        raise Crash(where, e, fatal) from e


def _row(work: Work, backend: str, part: str, verdict: str) -> dict[str, Any]:
    return {
        "op": work.op,
        "feature": work.feature,
        "dtype": work.dtype,
        "part": part,
        "backend": backend,
        "large": work.large,
        "verdict": verdict,
    }


def _judged(first: Any, dirty: Any, plain: Any, truth: Any) -> dict[str, Any]:
    """Return the errors of a part, those of the plain implementation, and the allowed errors."""
    error, worst, _ = _errors(first, truth)
    after, after_worst, finite = _errors(dirty, truth)
    theirs, theirs_worst, _ = _errors(plain, truth)
    dtype = np.dtype(first.dtype)
    unit = max(float(jnp.finfo(dtype).eps), UNIT)
    return {
        "error": error,
        "plain": theirs,
        "allowed": allowed(theirs, dtype),
        "worst": worst,
        "worst_allowed": PIECES * max(theirs_worst, unit),
        "poisoned": {"error": after, "worst": after_worst, "finite": finite},
    }


def _verdict(record: dict[str, Any], varies: bool) -> str:
    within = lambda f: f["error"] <= record["allowed"] and f["worst"] <= record["worst_allowed"]  # noqa: E731
    poisoned = record["poisoned"]
    if not within(record):
        return "WRONG"
    if not poisoned["finite"]:
        return "UNWRITTEN"
    if not record["same"] and not varies:
        return "NOT THE SAME TWICE"
    if not within(poisoned) or not (poisoned["same"] or varies):
        return "UNWRITTEN"
    return "ok"


# comparing: NumPy in float64, or on the device where the truth is on it ----------------------------------------------


def _errors(got: Any, truth: Any) -> tuple[float, float, bool]:
    """Return the error of the whole, that of the worst piece, and whether it is finite wherever the truth is."""
    if got.shape != truth.shape:
        raise ValueError(f"a result of shape {got.shape}, and the truth has {truth.shape}")
    if isinstance(truth, np.ndarray):
        with np.errstate(invalid="ignore"):
            deviations = _deviations(np, np.asarray(got), truth)
    else:
        with jax.enable_x64(truth.dtype == jnp.float64):
            deviations = _deviations_on_device(jnp.asarray(got), truth)
    whole, worst, finite = (np.asarray(x) for x in deviations)
    return float(whole), float(worst), bool(finite)


def _deviations(xp: Any, got: Any, truth: Any) -> tuple[Any, Any, Any]:
    wide = truth.dtype if truth.dtype in (np.float32, np.float64) else np.float64
    got, truth = got.astype(wide), truth.astype(wide)
    finite = xp.all(xp.isfinite(got) | ~xp.isfinite(truth))
    off = xp.where(got == truth, 0, got - truth)  # equal infinities
    size = xp.where(xp.isfinite(truth), truth, 0)
    off, size = _pieces(off), _pieces(size)
    off, size = (xp.sqrt(xp.sum(x * x, -1)) for x in (off, size))
    usual = xp.sqrt(xp.mean(size * size))
    whole = xp.sqrt(xp.sum(off * off)) / xp.sqrt(xp.where(xp.sum(size) == 0, 1, xp.sum(size * size)))
    at_least = xp.where(usual == 0, 1, usual)
    return whole, xp.max(off / (size + at_least)), finite


_deviations_on_device = jax.jit(functools.partial(_deviations, jnp))


def _pieces(x: Any) -> Any:
    """Return (..., n) as (pieces, elements): rows, with long ones cut; elements of a vector."""
    if x.ndim < 2:
        return x.reshape(-1, 1)
    n = x.shape[-1]
    return x.reshape(-1, PIECE if n > PIECE and n % PIECE == 0 else n)


def _apart(one: tuple[Any, ...], other: tuple[Any, ...]) -> list[tuple[bool, float]]:
    """Return, for every part, whether the bits are the same, and the norm of the difference over the first's norm."""
    results = []
    for a, b in zip(one, other, strict=True):
        if isinstance(a, np.ndarray):
            same = a.tobytes() == np.asarray(b).tobytes()
        else:
            same = bool(jax.jit(_same_bits)(a, b))
        results.append((same, 0.0 if same else _errors(b, a.astype(np.float32))[0]))
    return results


def _same_bits(a: jax.Array, b: jax.Array) -> jax.Array:
    bits = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[a.dtype.itemsize]
    view = lambda x: jax.lax.bitcast_convert_type(x, bits)  # noqa: E731
    return jnp.array_equal(view(a), view(b))


# poison ------------------------------------------------------------------------------------------------------------

_LADDER = tuple(256 * 4**i for i in range(11))  # bytes: 256 to 256 MiB
_OF_EACH = 48
_LEFT = 0.08  # share of the pool: JAX retries a failed allocation for ten seconds
_WITHOUT_POOL = 2**26  # bytes to fill where there is no pool: the last freed memory


def fill_free_memory() -> float | None:
    """Fill the allocator's free memory with 0xFF bytes and free it again.

    Small blocks first, as many of each size as fill the gaps between used blocks, since small outputs go there; then
    large blocks. A part of the pool is left.

    Returns:
      the share of the free memory that was filled; `None` where the allocator does not report its size.
    """
    stats = jax.local_devices()[0].memory_stats() or {}
    limit, used = stats.get("bytes_limit"), stats.get("bytes_in_use", 0)
    free = max(0, limit - used) if limit else 0
    most = free - int(limit * _LEFT) if limit else _WITHOUT_POOL
    held, filled = [], 0

    def take(size: int) -> None:
        nonlocal filled
        held.append(_fill(size)())
        filled += size

    try:
        for size in _LADDER:
            for _ in range(_OF_EACH):
                if filled + size > most // 2:
                    break
                take(size)
        for size in reversed(_LADDER):
            while filled + size <= most and size >= 2**20:
                take(size)
        jax.block_until_ready(held)
    except jax.errors.JaxRuntimeError:  # the pool is more fragmented than expected: keep what was filled
        pass
    for x in held:
        x.delete()
    return round(filled / free, 3) if free else None


@functools.cache
def _fill(size: int) -> Callable[[], jax.Array]:
    return jax.jit(lambda: jnp.full((size,), 0xFF, jnp.uint8)).lower().compile()


# the process -------------------------------------------------------------------------------------------------------


def main() -> None:
    """Run a process of `on_device`."""
    parser = argparse.ArgumentParser(description="a process of on_device")
    parser.add_argument("--answers", type=int, required=True, help="the file descriptor for answers")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--interpret", action="store_true", help="run kernels in their interpreters, on a CPU")
    parser.add_argument("--works", default=f"{__package__}.device_check", help="the module whose works() is run")
    args = parser.parse_args()
    if args.interpret:
        jax.config.update("jax_num_cpu_devices", parity.THREADS)
    device = jax.devices()[0]
    every: list[Work] = importlib.import_module(args.works).works(device.platform)
    with os.fdopen(args.answers, "w") as answers:

        def answer(what: Any) -> None:
            answers.write(json.dumps(_plain(what)) + "\n")
            answers.flush()

        answer(
            {
                "platform": device.platform,
                "device": device.device_kind,
                "jax": jax.__version__,
                "memory": (device.memory_stats() or {}).get("bytes_limit"),
                "backends": backends(device.platform, device.device_kind),
                "works": [(w.op, w.feature, w.dtype, w.parts, w.large) for w in every],
            }
        )
        with withdrawn.allowed(), dispatch.interpreted() if args.interpret else contextlib.nullcontext():
            _serve(every, args.seed, sys.stdin, answer)


def _serve(every: list[Work], seed: int, lines: Iterable[str], answer: Callable[[Any], None]) -> None:
    """Answer each line {"work": index, "backend": name} with {"rows": [...], "last": whether the process ends}."""
    before, made = None, None
    for line in lines:
        order = json.loads(line)
        work, backend = every[order["work"]], order["backend"]
        try:
            if order["work"] != before:
                before = made = None  # free the last work's arrays before the next ones are made
                jax.clear_caches()
                with _telling("making arrays"):
                    made = _once(work.make(seed))
                before = order["work"]
            rows, last = check(work, backend, made), False
        except Crash as e:  # after a fault, a device answers every call with the same error
            rows, last = [_row(work, backend, part, str(e)) for part in work.parts], e.fatal
        answer({"rows": rows, "last": last})
        if last:
            os._exit(0)


def _once(made: Program) -> Program:
    """Cache the plain implementation and the truth, which are the same for every backend."""
    return Program(made.ours, made.arrays, made.parts, functools.cache(made.plain), functools.cache(made.truth))


def _plain(x: Any) -> Any:
    """Return x as JSON: a float that JSON lacks becomes a word."""
    if isinstance(x, float):
        return x if np.isfinite(x) else str(x)
    if isinstance(x, dict):
        return {k: _plain(v) for k, v in x.items()}
    return [_plain(v) for v in x] if isinstance(x, (list, tuple)) else x


if __name__ == "__main__":
    main()
