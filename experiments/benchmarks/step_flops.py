"""The arithmetic that a training step's model asks for, by two formulas. Nothing here imports JAX."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np


def visible_pairs(lengths: Sequence[int]) -> int:
    """Pairs of a query and a key that a causal mask within documents of these lengths leaves."""
    return sum(n * (n + 1) // 2 for n in lengths)


def document_lengths(segment_ids: np.ndarray) -> list[int]:
    """Lengths of the documents of packed rows, (B, S) ids; 0 is padding."""
    return [int(n) for row in segment_ids for n in np.unique(row[row > 0], return_counts=True)[1]]


def model_flops(model: Any, tokens: int, lengths: Sequence[int]) -> int:
    """FLOPs of a step that the model asks for, whatever is computed twice.

    A multiply-add is two, a backward pass two forward ones. Products with weights count for every token (2 for each
    weight; the head's among them, the embedding's lookup not); attention counts `visible_pairs` alone, 2 D for the
    score and 2 D for the mixing of each pair in each head of each layer. Norms and softmax count nothing.

    Args:
      model: a `TransformerConfig` without windows.
      tokens: of the step.
      lengths: of its documents; of rows that are one text, the rows'.
    """
    products = model.products(1, 1)  # of one token, which sees one pair: itself
    of_pair = products["scores"] + products["attn_out"]
    of_token = sum(products.values()) - of_pair
    return 3 * (tokens * of_token + visible_pairs(lengths) * of_pair)


def palm_flops(model: Any, tokens: int, seq: int) -> int:
    """The same as Chowdhery et al. 2022 (PaLM, appendix B) count: 6 N + 12 L H Q T a token.

    N are all parameters, and attention is the whole square of the row, causal or not: what most published shares of a
    data sheet rest on.
    """
    z = model.sizes
    return tokens * (6 * model.param_count() + 12 * model.depth * z.heads * z.head_dim * seq)
