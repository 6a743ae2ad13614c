"""Packing a step: tokens of many sequences side by side in arrays of a few compiled sizes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Array, Bool, Int, UInt8

from jaxscale.infer.engine.request import SequenceState
from jaxscale.infer.sampling import Sampling, SamplingArrays, seen_bits
from jaxscale.nn import Group, Packed

QUERIES = 32
"""Tokens of a prompt's chunk that attend in one block."""


class StepInputs(NamedTuple):
    """The inputs of a step on the device, NumPy arrays. The batch dimension is that of the cache's shards.

    Args:
      tokens: ids, int32 (shards, columns).
      step: slot and position of each token.
      columns: the last column of each sequence whose next token is chosen, int32 (shards, n); 0 for unused entries.
      at: position of that next token in its sequence, int32 (shards, n).
      remaining: tokens that the sequence may still get, int32 (shards, n); 0 for unused entries.
      sampling: settings of each, arrays (shards, n).
      ends: end-of-text token ids, int32; [-1] for none.
      ignore_end: which sequences continue after such an id, bool (shards, n).
      with_top: whether any sequence wants the likeliest tokens, bool scalar.
      seen: which token ids each sequence contains (`seen_bits`), uint8 (shards, n, bytes).
    """

    tokens: Int[Array, "b s"]
    step: Packed
    columns: Int[Array, "b n"]
    at: Int[Array, "b n"]
    remaining: Int[Array, "b n"]
    sampling: SamplingArrays
    ends: Int[Array, " e"]
    ignore_end: Bool[Array, "b n"]
    with_top: Bool[Array, ""]
    seen: UInt8[Array, "b n w"]


