"""A weight format defined in this file: trained, sharded, stored, counted, streamed and served."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxscale as js
from jaxscale.config import register
from jaxscale.data import ByteTokenizer
from jaxscale.errors import ConfigError
from jaxscale.infer.engine import Request
from jaxscale.infer.sampling import Sampling
from jaxscale.infer.serve.requests import Served
from jaxscale.infer.serve.start import engine_of
from jaxscale.infer.streaming import stream_model
from jaxscale.layout import abstract, shardings_of
from jaxscale.models import TransformerConfig
from jaxscale.nn import (
    Embedding,
    Linear,
    MixtureOfExperts,
    MultiHeadLatent,
    Weight,
    WeightFormat,
    as_weight,
    head_logits,
    project,
)
from jaxscale.nn.linear import into, out_of
from jaxscale.optim import SGD, Constant
from jaxscale.plan import dry_run, explain
from jaxscale.plan.covered import covered
from jaxscale.step import LoRA, TrainConfig, blueprint_of, settled
from jaxscale.step.state import TrainState, describe_model
from jaxscale.testing.params import random_params
from jaxscale.train import FromRun
from jaxscale.train.checkpoints import Checkpoints
from tests.truth.errors import raises_saying
from tests.truth.long import short


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Int8Weight(Weight):
    """Integer codes, and a scale per output."""

    codes: jax.Array
    scale: jax.Array

    @property
    def shape(self):
        return self.codes.shape

    def dense(self, dtype=None):
        return (self.codes * self.scale).astype(dtype or self.scale.dtype)

    def matmul(self, x, axes, contracted, arithmetic):
        y = project(x, self.codes, axes, contracted, arithmetic.plain(jnp.float32))
        return (y * jnp.squeeze(self.scale, contracted)).astype(arithmetic.out_dtype)


@register
@dataclasses.dataclass(frozen=True)
class OwnInt8(WeightFormat):
    """The largest number of an output is 127."""

    tables: bool = True

    def encode(self, kernel, contracted):
        scale = jnp.max(jnp.abs(kernel), axis=contracted, keepdims=True) / 127
        return Int8Weight(jnp.round(kernel / scale).astype(jnp.int8), scale.astype(jnp.float32))

    def covers(self, info):
        return self.tables or super().covers(info)


EXPERTS = MixtureOfExperts(experts=4, top_k=2, hidden=16, shared=1)
MODEL = TransformerConfig(
    vocab=32, depth=2, width=16, heads=2, hidden=32, mlp=EXPERTS,
    attention_layer=MultiHeadLatent(kv_rank=8, q_rank=8, plain_dim=4, rotary_dim=4, value_dim=4),
)  # fmt: skip
ROWS = dict(data=js.data.synthetic(32, documents=40, length=60), batch_size=8, seq_len=16, eval_batches=0)
THREE = "data=2,fsdp=2,tensor=2"


def _exact(weight):
    """The matrix of these codes, in float64."""
    return np.asarray(weight.codes, np.float64) * np.asarray(weight.scale, np.float64)


def _both(model):
    """A module with weights, and the same module with dense arrays."""
    graphdef, infos = abstract(lambda: model)
    weights = OwnInt8().encoded(jax.tree.map(jnp.asarray, random_params(infos)), infos, None)
    dense = jax.tree.map(lambda i, w: as_weight(w).dense(), infos, weights)
    return nnx.merge(graphdef, weights), nnx.merge(graphdef, dense), weights


def _made(make):
    return nnx.eval_shape(lambda: make(nnx.Rngs(0)))


X = np.random.default_rng(0).normal(size=(4, 8, 16)).astype(np.float32)
IDS = np.arange(32, dtype=np.int32).reshape(4, 8) % 31
LAYERS = {
    "linear": (lambda r: Linear({"embed": 16}, {"heads": 2, "head_dim": 4}, rngs=r), lambda m: m(X)),
    "linear, two dimensions in": (
        lambda r: Linear({"heads": 2, "head_dim": 8}, {"embed": 16}, rngs=r), lambda m: m(X.reshape(4, 8, 2, 8)),
    ),
    "experts": (
        lambda r: EXPERTS(16, 16, dtype=jnp.float32, param_dtype=jnp.float32, rngs=r), lambda m: m(jnp.asarray(X))[0],
    ),
    "embedding": (lambda r: Embedding(32, 16, rngs=r), lambda m: m(IDS)),
    "head": (lambda r: Embedding(32, 16, rngs=r), lambda m: head_logits(jnp.asarray(X), m.weight.get_value())),
    "head, uneven vocabulary": (
        lambda r: Embedding(31, 16, rngs=r), lambda m: head_logits(jnp.asarray(X), m.weight.get_value()),
    ),
    "latent attention": (lambda r: MODEL.make(r), lambda m: m.hidden(IDS)),
}  # fmt: skip


@pytest.mark.parametrize("name", short(4, LAYERS))
def test_every_layer_computes_what_it_does_with_dense_arrays(name):
    make, call = LAYERS[name]
    weighted, dense, weights = _both(_made(make))
    assert any(isinstance(w, Int8Weight) for w in jax.tree.leaves(weights, is_leaf=lambda w: isinstance(w, Weight)))
    want = jax.jit(call)(dense)
    with js.Layout(THREE):
        results = jax.jit(call)(weighted)
    np.testing.assert_allclose(results, want, rtol=1e-4, atol=1e-5 * float(jnp.abs(want).max()))


def test_products_of_weights_are_those_of_float64():
    for name, sums in (("linear", "bse,ehd->bshd"), ("linear, two dimensions in", "bshd,hde->bse")):
        make, call = LAYERS[name]
        module, _, weights = _both(_made(make))
        x = X if name == "linear" else X.reshape(4, 8, 2, 8)
        want = np.einsum(sums, x.astype(np.float64), _exact(weights["kernel"]))
        np.testing.assert_allclose(call(module), want, rtol=1e-5, atol=1e-6 * np.abs(want).max())


def test_overlapped_rings_take_the_arrays_that_weights_stand_for():
    up, down = ({"embed": 16}, {"mlp": 32}), ({"mlp": 32}, {"embed": 16})
    (up, up_dense, _), (down, down_dense, _) = (_both(_made(lambda r, a=a: Linear(*a, rngs=r))) for a in (up, down))
    want = down_dense(jnp.tanh(up_dense(X)))
    with js.Layout("tensor=4", sequence_sharded=True):
        ringed = jax.jit(lambda up, down: out_of(jnp.tanh(into(X, up, overlap=True)[0]), down, overlap=True))(up, down)
    np.testing.assert_allclose(ringed, want, rtol=1e-4, atol=1e-5)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A run that others start from."""
    folder = tmp_path_factory.mktemp("base") / "run"
    return js.fit(model=MODEL, layout=None, steps=2, lr=1e-2, run=folder, quiet=True, **ROWS)


