"""The mean of members' arrays: each member computes the mean of one share of them and sends it to all others."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

from jaxscale.peers.messages import Channel, PeerLost

Arrays = Sequence[np.ndarray]


class Packing(Protocol):
    """How numbers become bytes; the wire formats of `jaxscale.parallel` do it."""

    @property
    def feedback(self) -> bool:
        """Whether rounding errors are added to what is sent next."""

    def pack(self, blocks: np.ndarray) -> bytes:
        """Return the bytes of float32 numbers (blocks, size of a block)."""

    def unpack(self, data: bytes | bytearray | memoryview, blocks: int, size: int) -> np.ndarray:
        """Return the float32 numbers (blocks, size of a block) of bytes."""

    def packed_size(self, blocks: int, size: int) -> int:
        """Return the number of bytes of so many blocks."""


@dataclasses.dataclass
class Errors:
    """Rounding errors of one member, which are added to what it sends next.

    Args:
      own: those of its own arrays; empty before the first mean.
      mean: those of the means of its share; empty before the first mean, and when the members have changed.
      members: the members at the last mean.
    """

    own: list[np.ndarray] = dataclasses.field(default_factory=list)
    mean: list[np.ndarray] = dataclasses.field(default_factory=list)
    members: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Reduced:
    """A mean.

    Args:
      mean: float32 arrays, the same bits on all members.
      errors: the new rounding errors, for the next mean.
      sent: bytes of packed numbers that this member sent.
    """

    mean: list[np.ndarray]
    errors: Errors
    sent: int


class MemberLost(PeerLost):
    """A member was lost during a mean.

    Args:
      member: its number.
      why: what happened.
    """

    def __init__(self, member: int, why: object):
        super().__init__(f"peer {member}: {why}")
        self.member = member


def all_reduce(
    arrays: Arrays, packing: Packing, links: Mapping[int, Channel], mine: int, errors: Errors | None = None
) -> Reduced:
    """Return the mean of all members' arrays.

    Of n members the i-th by number owns about an n-th of every array's blocks. It receives all members' packed numbers
    of them, adds these as float32 in the order of the members' numbers, divides by n, packs the mean, and sends it to
    all: 2 (n - 1) / n times the packed bytes from each member, as a ring all-reduce. Own numbers are rounded as well.

    Args:
      arrays: float32 (blocks, size of a block), of the same shapes for all members.
      packing: how numbers become bytes.
      links: a channel to every other member, by its number.
      mine: this member's number.
      errors: the errors of the last mean; not changed, so that a failed mean can be repeated.

    Raises:
      MemberLost: a member was lost; which one is named.
    """
    members = tuple(sorted([mine, *links]))
    count, place = len(members), members.index(mine)
    errors = errors or Errors()
    arrays = [a + e for a, e in zip(arrays, errors.own, strict=True)] if errors.own else list(arrays)

    def share(of: Arrays, owner: int) -> list[np.ndarray]:
        return [a[owner * len(a) // count : (owner + 1) * len(a) // count] for a in of]

    packed = [[packing.pack(part) for part in share(arrays, owner)] for owner in range(count)]
    own = share(arrays, place)
    before = sum(c.payload_sent for c in links.values())
    received = _swap(links, {m: packed[i] for i, m in enumerate(members)}, {m: _sizes(own, packing) for m in links})
    total: list[np.ndarray] = []
    for member in members:
        parts = _unpacked(received[member] if member in received else b"".join(packed[place]), own, packing)
        total = parts if not total else [t + p for t, p in zip(total, parts, strict=True)]
    total = [t / np.float32(count) for t in total]
    same = errors.mean if errors.members == members else []
    total = [t + e for t, e in zip(total, same, strict=True)] if same else total
    mine_packed = [packing.pack(t) for t in total]
    sizes = {m: _sizes(share(arrays, i), packing) for i, m in enumerate(members) if m in links}
    means = _swap(links, dict.fromkeys(links, mine_packed), sizes)
    whole = [np.empty(a.shape, np.float32) for a in arrays]
    for i, member in enumerate(members):
        data = means[member] if member in means else b"".join(mine_packed)
        for to, part in zip(share(whole, i), _unpacked(data, share(arrays, i), packing), strict=True):
            to[...] = part
    sent = sum(c.payload_sent for c in links.values()) - before
    if not packing.feedback:
        return Reduced(whole, Errors(members=members), sent)
    rounded = [np.empty(a.shape, np.float32) for a in arrays]
    for i in range(count):
        for to, part in zip(share(rounded, i), _unpacked(b"".join(packed[i]), share(arrays, i), packing), strict=True):
            to[...] = part
    of_own = [a - r for a, r in zip(arrays, rounded, strict=True)]
    of_mean = [t - m for t, m in zip(total, share(whole, place), strict=True)]
    return Reduced(whole, Errors(of_own, of_mean, members), sent)


def _sizes(arrays: Arrays, packing: Packing) -> int:
    return sum(packing.packed_size(*a.shape) for a in arrays)


def _unpacked(data: bytes | bytearray, like: Arrays, packing: Packing) -> list[np.ndarray]:
    view, out, first = memoryview(data), [], 0
    for a in like:
        last = first + packing.packed_size(*a.shape)
        out.append(packing.unpack(view[first:last], *a.shape))
        first = last
    return out


def _swap(
    links: Mapping[int, Channel], out: Mapping[int, list[bytes]], size: Mapping[int, int]
) -> dict[int, bytearray]:
    """Send `out` to every member and receive `size` bytes from each, at the same time."""
    lost: list[MemberLost] = []

    def send(member: int) -> None:
        try:
            links[member].send("numbers", out[member])
        except PeerLost as e:
            lost.append(MemberLost(member, e))

    threads = [threading.Thread(target=send, args=(m,), daemon=True) for m in links]
    for thread in threads:
        thread.start()
    received = {}
    for member, link in links.items():
        try:
            received[member] = link.receive(size[member])[1]
            if len(received[member]) != size[member]:
                raise PeerLost(f"it sent {len(received[member])} bytes of {size[member]}; do all have one version?")
        except PeerLost as e:
            raise MemberLost(member, e) from None
    for thread in threads:
        thread.join()
    if lost:
        raise lost[0]
    return received
