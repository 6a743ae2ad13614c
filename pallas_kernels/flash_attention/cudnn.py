"""cuDNN's attention by way of `jax.nn`, to be compared with; what it would ignore or misread it refuses."""

from __future__ import annotations

from typing import Any

import jax

from pallas_kernels.dispatch import Target
from pallas_kernels.flash_attention.inputs import Inputs, Score
from pallas_kernels.flash_attention.masks import Mask

__all__ = ["run", "supported"]


def supported(
    target: Target,
    mask: Mask,
    score: Score,
    *,
    return_lse: bool,
    segments: bool,
    positions: bool,
    dtype: str,
    q: tuple[int, ...],
    k: tuple[int, ...],
    v: tuple[int, ...],
    **_: Any,
) -> str | None:
    """Why cuDNN cannot compute this here, or `None`."""
    refusals = (
        (target.interpret, "cuDNN is a library for GPUs and has no interpreter"),
        (segments, "cuDNN would ignore segment ids"),
        (positions, "cuDNN knows no positions, only the order tokens stand in"),
        (score.kind == "sigmoid", "cuDNN's weights are a softmax, not a sigmoid"),
        (score.softcap is not None, "cuDNN has no soft-cap here"),
        (return_lse, "jax.nn does not hand out cuDNN's log-sum-exp"),
        (mask.blocks is not None, "cuDNN has no block-sparse mask here"),
        (mask.window is not None and not mask.causal, "cuDNN's window is causal"),
        (mask.causal and q[1] != k[1], f"cuDNN would align {q[1]} queries with the first of {k[1]} keys, not the last"),
        (dtype == "float32", "cuDNN takes bfloat16 or float16, not float32"),
        (q[3] != v[3], f"cuDNN needs values as wide as keys, not {v[3]} and {q[3]}"),
        (q[3] % 8 > 0, f"cuDNN needs a head_dim that is a multiple of 8, not {q[3]}"),
    )
    return next((f"{why}; use 'xla'" for refused, why in refusals if refused), None)


def run(inputs: Inputs, mask: Mask, score: Score) -> jax.Array:
    """The output alone; its gradient is cuDNN's."""
    return jax.nn.dot_product_attention(
        inputs.q,
        inputs.k,
        inputs.v,
        inputs.bias if inputs.bias is None else inputs.bias.astype(inputs.q.dtype),
        scale=score.scale,
        is_causal=mask.causal,
        local_window_size=None if mask.window is None else (mask.window - 1, 0),
        implementation="cudnn",
    )