class Shape(NamedTuple):
    """The sizes for which a step is compiled.

    Args:
      width: columns.
      blocks: blocks of `QUERIES` tokens for chunks of prompts; 0 for a step where every sequence has one token.
    """

    width: int
    blocks: int


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The few sizes for which steps are compiled.

    Args:
      shards: shards of the cache.
      slots: slots of each shard.
      budget: the most tokens of a shard in a step.
      entries: pages of a sequence of full length; 0 for a cache without pages.
    """

    shards: int
    slots: int
    budget: int
    entries: int

    def single(self, n: int) -> int:
        """Return the columns for sequences of one token each.

        Args:
          n: the number of sequences.
        """
        return _next_size(n, 1, 2, self.slots)

    def many(self, n: int) -> int:
        """Return the columns for tokens of which some are chunks of prompts.

        Args:
          n: the number of tokens.
        """
        return _next_size(n, 16, 2, self.budget)

    def blocks(self, n: int, width: int) -> int:
        """Return the compiled number of blocks: enough for one chunk, or for one chunk of every slot.

        Args:
          n: blocks of `QUERIES` tokens that are needed.
          width: columns of the step.
        """
        one = -(-width // QUERIES)
        return one if n <= one else one + self.slots

    def of(self, parts: Sequence[tuple[SequenceState, int]]) -> Shape:
        """Return the shape of a step.

        Args:
          parts: sequences and how many tokens of each.
        """
        tokens, sequences, blocks = ([0] * self.shards for _ in range(3))
        for sequence, n in parts:
            tokens[sequence.shard] += n
            sequences[sequence.shard] += 1
            blocks[sequence.shard] += -(-n // QUERIES) if n > 1 else 0
        if all(sequence.uncached == 1 for sequence, _ in parts):
            return Shape(self.single(max(sequences)), 0)
        width = self.many(max(tokens))
        return Shape(width, self.blocks(max(blocks), width))

    def all(self) -> Iterator[Shape]:
        """Yield every shape that a step can have."""
        yield from (Shape(n, 0) for n in _ladder(1, 2, self.slots))
        for width in _ladder(16, 2, self.budget):
            yield from (Shape(width, self.blocks(n, width)) for n in (1, width))


def _ladder(first: int, factor: int, last: int) -> Iterator[int]:
    while first < last:
        yield first
        first *= factor
    yield last


def _next_size(n: int, first: int, factor: int, last: int) -> int:
    return next(size for size in _ladder(first, factor, last) if size >= n)


def pack(
    parts: Sequence[tuple[SequenceState, int]], shape: Shape, sizes: Sizes, vocab: int, ends: Any
) -> tuple[StepInputs, list[tuple[SequenceState, int, int]]]:
    """Pack a step's sequences into arrays.

    Args:
      parts: sequences and how many tokens of each.
      shape: one of the shapes of `sizes`.
      sizes: the compiled sizes.
      vocab: the vocabulary's size.
      ends: end-of-text token ids, int32.

    Returns:
      the inputs; and for each sequence whose next token is chosen its shard and its index in `StepInputs.columns`.
    """
    by_shard: list[list[tuple[SequenceState, int]]] = [[] for _ in range(sizes.shards)]
    for sequence, n in parts:
        by_shard[sequence.shard].append((sequence, n))
    width, blocks = shape
    places = sizes.slots if blocks else width
    by_slot = places == sizes.slots  # a sequence's place is its slot, so that the cache is read in order

    def filled(value: int, *shape: int) -> Any:  # `Any`: NumPy arrays where the types say JAX arrays
        return np.full((sizes.shards, *shape), value, np.int32)

    tokens, slot_of, positions = filled(0, width), filled(-1, width), filled(-1, width)
    single, single_slots = filled(width, places, 1), filled(0, places)
    block, block_slots = filled(width, blocks, QUERIES), filled(0, blocks)
    tables = filled(-1, sizes.slots, sizes.entries)
    columns, at, remaining = filled(0, places), filled(0, places), filled(0, places)
    samplings = [[_UNUSED] * places for _ in range(sizes.shards)]
    chosen = []
    for shard, own in enumerate(by_shard):
        column = used = 0
        for i, (sequence, n) in enumerate(own):
            slot, cached = sequence.slot, sequence.cached
            place = slot if by_slot else i
            if by_slot and not blocks:
                column = slot
            tokens[shard, column : column + n] = sequence.tokens[cached : cached + n]
            slot_of[shard, column : column + n] = slot
            positions[shard, column : column + n] = range(cached, cached + n)
            tables[shard, slot, : len(sequence.pages)] = sequence.pages
            if n == 1:
                single[shard, place], single_slots[shard, place] = column, slot
            for first in range(0, n if n > 1 else 0, QUERIES):
                some = min(QUERIES, n - first)
                block[shard, used, :some] = range(column + first, column + first + some)
                block_slots[shard, used] = slot
                used += 1
            if n == sequence.uncached:
                columns[shard, place], at[shard, place] = column + n - 1, len(sequence.tokens)
                remaining[shard, place], samplings[shard][place] = sequence.remaining, sequence.request.sampling
                chosen.append((sequence, shard, place))
            column += n
    groups: tuple[Group, ...] = (Group(single, None if by_slot else single_slots),)
    if blocks:
        groups += (Group(block, block_slots),)
    step = Packed(slot_of, positions, groups, tables if sizes.entries else None)
    flat = [s for own in samplings for s in own]
    sampling = SamplingArrays(*(x.reshape(sizes.shards, places) for x in SamplingArrays.of(flat, vocab)))
    ignore_end: Any = np.asarray([s.ignore_end for s in flat]).reshape(sizes.shards, places)
    with_top: Any = np.asarray(any(s.logprobs for s in flat))
    seen = _seen(chosen, sizes.shards, places, vocab)
    return StepInputs(tokens, step, columns, at, remaining, sampling, ends, ignore_end, with_top, seen), chosen


def sampling_inputs(inputs: StepInputs) -> StepInputs:
    """Return only what choosing the next tokens needs, whose shapes are the same in all steps with chunks.

    Args:
      inputs: of a step.
    """
    return inputs._replace(tokens=None, step=None, columns=None, remaining=None, ends=None, ignore_end=None)  # type: ignore[arg-type]


def targets_of(
    parts: Sequence[tuple[SequenceState, int]], shape: Shape, shards: int
) -> tuple[Any, list[tuple[SequenceState, int, int, int]]]:
    """Return the next token of each column of a prompt that is scored.

    Args:
      parts: as for `pack`.
      shape: as for `pack`.
      shards: shards of the cache.

    Returns:
      ids, int32 (shards, columns), 0 where nothing is scored; and sequence, shard, first column and number of columns
      of each stretch that is.
    """
    targets: Any = np.zeros((shards, shape.width), np.int32)
    used, stretches = [0] * shards, []
    for sequence, n in parts:
        column, count = used[sequence.shard], min(n, sequence.unscored)
        if count:
            following = sequence.tokens[sequence.cached + 1 : sequence.cached + 1 + count]
            targets[sequence.shard, column : column + count] = following
            stretches.append((sequence, sequence.shard, column, count))
        used[sequence.shard] += n
    return targets, stretches


def _seen(chosen: Sequence[tuple[SequenceState, int, int]], shards: int, places: int, vocab: int) -> Any:
    seen = np.zeros((shards, places, -(-vocab // 8)), np.uint8)
    for sequence, shard, place in chosen:
        seen[shard, place] = seen_bits(sequence.tokens, sequence.request.sampling, vocab)
    return seen


_UNUSED = Sampling(temperature=0.0)
