"""The one rule by which two trees of numbers agree."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

Tree = Any

TOLERANCE = 1e-5
"""Allowed error of a leaf, relative to its norm."""

FLOOR = 1e-3
"""Of the whole gradient's norm: a leaf smaller than this is held to this size instead, since some true gradients are
zero (a key bias's) and what a computer makes of them is rounding."""


def global_norm(tree: Tree) -> float:
    """Euclidean norm of all leaves together, in float64."""
    return float(np.sqrt(sum(np.sum(np.square(_float64(x))) for x in jax.tree.leaves(tree))))


def assert_leaves_agree(
    got: Tree, want: Tree, *, gradient_norm: float | None = None, what: str = "", tolerance: float = TOLERANCE
) -> None:
    """Every leaf a of `got` and b of `want`: |a - b| <= tolerance * max(|b|, 1e-3 * the global gradient norm).

    Args:
      got: a tree of arrays, or one array.
      want: the truth, of the same structure.
      gradient_norm: the floor's size; by default the norm of `want`, which is right when `want` is a gradient.
      what: what is compared, for the message.
      tolerance: of this comparison; anything but the default needs a reason beside it.

    Raises:
      AssertionError: another structure, shape, a number that is not finite, or a leaf too far off; lists the leaves.
    """
    assert jax.tree.structure(got) == jax.tree.structure(want), f"{what}: the trees differ in structure"
    floor = FLOOR * (global_norm(want) if gradient_norm is None else gradient_norm)
    bad = []
    pairs = zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True)
    for (path, a), b in pairs:
        name = path_name(path) or "the array"
        a, b = _float64(a), _float64(b)
        if a.shape != b.shape:
            bad.append(f"{name}: shape {a.shape}, should be {b.shape}")
            continue
        error, allowed = float(np.linalg.norm(a - b)), tolerance * max(float(np.linalg.norm(b)), floor)
        if not error <= allowed:  # a NaN is no agreement
            bad.append(f"{name}: off by {error:.2e}, allowed {allowed:.2e} (norm {np.linalg.norm(b):.2e})")
    count = f"{len(bad)} of {len(jax.tree.leaves(want))} leaves differ"
    assert not bad, "\n  ".join([f"{what or 'the trees'}: {count}", *bad])


def path_name(path: tuple[Any, ...]) -> str:
    """A leaf's place in a tree as "runs/0/norm"."""
    return "/".join(str(getattr(p, "key", getattr(p, "name", getattr(p, "idx", p)))) for p in path)


def _float64(x: Any) -> np.ndarray:
    return np.asarray(x, np.float64)
