"""Attention by cuDNN, called through JAX, for NVIDIA GPUs without our Hopper kernels, and where it is faster than they.

`jax.nn.dot_product_attention(..., implementation="cudnn")` rounds the log-sum-exp to 16 bits, and its residuals have no
names, so that a `jax.checkpoint` policy would run its forward pass again. The two rules of its gradient return and take
that log-sum-exp in float32. They are private: where a version of JAX lacks them, or gives them other parameters,
`supported` returns a sentence about it and XLA computes.

Why it comes before XLA: cuDNN is about as fast as FlashAttention-2 on an A100 (135 against 136 TFLOP/s forward, 69
against 79 with the gradient) and faster on compute capability 8.6 (62 and 51; 25 and 24) and 8.9 (106 and 86; 28 and
24), medians of https://github.com/pytorch/pytorch/pull/192799. On an H100, attention that stores its scores reaches 52
to 73 TFLOP/s forward and cuDNN 335 to 413, from 512 to 16k tokens (FlashAttention-3, Shah et al. 2024, width 64).
No GPU without our kernels has run this file; an H200 has, where its results were right (jax 0.11.2).
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import dispatch
from pallas_kernels.dispatch import HOPPER, Target
from pallas_kernels.flash_attention.inputs import Inputs, Score, Settings
from pallas_kernels.flash_attention.masks import Mask

__all__ = ["faster", "run", "supported"]

DTYPES = ("bfloat16", "float16")
WIDEST = 128
"""Widest head that every such GPU supports, forward and backward."""
LEAST = 90800
"""The oldest cuDNN that JAX's own packages require: 9.8.0."""
BROKEN = (91000, 91001)
"""Versions whose attention NVIDIA's frontend refuses because of known bugs."""

_ARRAYS = ("query", "key", "value")
_UNUSED = ("bias", "q_seqlen", "kv_seqlen", "q_offsets", "kv_offsets", "page_table_k", "page_table_v", "score_mod_args")
_OPTIONS = (
    "scale",
    "seed",
    "dropout_rate",
    "variadic_args",
    "mask_type",
    "layout",
    "sliding_window_length",
    "score_mod",
    "cudnn_version",
    "return_residual",
)
"""Parameters of JAX's two rules, from jax 0.10 to 0.12; the first of the options follows all arrays."""
_AMPERE = re.compile(
    r"\b(A(2|10G?|16|30X?|40|100X?|800)|RTX (A\d+|[345]0[5-9]0|PRO)|Ada|L(2|4|20|40S?)|G?B(10|100|200|300))\b"
)
"""What the device kind of a GPU of compute capability 8.0 or more contains, except Hopper."""


def supported(
    target: Target,
    *,
    settings: Settings,
    q: tuple[int, ...],
    k: tuple[int, ...],
    v: tuple[int, ...],
    bias: tuple[int, ...] | None,
    segments: bool,
    positions: bool,
    dtype: str,
    **_: Any,
) -> str | None:
    """Return why cuDNN does not serve a case, or `None`; the same for both directions."""
    mask, score = settings.mask, settings.score
    s, t, d, dv = q[1], k[1], q[3], v[3]
    refusals = (
        (dtype not in DTYPES, f"cuDNN takes {' and '.join(DTYPES)}, and {dtype} is left to XLA"),
        (
            segments,
            "with a mask cuDNN would compute all tiles of packed rows; segment ids are left to XLA, which skips tiles",
        ),
        (positions, "cuDNN's masks use the order of the tokens; positions are left to XLA"),
        (bias is not None, f"cuDNN would round a bias to {dtype}; it is left to XLA"),
        (score.kind != "softmax", f"cuDNN's weights are a softmax; {score.kind} is left to XLA"),
        (score.softcap is not None, "JAX's call of cuDNN has no soft-cap; it is left to XLA"),
        (score.scale <= 0, f"cuDNN is tested with a positive scale only; {score.scale} is left to XLA"),
        (mask.blocks is not None, "JAX's call of cuDNN has no block-sparse mask; blocks are left to XLA"),
        (
            mask.window is not None and not mask.causal,
            "cuDNN's window is causal; a window to both sides is left to XLA",
        ),
        (mask.causal and s != t, f"cuDNN would align {s} queries with the first of {t} keys, not the last; XLA does"),
        (score.dropout > 0, "cuDNN's dropout would differ between layouts; dropout is left to XLA"),
        (settings.return_lse, "cuDNN has no gradient of the log-sum-exp; return_lse is left to XLA"),
        (settings.deterministic, "cuDNN's gradient may differ between runs; deterministic=True is left to XLA"),
        (d != dv, f"cuDNN needs values as wide as keys; widths {dv} and {d} are left to XLA"),
        (d % 8 > 0 or d > WIDEST, f"cuDNN takes head widths that are multiples of 8 up to {WIDEST}, not {d}"),
        (s == 1, "cuDNN has no gradient of a single query, which is left to XLA"),
        (s % 2 > 0 or t % 2 > 0, f"JAX calls cuDNN with even lengths; {s} queries and {t} keys are left to XLA"),
        (0 in q, "there is nothing to compute"),
    )
    return _missing(target) or next((why for refused, why in refusals if refused), None)


