"""Flash attention, forward and backward, against cuDNN's and XLA's by way of `jax.nn`, and against its own causal rate.

    python experiments/benchmarks/attention.py                        on the device there is; on a GPU ten minutes
    python experiments/benchmarks/attention.py --json attention.json  and every timing into a file
    python experiments/benchmarks/attention.py --only packed          the rows whose name holds a word

A round calls a matrix product, ours and what it is held against in turns, so that a clock that drops drops for all of
them; a ratio is the median over rounds. Arithmetic is 4 S T D for each query head, of that the pairs that are seen, and
2.5 times as much backward. Segments, a window, grouped heads and a soft-cap are held against our own causal rate, both
counted in visited tiles of 128 x 128 (from `tile_table`): what a mask costs besides the work it leaves. On a CPU sizes
are small, ours is "xla", held against `jax.nn`'s, and no target applies.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import json
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import measure
import numpy as np

from pallas_kernels import KernelError, chosen, forget
from pallas_kernels.flash_attention import SKIP, Mask, Tokens, flash_attention, tile_table

TILE = 128
DOCUMENTS = (0.31, 0.02, 0.17, 0.05, 0.09, 0.22, 0.01, 0.13)
"""The lengths of a packed row's documents, as shares of it."""
OURS = ("ours", "deterministic", "causal")


@dataclasses.dataclass(frozen=True)
class Shape:
    """(B, S, H, D) of the queries, and the key heads."""

    b: int
    s: int
    h: int
    d: int
    kv: int


@dataclasses.dataclass(frozen=True)
class Claim:
    """What a row should show: the rate of "ours" (or `of`), as a multiple of another call's or in TFLOP/s.

    Args:
      against: a call, or "" for TFLOP/s.
      least: the target.
      floor: what is still bearable below it, or `None`.
      of: whose rate.
      tiles: rates are those of visited tiles.
    """

    against: str
    least: float
    floor: float | None = None
    of: str = "ours"
    tiles: bool = False


