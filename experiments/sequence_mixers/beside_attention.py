"""What a recurrence's kernels cost beside attention's on TPUs that are not present; from which length they cost less.

    python experiments/sequence_mixers/beside_attention.py       # 15 minutes on two idle cores
    python experiments/sequence_mixers/beside_attention.py --lengths 4096 --out /tmp/short.json

Compiles `pallas_kernels.chunked_recurrence`, our flash attention and JAX's splash attention for v5p and v6e, forward
and with the gradient, and reads VMEM, temporaries and bytes from the compiled programs. The compiler does not see into
a kernel: FLOPs of a recurrence are counted in the jaxpr of the step that the kernel runs on each chunk, FLOPs and reads
of attention's kernels by formula from the tiles that they visit. Nothing runs. Writes beside_attention.json here.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import functools
import importlib.metadata
import itertools
import json
import math
import pathlib
import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks
from jax.interpreters.partial_eval import dce_jaxpr

from pallas_kernels.aot import compile_kernel, kind_of
from pallas_kernels.chunked_recurrence import chunked_recurrence
from pallas_kernels.chunked_recurrence.chunk import Chunk, step
from pallas_kernels.chunked_recurrence.examples import shapes
from pallas_kernels.flash_attention import flash_attention
from pallas_kernels.tiles import lookup

LENGTHS = (4096, 16384, 65536, 131072)
TOPOLOGIES = {"v5p": 128, "v6e": 256}
"""A TPU -> the side of its matrix unit."""
HEADS, WIDTH = 16, 128
TILE = 512
"""Splash attention's tiles, queries by keys; MaxText's default."""
PASSES = {"bfloat16": 1, "float32": 6}
"""Passes of the matrix unit for a product of that dtype at the highest precision."""
RECURRENCES: dict[str, dict[str, Any]] = {
    "Gated DeltaNet": {"decay": "heads", "delta": True},
    "Kimi delta attention": {"decay": "channels", "delta": True},
    "GLA": {"decay": "channels"},
    "Mamba-2": {"decay": "heads", "heads": 2 * HEADS},
}
"""A mixer -> options of `shapes`; heads and widths are the mixer's own in a model with 16 heads of 128."""
ATTENTIONS = ("splash attention", "flash attention")


@dataclasses.dataclass(frozen=True)
class Cost:
    """What one row of a length costs.

    Args:
      flops: of products.
      work: FLOPs of products with sides padded to the matrix unit, times `PASSES`.
      hbm_bytes: what the kernels read and write.
    """

    flops: float
    work: float
    hbm_bytes: float


