"""A step's texts as arrays: tokens of many texts side by side, with no padding but up to the next compiled size."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Array, Bool, Int, UInt8

from jaxscale.infer.engine.request import Text
from jaxscale.infer.sampling import Choices, Sampling, seen_bits
from jaxscale.nn import Group, Packed

QUERIES = 32
"""Tokens of a chunk that attend side by side."""


class Told(NamedTuple):
    """What a step is told, NumPy arrays.

    Args:
      tokens: ids.
      step: whose they are.
      columns: which of a lane's tokens have a next one chosen; 0 where fewer do.
      at: place of that one in its text.
      left: how many tokens the text may still get, 0 where there is no text.
      choices: how each is chosen, (lanes, n) each.
      ends: ids that end a text, -1 where there are fewer.
      on: texts that go on after such an id.
      top: whether somebody wants the likeliest tokens.
      seen: a bit for each id, see `seen_bits`: whether it is in the text already; 0 where nothing is penalised.
    """

    tokens: Int[Array, "b s"]
    step: Packed
    columns: Int[Array, "b n"]
    at: Int[Array, "b n"]
    left: Int[Array, "b n"]
    choices: Choices
    ends: Int[Array, " e"]
    on: Bool[Array, "b n"]
    top: Bool[Array, ""]
    seen: UInt8[Array, "b n w"]


class Shape(NamedTuple):
    """What a step is compiled for.

    Args:
      width: columns.
      blocks: of `QUERIES` tokens of a chunk; 0 where every text has one token.
    """

    width: int
    blocks: int


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The sizes that steps are compiled for, so that they are few.

    Args:
      lanes, rows: of the cache, the rows of each lane.
      budget: the most tokens of a lane in a step.
      entries: pages of a text of full length; 0 for a cache without pages.
    """

    lanes: int
    rows: int
    budget: int
    entries: int

    def single(self, n: int) -> int:
        """Columns for n texts of one token each."""
        return _next(n, 1, 2, self.rows)

    def many(self, n: int) -> int:
        """Columns for n tokens, of chunks among them."""
        return _next(n, 16, 2, self.budget)

    def blocks(self, n: int, width: int) -> int:
        """Blocks of `QUERIES` for n of them in so many columns: those of one chunk, or of one for each row."""
        one = -(-width // QUERIES)
        return one if n <= one else one + self.rows

    def of(self, parts: Sequence[tuple[Text, int]]) -> Shape:
        """That of a step."""
        tokens, texts, blocks = ([0] * self.lanes for _ in range(3))
        for text, n in parts:
            tokens[text.lane] += n
            texts[text.lane] += 1
            blocks[text.lane] += -(-n // QUERIES) if n > 1 else 0
        if all(text.behind == 1 for text, _ in parts):
            return Shape(self.single(max(texts)), 0)
        width = self.many(max(tokens))
        return Shape(width, self.blocks(max(blocks), width))

    def all(self) -> Iterator[Shape]:
        """Every one that a step can have."""
        yield from (Shape(n, 0) for n in _ladder(1, 2, self.rows))
        for width in _ladder(16, 2, self.budget):
            yield from (Shape(width, self.blocks(n, width)) for n in (1, width))


def _ladder(first: int, factor: int, last: int) -> Iterator[int]:
    while first < last:
        yield first
        first *= factor
    yield last


def _next(n: int, first: int, factor: int, last: int) -> int:
    return next(size for size in _ladder(first, factor, last) if size >= n)


def pack(
    parts: Sequence[tuple[Text, int]], shape: Shape, sizes: Sizes, vocab: int, ends: Any
) -> tuple[Told, list[tuple[Text, int, int]]]:
    """A step's arrays; and of each text whose next token is chosen its lane and its place among those of the lane.

    Args:
      parts: texts and how many tokens of each.
      shape: one of `sizes`.
      sizes: that are compiled.
      vocab: how many ids there are.
      ends: ids that end a text.
    """
    by_lane: list[list[tuple[Text, int]]] = [[] for _ in range(sizes.lanes)]
    for text, n in parts:
        by_lane[text.lane].append((text, n))
    width, blocks = shape
    places = sizes.rows if blocks else width
    by_row = places == sizes.rows  # each text stands at its row's number, so that the cache is read in order

    def filled(value: int, *shape: int) -> Any:  # which the device takes as an array
        return np.full((sizes.lanes, *shape), value, np.int32)

    tokens, row_of, positions = filled(0, width), filled(-1, width), filled(-1, width)
    single, single_rows = filled(width, places, 1), filled(0, places)
    block, block_rows = filled(width, blocks, QUERIES), filled(0, blocks)
    tables = filled(-1, sizes.rows, sizes.entries)
    columns, at, left = filled(0, places), filled(0, places), filled(0, places)
    samplings = [[_NOBODY] * places for _ in range(sizes.lanes)]
    chosen = []
    for lane, own in enumerate(by_lane):
        column = taken = 0
        for i, (text, n) in enumerate(own):
            place = text.row if by_row else i
            if by_row and not blocks:
                column = text.row
            tokens[lane, column : column + n] = text.tokens[text.kept : text.kept + n]
            row_of[lane, column : column + n] = text.row
            positions[lane, column : column + n] = range(text.kept, text.kept + n)
            tables[lane, text.row, : len(text.pages)] = text.pages
            if n == 1:
                single[lane, place], single_rows[lane, place] = column, text.row
            for first in range(0, n if n > 1 else 0, QUERIES):
                some = min(QUERIES, n - first)
                block[lane, taken, :some] = range(column + first, column + first + some)
                block_rows[lane, taken] = text.row
                taken += 1
            if n == text.behind:
                columns[lane, place], at[lane, place] = column + n - 1, len(text.tokens)
                left[lane, place], samplings[lane][place] = text.left, text.request.sampling
                chosen.append((text, lane, place))
            column += n
    groups: tuple[Group, ...] = (Group(single, None if by_row else single_rows),)
    if blocks:
        groups += (Group(block, block_rows),)
    step = Packed(row_of, positions, groups, tables if sizes.entries else None)
    flat = [s for lane in samplings for s in lane]
    choices = Choices(*(x.reshape(sizes.lanes, places) for x in Choices.of(flat, vocab)))
    on: Any = np.asarray([s.ignore_end for s in flat]).reshape(sizes.lanes, places)
    top: Any = np.asarray(any(s.logprobs for s in flat))
    told = Told(tokens, step, columns, at, left, choices, ends, on, top, _seen(chosen, sizes.lanes, places, vocab))
    return told, chosen


def how_to_pick(told: Told) -> Told:
    """What choosing the next tokens needs to know, which has the same shapes in every step with chunks."""
    return told._replace(tokens=None, step=None, columns=None, left=None, ends=None, on=None)  # type: ignore[arg-type]


def targets_of(
    parts: Sequence[tuple[Text, int]], shape: Shape, lanes: int
) -> tuple[Any, list[tuple[Text, int, int, int]]]:
    """Which token of a prompt follows each column that `pack` made of them, 0 where nobody asks.

    Returns:
      ids, int32 (lanes, width); and text, lane, first column and number of each stretch of them.
    """
    targets: Any = np.zeros((lanes, shape.width), np.int32)
    used, stretches = [0] * lanes, []
    for text, n in parts:
        column, count = used[text.lane], min(n, text.unscored)
        if count:
            targets[text.lane, column : column + count] = text.tokens[text.kept + 1 : text.kept + 1 + count]
            stretches.append((text, text.lane, column, count))
        used[text.lane] += n
    return targets, stretches


def _seen(chosen: Sequence[tuple[Text, int, int]], lanes: int, places: int, vocab: int) -> Any:
    seen = np.zeros((lanes, places, -(-vocab // 8)), np.uint8)
    for text, lane, place in chosen:
        seen[lane, place] = seen_bits(text.tokens, text.request.sampling, vocab)
    return seen


_NOBODY = Sampling(temperature=0.0)