@dataclasses.dataclass(frozen=True)
class Case:
    """A row: what is computed, what is timed beside it, what it should show.

    Args:
      name: what it is called, without the direction.
      direction: "forward" or "backward".
      shape: of the arrays.
      options: static options of `flash_attention`.
      packed: eight documents in a row.
      calls: "ours", "deterministic", "causal" (ours, without what is special here), "cudnn", "xla", "cudnn mask".
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
    """What is measured where: the large shapes (B, S, H), the short one, widths, the window, the product, rounds."""

    shapes: tuple[tuple[int, int, int], ...]
    short: tuple[int, int, int]
    widths: tuple[int, ...]
    wide: int
    window: int
    matmul: int
    rounds: int
    calls: int


LARGE = Machine(((2, 8192, 16), (1, 16384, 16)), (16, 1024, 16), (128, 64), 256, 1024, 8192, 30, 4)
MACHINES = {"gpu": LARGE, "tpu": LARGE, "cpu": Machine(((1, 1024, 4),), (2, 256, 4), (64,), 256, 128, 1024, 10, 1)}


def cases(machine: Machine, platform: str) -> Iterator[Case]:
    """Every row of a machine."""
    library = "cudnn" if platform == "gpu" else "xla"
    sizes = "{}×{}×{}".format
    for d, (b, s, h), causal in itertools.product(machine.widths, machine.shapes, (False, True)):
        shape, name = Shape(b, s, h, d, h), f"D {d} {sizes(b, s, h)} {'causal' if causal else 'full'}"
        options, ours = (("causal", causal),), ("ours", library)
        both = (*ours, "xla") if platform == "gpu" and s <= 8192 else ours
        yield Case(name, "forward", shape, options, calls=both, claims=(Claim(library, 1.0, 0.95),))
        yield Case(
            name, "backward", shape, options, calls=(*ours, "deterministic"),
            claims=(
                Claim(library, 1.0, 0.8), Claim("deterministic", 1.2), Claim(library, 0.8, of="deterministic"),
            ),
        )  # fmt: skip
    b, s, h = machine.short
    d = machine.widths[0]
    name = f"D {d} {sizes(b, s, h)} causal"
    yield Case(name, "forward", Shape(b, s, h, d, h), calls=("ours", library), claims=(Claim(library, 1.05),))
    (b, s, h), causal = machine.shapes[-1], (("causal", True),)
    shape, at = Shape(b, s, h, d, h), f"D {d} {sizes(b, s, h)}"
    for direction in ("forward", "backward"):
        own, share = ("ours", "causal"), Claim("causal", 0.9, tiles=True)
        mask = f"{library} mask"
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
    b, s, h = machine.shapes[0]
    wide = Shape(b, s, h // 2, machine.wide, h // 2)
    for full in (False, True):
        name = f"D {machine.wide} {sizes(b, s, h // 2)} {'full' if full else 'causal'}"
        yield Case(name, "backward", wide, (("causal", not full),), calls=("ours", library), claims=(Claim("", 250.0),))


# work ------------------------------------------------------------------------------------------------------------


def documents(shape: Shape) -> np.ndarray:
    """(B, S) segment ids: every row holds the same documents."""
    ends = np.round(np.cumsum(DOCUMENTS) * shape.s).astype(int)
    return np.tile(np.searchsorted(ends, np.arange(shape.s), side="right").astype(np.int32), (shape.b, 1))


def flops(case: Case) -> float:
    """Of the pairs of a query and a key that are seen; half of all where the mask is causal."""
    options, shape = dict(case.options), case.shape
    seen = np.full(shape.s, shape.s, float)  # keys a query sees
    if options["causal"]:
        place = np.arange(shape.s)
        if case.packed:
            ids = documents(shape)[0]
            place = place - np.searchsorted(ids, ids)
        seen = np.minimum(place + 0.5, options.get("window") or np.inf)
    return _of_pairs(float(seen.sum()) * shape.b, case)


def tile_flops(case: Case) -> float:
    """Of all pairs of the tiles that are visited."""
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
    """The causal row that a special one is held against."""
    shape = dataclasses.replace(case.shape, kv=case.shape.h)
    return dataclasses.replace(case, shape=shape, options=(("causal", True),), packed=False)


# calls -----------------------------------------------------------------------------------------------------------


def attention(case: Case, call: str) -> Callable[..., jax.Array]:
    """What a call computes, as a function of q, k and v."""
    options: dict[str, Any] = dict(case.options)
    ids = documents(case.shape) if case.packed else None
    if call in OURS:
        return functools.partial(flash_attention, **options, segment_ids=ids, deterministic=call == "deterministic")
    library, _, masked = call.partition(" ")
    mask = None
    if masked:
        s = np.arange(case.shape.s)
        assert ids is not None
        mask = jnp.asarray((ids[:, :, None] == ids[:, None]) & (s[:, None] >= s))[:, None]
    return functools.partial(
        jax.nn.dot_product_attention,
        mask=mask, is_causal=options["causal"] and not masked, implementation=library,
    )  # fmt: skip


def prepared(case: Case, call: str, dtype: Any) -> tuple[Callable[[], Any], Any]:
    """A call of the forward or of the backward pass alone, compiled, and its result."""
    case = bare(case) if call == "causal" else case
    shape = case.shape
    heads = {"q": shape.h, "k": shape.kv, "v": shape.kv, "g": shape.h}
    keys = dict(zip(heads, jax.random.split(jax.random.key(0), 4), strict=True))
    q, k, v, g = (jax.random.normal(keys[n], (shape.b, shape.s, h, shape.d), dtype) for n, h in heads.items())
    f = attention(case, call)
    if case.direction == "forward":
        run = functools.partial(jax.jit(f), q, k, v)
    else:
        pull = jax.jit(lambda *x: jax.vjp(f, *x)[1])(q, k, v)
        run = functools.partial(jax.jit(lambda pull, g: pull(g)), pull, g)
    return run, jax.block_until_ready(run())


def matmul(size: int, dtype: Any) -> tuple[Callable[[], Any], float]:
    """A square product and its arithmetic."""
    a, b = (jax.random.normal(jax.random.key(i), (size, size), dtype) for i in (0, 1))
    return functools.partial(jax.jit(jnp.matmul), a, b), 2.0 * size**3


def measure_row(machine: Machine, case: Case, dtype: Any) -> dict[str, Any]:
    """Rates of each call, the ratios, and what ran."""
    refused, calls, results = {}, {}, {}
    runs = ""
    product, product_flops = matmul(machine.matmul, dtype)
    for call in case.calls:
        forget()
        try:
            calls[call], results[call] = prepared(case, call, dtype)
        except (KernelError, ValueError, NotImplementedError, RuntimeError) as e:  # jax.nn refuses with any of these
            refused[call] = str(e).splitlines()[0]
            continue
        if call == "ours":
            runs = _what_ran(case.direction)
    _check(case, results)
    results.clear()
    if "ours" not in calls:
        return _described(case) | {"runs": "", "refused": refused, "tflops": {}, "ratios": [], "timings": {}}
    timed = measure.interleaved(
        {name: _timing(call, machine.calls) for name, call in {"matmul": product, **calls}.items()}, machine.rounds
    )
    seconds = {name: [w / machine.calls for w in t.wall] for name, t in timed.items()}
    tflops = {n: _work(case, n) / statistics.median(seconds[n]) / 1e12 for n in calls}
    tflops["matmul"] = product_flops / statistics.median(seconds["matmul"]) / 1e12
    return _described(case) | {
        "runs": runs,
        "refused": refused,
        "tflops": tflops,
        "ratios": [_ratio(case, claim, seconds) for claim in case.claims],
        "timings": seconds,
    }


def _described(case: Case) -> dict[str, Any]:
    return {"name": case.name, "direction": case.direction, **dataclasses.asdict(case.shape), **dict(case.options)}


def _work(case: Case, call: str, tiles: bool = False) -> float:
    case = bare(case) if call == "causal" else case
    return tile_flops(case) if tiles else flops(case)


def _ratio(case: Case, claim: Claim, seconds: dict[str, list[float]]) -> dict[str, Any]:
    """A claim with what was found: a multiple of another call's rate, or TFLOP/s; `None` where one did not run."""
    found = dataclasses.asdict(claim)
    if claim.of not in seconds or claim.against not in (*seconds, ""):
        return found | {"found": None}
    work = _work(case, claim.of, claim.tiles)
    if not claim.against:
        rates = [work / s / 1e12 for s in seconds[claim.of]]
        return found | {"found": dataclasses.asdict(measure.ratio(rates, [1.0] * len(rates)))}
    share = work / _work(case, claim.against, claim.tiles)
    ratio = measure.ratio([share * s for s in seconds[claim.against]], seconds[claim.of])
    return found | {"found": dataclasses.asdict(ratio)}