def products(jaxpr: Any) -> Iterator[tuple[int, int, int, str]]:
    """Yield (rows, columns, depth, dtype) of every product in a jaxpr without loops."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            (over, _), _ = eqn.params["dimension_numbers"]
            a, b = (v.aval for v in eqn.invars)
            depth = math.prod(a.shape[i] for i in over)
            yield a.size // depth, b.size // depth, depth, str(a.dtype)
            continue
        for value in eqn.params.values():
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from products(inner)


def of_recurrence(name: str, seq: int, gradient: bool, unit: int, kind: str) -> Cost:
    """Count the kernels of a recurrence: a walk forward; with the gradient, one more for the states, and one back.

    Args:
      name: of `RECURRENCES`.
      seq: tokens of a row.
      gradient: with the backward pass.
      unit: side of the matrix unit.
      kind: the device kind.
    """
    options = dict(RECURRENCES[name])
    heads, delta, decay = options.get("heads", HEADS), options.get("delta", False), options["decay"]
    size = lookup("chunked_recurrence", kind, decay=decay, delta=delta, dtype="bfloat16")["chunk"]
    row = jax.ShapeDtypeStruct((1, size), jnp.float32)
    state = jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)
    out = jax.ShapeDtypeStruct((size, WIDTH), jnp.float32)

    def tokens(dtype: Any) -> Chunk:
        wide = jax.ShapeDtypeStruct((size, WIDTH), dtype)
        by_channels = jax.ShapeDtypeStruct((size, WIDTH), jnp.float32)
        return Chunk(wide, wide, wide, by_channels if decay == "channels" else row, row if delta else None)

    run = partial(step, dtype=jnp.bfloat16)

    def back(state: Any, chunk: Chunk, starts: Any, dstate: Any, dout: Any) -> Any:
        return jax.vjp(lambda s, c: run(s, c, starts), state, chunk)[1]((dstate, dout))

    steps: list[Any] = [jax.make_jaxpr(run)(state, tokens(jnp.bfloat16), row)]
    if gradient:
        steps.append(jax.make_jaxpr(lambda *x: run(*x)[0])(state, tokens(jnp.bfloat16), row))
        steps.append(jax.make_jaxpr(back)(state, tokens(jnp.float32), row, state, out))
    every = [p for s in steps for p in products(dce_jaxpr(s.jaxpr, [True] * len(s.jaxpr.outvars))[0])]
    chunks = heads * math.ceil(seq / size)
    side = lambda n: unit * math.ceil(n / unit)  # noqa: E731
    # bytes of a token: q, k, v and the output in bfloat16; restarts, decays and rates in float32
    read = 3 * WIDTH * 2 + 4 * (2 + delta) + (4 * WIDTH if decay == "channels" else 0)
    token, states = read + 2 * WIDTH, 4 * WIDTH**2
    if gradient:  # again for the states; and back, with the output's cotangent, to cotangents of what was read
        token += read + 2 * read + 2 * WIDTH
    return Cost(
        flops=chunks * sum(2 * m * n * k for m, n, k, _ in every),
        work=chunks * sum(2 * m * side(n) * side(k) * PASSES[dtype] for m, n, k, dtype in every),
        hbm_bytes=chunks * (size * token + 2 * gradient * states),
    )


def of_attention(name: str, seq: int, gradient: bool, unit: int, kind: str) -> Cost:
    """Count the kernels of causal attention, from the tiles on and below the diagonal.

    Args:
      name: of `ATTENTIONS`.
      seq: tokens of a row.
      gradient: with the backward pass, a kernel for queries' cotangents and one for keys' and values'.
      unit: side of the matrix unit.
      kind: the device kind.
    """
    tile = TILE
    if name == "flash attention":
        tile = lookup("flash_attention", kind, kernel="forward", dtype="bfloat16", width=WIDTH)["q"]
    tile = min(tile, seq)
    count = math.ceil(seq / tile)
    pairs = HEADS * count * (count + 1) // 2
    flops = (9 if gradient else 2) * pairs * 2 * tile**2 * WIDTH  # 2 forward; 3 and 4 backward
    one = 2 * tile * WIDTH  # bytes of a tile of queries, keys or values
    # forward: q and out once, k and v of every pair; of queries: q, out's, dq once, k and v of every pair; of keys: k,
    # v, dk, dv once, q and out's cotangent of every pair. Two float32 numbers a query besides.
    moved = HEADS * count * 2 * one + pairs * 2 * one
    if gradient:
        moved += HEADS * count * 7 * one + pairs * (4 * one + 2 * 4 * tile)
    return Cost(flops, flops * (unit * math.ceil(WIDTH / unit) / WIDTH), moved)


@functools.cache
def cost(name: str, seq: int, gradient: bool, topology: str) -> Cost:
    """Count a row's kernels on a TPU; see `of_recurrence` and `of_attention`."""
    of = of_attention if name in ATTENTIONS else of_recurrence
    return of(name, seq, gradient, TOPOLOGIES[topology], kind_of(topology))


