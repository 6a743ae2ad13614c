"""Means of copies over a slow link: how many bits cross it, and what rounding does with the error."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxscale.config import register
from jaxscale.errors import ConfigError
from jaxscale.layout import Layout, TensorInfo
from jaxscale.parallel.chunks import Parts, axes_of_copies, constrain, devices_of_copies, entries, shards, spec_of

Tree = Any


class Wire:
    """Base of the formats in which copies send arrays to each other to compute their mean.

    A format may have a state: rounding errors that are added to what is sent next.
    """

    def infos(self, infos: Tree, copies: int, layout: Layout | None) -> Tree:
        """Return a `TensorInfo` per array of the state, by name; none in this class.

        Args:
          infos: a `TensorInfo` per array of one copy.
          copies: the number of copies.
          layout: the layout; `None` is one device.
        """
        return {}

    def mean(
        self, trees: Tree, state: Tree, infos: Tree, layout: Layout | None
    ) -> tuple[Tree, Tree]:  # fmt: skip
        """Return the mean of copies, which is the same on all devices, and the new state.

        Args:
          trees: float32 arrays (copies, ...), whose first dimension is sharded as "replicas".
          state: the arrays of `infos`.
          infos: a `TensorInfo` per array of one copy.
          layout: the layout; `None` is one device.
        """
        raise NotImplementedError

    def sent(self, infos: Tree, copies: int, layout: Layout | None) -> int:
        """Return the bytes that each device sends to others along the copies' mesh axis for one mean.

        These are those of ring algorithms, as in `jaxscale.plan.collectives.Collective.sent`.

        Args:
          infos: a `TensorInfo` per array of one copy.
          copies: the number of copies.
          layout: the layout; `None` is one device.
        """
        raise NotImplementedError

    feedback: bool = False

    def block_of(self, shape: tuple[int, ...]) -> int:
        """Return the size of a block of an array: a divisor of its last dimension.

        Args:
          shape: the array's shape.
        """
        raise NotImplementedError

    def pack(self, blocks: np.ndarray) -> bytes:
        """Return the bytes of numbers, for processes that send them over a network.

        Args:
          blocks: float32 (blocks, size of a block).
        """
        raise NotImplementedError

    def unpack(self, data: bytes | bytearray | memoryview, blocks: int, size: int) -> np.ndarray:
        """Return the float32 numbers (blocks, size) that `pack` made bytes of.

        Args:
          data: the bytes.
          blocks: number of blocks.
          size: numbers of a block.
        """
        raise NotImplementedError

    def packed_size(self, blocks: int, size: int) -> int:
        """Return the number of bytes that `pack` returns.

        Args:
          blocks: number of blocks.
          size: numbers of a block.
        """
        raise NotImplementedError


@register
@dataclasses.dataclass(frozen=True)
class Float32Wire(Wire):
    """An all-reduce of float32 numbers: 8 (n - 1) / n bytes per number on n devices."""

    def block_of(self, shape: tuple[int, ...]) -> int:
        """Return 1: a number is a block."""
        return 1

    def pack(self, blocks: np.ndarray) -> bytes:
        """Return the numbers' bytes."""
        return blocks.astype("<f4").tobytes()

    def unpack(self, data: bytes | bytearray | memoryview, blocks: int, size: int) -> np.ndarray:
        """Return the numbers."""
        return np.frombuffer(data, "<f4").reshape(blocks, size)

    def packed_size(self, blocks: int, size: int) -> int:
        """Return 4 bytes a number."""
        return 4 * blocks * size

    def mean(self, trees: Tree, state: Tree, infos: Tree, layout: Layout | None) -> tuple[Tree, Tree]:
        """Return the means and the empty state."""

        def of(x: jax.Array, info: TensorInfo) -> jax.Array:
            return constrain(jnp.mean(x, axis=0), layout, spec_of(info, layout))

        return jax.tree.map(of, trees, infos), state

    def sent(self, infos: Tree, copies: int, layout: Layout | None) -> int:
        """Return the bytes of the all-reduce."""
        devices = devices_of_copies(layout)
        local = sum(i.size // shards(spec_of(i, layout), layout) for i in jax.tree.leaves(infos))
        return round(4 * local * 2 * (devices - 1) / devices)


@dataclasses.dataclass(frozen=True)
class CodedWire(Wire):
    """Rounds to a few bits with a float32 scale per block: all-to-all, mean in float32, rounding, all-gather.

    A block is a run of numbers along the last dimension. Each array is divided into a chunk per copy, along its first
    dimension that the number of copies divides. A device receives all copies' codes of its chunks, adds them in
    float32, rounds the mean and sends the codes of the mean to all. An array that cannot be divided is sent whole.
    """

    block: int = 64
    feedback: bool = True

    def block_of(self, shape: tuple[int, ...]) -> int:
        """Return the largest divisor of the last dimension up to `block`."""
        last = shape[-1] if shape else 1
        return next(b for b in range(min(self.block, last), 0, -1) if last % b == 0)

    def pack(self, blocks: np.ndarray) -> bytes:
        """Return the codes' bytes, and then those of the scales."""
        with host_arrays():
            codes, scales = self.encode(jnp.asarray(blocks, jnp.float32))
        return np.asarray(codes).tobytes() + np.asarray(scales).astype("<f4").tobytes()

    def unpack(self, data: bytes | bytearray | memoryview, blocks: int, size: int) -> np.ndarray:
        """Return codes times scales."""
        cut, codes = blocks * self._code_bytes(size), np.dtype("u1" if self._code_bytes(size) < size else "i1")
        packed = np.frombuffer(data[:cut], codes).reshape(blocks, self._code_bytes(size))
        with host_arrays():
            numbers = self.decode(jnp.asarray(packed), jnp.asarray(np.frombuffer(data[cut:], "<f4")))
        return np.asarray(numbers)

    def packed_size(self, blocks: int, size: int) -> int:
        """Return the bytes of the codes, and 4 for the scale of each block."""
        return blocks * (self._code_bytes(size) + 4)

    def encode(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return codes, int8 or uint8 (..., bytes of a block), and float32 scales (...).

        Args:
          x: float32 blocks (..., block).
        """
        raise NotImplementedError

    def decode(self, codes: jax.Array, scales: jax.Array) -> jax.Array:
        """Return blocks (..., block) in float32.

        Args:
          codes: from `encode`.
          scales: from `encode`.
        """
        raise NotImplementedError

    def _code_bytes(self, size: int) -> int:
        """Return the bytes of the codes of a block of `size` numbers."""
        raise NotImplementedError

    def _check(self) -> None:
        name = type(self).__name__
        if not isinstance(self.block, int) or isinstance(self.block, bool) or self.block < 8 or self.block % 8:
            raise ConfigError(f"{name}.block = {self.block!r}: must be a multiple of 8, such as 64")
        if not isinstance(self.feedback, bool):
            raise ConfigError(f"{name}.feedback = {self.feedback!r}: must be True or False")

    def infos(self, infos: Tree, copies: int, layout: Layout | None) -> dict[str, Tree]:
        """Return the errors of the codes of each copy ("own") and of the mean ("mean"); nothing without `feedback`."""
        if not self.feedback:
            return {}

        def own(i: TensorInfo) -> TensorInfo:
            return TensorInfo(f"own/{i.path}", (copies, *i.shape), jnp.dtype("float32"), ("replicas", *i.axes))

        def mean(i: TensorInfo) -> TensorInfo:
            parts = Parts(i, copies, self.block)
            return TensorInfo(f"mean/{i.path}", parts.shape, jnp.dtype("float32"), parts.axes(layout))

        return {"own": jax.tree.map(own, infos), "mean": jax.tree.map(mean, infos)}

    def mean(self, trees: Tree, state: Tree, infos: Tree, layout: Layout | None) -> tuple[Tree, Tree]:
        """Return the means of the rounded arrays, rounded again, and the errors of both."""
        leaves, structure = jax.tree.leaves(infos), jax.tree.structure(infos)
        nothing: list[Any] = [None] * len(leaves)
        own, mean = (jax.tree.leaves(state[k]) if self.feedback else nothing for k in ("own", "mean"))
        each = zip(jax.tree.leaves(trees), own, mean, leaves, strict=True)
        out = [self._mean(x, o, m, i, layout) for x, o, m, i in each]
        means, own, mean = (jax.tree.unflatten(structure, [o[k] for o in out]) for k in range(3))
        return means, {"own": own, "mean": mean} if self.feedback else state

    def _mean(
        self, x: jax.Array, own: jax.Array | None, server: jax.Array | None, info: TensorInfo, layout: Layout | None
    ) -> tuple[jax.Array, jax.Array | None, jax.Array | None]:
        parts = Parts(info, x.shape[0], self.block)
        stacked, before, after = (
            (axes_of_copies(layout), *entries(spec_of(info, layout), len(info.shape))),
            *(parts.spec(layout, before=first) for first in (True, False)),
        )
        x = constrain(x if own is None else x + own, layout, stacked)
        codes, scales = (constrain(a, layout, before) for a in self.encode(parts.split(x)))
        own = None if own is None else constrain(x - parts.join(self.decode(codes, scales), lead=1), layout, stacked)
        received = [constrain(a, layout, after) for a in (codes, scales)]
        total = jnp.mean(self.decode(*received), axis=0)
        total = total if server is None else total + parts.blocks(server)
        chunk, whole = (parts.spec_of_mean(layout, chunked=chunked) for chunked in (True, False))
        codes, scales = (constrain(a, layout, chunk) for a in self.encode(constrain(total, layout, chunk)))
        server = None if server is None else (total - self.decode(codes, scales)).reshape(parts.shape)
        codes, scales = (constrain(a, layout, whole) for a in (codes, scales))
        mean = parts.join(self.decode(codes, scales), lead=0)
        return constrain(mean, layout, spec_of(info, layout)), own, server

    def sent(self, infos: Tree, copies: int, layout: Layout | None) -> int:
        """Return the bytes of the all-to-all and the all-gather of codes and scales."""
        devices, total = devices_of_copies(layout), 0.0
        for info in jax.tree.leaves(infos):
            parts = Parts(info, copies, self.block)
            blocks = math.prod(parts.blocked) // shards(parts.spec(layout, before=True)[1:], layout)
            size = blocks * (self._code_bytes(parts.size) + 4)  # of a copy, on one device
            share = (devices - 1) / devices
            total += share * (copies * size if parts.dim is None else copies // devices * size + size)
        return round(total)


@register
@dataclasses.dataclass(frozen=True)
class IntegerWire(CodedWire):
    """Whole numbers of 8 or 4 bits, and a float32 scale per block: its largest absolute value over 127 or 7.

    Each copy's numbers are rounded before they are sent, and their mean before it is sent back, so that on n devices a
    number costs 2 (n - 1) / n bytes (8 bits; scales not counted) in place of the 8 (n - 1) / n of float32. An
    all-reduce of codes would not be their sum. With `feedback` both rounding errors are added to what is rounded next
    (Seide et al. 2014), for 4 bytes of state per number and a little more.

    Args:
      bits: 8 or 4. Blocks of an odd size are sent in 8 bits.
      block: largest size of a block, a multiple of 8; it is the largest divisor of the last dimension up to that.
      feedback: whether rounding errors are added to what is sent next.

    Raises:
      ConfigError: `bits` is neither 8 nor 4, or `block` is not a multiple of 8.
    """

    bits: int = 8

    def __post_init__(self) -> None:
        self._check()
        if self.bits not in (4, 8) or isinstance(self.bits, bool):
            raise ConfigError(f"IntegerWire.bits = {self.bits!r}: must be 8 or 4")

    def _code_bytes(self, size: int) -> int:
        """Return the bytes of the codes of a block."""
        return size // 2 if self.bits == 4 and size % 2 == 0 else size

    def encode(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return codes, of 4 bits two in a byte, and scales."""
        top = 2 ** (self.bits - 1) - 1
        scales = jnp.max(jnp.abs(x), axis=-1) / top
        codes = jnp.round(x / jnp.where(scales > 0, scales, 1)[..., None]).astype(jnp.int8)
        if self.bits == 8 or x.shape[-1] % 2:
            return codes, scales
        pairs = (codes + 8).astype(jnp.uint8).reshape(*x.shape[:-1], -1, 2)
        return pairs[..., 0] | (pairs[..., 1] << 4), scales

    def decode(self, codes: jax.Array, scales: jax.Array) -> jax.Array:
        """Return codes times scales."""
        if codes.dtype == jnp.uint8:
            both = jnp.stack([codes & 15, codes >> 4], axis=-1).reshape(*codes.shape[:-1], -1)
            codes = both.astype(jnp.int8) - 8
        return codes.astype(jnp.float32) * scales[..., None]


@register
@dataclasses.dataclass(frozen=True)
class SignWire(CodedWire):
    """Signs, and a float32 scale per block: its mean absolute value (Bernstein et al. 2018; Tang et al. 2021).

    Eight signs are in a byte; a block whose size 8 does not divide is sent with a byte per sign. On n devices a number
    costs (n - 1) / (4 n) bytes, scales not counted. Without `feedback` signs alone do not converge.

    Args:
      block: largest size of a block, a multiple of 8; it is the largest divisor of the last dimension up to that.
      feedback: whether errors are added to what is sent next.

    Raises:
      ConfigError: `block` is not a multiple of 8.
    """

    def __post_init__(self) -> None:
        self._check()

    def _code_bytes(self, size: int) -> int:
        """Return the bytes of the codes of a block."""
        return size if size % 8 else size // 8

    def encode(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return signs, eight in a byte, and scales."""
        positive = (x >= 0).astype(jnp.uint8)
        if x.shape[-1] % 8:
            return positive.astype(jnp.int8), jnp.mean(jnp.abs(x), axis=-1)
        return jnp.packbits(positive, axis=-1), jnp.mean(jnp.abs(x), axis=-1)

    def decode(self, codes: jax.Array, scales: jax.Array) -> jax.Array:
        """Return plus or minus the scales."""
        positive = jnp.unpackbits(codes, axis=-1) if codes.dtype == jnp.uint8 else codes
        return jnp.where(positive > 0, scales[..., None], -scales[..., None])


def host_arrays() -> contextlib.AbstractContextManager[Any]:
    """Return a context in which new arrays are in host memory, or where arrays are by default if JAX has no CPU."""
    try:
        return jax.default_device(jax.local_devices(backend="cpu")[0])
    except RuntimeError:
        return contextlib.nullcontext()
