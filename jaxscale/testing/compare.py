"""The one rule by which two trees of numbers agree."""

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
"""Of the whole gradient's norm: a leaf smaller than this is held to this size instead, since some true gradients are
zero (a key bias's) and what a computer makes of them is rounding."""


@dataclasses.dataclass(frozen=True)
class Difference:
    """How far a leaf is from the truth.

    Args:
      name: its path.
      error: the norm of the difference.
      allowed: how large that may be.
      note: in words, for a person.
    """

    name: str
    error: float
    allowed: float
    note: str

    @property
    def ok(self) -> bool:
        """Whether the leaf agrees; a NaN is no agreement."""
        return self.error <= self.allowed

    @property
    def share(self) -> float:
        """The error over what is allowed; infinite where that is not a number."""
        share = self.error / self.allowed if self.allowed else 0.0 if self.error == 0 else np.inf
        return float(np.nan_to_num(share, nan=np.inf))


@dataclasses.dataclass(frozen=True)
class Agreement(Printable):
    """What a comparison found; prints as a table, here or in a notebook.

    Args:
      what: what was compared.
      rows: by where it was (a layout, say), by what (its gradients): the leaves.
    """

    what: str
    rows: dict[str, dict[str, list[Difference]]]

    @property
    def ok(self) -> bool:
        """Whether all agree."""
        return all(d.ok for row in self.rows.values() for found in row.values() for d in found)

    def check(self) -> None:
        """Raises unless all agree.

        Raises:
          AssertionError: listing, for each row, the leaves of the first comparison that differ.
        """
        said = []
        for where, row in self.rows.items():
            for what, found in row.items():
                if not all(d.ok for d in found):
                    said.append(_sentence(f"{what} on {where}", found))
                    break
        assert not said, "\n".join(said)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.table import Table

        columns = list(dict.fromkeys(what for row in self.rows.values() for what, found in row.items() if found))
        table = Table("", *columns, "", title=f"{self.what}: largest error, as a share of what is allowed", box=None)
        for where, row in self.rows.items():
            worst = {what: max(found, key=lambda d: d.share, default=None) for what, found in row.items()}
            cells = ["" if (d := worst.get(c)) is None else f"{d.share:.2g}" for c in columns]
            bad = [f"{c}: {d.name}" for c in columns if (d := worst.get(c)) is not None and not d.ok]
            table.add_row(where, *cells, f"differs in {bad[0]}" if bad else "agrees")
        yield table


def global_norm(tree: Tree) -> float:
    """Euclidean norm of all leaves together, in float64."""
    return float(np.sqrt(sum(np.sum(np.square(_float64(x))) for x in jax.tree.leaves(tree))))


def differences(
    got: Tree, want: Tree, *, gradient_norm: float | None = None, tolerance: float = TOLERANCE
) -> list[Difference]:
    """How far every leaf a of `got` is from b of `want`.

    Allowed is |a - b| <= tolerance * max(|b|, 1e-3 * the global gradient norm).

    Args:
      got: a tree of arrays, or one array.
      want: the truth, of the same structure.
      gradient_norm: the floor's size; by default the norm of `want`, which is right when `want` is a gradient.
      tolerance: of this comparison; anything but the default needs a reason beside it.

    Raises:
      AssertionError: the trees differ in structure.
    """
    assert _structure(got) == _structure(want), "the trees differ in structure"
    floor = FLOOR * (global_norm(want) if gradient_norm is None else gradient_norm)
    found = []
    pairs = zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True)
    for (path, a), b in pairs:
        name = path_name(path) or "the array"
        a, b = _float64(a), _float64(b)
        if a.shape != b.shape:
            found.append(Difference(name, np.inf, 0.0, f"shape {a.shape}, should be {b.shape}"))
            continue
        error, allowed = float(np.linalg.norm(a - b)), tolerance * max(float(np.linalg.norm(b)), floor)
        note = f"off by {error:.2e}, allowed {allowed:.2e} (norm {np.linalg.norm(b):.2e})"
        found.append(Difference(name, error, allowed, note))
    return found


def assert_leaves_agree(
    got: Tree, want: Tree, *, gradient_norm: float | None = None, what: str = "", tolerance: float = TOLERANCE
) -> None:
    """Every leaf of `got` is as near to `want` as `differences` allows.

    Args:
      got, want, gradient_norm, tolerance: as for `differences`.
      what: what is compared, for the message.

    Raises:
      AssertionError: another structure, shape, a number that is not finite, or a leaf too far off; lists the leaves.
    """
    assert _structure(got) == _structure(want), f"{what}: the trees differ in structure"
    found = differences(got, want, gradient_norm=gradient_norm, tolerance=tolerance)
    assert all(d.ok for d in found), _sentence(what or "the trees", found)


def path_name(path: tuple[Any, ...]) -> str:
    """A leaf's place in a tree as "runs/0/norm"."""
    return "/".join(str(getattr(p, "key", getattr(p, "name", getattr(p, "idx", p)))) for p in path)


def _structure(tree: Tree) -> Any:
    return jax.tree.structure(tree)


def _sentence(what: str, found: list[Difference]) -> str:
    bad = [d for d in found if not d.ok]
    return "\n  ".join([f"{what}: {len(bad)} of {len(found)} leaves differ", *(f"{d.name}: {d.note}" for d in bad)])


def _float64(x: Any) -> np.ndarray:
    return np.asarray(x, np.float64)