def _settings(base, layout):
    lora = LoRA(rank=2, targets=("q", "out", "shared"), base=OwnInt8())
    more = dict(optimizer=SGD(momentum=0.0), lr=0.05, schedule=Constant(), clip_norm=None)
    return dict(start=FromRun(str(base.path)), adapters=lora, layout=layout, **more, **ROWS)


@pytest.fixture(scope="module")
def tuned(base, tmp_path_factory):
    """A run of four steps on one device that trains adapters over integer codes."""
    return js.fit(run=tmp_path_factory.mktemp("tuned") / "run", steps=4, quiet=True, **_settings(base, None))


@pytest.mark.long
def test_adapters_over_them_train_on_a_mesh_as_on_one_device_and_go_on_upon_another(base, tuned, tmp_path):
    js.fit(run=tmp_path / "run", steps=4, until=2, quiet=True, **_settings(base, js.Layout(THREE)))
    run = js.fit(run=tmp_path / "run", resume=True, quiet=True, layout=js.Layout("fsdp=4,tensor=2"))
    losses = [[m["loss"] for m in r.metrics()] for r in (tuned, run)]
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5)
    for one, other in zip(jax.tree.leaves(tuned.state.params), jax.tree.leaves(run.state.params), strict=True):
        assert float(jnp.abs(one).max()) > 0  # the second matrix of each pair began as zeros
        np.testing.assert_allclose(other, one, rtol=1e-4, atol=1e-5)
    kernel = run.state.frozen["runs"][0]["blocks"][0]["mlp"]["shared"]["up"]["kernel"]
    assert kernel.codes.dtype == jnp.int8 and tuple(kernel.codes.sharding.spec) == (None, "fsdp", "tensor")
    assert tuple(kernel.scale.sharding.spec) == (None, None, "tensor")
    names = run.checkpoints.manifest(4)["leaves"]
    assert {n.rsplit("/", 1)[1] for n in names if n.startswith("params/")} == {"a", "b"}
    assert js.load(run.path).config.adapters.base == OwnInt8()
    merged = js.load(run.path).params()  # arrays of the model's own types
    assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(merged))


