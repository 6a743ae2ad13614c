"""Choosing a memory policy: a choice that agrees with the arithmetic, and at most so many programs compiled."""

from __future__ import annotations

import dataclasses
import functools
import types

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import jaxscale as js
from jaxscale.errors import ConfigError
from jaxscale.models import TransformerConfig
from jaxscale.nn import POLICIES, MemoryPolicy, MixtureOfExperts, flash_attention
from jaxscale.plan import choose, estimate, memory, policies
from jaxscale.plan.layer_memory import local_bytes
from jaxscale.step import prepare
from jaxscale.step.state import describe_model
from tests.truth.errors import raises_saying

TOPOLOGY = "v5e:2x2"
TINY = js.TrainConfig(
    model=TransformerConfig(depth=8, width=256, heads=2, hidden=1024, vocab=256, dtype="bfloat16"),
    layout=js.Layout("fsdp=4"), batch_size=8, seq_len=512, prompt=None,
)  # fmt: skip


def _with(policy):
    return dataclasses.replace(TINY, model=dataclasses.replace(TINY.model, memory=policy))


@pytest.mark.parametrize("name", [*POLICIES, "mid and up", "dots in tiles", "tiles"])
def test_extra_products_are_those_of_the_program(name):
    own = {
        "mid and up": MemoryPolicy(keep=("residual_mid",), offload=("mlp_up",)),
        "dots in tiles": MemoryPolicy(rest="dots", tile=("mlp_hidden",), tile_size=4),
        "tiles": MemoryPolicy(rest="keep", tile=("mlp_hidden",), tile_size=4),
    }
    policy = {**POLICIES, **own}[name]

    @functools.cache
    def products(policy):
        model = TransformerConfig(depth=2, vocab=37, width=32, heads=4, head_dim=8, hidden=48, memory=policy, scan=True)
        graphdef, infos = describe_model(model)
        params = jax.tree.map(lambda i: jax.ShapeDtypeStruct(i.shape, i.dtype), infos)
        f = jax.grad(lambda p, t: jnp.sum(nnx.merge(graphdef, p).hidden(t)))
        return str(jax.make_jaxpr(f)(params, jax.ShapeDtypeStruct((2, 8), jnp.int32))).count("dot_general[")

    one_each = {"qkv": 3, "scores": 1, "attn_out": 1, "residual_mid": 1, "mlp_up": 2, "mlp_down": 1}
    assert memory._extra_flops(policy, one_each, None) == products(policy) - products(POLICIES["none"])


def test_policies_are_ruled_out_by_arithmetic_and_at_most_four_are_compiled(monkeypatch):
    estimates = {n: estimate(_with(n), TOPOLOGY).device for n in POLICIES}
    compiled = []

    def pretend(config, topology):
        """A compiler that adds a megabyte to what arithmetic knows of."""
        compiled.append(config.model.memory)
        return estimate(config, topology).device + 2**20

    monkeypatch.setattr(policies, "compiled_bytes", pretend)
    assert choose(TINY, TOPOLOGY, 2**40).policy == "none" and len(compiled) == 1
    compiled.clear()
    fits = choose(TINY, TOPOLOGY, estimates["attention_only"] + 2**20)
    assert fits.policy == "attention_only" and fits.config.model.memory == POLICIES["attention_only"]
    assert compiled == [POLICIES["attention_only"]]
    text = str(fits)
    assert "passed over" in text and "chosen" in text and "not needed" in text
    compiled.clear()
    with raises_saying(ConfigError, "no memory policy fits", TOPOLOGY):
        choose(TINY, TOPOLOGY, min(estimates.values()) + 2**19)
    assert 1 <= len(compiled) <= 4
    compiled.clear()
    many = {f"tiles of {n}": MemoryPolicy(tile=("mlp_hidden",), tile_size=n) for n in (500, 400, 300, 200, 100, 10)}
    monkeypatch.setattr(policies, "compiled_bytes", lambda c, t: compiled.append(c) or 2**20)
    monkeypatch.setattr(policies, "estimate", lambda c, t: dataclasses.replace(
        estimate(c, t), peak=c.model.memory.tile_size, state=0))  # fmt: skip
    with raises_saying(ConfigError, "no memory policy fits"):
        choose(TINY, TOPOLOGY, 2**20 - 1, policies=many)
    # three from the cheapest on, and the smallest: a compiler that never adds up leaves arithmetic nothing to rule out
    assert [c.model.memory.tile_size for c in compiled] == [500, 400, 300, 10]


def test_of_two_policies_that_make_no_product_twice_the_one_that_holds_less_is_chosen(monkeypatch):
    monkeypatch.setattr(policies, "compiled_bytes", lambda config, topology: 2**30)
    flash = dataclasses.replace(TINY, model=dataclasses.replace(TINY.model, attention=flash_attention))
    choice = choose(flash, TOPOLOGY, 2**40)
    assert [r.policy for r in choice.rows[:2]] == ["dots_and_attention", "none"]
    assert choice.policy == "dots_and_attention" and choice.rows[0].estimate.extra_flops == 0


