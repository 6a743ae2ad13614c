"""Layers of experts with choices that kernels may get wrong, and their truth in float64."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.routed_experts import gated_experts, reference, routed_experts
from tests.pallas_kernels.comparison import Program, draws

EXPERTS, TOP = 6, 2
FEATURES = ("one has 90%", "some without an expert", "router")
PARTS = ("y", "dx", "drouting", "dgate", "dup", "ddown")


def cube(gate: Any, up: Any) -> Any:
    """A hidden layer that NumPy computes in float64."""
    return gate * gate * up


def cube_slope(gate: Any, up: Any) -> tuple[Any, Any]:
    """Its derivatives."""
    return 2 * gate * up, gate * gate


def arrays(feature: str, dtype: str, tokens: int = 24, e: int = 16, f: int = 128, seed: Any = 0) -> tuple[Any, ...]:
    """Return x, ids (`None` with a router), weights or the router, the three matrices, and the output's cotangent."""
    random = np.random.default_rng(seed)
    draw = lambda *shape: jnp.asarray(random.normal(size=shape), jnp.float32)  # noqa: E731
    x, dy = draw(tokens, e).astype(dtype), draw(tokens, e).astype(dtype)
    matrices = [(draw(*s) / s[1] ** 0.5).astype(dtype) for s in ((EXPERTS, e, f), (EXPERTS, e, f), (EXPERTS, f, e))]
    if feature == "router":
        return x, None, draw(e, EXPERTS), *matrices, dy
    ids = np.argsort(random.random((tokens, EXPERTS)), axis=1)[:, :TOP].astype(np.int32)
    if feature == "one has 90%":
        ids = np.where(random.random((tokens, 1)) < 0.9, np.array([[4, 1]], np.int32), ids)
    else:
        ids = np.where(random.random(ids.shape) < 0.4, EXPERTS, ids).astype(np.int32)
    return x, ids, jnp.abs(draw(tokens, TOP)), *matrices, dy


def truth(x: Any, ids: Any, routing: Any, gate: Any, up: Any, down: Any, dy: Any) -> tuple[np.ndarray, ...]:
    """Return the output and all gradients in float64, by hand."""
    x, routing, gate, up, down, dy = (np.asarray(a).astype(np.float64) for a in (x, routing, gate, up, down, dy))
    if ids is None:
        factors = reference.chosen(x, routing, TOP)
    else:
        factors = np.sum((ids[..., None] == np.arange(EXPERTS)) * routing[..., None], axis=1)
    g, u = (np.einsum("ne,xef->nxf", x, w) for w in (gate, up))
    out = np.einsum("nxf,xfe->nxe", cube(g, u), down)
    dfactors = np.einsum("nxe,ne->nx", out, dy)
    dh = np.einsum("nx,ne,xfe->nxf", factors, dy, down)
    dg, du = (dh * slope for slope in cube_slope(g, u))
    dx = np.einsum("nxf,xef->ne", dg, gate) + np.einsum("nxf,xef->ne", du, up)
    if ids is None:  # the softmax of the chosen ones' scores, since weights are divided by their sum
        dscores = factors * (dfactors - np.sum(factors * dfactors, axis=1, keepdims=True))
        drouting, dx = x.T @ dscores, dx + dscores @ routing.T
    else:
        and_none = np.append(dfactors, np.zeros((len(x), 1)), axis=1)
        drouting = np.take_along_axis(and_none, ids, axis=1)
    ddown = np.einsum("nxf,nx,ne->xfe", cube(g, u), factors, dy)
    y = reference.experts(x, factors, gate, up, down, cube)
    return y, dx, drouting, *(np.einsum("ne,nxf->xef", x, d) for d in (dg, du)), ddown


def plain(x: Any, ids: Any, routing: Any, gate: Any, up: Any, down: Any) -> Any:
    """Return the layer by ordinary products: every token by every expert."""
    if ids is None:
        scores = jnp.dot(x.astype(jnp.float32), routing, precision="highest")
        best, ids = jax.lax.top_k(scores, TOP)
        routing = jax.nn.softmax(best, axis=1)
    factors = jnp.sum(jax.nn.one_hot(ids, EXPERTS) * routing[..., None], axis=1)
    dot = functools.partial(jnp.einsum, precision="highest")
    h = cube(dot("ne,xef->nxf", x, gate), dot("ne,xef->nxf", x, up))
    return jnp.einsum("nx,nxe->ne", factors, dot("nxf,xfe->nxe", h, down)).astype(x.dtype)


def program(feature: str, dtype: str, seed: int | None, **shapes: int) -> Program:
    """Return the work of the parity table, or of other shapes."""
    x, ids, *rest, dy = arrays(feature, dtype, seed=draws(6, seed), **shapes)

    def both(f: Callable[..., Any]) -> Callable[..., Any]:
        def run(dy: jax.Array, *floats: jax.Array) -> Any:
            y, pull = jax.vjp(f, *floats)
            return y, *pull(dy)

        return run

    def ours(implementation: str | None) -> Callable[..., Any]:
        options: dict[str, Any] = dict(activation=cube, implementation=implementation)
        if ids is None:
            return both(lambda *a: gated_experts(*a, top_k=TOP, **options))
        return both(lambda x, weights, *m: routed_experts(x, ids, weights, *m, **options))

    return Program(
        ours,
        (dy, x, *rest),
        tuple,
        lambda: tuple(jax.jit(both(lambda x, *a: plain(x, ids, *a)))(dy, x, *rest)),
        lambda: truth(x, ids, *rest, dy),
    )
