"""FLOPs of a training step's model, by two formulas. Nothing here imports JAX."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np


def visible_pairs(lengths: Sequence[int]) -> int:
    """Return the unmasked pairs of a query and a key under a causal mask within documents of these lengths."""
    return sum(n * (n + 1) // 2 for n in lengths)


def document_lengths(segment_ids: np.ndarray) -> list[int]:
    """Return the lengths of the documents of packed rows, from segment ids (B, S); 0 is padding."""
    return [int(n) for row in segment_ids for n in np.unique(row[row > 0], return_counts=True)[1]]


def model_flops(model: Any, tokens: int, lengths: Sequence[int]) -> int:
    """Return the FLOPs of a step that the model needs; recomputation does not count.

    A multiply-add is two FLOPs, a backward pass costs two forward passes. Products with weights count for every token
    (2 for each weight; the output head counts, the embedding lookup does not). Attention counts `visible_pairs` only:
    2 D for the score and 2 D for the weighted sum of each pair in each head of each layer. Norms and softmax count as
    zero.

    Args:
      model: a `TransformerConfig` without windows.
      tokens: tokens of the step.
      lengths: lengths of its documents, or of its rows where a row is one document.
    """
    products = model.product_flops(1, 1)  # of one token, which sees one pair: itself
    of_pair = products["scores"] + products["attn_out"]
    of_token = sum(products.values()) - of_pair
    return 3 * (tokens * of_token + visible_pairs(lengths) * of_pair)


def palm_flops(model: Any, tokens: int, seq: int) -> int:
    """Return the FLOPs by the formula of Chowdhery et al. 2022 (PaLM, appendix B): 6 N + 12 L H Q T a token.

    N are all parameters, and attention counts the whole square of the row, causal or not. Most published MFU values
    use this formula.
    """
    z = model.sizes
    return tokens * (6 * model.param_count() + 12 * model.depth * z.heads * z.head_dim * seq)
