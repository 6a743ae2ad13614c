"""Reversible runs: the backward pass works out each layer's inputs from its outputs, so depth holds no activations."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxscale.config import register
from jaxscale.errors import ConfigError
from jaxscale.nn.block import Block
from jaxscale.nn.context import Context
from jaxscale.nn.memory import MemoryPolicy
from jaxscale.nn.stack import Part, Run, chosen
from jaxscale.nn.stats import Stats, none_of, over_layers, total

Streams = tuple[Float[Array, "b s e"], Float[Array, "b s e"]]


@register
class ReversibleRun(Run):
    """A run over two residual streams, `a + attn(b)` and then `b + mlp(a)`, each step of which can be undone.

    (Gomez et al. 2017; Kitaev et al. 2020.) Whatever the depth, one layer's activations exist at a time. The streams
    are float32, since what is subtracted again has to be what was added. The arithmetic is that of recomputing every
    layer once, the function another one than `Run`'s. Arguments as `Run`.

    Raises:
      ConfigError: blocks whose sub-layers stand side by side, or a memory policy for activations that do not exist.
    """

    decodable = False

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        if any(block.parallel for block in self.blocks):
            raise ConfigError(
                "ReversibleRun needs attention and feed-forward one after the other; set Transformer.parallel = False"
            )
        if not self.memory.keeps_all:
            raise ConfigError(
                "ReversibleRun keeps no activations that a memory policy could recompute or move; set "
                "Transformer.memory = 'none', or a MemoryPolicy of rest='keep' that only tiles"
            )

    @staticmethod
    def scans(scan: bool | str, layers: int, memory: MemoryPolicy) -> bool:
        """Unless it is told not to: outside of a loop, activations that are made again would all exist at a time."""
        return bool(scan)

    @staticmethod
    def enter(x: Float[Array, "b s e"]) -> Streams:
        """Both streams start as the embedding."""
        x = x.astype(jnp.float32)
        return x, x

    @staticmethod
    def leave(x: Streams, dtype: Any) -> Float[Array, "b s e"]:
        """Their mean, in the model's type."""
        return ((x[0] + x[1]) / 2).astype(dtype)

    def __call__(self, x: Any, context: Context, part: Part | None = None) -> tuple[Any, Stats]:
        graphs, params = zip(*((g, nnx.to_pure_dict(p)) for g, p in map(nnx.split, self.blocks)), strict=True)
        part = Part(jnp.arange(self.repeats)) if part is None else part
        unroll = 1 if self.scans(self.scan, self.repeats, self.memory) else part.at.shape[0]

        def told(arrays: Any, i: Array, j: int) -> Context:
            return context.holding(arrays).at(self.first + i * len(graphs) + j)

        def forward(params: Any, x: Streams, arrays: Any) -> tuple[Streams, Stats]:
            def group(x: Streams, layer: Any) -> tuple[Streams, Stats]:
                (params, (i, real)), found = layer, []
                before = x
                for j, block in enumerate(map(nnx.merge, graphs, params)):
                    with jax.named_scope(f"blocks/{j}"):
                        a = x[0] + block.attend(x[1], told(arrays, i, j))
                        y, stats = block.feed(a, told(arrays, i, j))
                    x = a, x[1] + y
                    found.append(stats)
                return chosen(real, (x, total(found)), (before, none_of(total(found))))

            x, stats = jax.lax.scan(group, x, (params, part), unroll=unroll)
            return x, over_layers(stats)

        def keep_the_end(params: Any, x: Streams, arrays: Any) -> tuple[tuple[Streams, Stats], Any]:
            x, stats = forward(params, x, arrays)
            return (x, stats), (params, x, arrays)

        def backward(kept: Any, cotangents: tuple[Streams, Stats]) -> tuple[Any, Streams, None]:
            (params, x, arrays), (dx, dstats) = kept, cotangents

            def group(carry: tuple[Streams, Streams], layer: Any) -> tuple[tuple[Streams, Streams], Any]:
                params, (i, real) = layer
                grads: list[Any] = []
                after = carry
                for j in reversed(range(len(graphs))):
                    with jax.named_scope(f"blocks/{j}"):
                        carry, dparams = _undo(graphs[j], params[j], *carry, dstats, told(arrays, i, j))
                    grads.insert(0, dparams)
                none = jax.tree.map(jnp.zeros_like, tuple(grads))
                return chosen(real, carry, after), chosen(real, tuple(grads), none)

            (_, dx), grads = jax.lax.scan(group, (x, dx), (params, part), reverse=True, unroll=unroll)
            return grads, dx, None

        run = jax.custom_vjp(forward)
        run.defvjp(keep_the_end, backward)
        return run(params, x, context.arrays())


def _undo(
    graph: Any, params: Any, x: Streams, dx: Streams, dstats: Stats, context: Context
) -> tuple[tuple[Streams, Streams], Any]:
    """One block backwards: its inputs, their cotangents, and those of its parameters; `dstats` is that of a sum."""

    def attend(params: Any, b: Array) -> Array:
        block: Block = nnx.merge(graph, params)
        return block.attend(b, context)

    def feed(params: Any, a: Array) -> tuple[Array, Stats]:
        block: Block = nnx.merge(graph, params)
        return block.feed(a, context)

    (a, b), (da, db) = x, dx
    (added, stats), pull = jax.vjp(feed, params, a)
    b = b - added
    dparams, more = pull((db.astype(added.dtype), {k: dstats[k] for k in stats}))
    da = da + more
    added, pull = jax.vjp(attend, params, b)
    a = a - added
    more_dparams, more = pull(da.astype(added.dtype))
    db = db + more
    return ((a, b), (da, db)), jax.tree.map(jnp.add, dparams, more_dparams)
