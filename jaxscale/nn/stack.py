"""Runs of blocks: a repeating group of blocks, stacked along `layers` and applied by one scan."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from jaxscale.config import register
from jaxscale.errors import ConfigError
from jaxscale.layout import current
from jaxscale.layout.tensors import Tree
from jaxscale.nn.block import Block
from jaxscale.nn.cache import DecodeState, RunCache
from jaxscale.nn.context import Context
from jaxscale.nn.late import made
from jaxscale.nn.memory import POLICIES, MemoryPolicy
from jaxscale.nn.per_layer import WithInputs
from jaxscale.nn.shared_blocks import OwnScales, SharedBlocks, own_norms, used
from jaxscale.nn.stats import Stats, none_of, over_layers, total
from jaxscale.nn.streamed import apply_streamed, window_of
from pallas_kernels.dispatch import device

_NONE = POLICIES["none"]


UNROLLED = 8
"""The most layers of a run that "auto" unrolls."""


def scanned(scan: bool | str, layers: int, memory: MemoryPolicy, *, decoding: bool = False) -> bool:
    """Return whether a run's layers are applied by `lax.scan`; decides "auto" for the layout in force.

    When layers are unrolled, XLA does not copy activations into stacked arrays and out again, which takes a shallow
    model on a CPU or GPU up to a sixth of its step. "auto" still scans if

    - a run has more than `UNROLLED` layers, because compile time grows with their number;
    - the mesh has several devices, because partitioning takes several times longer than compiling;
    - the backend is a TPU, whose compiler overlaps a loop's transfers;
    - the memory policy recomputes, because XLA for CPU undoes recomputation outside of a loop (652 instead of 184 MB of
      temporaries, 6 layers of width 384 under "full");
    - tokens are decoded, because many shapes of a step are compiled.

    Args:
      scan: the setting: True, False or "auto".
      layers: layers of the run.
      memory: the memory policy.
      decoding: there is a cache of past tokens.
    """
    if scan != "auto":
        return bool(scan)
    layout = current()
    several = layout is not None and layout.devices > 1
    return layers > UNROLLED or several or decoding or not memory.keeps_all or device().platform == "tpu"


class Part(NamedTuple):
    """The n repeats of a run's group that a pipeline stage holds.

    Args:
      at: the number of each repeat within the run, int32 (n,).
      real: which of them are not padding, bool (n,); padding is skipped. `None` is all.
      gates: what each repeat adds to the stream is multiplied by this, float32 (n,); `None` is 1.
      number: the number of each repeat within the run, if `at` is its place in the cache of a stage, int32 (n,).
    """

    at: Int[Array, " n"]
    real: Bool[Array, " n"] | None = None
    gates: Float[Array, " n"] | None = None
    number: Int[Array, " n"] | None = None


@register
class Run(nnx.Module):
    """A group of blocks, which can be of different kinds, repeated.

    Parameters are stacked along a leading `layers` dimension, one stack per block of the group, so that compile time
    does not grow with depth.

    Args:
      make_group: builds one group of blocks from its own random streams.
      repeats: number of repeats of the group.
      first: number of the model's layers before this run, since each layer has its own random key.
      memory: which activations are saved.
      scan: apply the layers by `lax.scan`; False unrolls them, with the same parameters and values; "auto" chooses (see
        `jaxscale.nn.stack.scanned`).
      shared: how often each repeat of the group is applied, and with what parameters of its own; `None` is once.
      rngs: random streams of the initial values.
    """

    two_streams: ClassVar[bool] = False
    """Whether attention and feed-forward layers read streams of their own."""

    decodable: ClassVar[bool] = True
    """Whether it can decode with a cache."""

    def __init__(
        self,
        make_group: Callable[[nnx.Rngs], Sequence[Block]],
        repeats: int,
        *,
        first: int = 0,
        memory: MemoryPolicy = _NONE,
        scan: bool | str = True,
        shared: SharedBlocks | None = None,
        rngs: nnx.Rngs,
    ):
        self.blocks = nnx.List(jax.vmap(lambda r: list(make_group(r)))(rngs.split(repeats)))
        for _, variable in nnx.iter_graph(self.blocks):
            axes = variable.get_metadata().get("axes") if isinstance(variable, nnx.Variable) else None
            if axes is not None:  # `jaxscale.layout.abstract` refuses a parameter without axes
                variable.set_metadata(axes=("layers", *axes))
        self.repeats, self.first, self.memory, self.scan, self.shared = repeats, first, memory, scan, shared
        stack = {"layers": repeats, "uses": self.uses}
        own = shared is not None and shared.scales
        self.scales = nnx.List([OwnScales(block, stack) for block in self.blocks]) if own else None
        if shared is not None and shared.norms:
            for block in self.blocks:
                own_norms(block, shared.uses)

    @property
    def uses(self) -> int:
        """How often each repeat of the group is applied."""
        return 1 if self.shared is None else self.shared.uses

    @staticmethod
    def scans(scan: bool | str, layers: int, memory: MemoryPolicy) -> bool:
        """Return whether a run of this many layers would be scanned; see `scanned`.

        Args:
          scan: `TransformerConfig.scan`.
          layers: how many repeats the run has.
          memory: what the backward pass saves.
        """
        return scanned(scan, layers, memory)

    @staticmethod
    def enter(x: Float[Array, "b s e"]) -> Tree:
        """Return the input of the first run from the embedding.

        Args:
          x: the embedding's output, (batch, seq, embed).
        """
        return x

    @staticmethod
    def leave(x: Tree, dtype: DTypeLike) -> Float[Array, "b s e"]:
        """Return the hidden states from the output of the last run.

        Args:
          x: the output of the last run.
          dtype: the model's dtype.
        """
        return x

    def decode_states(self) -> list[tuple[DecodeState, int]]:
        """Return what each use of each block of the group stores of a sequence, and its number of repeats.

        Raises:
          ConfigError: a mixer without `decode_state`, or a run that cannot decode with a cache.
        """
        if not self.decodable:
            raise ConfigError(
                f"{type(self).__name__} cannot decode with a cache; generate with Transformer.stack = @Run"
            )
        return [(block.decode_state, self.repeats) for _ in range(self.uses) for block in self.blocks]

    def __call__(self, x: Tree, context: Context, part: Part | None = None) -> tuple[Tree, Stats]:
        """Apply all layers, and sum their statistics.

        Args:
          x: the result of `enter`, or of the run before.
          context: the inputs that layers share; a `RunCache` in it is updated in place.
          part: which repeats of the group these parameters are, if not all.
        """
        inputs = None
        if isinstance(x, WithInputs):  # the same for all blocks, so that the scan need not carry them
            x, inputs = x
            context = dataclasses.replace(context, inputs=inputs)
        cache = context.cache
        states = cache.states if isinstance(cache, RunCache) else ()

        def group(
            carry: tuple[Array, tuple[Any, ...]], slice_: tuple[Any, Any, Part], context: Context = context
        ) -> Tree:
            ((x, states), (blocks, scales, (i, real, gate, number))), reported = (carry, slice_), []
            number = i if number is None else number
            (blocks, scales), mine = made((blocks, scales)), context.sharing()
            before = x
            for n, (j, block) in enumerate(self._applied(blocks, scales)):
                layer = cache.layer(states, n, i) if isinstance(cache, RunCache) else None
                with jax.named_scope(f"blocks/{j}"):
                    at = self.first + number * self.uses * len(blocks) + n
                    x, stats = block(x, mine.caching(layer).at(at))
                if layer is not None:
                    states = (*states[:n], layer.state, *states[n + 1 :])
                reported.append(stats)
            x = gated(gate, x, before)
            x, stats = chosen(real, (x, total(reported)), (before, none_of(total(reported))))
            return (x, states), stats

        if window_of(own := (list(self.blocks), None if self.scales is None else list(self.scales))) is not None:
            return self._streamed(group, x, own, part, context)
        layers = self.repeats * self.uses * len(self.blocks)
        scan = scanned(self.scan, layers, self.memory, decoding=context.cache is not None)
        group = self.memory.checkpoint(group, prevent_cse=not scan)
        part = Part(jnp.arange(self.repeats)) if part is None else part
        stacked = (*own, part)
        if scan:
            (x, states), by_layer = jax.lax.scan(group, (x, states), stacked)
            stats = over_layers(by_layer)
        else:
            reported = []
            for i in range(part.at.shape[0]):
                with jax.named_scope(f"[{i}]"):
                    (x, states), one = group((x, states), jax.tree.map(lambda a, i=i: a[i], stacked))
                reported.append(one)
            stats = total(reported)
        if isinstance(cache, RunCache):
            cache.states = states
        return (x if inputs is None else WithInputs(x, inputs)), stats

    def _streamed(
        self, group: Callable[..., Tree], x: Tree, own: Tree, part: Part | None, context: Context
    ) -> tuple[Tree, Stats]:
        """Apply all layers, whose parameters are in host memory."""
        memory, offload = self.memory, False
        if "residual" in memory.offload:  # by `apply_streamed`, which saves nothing else
            rest = tuple(t for t in memory.offload if t != "residual")
            memory, offload = dataclasses.replace(memory, offload=rest), True

        def applied(x: Tree, of: Tree, context: Context) -> tuple[Tree, Stats]:
            one = memory.checkpoint(lambda x, of: group((x, ()), (*of[0], of[1]), context), prevent_cse=False)
            (x, _), stats = one(x, of)
            return x, stats

        part = Part(jnp.arange(self.repeats)) if part is None else part
        x, by_layer = apply_streamed(applied, x, own, part, context, offload=offload)
        return x, over_layers(by_layer)

    def _applied(self, blocks: list[Block], scales: list[OwnScales] | None) -> Iterator[tuple[int, Block]]:
        """Yield the blocks of one repeat in the order in which they are applied, with their number in the group."""
        for use in range(self.uses):
            for j, block in enumerate(blocks):
                if self.shared is not None:
                    block = used(block, None if scales is None else scales[j], self.shared.norms, use)
                yield j, block


def chosen(real: Bool[Array, ""] | None, x: Tree, before: Tree) -> Tree:
    """Return `x`, a repeat's output, or `before`, its input, if the repeat is padding."""
    return x if real is None else jax.tree.map(lambda a, b: jnp.where(real, a, b), x, before)


def gated(gate: Float[Array, ""] | None, x: Tree, before: Tree) -> Tree:
    """Return `x`, a repeat's output, with the change from its input `before` multiplied by a gate."""
    if gate is None:
        return x
    return jax.tree.map(lambda a, b: (b + gate * (a.astype(jnp.float32) - b)).astype(a.dtype), x, before)
