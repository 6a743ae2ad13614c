"""The TPU kernel: interpreted with race detection against float64, equal for any split, compiling."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from pallas_kernels import tiles
from pallas_kernels.aot import compile_kernel
from pallas_kernels.decode_attention import decode_attention
from pallas_kernels.dispatch import KernelError, interpreted
from pallas_kernels.gate import configurations
from tests.pallas_kernels.decode_attention.cases import FEATURES, make, truth
from tests.pallas_kernels.decode_attention.test_ops import check
from tests.pallas_kernels.flash_attention.cases import covering, parameters
from tests.truth.long import short

CASES = covering(
    {n: FEATURES[n] for n in ("queries", "stride", "window", "softcap", "shared")}
    | {"dtype": ("float32", "bfloat16"), "heads": ((4, 2), (3, 3)), "pages": ((4, 9), (50, 1)), "widths": ((16, 8),)}
)
GATE = {name: (fn, shapes) for name, fn, shapes in configurations("decode_attention", "tpu")}


@pytest.mark.parametrize("case", short(2, parameters(CASES)))
def test_it_is_as_exact_as_plain_and_invisible_values_may_be_nan(case, capsys):
    kv = case["heads"][1]
    with interpreted(races=True), tiles.trying("decode_attention", {"columns": 16 * kv, "workers": 2}):
        check(*make(case), implementation="mosaic_tpu")
    assert "RACE" not in capsys.readouterr().out


@pytest.mark.parametrize("workers", [1, 5])
def test_any_split_of_the_keys_is_the_same(workers):
    arrays, options = make({"dtype": "float32", "widths": (8, 8), "heads": (4, 2), "queries": 1, "pages": (8, 9)})
    with interpreted(), tiles.trying("decode_attention", {"columns": 32, "workers": workers}):
        got = jax.jit(lambda a: decode_attention(*a, **options, implementation="mosaic_tpu"))(arrays)
    for a, b in zip(got, truth(arrays, options), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"dtype": "float16"}, "XLA converts float16"),
        ({"kv": 1}, "a single key head"),
        ({"n": 100}, "400 rows, and a kernel takes at most 256"),
        ({"entries": 100000}, "bytes of scalar memory"),
    ],
    ids=["float16", "key head", "queries", "table"],
)
def test_an_unsupported_case_raises_with_the_reason(change, words):
    dtype, kv, n = change.get("dtype", "float32"), change.get("kv", 2), change.get("n", 1)
    q, k = (jax.ShapeDtypeStruct(s, dtype) for s in ((2, n, 4, 64), (9, 16, kv, 64)))
    tables = np.zeros((2, change.get("entries", 3)), np.int32)
    with interpreted(), pytest.raises(KernelError, match=words):
        f = lambda q, k: decode_attention(q, k, k, lengths=np.array([3, 5]), tables=tables, implementation="mosaic_tpu")  # noqa: E731
        jax.eval_shape(f, q, k)


@pytest.mark.tpu_aot
@pytest.mark.parametrize(
    ("name", "topology"), [("bfloat16 128 pages of 16", "v5e"), ("bfloat16 128 contiguous", "v6e")]
)
def test_the_kernel_compiles_and_copies_no_pages(name, topology):
    fn, shapes = GATE[name]
    text = compile_kernel(fn, *shapes, topology=topology).as_text()
    assert "tpu_custom_call" in text
    whole = f"bf16[{','.join(map(str, shapes[0].k.shape))}]"
    assert not [line for line in text.splitlines() if f" = {whole}" in line and "parameter(" not in line]
