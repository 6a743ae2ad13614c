"""Stored weights: numbers of few bits, scales, packed codes; against ml_dtypes, the OCP MX rules and the nf4 table."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

import jaxscale as js
from jaxscale.errors import CheckpointError, ConfigError, LayoutError
from jaxscale.layout import TensorInfo, abstract, shardings_of
from jaxscale.nn import Linear, MixtureOfExperts, project
from jaxscale.nn.formats import FORMATS, PRESETS, GroupedIntegers, Stored, StoredWeight, numbers_of, pack, unpack
from jaxscale.parallel import Arithmetic
from jaxscale.testing.params import random_params
from tests.truth.errors import raises_saying
from tests.truth.long import short

RNG = np.random.default_rng(0)
KERNEL = (RNG.normal(size=(2, 64, 32)) * 0.02).astype(np.float32)  # (layers, embed, mlp)
SCALED = np.abs(RNG.normal(size=4000)).astype(np.float32) * 2

FLOATS = {
    "e2m1": "float4_e2m1fn", "e3m2": "float6_e3m2fn", "e2m3": "float6_e2m3fn", "e4m3": "float8_e4m3fn",
    "e5m2": "float8_e5m2", "e3m4": "float8_e3m4", "e8m0": "float8_e8m0fnu",
}  # fmt: skip


@pytest.mark.parametrize(("name", "dtype"), short(4, FLOATS.items()))
def test_floats_are_those_of_ml_dtypes_and_round_as_they_do(name, dtype):
    numbers, dtype = numbers_of(name), getattr(ml_dtypes, dtype)
    codes = np.arange(2**numbers.bits, dtype=np.uint8)
    values = codes.view(dtype).astype(np.float32)
    np.testing.assert_array_equal(np.float32(numbers.values), values)
    np.testing.assert_array_equal(numbers.decode(jnp.asarray(codes)), values)
    x = np.clip(SCALED * (1 if name == "e8m0" else np.sign(RNG.normal(size=SCALED.size))), None, numbers.largest)
    ties = (values[:-1] + values[1:]) / 2
    ties = ties[np.isfinite(ties) & (np.abs(ties) <= numbers.largest) & (np.abs(ties) > 1e-30)]
    for some in (np.float32(x), np.float32(np.sort(ties))[: 0 if name == "e8m0" else None]):  # ties of e8m0 go up
        got = numbers.decode(numbers.encode(jnp.asarray(some)))
        np.testing.assert_array_equal(got, some.astype(dtype).astype(np.float32))


@pytest.mark.parametrize("bits", short(4, range(1, 9)))
def test_integers_of_any_width_round_to_the_nearest_and_pack_without_gaps(bits):
    signed, unsigned = numbers_of(f"int{max(bits, 2)}"), numbers_of(f"uint{bits}")
    x = RNG.normal(size=500).astype(np.float32) * 2 ** (bits - 1)
    for numbers in (signed, unsigned):
        want = np.clip(np.round(x), min(numbers.values), numbers.largest)
        np.testing.assert_array_equal(numbers.decode(numbers.encode(jnp.asarray(x))), want)
    codes = RNG.integers(0, 2**bits, (3, 32, 4)).astype(np.uint8)
    for word in (jnp.uint8, jnp.uint32):
        packed = pack(jnp.asarray(codes), bits, -2, word)
        assert packed.dtype == word and packed.nbytes * 8 == codes.size * bits
        np.testing.assert_array_equal(unpack(packed, bits, -2), codes)
    stream = np.unpackbits(codes[..., None], axis=-1, bitorder="little", count=bits)  # (3, 32, 4, bits), lowest first
    want = np.packbits(np.moveaxis(stream, 2, 0).reshape(4, 3, -1), axis=-1, bitorder="little")
    np.testing.assert_array_equal(np.moveaxis(np.asarray(pack(jnp.asarray(codes), bits, -2)), 2, 0), want)


def test_nf4_is_the_table_that_qlora_published():
    paper = [-1.0, -0.6962, -0.5251, -0.3949, -0.2844, -0.1848, -0.0911, 0.0,
             0.0796, 0.1609, 0.2461, 0.3379, 0.4407, 0.5626, 0.7230, 1.0]  # fmt: skip
    np.testing.assert_allclose(numbers_of("nf4").values, paper, atol=6e-5)
    scipy = pytest.importorskip("scipy.stats")
    offset = 0.9677083  # as bitsandbytes' create_normal_map: 8 quantiles above 0, 7 below
    above, below = (scipy.norm.ppf(np.linspace(offset, 0.5, n)[:-1]) for n in (9, 8))
    want = np.sort([*above, *-below, 0.0])
    np.testing.assert_allclose(numbers_of("nf4").values, want / want.max(), atol=1e-6)
    weight = FORMATS["nf4"][0].encode(jnp.asarray(KERNEL), (-2,))
    largest = np.abs(KERNEL).max(1, keepdims=True)
    table = np.asarray(numbers_of("nf4").values)
    near = np.abs((KERNEL / largest)[..., None].astype(np.float64) - table).argmin(-1)
    np.testing.assert_array_equal(weight.unpacked(), near)


@pytest.mark.parametrize(
    "name",
    ["mxfp4", *(pytest.param(n, marks=pytest.mark.long) for n in ("mxfp6", "mxfp6_e2m3", "mxfp8", "mxfp8_e5m2"))],
)
def test_mx_formats_follow_the_rules_of_the_ocp(name):
    made = FORMATS[name][0]
    weight = made.encode(jnp.asarray(KERNEL), (-2,))
    blocks = KERNEL.reshape(2, 2, 32, 32).astype(np.float64)
    dtype = getattr(ml_dtypes, FLOATS[made.numbers])
    exponent = np.floor(np.log2(np.abs(blocks).max(2, keepdims=True))) - np.floor(
        np.log2(float(ml_dtypes.finfo(dtype).max))
    )
    np.testing.assert_array_equal(weight.scale.codes, np.uint8(exponent[:, :, 0] + 127))  # E8M0: bias 127
    top = float(ml_dtypes.finfo(dtype).max)
    want = (
        np.clip(blocks / 2.0**exponent, -top, top).astype(np.float32).astype(dtype).astype(np.float64) * 2.0**exponent
    )
    np.testing.assert_array_equal(weight.dense(), want.reshape(KERNEL.shape))


@pytest.mark.long
def test_nvfp4_has_e4m3_scales_and_a_factor_for_each_matrix():
    weight = FORMATS["nvfp4"][0].encode(jnp.asarray(KERNEL), (-2,))
    blocks = KERNEL.reshape(2, 4, 16, 32)
    largest = np.abs(blocks).max(2, keepdims=True)
    factor = np.abs(KERNEL).max((1, 2), keepdims=True)[:, None] / np.float32(6 * 448)
    scales = (largest / 6 / factor).astype(ml_dtypes.float8_e4m3fn).astype(np.float32) * factor
    np.testing.assert_allclose(weight.scale.dense(), scales[:, :, 0], rtol=1e-6)
    want = (blocks / scales).clip(-6, 6).astype(ml_dtypes.float4_e2m1fn).astype(np.float32) * scales
    want, got = want.reshape(KERNEL.shape), np.asarray(weight.dense())
    assert np.mean(np.abs(got - want) > 1e-6 * np.abs(want)) < 1e-3  # a tie that one rounding decides


@pytest.mark.long
def test_zero_points_blocks_and_double_quantisation_are_those_of_numpy():
    weight = FORMATS["uint4"][0]
    x = KERNEL + np.float32(0.01)
    got = dataclasses.replace(weight, group=16, scale="float32").encode(jnp.asarray(x), (-2,))
    blocks = x.reshape(2, 4, 16, 32)
    low, high = (f(blocks, axis=2, keepdims=True) for f in (np.min, np.max))
    scale = (np.maximum(high, 0) - np.minimum(low, 0)) / 15
    zero = np.round(-np.minimum(low, 0) / scale)
    want = (np.clip(np.round(blocks / scale + zero), 0, 15) - zero) * scale
    np.testing.assert_allclose(got.dense(), want.reshape(x.shape), rtol=1e-5, atol=1e-7)

    got = dataclasses.replace(FORMATS["fp8_blocks"][0], group=32, outputs=16).encode(jnp.asarray(KERNEL), (-2,))
    assert got.scale.shape == (2, 2, 2)
    blocks = KERNEL.reshape(2, 2, 32, 2, 16)
    scale = np.abs(blocks).max((2, 4), keepdims=True) / np.float32(448)
    want = (blocks / scale).astype(ml_dtypes.float8_e4m3fn).astype(np.float32) * scale
    np.testing.assert_allclose(got.dense(), want.reshape(KERNEL.shape), rtol=1e-6)

    plain, double = (FORMATS[n][0].encode(jnp.asarray(KERNEL), (-2,)) for n in ("nf4", "nf4_double"))
    inner_scales = double.scale.dense()
    centred = np.asarray(plain.scale) - np.mean(plain.scale, axis=(1, 2), keepdims=True)
    inner = np.abs(centred).max((1, 2), keepdims=True) / np.float32(448)  # 32 scales, fewer than 256: one block
    want = (centred / inner).astype(ml_dtypes.float8_e4m3fn).astype(np.float32) * inner
    np.testing.assert_allclose(inner_scales, want + np.mean(plain.scale, axis=(1, 2), keepdims=True), rtol=1e-4)
    assert sum(x.nbytes for x in jax.tree.leaves(double.scale)) == 2 * (32 + 4 + 4)


@pytest.mark.parametrize(("name", "shape"), [("ternary", (1, 8, 2)), ("binary", (1, 8, 2))])
def test_one_and_two_bits_are_signs_times_mean_absolute_values(name, shape):
    x = RNG.normal(size=shape).astype(np.float32)
    mean = np.abs(x).mean(1, keepdims=True)
    signs = np.where(x > 0, 1, -1) if name == "binary" else np.clip(np.round(x / mean), -1, 1)
    np.testing.assert_allclose(FORMATS[name][0].encode(jnp.asarray(x), (-2,)).dense(), signs * mean, rtol=1e-6)


def test_a_table_of_a_matrix_is_a_fixed_point_of_k_means():
    weight = Stored("kmeans2").encode(jnp.asarray(KERNEL), (-2,))
    codes, table = np.asarray(weight.unpacked()), np.asarray(weight.table).reshape(2, 4)
    x = KERNEL / np.asarray(weight.scale)
    for layer in range(2):
        means = [x[layer][codes[layer] == k].mean() for k in range(4)]
        np.testing.assert_allclose(means, table[layer], atol=0.02)
        np.testing.assert_array_equal(np.abs(x[layer][..., None] - table[layer]).argmin(-1), codes[layer])


@pytest.mark.long
def test_a_layer_of_a_stack_is_encoded_as_alone():
    for name in ("int3", "uint4", "nvfp4", "nf4_double", "kmeans3"):
        made = dataclasses.replace(FORMATS[name][0], group=FORMATS[name][0].group and 16)
        whole = made.encode(jnp.asarray(KERNEL), (-2,))
        one = made.encode(jnp.asarray(KERNEL[1:]), (-2,))
        assert whole.shape == KERNEL.shape
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a[1:], b, rtol=1e-6), whole, one)


def small(name):
    made = FORMATS[name][0]
    return dataclasses.replace(made, group=made.group and 8, outputs=made.outputs if made.outputs == 1 else 4)


@pytest.mark.parametrize("name", ["nvfp4", pytest.param("nf4_double", marks=pytest.mark.long)])
def test_products_and_their_gradients_are_those_of_the_dense_kernel(name):
    weight = small(name).encode(jnp.asarray(KERNEL[0]), (-2,))
    x = jnp.asarray(RNG.normal(size=(3, 64)), jnp.float32)

    def loss(x, kernel):
        return jnp.sum(jnp.sin(project(x, kernel, ("embed", "mlp"), (0,), Arithmetic.cast("float32"))))

    for got, want in zip(jax.value_and_grad(loss)(x, weight), jax.value_and_grad(loss)(x, weight.dense()), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("made", "shape", "contracted"),
    short(1, [
        (Stored("int4", group=16, activations=4), (64, 6), (0,)),
        (Stored("int6", group=32, outputs=2, activations=8), (4, 16, 6), (0, 1)),
        (Stored("int4", group=8, scale="e8m0", activations=8), (4, 16, 6), (0, 1)),
        (Stored("int8", group=16, activations=3), (6, 64), (1,)),
    ]),
)  # fmt: skip
def test_products_of_integers_are_those_of_numpy(made, shape, contracted):
    kernel = RNG.normal(size=shape).astype(np.float32)
    from_last = tuple(d - len(shape) for d in contracted)
    weight = made.encode(jnp.asarray(kernel), from_last)
    inputs, top = [shape[d] for d in contracted], 2 ** (made.activations - 1) - 1
    x = RNG.normal(size=(3, 2, *inputs)).astype(np.float32)
    axes = tuple("embed" if d in contracted else "mlp" for d in range(len(shape)))
    axes = ("heads", "head_dim", "embed") if len(shape) == 3 else axes
    got = project(jnp.asarray(x), weight, axes, contracted, Arithmetic.cast("float32"))
    groups = x.reshape(3, 2, -1, made.group or 64)
    scale = np.float32(np.abs(groups).max(-1, keepdims=True)) / np.float32(top)
    rounded = (np.round(groups / scale) * scale.astype(np.float64)).reshape(x.shape)
    out = [d for d in range(len(shape)) if d not in contracted]
    matrix = np.transpose(np.asarray(weight.dense(), np.float64), (*contracted, *out)).reshape(np.prod(inputs), -1)
    np.testing.assert_allclose(got, (rounded.reshape(3, 2, -1) @ matrix).reshape(got.shape), rtol=1e-5, atol=1e-5)
    gradient = jax.grad(lambda x: jnp.sum(project(x, weight, axes, contracted, Arithmetic.cast("float32"))))(x)
    np.testing.assert_allclose(gradient[0, 0].reshape(-1), matrix.sum(1), rtol=1e-4, atol=1e-5)


MODULES = {
    "linear": (
        lambda r: Linear({"embed": 32}, {"heads": 4, "head_dim": 16}, rngs=r), (lambda m, x: m(x)),
    ),
    "experts": (
        lambda r: MixtureOfExperts(experts=4, top_k=2, hidden=32)(
            32, 32, dtype=jnp.float32, param_dtype=jnp.float32, rngs=r
        ),
        (lambda m, x: m(x)[0]),
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("linear", "nvfp4"),
        *(pytest.param(m, n, marks=pytest.mark.long)
          for m, n in (("linear", "fp8_blocks"), ("linear", "w4a8"), ("experts", "int3"))),
    ],
)  # fmt: skip
def test_sharded_weights_are_those_of_one_device(module, name):
    make, call = MODULES[module]
    made = small(name)
    graphdef, infos = abstract(lambda: nnx.eval_shape(lambda: make(nnx.Rngs(0))))
    params = jax.tree.map(jnp.asarray, random_params(infos))
    alone = made.encoded(jax.tree.map(jnp.copy, params), infos, None)
    x = jnp.asarray(RNG.normal(size=(8, 4, 32)), jnp.float32)

    def loss(weights, x):
        return jnp.sum(call(nnx.merge(graphdef, weights), x) ** 2)

    want = jax.jit(jax.value_and_grad(loss, argnums=1))(alone, x)
    for mesh in ("data=2,fsdp=2,tensor=2", "fsdp=4,tensor=2", "expert=2,fsdp=2,data=2"):
        layout = js.Layout(mesh)
        placed = jax.tree.map(jax.device_put, params, shardings_of(infos, layout))
        weights = made.encoded(placed, infos, layout)
        jax.tree.map(np.testing.assert_array_equal, weights, alone)
        assert any(not w.sharding.is_fully_replicated for w in jax.tree.leaves(weights))
        with layout:
            got = jax.jit(jax.value_and_grad(loss, argnums=1))(weights, x)
        for a, b in zip(got, want, strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-5 * float(jnp.abs(b).max()))


def info(*shape, axes=("embed", "mlp"), contracted=(-2,)):
    return TensorInfo("mlp/up/kernel", shape, jnp.dtype(jnp.float32), axes, contracted)


def test_what_does_not_divide_is_refused_with_what_does():
    with raises_saying(ConfigError, "Stored.group = 48", "64 inputs of mlp/up/kernel", "nearest that does is 32"):
        Stored(group=48).infos(info(64, 32))
    with raises_saying(ConfigError, "int4.group = 128 (Stored.group)", "nearest that does is 64"):
        FORMATS["int4"][0].infos(info(64, 32))
    several = {"up": info(64, 32), "down": info(96, 64)}
    with raises_saying(ConfigError, "int4.group = 128", "nearest that does is 32, which divides those of all matrices"):
        FORMATS["int4"][0].infos(several)
    PRESETS["int4"](group=32).infos(several)
    assert FORMATS["int4"][0].describe() == "int4, one scale for 128 inputs"
    assert Stored(group=32).infos(info(64, 32)).scale.shape == (2, 32)
    heads = info(4, 16, 8, axes=("heads", "head_dim", "embed"), contracted=(-3, -2))
    assert Stored(group=32).infos(heads).scale.shape == (2, 1, 8)  # two heads share a scale
    with raises_saying(ConfigError, "int3", "units of 8", "nearest width that does is 4 bits"):
        Stored("int3").infos(info(6, 4))
    Stored("int4").infos(info(6, 4))
    layout = js.Layout("fsdp=4,tensor=2")
    with raises_saying(
        LayoutError, "mlp/up/kernel/scale", "groups of 32", "16 weights of a device", "a size that does is 16"
    ):
        shardings_of(Stored(group=32).infos(info(64, 32)), layout)
    shardings_of(Stored(group=16).infos(info(64, 32)), layout)
    with raises_saying(LayoutError, "mlp/up/kernel/codes", "3 bits", "4 weights of a device", "does is 4 bits"):
        shardings_of(Stored("int3").infos(info(16, 32)), layout)
    shardings_of(Stored("int4").infos(info(16, 32)), layout)


def test_settings_out_of_range_name_what_there_is():
    for wrong, message in (
        (dict(numbers="int9"), "no numbers 'int9'"), (dict(numbers="nf3"), "did you mean 'nf4'"),
        (dict(scale="float23"), "Stored.scale = 'float23'"), (dict(zeros=True), "need 'uint4'"),
        (dict(numbers="kmeans9"), "1 to 8 bits"), (dict(word="int8"), "'uint8' or 'uint32'"),
        (dict(group=0), "at least 1, or None"),
        (dict(outputs=True), "Stored.outputs = True"), (dict(activations=1), "2 to 8 bits"),
        (dict(numbers="nf4", activations=8), "needs products of integers"),
        (dict(scale=Stored("kmeans4")), "no tables of their own"),
    ):  # fmt: skip
        with raises_saying(ConfigError, message):
            Stored(**wrong)
    assert GroupedIntegers(bits=8, group=4) == Stored("int8", group=4)
    assert PRESETS["int4"](group=64) == Stored("int4", group=64, scale="bfloat16")
    assert all(PRESETS[name]() == made for name, (made, _) in FORMATS.items())


@pytest.mark.long
def test_flawed_weights_are_refused_by_name_and_zeros_stay_zeros():
    one = info(64, 32)
    for value, scale, message in (
        (np.nan, "float32", "NaN or infinite"), (np.inf, "float32", "NaN or infinite"),
        (1e8, "float16", "scales of float32"), (1e-12, "float16", "scales of float32"),
    ):  # fmt: skip
        kernel = jnp.asarray(KERNEL[0]).at[:, 3].set(value)
        with raises_saying(CheckpointError, "mlp/up/kernel", message):
            Stored(scale=scale).encoded(kernel, one, None)
    for name, value in (
        ("mxfp4", np.inf),
        ("nvfp4", np.nan),
        ("uint4", np.nan),
    ):  # alone, without the check by name; enough entries for vectors on a CPU
        dense = FORMATS[name][0].encode(jnp.zeros((256, 128)).at[3, 5].set(value), (-2,)).dense()
        assert not jnp.isfinite(dense[3, 5]), name
    zeros = jnp.asarray(KERNEL[0]).at[:, 3].set(0)
    for name in ("int4", "nvfp4", "mxfp8"):
        dense = small(name).encoded(jnp.copy(zeros), one, None).dense()
        assert bool(jnp.all(jnp.isfinite(dense))) and not jnp.any(dense[:, 3])


def test_bytes_are_counted_as_they_are_packed():
    for name, bits in (("int3", 3 + 16 / 8), ("mxfp4", 4 + 8 / 8), ("binary", 1 + 32 / 64), ("int6", 6 + 16 / 8)):
        infos = small(name).infos(info(64, 32))
        assert sum(i.nbytes for i in jax.tree.leaves(infos)) == 64 * 32 * bits / 8
        weight = small(name).encode(jnp.asarray(KERNEL[0]), (-2,))
        assert isinstance(weight, StoredWeight)
        jax.tree.map(lambda i, x: (i.shape, i.dtype) == (x.shape, x.dtype) or pytest.fail(i.path), infos, weight)
