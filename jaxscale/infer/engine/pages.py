"""Bookkeeping of a cache's slots and pages, without arrays, so that schedulers and tests can run it alone."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from jaxscale.infer.engine.request import SequenceState


class PageCounts(NamedTuple):
    """Numbers of pages over all shards.

    Args:
      used: held by a running sequence.
      free: held by none, the reusable ones included.
      known: free pages whose tokens are still in the prefix cache, until another sequence takes the page.
    """

    used: int
    free: int
    known: int


class Pages:
    """The slots and pages of every shard of a cache, with a prefix cache.

    A shard is what one of the devices along the batch axes holds (with pipeline stages each has several, one for each
    micro-batch). A full page is identified by a digest of its tokens and of all before them. A sequence that begins
    like another one is given the pages of that one (full pages are never written again, so none is copied), also after
    the other has ended: a page that no sequence holds stays in the prefix cache until it is taken, the least recently
    used first (Kwon et al. 2023; Zheng et al. 2024, RadixAttention, does the same with a tree).

    Args:
      shards: the number of shards.
      slots: slots of each shard.
      page: positions in a page.
      pages: pages of each shard.
      devices: over which a shard's pages are split; entry i of a sequence is on device i modulo their number.
      budget: the most tokens of a shard in a step.
      sharing: use the prefix cache.
      growing: sequences take pages as they grow; else each has all it may need from the start.
    """

    def __init__(
        self,
        shards: int,
        slots: int,
        page: int,
        pages: int,
        *,
        devices: int = 1,
        budget: int = 256,
        sharing: bool = True,
        growing: bool = True,
    ):
        self.shards, self.slots, self.page, self.pages, self.devices = shards, slots, page, pages, devices
        self.budget, self.sharing, self.growing = budget, sharing, growing
        self.shared_tokens = 0  # that the prefix cache had, so that they were not computed
        self._free_slots = [list(range(slots))[::-1] for _ in range(shards)]
        each = pages // devices
        own = [list(range((d + 1) * each - 1, d * each - 1, -1)) for d in range(devices)]
        self._free = [[list(p) for p in own] for _ in range(shards)]
        self._idle: list[list[OrderedDict[int, None]]] = [
            [OrderedDict() for _ in range(devices)] for _ in range(shards)
        ]  # in the prefix cache and held by no sequence, least recently used first
        self._references = [[0] * pages for _ in range(shards)]
        self._page_of: list[dict[bytes, int]] = [{} for _ in range(shards)]
        self._digest_of: list[dict[int, bytes]] = [{} for _ in range(shards)]
        self._coming: list[dict[bytes, SequenceState]] = [{} for _ in range(shards)]  # who is about to compute it

    # Questions of a scheduler

    def slots_left(self, shard: int) -> int:
        """Return the free slots of a shard.

        Args:
          shard: its index.
        """
        return len(self._free_slots[shard])

    def free(self, shard: int, device: int = 0) -> int:
        """Return the pages of a shard on one of its devices that no sequence holds.

        Args:
          shard: its index.
          device: the index of the device among those that split the shard's pages.
        """
        return len(self._free[shard][device]) + len(self._idle[shard][device])

    def count(self) -> PageCounts:
        """Return how many pages are in which state."""
        places = [(shard, d) for shard in range(self.shards) for d in range(self.devices)]
        free = sum(self.free(*p) for p in places)
        return PageCounts(self.shards * self.pages - free, free, sum(len(self._idle[a][d]) for a, d in places))

    def fits(self, upto: Iterable[tuple[SequenceState, int]]) -> bool:
        """Return whether there are pages for running sequences to grow.

        Args:
          upto: the sequences, and the number of tokens that each shall have pages for.
        """
        need: dict[tuple[int, int], int] = {}
        for sequence, tokens in upto:
            for i in range(len(sequence.pages), self._entries(tokens)):
                place = sequence.shard, i % self.devices
                need[place] = need.get(place, 0) + 1
        return all(n <= self.free(*place) for place, n in need.items())

    def prefix_coming(self, sequence: SequenceState) -> bool:
        """Return whether a running sequence is about to compute the first page that this one would have to compute.

        Args:
          sequence: a waiting sequence.
        """
        for shard in range(self.shards if self._shares(sequence) else 0):
            digests = self._digests(sequence, (len(sequence.tokens) - 1) // self.page)
            first = next((d for d in digests if d not in self._page_of[shard]), None)
            if first in self._coming[shard]:
                return True
        return False

    # Actions of a scheduler

    def admit(self, sequence: SequenceState, shards: Sequence[int] | None = None, *, spare: bool = True) -> bool:
        """Give a waiting sequence a slot, the cached pages of its beginning, and pages for the rest of it.

        Of several shards it chooses the one that has most of the beginning, then the one with most free pages. The last
        token is always computed, since the model's output there chooses the next one.

        Args:
          sequence: a waiting sequence.
          shards: shards to choose from; all by default.
          spare: leave a free page for every sequence that runs in the shard, so that none is preempted for this one.

        Returns:
          whether there was a slot with enough pages.
        """
        among = range(self.shards) if shards is None else shards
        prefixes = [(shard, self._prefix(sequence, shard)) for shard in among]
        candidates = [(shard, prefix) for shard, prefix in prefixes if self._free_slots[shard]]
        for shard, prefix in sorted(candidates, key=lambda at: (-len(at[1]), -self._free_pages(at[0]))):
            need = self._need(range(len(prefix), self._entries(len(sequence.tokens))))
            for i, page in enumerate(prefix):  # an idle one counts as free, and will be used
                need[i % self.devices] += self._references[shard][page] == 0
            running = self.slots - len(self._free_slots[shard]) if self.growing else 0
            reserve = -(-running // self.devices) if spare else 0
            if all(n + reserve <= self.free(shard, d) for d, n in enumerate(need)):
                self._place(sequence, shard, prefix)
                return True
        return False

    def grow(self, sequence: SequenceState, tokens: int) -> bool:
        """Give a running sequence pages.

        Args:
          sequence: a running sequence.
          tokens: how many tokens it shall have pages for.

        Returns:
          whether there were enough; if not, it gets none.
        """
        if not self.fits([(sequence, tokens)]):
            return False
        for i in range(len(sequence.pages), self._entries(tokens)):
            sequence.pages.append(self._take(sequence.shard, i % self.devices))
        return True

    def release(self, sequence: SequenceState) -> None:
        """Free a sequence's slot and pages; recorded pages stay in the prefix cache until they are taken.

        Args:
          sequence: a sequence; nothing happens unless it is running.
        """
        if not sequence.running:
            return
        shard = sequence.shard
        self._forget_coming(sequence)
        for i in reversed(range(len(sequence.pages))):  # its beginning, which most others share, is evicted last
            page = sequence.pages[i]
            self._references[shard][page] -= 1
            if not self._references[shard][page]:
                if page in self._digest_of[shard]:
                    self._idle[shard][i % self.devices][page] = None
                else:
                    self._free[shard][i % self.devices].append(page)
        self._free_slots[shard].append(sequence.slot)
        sequence.pages, sequence.shard, sequence.slot, sequence.cached, sequence.recorded = [], -1, -1, 0, 0

    # Actions of the engine

    def record(self, sequence: SequenceState) -> None:
        """Put a sequence's full pages into the prefix cache.

        Args:
          sequence: a running sequence.
        """
        if not self.sharing:
            return
        shard, full = sequence.shard, sequence.cached // self.page
        if full == sequence.recorded:
            return
        new = slice(sequence.recorded, None)
        for page, digest in zip(sequence.pages[new], self._digests(sequence, full)[new], strict=False):
            if page not in self._digest_of[shard] and digest not in self._page_of[shard]:
                self._digest_of[shard][page] = digest
                self._page_of[shard][digest] = page
            if self._coming[shard].get(digest) is sequence:
                del self._coming[shard][digest]
        sequence.recorded = full

    def forget_prefixes(self) -> None:
        """Empty the prefix cache; sequences that run keep their pages, which nobody else will share."""
        for shard in range(self.shards):
            for idle, free in zip(self._idle[shard], self._free[shard], strict=True):
                free.extend(reversed(idle))
                idle.clear()
            self._page_of[shard].clear()
            self._digest_of[shard].clear()
            self._coming[shard].clear()

    def check(self, running: Sequence[SequenceState]) -> None:
        """Assert that every slot and page is either free or held by the sequences that list it.

        Args:
          running: all running sequences.
        """
        for shard in range(self.shards):
            held = [p for s in running if s.shard == shard for p in s.pages]
            assert self._references[shard] == np.bincount(held, minlength=self.pages).tolist()
            unused = [p for d in range(self.devices) for p in (*self._free[shard][d], *self._idle[shard][d])]
            assert sorted([*set(held), *unused]) == list(range(self.pages))
            slots = [s.slot for s in running if s.shard == shard]
            assert sorted([*slots, *self._free_slots[shard]]) == list(range(self.slots))
            assert all(self._page_of[shard][d] == p for p, d in self._digest_of[shard].items())
            assert len(self._page_of[shard]) == len(self._digest_of[shard])
            assert all(s.running and s.shard == shard for s in self._coming[shard].values())

    # Helpers

    def _entries(self, tokens: int) -> int:
        return -(-tokens // self.page)

    def _need(self, entries: Iterable[int]) -> list[int]:
        """Pages on each device for these entries of a sequence."""
        need = [0] * self.devices
        for i in entries:
            need[i % self.devices] += 1
        return need

    def _free_pages(self, shard: int) -> int:
        return sum(self.free(shard, d) for d in range(self.devices))

    def _digests(self, sequence: SequenceState, full: int) -> list[bytes]:
        """Digests of its first `full` pages."""
        while len(sequence.digests) < full:
            i = len(sequence.digests) * self.page
            own = np.asarray(sequence.tokens[i : i + self.page], np.int64).tobytes()
            before = sequence.digests[-1] if sequence.digests else b""
            sequence.digests.append(hashlib.blake2b(before + own, digest_size=16).digest())
        return sequence.digests[:full]

    def _shares(self, sequence: SequenceState) -> bool:
        """Whether it may use pages of others: a prompt that is scored has to be computed."""
        return self.sharing and not sequence.request.scored

    def _prefix(self, sequence: SequenceState, shard: int) -> list[int]:
        """Pages of its beginning that the prefix cache has."""
        prefix: list[int] = []
        if self._shares(sequence):
            for digest in self._digests(sequence, (len(sequence.tokens) - 1) // self.page):
                page = self._page_of[shard].get(digest)
                if page is None:
                    break
                prefix.append(page)
        return prefix

    def _place(self, sequence: SequenceState, shard: int, prefix: list[int]) -> None:
        sequence.shard, sequence.slot = shard, self._free_slots[shard].pop()
        sequence.pages, sequence.cached = list(prefix), len(prefix) * self.page
        for i, page in enumerate(prefix):
            if not self._references[shard][page]:
                del self._idle[shard][i % self.devices][page]
            self._references[shard][page] += 1
        self.shared_tokens += sequence.cached
        sequence.recorded = len(prefix)
        if self.sharing:
            for digest in self._digests(sequence, len(sequence.tokens) // self.page)[len(prefix) :]:
                self._coming[shard].setdefault(digest, sequence)
        self.grow(sequence, len(sequence.tokens))

    def _forget_coming(self, sequence: SequenceState) -> None:
        for digest in sequence.digests[sequence.recorded :]:
            if self._coming[sequence.shard].get(digest) is sequence:
                del self._coming[sequence.shard][digest]

    def _take(self, shard: int, device: int) -> int:
        if self._free[shard][device]:
            page = self._free[shard][device].pop()
        else:
            page, _ = self._idle[shard][device].popitem(last=False)
            del self._page_of[shard][self._digest_of[shard].pop(page)]
        self._references[shard][page] = 1
        return page
