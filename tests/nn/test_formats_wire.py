"""What devices send each other when weights are stored in few bits, read off compiled programs."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import jaxscale as js
from jaxscale.layout import shardings_of
from jaxscale.models import TransformerConfig
from jaxscale.nn import MixtureOfExperts, project
from jaxscale.nn.formats import FORMATS, Stored
from jaxscale.optim import SGD, Constant
from jaxscale.parallel import Arithmetic
from jaxscale.plan import compile_for, dry_run, explain, topology_devices
from jaxscale.plan.collectives import collectives
from jaxscale.step import LoRA, TrainConfig, settled
from jaxscale.step.state import describe_model
from jaxscale.train import FromRun

MODEL = dict(vocab=64, depth=2, width=128, heads=2, hidden=256, dtype="bfloat16")


def sent(model, made, layout):
    """Bytes that a forward pass all-gathers over fsdp, and those of the sharded codes and scales."""
    graphdef, infos = describe_model(model)
    few = infos if made is None else made.infos(infos)
    placed = layout.on(topology_devices("v5e:2x2"))
    weights = jax.tree.map(
        lambda i, s: jax.ShapeDtypeStruct(i.shape, i.dtype, sharding=s), few, shardings_of(few, placed)
    )
    ids = jax.ShapeDtypeStruct((8, 32), jnp.int32)
    compiled = compile_for(lambda w, ids: nnx.merge(graphdef, w)(ids), "v5e:2x2", weights, ids, layout=layout)
    every = collectives(compiled, layout.sizes)
    assert all(c.certain for c in every)
    sharded = [i for i in jax.tree.leaves(few) if {"embed", "expert_embed"} & set(i.axes)]
    stored = sum(i.nbytes for i in sharded if i.path.rsplit("/", 1)[-1] in ("codes", "scale"))
    return sum(c.payload * c.times for c in every if c.kind == "all-gather" and c.axes == ("fsdp",)), stored


@pytest.mark.tpu_aot
@pytest.mark.parametrize("mlp", [None, MixtureOfExperts(experts=4, top_k=2, hidden=128)], ids=["dense", "experts"])
def test_tpus_gather_codes_and_scales_and_no_kernel(mlp):
    model = TransformerConfig(**MODEL, **({} if mlp is None else {"mlp": mlp}))
    layout, (_, infos) = js.Layout("fsdp=4"), describe_model(model)
    matrices = [i for i in jax.tree.leaves(infos) if i.contracted and "vocab" not in i.axes]
    plain, _ = sent(model, None, layout)
    rest = plain - 2 * sum(i.size for i in matrices)  # of embedding, head and routers; matrices are in bfloat16
    for made in (FORMATS["nvfp4"][0], Stored("int4", group=32, scale="bfloat16")):
        few, stored = sent(model, made, layout)
        assert few == stored + rest


@pytest.mark.tpu_aot
def test_tpus_multiply_integers_of_8_bits():
    weight = jax.eval_shape(
        lambda k: FORMATS["w8a8"][0].encode(k, (-2,)), jax.ShapeDtypeStruct((256, 512), jnp.float32)
    )
    x = jax.ShapeDtypeStruct((16, 256), jnp.bfloat16)
    product = compile_for(
        lambda x, w: project(x, w, ("embed", "mlp"), (0,), Arithmetic.cast("bfloat16")), "v5e:2x2", x, weight
    ).as_text()
    lines = [line for line in product.splitlines() if " convolution(" in line or " dot(" in line]
    assert lines and all("s32[" in line.split(" = ")[1] for line in lines), lines
    operands = re.findall(r"(\S+) = (\w+)\[", product)
    types = dict(operands)
    names = [n for line in lines for n in re.findall(r"%[\w.\-]+", line.split("(", 1)[1])[:2]]
    assert {types[n] for n in names} == {"s8"}


@pytest.mark.long
def test_the_planner_counts_packed_bytes(tmp_path):
    data = js.data.synthetic(64, documents=8, length=40)
    base = js.fit(model=TransformerConfig(**MODEL), layout=None, data=data, batch_size=4, seq_len=16, eval_batches=0,
                  steps=1, run=tmp_path / "run", quiet=True)  # fmt: skip
    lora = LoRA(rank=2, targets=("q",), base=FORMATS["nf4"][0])
    settings = dict(start=FromRun(str(base.path)), adapters=lora, optimizer=SGD(momentum=0.0), schedule=Constant())
    config = settled(
        TrainConfig(**settings, data=data, batch_size=4, seq_len=16, layout=js.Layout("fsdp=2"), eval_batches=0)
    )
    rows = {r.path: r for r in explain(config).params}
    codes = rows["runs/0/blocks/0/mlp/up/kernel/codes"]
    assert codes.dtype == "uint8" and codes.bytes_per_device == 2 * 128 * 256 // 2 // 2
    scales = rows["runs/0/blocks/0/mlp/up/kernel/scale"]
    assert scales.bytes_per_device == 2 * (128 // 64) * 256 * 4 // 2
    assert dry_run(config).parameter_bytes == sum(r.bytes_per_device for r in rows.values())