def _check(case: Case, results: dict[str, Any]) -> None:
    """Nothing is timed that computes something else."""
    want = results.get("ours")
    for call, got in results.items():
        if want is None or call in ("ours", "causal"):
            continue
        for a, b in zip(jax.tree.leaves(want), jax.tree.leaves(got), strict=True):
            apart = jnp.linalg.norm((a - b).astype(jnp.float32).ravel()) / jnp.linalg.norm(
                a.astype(jnp.float32).ravel()
            )
            if not float(apart) < 0.03:
                raise SystemExit(f"{case.name} {case.direction}: ours and '{call}' are {float(apart):.3g} apart")


def _timing(call: Callable[[], Any], calls: int) -> Callable[[], None]:
    def run() -> None:
        out = None
        for _ in range(calls):
            out = call()  # the one before may go while this one is on its way
        jax.block_until_ready(out)

    return run


def _what_ran(direction: str) -> str:
    kind = jax.devices()[0].device_kind
    found = [c for c in chosen("flash_attention") if c.kind == kind and dict(c.case)["direction"] == direction]
    return found[-1].implementation if found else "?"


# the table -------------------------------------------------------------------------------------------------------


def verdict(claim: dict[str, Any]) -> str:
    """Whether a claim holds: "met", "above the floor", "missed", or "not measured"."""
    if claim["found"] is None:
        return "not measured"
    value = claim["found"]["median"]
    if value >= claim["least"]:
        return "met"
    return "above the floor" if claim["floor"] is not None and value >= claim["floor"] else "missed"


