"""Assign layers to pipeline stages, and move stacked parameters to the stages and their gradients back."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

from jaxscale.errors import LayoutError, count
from jaxscale.layout import current
from jaxscale.layout.rules import Kind
from jaxscale.layout.table import Placement, stage_of

Tree = Any


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
        self,
        run: int,
        stack: Float[Array, "l ..."],
        axes: Sequence[str | None],
        kind: Kind = "params",
        *,
        by_stage: bool = False,
    ) -> Float[Array, "s c n ..."]:
        """Return a stacked parameter of a run by stage and chunk, each on its stage.

        If layers are not stored on their stage, stages exchange chunks (see `to_stages`); or if chunks are not equal,
        the stack is reordered while it is sharded along its width, and then sent by one all-to-all.

        Args:
          run: the number of the run.
          stack: the parameter.
          axes: its logical axes, "layers" first.
          kind: which of the rules' four maps to read for its other dimensions.
          by_stage: the stack is that of `to_stages`, or if chunks are not equal of `with_padding`.
        """
        index, real = self.index[run], self.real[run]
        if self.equal(run) or by_stage:
            stack = stack if by_stage else self.to_stages(run, stack)
            return _on_stages(stack.reshape(*index.shape, *stack.shape[1:]), axes, kind)
        stack = _along_width(stack, axes, kind)
        pieces = []
        for numbers, n in zip(index.reshape(-1, index.shape[-1]), real.sum(-1).reshape(-1), strict=True):
            held = stack[numbers[0] : numbers[0] + max(n, 1)]
            pieces.append(jnp.concatenate([held, *[held[-1:]] * (len(numbers) - len(held))]))
        whole = jnp.stack(pieces).reshape(*index.shape, *stack.shape[1:])
        return _on_stages(_along_width(whole, axes, kind), axes, kind)

    def collect(
        self,
        run: int,
        spread: Float[Array, "s c n ..."],
        axes: Sequence[str | None],
        kind: Kind = "grads",
        *,
        by_stage: bool = False,
    ) -> Float[Array, "l ..."]:
        """Undo `spread`, for gradients; padding is dropped, or with `by_stage` has zeros."""
        spread = _on_stages(spread, axes, kind)
        if self.equal(run) or by_stage:
            stack = spread.reshape(-1, *spread.shape[3:])
            return stack if by_stage else self.to_layers(run, stack)
        spread = _along_width(spread, axes, kind)
        count = self.real[run].sum(-1)
        stages, chunks = count.shape
        order = [stage_of(v, stages, self.placement) for v in range(stages * chunks)]
        pieces = [spread[s, c, : count[s, c]] for s, c in order]
        return _along_width(jnp.concatenate(pieces), axes, kind)

    def equal(self, run: int) -> bool:
        """Return whether all chunks of a run have equally many layers, none of them padding."""
        return bool(self.real[run].all())

    def in_place(self, run: int) -> bool:
        """Return whether a run's layers, in order, are on their stages already."""
        index = self.index[run]
        return self.equal(run) and np.array_equal(index.reshape(-1), np.arange(index.size))

    def with_padding(self, run: int, stacks: Tree) -> Tree:
        """Return stacks, (l, ...), with each stage's layers and padding next to each other.

        Padding is a copy of a layer. `without_padding` undoes it.

        Args:
          run: the number of the run.
          stacks: arrays of all layers of the run, whose first dimension is not sharded.
        """
        return jax.tree.map(lambda x: x[self.index[run].reshape(-1)], stacks)

    def without_padding(self, run: int, stacks: Tree) -> Tree:
        """Undo `with_padding`."""
        index, real = self.index[run].reshape(-1), np.flatnonzero(self.real[run])
        return jax.tree.map(lambda x: x[real[np.argsort(index[real])]], stacks)

    def to_stages(self, run: int, stacks: Tree, *, sharded: bool = True) -> Tree:
        """Return stacks of equal chunks, in the order of layers, with each stage's layers next to each other.

        Stages send each other whole chunks. `to_layers` undoes it.

        Args:
          run: the number of the run.
          stacks: arrays of all layers of the run, (l, ...).
          sharded: their first dimension is sharded over `pipeline`, and nothing else.
        """
        return self._exchanged(run, stacks, sharded, back=False)

    def to_layers(self, run: int, stacks: Tree, *, sharded: bool = True) -> Tree:
        """Undo `to_stages`."""
        return self._exchanged(run, stacks, sharded, back=True)

    def _exchanged(self, run: int, stacks: Tree, sharded: bool, *, back: bool) -> Tree:
        if self.in_place(run):
            return stacks
        stages, chunks, n = self.index[run].shape
        if current() is None or not sharded:
            order = self.index[run].reshape(-1)
            return jax.tree.map(lambda x: x[np.argsort(order) if back else order], stacks)
        sent = _exchanges(stages, chunks, self.placement)

        def local(mine: Tree, source: Array, target: Array) -> Tree:
            def one(x: Array) -> Array:
                parts = x.reshape(chunks, n, *x.shape[1:])
                out = jnp.zeros_like(parts)
                for i, (to, *_) in enumerate(sent):
                    part = lax.dynamic_index_in_dim(parts, source[i, 0], keepdims=False)
                    if to != tuple(range(stages)):
                        part = lax.ppermute(part, "pipeline", [(b, a) if back else (a, b) for a, b in enumerate(to)])
                    out = lax.dynamic_update_index_in_dim(out, part, target[i, 0], 0)
                return out.reshape(x.shape)

            return jax.tree.map(one, mine)

        # arrays with a dimension for stages, since XLA does not know `axis_index` where other axes are not manual
        places = [np.asarray([one.source for one in sent]), np.asarray([one.target for one in sent])]
        spec, at = PartitionSpec("pipeline"), PartitionSpec(None, "pipeline")
        move = jax.shard_map(local, in_specs=(spec, at, at), out_specs=spec, axis_names={"pipeline"}, check_vma=False)
        return move(stacks, *(reversed(places) if back else places))


class _Exchange(NamedTuple):
    """One chunk of every stage, each sent to another stage.

    Args:
      to: where each stage sends it.
      source: which of its chunks, in the order of layers, each stage sends.
      target: which of its chunks, in the schedule, each stage receives.
    """

    to: tuple[int, ...]
    source: tuple[int, ...]
    target: tuple[int, ...]


@functools.lru_cache(64)
def _exchanges(stages: int, chunks: int, placement: Placement) -> tuple[_Exchange, ...]:
    """Return exchanges that send every chunk from the stage that has it in the order of layers to its own stage.

    Each stage sends and receives equally many chunks, so that these divide into perfect matchings (Kőnig's theorem).
    """
    left = [[(*stage_of(s * chunks + i, stages, placement), i) for i in range(chunks)] for s in range(stages)]
    sender: dict[int, tuple[int, tuple[int, int, int]]] = {}  # of each receiving stage, and (to, target, source)

    def match(s: int, seen: set[int]) -> bool:
        for chunk in sorted(left[s], key=lambda chunk: chunk[0] != s):  # first those that stay
            to = chunk[0]
            if to not in seen:
                seen.add(to)
                if to not in sender or match(sender[to][0], seen):
                    sender[to] = s, chunk
                    return True
        return False

    out = []
    for _ in range(chunks):
        sender.clear()
        for s in range(stages):
            match(s, set())
        sent = dict(sender.values())
        for s, chunk in sent.items():
            left[s].remove(chunk)
        to, _, source = zip(*(sent[s] for s in range(stages)), strict=True)
        out.append(_Exchange(to, source, tuple(sender[s][1][1] for s in range(stages))))
    return tuple(out)


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
