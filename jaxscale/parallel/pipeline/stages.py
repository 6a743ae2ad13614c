"""Assign layers to pipeline stages, and move stacked parameters to the stages and their gradients back."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

from jaxscale.errors import LayoutError, count
from jaxscale.layout import current
from jaxscale.layout.rules import Kind
from jaxscale.layout.table import Placement, stage_of


@dataclasses.dataclass(frozen=True, eq=False)
class Stages:
    """The stage of each repeat of each run's group of layers.

    All stages run one program, so each has as many repeats of a run as the stage with the most; the others are padding,
    which is computed and discarded.

    Args:
      index: for each run, int (stages, chunks, n), the number of each repeat; padding repeats one of them.
      real: for each run, bool of that shape: not padding.
      placement: the order of virtual stages on stages.
    """

    index: tuple[np.ndarray, ...]
    real: tuple[np.ndarray, ...]
    placement: Placement = "ring"

    @property
    def padded(self) -> tuple[int, ...]:
        """The number of padding repeats of each run, over all stages."""
        return tuple(int((~r).sum()) for r in self.real)

    def spread(
        self, run: int, stack: Float[Array, "l ..."], axes: Sequence[str | None], kind: Kind = "params"
    ) -> Float[Array, "s c n ..."]:
        """Return a stacked parameter of a run by stage and chunk, each on its stage.

        If layers are not stored on their stage, the stack is reordered while it is sharded along its width, and then
        sent by one all-to-all.

        Args:
          run: the number of the run.
          stack: the parameter.
          axes: its logical axes, "layers" first.
          kind: which of the rules' four maps to read for its other dimensions.
        """
        index, real = self.index[run], self.real[run]
        if self.in_place(run):
            return _on_stages(stack.reshape(*index.shape, *stack.shape[1:]), axes, kind)
        stack = _along_width(stack, axes, kind)
        pieces = []
        for numbers, n in zip(index.reshape(-1, index.shape[-1]), real.sum(-1).reshape(-1), strict=True):
            held = stack[numbers[0] : numbers[0] + max(n, 1)]
            pieces.append(jnp.concatenate([held, *[held[-1:]] * (len(numbers) - len(held))]))
        whole = jnp.stack(pieces).reshape(*index.shape, *stack.shape[1:])
        return _on_stages(_along_width(whole, axes, kind), axes, kind)

    def collect(
        self, run: int, spread: Float[Array, "s c n ..."], axes: Sequence[str | None], kind: Kind = "grads"
    ) -> Float[Array, "l ..."]:
        """Undo `spread`, for gradients; padding is dropped."""
        spread = _on_stages(spread, axes, kind)
        if self.in_place(run):
            return spread.reshape(-1, *spread.shape[3:])
        spread = _along_width(spread, axes, kind)
        count = self.real[run].sum(-1)
        stages, chunks = count.shape
        order = [stage_of(v, stages, self.placement) for v in range(stages * chunks)]
        pieces = [spread[s, c, : count[s, c]] for s, c in order]
        return _along_width(jnp.concatenate(pieces), axes, kind)

    def in_place(self, run: int) -> bool:
        """Return whether a run's layers are stored on their stages already."""
        index = self.index[run]
        return bool(self.real[run].all()) and np.array_equal(index.reshape(-1), np.arange(index.size))


@functools.lru_cache(256)
def assign(
    repeats: tuple[int, ...], weights: tuple[int, ...], stages: int, chunks: int, placement: Placement = "ring"
) -> Stages:
    """Assign runs of layers to virtual stages, in order, with the least padding.

    Args:
      repeats: repeats of each run's group of layers.
      weights: the cost of a repeat of each run, in layers.
      stages: the number of stages.
      chunks: virtual stages per stage.
      placement: the order of virtual stages on stages.

    Raises:
      LayoutError: more virtual stages than repeats.
    """
    virtual, total = stages * chunks, sum(repeats)
    if virtual > total:
        what = f"{stages} stages" + (f" of {chunks} chunks" if chunks > 1 else "")
        group = ("layer", "layers") if max(weights) == 1 else ("group of layers", "groups of layers")

        def fewer(n: int) -> int:  # divides `stages`, so that other dimensions over `pipeline` still divide
            return max((d for d in range(1, min(n, stages) + 1) if stages % d == 0), default=1)

        ways = [f"pipeline={fewer(total // chunks)}"] if fewer(total // chunks) > 1 else []
        if chunks > 1 and (axis := fewer(total)) > 1:
            with_ = "" if axis == stages else f"pipeline={axis} and "
            ways.append(f"{with_}a schedule of 1 chunk a stage, such as 'lockstep'")
        ways = ways or ["a mesh without pipeline"]
        raise LayoutError(
            f"a pipeline of {what} has {virtual} virtual stages, and the model has only {count(total, *group)}; use "
            f"{', or '.join(ways)}, or at least {virtual * max(weights)} layers"
        )

    def cost(limits: Sequence[int]) -> float:
        fits = _fill(repeats, limits, virtual) is not None
        return sum(n * w for n, w in zip(limits, weights, strict=True)) if fits else math.inf

    limits = min(itertools.product(*(range(1, r + 1) for r in repeats)), key=cost)
    held = _fill(repeats, limits, virtual)
    assert held is not None
    index: list[np.ndarray] = []
    real: list[np.ndarray] = []
    for run, n in enumerate(limits):
        numbers = [held[v][run] for v in range(virtual)]
        rows = [(list(a) + [a[-1] if len(a) else 0] * n)[:n] for a in numbers]
        not_padding = [[i < len(a) for i in range(n)] for a in numbers]
        for out, table in ((index, rows), (real, not_padding)):
            placed = np.asarray(table).reshape(chunks, stages, -1)
            placed[1::2] = placed[1::2, ::-1] if placement == "v" else placed[1::2]
            out.append(placed.swapaxes(0, 1))
    return Stages(tuple(index), tuple(real), placement)


def _fill(repeats: Sequence[int], limits: Sequence[int], virtual: int) -> list[list[range]] | None:
    """Fill virtual stages in order, leaving one repeat for each later stage; `None` if some repeats remain."""
    run, at, left = 0, 0, sum(repeats)
    out = []
    for v in range(virtual):
        held = [range(0)] * len(repeats)
        while run < len(repeats):
            take = min(limits[run], repeats[run] - at, left - (virtual - 1 - v))
            held[run] = range(at, at + take)
            at, left = at + take, left - take
            if at < repeats[run]:
                break
            run, at = run + 1, 0
        out.append(held)
    return None if left else out


def _on_stages(x: Float[Array, "s c n ..."], axes: Sequence[str | None], kind: Kind) -> Array:
    layout = current()
    if layout is None:
        return x
    rest = layout.spec((None, None, None, *axes[1:]), x.shape, kind=kind, name="a stage's parameter")
    return jax.lax.with_sharding_constraint(x, PartitionSpec("pipeline", *rest[1:]))


def _along_width(x: Float[Array, "... "], axes: Sequence[str | None], kind: Kind) -> Array:
    """Shard a stack along its width, so that every stage has a part of each layer."""
    layout = current()
    if layout is None:
        return x
    width = x.shape[x.ndim - len(axes) + 1 :]
    rest = layout.spec(
        axes, (1, *width), kind=kind, name="a stacked parameter"
    )  # of size 1, so that "layers" is not sharded
    return jax.lax.with_sharding_constraint(x, PartitionSpec(*[None] * (x.ndim - len(width)), *rest[1:]))