def program(name: str, seq: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return a function and the shapes of its arguments; the last shape is also the result's."""
    wide = jax.ShapeDtypeStruct((1, seq, HEADS, WIDTH), jnp.bfloat16)
    if name == "flash attention":
        return lambda q, k, v: flash_attention(q, k, v, causal=True, implementation="mosaic_tpu"), (wide,) * 3
    if name == "splash attention":
        mask = masks.MultiHeadMask([masks.CausalMask((seq, seq))] * HEADS)
        names = ("block_q", "block_kv", "block_kv_compute", "block_q_dkv", "block_kv_dkv", "block_kv_dkv_compute")
        tiles = splash.BlockSizes(**dict.fromkeys((*names, "block_q_dq", "block_kv_dq"), TILE))
        kernel = splash.make_splash_mha(mask, head_shards=1, q_seq_shards=1, block_sizes=tiles)

        def attend(*qkv: jax.Array) -> jax.Array:
            q, k, v = (x.swapaxes(1, 2) for x in qkv)
            return jax.vmap(kernel)(q * WIDTH**-0.5, k, v).swapaxes(1, 2)

        return attend, (wide,) * 3
    options = dict(RECURRENCES[name])
    q, k, v, decay, beta, *_ = shapes(seq, options.pop("heads", HEADS), widths=(WIDTH, WIDTH), **options)

    def recur(q: jax.Array, k: jax.Array, v: jax.Array, decay: jax.Array, *beta: jax.Array) -> jax.Array:
        return chunked_recurrence(q, k, v, decay, *beta, implementation="mosaic_tpu")[0]

    return recur, (q, k, v, decay, *([] if beta is None else [beta]))


def compiled(name: str, seq: int, gradient: bool, topology: str) -> dict[str, Any]:
    """Compile a row and return what the compiler reports."""
    fn, arguments = program(name, seq)

    def both(dout: jax.Array, *arrays: jax.Array) -> Any:
        out, back = jax.vjp(fn, *arrays)
        return out, back(dout)

    made = (
        compile_kernel(both, arguments[2], *arguments, topology=topology)
        if gradient
        else compile_kernel(fn, *arguments, topology=topology)
    )
    kernels = (made.as_text() or "").split('custom_call_target="tpu_custom_call"')[1:]
    facts = made.cost_analysis() or {}
    return {
        "kernels": len(kernels),
        "vmem_bytes": max(vmem(x) for x in kernels),
        "temporary_bytes": made.memory_analysis().temp_size_in_bytes,
        "compiler_flops": facts.get("flops"),
        "compiler_bytes": facts.get("bytes accessed"),
    }


def vmem(call: str) -> int:
    """Return the bytes of VMEM that a kernel uses, from the text of its call; they begin at the scope's offset."""
    call = call[: call.index("\n", call.index('"custom_call_config"'))]
    scope = re.search(r'"scoped_memory_configs":\[\{"memory_space":"1","offset":"(\d+)"', call)
    used = re.search(r'"used_scoped_memory_configs":\[\{"memory_space":"1","offset":"(\d+)","size":"(\d+)"', call)
    assert used is not None
    return int(used[1]) + int(used[2]) - (int(scope[1]) if scope else 0)


def crossing(name: str, against: str, gradient: bool, topology: str, field: str) -> int:
    """Return the shortest length, in tiles of 64, from which on a recurrence costs less than attention.

    Attention's FLOPs are those of the unmasked pairs, which is less than its kernels compute.

    Args:
      name: of `RECURRENCES`.
      against: of `ATTENTIONS`.
      gradient: with the backward pass.
      topology: of `TOPOLOGIES`.
      field: of `Cost`.
    """
    longest = 2**15
    token = getattr(cost(name, longest, gradient, topology), field) / longest
    last = 0
    for seq in range(64, longest + 1, 64):
        theirs = cost(against, seq, gradient, topology)
        spent = getattr(theirs, field)
        if field != "hbm_bytes":
            exact = (9 if gradient else 2) * HEADS * seq * (seq + 1) * WIDTH
            spent *= exact / theirs.flops
        if token * seq >= spent:
            last = seq
    assert last < longest, (name, against, field)
    return last + 64


def main() -> None:
    """Count, compile and print the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS, help="tokens (default %(default)s)")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path(__file__).with_suffix(".json"))
    parser.add_argument("--resume", action="store_true", help="keep the rows that the --out file has")
    args = parser.parse_args()
    versions = {name: importlib.metadata.version(name) for name in ("jax", "libtpu")}
    content = json.loads(args.out.read_text()) if args.resume else {"date": "", **versions, "rows": [], "crossings": []}
    if {name: content[name] for name in versions} != versions:
        raise SystemExit(f"--resume cannot continue {args.out}, which is of other versions than {versions}")
    content["date"] = datetime.date.today().isoformat()
    names = (*RECURRENCES, *ATTENTIONS)
    for seq, topology, name, gradient in itertools.product(args.lengths, TOPOLOGIES, names, (False, True)):
        where = {"tpu": topology, "what": name, "gradient": gradient, "tokens": seq}
        if any(where.items() <= row.items() for row in content["rows"]):
            continue
        counted = dataclasses.asdict(cost(name, seq, gradient, topology))
        content["rows"].append(where | counted | compiled(name, seq, gradient, topology))
        print(content["rows"][-1], flush=True)
        args.out.write_text(json.dumps(content, indent=1) + "\n")
    content["rows"].sort(key=lambda r: (r["tpu"], r["gradient"], names.index(r["what"]), r["tokens"]))
    content["crossings"] = [
        {"tpu": topology, "what": name, "gradient": gradient, "against": against}
        | {f.name: crossing(name, against, gradient, topology, f.name) for f in dataclasses.fields(Cost)}
        for topology in TOPOLOGIES
        for name in RECURRENCES
        for gradient in (False, True)
        for against in ATTENTIONS
    ]
    args.out.write_text(json.dumps(content, indent=1) + "\n")
    show(content)


def show(content: dict[str, Any]) -> None:
    """Print the page's tables."""
    for topology in TOPOLOGIES:
        for gradient in (False, True):
            print(f"\n{topology}, {'forward and backward' if gradient else 'forward'}\n")
            print("| | tokens | GFLOP | matrix-unit TFLOP | kernels' HBM, MiB | VMEM, MiB | temporaries, MiB |")
            print("|---" * 7 + "|")
            for r in content["rows"]:
                if (r["tpu"], r["gradient"]) == (topology, gradient):
                    mib = [f"{r[x] / 2**20:,.1f}" for x in ("hbm_bytes", "vmem_bytes", "temporary_bytes")]
                    flops = [f"{r['flops'] / 1e9:,.1f}", f"{r['work'] / 1e12:,.3f}"]
                    print("| " + " | ".join([r["what"], f"{r['tokens']:,}", *flops, *mib]) + " |")
    print("\n| TPU | recurrence | pass | against | FLOPs | matrix-unit FLOPs | HBM bytes |")
    print("|---" * 7 + "|")
    for c in content["crossings"]:
        passes = "both" if c["gradient"] else "forward"
        numbers = [f"{c[f.name]:,}" for f in dataclasses.fields(Cost)]
        print("| " + " | ".join([c["tpu"], c["what"], passes, c["against"], *numbers]) + " |")


if __name__ == "__main__":
    main()
