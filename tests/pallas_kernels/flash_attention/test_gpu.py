"""The Hopper kernels: values and gradients interpreted with race detection, the tiles they walk, compiling."""

from __future__ import annotations

import contextlib
import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.aot import compile_kernel, kernel_reports
from pallas_kernels.dispatch import JAX_VERSION, KernelError, Target, interpreted, on_device
from pallas_kernels.flash_attention import NAMES, Blocks, flash_attention, gpu, gpu_split, reference
from pallas_kernels.flash_attention.gpu_walk import Walk
from pallas_kernels.flash_attention.inputs import Inputs, Score
from pallas_kernels.flash_attention.masks import FULL, SKIP, Mask, Tokens, visits
from pallas_kernels.gate import configurations
from pallas_kernels.registers import registers_stay
from tests.pallas_kernels.flash_attention.cases import FEATURES, covering, name_of
from tests.pallas_kernels.flash_attention.test_values import check

interpreter = pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="the interpreter needs jax 0.11")
CASES = covering(
    {n: FEATURES[n] for n in ("causal", "segments", "positions", "window", "softcap", "kind")}
    | {"dtype": ("bfloat16", "float16"), "heads": ((2, 1), (2, 2)), "lengths": ((130, 130), (40, 200))}
    | {"widths": ((64, 64), (128, 128), (80, 64)), "deterministic": (False, True)}
)
WIDE = [
    dict(dtype="bfloat16", widths=(192, 128), heads=(2, 1), lengths=(70, 130), causal=True, segments=True),
    dict(dtype="bfloat16", widths=(256, 256), heads=(1, 1), lengths=(70, 130), softcap=2.0, window=7),
]


@interpreter
@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_values_and_gradients_are_as_exact_as_plain_ones(case):
    with interpreted(races=True):
        check(dict.fromkeys(FEATURES) | case, "mosaic_gpu")


@interpreter
@pytest.mark.parametrize("case", WIDE, ids=name_of)
def test_widths_whose_sums_take_a_kernel_each_are_as_exact(case):
    with interpreted(races=True):
        check(dict.fromkeys(FEATURES) | {"kind": "softmax"} | case, "mosaic_gpu")


@interpreter
@pytest.mark.parametrize("case", [*CASES[:2], WIDE[0], pytest.param(WIDE[1], marks=pytest.mark.long)], ids=name_of)
def test_two_warpgroups_that_copy_their_tiles_are_as_exact(case):
    jax.clear_caches()
    with interpreted(races=True), registers_stay():
        check(dict.fromkeys(FEATURES) | {"kind": "softmax"} | case, "mosaic_gpu")
    jax.clear_caches()


@interpreter
@pytest.mark.parametrize("stay", [False, True], ids=["three warpgroups", "two warpgroups"])
def test_blocks_that_attend_one_item_after_another_refill_their_slots_in_time(stay):
    table = np.tri(3, 3, dtype=bool)
    table[1] = False  # an item without keys between others
    inputs = Inputs(*arrays(300, 300, d=208), None, Tokens())
    mask, score = Mask(causal=True, blocks=Blocks.of(table, query=128, key=128)), Score("softmax", 208**-0.5, None, 0.0)
    target = Target("NVIDIA H200", "cuda", interpret=True, races=True, cores=2)
    with registers_stay() if stay else contextlib.nullcontext():
        got = gpu.forward(target, inputs, mask, score)
    for a, b in zip(got, reference.forward(inputs, mask, score), strict=True):
        np.testing.assert_allclose(np.asarray(a, np.float32), np.asarray(b, np.float32), rtol=1e-2, atol=1e-2)


