"""Split a stage's backward pass: the input's gradient now, and kernels' gradients later (zero bubble) or apart.

Kernels' gradients are sums over tokens. Where a mesh axis shards tokens and not the gradient, each device along it can
sum over its own tokens alone, and devices need not be summed over until the last micro-batch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array

from jaxscale.layout import constrain
from jaxscale.parallel.deferred import Deferred, Use, Uses
from jaxscale.parallel.sharded import cut_over

Tree = Any
Pair = tuple[Array | None, Array]
"""A product's input, or `None` if another kernel with the same input stores it, and its output's cotangent."""


@dataclasses.dataclass(frozen=True, eq=False)
class Split:
    """Which of a stage's parameters get their gradients in the weight phase (the deferred ones).

    Args:
      structure: tree structure of the stage's parameters.
      uses: for each leaf the product that it is the kernel of, or `None` if the backward phase computes its gradient:
        norms and biases, and kernels that are used more than once or in tiles.
      keeper: for each deferred leaf, the leaf that stores its input.
      copies: for each leaf, the number of stacked layers.
      over: for each leaf, the mesh axes over which `weights` does not sum its gradient (see `terms_of`).
    """

    structure: Any
    uses: tuple[Use | None, ...]
    keeper: tuple[int, ...]
    copies: tuple[int, ...]
    over: tuple[tuple[str, ...], ...]

    @classmethod
    def of(
        cls,
        stage: Callable[[Tree, Tree], Tree],
        params: Tree,
        kernels: Tree,
        x: Tree,
        terms: tuple[str, ...] = (),
    ) -> Split:
        """Trace a stage to find the product of each kernel.

        Args:
          stage: (params, x) -> x.
          params: the stacked parameters of one chunk.
          kernels: bool for each leaf: only `jaxscale.nn.project` reads it.
          x: a stage's input.
          terms: see `terms_of`.
        """
        leaves, structure = jax.tree.flatten(params)
        recorded = [Uses() if k else None for k in jax.tree.leaves(kernels)]
        kernels_or_arrays = [a if u is None else Deferred(a, uses=u) for a, u in zip(leaves, recorded, strict=True)]
        jax.eval_shape(lambda x: stage(jax.tree.unflatten(structure, kernels_or_arrays), x), x)
        batch = jax.tree.leaves(x)[0].shape[:2]
        uses = tuple(
            u.products[0]
            if u is not None
            and not u.at_once
            and len(u.products) == 1
            and u.products[0].x.shape[: -len(u.products[0].x_axes)] == batch
            else None
            for u in recorded
        )
        first: dict[int, int] = {}
        keeper = tuple(first.setdefault(id(u.x), i) if u is not None else i for i, u in enumerate(uses))

        def shape(a: Array) -> jax.ShapeDtypeStruct:  # a tracer must not outlive its trace
            return jax.ShapeDtypeStruct(a.shape, a.dtype)

        uses = tuple(u and dataclasses.replace(u, x=shape(u.x), y=shape(u.y)) for u in uses)
        over = tuple(() if u is None or u.rounds else terms for u in uses)
        return cls(structure, uses, keeper, tuple(a.shape[0] for a in leaves), over)

    @property
    def waiting(self) -> list[int]:
        """The numbers of the deferred leaves."""
        return [i for i, use in enumerate(self.uses) if use is not None]

    def zeros(self) -> list[Pair]:
        """Return sharded pairs of zeros for each deferred leaf."""
        return [self._pair(i, lambda x, names: constrain(jnp.zeros(x.shape, x.dtype), *names)) for i in self.waiting]

    def axes(self) -> list[Any]:
        """Return the logical axes of the pairs."""
        return [self._pair(i, lambda _, names: names) for i in self.waiting]

    def _pair(self, i: int, make: Callable[[Any, tuple[str | None, ...]], Any]) -> tuple[Tree, Tree]:
        use = self.uses[i]
        assert use is not None

        def of(a: Array | jax.ShapeDtypeStruct, axes: Sequence[str]) -> Tree:
            like = jax.ShapeDtypeStruct((self.copies[i], *a.shape), a.dtype)
            return make(like, (None, "batch", "seq", *axes))

        return None if self.keeper[i] != i else of(use.x, use.x_axes), of(use.y, use.y_axes)

    def backward(
        self, stage: Callable[[Tree, Tree], Tree], params: Tree, x: Tree, ct: Tree
    ) -> tuple[Tree, list[Array | None], list[Pair]]:
        """Return the cotangents of a stage's input and of leaves that are not deferred, and the pairs of deferred ones.

        Args:
          stage: (params, x) -> x.
          params: the stage's parameters.
          x: the stage's input.
          ct: the cotangent of its output.
        """
        leaves = self.structure.flatten_up_to(params)
        now = {i: a for i, a in enumerate(leaves) if self.uses[i] is None}
        slots = dict(zip(self.waiting, self.zeros(), strict=True))

        def apply(now: dict[int, Array], slots: dict[int, Pair], x: Tree) -> Tree:
            mixed = [now[i] if i in now else Deferred(a, *slots[i]) for i, a in enumerate(leaves)]
            return stage(jax.tree.unflatten(self.structure, mixed), x)

        dnow, pairs, dx = jax.vjp(apply, now, slots, x)[1](ct)
        return dx, [dnow.get(i) for i in range(len(leaves))], [pairs[i] for i in self.waiting]

    def weights(self, pairs: list[Pair]) -> list[Array | None]:
        """Return the gradients of the deferred leaves, by one batched product per kernel over all layers.

        A gradient that is not summed over mesh axes has a first dimension for the terms, which these axes shard.

        Args:
          pairs: from `backward`.
        """
        by_leaf = dict(zip(self.waiting, pairs, strict=True))
        x: Any = {i: pair[0] for i, pair in by_leaf.items()}
        return [
            None if use is None else _gradient(use, over, x[self.keeper[i]], by_leaf[i][1])
            for i, (use, over) in enumerate(zip(self.uses, self.over, strict=True))
        ]


def terms_of(axes: Tree, kernels: Tree) -> tuple[str, ...]:
    """Return the mesh axes over which kernels' gradients need not be summed in each micro-batch.

    They shard tokens, and no dimension of a gradient. Those of rows are all of them or none, since rows that one axis
    shards outside of another would have to move.

    Args:
      axes: for each leaf its logical axes.
      kernels: bool for each leaf, as for `Split.of`.
    """
    of_kernels = jax.tree.leaves(jax.tree.map(lambda k, a: {n for n in a if k and n is not None}, kernels, axes))
    sharded = {m for names in of_kernels for a in names for m in cut_over(a, kind="grads")}
    rows, seq = cut_over("batch"), cut_over("seq")
    return (*(() if sharded & set(rows) else rows), *(m for m in seq if m not in sharded))


def _gradient(use: Use, over: tuple[str, ...], x: Array, dy: Array) -> Array:
    of = jax.vmap(use.gradient)
    if not over:
        return of(x, dy)
    tokens = PartitionSpec(None, *(tuple(m for m in cut_over(a) if m in over) for a in ("batch", "seq")))
    return jax.shard_map(
        lambda x, dy: of(x, dy)[None],
        in_specs=(tokens, tokens),
        out_specs=PartitionSpec(over),
        axis_names=set(over),
        check_vma=False,  # what layers do inside is not known here
    )(x, dy)
