"""Flash attention, forward and backward, compared with cuDNN, XLA, torch, Triton and tokamax.

    python experiments/benchmarks/attention.py                        on the present device; ten minutes on a GPU
    python experiments/benchmarks/attention.py --json attention.json  write every timing to a file
    python experiments/benchmarks/attention.py --only packed          only rows whose name contains a word

A round calls a matrix product, ours and the others in turns, so that a change of the clock frequency affects all of
them; a ratio is the median over rounds. FLOPs are 4 S T D for each query head, times the share of unmasked pairs, and
2.5 times as many backward. Rows with segments, a window, grouped heads or a soft-cap are compared with our own causal
rate, both counted in visited tiles of 128 x 128 (from `tile_table`): this is what a mask costs beyond the work that
remains. On a CPU sizes are small, ours is "xla", the other is that of `jax.nn`, and no target applies.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import os
import statistics
from collections.abc import Callable, Iterator
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # leaves memory for torch

import jax
import jax.numpy as jnp
import measure
import numpy as np
import record
import rivals

from pallas_kernels import chosen, forget
from pallas_kernels.flash_attention import SKIP, Mask, Tokens, flash_attention, tile_table

TILE = 128
DOCUMENTS = (0.31, 0.02, 0.17, 0.05, 0.09, 0.22, 0.01, 0.13)
"""Lengths of a packed row's documents, as shares of the row."""
OURS = ("ours", "deterministic", "causal")


@dataclasses.dataclass(frozen=True)
class Shape:
    """Batch, sequence length, query heads, head dim and key-value heads."""

    b: int
    s: int
    h: int
    d: int
    kv: int


@dataclasses.dataclass(frozen=True)
class Claim:
    """A target for the rate of "ours" (or `of`), as a multiple of another call's rate or in TFLOP/s.

    Args:
      against: name of the other call, or "" for TFLOP/s.
      least: the target.
      floor: a smaller ratio that is reported as "above the floor", or `None`.
      of: the call that the target is for.
      tiles: count the FLOPs of visited tiles instead of those of unmasked pairs.
    """

    against: str
    least: float
    floor: float | None = None
    of: str = "ours"
    tiles: bool = False


@dataclasses.dataclass(frozen=True)
class Case:
    """A row: a computation, the calls that are timed, and their targets.

    Args:
      name: name of the row, without the direction.
      direction: "forward" or "backward".
      shape: shapes of the arrays.
      options: static options of `flash_attention`.
      packed: eight documents in each batch row.
      calls: "ours", "deterministic", "causal" (ours with only a causal mask), "cudnn", "xla", "cudnn mask",
        "torch", "flex", "triton", "tokamax".
      claims: the targets.
    """

    name: str
    direction: str
    shape: Shape
    options: tuple[tuple[str, Any], ...] = (("causal", True),)
    packed: bool = False
    calls: tuple[str, ...] = ("ours", "cudnn")
    claims: tuple[Claim, ...] = ()


@dataclasses.dataclass(frozen=True)
class Machine:
    """Sizes for a kind of device.

    Args:
      shapes: large (B, S, H).
      short: (B, S, H) of the row with short sequences.
      widths: head dims.
      wide: head dim of the row with wide heads.
      window: keys in the row with a window.
      matmul: length of the sides of the matrix product.
      calls: least number of calls in a timing.
      least: least seconds of a timing.
    """

    shapes: tuple[tuple[int, int, int], ...]
    short: tuple[int, int, int]
    widths: tuple[int, ...]
    wide: int
    window: int
    matmul: int
    calls: int
    least: float


LARGE = Machine(((2, 8192, 16), (1, 16384, 16)), (16, 1024, 16), (128, 64), 256, 1024, 8192, 4, 5e-3)
MACHINES = {"gpu": LARGE, "tpu": LARGE, "cpu": Machine(((1, 1024, 4),), (2, 256, 4), (64,), 256, 128, 1024, 1, 0.0)}


