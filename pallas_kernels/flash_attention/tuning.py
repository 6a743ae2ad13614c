"""Keys, candidates and cases for `python -m pallas_kernels.tune flash_attention`."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

from pallas_kernels.dispatch import Target
from pallas_kernels.flash_attention import examples, gpu, tpu
from pallas_kernels.flash_attention.inputs import Inputs, Settings
from pallas_kernels.flash_attention.masks import Mask
from pallas_kernels.tiles import trying

Key = dict[str, Any]


def keys(platform: str) -> Iterator[Key]:
    """Yield what a tile depends on."""
    if platform == "tpu":
        for kernel, dtype, width in itertools.product(("forward", "backward"), ("bfloat16", "float32"), (128, 256)):
            yield {"kernel": kernel, "dtype": dtype, "width": width}
        return
    for (d, dv), softcap, tokens in itertools.product(gpu.WIDTHS, (False, True), (False, True)):
        outputs = dict.fromkeys(w for fixed in (False, True) for w in gpu.passes(d, dv, fixed, softcap))
        for kernel in ("forward", *(f"backward of {w}" for w in outputs)):
            yield {"kernel": kernel, "width": d, "values": dv, "softcap": softcap, "tokens": tokens}


def candidates(platform: str, key: Key) -> Iterator[dict[str, int]]:
    """Yield tiles, the likeliest to be fast first."""
    if platform == "tpu":
        large = key["dtype"] == "bfloat16"
        sizes = (1024, 512, 2048) if large else (512, 256, 1024)
        yield from ({"q": q, "k": k} for q, k in itertools.product(sizes, sizes))
        return
    wide, widest = key["width"] + key["values"] > 256, key["width"] > 192
    crowded = key["softcap"] and key["tokens"]  # too many registers for large tiles
    if key["kernel"] == "forward":
        for keys, slots in itertools.product((64, 128) if wide or crowded else (128, 64, 192), (2, 3)):
            yield {"keys": keys, "slots": slots}
        return
    others, early = (1, 2) if widest else (2, 1), [False] if key["softcap"] or wide else [True, False]
    if key["kernel"] == "backward of q":
        early = sorted(early) if key["tokens"] else early
        for keys, more, soon in itertools.product((64, 128) if wide or crowded else (128, 64), others, early):
            yield {"keys": keys, "slots": 2, "others": more, "early": int(soon)}
        return
    if not key["kernel"].endswith("kvq"):
        early = sorted(early)
    narrow = key["width"] == 64
    of_queries: tuple[int, ...] = (64,) if not narrow else (64, 128) if crowded else (128, 64)
    for queries, more, soon in itertools.product(of_queries, others, sorted(early) if narrow else early):
        yield {"queries": queries, "slots": 2, "others": more, "early": int(soon)}


def build(platform: str, key: Key, tile: dict[str, int]) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return a causal case with a tile, and the shapes of its arguments."""
    options: dict[str, Any] = {"mask": Mask(causal=True), "s": 8192}
    if platform == "tpu":
        options |= {"d": key["width"], "dv": key["width"], "dtype": key["dtype"]}
        fn, shapes = examples.case(tpu.run, key["kernel"], **options)
    else:
        options |= {"d": key["width"], "dv": key["values"], "h": 16, "kv": 4}
        options |= {"segments": key["tokens"], "positions": key["tokens"]}
        options |= {"softcap": 30.0} if key["softcap"] else {}
        direction, _, outputs = key["kernel"].partition(" of ")
        fn, shapes = examples.case(functools.partial(_one, outputs) if outputs else gpu.run, direction, **options)

    def tried(*arrays: Any) -> Any:
        with trying("flash_attention", tile):
            return fn(*arrays)

    return tried, shapes


def _one(outputs: str, target: Target, inputs: Inputs, *others: Any, settings: Settings, **_: Any) -> Any:
    """Run one kernel of the backward pass for GPUs."""
    return gpu.one_pass(target, inputs, settings.mask, settings.score, gpu.stats_of(*others), others[2], outputs)