@pytest.mark.once
@pytest.mark.tpu_aot
def test_the_choice_for_a_slice_that_is_not_here_fits_it():
    """The policy's name depends on the budget; what is chosen was compiled and fits."""
    names = {"none": POLICIES["none"], "full": POLICIES["full"]}
    roomy = choose(TINY, TOPOLOGY, 2**34, policies=names)
    assert roomy.policy == "none"
    size = roomy.rows[0].compiled_bytes
    tight = choose(TINY, TOPOLOGY, size // 2, policies=names)
    assert tight.policy == "full" and tight.rows[-1].compiled_bytes <= size // 2


@pytest.mark.long
@pytest.mark.once
def test_a_choice_for_the_devices_here_hands_over_the_step_it_compiled():
    model = TransformerConfig(depth=2, width=32, vocab=64)
    data = js.data.synthetic(64, documents=8, length=32)
    config = js.TrainConfig(
        model=model, data=data, layout=js.Layout("data=1"), batch_size=2, seq_len=32, eval_batches=0
    )
    choice = choose(config, "cpu", 2**30, here=True)
    ready = prepare(choice.config)
    with config.layout:
        _, metrics = choice.program(ready.blueprint.init(0), ready.place(ready.loader, 0))
    assert choice.rows[0].verdict == "chosen" and jnp.isfinite(metrics["loss"])


def test_a_policy_whose_compilation_runs_out_of_memory_here_is_over_the_budget_and_the_next_one_is_tried(monkeypatch):
    tried = []

    class Program:
        def memory_analysis(self):
            return types.SimpleNamespace(
                argument_size_in_bytes=1000, temp_size_in_bytes=0, output_size_in_bytes=0, alias_size_in_bytes=0
            )

    def pretend(config, topology, *, guards):
        tried.append(config.model.memory)
        if len(tried) <= fails:
            raise jax.errors.JaxRuntimeError(message)
        return Program()

    monkeypatch.setattr(policies, "compile_step", pretend)
    names = {n: POLICIES[n] for n in ("none", "dots_and_attention", "full")}
    message, fails = "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 17179869184 bytes.", 1
    choice = choose(TINY, TOPOLOGY, 2**40, policies=names, here=True)
    first, second, last = choice.rows
    assert first.compiled_bytes is None and first.verdict.startswith("over the budget")
    assert (second.verdict, last.verdict) == ("chosen", f"not needed: costs more than {second.policy}")
    assert isinstance(choice.program, Program) and choice.policy == second.policy and len(tried) == 2
    # one that names its bytes is over the budget as well, be they fewer
    tried.clear()
    message = "RESOURCE_EXHAUSTED: Used 16.00G of 15.00G hbm"
    choice = choose(TINY, TOPOLOGY, 2**40, policies=names, here=True)
    assert choice.rows[0].compiled_bytes == 2**34 and choice.rows[1].verdict == "chosen"
    tried.clear()
    message, fails = "RESOURCE_EXHAUSTED: Out of memory", 3
    with raises_saying(ConfigError, "no memory policy fits", "full", "ran out while it was compiled"):
        choose(TINY, TOPOLOGY, 2**30, policies=names, here=True)
    tried.clear()
    message = "INTERNAL: another failure"
    with pytest.raises(jax.errors.JaxRuntimeError, match="another failure"):
        choose(TINY, TOPOLOGY, 2**40, policies=names, here=True)


def test_a_mixtures_estimate_counts_active_experts_and_its_choice_leaves_tiles_out():
    model = dataclasses.replace(TINY.model, mlp=MixtureOfExperts(experts=8, top_k=2, shared=1), memory="none")
    config = dataclasses.replace(TINY, model=model)
    up = 2 * 512 * 1024 * 2  # bytes of one expert's hidden layer for all of a device's tokens
    held = model.activations(8, 512)
    per_device = lambda name: sum(local_bytes(i, config.layout) for i in held[name])  # noqa: E731
    assert per_device("mlp_up") == 2 * 3 * up and per_device("mlp_hidden") == 3 * up
    result = estimate(dataclasses.replace(config, model=dataclasses.replace(model, memory="full")), TOPOLOGY)
    forward = model.flops(8, 512, training=False)
    last = model.product_flops(8, 512)["mlp_down"] + model.product_flops(8, 512)["logits"]
    assert result.extra_flops == (forward - last) / (3 * forward)
    with raises_saying(ConfigError, "none of the memory policies minimal"):
        choose(config, TOPOLOGY, 10**9, policies={"minimal": POLICIES["minimal"]})