@interpreter
@pytest.mark.parametrize("segments", [False, True], ids=["causal", "packed"])
def test_stretches_of_keys_merge_into_the_same_output(segments, monkeypatch):
    merged, merge = [], gpu_split.merge
    monkeypatch.setattr(gpu_split, "LEAST", 128)
    monkeypatch.setattr(gpu_split, "merge", lambda out, lse, n: merged.append(n) or merge(out, lse, n))
    q, k, v = arrays(8, 512)
    ids = (np.arange(512) >= 300).astype(np.int32)[None]  # no query sees the first stretch
    options = {"segment_ids": (ids[:, -8:], ids)} if segments else {}
    attend = functools.partial(flash_attention, causal=True, return_lse=True, **options)
    with interpreted(races=True):
        got = attend(q, k, v, implementation="mosaic_gpu")
    assert merged == [2]
    for a, b in zip(got, attend(q, k, v, implementation="dense"), strict=True):
        np.testing.assert_allclose(np.asarray(a, np.float32), np.asarray(b, np.float32), rtol=1e-2, atol=1e-2)


def test_keys_are_cut_where_multiprocessors_would_be_idle():
    assert gpu_split.stretches(132, 8, 131072) == 16
    assert gpu_split.stretches(132, 8, 16384) == 8  # of 2,048 keys each
    assert gpu_split.stretches(132, 8, 131072 + 256) == 2  # whole tiles
    assert gpu_split.stretches(132, 67, 131072) == gpu_split.stretches(132, 8, 2048) == 1


def arrays(s, t, h=2, kv=1, d=64):
    random = np.random.default_rng(0)
    return tuple(jnp.asarray(random.normal(size=x), jnp.bfloat16) for x in ((1, s, h, d), (1, t, kv, d), (1, t, kv, d)))


@interpreter
def test_an_invisible_tile_is_not_computed():
    q, k, v = arrays(256, 256, h=1)
    ids = (np.arange(256) >= 128).astype(np.int32)[None]
    spoil = lambda x: x.at[:, 128:].set(jnp.nan)  # noqa: E731

    def value(k, v, implementation):
        f = lambda q: flash_attention(q, k, v, segment_ids=ids, implementation=implementation)[:, :128]  # noqa: E731
        y, pull = jax.vjp(f, q)
        return np.asarray(y, np.float32), np.asarray(pull(jnp.ones_like(y))[0], np.float32)[:, :128]

    with interpreted():
        got = value(spoil(k), spoil(v), "mosaic_gpu")
    for a, b in zip(got, value(k, v, "dense"), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-2, atol=2e-2)


@interpreter
def test_a_window_as_large_as_an_integer_is_none():
    q, k, v = arrays(128, 128)
    with interpreted():
        got = flash_attention(q, k, v, causal=True, window=2**31 - 1, implementation="mosaic_gpu")
    want = flash_attention(q, k, v, causal=True, implementation="dense")
    np.testing.assert_allclose(np.asarray(got, np.float32), np.asarray(want, np.float32), rtol=2e-2, atol=2e-2)


