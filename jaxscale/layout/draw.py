"""Pictures of how a tensor is sharded."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from jaxscale.errors import LayoutError
from jaxscale.layout.axes import MESH_AXES
from jaxscale.layout.layout import Layout
from jaxscale.layout.rules import Kind

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure


def blocks_of(layout: Layout, axes: Sequence[str | None], shape: Sequence[int], *, kind: Kind = "params") -> np.ndarray:
    """Return which shard of a tensor each device of the mesh holds. Needs no devices.

    Args:
      layout: the layout.
      axes: a logical axis or `None` per dimension.
      shape: the global shape.
      kind: which of the rules' four maps to read.

    Returns:
      int array (devices, dimensions): the shard's index along each dimension.

    Raises:
      LayoutError: see `Layout.spec`.
    """
    spec = layout.spec(axes, shape, kind=kind, name="the drawn tensor")
    sizes = [layout.sizes[a] for a in MESH_AXES]
    place = dict(zip(MESH_AXES, np.indices(sizes).reshape(len(sizes), -1), strict=True))
    out = np.zeros((layout.devices, len(shape)), int)
    for dim, part in enumerate(spec):
        for axis in () if part is None else (part,) if isinstance(part, str) else part:
            out[:, dim] = out[:, dim] * layout.sizes[axis] + place[axis]
    return out


def draw(
    layout: Layout,
    axes: Sequence[str | None],
    shape: Sequence[int],
    *,
    kind: Kind = "params",
    title: str | None = None,
    ax: Axes | None = None,
) -> Figure | SubFigure:
    """Draw a tensor's shards, each labelled with the devices that hold it.

    Of a tensor with more than two dimensions the first two that are sharded are drawn.

    Args:
      layout: the layout.
      axes: a logical axis or `None` per dimension.
      shape: the global shape.
      kind: which of the rules' four maps to read.
      title: the picture's title.
      ax: matplotlib axes to draw into; a new figure by default.

    Returns:
      the matplotlib figure.

    Raises:
      LayoutError: see `Layout.spec`; or matplotlib is not installed.
    """
    try:
        import matplotlib
        from matplotlib.figure import Figure
        from matplotlib.patches import Rectangle
    except ImportError:
        raise LayoutError("drawing needs matplotlib: pip install 'jaxscale[plot]'") from None
    blocks = blocks_of(layout, axes, shape, kind=kind)
    cuts = blocks.max(axis=0) + 1
    rows, *rest = sorted(sorted(range(len(shape)), key=lambda d: (cuts[d] == 1, d))[:2])
    columns = rest[0] if rest else None
    if ax is None:
        figure = Figure(figsize=(4.2, 3.2), dpi=110, layout="constrained")
        ax = figure.add_subplot()
    n_rows, n_columns = int(cuts[rows]), 1 if columns is None else int(cuts[columns])
    colors = matplotlib.colormaps["Pastel1"].colors + matplotlib.colormaps["Pastel2"].colors  # type: ignore[attr-defined]
    for r, c in itertools.product(range(n_rows), range(n_columns)):
        held = [d for d, b in enumerate(blocks) if b[rows] == r and (columns is None or b[columns] == c)]
        color = colors[(r * n_columns + c) % len(colors)]
        ax.add_patch(Rectangle((c / n_columns, r / n_rows), 1 / n_columns, 1 / n_rows, facecolor=color, edgecolor="w"))
        label = ", ".join(map(str, held[:8])) + (" …" if len(held) > 8 else "")
        ax.text((c + 0.5) / n_columns, (r + 0.5) / n_rows, label, ha="center", va="center", fontsize=9)
    ax.set(xlim=(0, 1), ylim=(1, 0), xticks=[], yticks=[])
    ax.set_ylabel(f"{axes[rows]} = {shape[rows]}")
    if columns is not None:
        ax.set_xlabel(f"{axes[columns]} = {shape[columns]}")
    whole = math.prod(cuts) == 1
    ax.set_title(title or ("whole on every device" if whole else f"{math.prod(cuts)} blocks, by device"), fontsize=10)
    return ax.figure
