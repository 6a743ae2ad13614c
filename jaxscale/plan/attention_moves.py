"""What an attention sends whose sequence the layout cuts: a function for each kind."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp

from jaxscale.layout import TensorInfo
from jaxscale.nn import (
    GatherAttention,
    RingAttention,
    TokenRingAttention,
    UlyssesAttention,
    dot_product_attention,
)
from jaxscale.nn.context_parallel import ContextParallel
from jaxscale.nn.flash import key_heads_read
from jaxscale.parallel.context.order import Chunks, visits
from jaxscale.plan.collectives import Collective
from jaxscale.plan.covered import NotCovered
from jaxscale.plan.moves import Mover


@dataclasses.dataclass(frozen=True)
class Heads:
    """An attention's sizes, over all devices."""

    mover: Mover
    rows: int
    seq: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: Any

    def local(self, *sizes: tuple[str, int], dtype: Any = None) -> int:
        """Bytes on one device of a tensor of this batch and sequence, and these dimensions besides."""
        named = {"batch": self.rows, "seq": self.seq, **dict(sizes)}
        info = TensorInfo("an attention's operand", tuple(named.values()), jnp.dtype(dtype or self.dtype), tuple(named))
        return self.mover.local_bytes(info)

    @property
    def q(self) -> int:
        """Bytes of queries on one device."""
        return self.local(("heads", self.heads), ("head_dim", self.head_dim))

    @property
    def k(self) -> int:
        """Bytes of the keys that a device's queries read."""
        cut = self.mover.devices(self.mover.over("heads"))
        return self.local() * key_heads_read(self.heads // cut, self.heads // self.kv_heads) * self.head_dim

    @property
    def numbers(self) -> int:
        """Bytes of a float32 number for each query and head."""
        return self.local(("heads", self.heads), dtype="float32")

    @property
    def ids(self) -> int:
        """Bytes of an int32 for each token."""
        return self.local(dtype="int32")

    @property
    def widened(self) -> int:
        """float32 over the arithmetic's own type."""
        return 4 // jnp.dtype(self.dtype).itemsize


@dataclasses.dataclass(frozen=True)
class Runs:
    """How often in a step an attention's forward pass runs, what is around it runs forward, and it runs backward."""

    forward: int
    around: int
    backward: int


def attention_moves(
    kernel: Any, heads: Heads, window: int | None, segments: bool, forward: int, around: int, backward: int
) -> list[Collective]:
    """What an attention sends, nothing where no device has a part of a sequence.

    Args:
      kernel: the attention.
      heads: its sizes.
      window: of it.
      segments: whether tokens have documents and positions.
      forward: how often its forward pass runs, remade ones counted.
      around: how often what is not kept with its output is made.
      backward: how often its backward pass runs.

    Raises:
      NotCovered: an attention that nothing is known of.
    """
    over = heads.mover.over("seq")
    if not over:
        return []
    plain = kernel.func if isinstance(kernel, functools.partial) else kernel
    find = _MOVES.get(plain if callable(plain) and not dataclasses.is_dataclass(plain) else type(plain))
    if find is None:
        name = getattr(plain, "__name__", type(plain).__name__)
        known = ", ".join(k.__name__ for k in _MOVES)
        raise NotCovered(f"the attention {name} over a sequence that {heads.mover.layout} cuts ({known} are known)")
    tokens = heads.ids * (segments + (segments and window is not None))
    return find(kernel, heads, over, window, tokens, Runs(forward, around, backward))


def deals_out(kernel: Any, devices: int) -> bool:
    """Whether an attention over so many devices wants a sequence in another order than its own."""
    if not isinstance(kernel, ContextParallel) or not kernel.zigzag or devices == 1:
        return False
    return not isinstance(kernel, UlyssesAttention) or kernel.ring > 1


def _ring(
    kernel: Any, h: Heads, over: Sequence[str], window: int | None, tokens: int, runs: Runs, inner: int = 1
) -> list[Collective]:
    hops = _hops(kernel, h, over, window, inner)
    shift = functools.partial(_permutes, h, over)
    found = shift((h.k, h.k, tokens), hops * runs.forward, "keys and values round the ring, forward")
    found += shift((h.k, h.k, tokens), hops * runs.backward, "keys and values round the ring, backward")
    gradients = (h.k * h.widened, h.k * h.widened)
    return found + shift(gradients, hops * runs.backward, "gradients of keys and values round the ring")


def _token_ring(
    kernel: Any, h: Heads, over: Sequence[str], window: int | None, tokens: int, runs: Runs
) -> list[Collective]:
    hops = _hops(kernel, h, over, window, 1)
    shift = functools.partial(_permutes, h, over)
    found = shift((h.q, tokens), hops * runs.forward, "queries round the ring, forward")
    found += shift((h.q, h.numbers), hops * runs.forward, "outputs home")
    cotangents = (h.q, tokens, h.q, h.numbers, h.numbers)
    found += shift(cotangents, hops * runs.backward, "queries and cotangents round the ring")
    return found + shift((h.q,), hops * runs.backward, "queries' gradients home")


def _gather(
    kernel: Any, h: Heads, over: Sequence[str], window: int | None, tokens: int, runs: Runs
) -> list[Collective]:
    devices = h.mover.devices(over)
    found = []
    for times, when in ((runs.forward, "forward"), (runs.backward, "backward")):
        for size in (h.k, h.k, tokens):
            found += h.mover.send("all-gather", over, devices * size, times, f"keys and values gathered, {when}")
    scattered = devices * h.k * h.widened
    return found + 2 * h.mover.send(
        "reduce-scatter", over, scattered, runs.backward, "gradients of keys and values scattered"
    )


def _ulysses(
    kernel: Any, h: Heads, over: Sequence[str], window: int | None, tokens: int, runs: Runs
) -> list[Collective]:
    inner = h.mover.devices(over) // kernel.ring
    group = functools.partial(_in_groups, h, over, inner)
    found = []
    for size, what in ((h.q, "queries"), (h.k, "keys"), (h.k, "values"), (h.q, "outputs")):
        found += group("all-to-all", size, runs.around, f"all-to-all of {what}, forward")
        found += group("all-to-all", size, runs.backward, f"all-to-all of {what}' cotangents")
    found += group("all-gather", inner * tokens, runs.around, "tokens' documents gathered")
    return found + _ring(kernel, h, over, window, inner * tokens, runs, inner)


def _dense(kernel: Any, h: Heads, over: Sequence[str], window: int | None, tokens: int, runs: Runs) -> list[Collective]:
    """The partitioner's own way, which no rule of ours says: as `GatherAttention`, to go by what it usually does."""
    return [dataclasses.replace(c, certain=False) for c in _gather(kernel, h, over, window, tokens, runs)]


Moves = Callable[..., list[Collective]]
_MOVES: dict[Any, Moves] = {
    RingAttention: _ring,
    TokenRingAttention: _token_ring,
    GatherAttention: _gather,
    UlyssesAttention: _ulysses,
    dot_product_attention: _dense,
}


def _hops(kernel: Any, h: Heads, over: Sequence[str], window: int | None, inner: int) -> int:
    """How often something is passed on until everybody who needs it has seen it."""
    devices = h.mover.devices(over)
    ring, each = devices // inner, 2 if deals_out(kernel, devices) else 1
    chunks = Chunks(ring, each, h.seq // ring // each)
    return len(visits(chunks, causal=True, window=window, in_order=True)) - 1


def _permutes(h: Heads, over: Sequence[str], sizes: Sequence[int], times: int, name: str) -> list[Collective]:
    return [c for size in sizes for c in h.mover.send("collective-permute", over, size, times, name)]


def _in_groups(
    h: Heads, over: Sequence[str], inner: int, kind: str, payload: int, times: int, name: str
) -> list[Collective]:
    """A collective of every so many neighbours along some axes."""
    found = h.mover.send(kind, over, payload, times, name)
    return [dataclasses.replace(c, devices=inner) for c in found] if inner > 1 else []