def cases(machine: Machine, platform: str) -> list[Case]:
    """Return all rows for a machine, most informative first: the causal ones at the first width, then the others."""
    every = [*_plain(machine, platform), *_special(machine, platform), *_others(machine, platform)]
    first = lambda c: c.shape.d == machine.widths[0] and dict(c.options)["causal"]  # noqa: E731
    return sorted(every, key=lambda c: not first(c))


def _plain(machine: Machine, platform: str) -> Iterator[Case]:
    library = "cudnn" if platform == "gpu" else "xla"
    for d, (b, s, h), causal in itertools.product(machine.widths, machine.shapes, (False, True)):
        shape, name = Shape(b, s, h, d, h), f"D {d} {b}×{s}×{h} {'causal' if causal else 'full'}"
        options, ours = (("causal", causal),), ("ours", library)
        rivals = ("torch", "triton", "tokamax") if platform == "gpu" else ()
        both = (*ours, "xla") if platform == "gpu" and s <= 8192 else ours
        yield Case(name, "forward", shape, options, calls=(*both, *rivals), claims=(Claim(library, 1.0, 0.95),))
        yield Case(
            name, "backward", shape, options, calls=(*ours, "deterministic", *rivals),
            claims=(
                Claim(library, 1.0, 0.8), Claim("deterministic", 1.2), Claim(library, 0.8, of="deterministic"),
            ),
        )  # fmt: skip


