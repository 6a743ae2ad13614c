"""The Hopper kernel: interpreted with race detection against float64, equal for any split, lowering and compiling."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import tiles
from pallas_kernels.aot import kernel_reports, why_no_gpu
from pallas_kernels.decode_attention import decode_attention
from pallas_kernels.dispatch import KernelError, interpreted, on_device
from pallas_kernels.gate import configurations
from tests.pallas_kernels.decode_attention.cases import make, truth
from tests.pallas_kernels.decode_attention.test_ops import check

interpreter = pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="the interpreter needs jax 0.11")
TILE = {"keys": 32, "slots": 2, "queries": 1, "workers": 2}
CASES = {
    "pieces of a page": dict(dtype="bfloat16", widths=(64, 64), heads=(4, 2), queries=1, pages=(48, 3)),
    "small pages dealt out, window, softcap": dict(
        dtype="bfloat16", widths=(64, 64), heads=(4, 2), queries=3, pages=(8, 9), stride=2, window=30, softcap=2.0
    ),
    "wide heads, one computing warpgroup": dict(
        dtype="bfloat16", widths=(256, 256), heads=(4, 2), queries=1, pages=(16, 5), window=40
    ),
    "an odd page, unlike widths": dict(dtype="float16", widths=(80, 64), heads=(2, 2), queries=2, pages=(72, 1)),
}


@interpreter
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_it_is_as_exact_as_plain_and_invisible_pages_may_be_nan(case):
    with interpreted(races=True), tiles.trying("decode_attention", TILE):
        check(*make(case, pages=True), implementation="mosaic_gpu")


@interpreter
def test_any_split_of_the_keys_is_the_same():
    arrays, options = make(CASES["pieces of a page"], pages=True)
    with interpreted(), tiles.trying("decode_attention", TILE | {"workers": 1, "slots": 1}):
        got = decode_attention(*arrays, **options, implementation="mosaic_gpu")
    for a, b in zip(got, truth(arrays, options), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-2, rtol=2e-2)


SHAPES = {"q": (2, 1, 8, 128), "k": (64, 16, 2, 128), "v": (64, 16, 2, 128)}


@interpreter
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(dtype="float32"), "float32 is left to XLA"),
        (dict(q=(2, 1, 8, 72), k=(64, 16, 2, 72)), "width 64 to 256, multiples of 16"),
        (dict(v=None), "values that are stored in the keys"),
        (dict(q=(2, 20, 8, 128)), "80 rows, and a tile has 64"),
        (dict(k=(64, 24, 2, 128), v=(64, 24, 2, 128)), "a multiple of 8 keys that divides 64 .* not 24"),
    ],
    ids=["float32", "width", "values", "queries", "page"],
)
def test_an_unsupported_case_raises_with_the_reason(change, message):
    shapes = SHAPES | {n: x for n, x in change.items() if n in SHAPES}
    q, k, v = (None if s is None else jnp.ones(s, change.get("dtype", "bfloat16")) for s in shapes.values())
    options = {"lengths": np.array([3, 5]), "tables": np.zeros((2, 32), int), "value_dim": 64 if v is None else None}
    with interpreted(), pytest.raises(KernelError, match=message):
        decode_attention(q, k, v, **options, implementation="mosaic_gpu")


@pytest.mark.gpu_aot
@pytest.mark.parametrize("name", ["128/128 pages of 16, window, 4 queries", "256/256 odd length, window, softcap"])
def test_it_compiles_without_spills_and_fits_in_shared_memory(name):
    fn, shapes = next((fn, shapes) for n, fn, shapes in configurations("decode_attention", "gpu") if n == name)
    reports = kernel_reports(fn, *shapes)
    assert reports and not [r.problem for r in reports if r.problem]


@pytest.mark.parametrize(
    ("kind", "platform", "kernel"),
    [("NVIDIA H200", "cuda", "mosaic_gpu"), ("NVIDIA A100", "cuda", ""), ("TPU v6 lite", "tpu", "tpu_custom_call")],
)
def test_lowering_chooses_the_kernel_of_the_platform(kind, platform, kernel):
    if platform == "cuda" and why_no_gpu() is not None:
        pytest.skip(str(why_no_gpu()))
    q, k = (jax.ShapeDtypeStruct(SHAPES[n], jnp.bfloat16) for n in "qk")
    tables, lengths = (jax.ShapeDtypeStruct(s, jnp.int32) for s in ((2, 32), (2,)))
    f = lambda q, k, t, n: decode_attention(q, k, k, tables=t, lengths=n)  # noqa: E731
    with on_device(kind):
        lowered = jax.jit(f).trace(q, k, tables, lengths).lower(lowering_platforms=(platform,))
    calls = re.findall(r"custom_call @(\S*?(?:mosaic_gpu|tpu_custom_call)\S*?)\(", lowered.as_text())
    assert all(kernel in c for c in calls) and bool(calls) == bool(kernel), calls
