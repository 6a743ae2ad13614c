"""Counted operations, against closed forms of the literature for any layout, and for each kind of equation."""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.sharding import PartitionSpec as P

import jaxscale as js
from jaxscale.models import presets
from jaxscale.nn import GELU, MixtureOfExperts, SoftmaxRouter
from jaxscale.plan import flops
from jaxscale.plan.flop_walk import operations
from jaxscale.step import LoRA, model_flops
from jaxscale.train import FromRun
from pallas_kernels.dispatch import on_device
from pallas_kernels.grouped_matmul import grouped_matmul
from pallas_kernels.grouped_matmul.tpu import PART

B, S, E, H, K, D, F, V = 4, 16, 32, 4, 2, 8, 48, 64
TINY = dict(depth=2, vocab=V, width=E, heads=H, head_dim=D, hidden=F)
SCORES = 4 * B * S * S * H * D  # of one layer, the whole square: scores, and what they mix
ATTENTION = 2 * B * S * (E * H * D + 2 * E * K * D + H * D * E) + SCORES
GATED = 6 * B * S * E * F
LOGITS = 2 * B * S * E * V


def _experts(hidden, top_k, **more):
    return MixtureOfExperts(experts=8, top_k=top_k, hidden=hidden, **more)


# Per layer, and in all, by hand: Narayanan et al. 2021 (24 B s h^2 + 4 B s^2 h, and 2 B s h V) and its kin.
ARCHITECTURES = {
    "GPT-2": (presets.gpt2(**TINY | {"hidden": 4 * E}), 2 * (24 * B * S * E**2 + 4 * B * S**2 * E) + LOGITS),
    "Llama 3": (presets.llama3_8b(**TINY, kv_heads=K), 2 * (ATTENTION + GATED) + LOGITS),
    "Gemma 3": (
        presets.gemma3(**TINY | {"depth": 7}, kv_heads=K, windows=(4, 4, 4, 4, 4, None)),
        7 * (ATTENTION + GATED) + LOGITS,
    ),
    "Qwen3": (presets.qwen3(**TINY, kv_heads=K), 2 * (ATTENTION + GATED) + LOGITS),
    "Mixtral": (
        presets.mixtral_8x7b(**TINY, kv_heads=K, mlp=_experts(None, 2)),
        2 * (ATTENTION + 2 * B * S * E * 8 + 2 * GATED) + LOGITS,
    ),
    "DeepSeekMoE": (
        presets.deepseek_moe_16b(
            **TINY, kv_heads=K, mlp=_experts(12, 3, shared=2, router=SoftmaxRouter(normalized=False))
        ),
        2 * ATTENTION + GATED + 2 * B * S * E * 8 + (3 + 2) * 6 * B * S * E * 12 + LOGITS,
    ),
}


def run_of(model, layout=None, **changes):
    settings = dict(model=model, layout=layout, batch_size=B, seq_len=S, prompt=None)
    return js.TrainConfig(**settings | changes)


@functools.cache
def step(name, memory, mesh=None):
    model = dataclasses.replace(ARCHITECTURES[name][0], memory=memory)
    return flops.of_step(run_of(model, None if mesh is None else js.Layout(mesh)))


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_products_are_those_of_the_literature(name):
    forward = ARCHITECTURES[name][1]
    counted = step(name, "none")
    assert counted.by("stage", matmul=True) == {"backward": 2 * forward, "forward": forward}
    assert counted.certain


@pytest.mark.parametrize("name", ["Llama 3", "Mixtral"])
def test_full_recomputation_makes_all_again_but_the_last_products(name):
    """The backward pass needs neither the result of a layer's last product nor the logits."""
    model, forward = ARCHITECTURES[name]
    last = 2 * B * S * E * F * model.depth * (2 if name == "Mixtral" else 1)
    counted = step(name, "full").by("stage", matmul=True)
    assert counted["recomputed"] == forward - LOGITS - last
    assert (counted["forward"], counted["backward"]) == (forward, 2 * forward)


@pytest.mark.parametrize("mesh", ["data=2,fsdp=2", "fsdp=2,tensor=2", "data=64,fsdp=8,tensor=2"])
def test_a_layout_changes_where_and_not_how_much(mesh):
    """On abstract meshes; the largest has a larger batch."""
    rows = max(B, 512 if "64" in mesh else 0)
    model = dataclasses.replace(ARCHITECTURES["Llama 3"][0], memory="none")
    counted = flops.of_step(run_of(model, js.Layout(mesh), batch_size=rows))
    assert counted.matmul == 3 * ARCHITECTURES["Llama 3"][1] * rows // B


@pytest.mark.parametrize("schedule", ["gpipe:4", "zb-h1:4"])
def test_a_pipeline_runs_its_layers_again_and_nothing_while_it_idles(schedule):
    """Compared with the trace of the executor, which has every phase at every tick."""
    model = dataclasses.replace(ARCHITECTURES["GPT-2"][0], memory="full")
    config = run_of(model, js.Layout("pipeline=2", pipeline=schedule), batch_size=4)
    counted = flops.of_step(config)
    traced = flops.traced_step(dataclasses.replace(config, layout=config.layout.abstract()))
    ticks = js.layout.simulate(config.layout.schedule.table(2, 4)).ticks
    assert counted.matmul * ticks == traced.matmul * 4
    assert counted.certain and not traced.certain
    assert set(traced.by("stage", matmul=True)) <= {"forward", "recomputed", "backward"}


