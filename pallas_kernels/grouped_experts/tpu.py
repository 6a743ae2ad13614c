"""Gated experts on TPUs: one kernel for the hidden layer, and one for the gradients of its products.

The grid is that of `grouped_matmul`: tiles of the hidden columns, and for each the steps of the groups. A tile has the
matrices' whole columns, so that nothing is summed over steps and each matrix is read once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.dispatch import Target
from pallas_kernels.grouped_experts import examples
from pallas_kernels.grouped_experts.inputs import Facts, why_not_inside
from pallas_kernels.grouped_matmul.tpu import DTYPES, LANES, PART, VMEM, dot, each_part, inside, part_of, steps_of
from pallas_kernels.tiles import lookup

__all__ = ["configurations", "run", "supported", "tile_of"]

_SUMS = {"hidden": 6, "gradients": 12}
"""Float32 tiles of the hidden layer that are in VMEM beside what is read and written."""
_WIDEST = 1024
"""Most columns of rows in float32, whose products take Mosaic minutes to compile."""


def supported(target: Target, *, facts: Facts) -> str | None:
    """Return why the kernel cannot serve a case, or `None`."""
    if facts.dtype not in DTYPES:
        return f"TPUs compute in {' and '.join(DTYPES)}, and {facts.dtype} is left to XLA"
    if not min(facts.m, facts.k, facts.n, facts.groups):
        return "an operand is empty"
    if facts.dtype == "float32" and facts.k > _WIDEST:
        return f"float32 rows have at most {_WIDEST} columns, not {facts.k}"
    if (why := why_not_inside(facts.activation)) is not None:
        return why
    if tile_of(target, facts) is None:
        return f"rows of {facts.k} columns and two tiles of matrices take over {VMEM} bytes of VMEM"
    return None


def tile_of(target: Target, facts: Facts) -> tuple[int, int] | None:
    """Return the rows and hidden columns of a tile: the table's, or less to fit; `None` if none fits.

    Args:
      target: the device.
      facts: of the kernel.
    """
    want = lookup("grouped_experts", target.kind or "TPU", product=facts.product, dtype=facts.dtype)
    rows, columns = want["rows"], want["n"]
    while True:
        tile = min(rows, facts.m), min(columns, facts.n)
        if _vmem(facts, *tile) <= VMEM:
            return tile
        if columns > 2 * LANES:
            columns //= 2
        elif rows > PART:
            rows //= 2
        elif columns > LANES:
            columns //= 2
        else:
            return None


def _vmem(facts: Facts, rows: int, columns: int) -> int:
    item, hidden = jnp.dtype(facts.dtype).itemsize, facts.product == "hidden"
    made = hidden or not facts.saved  # the products are made here
    wide = (made + (not hidden)) * rows + (2 * made + (not hidden)) * columns  # rows of k columns
    narrow = (1 + 2 * facts.saved) if hidden else 3 + 2 * facts.saved
    lines = rows * LANES * 4 * (1 if hidden else 2)
    return (
        2 * (wide * facts.k * item + narrow * rows * columns * item + lines) + _SUMS[facts.product] * rows * columns * 4
    )


def run(
    target: Target,
    rows: jax.Array,
    gate: jax.Array,
    up: jax.Array,
    sizes: jax.Array,
    scale: jax.Array,
    biases: tuple[jax.Array, jax.Array] | None,
    down: jax.Array | None = None,
    dy: jax.Array | None = None,
    products: tuple[jax.Array, ...] = (),
    *,
    facts: Facts,
) -> tuple[jax.Array, ...]:
    """Return the hidden layer and, if they are saved, its products; or given `dy`, the gradients.

    The gradients are those of the gate's product and the other one, then the hidden layer, which the gradient of `down`
    needs, and the gradient of `scale`; see `dispatch.Implementation`.
    """
    tile = tile_of(target, facts)
    assert tile is not None
    size, columns = tile
    m, k, n, groups, hidden = facts.m, facts.k, facts.n, facts.groups, facts.product == "hidden"
    steps, grid_n = steps_of(sizes, m, size, outer=False), pl.cdiv(n, columns)

    def spec(block: tuple[int | None, ...], index: Callable[..., tuple[Any, ...]]) -> Any:
        def at(n: Any, s: Any, group: Any, tile: Any, read: Any, starts: Any) -> tuple[Any, ...]:
            return index(n, jnp.minimum(group[s], groups - 1), tile[s], read[s])

        return pl.BlockSpec(block, at)

    of_rows = spec((size, k), lambda n, g, tile, read: (read, 0))
    one = spec((size, 1), lambda n, g, tile, read: (read, 0))
    into = spec((None, k, columns), lambda n, g, tile, read: (g, 0, n))
    back = spec((None, columns, k), lambda n, g, tile, read: (g, n, 0))
    bias = spec((None, 1, columns), lambda n, g, tile, read: (g, 0, n))
    saved = spec((size, columns), lambda n, g, tile, read: (read, n))
    made = spec((size, columns), lambda n, g, tile, read: (tile, n))

    operands: dict[str, tuple[Any, Any]] = {"scale": (scale[:, None], one)}
    if products:
        operands |= {"gate product": (products[0], saved), "up product": (products[1], saved)}
    else:
        operands |= {"rows": (rows, of_rows), "gate": (gate, into), "up": (up, into)}
        if biases is not None:
            operands |= {"gate bias": (biases[0][:, None], bias), "up bias": (biases[1][:, None], bias)}
    names: tuple[str, ...] = ("hidden", "gate product", "up product") if facts.saved else ("hidden",)
    if not hidden:
        operands |= {"dy": (dy, of_rows), "down": (down, back)}
        names = ("dgate", "dup", "hidden", "dscale")
    outputs = {name: (jax.ShapeDtypeStruct((m, n), facts.dtype), made) for name in names}
    if not hidden:  # of each tile of columns
        of_tile = spec((None, size, 1), lambda n, g, tile, read: (n, tile, 0))
        outputs["dscale"] = jax.ShapeDtypeStruct((grid_n, m, 1), jnp.float32), of_tile
    # a tile of a product is read once, before its gradient is written in its place
    places = {name: i for names in (operands, outputs) for i, name in enumerate(names)}
    pairs = {} if hidden or not products else {"gate product": "dgate", "up product": "dup"}
    aliases = {4 + places[read]: places[written] for read, written in pairs.items()}
    matrices = len(operands.keys() & {"gate", "up", "down"})
    read = [a.size * a.dtype.itemsize * (grid_n if name in ("rows", "dy") else 1) for name, (a, _) in operands.items()]
    written = [shape.size * shape.dtype.itemsize for shape, _ in outputs.values()]
    *done, last = pl.pallas_call(
        functools.partial(
            _step, facts=facts, rows=size, part=part_of(size), names=(*operands, *(f"{name} out" for name in outputs))
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            grid=(grid_n, steps.steps),
            in_specs=[spec for _, spec in operands.values()],
            out_specs=[spec for _, spec in outputs.values()],
        ),
        out_shape=[shape for shape, _ in outputs.values()],
        input_output_aliases=aliases,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=VMEM + 8 * 2**20
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * matrices * (m + PART * min(groups - 1, m)) * k * n,
            transcendentals=m * n,
            bytes_accessed=sum(read) + sum(written),
        ),
        interpret=target.tpu(),
        name=f"grouped_experts_{facts.product}",
    )(*steps[:4], *(a for a, _ in operands.values()))
    return (*done, last if hidden else jnp.sum(last, axis=(0, 2)))


def _step(
    group: Any,
    tile: Any,
    read: Any,
    starts: Any,
    *refs: Any,
    facts: Facts,
    rows: int,
    part: int,
    names: tuple[str, ...],
) -> None:
    """One group's share of a tile of rows, for a tile of hidden columns."""
    ref = dict(zip(names, refs, strict=True))
    outs = {name: r for name, r in ref.items() if name.endswith(" out")}
    s = pl.program_id(1)
    g, first = group[s], tile[s] * rows
    low, high = starts[g], starts[g + 1]
    whole, after = (low <= first) & (high >= first + rows), g == facts.groups
    columns = outs["hidden out"].shape[1]

    def product(name: str, here: Any) -> jax.Array:
        if "rows" not in ref:
            return ref[f"{name} product"][here, :].astype(jnp.float32)
        y = dot(ref["rows"][here, :], ref[name][...], (1, 0))
        return y + ref[f"{name} bias"][...] if facts.biased else y

    def values(here: Any) -> dict[str, jax.Array]:
        """Return the outputs of some rows, float32."""
        products, scale = [product(name, here) for name in ("gate", "up")], ref["scale"][here, :]
        if facts.product == "hidden":
            named = zip(("gate product", "up product"), products, strict=True)
            return {"hidden": facts.activation(*products) * scale, **dict(named)}
        dh = dot(ref["dy"][here, :], ref["down"][...], (1, 1))
        hidden, pull = jax.vjp(facts.activation, *products)
        dgate, dup = pull(dh * scale)
        terms = dh * hidden
        if facts.n % columns:  # whatever is after the last column
            column = pl.program_id(0) * columns + lax.broadcasted_iota(jnp.int32, terms.shape, 1)
            terms = jnp.where(column < facts.n, terms, 0.0)
        dscale = jnp.sum(terms, axis=1, keepdims=True)
        return {"dgate": dgate, "dup": dup, "hidden": hidden * scale, "dscale": dscale}

    def store(at: Any, size: int, begin: Any, masked: bool) -> None:
        here = pl.ds(at, size)
        own = inside(first + at, jnp.maximum(low, begin), high, (size, 1))
        done = values(here)
        for name, out in outs.items():
            value = done[name.removesuffix(" out")]
            if masked:
                value = jnp.where(own, value, out[here, :].astype(jnp.float32))
            out[here, :] = value.astype(out.dtype)

    @pl.when(whole & ~after)
    def _() -> None:
        store(0, rows, first, False)

    @pl.when(~whole & ~after)
    def _() -> None:
        each_part(rows, part, first, low, high, lambda at, begin: store(at, part, begin, True))

    @pl.when(after)
    def _() -> None:
        own = inside(first, low, high, (rows, 1))
        for out in outs.values():
            out[...] = jnp.where(own, 0.0, out[...].astype(jnp.float32)).astype(out.dtype)


def configurations(op: Any) -> Iterator[tuple[str, Callable[..., Any], tuple[Any, ...]]]:
    """Yield (name, function, shapes) of what ships, for the gate."""
    yield from examples.cases(run)
