"""Flash attention for TPUs in Mosaic: only visible tiles are read and computed, and keys are never repeated.

On a TPU `deterministic` changes nothing: every sum has a fixed order. `tpu_steps` lists the tiles that meet, `tpu_walk`
runs a kernel along the list, and `tpu_forward` and `tpu_backward` define what happens where two tiles meet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from pallas_kernels.dispatch import NO_FLOAT16, Target
from pallas_kernels.flash_attention import examples
from pallas_kernels.flash_attention.inputs import Inputs, Settings
from pallas_kernels.flash_attention.masks import Mask
from pallas_kernels.flash_attention.tpu_backward import backward
from pallas_kernels.flash_attention.tpu_forward import forward
from pallas_kernels.flash_attention.tpu_steps import LANES, MOST_STEPS, Cut, Side, step_counts

WIDEST = 256
"""The largest head_dim: a wider one would need smaller tiles than the table has."""


def supported(
    target: Target,
    *,
    direction: str,
    settings: Settings,
    q: tuple[int, ...],
    k: tuple[int, ...],
    v: tuple[int, ...],
    bias: tuple[int, ...] | None,
    segments: bool,
    positions: bool,
    dtype: str,
) -> str | None:
    """Return why the kernels cannot run, or `None`.

    Args:
      target: the device to compile for.
      direction: "forward" or "backward".
      settings: the op's settings, of which `mask` is used.
      q: shape.
      k: shape.
      v: shape.
      bias: shape, or `None`.
      segments: whether tokens have segment ids.
      positions: whether tokens have positions.
      dtype: of q, k and v.
    """
    if dtype == "float16":
        return NO_FLOAT16
    if bias is not None:
        return "a bias is left to XLA, which adds it while it computes the scores"
    if max(q[3], v[3]) > WIDEST:
        return f"head_dim has to be at most {WIDEST} in a kernel, not {max(q[3], v[3])}"
    mask: Mask = settings.mask
    cut = Cut.of(target, direction, mask, q=q, v=v, dtype=dtype, segments=segments, positions=positions)
    if mask.blocks is not None:
        for what, size, tile in (("queries", mask.blocks.query, cut.q_tile), ("keys", mask.blocks.key, cut.k_tile)):
            if not tile:
                return f"a block of a mask has to have a multiple of {LANES} {what} in a kernel, not {size}"
    sides: tuple[Side, ...] = ("queries",) if direction == "forward" else ("queries", "keys")
    examples = q[0] if segments or positions else 1
    for side in sides:
        longest = examples * int(step_counts(cut, side).max())
        if longest > MOST_STEPS:
            return (
                f"a tile of {side} may have to visit {longest} tiles in the {examples} examples, and a list of "
                f"{MOST_STEPS} fits in SMEM; use fewer examples a device"
            )
    return None


def run(target: Target, inputs: Inputs, *others: Any, direction: str, settings: Settings, **_: Any) -> Any:
    """Return output and log-sum-exp, or the cotangents of q, k, v and bias."""
    return (forward if direction == "forward" else backward)(target, inputs, settings.mask, settings.score, *others)


def configurations(op: Any) -> Iterator[tuple[str, Callable[..., Any], tuple[Any, ...]]]:
    """Yield (name, function, shapes) of what ships, for the gate."""
    for name, case in CASES.items():
        for direction in ("forward", "backward"):
            yield (f"{name} {direction}", *examples.case(run, direction, **case))


CASES: dict[str, dict[str, Any]] = {
    "bfloat16 128 causal": {"mask": Mask(causal=True)},
    "bfloat16 128 causal dropout": {"mask": Mask(causal=True), "dropout": 0.1},
    "float32 256 causal dropout": {
        "mask": Mask(causal=True), "dropout": 0.1, "d": 256, "dv": 256, "dtype": "float32",
    },
    "bfloat16 64 causal": {"mask": Mask(causal=True), "d": 64, "dv": 64},
    "bfloat16 80": {"mask": Mask(), "d": 80, "dv": 80},
    "bfloat16 96 window segments": {"mask": Mask(causal=True, window=1000), "segments": True, "d": 96, "dv": 96},
    "bfloat16 192-128 causal segments": {"mask": Mask(causal=True), "segments": True, "d": 192, "kv": 8},
    "bfloat16 256 window positions softcap": {
        "mask": Mask(causal=True, window=700), "positions": True, "softcap": 50.0, "d": 256, "dv": 256,
    },
    "bfloat16 128 odd lengths": {"mask": Mask(causal=True), "segments": True, "s": 1000, "t": 1333},
    "bfloat16 128 sigmoid": {"mask": Mask(window=500), "segments": True, "kind": "sigmoid"},
    "float32 128 all": {
        "mask": Mask(causal=True, window=900), "segments": True, "positions": True, "softcap": 30.0, "dtype": "float32",
    },
    "bfloat16 128 causal 512k": {"mask": Mask(causal=True), "s": 2**19, "b": 1, "h": 2, "kv": 1},
    "bfloat16 128 causal segments 512k": {
        "mask": Mask(causal=True), "segments": True, "s": 2**19, "b": 1, "h": 2, "kv": 1,
    },
    "float32 256 causal": {"mask": Mask(causal=True), "d": 256, "dv": 256, "dtype": "float32"},
}  # fmt: skip
"""Cases that the gate compiles: a name -> arguments of `examples.case`."""