def test_accumulation_changes_when_and_not_how_much():
    model = dataclasses.replace(ARCHITECTURES["GPT-2"][0], memory="none")
    assert flops.of_step(run_of(model, accumulate=4)).matmul == 3 * ARCHITECTURES["GPT-2"][1]


def test_modules_are_those_of_the_model():
    by_module = step("Mixtral", "none").by("module", matmul=True)
    assert by_module == {
        "runs/0/blocks/0/mlp/experts": 3 * 2 * 2 * GATED,
        "runs/0/blocks/0/attn/qkv": 3 * 2 * 2 * B * S * E * (H + 2 * K) * D,
        "runs/0/blocks/0/attn/mix": 3 * 2 * SCORES,
        "runs/0/blocks/0/attn/out": 3 * 2 * 2 * B * S * E * H * D,
        "loss": 3 * LOGITS,
        "runs/0/blocks/0/mlp/router": 3 * 2 * 2 * B * S * E * 8,
    }


def test_operations_are_counted_by_dtype():
    """The router is float32 for any dtype of the model, and experts are not."""
    rows = [r for r in step("Mixtral", "none").rows if r.matmul]
    of = lambda module: {r.dtype for r in rows if r.module.endswith(module)}  # noqa: E731
    assert of("mlp/router") == {"float32"} and of("mlp/experts") == of("attn/qkv") == {"bfloat16"}
    assert sum(step("Mixtral", "none").by("dtype").values()) == step("Mixtral", "none").total


X = jax.ShapeDtypeStruct((4, 8), jnp.float32)
SQUARE = jax.ShapeDtypeStruct((8, 8), jnp.float32)
PRODUCT = 2 * 4 * 8 * 8


def test_a_loop_of_unknown_length_is_counted_once_and_is_not_certain():
    loop = lambda x, w: jax.lax.while_loop(lambda x: jnp.sum(x) > 0, lambda x: x @ w, x)  # noqa: E731
    counted = flops.count(loop, X, SQUARE)
    assert counted.matmul == PRODUCT and not counted.certain


def test_a_scan_within_a_scan_is_multiplied_out():
    inner = lambda x, w: jax.lax.scan(lambda x, _: (x @ w, None), x, length=3)[0]  # noqa: E731
    outer = lambda x, w: jax.lax.scan(lambda x, _: (inner(x, w), None), x, length=5)[0]  # noqa: E731
    (row,) = [r for r in flops.count(outer, X, SQUARE).rows if r.matmul]
    assert (row.flops, row.calls, row.bytes) == (15 * PRODUCT, 15, 15 * 4 * (32 + 64 + 32))


def test_the_longest_branch_is_counted():
    branch = lambda i, x, w: jax.lax.switch(i, [lambda: x, lambda: x @ w @ w, lambda: x @ w])  # noqa: E731
    counted = flops.count(branch, jax.ShapeDtypeStruct((), jnp.int32), X, SQUARE)
    assert counted.matmul == 2 * PRODUCT and not counted.certain


@pytest.mark.parametrize("platform, products", [("tpu", 2), ("cpu", 1)])
def test_the_branch_of_the_platform_is_counted(platform, products):
    either = lambda x, w: jax.lax.platform_dependent(x, tpu=lambda x: x @ w @ w, default=lambda x: x @ w)  # noqa: E731
    counted = flops.count(either, X, SQUARE, platform=platform)
    assert counted.matmul == products * PRODUCT and counted.certain


def test_a_mapped_body_runs_on_every_device():
    with js.Layout("data=2,tensor=2"):
        body = jax.shard_map(
            lambda x, w: x @ w, in_specs=(P("data"), P()), out_specs=P("data"), axis_names={"data", "tensor"},
            check_vma=False,
        )  # fmt: skip
        counted = flops.count(body, X, SQUARE)
    assert counted.matmul == 2 * PRODUCT  # half the rows on each of two by two


