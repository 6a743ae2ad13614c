"""The rule by which two trees of arrays agree."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from jaxscale.plan.printing import Printable

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

Tree = Any

TOLERANCE = 1e-5
"""Allowed error of a leaf, relative to its norm."""

FLOOR = 1e-3
"""Minimum size of a leaf for its tolerance, relative to the norm of all gradients: some true gradients are zero (a key
bias's), and computed ones are then rounding errors."""


@dataclasses.dataclass(frozen=True)
class Difference:
    """The error of one leaf.

    Args:
      name: the leaf's path.
      error: the norm of the difference.
      allowed: the largest allowed error.
      note: shape or error and tolerance in words.
    """

    name: str
    error: float
    allowed: float
    note: str

    @property
    def ok(self) -> bool:
        """Whether the leaf agrees; NaN does not."""
        return self.error <= self.allowed

    @property
    def share(self) -> float:
        """The error divided by the allowed error; infinity for NaN."""
        share = self.error / self.allowed if self.allowed else 0.0 if self.error == 0 else np.inf
        return float(np.nan_to_num(share, nan=np.inf))


@dataclasses.dataclass(frozen=True)
class Agreement(Printable):
    """The result of a comparison; prints as a table, also in a notebook.

    Args:
      what: what was compared.
      rows: the leaves' errors, by case (such as a layout) and by quantity (such as "gradients").
    """

    what: str
    rows: dict[str, dict[str, list[Difference]]]

    @property
    def ok(self) -> bool:
        """Whether all leaves agree."""
        return all(d.ok for row in self.rows.values() for leaves in row.values() for d in leaves)

    def check(self) -> None:
        """Raise unless all leaves agree.

        Raises:
          AssertionError: lists, for each case, the differing leaves of the first quantity that differs.
        """
        messages = []
        for where, row in self.rows.items():
            for what, leaves in row.items():
                if not all(d.ok for d in leaves):
                    messages.append(_sentence(f"{what} on {where}", leaves))
                    break
        assert not messages, "\n".join(messages)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.table import Table

        columns = list(dict.fromkeys(what for row in self.rows.values() for what, leaves in row.items() if leaves))
        table = Table("", *columns, "", title=f"{self.what}: largest error, as a share of what is allowed", box=None)
        for where, row in self.rows.items():
            worst = {what: max(leaves, key=lambda d: d.share, default=None) for what, leaves in row.items()}
            cells = ["" if (d := worst.get(c)) is None else f"{d.share:.2g}" for c in columns]
            bad = [f"{c}: {d.name}" for c in columns if (d := worst.get(c)) is not None and not d.ok]
            table.add_row(where, *cells, f"differs in {bad[0]}" if bad else "agrees")
        yield table


def global_norm(tree: Tree) -> float:
    """Return the Euclidean norm of all leaves together, in float64."""
    return float(np.sqrt(sum(np.sum(np.square(_float64(x))) for x in jax.tree.leaves(tree))))


def differences(
    got: Tree, want: Tree, *, gradient_norm: float | None = None, tolerance: float = TOLERANCE
) -> list[Difference]:
    """Compare every leaf a of `got` with b of `want`.

    A leaf agrees if |a - b| <= tolerance * max(|b|, 1e-3 * the global gradient norm), with Euclidean norms.

    Args:
      got: a tree of arrays, or one array.
      want: the expected values, of the same structure.
      gradient_norm: the global gradient norm; by default the norm of `want`, which is right if `want` is a gradient.
      tolerance: relative tolerance; anything but the default needs a reason beside it.

    Returns:
      the error of each leaf.

    Raises:
      AssertionError: the trees differ in structure.
    """
    assert _structure(got) == _structure(want), "the trees differ in structure"
    floor = FLOOR * (global_norm(want) if gradient_norm is None else gradient_norm)
    leaves = []
    pairs = zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True)
    for (path, a), b in pairs:
        name = path_name(path) or "the array"
        a, b = _float64(a), _float64(b)
        if a.shape != b.shape:
            leaves.append(Difference(name, np.inf, 0.0, f"shape {a.shape}, should be {b.shape}"))
            continue
        error, allowed = float(np.linalg.norm(a - b)), tolerance * max(float(np.linalg.norm(b)), floor)
        note = f"off by {error:.2e}, allowed {allowed:.2e} (norm {np.linalg.norm(b):.2e})"
        leaves.append(Difference(name, error, allowed, note))
    return leaves


def assert_leaves_agree(
    got: Tree, want: Tree, *, gradient_norm: float | None = None, what: str = "", tolerance: float = TOLERANCE
) -> None:
    """Check that every leaf of `got` agrees with that of `want`; see `differences`.

    Args:
      got: a tree of arrays, or one array.
      want: the expected values, of the same structure.
      gradient_norm: as for `differences`.
      what: what is compared, for the message.
      tolerance: as for `differences`.

    Raises:
      AssertionError: the structure or a shape differs, a number is not finite, or an error is too large; lists the
        leaves.
    """
    assert _structure(got) == _structure(want), f"{what}: the trees differ in structure"
    leaves = differences(got, want, gradient_norm=gradient_norm, tolerance=tolerance)
    assert all(d.ok for d in leaves), _sentence(what or "the trees", leaves)


def path_name(path: tuple[Any, ...]) -> str:
    """Return a leaf's path in a tree as text, such as "runs/0/norm"."""
    return "/".join(str(getattr(p, "key", getattr(p, "name", getattr(p, "idx", p)))) for p in path)


def _structure(tree: Tree) -> Any:
    return jax.tree.structure(tree)


def _sentence(what: str, leaves: list[Difference]) -> str:
    bad = [d for d in leaves if not d.ok]
    return "\n  ".join([f"{what}: {len(bad)} of {len(leaves)} leaves differ", *(f"{d.name}: {d.note}" for d in bad)])


def _float64(x: Any) -> np.ndarray:
    return np.asarray(x, np.float64)
