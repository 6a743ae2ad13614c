"""Compile products in 8 bits for chips that are not here, and check that they are multiplied as such.

Each program is the gradient of a scan over three feed-forward layers. What the chip multiplies is read from the
optimised program: the types of the operands of every product of matrices.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import functools
import itertools
import re
import time
from collections import Counter
from pathlib import Path

import jax
import jax.numpy as jnp

from jaxscale.layout import Layout, constrain
from jaxscale.nn import Fp8, Int8, project
from jaxscale.parallel import Arithmetic
from jaxscale.plan import compile_for

LAYOUTS = ("fsdp=4", "tensor=4", "fsdp=2,tensor=2")
SHAPES = {"512 x 1024": (8, 256, 512, 1024), "1024 x 2048": (8, 128, 1024, 2048)}
INT8 = (Int8(), Int8(kernel_gradient=True))
GRID = {"v5e:2x2": INT8, "v6e:2x2": INT8, "v5p:2x2x1": INT8[1:], "tpu7x:2x2x1": (Fp8(),), "h200:4": (Fp8(),)}
NARROW = ("s8", "f8e4m3fn", "f8e5m2")


def loss(x, up, down, arithmetic):
    """Apply stacked feed-forward layers by a scan."""

    def layer(x, kernels):
        h = project(x, kernels[0], ("embed", "mlp"), (0,), arithmetic)
        return x + project(jnp.sin(h), kernels[1], ("mlp", "embed"), (0,), arithmetic), None

    x = constrain(x, "batch", "seq", "embed")
    return jnp.sum(jax.lax.scan(layer, x, (up, down))[0].astype(jnp.float32) ** 2)


def products(text: str) -> Counter[str]:
    """Count the products of matrices of an optimised program by the types of their operands."""
    types = dict(re.findall(r"(%[\w.-]+) = \(?([a-z0-9]+)\[", text))
    pairs = re.findall(r" (?:convolution|dot)\((%[\w.-]+), (%[\w.-]+)\)", text)
    pairs += re.findall(r" custom-call\((%[\w.-]+), (%[\w.-]+)[^)]*\), custom_call_target=\"__cublas[^\"]*\"", text)
    return Counter(f"{types.get(a)} {types.get(b)}" for a, b in pairs)


def compiled(topology: str, layout: str, shape: tuple[int, ...], arithmetic: Arithmetic) -> Counter[str]:
    """Return the products of the compiled program."""
    b, s, e, f = shape
    shapes = [jax.ShapeDtypeStruct((b, s, e), jnp.bfloat16)]
    shapes += [jax.ShapeDtypeStruct(d, jnp.float32) for d in ((3, e, f), (3, f, e))]
    gradients = jax.grad(functools.partial(loss, arithmetic=arithmetic), argnums=(0, 1, 2))
    return products(compile_for(gradients, topology, *shapes, layout=Layout(layout)).as_text())


def main() -> None:
    """Compile the grid, write its table, and fail if a product that the recipe names is not in 8 bits."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("topology", nargs="*", default=list(GRID), help="chips; GPUs need the extra gpu-aot")
    options = parser.parse_args()
    path = Path(__file__).parent / "results" / "native.csv"
    columns = ("chip", "products", "layout", "matrices", "in 8 bits", "expected", "types of operands")
    with path.open() if path.exists() else contextlib.nullcontext([]) as f:
        rows = [row for row in csv.reader(f) if row[0] not in ("chip", *options.topology)]
    for topology, layout, shape in itertools.product(options.topology, LAYOUTS, SHAPES):
        for recipe in GRID[topology]:
            start = time.perf_counter()
            pairs = compiled(topology, layout, SHAPES[shape], recipe.arithmetic("bfloat16"))
            narrow = sum(n for pair, n in pairs.items() if all(t in NARROW for t in pair.split()))
            expected = 2 * (recipe.forward + recipe.input_gradient + recipe.kernel_gradient)
            name = f"{type(recipe).__name__}, {'three products' if recipe.kernel_gradient else 'two products'}"
            types = " + ".join(f"{n} {pair}" for pair, n in sorted(pairs.items()))
            rows.append([topology, name, layout, shape, str(narrow), str(expected), types])
            print(*rows[-1], f"{time.perf_counter() - start:.1f} s", sep=" | ", flush=True)
    with path.open("w", newline="") as f:
        csv.writer(f, lineterminator="\n").writerows([columns, *sorted(rows)])
    wrong = [row for row in rows if int(row[4]) < int(row[5])]
    assert not wrong, wrong


if __name__ == "__main__":
    main()
