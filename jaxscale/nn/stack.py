"""Runs: a repeating group of blocks, stacked along `layers` and applied by one scan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from jaxscale.config import register
from jaxscale.errors import ConfigError
from jaxscale.layout import current
from jaxscale.nn.block import Block
from jaxscale.nn.cache import DecodeState, RunCache
from jaxscale.nn.context import Context
from jaxscale.nn.memory import POLICIES, MemoryPolicy
from jaxscale.nn.stats import Stats, none_of, over_layers, total
from pallas_kernels.dispatch import device

_NONE = POLICIES["none"]


UNROLLED = 8
"""Layers of a run up to which "auto" unrolls it."""


def scanned(scan: bool | str, layers: int, memory: MemoryPolicy, *, decoding: bool = False) -> bool:
    """Whether a run's layers are applied by `lax.scan`; decides what "auto" is, under the layout in force.

    Unrolled, XLA neither copies activations into stacked arrays nor slices them out again, which costs a shallow model
    on a CPU or GPU up to a sixth of its step. "auto" scans nevertheless where

    - a run has more than `UNROLLED` layers, whose compile time would grow with their number;
    - a mesh has several devices, since the partitioner takes several times longer than the compiler;
    - the backend is a TPU, whose compiler overlaps a loop's transfers;
    - the memory policy recomputes: XLA for CPU undoes recomputation outside of a loop (652 against 184 MB of
      temporaries, 6 layers of width 384 under "full");
    - tokens are decoded, where each step has many shapes to compile.

    Args:
      scan: the setting: True, False or "auto".
      layers: of the run.
      memory: the memory policy.
      decoding: with a cache of past tokens.
    """
    if scan != "auto":
        return bool(scan)
    layout = current()
    several = layout is not None and layout.devices > 1
    return layers > UNROLLED or several or decoding or not memory.keeps_all or device().platform == "tpu"


class Part(NamedTuple):
    """Some copies of a run's group, of which a pipeline's stage holds n.

    Args:
      at: the number of each among the run's, int32 (n,).
      real: which of them are there, the rest being padding to pass over, bool (n,); `None` is all.
    """

    at: Int[Array, " n"]
    real: Bool[Array, " n"] | None = None


@register
class Run(nnx.Module):
    """`repeats` copies of a group of (possibly unlike) blocks.

    Parameters are stacked along a leading `layers` dimension, one stack per block of the group, so that compile time
    does not grow with depth.

    Args:
      make_group: builds one copy of the group from its own random streams.
      repeats: number of copies.
      first: how many layers of the model come before this run (each layer's randomness is its own).
      memory: what the backward pass finds, and where.
      scan: apply by `lax.scan`; else unrolled, the same parameters and values; "auto" is as `scanned` says.
    """

    decodable: ClassVar[bool] = True
    """Whether it can go on from a cache."""

    def __init__(
        self,
        make_group: Callable[[nnx.Rngs], Sequence[Block]],
        repeats: int,
        *,
        first: int = 0,
        memory: MemoryPolicy = _NONE,
        scan: bool | str = True,
        rngs: nnx.Rngs,
    ):
        self.blocks = nnx.List(jax.vmap(lambda r: list(make_group(r)))(rngs.split(repeats)))
        for _, variable in nnx.iter_graph(self.blocks):
            axes = variable.get_metadata().get("axes") if isinstance(variable, nnx.Variable) else None
            if axes is not None:  # a parameter without names is refused, by its own name, where names are collected
                variable.set_metadata(axes=("layers", *axes))
        self.repeats, self.first, self.memory, self.scan = repeats, first, memory, scan

    @staticmethod
    def scans(scan: bool | str, layers: int, memory: MemoryPolicy) -> bool:
        """Whether a run of so many layers would be scanned; see `scanned`."""
        return scanned(scan, layers, memory)

    @staticmethod
    def enter(x: Float[Array, "b s e"]) -> Any:
        """What the first run is given, from the embedding."""
        return x

    @staticmethod
    def leave(x: Any, dtype: Any) -> Float[Array, "b s e"]:
        """The hidden states, from what the last run returns."""
        return x

    def decode_states(self) -> list[tuple[DecodeState, int]]:
        """What each block of the group keeps of a text, and how many copies of it there are.

        Raises:
          ConfigError: a mixer without `decode_state`, or a stack that cannot decode with a cache.
        """
        if not self.decodable:
            raise ConfigError(
                f"{type(self).__name__} cannot decode with a cache; generate with Transformer.stack = @Run"
            )
        return [(block.decode_state, self.repeats) for block in self.blocks]

    def __call__(self, x: Any, context: Context, part: Part | None = None) -> tuple[Any, Stats]:
        """Applies every layer, to what `enter` or the run before returned; sums what they report.

        Args:
          part: which copies of the group these parameters are, when they are not all.

        A cache in the context is left with its new states.
        """

        kept = context.cache
        states = kept.states if isinstance(kept, RunCache) else ()

        def group(carry: tuple[Array, tuple[Any, ...]], slice_: tuple[list[Block], Part]) -> Any:
            ((x, states), (blocks, (i, real))), found = (carry, slice_), []
            before = x
            for j, block in enumerate(blocks):
                layer = kept.layer(states, j, i) if isinstance(kept, RunCache) else None
                with jax.named_scope(f"blocks/{j}"):
                    x, stats = block(x, context.caching(layer).at(self.first + i * len(blocks) + j))
                if layer is not None:
                    states = (*states[:j], layer.state, *states[j + 1 :])
                found.append(stats)
            x, stats = chosen(real, (x, total(found)), (before, none_of(total(found))))
            return (x, states), stats

        layers = self.repeats * len(self.blocks)
        scan = scanned(self.scan, layers, self.memory, decoding=context.cache is not None)
        group = self.memory.checkpoint(group, prevent_cse=not scan)
        part = Part(jnp.arange(self.repeats)) if part is None else part
        stacked = (list(self.blocks), part)
        if scan:
            (x, states), by_layer = jax.lax.scan(group, (x, states), stacked)
            stats = over_layers(by_layer)
        else:
            found = []
            for i in range(part.at.shape[0]):
                with jax.named_scope(f"[{i}]"):
                    (x, states), one = group((x, states), jax.tree.map(lambda a, i=i: a[i], stacked))
                found.append(one)
            stats = total(found)
        if isinstance(kept, RunCache):
            kept.states = states
        return x, stats


def chosen(real: Bool[Array, ""] | None, x: Any, before: Any) -> Any:
    """What a copy made of its input, or of one that is padding, the input."""
    return x if real is None else jax.tree.map(lambda a, b: jnp.where(real, a, b), x, before)
