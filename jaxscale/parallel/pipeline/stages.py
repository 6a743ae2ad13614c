"""Which layers a pipeline's stages hold, and how stacked parameters get there and back."""

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

from jaxscale.errors import LayoutError
from jaxscale.layout import current
from jaxscale.layout.rules import Kind


@dataclasses.dataclass(frozen=True, eq=False)
class Stages:
    """Where the copies of each run's group lie.

    All stages run one program, so that each has room for as many copies of a run as the one that holds most; what a
    stage lacks is padding, computed and passed over.

    Args:
      index: for each run, int (stages, chunks, n): numbers of its copies; padding repeats one of them.
      real: bool of that shape, what is no padding.
    """

    index: tuple[np.ndarray, ...]
    real: tuple[np.ndarray, ...]

    @property
    def padded(self) -> tuple[int, ...]:
        """Copies of padding, by run, over all stages."""
        return tuple(int((~r).sum()) for r in self.real)

    def spread(
        self, run: int, stack: Float[Array, "l ..."], axes: Sequence[str | None], kind: Kind = "params"
    ) -> Float[Array, "s c n ..."]:
        """A stacked parameter of a run by stage and chunk, each on its stage.

        One that does not lie stage after stage is dealt out where it is, cut along its width, and sent by one
        all-to-all.

        Args:
          run: which.
          stack: the parameter.
          axes: its names, "layers" first.
          kind: which of the layout's maps says where its other dimensions are.
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
        """The reverse, of gradients: padding is dropped."""
        spread = _on_stages(spread, axes, kind)
        if self.in_place(run):
            return spread.reshape(-1, *spread.shape[3:])
        spread = _along_width(spread, axes, kind)
        count = self.real[run].sum(-1)
        stages, chunks = count.shape
        pieces = [spread[s, c, : count[s, c]] for c in range(chunks) for s in range(stages)]
        return _along_width(jnp.concatenate(pieces), axes, kind)

    def in_place(self, run: int) -> bool:
        """Whether a run's stack, stage after stage, is as it is kept."""
        index = self.index[run]
        return bool(self.real[run].all()) and np.array_equal(index.reshape(-1), np.arange(index.size))


@functools.lru_cache(256)
def assign(repeats: tuple[int, ...], weights: tuple[int, ...], stages: int, chunks: int) -> Stages:
    """Deals runs of layers out to virtual stages, in order, with as little padding as can be.

    Args:
      repeats: copies of each run's group.
      weights: what a copy costs, in layers.
      stages, chunks: virtual stage c * stages + s is chunk c of stage s.

    Raises:
      LayoutError: more virtual stages than copies.
    """
    virtual, total = stages * chunks, sum(repeats)
    if virtual > total:
        what = f"{stages} stages" + (f" of {chunks} chunks" if chunks > 1 else "")
        group = "layers" if max(weights) == 1 else "groups of layers"
        # of as many stages as divide these, what else is cut over them divides as well
        fewer = lambda n: max((d for d in range(1, min(n, stages) + 1) if stages % d == 0), default=1)  # noqa: E731
        ways = [f"pipeline={fewer(total // chunks)}"] if fewer(total // chunks) > 1 else []
        if chunks > 1 and (one := fewer(total)) > 1:
            with_ = "" if one == stages else f"pipeline={one} and "
            ways.append(f"{with_}a schedule of 1 chunk a stage, as 'lockstep'")
        ways = ways or ["a mesh without pipeline"]
        raise LayoutError(
            f"a pipeline of {what} has {virtual} pieces, and the model {total} {group} to deal out; use "
            f"{', or '.join(ways)}, or at least {virtual * max(weights)} layers"
        )

    def cost(limits: Sequence[int]) -> float:
        fits = _fill(repeats, limits, virtual) is not None
        return sum(n * w for n, w in zip(limits, weights, strict=True)) if fits else math.inf

    limits = min(itertools.product(*(range(1, r + 1) for r in repeats)), key=cost)
    held = _fill(repeats, limits, virtual)
    assert held is not None
    index, real = [], []
    for run, n in enumerate(limits):
        numbers = [held[v][run] for v in range(virtual)]
        rows = [(list(a) + [a[-1] if len(a) else 0] * n)[:n] for a in numbers]
        there = [[i < len(a) for i in range(n)] for a in numbers]
        lay = lambda rows: np.asarray(rows).reshape(chunks, stages, -1).swapaxes(0, 1)  # noqa: E731
        index.append(lay(rows))
        real.append(lay(there))
    return Stages(tuple(index), tuple(real))


def _fill(repeats: Sequence[int], limits: Sequence[int], virtual: int) -> list[list[range]] | None:
    """Each virtual stage takes what it may, in order, and leaves one copy for each after it; `None` if some remain."""
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
    """Every stage has all copies, of each a piece."""
    layout = current()
    if layout is None:
        return x
    width = x.shape[x.ndim - len(axes) + 1 :]
    rest = layout.spec(axes, (1, *width), kind=kind, name="a stacked parameter")  # one copy is no stage's own
    return jax.lax.with_sharding_constraint(x, PartitionSpec(*[None] * (x.ndim - len(width)), *rest[1:]))
