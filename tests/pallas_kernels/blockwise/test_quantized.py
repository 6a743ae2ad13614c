"""Quantising and dequantising arrays in both forms, and the choice of a parameter's tile."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.blockwise import FORMATS, Quantized, codec, dequantize_blockwise, quantize_blockwise, tile_for
from pallas_kernels.dispatch import KernelError
from tests.pallas_kernels.blockwise.vectors import VECTORS


def _normal(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("name", ["normal_4096", "ragged_1000", "zeros_512"])
def test_flat_blocks_are_those_of_bitsandbytes(name, signed):
    want = {k: VECTORS[f"{name}.{'s' if signed else 'u'}.{k}"] for k in ("q", "q_exact", "absmax", "deq")}
    x = jnp.asarray(VECTORS[f"{name}.x"])
    q = quantize_blockwise(x if signed else jnp.abs(x), signed=signed)
    back = dequantize_blockwise(q)
    np.testing.assert_allclose(q.scales, want["absmax"], rtol=1e-6)
    if name == "zeros_512":
        np.testing.assert_array_equal(back, 0)
        return
    off = np.asarray(q.codes).astype(int) - want["q_exact"]
    assert np.count_nonzero(off) <= 2 * off.size / 1000 and abs(off).max() <= 1
    same = np.asarray(q.codes) == want["q"]
    assert same.mean() > 0.99
    np.testing.assert_allclose(np.asarray(back)[same], want["deq"][same], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("format", [f for f in FORMATS if f != "fp8_expanded"])  # see test_expanded.py
@pytest.mark.parametrize(
    "block_size", [256, *(pytest.param(n, marks=pytest.mark.once) for n in (64, 128, 512, 1024, 2048, 4096))]
)
def test_no_element_is_off_by_more_than_half_a_gap_of_its_blocks_scale(block_size, format):
    x = np.asarray(_normal(4096 + 64)) * 10.0 ** np.random.default_rng(1).uniform(-3, 3, 4160).astype(np.float32)
    for signed in (True, False):
        y = x if signed else abs(x)
        q = quantize_blockwise(jnp.asarray(y), block_size=block_size, signed=signed, format=format)
        assert q.scales.shape == (-(-4160 // block_size),) and q.shape == (4160,)
        scale = np.repeat(np.asarray(q.scales), block_size)[:4160]
        widest = np.diff(codec(format, signed).values()).max()
        assert np.all(abs(dequantize_blockwise(q) - y) <= scale * widest * 0.51)


@pytest.mark.parametrize("shape, tile", [((8, 256), (2, 128)), ((4, 3, 128), (2, 1, 128)), ((2, 512), (1, 256))])
def test_a_tile_is_a_block_of_its_own(shape, tile):
    x = _normal(*shape)
    q = quantize_blockwise(x, tile=tile)
    assert q.scales.shape == tuple(n // t for n, t in zip(shape, tile, strict=True))
    where = tuple(slice(0, t) for t in tile)
    alone = quantize_blockwise(x[where].reshape(-1), block_size=int(np.prod(tile)))
    np.testing.assert_array_equal(q.codes[where].reshape(-1), alone.codes)
    np.testing.assert_array_equal(q.scales.reshape(-1)[0], alone.scales[0])
    np.testing.assert_array_equal(dequantize_blockwise(q)[where].reshape(-1), dequantize_blockwise(alone))


def test_zeros_stay_zeros_and_a_fault_shows():
    x = _normal(4, 128).at[0].set(0.0).at[1, 5].set(jnp.nan).at[2, 7].set(jnp.inf).at[3].multiply(1e-42)
    back = dequantize_blockwise(quantize_blockwise(x, tile=(1, 128)))
    np.testing.assert_array_equal(back[0], 0.0)
    assert not np.isfinite(back[1]).any() and not np.isfinite(back[2]).any()
    np.testing.assert_array_equal(back[3], 0.0)  # the largest is no normal float32


@pytest.mark.parametrize("signed", [True, False])
def test_the_largest_floats_come_back(signed):
    x = jnp.asarray([[1.0, 0.5, 1e-3], [0.99, 0.1, 0.0]], jnp.float32) * jnp.asarray([[3.4e38], [8.6e37]])
    back = dequantize_blockwise(quantize_blockwise(jnp.pad(x, ((0, 0), (0, 61))), tile=(1, 64), signed=signed))
    np.testing.assert_allclose(back[:, :3] / 3e37, x / 3e37, rtol=0.1)


@pytest.mark.parametrize("shape", [(4, 256), (128, 512), (2, 128, 512)], ids=str)
def test_a_nan_is_not_lost_in_an_array_of_any_size(shape):
    tile = (*[1] * (len(shape) - 2), 2, 128)
    x = _normal(*shape).at[(*[0] * (len(shape) - 2), 3, 5)].set(jnp.nan)
    back = dequantize_blockwise(jax.jit(lambda x: quantize_blockwise(x, tile=tile))(x))
    assert int((~jnp.isfinite(back)).sum()) == 256  # its block and no other


def test_a_random_key_makes_the_mean_right_and_the_same_key_the_same_codes():
    x = _normal(2, 128)
    q = jax.jit(lambda key: quantize_blockwise(x, tile=(2, 128), key=key))
    np.testing.assert_array_equal(q(jax.random.key(1)).codes, q(jax.random.key(1)).codes)
    backs = jax.vmap(lambda k: dequantize_blockwise(q(k)))(jax.random.split(jax.random.key(0), 2000))
    nearest = dequantize_blockwise(quantize_blockwise(x, tile=(2, 128)))
    assert abs(backs.mean(0) - x).mean() < 0.2 * abs(nearest - x).mean()


def test_it_is_a_pytree_of_codes_and_scales():
    q = quantize_blockwise(_normal(4, 128), tile=(2, 128))
    leaves, structure = jax.tree.flatten(q)
    assert [x.shape for x in leaves] == [(4, 128), (2, 1)]
    again = jax.tree.unflatten(structure, leaves)
    assert isinstance(again, Quantized) and again.tile == (2, 128)
    assert q.nbytes == 4 * 128 + 4 * 2 and q.size == 512
    assert dequantize_blockwise(q, jnp.bfloat16).dtype == jnp.bfloat16


LLAMA_3_8B = {  # name -> shape, axes, and how many ways tensor=8 with fsdp=8 cuts each dimension
    "embed": ((128256, 4096), ("vocab", "embed"), (8, 8)),
    "q": ((32, 4096, 32, 128), ("layers", "embed", "heads", "head_dim"), (1, 8, 8, 1)),
    "k": ((32, 4096, 8, 128), ("layers", "embed", "kv_heads", "head_dim"), (1, 8, 8, 1)),
    "o": ((32, 32, 128, 4096), ("layers", "heads", "head_dim", "embed"), (1, 8, 1, 8)),
    "up": ((32, 4096, 14336), ("layers", "embed", "mlp"), (1, 8, 8)),
    "down": ((32, 14336, 4096), ("layers", "mlp", "embed"), (1, 8, 8)),
    "norm": ((32, 4096), ("layers", "embed"), (1, 8)),
    "k bias": ((32, 8, 128), ("layers", "kv_heads", "head_dim"), (1, 8, 1)),
}


@pytest.mark.parametrize("name", LLAMA_3_8B)
def test_scales_of_llama_3_shard_evenly_as_its_parameters_do(name):
    shape, axes, ways = LLAMA_3_8B[name]
    tile = tile_for(shape, axes)
    assert tile[0] == 1 or axes[0] != "layers"
    for n, t, cut in zip(shape, tile, ways, strict=True):
        assert n % t == 0 and (n // t) % cut == 0
    alone = [(n, a) for n, a in zip(shape, axes, strict=True) if a != "layers"]
    per_layer = tile_for([n for n, _ in alone], [a for _, a in alone])
    assert per_layer == tuple(t for t, a in zip(tile, axes, strict=True) if a != "layers")


@pytest.mark.parametrize(
    "shape, axes, tile",
    [
        ((4096, 8, 128), ("embed", "kv_heads", "head_dim"), (1, 1, 128)),
        ((32, 128, 4096), ("heads", "head_dim", "embed"), (1, 1, 128)),
        ((8, 4096, 14336), ("experts", "embed", "mlp"), (1, 1, 128)),
        ((128, 4, 32), ("embed", "heads", "head_dim"), (1, 1, 32)),
        ((128, 4, 16), ("embed", "heads", "head_dim"), (2, 1, 16)),
        ((3, 4, 16), ("embed", "heads", "head_dim"), (1, 2, 16)),
        ((4096, 14336), None, (1, 128)),
        ((1000, 96), None, (1, 32)),
        ((6, 6, 8), None, (2, 2, 8)),
        ((4096,), None, (128,)),
        ((100,), None, None),
        ((3, 5), None, None),
        ((), None, None),
        ((12,), ("layers",), None),
    ],
)
def test_a_tile_follows_from_shape_and_names(shape, axes, tile):
    assert tile_for(shape, axes) == tile


@pytest.mark.parametrize("width", [1, 8, 32, 128, 256, 4096])
def test_rows_are_joined_only_where_a_tile_has_too_few_numbers(width):
    assert tile_for((4096, 4096), width=width) == (max(1, 32 // width), width)


@pytest.mark.parametrize(
    "wrong, message",
    [
        (lambda x: quantize_blockwise(x, tile=(3, 128)), r"tile \(3, 128\) does not divide x.*\(1, 128\) would"),
        (lambda x: quantize_blockwise(x, tile=(128,)), "does not divide x"),
        (lambda x: quantize_blockwise(x, block_size=100), "block_size=100 is not a power of two"),
        (
            lambda x: quantize_blockwise(x, key=jax.random.key(0), moment=True),
            "rounding at random may make a second moment 0",
        ),
        (lambda x: quantize_blockwise(x, format="linea"), "did you mean 'linear'"),
        (lambda x: quantize_blockwise(x.astype(jnp.int32)), "takes floats"),
        (lambda x: dequantize_blockwise(Quantized(x, x, (2, 128), "dynamic", True)), "codes are float32"),
        (lambda x: tile_for((4, 4), ("embed",)), "name 1 dimensions"),
    ],
)
def test_arguments_that_do_not_fit_raise_one_sentence(wrong, message):
    with pytest.raises(KernelError, match=message) as caught:
        wrong(_normal(4, 256))
    assert "\n" not in str(caught.value)
