"""Gated experts of sorted rows, with groups that kernels may get wrong, and their truth in float64."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.grouped_experts import grouped_experts, reference
from tests.pallas_kernels.comparison import Program, draws
from tests.pallas_kernels.routed_experts.cases import cube, cube_slope

FEATURES: dict[str, tuple[tuple[int, ...], bool, bool]] = {
    "empty, and rows after": ((0, 5, 0, 27, 1, 0), True, False),
    "empty, and rows after, biases": ((0, 5, 0, 27, 1, 0), False, True),
    "one has 90%": ((2, 41, 3, 2), False, False),
}
"""A name -> the rows of each group, of 48 rows; whether products are saved; whether there are biases."""
PARTS = ("y", "drows", "dscale", "dgate", "dup", "ddown")


def arrays(
    feature: str, dtype: str, m: int = 48, e: int = 16, f: int = 136, times: int = 1, seed: Any = 0
) -> tuple[Any, ...]:
    """Return the arguments of `grouped_experts` up to `biases`, and dy; rows after the last group are large numbers."""
    random, (sizes, _, biased) = np.random.default_rng(seed), FEATURES[feature]
    sizes = np.asarray(sizes, np.int32) * times - np.asarray(sizes, np.int32) % 7 * (times > 1)

    def draw(*shape: int) -> jax.Array:
        return jnp.asarray(random.normal(size=shape), jnp.float32)

    after, groups = jnp.arange(m)[:, None] >= sizes.sum(), len(sizes)
    rows, dy = (jnp.where(after, 1e4, draw(m, e)).astype(dtype) for _ in range(2))
    matrices = [(draw(groups, *s) / s[0] ** 0.5).astype(dtype) for s in ((e, f), (e, f), (f, e))]
    biases = (draw(groups, f), draw(groups, f)) if biased else None
    return rows, jnp.abs(draw(m)), *matrices, sizes, biases, dy


def truth(*arguments: Any) -> tuple[np.ndarray, ...]:
    """Return the result and all gradients in float64."""
    *some, dy = jax.tree.map(lambda a: np.asarray(a).astype(a.dtype if a.dtype == np.int32 else np.float64), arguments)
    return reference.experts(*some, cube), *reference.gradients(*some, cube, cube_slope, dy)


def plain(rows: Any, scale: Any, gate: Any, up: Any, down: Any, sizes: Any, biases: Any) -> Any:
    """Return the layer by ordinary products: every row by every group's matrices, of which its group's is selected."""
    group = np.repeat(np.arange(len(sizes) + 1), np.append(sizes, len(rows) - sizes.sum()))
    member = (group[:, None] == jnp.arange(len(sizes)))[:, :, None]
    dot = functools.partial(jnp.einsum, precision="highest")
    rows = jnp.where(jnp.any(member, axis=1), rows, 0)  # in float16 those after the last group would overflow
    products = [dot("mk,xkn->mxn", rows, w) for w in (gate, up)]
    if biases is not None:
        products = [(p + b).astype(p.dtype) for p, b in zip(products, biases, strict=True)]
    hidden = (cube(*products) * scale[:, None, None]).astype(rows.dtype)
    return jnp.sum(jnp.where(member, dot("mxf,xfe->mxe", hidden, down), 0), axis=1)


def program(feature: str, dtype: str, seed: int | None, **shapes: int) -> Program:
    """Return the work of the parity table, or of other shapes."""
    *floats, sizes, biases, dy = arrays(feature, dtype, seed=draws(7, seed), **shapes)

    def both(f: Callable[..., Any]) -> Callable[..., Any]:
        def run(dy: Any, *floats: Any) -> Any:
            y, pull = jax.vjp(f, *floats)
            return y, *pull(dy)

        return run

    def ours(implementation: str | None) -> Callable[..., Any]:
        options: dict[str, Any] = dict(activation=cube, saves=FEATURES[feature][1], implementation=implementation)
        return both(lambda *a: grouped_experts(*a, sizes, biases=biases, **options))

    return Program(
        ours,
        (dy, *floats),
        tuple,
        lambda: tuple(jax.jit(both(lambda *a: plain(*a, sizes, biases)))(dy, *floats)),
        lambda: truth(*floats, sizes, biases, dy)[: len(PARTS)],
    )