def faster(settings: Settings, q: tuple[int, ...], v: tuple[int, ...]) -> bool:
    """Return whether cuDNN was measured to be faster than our kernel on the Hopper GPU in scope, supported or not.

    Causal, 16 heads of width 128 on as many, on one H200: 1.13 and 1.18 times forward at 8192 and 16384 tokens, 1.27
    and 1.28 backward. At width 64 it is 1.06 to 1.10 times as fast forward and 0.95 to 1.00 backward (an H100).
    """
    (s, h, d), kv, mask = q[1:], v[2], settings.mask
    hopper = any(name in dispatch.device().kind for name in HOPPER)
    return hopper and mask.causal and mask.window is None and d == 128 and h == kv and s >= 4096


def run(target: Target, inputs: Inputs, *others: Any, direction: str, settings: Settings, **_: Any) -> Any:
    """Call `forward` or `backward`."""
    if direction == "forward":
        return forward(inputs, settings.mask, settings.score)
    out, lse, dout, _ = others  # the last is the cotangent of a log-sum-exp that the caller does not get
    return backward(inputs, settings.mask, settings.score, out, lse, dout)


def forward(inputs: Inputs, mask: Mask, score: Score) -> tuple[jax.Array, jax.Array]:
    """Return the output in q's dtype, and the float32 log-sum-exp (B, S, H)."""

    def call(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, ...]:
        arrays, options = _arguments((q, k, v), mask, score)
        return tuple(_binding()._dot_product_attention_fwd_rule(*arrays, *options)[0])

    out, lse = _in_one_batch(call)(inputs.q, inputs.k, inputs.v)
    return out, lse.swapaxes(1, 2)


def backward(
    inputs: Inputs, mask: Mask, score: Score, out: jax.Array, lse: jax.Array, dout: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, None]:
    """Return the cotangents of q, k and v, and `None` for a bias."""

    def call(q: jax.Array, k: jax.Array, v: jax.Array, *rest: jax.Array) -> tuple[jax.Array, ...]:
        out, lse, dout = rest
        arrays, options = _arguments((q, k, v), mask, score)
        return tuple(_binding()._dot_product_attention_bwd_rule(*options, (*arrays, lse, out), (dout,))[:3])

    dq, dk, dv = _in_one_batch(call)(inputs.q, inputs.k, inputs.v, out, lse.swapaxes(1, 2), dout)
    return dq, dk, dv, None