def _special(machine: Machine, platform: str) -> Iterator[Case]:
    """Rows that are compared with our own causal rate."""
    library = "cudnn" if platform == "gpu" else "xla"
    flex = ("flex",) if platform == "gpu" else ()
    d, (b, s, h), causal = machine.widths[0], machine.shapes[-1], (("causal", True),)
    shape, at = Shape(b, s, h, d, h), f"D {d} {b}×{s}×{h}"
    own, share, mask = ("ours", "causal", *flex), Claim("causal", 0.9, tiles=True), f"{library} mask"
    for direction in ("forward", "backward"):
        yield Case(
            f"packed, {len(DOCUMENTS)} documents, {at}", direction, shape, packed=True, calls=(*own, mask),
            claims=(share, Claim(mask, 2.5)),
        )  # fmt: skip
        window = (*causal, ("window", machine.window))
        yield Case(f"window {machine.window}, {at}", direction, shape, window, calls=own, claims=(share,))
        grouped = dataclasses.replace(shape, kv=h // 4)
        yield Case(f"{h} heads on {h // 4}, {at}", direction, grouped, calls=own, claims=(share,))
        softcap = (*causal, ("softcap", 50.0))
        yield Case(f"soft-cap, {at}", direction, shape, softcap, calls=own, claims=(Claim("causal", 0.8, tiles=True),))


def _others(machine: Machine, platform: str) -> Iterator[Case]:
    """Rows with short sequences, and with wide heads."""
    library = "cudnn" if platform == "gpu" else "xla"
    (b, s, h), d = machine.short, machine.widths[0]
    short = f"D {d} {b}×{s}×{h} causal"
    yield Case(short, "forward", Shape(b, s, h, d, h), calls=("ours", library), claims=(Claim(library, 1.05),))
    b, s, h = machine.shapes[0]
    wide = Shape(b, s, h // 2, machine.wide, h // 2)
    for full in (False, True):
        name = f"D {machine.wide} {b}×{s}×{h // 2} {'full' if full else 'causal'}"
        yield Case(name, "backward", wide, (("causal", not full),), calls=("ours", library), claims=(Claim("", 250.0),))


# work ------------------------------------------------------------------------------------------------------------


def documents(shape: Shape) -> np.ndarray:
    """Return segment ids, (B, S): every batch row has the same documents."""
    ends = np.round(np.cumsum(DOCUMENTS) * shape.s).astype(int)
    return np.tile(np.searchsorted(ends, np.arange(shape.s), side="right").astype(np.int32), (shape.b, 1))


def flops(case: Case) -> float:
    """Return the FLOPs of the unmasked pairs of a query and a key: half of all pairs where the mask is causal."""
    options, shape = dict(case.options), case.shape
    seen = np.full(shape.s, shape.s, float)  # keys that a query attends to
    if options["causal"]:
        place = np.arange(shape.s)
        if case.packed:
            ids = documents(shape)[0]
            place = place - np.searchsorted(ids, ids)
        seen = np.minimum(place + 0.5, options.get("window") or np.inf)
    return _of_pairs(float(seen.sum()) * shape.b, case)


def tile_flops(case: Case) -> float:
    """Return the FLOPs of all pairs in the visited tiles."""
    options, shape = dict(case.options), case.shape
    ids = documents(shape) if case.packed else None
    tokens = Tokens(ids, ids)  # type: ignore[arg-type]
    mask = Mask(options["causal"], options.get("window"))
    table = tile_table(mask, tokens, s=shape.s, t=shape.s, q_tile=TILE, k_tile=TILE, each=True)
    visited = np.broadcast_to(np.asarray(table) != SKIP, (shape.b, *table.shape[1:])).sum()
    return _of_pairs(float(visited) * TILE**2, case)


def _of_pairs(pairs: float, case: Case) -> float:
    return 4 * pairs * case.shape.d * case.shape.h * (1 if case.direction == "forward" else 2.5)


def bare(case: Case) -> Case:
    """Return the causal row that a special one is compared with."""
    shape = dataclasses.replace(case.shape, kv=case.shape.h)
    return dataclasses.replace(case, shape=shape, options=(("causal", True),), packed=False)


# calls -----------------------------------------------------------------------------------------------------------


def made(case: Case, call: str, dtype: Any) -> rivals.Call:
    """Return the named call of a row: its forward pass alone or its backward pass alone."""
    case = bare(case) if call == "causal" else case
    shape, options = case.shape, dict(case.options)
    heads = {"q": shape.h, "k": shape.kv, "v": shape.kv, "g": shape.h}
    keys = dict(zip(heads, jax.random.split(jax.random.key(0), 4), strict=True))
    *arrays, g = (jax.random.normal(keys[n], (shape.b, shape.s, h, shape.d), dtype) for n, h in heads.items())
    qkv, causal = tuple(arrays), options["causal"]
    ids = documents(shape) if case.packed else None
    if call in OURS:
        own = functools.partial(flash_attention, **options, segment_ids=ids, deterministic=call == "deterministic")
        return rivals.of_jax(own, qkv, g, case.direction)
    if call == "torch":
        return rivals.torch_attention(qkv, g, case.direction, causal)
    if call == "flex":
        return rivals.flex_attention(qkv, g, case.direction, segments=ids, **options)
    if call == "triton":
        return rivals.triton_attention(qkv, g, case.direction, causal=causal, segments=ids)
    if call == "tokamax":
        return rivals.tokamax_attention(qkv, g, case.direction, is_causal=causal)
    library, _, masked = call.partition(" ")
    if not masked:
        theirs = functools.partial(jax.nn.dot_product_attention, is_causal=causal, implementation=library)
        return rivals.of_jax(theirs, qkv, g, case.direction)
    place = np.arange(shape.s)
    assert ids is not None
    mask = jnp.asarray((ids[:, :, None] == ids[:, None]) & (place[:, None] >= place))[:, None]
    f = lambda q, k, v, mask: jax.nn.dot_product_attention(q, k, v, mask=mask, implementation=library)  # noqa: E731
    return rivals.of_jax(f, qkv, g, case.direction, mask)


def matmul(size: int, dtype: Any) -> tuple[Callable[[], Any], float]:
    """Return a square matrix product and its FLOPs."""
    a, b = (jax.random.normal(jax.random.key(i), (size, size), dtype) for i in (0, 1))
    return functools.partial(jax.jit(jnp.matmul), a, b), 2.0 * size**3


def measure_row(machine: Machine, dtype: Any, rounds: int, case: Case) -> tuple[dict[str, Any], list[record.Line]]:
    """Measure a row: the rate of each call, the ratios, and the implementation that ran."""
    forget()
    product, product_flops = matmul(machine.matmul, dtype)
    makers = {call: functools.partial(made, case, call, dtype) for call in case.calls if call != "causal"}
    calls, refused = rivals.agreeing(makers, 0.03)
    runs = _what_ran(case.direction)
    if "causal" in case.calls:  # computes something else, so its result is not compared
        calls["causal"] = made(case, "causal", dtype)
        jax.block_until_ready(calls["causal"]())
    times = _calls(machine, calls["ours"])
    several = {name: rivals.several(call, times) for name, call in {"matmul": product, **calls}.items()}
    timed = measure.interleaved(several, rounds)
    seconds = {name: [w / times for w in t.wall] for name, t in timed.items()}
    tflops = {n: _work(case, n) / statistics.median(seconds[n]) / 1e12 for n in calls}
    row = {**_described(case), "runs": runs, "timings": seconds}
    ours = tflops.pop("ours")
    common: dict[str, Any] = dict(
        runs=runs, unit="TFLOP/s", ours=ours, others=tflops, refused=refused,
        matmul=product_flops / statistics.median(seconds["matmul"]) / 1e12,
    )  # fmt: skip
    jax.clear_caches()
    return row, [_line(case, claim, seconds, common) for claim in case.claims]


def _calls(machine: Machine, call: rivals.Call) -> int:
    """Return the number of calls in a timing: enough that launching and waiting matter little."""
    some = rivals.several(call, machine.calls)
    once = min(measure.interleaved({"": some}, 3)[""].wall) / machine.calls
    return max(machine.calls, min(64, round(machine.least / once)))


def _described(case: Case) -> dict[str, Any]:
    return {"direction": case.direction, **dataclasses.asdict(case.shape), **dict(case.options)}


def _work(case: Case, call: str, tiles: bool = False) -> float:
    case = bare(case) if call == "causal" else case
    return tile_flops(case) if tiles else flops(case)


def _line(case: Case, claim: Claim, seconds: dict[str, list[float]], common: dict[str, Any]) -> record.Line:
    """Return the table's line of a target: the measured multiple of another call's rate, or TFLOP/s."""
    ratio = None
    if claim.of in seconds and claim.against in (*seconds, ""):
        work = _work(case, claim.of, claim.tiles)
        if claim.against:
            share = work / _work(case, claim.against, claim.tiles)
            ratio = measure.ratio([share * s for s in seconds[claim.against]], seconds[claim.of])
        else:
            ratio = measure.ratio([work / 1e12] * len(seconds[claim.of]), seconds[claim.of])
    measured = None if ratio is None else dataclasses.asdict(ratio)
    return record.Line(
        f"attention {case.direction} {case.name}" + (f": {claim.of}" if claim.of != "ours" else ""),
        ratio=measured,
        against=(claim.against or "TFLOP/s") + (", tiles" if claim.tiles else ""),
        target=claim.least,
        floor=claim.floor,
        verdict=record.judge(measured, claim.least, claim.floor, jax.devices()[0].device_kind),
        **common,
    )


def _what_ran(direction: str) -> str:
    kind = jax.devices()[0].device_kind
    records = [c for c in chosen("flash_attention") if c.kind == kind and dict(c.case)["direction"] == direction]
    return records[0].implementation if records else "?"


def main() -> None:
    """Measure every row and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    record.options(parser)
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), help="bfloat16 (float32 on a CPU)")
    args = parser.parse_args()
    device = jax.devices()[0]
    machine = MACHINES.get(device.platform, MACHINES["cpu"])
    dtype = jnp.dtype(args.dtype or ("float32" if device.platform == "cpu" else "bfloat16"))
    results = record.Results("attention", device.device_kind, args, dtype=dtype.name)
    named = ((f"attention {case.direction} {case.name}", case) for case in cases(machine, device.platform))
    results.each(named, functools.partial(measure_row, machine, dtype, args.rounds))
    results.show()


if __name__ == "__main__":
    main()
