"""Which pages of a cache are whose: bookkeeping without an array in it, which schedulers and simulators share."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from jaxscale.infer.engine.request import Text


class PageCounts(NamedTuple):
    """How many pages, over all lanes.

    Args:
      used: some running text's.
      free: nobody's, those included that are still known.
      known: of the free ones, those whose tokens are remembered until they are taken.
    """

    used: int
    free: int
    known: int


class Pages:
    """The rows and pages of every lane.

    A full page is known by a digest of its tokens and of all before them. A text that begins like another is given the
    pages of that one (copied by nobody, since a full page is not written any more), also after the other has ended:
    a page that no text holds keeps what it has until it is taken, the longest unused first (Kwon et al. 2023; Zheng et
    al. 2024, RadixAttention, has the same with a tree).

    Args:
      lanes, rows: how many, the rows of each lane.
      page: positions in a page.
      pages: of each lane.
      pieces: devices over which a lane's pages are cut; entry i of a text lies on device i modulo their number.
      budget: the most tokens of a lane in a step.
      sharing: look for pages of the same beginning.
      growing: texts take pages as they grow; else each has what it needs from the start.
    """

    def __init__(
        self,
        lanes: int,
        rows: int,
        page: int,
        pages: int,
        *,
        pieces: int = 1,
        budget: int = 256,
        sharing: bool = True,
        growing: bool = True,
    ):
        self.lanes, self.rows, self.page, self.pages, self.pieces = lanes, rows, page, pages, pieces
        self.budget, self.sharing, self.growing = budget, sharing, growing
        self.shared_tokens = 0  # that were found, and not computed
        self._rows = [list(range(rows))[::-1] for _ in range(lanes)]
        each = pages // pieces
        self._free = [[list(range((d + 1) * each - 1, d * each - 1, -1)) for d in range(pieces)] for _ in range(lanes)]
        self._idle: list[list[OrderedDict[int, None]]] = [[OrderedDict() for _ in range(pieces)] for _ in range(lanes)]
        self._readers = [[0] * pages for _ in range(lanes)]
        self._page_of: list[dict[bytes, int]] = [{} for _ in range(lanes)]
        self._digest_of: list[dict[int, bytes]] = [{} for _ in range(lanes)]
        self._coming: list[dict[bytes, Text]] = [{} for _ in range(lanes)]  # who is about to compute it

    # What a scheduler asks

    def rows_left(self, lane: int) -> int:
        """Rows of a lane that no text has."""
        return len(self._rows[lane])

    def free(self, lane: int, piece: int = 0) -> int:
        """Pages of a lane on one of its devices that no text holds."""
        return len(self._free[lane][piece]) + len(self._idle[lane][piece])

    def count(self) -> PageCounts:
        """How many pages are in which state."""
        places = [(lane, d) for lane in range(self.lanes) for d in range(self.pieces)]
        free = sum(self.free(*p) for p in places)
        return PageCounts(self.lanes * self.pages - free, free, sum(len(self._idle[a][d]) for a, d in places))

    def fits(self, upto: Iterable[tuple[Text, int]]) -> bool:
        """Whether these running texts can all grow to so many tokens each."""
        need: dict[tuple[int, int], int] = {}
        for text, tokens in upto:
            for i in range(len(text.pages), self._entries(tokens)):
                need[text.lane, i % self.pieces] = need.get((text.lane, i % self.pieces), 0) + 1
        return all(n <= self.free(*place) for place, n in need.items())

    def soon(self, text: Text) -> bool:
        """Whether a running text is about to compute what this one, which waits, would have to compute first."""
        for lane in range(self.lanes if self._shares(text) else 0):
            digests = self._digests(text, (len(text.tokens) - 1) // self.page)
            first = next((d for d in digests if d not in self._page_of[lane]), None)
            if first in self._coming[lane]:
                return True
        return False

    # What a scheduler does

    def admit(self, text: Text, lanes: Sequence[int] | None = None, *, spare: bool = True) -> bool:
        """Gives a waiting text a row, the pages that others have of its beginning, and pages for the rest of it.

        Of several lanes it takes the one that holds most of it, then the one with most room. Its last token is always
        computed, since what follows it is asked.

        Args:
          text: which.
          lanes: among these; all by default.
          spare: leave a page for every text that is running in the lane, so that none has to go for this one.

        Returns:
          whether there was room.
        """
        found = [(lane, self._known(text, lane)) for lane in (range(self.lanes) if lanes is None else lanes)]
        rows = [(lane, known) for lane, known in found if self._rows[lane]]
        for lane, known in sorted(rows, key=lambda at: (-len(at[1]), -self._room(at[0]))):
            need = self._need(range(len(known), self._entries(len(text.tokens))))
            for i, page in enumerate(known):  # nobody's now, so that it counts as free
                need[i % self.pieces] += self._readers[lane][page] == 0
            running = self.rows - len(self._rows[lane]) if self.growing else 0
            keep = -(-running // self.pieces) if spare else 0
            if all(n + keep <= self.free(lane, d) for d, n in enumerate(need)):
                self._enter(text, lane, known)
                return True
        return False

    def grow(self, text: Text, tokens: int) -> bool:
        """Gives a running text pages for so many tokens; `False`, and no page, where there are too few."""
        if not self.fits([(text, tokens)]):
            return False
        for i in range(len(text.pages), self._entries(tokens)):
            text.pages.append(self._take(text.lane, i % self.pieces))
        return True

    def release(self, text: Text) -> None:
        """Takes a text's row and pages away; what they hold is known until they are taken."""
        if not text.running:
            return
        lane = text.lane
        self._forget_coming(text)
        for i in reversed(range(len(text.pages))):  # its beginning, which most others share, is forgotten last
            page = text.pages[i]
            self._readers[lane][page] -= 1
            if not self._readers[lane][page]:
                if page in self._digest_of[lane]:
                    self._idle[lane][i % self.pieces][page] = None
                else:
                    self._free[lane][i % self.pieces].append(page)
        self._rows[lane].append(text.row)
        text.pages, text.lane, text.row, text.kept, text.learned = [], -1, -1, 0, 0

    # What the engine does

    def learn(self, text: Text) -> None:
        """Remembers the full pages that a running text has by now."""
        if not self.sharing:
            return
        lane, full = text.lane, text.kept // self.page
        if full == text.learned:
            return
        for page, digest in zip(text.pages[text.learned :], self._digests(text, full)[text.learned :], strict=False):
            if page not in self._digest_of[lane] and digest not in self._page_of[lane]:
                self._digest_of[lane][page] = digest
                self._page_of[lane][digest] = page
            if self._coming[lane].get(digest) is text:
                del self._coming[lane][digest]
        text.learned = full

    def check(self, running: Sequence[Text]) -> None:
        """Asserts that every page is where the texts say, and in one place only."""
        for lane in range(self.lanes):
            held = [p for t in running if t.lane == lane for p in t.pages]
            assert self._readers[lane] == np.bincount(held, minlength=self.pages).tolist()
            nobody = [p for d in range(self.pieces) for p in (*self._free[lane][d], *self._idle[lane][d])]
            assert sorted([*set(held), *nobody]) == list(range(self.pages))
            rows = [t.row for t in running if t.lane == lane]
            assert sorted([*rows, *self._rows[lane]]) == list(range(self.rows))
            assert all(self._page_of[lane][d] == p for p, d in self._digest_of[lane].items())
            assert len(self._page_of[lane]) == len(self._digest_of[lane])
            assert all(t.running and t.lane == lane for t in self._coming[lane].values())

    # Within

    def _entries(self, tokens: int) -> int:
        return -(-tokens // self.page)

    def _need(self, entries: Iterable[int]) -> list[int]:
        """Pages on each device for these entries."""
        need = [0] * self.pieces
        for i in entries:
            need[i % self.pieces] += 1
        return need

    def _room(self, lane: int) -> int:
        return sum(self.free(lane, d) for d in range(self.pieces))

    def _digests(self, text: Text, full: int) -> list[bytes]:
        """Of its first `full` pages."""
        while len(text.digests) < full:
            i = len(text.digests) * self.page
            own = np.asarray(text.tokens[i : i + self.page], np.int64).tobytes()
            before = text.digests[-1] if text.digests else b""
            text.digests.append(hashlib.blake2b(before + own, digest_size=16).digest())
        return text.digests[:full]

    def _shares(self, text: Text) -> bool:
        """Whether it may begin with pages of others: a prompt that is scored has to be computed."""
        return self.sharing and not text.request.scored

    def _known(self, text: Text, lane: int) -> list[int]:
        """Pages of its beginning that are there already."""
        known: list[int] = []
        if self._shares(text):
            for digest in self._digests(text, (len(text.tokens) - 1) // self.page):
                page = self._page_of[lane].get(digest)
                if page is None:
                    break
                known.append(page)
        return known

    def _enter(self, text: Text, lane: int, known: list[int]) -> None:
        text.lane, text.row, text.kept = lane, self._rows[lane].pop(), len(known) * self.page
        text.pages = list(known)
        for i, page in enumerate(known):
            if not self._readers[lane][page]:
                del self._idle[lane][i % self.pieces][page]
            self._readers[lane][page] += 1
        self.shared_tokens += text.kept
        text.learned = len(known)
        if self.sharing:
            for digest in self._digests(text, len(text.tokens) // self.page)[len(known) :]:
                self._coming[lane].setdefault(digest, text)
        self.grow(text, len(text.tokens))

    def _forget_coming(self, text: Text) -> None:
        for digest in text.digests[text.learned :]:
            if self._coming[text.lane].get(digest) is text:
                del self._coming[text.lane][digest]

    def _take(self, lane: int, piece: int) -> int:
        if self._free[lane][piece]:
            page = self._free[lane][piece].pop()
        else:
            page, _ = self._idle[lane][piece].popitem(last=False)
            del self._page_of[lane][self._digest_of[lane].pop(page)]
        self._readers[lane][page] = 1
        return page