def test_a_checkpoint_holds_weights_and_gives_them_to_another_mesh(tmp_path):
    _, infos = describe_model(MODEL)
    own, params = OwnInt8().infos(infos), jax.tree.map(jnp.asarray, random_params(infos))
    layout, other = js.Layout(THREE), js.Layout("fsdp=4,tensor=2")
    placed = jax.tree.map(jax.device_put, params, shardings_of(infos, layout))
    weights = OwnInt8().encoded(placed, infos, layout)
    checkpoints = Checkpoints(tmp_path, run="x")
    checkpoints.save(TrainState(jnp.int32(3), weights, {}, jax.random.key(0)), {"params": own, "extra": {}}, {})
    checkpoints.close()
    assert "params/embed/weight/codes" in checkpoints.manifest(3)["leaves"]
    results = checkpoints.restore_params(3, own, other)
    assert jax.tree.structure(results) == jax.tree.structure(weights)
    jax.tree.map(np.testing.assert_array_equal, results, weights)
    assert results["embed"]["weight"].codes.sharding == other.sharding(("vocab", "embed"), (32, 16))


def test_the_planner_counts_the_bytes_of_weights(base):
    layout = js.Layout(THREE)
    config = settled(TrainConfig(**_settings(base, layout)))
    blueprint, _ = blueprint_of(config)
    state = blueprint.init(0)
    device = layout.device_mesh.devices.flat[0]
    local = [s.data for x in jax.tree.leaves((state.params, state.frozen)) for s in x.addressable_shards
             if s.device == device]  # fmt: skip
    local_bytes = sum(x.nbytes for x in local)
    assert dry_run(config).parameter_bytes == local_bytes
    rows = explain(config).params
    assert sum(r.bytes_per_device for r in rows) == local_bytes
    codes = {r.path: r.dtype for r in rows}
    assert codes["embed/weight/codes"] == "int8" and codes["runs/0/blocks/0/mlp/up/scale"] == "float32"
    with raises_saying(ConfigError, "no formula covers", "OwnInt8", "traced step"):
        covered(config)


PROMPTS = [[3, 1, 4, 1, 5], [9, 2, 6]]


@pytest.fixture(scope="module")
def greedy(base):
    """Greedy tokens by full forward passes with the dense arrays."""
    run = js.load(base.path)
    graphdef, infos = describe_model(MODEL)
    weights = OwnInt8().encoded(run.params(), infos, None)
    dense = jax.tree.map(lambda i, w: as_weight(w).dense(), infos, weights)
    logits = jax.jit(lambda params, ids: nnx.merge(graphdef, params)(ids))
    texts = []
    for prompt in PROMPTS:
        ids = list(prompt)
        for _ in range(4):
            row = np.zeros((1, 12), np.int32)
            row[0, : len(ids)] = ids
            ids.append(int(jnp.argmax(logits(dense, row)[0, len(ids) - 1])))
        texts.append(ids[len(prompt) :])
    return texts


ASKED = dict(temperature=0, max_tokens=4, ignore_end=True)


@pytest.mark.parametrize(
    "options",
    short(2, [{}, *({"stream_layers": n} for n in ("host", "disk")), *({"layout": n} for n in (THREE, "pipeline=2"))]),
)
def test_greedy_completions_are_those_of_dense_arrays(base, greedy, options):
    run = js.load(base.path)
    options = {**options, **({"layout": js.Layout(options["layout"])} if "layout" in options else {})}
    results = run.generate(PROMPTS, weights=OwnInt8(), **ASKED, **options)
    assert [list(text.ids) for text in results] == greedy


@pytest.mark.long
def test_a_server_s_engine_takes_them(base, greedy):
    served = Served("x", ByteTokenizer(), 12, 32, lambda text: [])
    engine = engine_of(js.load(base.path), served, rows=2, budget=8, weights=OwnInt8())
    assert engine.stepper._params["head"]["weight"].codes.dtype == jnp.int8
    for i, prompt in enumerate(PROMPTS):
        engine.submit(Request(tuple(prompt), Sampling(temperature=0, max_tokens=4), i))
    results = [[] for _ in PROMPTS]
    while engine.busy:
        for event in engine.step():
            results[event.id].append(event.token)
    assert results == greedy


def test_a_layer_from_disk_is_read_once_for_all_arrays_of_its_weights(base, monkeypatch):
    run, seen = js.load(base.path), []
    arrays = run.checkpoints.arrays(2)
    read = type(arrays).read
    monkeypatch.setattr(
        type(arrays), "read", lambda self, name, regions: seen.append(name) or read(self, name, regions)
    )
    _, layers = stream_model(run, "disk", weights=OwnInt8())
    for _ in layers.each():
        pass
    layers.close()
    kernels = [name for name in seen if name == "params/runs/0/blocks/0/mlp/up"]
    assert len(kernels) == 3 and layers.resident.whole < sum(x.nbytes for x in jax.tree.leaves(run.params()))
