"""Orders the rows of a step such that devices have equal work in causal attention.

Packed rows have as many tokens each, but a row that is one document has many more pairs of a query and a key than a row
of many: `sum of n * (n + 1) / 2` over its documents of n tokens. Where devices wait for each other, the one with the
longest documents decides (Wang et al. 2025, "WLB-LLM: Workload-Balanced 4D Parallelism for Large Language Model
Training", arXiv:2503.17924). No row changes its step, so a gradient that is a sum over rows is the same.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int64

from jaxscale.data.batch import Source
from jaxscale.errors import DataError


@runtime_checkable
class CountsPairs(Protocol):
    """A source that knows the work of its rows' attention without reading them."""

    def pairs(self, ids: Int64[np.ndarray, " b"]) -> Int64[np.ndarray, " b"]:
        """Return the pairs of a query and a key that causal attention within documents has in each row.

        Args:
          ids: row numbers.
        """
        ...


def check_counts_pairs(source: Source) -> CountsPairs:
    """Return the source, if it counts pairs.

    Args:
      source: the rows.

    Raises:
      DataError: it, or a part of a mixture, does not.
    """
    for part in getattr(source, "sources", ()):
        check_counts_pairs(part)
    if not isinstance(source, CountsPairs):
        raise DataError(
            f"train.even_rows needs the lengths of packed documents, which the rows of '{source.name}' do not have; "
            "set train.even_rows = False"
        )
    return source


def even_order(pairs: Int64[np.ndarray, " b"], micro_batches: int = 1, in_pipeline: int = 1) -> Int64[np.ndarray, " b"]:
    """Return an order of rows in which consecutive blocks of each micro-batch have about equal sums of pairs.

    Micro-batches get rows of like pairs, except those of a pipeline, whose stages work at several at once: they get
    equal sums, too. Each is cut into equal blocks, and these again, by the prime factors of its rows: rows, sorted by
    pairs, are dealt out to the blocks to and fro. So 2, 4, 8, ... devices are all even, and the order does not depend
    on their number.

    Args:
      pairs: of each row.
      micro_batches: which divide the rows; micro-batch m has rows m, m + micro_batches, ... of the order, as
        `jaxscale.step.pipeline.split_rows` takes them.
      in_pipeline: micro-batches of a pipeline into which each of them is split in the same way.

    Returns:
      Row numbers, (b,).
    """
    blocks = np.argsort(-pairs, kind="stable").reshape(micro_batches, -1)
    for p in _factors(in_pipeline) + _factors(blocks.shape[1] // in_pipeline):
        count, size = blocks.shape
        dealt = blocks.reshape(count, size // p, p).copy()
        dealt[:, 1::2] = dealt[:, 1::2, ::-1]
        blocks = dealt.swapaxes(1, 2).reshape(count * p, size // p)  # each sorted as before
    return blocks.reshape(micro_batches, in_pipeline, -1).transpose(2, 1, 0).reshape(-1)


def _factors(n: int) -> list[int]:
    """Return the prime factors of a number, the smallest first."""
    factors, p = [], 2
    while n > 1:
        while n % p == 0:
            factors.append(p)
            n //= p
        p += 1
    return factors