def test_convolutions_and_both_ragged_products():
    image, kernel = jax.ShapeDtypeStruct((2, 3, 9, 9), jnp.float32), jax.ShapeDtypeStruct((5, 3, 3, 3), jnp.float32)
    convolve = lambda x, w: jax.lax.conv(x, w, (1, 1), "VALID")  # noqa: E731
    assert flops.count(convolve, image, kernel).matmul == 2 * 2 * 5 * 7 * 7 * 3 * 3 * 3
    rows, groups = jax.ShapeDtypeStruct((12, 8), jnp.float32), jax.ShapeDtypeStruct((3, 8, 5), jnp.float32)
    sizes = jax.ShapeDtypeStruct((3,), jnp.int32)
    product = lambda x, w, s: jnp.sum(jax.lax.ragged_dot(x, w, s))  # noqa: E731
    assert flops.count(product, rows, groups, sizes).matmul == 2 * 12 * 8 * 5
    assert flops.count(jax.value_and_grad(product, (0, 1)), rows, groups, sizes).matmul == 3 * 2 * 12 * 8 * 5
    with on_device("TPU v5p"):  # where groups end, a part of a tile is multiplied twice
        kernel = lambda *a: jnp.sum(grouped_matmul(*a, implementation="mosaic_tpu"))  # noqa: E731
        jaxpr = jax.make_jaxpr(jax.value_and_grad(kernel, (0, 1)))(rows, groups, sizes)
    counted = [(r.what, r.flops, r.calls) for r in operations(jaxpr.jaxpr, "tpu") if r.what.startswith("grouped")]
    once = 2 * (12 + 2 * PART) * 8 * 5
    assert sorted(counted) == [("grouped_matmul", once, 1)] * 2 + [("grouped_outer", once, 1)]


@pytest.mark.parametrize("shape, full", [((3, 64, 64), False), ((64, 16), False), ((64, 16), True), ((16, 64), False)])
def test_decompositions_are_counted_as_their_algorithms_need(shape, full):
    """9 n^3 of a symmetric matrix; of a QR its reflections, and Q from them: R and Q of square ones 4/3 n^3 each."""
    *stack, m, n = shape
    k, columns = min(m, n), m if full else min(m, n)
    with_q = sum(4 * (m - i) * (n - i) + 4 * (m - i) * (columns - i) for i in range(k))  # a reflection of what is left
    counted = flops.count(lambda a: jnp.linalg.qr(a, mode="complete" if full else "reduced"), jnp.zeros(shape))
    (qr,) = (r.flops for r in counted.rows if r.what == "qr")
    assert qr == pytest.approx(math.prod(stack) * with_q, rel=0.1)
    if m == n:
        assert qr == round(math.prod(stack) * 8 / 3 * n**3)
        eigh = next(r.flops for r in flops.count(jnp.linalg.eigh, jnp.zeros(shape)).rows if r.what == "eigh")
        assert eigh == math.prod(stack) * 9 * n**3


def test_elementwise_work_is_one_for_each_element():
    counted = flops.count(lambda x: jnp.sum(jnp.tanh(x) * x).astype(jnp.bfloat16), X)
    assert (counted.matmul, counted.elementwise) == (0, 3 * 32)


def test_a_kernel_counts_as_it_declares():
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...] * 2

    def call(x, cost):
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return pl.pallas_call(kernel, out_shape=shape, cost_estimate=cost, interpret=True, name="twice")(x)

    cost = pl.CostEstimate(flops=123, transcendentals=0, bytes_accessed=456)
    (row,) = flops.count(functools.partial(call, cost=cost), X).rows
    assert (row.what, row.flops, row.bytes, row.certain) == ("twice", 123, 456, True)
    assert not flops.count(functools.partial(call, cost=None), X).certain


def test_a_chips_own_kernels_are_counted_where_it_is_named():
    """Causal flash attention visits about half of the square, on a TPU 9 times (2 products, then 3 and 4)."""
    model = dataclasses.replace(ARCHITECTURES["GPT-2"][0], memory="none", attention=js.nn.flash_attention,
                                depth=1, heads=1, head_dim=128, positions=None)  # fmt: skip
    config = run_of(model, js.Layout("data=1"), seq_len=8192, batch_size=1, segments=True)  # at most as of one document
    counted = flops.of_step(config, kind="TPU v5 lite").by("module", matmul=True)["runs/0/blocks/0/attn/mix"]
    assert 0.5 < counted / (9 * 2 * 8192**2 * 128) < 0.6
    assert flops.of_step(config).by("module", matmul=True)["runs/0/blocks/0/attn/mix"] > counted


def test_plain_mlps_and_gated_ones_differ_by_their_gate():
    plain = flops.of_step(run_of(dataclasses.replace(ARCHITECTURES["Llama 3"][0], memory="none", mlp=GELU)))
    assert step("Llama 3", "none").matmul - plain.matmul == 3 * 2 * GATED // 3


def test_counts_print_and_are_json():
    counted = step("Llama 3", "none")
    assert counted.to_json()["total"] == counted.total == counted.matmul + counted.elementwise
    from rich.console import Console

    console = Console(width=120)
    with console.capture() as capture:
        console.print(counted)
    assert "attn/qkv" in capture.get() and "recomputed" in capture.get()


@pytest.mark.parametrize("name", ["GPT-2", "Qwen3", "Mixtral"])
@pytest.mark.parametrize("targets", [("*",), ("q", "out")], ids=["all", "some"])
def test_adapters_save_what_the_formula_says(name, targets):
    # of unrolled layers the first needs no input gradient either, which the formula leaves out
    whole = run_of(dataclasses.replace(ARCHITECTURES[name][0], memory="none", scan=True))
    adapted = dataclasses.replace(whole, start=FromRun("runs/base"), adapters=LoRA(rank=3, targets=targets))
    saved = flops.of_step(whole).matmul - flops.of_step(adapted).matmul
    assert model_flops(whole) - model_flops(adapted) == saved
