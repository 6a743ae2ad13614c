"""A stage's backward in two: what its input needs now, and its kernels' gradients from what that left."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jaxscale.layout import constrain
from jaxscale.parallel.deferred import Deferred, Use, Uses

Tree = Any
Pair = tuple[Array | None, Array]
"""A product's input, or `None` where another kernel of the same input keeps it, and its output's cotangent."""


@dataclasses.dataclass(frozen=True, eq=False)
class Split:
    """Which of a stage's parameters wait for the weight phase.

    Args:
      structure: of the stage's parameters.
      uses: for each leaf the product it is the kernel of, or `None` for one whose gradient the backward phase makes:
        norms and biases, and kernels used more than once or in tiles.
      keeper: for each leaf that waits, the one that keeps its input.
      copies: for each leaf, how many are stacked.
    """

    structure: Any
    uses: tuple[Use | None, ...]
    keeper: tuple[int, ...]
    copies: tuple[int, ...]

    @classmethod
    def of(cls, stage: Callable[[Tree, Tree], Tree], params: Tree, kernels: Tree, x: Tree) -> Split:
        """Traces a stage to find what each kernel is multiplied by.

        Args:
          stage: (params, x) -> x.
          params: stacked, of one chunk.
          kernels: bool for each leaf: it is read by `jaxscale.nn.project` alone.
          x: a stage's input.
        """
        leaves, structure = jax.tree.flatten(params)
        noted = [Uses() if k else None for k in jax.tree.leaves(kernels)]
        stand_ins = [a if u is None else Deferred(a, uses=u) for a, u in zip(leaves, noted, strict=True)]
        jax.eval_shape(lambda x: stage(jax.tree.unflatten(structure, stand_ins), x), x)
        batch = jax.tree.leaves(x)[0].shape[:2]
        uses = tuple(
            u.found[0]
            if u is not None
            and not u.at_once
            and len(u.found) == 1
            and u.found[0].x.shape[: -len(u.found[0].x_axes)] == batch
            else None
            for u in noted
        )
        first: dict[int, int] = {}
        keeper = tuple(first.setdefault(id(u.x), i) if u is not None else i for i, u in enumerate(uses))
        shape = lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype)  # noqa: E731  # not the finished trace's own values
        uses = tuple(u and dataclasses.replace(u, x=shape(u.x), y=shape(u.y)) for u in uses)
        return cls(structure, uses, keeper, tuple(a.shape[0] for a in leaves))

    @property
    def waiting(self) -> list[int]:
        """The leaves that wait."""
        return [i for i, use in enumerate(self.uses) if use is not None]

    def zeros(self) -> list[Pair]:
        """Pairs of zeros, laid out, for each leaf that waits."""
        return [self._pair(i, lambda x, names: constrain(jnp.zeros(x.shape, x.dtype), *names)) for i in self.waiting]

    def axes(self) -> list[Any]:
        """The names of pairs' dimensions."""
        return [self._pair(i, lambda _, names: names) for i in self.waiting]

    def _pair(self, i: int, make: Callable[[Any, tuple[str | None, ...]], Any]) -> Any:
        use = self.uses[i]
        assert use is not None

        def of(a: Any, axes: Sequence[str]) -> Any:
            like = jax.ShapeDtypeStruct((self.copies[i], *a.shape), a.dtype)
            return make(like, (None, "batch", "seq", *axes))

        return None if self.keeper[i] != i else of(use.x, use.x_axes), of(use.y, use.y_axes)

    def backward(
        self, stage: Callable[[Tree, Tree], Tree], params: Tree, x: Tree, ct: Tree
    ) -> tuple[Tree, list[Array | None], list[Pair]]:
        """The cotangents of a stage's input and of the leaves that do not wait, and the pairs of those that do."""
        leaves = self.structure.flatten_up_to(params)
        now = {i: a for i, a in enumerate(leaves) if self.uses[i] is None}
        slots = dict(zip(self.waiting, self.zeros(), strict=True))

        def apply(now: dict[int, Array], slots: dict[int, Pair], x: Tree) -> Tree:
            given = [now[i] if i in now else Deferred(a, *slots[i]) for i, a in enumerate(leaves)]
            return stage(jax.tree.unflatten(self.structure, given), x)

        dnow, pairs, dx = jax.vjp(apply, now, slots, x)[1](ct)
        return dx, [dnow.get(i) for i in range(len(leaves))], [pairs[i] for i in self.waiting]

    def weights(self, pairs: list[Pair]) -> list[Array | None]:
        """The gradients of the leaves that wait: no chain of layers, one batched product for each kernel."""
        kept = dict(zip(self.waiting, pairs, strict=True))
        x: Any = {i: pair[0] for i, pair in kept.items()}
        return [
            None if use is None else jax.vmap(use.gradient)(x[self.keeper[i]], kept[i][1])
            for i, use in enumerate(self.uses)
        ]