def _in_one_batch(call: Callable[..., tuple[jax.Array, ...]]) -> Callable[..., tuple[jax.Array, ...]]:
    """Make `vmap` of `call`, whose arrays all begin with the batch, enlarge the batch.

    JAX's own rule for `vmap` fails where some of the arrays have no such axis (0.10), or one that is not the first.
    """
    batched = jax.custom_batching.custom_vmap(call)

    def under_vmap(size: int, mapped: list[bool], *arrays: jax.Array) -> tuple[tuple[jax.Array, ...], tuple[bool, ...]]:
        full = (
            x if own else jnp.broadcast_to(x, (size, *x.shape)) for x, own in zip(arrays, mapped, strict=True)
        )  # fmt: skip
        results = batched(*(x.reshape(size * x.shape[1], *x.shape[2:]) for x in full))
        split = tuple(y.reshape(size, y.shape[0] // size, *y.shape[1:]) for y in results)
        return split, (True,) * len(split)

    batched.def_vmap(under_vmap)
    return batched


# ---- JAX's binding


def _arguments(arrays: tuple[jax.Array, ...], mask: Mask, score: Score) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Return the arrays and the options of both rules in order, as `jax.nn.dot_product_attention` passes them."""
    binding, (q, k, *_) = _binding(), arrays
    values: dict[str, Any] = {
        **dict(zip(_ARRAYS, arrays, strict=True)),
        **dict.fromkeys(_UNUSED, jnp.zeros(0, q.dtype)),
        "score_mod_args": (),
        "scale": score.scale,
        "seed": 42,  # unused without dropout
        "dropout_rate": 0.0,
        "variadic_args": (False, False),  # no bias, and no gradient of it
        "mask_type": binding.MaskType.CAUSAL if mask.causal else binding.MaskType.NO_MASK,
        "layout": binding.AttentionLayout.BTNH.value,
        # The query's own position counts, as in `Mask`. A window of all keys is no window.
        "sliding_window_length": mask.window if mask.window is not None and mask.window < k.shape[1] else None,
        "score_mod": None,
        "cudnn_version": binding.check_cudnn_version(),
        "return_residual": True,
    }
    names = _parameters(binding._dot_product_attention_fwd_rule)
    first = names.index(_OPTIONS[0])
    return tuple(values[n] for n in names[:first]), tuple(values[n] for n in names[first:])


def _binding() -> Any:
    """Return JAX's module that calls cuDNN."""
    return importlib.import_module("jax._src.cudnn.fused_attention_stablehlo")


def _parameters(rule: Callable[..., Any]) -> list[str]:
    return list(inspect.signature(rule).parameters)


def _missing(target: Target) -> str | None:
    """Return why cuDNN's attention cannot be called for `target` at all, or `None`."""
    if target.interpret:
        return "cuDNN is a library for GPUs and has no interpreter"
    kind = target.kind or "an unknown device"
    if not _AMPERE.search(kind) and not any(name in kind for name in HOPPER):
        return f"cuDNN's attention is for NVIDIA GPUs from Ampere on (A100, RTX 3090), and this is {kind}"
    mesh = jax.sharding.get_abstract_mesh()
    if not mesh.empty and mesh.abstract_device is None:
        return "JAX lowers calls of cuDNN only for devices that exist, and the mesh in scope is abstract"
    if not _present(kind):
        return f"JAX calls cuDNN only for a GPU of this process, which has no {kind}"
    if why := _unknown_rules():
        return why
    try:
        version = _binding().check_cudnn_version()
    except RuntimeError:
        return "JAX finds no cuDNN; pip install 'jax[cuda13]' installs it"
    least = 91100 if "B300" in kind else LEAST
    if version < least:
        return f"attention on {kind} needs cuDNN {_spelled(least)}, and this is {_spelled(version)}"
    if version in BROKEN:
        return f"the attention of cuDNN {_spelled(version)} has known bugs; upgrade to 9.10.2 or newer"
    return None


def _present(kind: str) -> bool:
    return any(device.device_kind == kind for device in jax.local_devices())


def _unknown_rules() -> str | None:
    """Return why the rules of this version of JAX cannot be called, or `None`."""
    try:
        binding = _binding()
        names = _parameters(binding._dot_product_attention_fwd_rule)
        backward = _parameters(binding._dot_product_attention_bwd_rule)
        complete = all(hasattr(binding, n) for n in ("check_cudnn_version", "MaskType", "AttentionLayout"))
    except (ImportError, AttributeError):
        complete = False
    if not complete:
        return f"jax {jax.__version__} does not have the rules for cuDNN's attention that this module calls"
    # The backward rule takes the same options, then the residuals and the cotangents.
    known = {*_ARRAYS, *_UNUSED, *_OPTIONS}.issuperset(names) and _OPTIONS[0] in names
    if not known or len(backward) != len(names) - names.index(_OPTIONS[0]) + 2:
        return f"jax {jax.__version__} has rules for cuDNN's attention with parameters that this module does not know"
    return None


def _spelled(version: int) -> str:
    return f"{version // 10000}.{version // 100 % 100}.{version % 100}"