HEADER = ("row", "direction", "runs", "matmul", "ours", "others", "what", "found", "target", "")


def lines(row: dict[str, Any], judged: bool) -> list[tuple[str, ...]]:
    """A row of the table for each claim."""
    rate = lambda name: f"{row['tflops'][name]:.3g}" if name in row["tflops"] else "–"  # noqa: E731
    others = [f"{name} {rate(name)}" for name in row["tflops"] if name not in ("matmul", "ours")]
    others += [f"{name} refused" for name in row["refused"]]
    found = []
    for claim in row["ratios"]:
        value = claim["found"]
        against = f"/ {claim['against']}" if claim["against"] else "TFLOP/s"
        spread = f"{value['median']:.3g} ({value['low']:.3g}–{value['high']:.3g})" if value else "–"
        aim = f"≥ {claim['least']}" + (f", floor {claim['floor']}" if claim["floor"] is not None else "")
        what = f"{claim['of']} {against}{', tiles' if claim['tiles'] else ''}"
        head = (row["name"], row["direction"], row["runs"], rate("matmul"), rate("ours"), ", ".join(others))
        found.append((*(head if not found else [""] * 6), what, spread, aim if judged else "none",
                      verdict(claim) if judged else ""))  # fmt: skip
    return found or [(row["name"], row["direction"], "refused", *[""] * 7)]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="write every timing there")
    parser.add_argument("--dtype", help="bfloat16 (float32 on a CPU)")
    parser.add_argument("--only", help="rows whose name and direction hold this")
    parser.add_argument("--rounds", type=int, help="timings of each")
    args = parser.parse_args()
    device = jax.devices()[0]
    machine = MACHINES.get(device.platform, MACHINES["cpu"])
    machine = dataclasses.replace(machine, rounds=args.rounds or machine.rounds)
    dtype = jnp.dtype(args.dtype or ("float32" if device.platform == "cpu" else "bfloat16"))
    judged = device.platform == "gpu" and "H200" in device.device_kind
    if not judged:
        print(f"on {device.device_kind}: sizes are {'small, ' if device.platform == 'cpu' else ''}no target applies")
    rows = []
    for case in cases(machine, device.platform):
        if args.only and args.only not in f"{case.name} {case.direction}":
            continue
        rows.append(measure_row(machine, case, dtype))
        jax.clear_caches()
        for cells in lines(rows[-1], judged):
            print("  ".join(cells), flush=True)
    if not rows:
        raise SystemExit(f"no row's name and direction hold '{args.only}'")
    result = {**measure.facts(device.device_kind), "dtype": dtype.name, "judged": judged, "rows": rows}
    show(result, judged)
    if args.json:
        args.json.write_text(json.dumps(measure.rounded(result), indent=2) + "\n")


def show(result: dict[str, Any], judged: bool) -> None:
    """The table."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    title = f"flash attention {result['dtype']} on {result['device']} · TFLOP/s"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for name in HEADER:
        table.add_column(name, justify="right" if name in ("matmul", "ours", "found") else "left")
    for row in result["rows"]:
        for cells in lines(row, judged):
            table.add_row(*cells)
    console = Console(highlight=False)
    Console(highlight=False, width=None if console.is_terminal else 190).print(table)
    for row in result["rows"]:
        for call, why in row["refused"].items():
            print(f"{row['name']} {row['direction']}: '{call}' refused: {why}")


if __name__ == "__main__":
    main()
