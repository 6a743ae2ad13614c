"""Reversible runs of blocks: the backward pass computes each layer's inputs from its outputs instead of saving them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxscale.config import register
from jaxscale.errors import ConfigError
from jaxscale.layout.tensors import Tree
from jaxscale.nn.block import Block
from jaxscale.nn.context import Context
from jaxscale.nn.memory import MemoryPolicy
from jaxscale.nn.stack import Part, Run, chosen
from jaxscale.nn.stats import Stats, none_of, over_layers, total

Streams = tuple[Float[Array, "b s e"], Float[Array, "b s e"]]


@register
class ReversibleRun(Run):
    """A run of blocks over two residual streams, `a + attn(b)` and then `b + mlp(a)`, which can both be inverted.

    (Gomez et al. 2017; Kitaev et al. 2020.) At any depth, the activations of one layer exist at a time. The streams are
    float32, so that subtracting restores what was added to. It costs as much as recomputing every layer once, and
    computes another function than `Run`.

    Args:
      *args: as `Run`.
      **kwargs: as `Run`.

    Raises:
      ConfigError: parallel blocks, or a memory policy that saves, moves or recomputes activations.
    """

    decodable = False
    two_streams = True

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        if any(block.parallel for block in self.blocks):
            raise ConfigError(
                "ReversibleRun needs the feed-forward layer after attention; set Transformer.parallel = False"
            )
        if not self.memory.keeps_all:
            raise ConfigError(
                "ReversibleRun saves no activations that a memory policy could recompute or move; set "
                "Transformer.memory = 'none', or a MemoryPolicy of rest='keep' that only tiles"
            )

    @staticmethod
    def scans(scan: bool | str, layers: int, memory: MemoryPolicy) -> bool:
        """True unless `scan` is False: outside of a loop, all recomputed activations would exist at the same time.

        Args:
          scan: `TransformerConfig.scan`.
          layers: how many repeats the run has; does not matter here.
          memory: what the backward pass saves; does not matter here.
        """
        return bool(scan)

    @staticmethod
    def enter(x: Float[Array, "b s e"]) -> Streams:
        """Return two streams that both start as the embedding.

        Args:
          x: the embedding's output, (batch, seq, embed).
        """
        x = x.astype(jnp.float32)
        return x, x

    @staticmethod
    def leave(x: Streams, dtype: DTypeLike) -> Float[Array, "b s e"]:
        """Return the mean of the streams, in the model's dtype.

        Args:
          x: the output of the last run.
          dtype: the model's dtype.
        """
        return ((x[0] + x[1]) / 2).astype(dtype)

    def __call__(self, x: Tree, context: Context, part: Part | None = None) -> tuple[Tree, Stats]:
        """See `Run`."""
        graphs, params = zip(*((g, nnx.to_pure_dict(p)) for g, p in map(nnx.split, self.blocks)), strict=True)
        part = Part(jnp.arange(self.repeats)) if part is None else part
        unroll = 1 if self.scans(self.scan, self.repeats, self.memory) else part.at.shape[0]

        def context_of(arrays: Tree, i: Array, j: int) -> Context:
            return context.holding(arrays).at(self.first + i * len(graphs) + j)

        def forward(params: Tree, x: Streams, arrays: Tree) -> tuple[Streams, Stats]:
            def group(x: Streams, layer: Tree) -> tuple[Streams, Stats]:
                (params, (i, real, *_)), reported = layer, []
                before = x
                for j, block in enumerate(map(nnx.merge, graphs, params)):
                    with jax.named_scope(f"blocks/{j}"):
                        mixed, more = block.attend(x[1], context_of(arrays, i, j))
                        a = x[0] + mixed
                        y, stats = block.feed(a, context_of(arrays, i, j))
                    x = a, x[1] + y
                    reported += [more, stats]
                return chosen(real, (x, total(reported)), (before, none_of(total(reported))))

            x, stats = jax.lax.scan(group, x, (params, part), unroll=unroll)
            return x, over_layers(stats)

        def forward_with_residuals(params: Tree, x: Streams, arrays: Tree) -> tuple[tuple[Streams, Stats], Tree]:
            x, stats = forward(params, x, arrays)
            return (x, stats), (params, x, arrays)

        def backward(saved: Tree, cotangents: tuple[Streams, Stats]) -> tuple[Tree, Streams, None]:
            (params, x, arrays), (dx, dstats) = saved, cotangents

            def group(carry: tuple[Streams, Streams], layer: Tree) -> tuple[tuple[Streams, Streams], Tree]:
                params, (i, real, *_) = layer
                grads: list[Any] = []
                after = carry
                for j in reversed(range(len(graphs))):
                    with jax.named_scope(f"blocks/{j}"):
                        carry, dparams = _undo(graphs[j], params[j], *carry, dstats, context_of(arrays, i, j))
                    grads.insert(0, dparams)
                none = jax.tree.map(jnp.zeros_like, tuple(grads))
                return chosen(real, carry, after), chosen(real, tuple(grads), none)

            (_, dx), grads = jax.lax.scan(group, (x, dx), (params, part), reverse=True, unroll=unroll)
            return grads, dx, None

        run = jax.custom_vjp(forward)
        run.defvjp(forward_with_residuals, backward)
        return run(params, x, context.arrays())


def _undo(
    graph: nnx.GraphDef[Any], params: Tree, x: Streams, dx: Streams, dstats: Stats, context: Context
) -> tuple[tuple[Streams, Streams], Tree]:
    """Return a block's inputs with their cotangents, and its parameters' cotangents, from its outputs and theirs.

    `dstats` are the cotangents of the summed statistics.
    """

    def attend(params: Tree, b: Array) -> tuple[Array, Stats]:
        block: Block = nnx.merge(graph, params)
        return block.attend(b, context)

    def feed(params: Tree, a: Array) -> tuple[Array, Stats]:
        block: Block = nnx.merge(graph, params)
        return block.feed(a, context)

    (a, b), (da, db) = x, dx
    (added, stats), pull = jax.vjp(feed, params, a)
    b = b - added
    dparams, more = pull((db.astype(added.dtype), {k: dstats[k] for k in stats}))
    da = da + more
    (added, stats), pull = jax.vjp(attend, params, b)
    a = a - added
    more_dparams, more = pull((da.astype(added.dtype), {k: dstats[k] for k in stats}))
    db = db + more
    return ((a, b), (da, db)), jax.tree.map(jnp.add, dparams, more_dparams)
