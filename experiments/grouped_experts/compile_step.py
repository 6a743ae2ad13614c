"""Compile a layer of experts and its gradients for TPUs that are not here, with the grouped kernel and without.

    python experiments/grouped_experts/compile_step.py --topology v5p --topology v6e

Prints a table: bytes that the three products of a layer, and a training step of it, hold besides arguments and results,
the largest array among them, and floating-point operations by the compiler's count and by that of tiles.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import math
import re
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

import pallas_kernels.grouped_experts as fused
import pallas_kernels.grouped_matmul as op
from jaxscale.parallel import experts
from jaxscale.parallel.arithmetic import Arithmetic
from pallas_kernels.aot import compile_kernel
from pallas_kernels.grouped_matmul import grouped_matmul, grouped_outer
from pallas_kernels.grouped_matmul.tpu import multiplied_rows

TOKENS, WIDTH, HIDDEN, EXPERTS, CHOICES = 4096, 2048, 7168, 8, 2
"""Half of Mixtral-8x7B's widths, and its experts."""
ROWS = TOKENS * CHOICES
DTYPE_BYTES = {"bf16": 2, "f32": 4, "s32": 4, "u32": 4, "pred": 1, "s8": 1, "u8": 1}


@contextlib.contextmanager
def only(name: str) -> Iterator[None]:
    """Let products have one kernel besides XLA's implementation, or none; "fused" has kernels of whole layers, too."""
    kernels = {op: "mosaic_tpu" if name == "fused" else name, fused: "mosaic_tpu" if name == "fused" else "xla"}
    with contextlib.ExitStack() as stack:
        for module, kernel in kernels.items():
            remaining = tuple(i for i in module.IMPLEMENTATIONS if i.name in (kernel, "xla"))
            stack.enter_context(mock.patch.object(module, "IMPLEMENTATIONS", remaining))
        yield


def three_products(rows: Any, matrices: Any, sizes: Any, dy: Any) -> Any:
    """Return the product of a layer and its two gradients."""
    y = grouped_matmul(rows, matrices, sizes)
    return y, grouped_matmul(dy, matrices, sizes, transposed=True), grouped_outer(rows, dy, sizes)


def layer(x: Any, ids: Any, scale: Any, weights: Any, saves: bool = True) -> Any:
    """Return a layer's output, as a prompt's or in training."""
    arithmetic, routed = Arithmetic.cast(jnp.bfloat16), experts.Choices(ids, scale)
    return experts.expert_mlp(x, routed, experts.Weights(*weights), act=jax.nn.silu, arithmetic=arithmetic, saves=saves)


def step(x: Any, ids: Any, scale: Any, weights: Any, target: Any, *, recomputed: bool = False) -> Any:
    """Return a layer's weights after a step of gradient descent, and the gradient by its input."""

    def loss(x: Any, scale: Any, weights: Any) -> Any:
        run = functools.partial(layer, saves=not recomputed)
        y = (jax.checkpoint(run) if recomputed else run)(x, ids, scale, weights)
        return jnp.sum(jnp.square(y.astype(jnp.float32) - target))

    dx, dscale, gradients = jax.grad(loss, (0, 1, 2))(x, scale, weights)
    return dx, dscale, jax.tree.map(lambda w, g: w - 1e-3 * g, weights, gradients)


def programs() -> dict[str, tuple[Callable[..., Any], tuple[Any, ...]]]:
    """Return functions and the shapes of their arguments."""
    like = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
    up, down = (EXPERTS, WIDTH, HIDDEN), (EXPERTS, HIDDEN, WIDTH)
    products = like((ROWS, WIDTH)), like(up), jax.ShapeDtypeStruct((EXPERTS,), jnp.int32), like((ROWS, HIDDEN))
    wide = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    arguments = (
        like((1, TOKENS, WIDTH)),
        jax.ShapeDtypeStruct((1, TOKENS, CHOICES), jnp.int32),
        wide((1, TOKENS, CHOICES)),
        (wide(up), wide(up), wide(down)),
        wide((1, TOKENS, WIDTH)),
    )
    return {
        "three products": (three_products, products),
        "step": (step, arguments),
        "step, recomputed": (functools.partial(step, recomputed=True), arguments),
        "forward": (layer, (*arguments[:3], tuple(like(w.shape) for w in arguments[3]))),
    }


def largest(text: str, known: set[tuple[str, tuple[int, ...]]]) -> tuple[int, str]:
    """Return the bytes and the shape of the largest array of a compiled program that is no argument or result.

    Arrays inside of fusions are not in memory and do not count.
    """
    best = (0, "")
    for dtype, dims in re.findall(r"= (\w+)\[([\d,]+)\]", text[text.index("\nENTRY ") :]):
        shape = tuple(map(int, dims.split(",")))
        if dtype in DTYPE_BYTES and (dtype, shape) not in known:
            best = max(best, (math.prod(shape) * DTYPE_BYTES[dtype], f"{dtype}[{dims}]"))
    return best


def measure(topology: str, program: str, implementation: str) -> dict[str, Any]:
    """Compile a program and return a row of the table."""
    fn, shapes = programs()[program]
    with only(implementation):
        made = compile_kernel(lambda *a: fn(*a), *shapes, topology=topology)
    text, memory, costs = made.as_text() or "", made.memory_analysis(), made.cost_analysis() or {}
    assert memory is not None
    names = {"bfloat16": "bf16", "float32": "f32", "int32": "s32"}
    outside = jax.tree.leaves((shapes, jax.eval_shape(fn, *shapes)))
    size, what = largest(text, {(names[str(a.dtype)], tuple(a.shape)) for a in outside})
    held = memory.argument_size_in_bytes + memory.output_size_in_bytes
    return {
        "topology": topology,
        "program": program,
        "implementation": implementation,
        "kernels": text.count('custom_call_target="tpu_custom_call"'),
        "arguments_and_results": held,
        "temporaries": memory.temp_size_in_bytes,
        "ratio": (held + memory.temp_size_in_bytes) / held,
        "largest": size,
        "largest_array": what,
        "flops": costs.get("flops"),
        "bytes": costs.get("bytes accessed"),
    }


def main() -> None:
    """Compile every program and print the rows as JSON lines, then the rounding by tiles."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--topology", action="append", default=[])
    parser.add_argument("--program", choices=list(programs()), action="append", default=[])
    parser.add_argument("--implementation", choices=("xla", "mosaic_tpu", "fused"), action="append", default=[])
    args = parser.parse_args()
    for topology in args.topology or ("v5p", "v6e"):
        for program in args.program or programs():
            for implementation in args.implementation or ("xla", "mosaic_tpu", "fused"):
                print(json.dumps(measure(topology, program, implementation)), flush=True)
    random = np.random.default_rng(0)
    for name, shares in {"even": np.ones(EXPERTS) / EXPERTS, "drawn": random.dirichlet(np.ones(EXPERTS))}.items():
        sizes = random.multinomial(ROWS, shares)
        rows = multiplied_rows(sizes, ROWS, 512)
        print(json.dumps({"sizes": name, "rows": ROWS, "multiplied": rows, "ratio": rows / ROWS}))


if __name__ == "__main__":
    main()
