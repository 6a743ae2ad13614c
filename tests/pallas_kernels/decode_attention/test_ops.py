"""Attention to a cache: XLA's implementation against float64, merging parts, errors."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxscale.parallel.context import Part, merge
from jaxscale.testing.ops import allowed, error_of
from pallas_kernels.decode_attention import decode_attention, xla
from pallas_kernels.dispatch import KernelError
from tests.pallas_kernels.decode_attention.cases import CASES, make, plain, truth
from tests.pallas_kernels.flash_attention.cases import name_of, parameters
from tests.truth.long import short

finite = lambda lse: np.where(np.isneginf(lse), 0, lse)  # noqa: E731


def check(arrays, options, **kwargs):
    """Assert that it is as exact as a plain implementation, and -inf in the same places."""
    run = jax.jit(lambda a, p, t: decode_attention(*a, **options | {"positions": p, "tables": t}, **kwargs))
    got = run(arrays, options["positions"], options["tables"])
    want, simple = truth(arrays, options), jax.jit(lambda a: plain(a, options))(arrays)
    assert all(x.dtype == jnp.float32 for x in got)
    np.testing.assert_array_equal(np.isneginf(got[1]), np.isneginf(want[1]))
    for a, b, c in zip(got, want, simple, strict=True):
        assert error_of(finite(a), finite(b)) <= allowed(error_of(finite(c), finite(b)), a.dtype)


@pytest.mark.parametrize("case", short(4, parameters(CASES)))
def test_it_is_as_exact_as_plain_and_invisible_values_may_be_nan(case, monkeypatch):
    if CASES.index(case) % 2:
        monkeypatch.setattr(xla, "CHUNK_BYTES", 1)  # 32 keys at a time, the least
    check(*make(case), implementation="xla")


@pytest.mark.parametrize(
    "case", [*parameters(CASES[:2]), *(pytest.param(c, marks=pytest.mark.long, id=name_of(c)) for c in CASES[2:])]
)
def test_the_option_maximum_does_not_change_results(case, monkeypatch):
    monkeypatch.setattr(xla.lax, "cond", lambda near, guess, anew: guess())  # without the way out
    check(*make(case), implementation="xla", maximum=1.5)


@pytest.mark.parametrize("maximum", [-300.0, 300.0], ids=["too low", "too high"])
def test_with_a_maximum_too_far_off_everything_is_computed_again(maximum):
    """exp(300) overflows float32, and exp(-300) underflows."""
    arrays, options = make(CASES[0])
    check(arrays, options, implementation="xla", maximum=maximum)
    alone = jax.jit(lambda: decode_attention(*arrays, **options, implementation="xla"))()
    near_result = jax.jit(lambda: decode_attention(*arrays, **options, implementation="xla", maximum=maximum))()
    # Two programs, which XLA may round by a unit in the last place differently.
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=2.5e-7), near_result, alone)
    with pytest.MonkeyPatch.context() as patch:  # which is why: it is what the sums are taken of
        patch.setattr(xla.lax, "cond", lambda near, guess, anew: guess())
        wrong = jax.jit(lambda q: decode_attention(q, *arrays[1:], **options, implementation="xla", maximum=maximum))
        assert not np.array_equal(wrong(arrays[0])[1], alone[1])


def test_the_dense_form_is_the_truth():
    check(*make(CASES[0]), implementation="dense")


def test_lengths_are_positions_at_the_end():
    (q, k, v), options = make({"dtype": "float32", "widths": (8, 8), "heads": (2, 1), "queries": 2, "pages": (16, 2)})
    lengths = np.array([7, 20, 0])
    positions = lengths[:, None] + [[-2, -1]]
    k, v, tables = jnp.nan_to_num(k), jnp.nan_to_num(v), options["tables"]
    got = jax.jit(lambda n: decode_attention(q, k, v, lengths=n, tables=tables))(lengths)
    want = jax.jit(lambda p: decode_attention(q, k, v, positions=p, tables=tables))(np.maximum(positions, -1))
    jax.tree.map(np.testing.assert_array_equal, got, want)
    assert not np.asarray(got[0][2]).any() and np.isneginf(got[1][2]).all()


def test_pages_dealt_out_to_devices_merge_to_the_whole():
    (q, k, v), options = make({"dtype": "float32", "widths": (8, 8), "heads": (2, 1), "queries": 2, "pages": (4, 9)})
    tables, devices = options["tables"], 3

    @jax.jit
    def both():
        dealt = ({"tables": tables[:, i::devices], "first": i, "stride": devices} for i in range(devices))
        parts = (Part(*decode_attention(q, k, v, **options | of_device)) for of_device in dealt)
        return decode_attention(q, k, v, **options), functools.reduce(merge, parts)

    whole, merged = both()
    np.testing.assert_allclose(merged.out, whole[0], atol=1e-6)
    np.testing.assert_allclose(merged.lse, whole[1], atol=1e-6)


def test_no_more_is_looked_at_than_the_longest_row_has():
    q, k = jnp.ones((2, 1, 2, 8)), jnp.ones((2, 64, 1, 8))
    text = jax.jit(lambda q, k, n: decode_attention(q, k, k, lengths=n)).lower(q, k, np.array([3, 5])).as_text()
    assert "while" not in text  # a chunk is the whole of it
    k = jnp.ones((2, 2**17, 1, 8))
    text = jax.jit(lambda q, k, n: decode_attention(q, k, k, lengths=n)).lower(q, k, np.array([3, 5])).as_text()
    assert "while" in text


def coded(x, numbers):
    """Codes and scales of keys or values; NaN, which no query sees, becomes 0."""
    x = np.nan_to_num(np.asarray(x, np.float32))
    largest = 127 if numbers == jnp.int8 else 448
    scale = np.maximum(abs(x).max(-1, keepdims=True), 1e-6) / largest
    return jnp.asarray(np.round(x / scale) if largest == 127 else x / scale).astype(numbers), scale[..., 0]


@pytest.mark.parametrize("numbers", [jnp.int8, jnp.float8_e4m3fn], ids=["int8", "fp8"])
@pytest.mark.parametrize(
    "case", [*parameters(CASES[:2]), *(pytest.param(c, marks=pytest.mark.long, id=name_of(c)) for c in CASES[2:])]
)
def test_codes_of_8_bits_are_the_numbers_that_they_stand_for(case, numbers, monkeypatch):
    if CASES.index(case) % 2:
        monkeypatch.setattr(xla, "CHUNK_BYTES", 1)
    (q, k, v), options = make(case)
    (k, of_k), (v, of_v) = coded(k, numbers), (None, None) if v is None else coded(v, numbers)
    run = jax.jit(
        lambda a, **kw: decode_attention(*a, **options, scales=(of_k, of_v), **kw), static_argnames="implementation"
    )
    wide = [None if x is None else x.astype(np.float32) * s[..., None] for x, s in ((k, of_k), (v, of_v))]
    want = truth((q, *wide), options)
    simple = jax.jit(lambda a: plain(a, options))((q, *(None if x is None else x.astype(q.dtype) for x in wide)))
    for implementation in ("xla", "dense"):
        got = run((q, k, v), implementation=implementation)
        for a, b, c in zip(got, want, simple, strict=True):
            assert error_of(finite(a), finite(b)) <= allowed(error_of(finite(c), finite(b)), a.dtype)


ARRAYS = {"q": (2, 1, 4, 16), "k": (2, 32, 2, 16), "v": (2, 32, 2, 16)}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": (2, 1, 3, 16)}, "3 query heads are not a multiple of 2 key heads; 4 would be"),
        ({"v": (2, 16, 2, 16)}, "differ before the last axis"),
        ({"k": (3, 32, 2, 16), "v": (3, 32, 2, 16)}, "q has 2 rows and k has 3 pages"),
        ({"lengths": None}, "either positions"),
        ({"lengths": np.array([1.0, 2.0])}, "lengths has to be integers, not float"),
        ({"tables": np.zeros((3, 1), int)}, r"tables has to be \(2, pages of a row\)"),
        ({"window": 0}, "window has to be"),
        ({"softcap": -1.0}, "softcap has to be"),
        ({"stride": 0}, "stride has to be"),
        ({"value_dim": 8}, "value_dim is 8, and v is 16 wide"),
        ({"v": None}, "set value_dim"),
        ({"dtype": jnp.int32}, "takes float32, bfloat16 or float16, and q is int32"),
        ({"scales": (np.ones((2, 32, 2)), None)}, "scales has to be"),
        ({"scales": (np.ones((2, 32)), np.ones((2, 32, 2)))}, "the scales of k have to be"),
        ({"scales": (np.ones((2, 32, 2)),) * 2}, "scales are for int8 or float8_e4m3fn, and k is float32"),
        ({"implementation": "xal"}, "did you mean 'xla'"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else None,
)
def test_arguments_that_do_not_fit_raise_one_sentence(change, message):
    shapes = ARRAYS | {n: change[n] for n in ARRAYS if n in change}
    arrays = (None if s is None else jnp.ones(s, change.get("dtype", jnp.float32)) for s in shapes.values())
    options = {n: x for n, x in change.items() if n not in (*ARRAYS, "dtype")}
    with pytest.raises(KernelError, match=message):
        decode_attention(*arrays, **({"lengths": np.array([3, 5])} | options))


@pytest.mark.parametrize("mode", [jax.grad, jax.jacfwd], ids=["reverse", "forward"])
def test_differentiating_it_raises(mode):
    k = jnp.ones(ARRAYS["k"])
    f = lambda q: decode_attention(q, k, k, lengths=np.array([3, 5]))[0].sum()  # noqa: E731
    with pytest.raises(KernelError, match="no gradient.*flash_attention"):
        mode(f)(jnp.ones(ARRAYS["q"]))