@interpreter
def test_a_table_of_blocks_is_the_dense_masked_result():
    blocks = Blocks.of(np.array([[1, 0], [0, 1], [0, 0]], bool), query=128, key=128)  # the last queries see nothing
    inputs = arrays(300, 200)
    with interpreted(races=True):
        got = flash_attention(*inputs, blocks=blocks, return_lse=True, implementation="mosaic_gpu")
    want = flash_attention(*inputs, blocks=blocks, return_lse=True, implementation="dense")
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(np.asarray(a, np.float32), np.asarray(b, np.float32), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("shape", [(3, 2, 2, 5, False), (2, 3, 1, 7, True), (1, 1, 4, 1, True)])
def test_the_blocks_of_a_grid_walk_every_tile_of_every_head_once(shape):
    batch, kv, heads, rows, shared = shape
    table = np.random.default_rng(0).integers(SKIP, FULL + 1, (1 if shared else batch, rows, 4)).astype(np.int8)
    met = visits(table)
    walk = Walk.of(Target("NVIDIA H200", "cuda", interpret=True), batch, kv, heads, met, head_bytes=9 * 2**20)
    plan = np.asarray(walk.plan(met))
    items = [walk.item_of(block, n, plan) for block in range(walk.blocks) for n in range(walk.count_of(block))]
    walked = sorted((int(i.b), int(i.kv), int(i.g), int(i.tile)) for i in items)
    assert walked == list(itertools.product(range(batch), range(kv), range(heads), range(rows)))
    assert all(int(i.count) == (table[int(i.row), int(i.tile)] != SKIP).sum() for i in items)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(dtype=jnp.float32), "float32 is left to XLA"),
        (dict(d=72), "multiples of 16 from 64 to 256"),
        (dict(bias=1.0), "a bias is left to XLA"),
        (dict(dv=192), "values of width 192 do not fit"),
        (dict(blocks=Blocks.of(np.ones((4, 4), bool), query=64, key=64)), "128 queries and 128 keys"),
    ],
    ids=["float32", "width", "bias", "values", "blocks"],
)
@interpreter
def test_an_unsupported_case_raises_with_the_reason(change, message):
    options = {n: x for n, x in change.items() if n not in ("dtype", "d", "dv")}
    q, k, v = (x.astype(change.get("dtype", x.dtype)) for x in arrays(256, 256, d=change.get("d", 64)))
    v = jnp.tile(v, change.get("dv", 64) // 64 or 1)
    with interpreted(), pytest.raises(KernelError, match=message):
        flash_attention(q, k, v, implementation="mosaic_gpu", **options)


SPILLS = pytest.mark.skipif(JAX_VERSION < (0, 12), reason="with jax 0.11 it spills, as the README says")
GATE = [
    "128/128 packed window forward",
    "128/128 packed window backward",
    "64/64 packed softcap backward",
    pytest.param("256/256 odd packed both sides backward", marks=SPILLS),
    "128/128 deterministic backward",
    "128/128 causal backward, two warpgroups",
    "256/256 packed softcap forward, two warpgroups",
]


@pytest.mark.gpu_aot
@pytest.mark.parametrize("name", GATE)
def test_it_compiles_without_spills_and_fits_in_shared_memory(name):
    fn, shapes = next((fn, shapes) for n, fn, shapes in configurations("flash_attention", "gpu") if n == name)
    reports = kernel_reports(fn, *shapes)
    assert reports and not [r.problem for r in reports if r.problem]
    if "two warpgroups" in name:  # three have 168 at most
        assert all(r.registers > 168 for r in reports)


@pytest.mark.gpu_aot
@pytest.mark.parametrize(
    ("kind", "deterministic", "kernels"),
    [("NVIDIA H200", False, 2), ("NVIDIA H200", True, 3), ("NVIDIA A100", False, 0)],
)
def test_lowering_for_a_gpu_chooses_its_kernels(kind, deterministic, kernels):
    def loss(q, k, v):
        return flash_attention(q, k, v, causal=True, deterministic=deterministic).astype(jnp.float32).sum()

    shapes = [jax.ShapeDtypeStruct((2, 256, heads, 128), jnp.bfloat16) for heads in (4, 2, 2)]
    with on_device(kind):
        text = jax.jit(jax.grad(loss, (0, 1, 2))).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()
    assert len(re.findall(r"custom_call @\S*mosaic_gpu\S*\(", text)) == kernels


@pytest.mark.gpu_aot
def test_the_forward_pass_of_scanned_layers_runs_once_where_its_output_is_saved():
    saved = jax.checkpoint_policies.save_only_these_names(*NAMES)  # jax 0.11 repeats the kernel; 0.12 does not

    def loss(x, weights):
        @functools.partial(jax.checkpoint, policy=saved)
        def layer(x, w):
            y = jnp.einsum("bshd,de->bshe", x, w)
            return x + jnp.einsum("bshd,de->bshe", flash_attention(y, y, y, causal=True), w), None

        return jax.lax.scan(layer, x, weights)[0].astype(jnp.float32).sum()

    x, weights = jax.ShapeDtypeStruct((1, 256, 2, 128), "bfloat16"), jax.ShapeDtypeStruct((3, 128, 128), "bfloat16")
    text = compile_kernel(jax.grad(loss, (0, 1)), x, weights, topology="h200").as_text()
    assert len(re.findall(r"custom-call\(.*flash_forward", text)) == 1
