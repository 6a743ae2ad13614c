"""A run by stages with several chunks holds each stage's layers there, and everything that it shows is in order."""

from __future__ import annotations

import dataclasses
import functools

import jax
import numpy as np
import optax
import pytest

import jaxscale as js
from jaxscale.layout import Layout
from jaxscale.models import TransformerConfig
from jaxscale.nn.formats import Stored
from jaxscale.optim import AdamW
from jaxscale.plan.collectives import collectives
from jaxscale.plan.compile import compile_step
from jaxscale.step import Histograms, LoRA, MeZO, TrainConfig, Unfreeze, blueprint_of, settled
from jaxscale.step.snapshots import Snapshots
from jaxscale.step.stage_order import by_stage, in_layers, in_stages
from jaxscale.train.snapshots.taker import Taking
from tests.truth.compare import assert_leaves_agree
from tests.truth.layouts import build
from tests.truth.runs import assert_same_bits, bigram

MODEL = TransformerConfig(depth=4, vocab=32, width=16, heads=2, hidden=32)
V = Layout("pipeline=2", pipeline="dualpipe-v:4")
RING = Layout("pipeline=2,fsdp=2", pipeline="interleaved:4")
FLOW = Layout("pipeline=2", pipeline="1f1b:4")
UNEVEN, ODD = Layout("pipeline=2", pipeline="lockstep:4"), dataclasses.replace(MODEL, depth=3)
CHUNKS, SIX = Layout("pipeline=2,fsdp=2", pipeline="interleaved:4:2"), dataclasses.replace(MODEL, depth=6)
SMOOTH = AdamW(eps=1.0)  # with Adam's eps, rounding of a gradient near zero changes an update's sign


@dataclasses.dataclass(frozen=True)
class Keep:
    """Keeps the parameters that callbacks see."""

    seen: dict = dataclasses.field(default_factory=dict, init=False, compare=False)

    def on_step(self, step, row, run):
        self.seen["step", step] = jax.device_get(run.params)

    def on_checkpoint(self, step, row, run):
        self.seen["checkpoint", step] = jax.device_get(run.params)


def config(layout=None, **changes):
    changes = {"model": MODEL, "optimizer": SMOOTH, "steps": 2, **changes}
    return TrainConfig(**bigram(layout=layout, **changes))


def fit(settings, **options):
    return js.fit(settings, quiet=True, **options)


def restored(run, step, layout):
    blueprint = blueprint_of(dataclasses.replace(run.config, layout=layout))[0]
    return run.checkpoints.restore(step, blueprint.abstract_state(), blueprint.shardings())


def agree(got, want):
    for part in ("params", "opt_state"):
        assert_leaves_agree(*(jax.device_get(getattr(state, part)) for state in (got, want)))


@pytest.mark.parametrize(
    "layout,model,evaluations",
    [
        (Layout("pipeline=2", pipeline="interleaved:2"), MODEL, 0),
        pytest.param(V, MODEL, 1, marks=pytest.mark.long),
        pytest.param(UNEVEN, ODD, 1, marks=pytest.mark.long),
        pytest.param(CHUNKS, SIX, 0, marks=pytest.mark.long),
    ],
    ids=["chunks", "v", "padding", "chunks with padding"],
)
def test_a_run_by_stage_shows_layers_in_order_wherever_it_is_read(layout, model, evaluations, monkeypatch):
    def after(self, step, state):
        keep.seen["snapshot", step] = jax.device_get(state.params)
        return {}

    monkeypatch.setattr(Taking, "after", after)
    more = dict(model=model, checkpoint_every=1, eval_batches=evaluations, snapshots=Snapshots())
    many = config(layout, callbacks=(keep := Keep(),), **more)
    assert by_stage(blueprint_of(many)[0]).order is not None
    many, one = fit(many), fit(config(model=model, eval_batches=evaluations))
    for name in ("loss", "grad_norm", *(["eval_loss"] if evaluations else [])):
        got, want = ([row[name] for row in run.metrics() if name in row] for run in (many, one))
        np.testing.assert_allclose(got, want, rtol=1e-5)
    agree(many.state, one.state)
    for other in (None, FLOW, layout):
        assert_same_bits(restored(many, 2, other), many.state)
    assert len(keep.seen) == 6
    for (_, step), params in keep.seen.items():
        assert_same_bits(params, jax.device_get(many.trained(step)))


@pytest.mark.long
@pytest.mark.parametrize(
    "first,then,model",
    [(None, RING, MODEL), (V, FLOW, MODEL), (FLOW, V, MODEL), (RING, None, MODEL), (UNEVEN, CHUNKS, SIX)],
    ids=lambda value: f"{value.depth} layers" if value in (MODEL, SIX) else str(value),
)
def test_a_run_continues_from_a_checkpoint_of_another_schedule(first, then, model):
    fit(config(first, model=model), run="here", until=1)
    agree(fit(config(then, model=model), run="here", resume=True).state, fit(config(model=model)).state)


@pytest.mark.long
@pytest.mark.parametrize("optimizer", [SMOOTH, js.optim.AdamW8bit(), js.optim.Muon()], ids=lambda o: type(o).__name__)
def test_a_run_with_padding_continues_bit_for_bit(optimizer):
    settings = config(UNEVEN, model=ODD, optimizer=optimizer, steps=3)
    assert by_stage(blueprint_of(settings)[0]).order.padded
    fit(settings, run="here", until=1)
    assert_same_bits(fit(settings, run="here", resume=True).state, fit(settings).state)


@pytest.mark.long
@pytest.mark.parametrize(
    "schedule,depth", [("interleaved:4:2", 4), ("zb-v:4", 4), ("dualpipe-v:4", 4), ("lockstep:4", 3), ("zb-v:4", 6)]
)
def test_no_step_sends_layers_to_other_stages(schedule, depth):
    settings = config(Layout("pipeline=2", pipeline=schedule), model=dataclasses.replace(MODEL, depth=depth))
    sent = collectives(compile_step(settings, None), settings.layout.sizes)
    layer = sum(i.nbytes for i in jax.tree.leaves(blueprint_of(settings)[0].infos["runs"])) // depth
    assert sum(c.sent for c in sent if c.times == 1) < layer / 10  # sums of the loss and the gradient's norm


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A run to start from."""
    return fit(config(steps=1), run=tmp_path_factory.mktemp("base") / "run")


ADAPTERS = {
    "LoRA": LoRA(rank=2),
    "LoRA beside 4 bits": LoRA(rank=2, base=Stored("int4", group=8)),
    "some matrices": Unfreeze(("q", "embed")),
    "no matrix of a layer": Unfreeze(("embed",)),
}


@pytest.mark.long
@pytest.mark.parametrize("name", ADAPTERS)
def test_frozen_layers_stay_on_their_stages_too(name, base):
    def of(layout=None, **changes):
        more = dict(start=js.train.FromRun(str(base.path)), adapters=ADAPTERS[name], eval_batches=1)
        return settled(config(layout, **more, **changes))

    layout = Layout("pipeline=2", pipeline="interleaved:2")
    many, one = fit(of(layout, checkpoint_every=1, callbacks=(keep := Keep(),))), fit(of())
    agree(many.state, one.state)
    assert_leaves_agree(*(jax.device_get(run.state.frozen) for run in (many, one)))
    for number in ("loss", "eval_loss"):
        got, want = ([row[number] for row in run.metrics() if number in row] for run in (many, one))
        np.testing.assert_allclose(got, want, rtol=1e-5)
    for other in (None, layout):
        assert_same_bits(restored(many, 2, other).params, many.state.params)
    fit(of(layout), run="here", until=1)
    assert_same_bits(fit(of(layout), run="here", resume=True).state.params, many.state.params)
    model = blueprint_of(of())[0]
    want = jax.device_get(model.model_params(many.state.params, many.state.frozen))
    assert_same_bits(keep.seen["checkpoint", 2], want)
    sent = collectives(compile_step(of(layout), None), layout.sizes)
    layer = sum(i.nbytes for i in jax.tree.leaves(model.of_model().infos["runs"])) // MODEL.depth
    assert sum(c.sent for c in sent if c.times == 1) < layer / 10


OPTIMIZERS = [
    "AdamW", "AdamW8bit", "Lion", "LAMB", "LARS", "Adafactor", "Muon", "SOAP", "ScheduleFreeAdamW", "ScheduleFreeSGD",
]  # fmt: skip


@pytest.mark.parametrize(
    "name", [n if n == "Adafactor" else pytest.param(n, marks=pytest.mark.long) for n in OPTIMIZERS]
)
def test_optimizers_treat_layers_alike_in_any_order(name):
    """An update of a state in the order of stages is the update, in that order."""
    blueprint = blueprint_of(config(V, optimizer=getattr(js.optim, name)()))[0]
    _check_updates(blueprint, by_stage(blueprint).order)


BY_LAYER = [name for name in js.optim.__all__ if getattr(getattr(js.optim, name), "by_layer", False)]


@pytest.mark.parametrize("name", [n if n == "LAMB" else pytest.param(n, marks=pytest.mark.long) for n in BY_LAYER])
def test_padding_changes_no_layer_and_stays(name):
    blueprint = blueprint_of(config(CHUNKS, model=SIX, optimizer=getattr(js.optim, name)()))[0]
    order = by_stage(blueprint).order
    assert order.padded
    longer, updates = _check_updates(blueprint, order, padding=0.0)
    paths = [(i, order.run_of(i) is not None) for i in jax.tree.leaves(blueprint.infos)]
    padding = ~order.stages.real[0].reshape(-1)
    for (info, stacks), p, u in zip(paths, *map(jax.tree.leaves, (longer, updates)), strict=True):
        if stacks:  # they shrink by weight decay
            assert (np.abs(np.asarray(u)[padding]) <= np.abs(p[padding])).all(), info.path


def _check_updates(blueprint, order, padding=1.0):
    """Compare updates with those in the order of stages; gradients of padding are multiplied by a factor."""
    random = np.random.default_rng(0)

    def numbers():
        return jax.tree.map(lambda i: np.asarray(random.normal(size=i.shape), i.dtype), blueprint.infos)

    params, grads = numbers(), numbers()
    infos = blueprint.algorithm.infos(blueprint)

    def permuted(tree, infos):
        leaves, structure = jax.tree.flatten(tree)
        where = [order.run_of(i) for i in jax.tree.leaves(infos)]
        assert 0 in where or not any(i.shape for i in jax.tree.leaves(infos))  # SGD has a count of steps only
        chosen = order.stages.index[0].reshape(-1)
        return structure.unflatten(
            [x if run is None else np.asarray(x)[chosen] for x, run in zip(leaves, where, strict=True)]
        )

    def update(tx, params, grads):
        state = tx.init(params)
        for _ in range(2):
            updates, state = tx.update(grads, state, params)
        return updates, state

    updates, state = jax.jit(functools.partial(update, blueprint.tx))(params, grads)
    longer, more = (permuted(tree, blueprint.infos) for tree in (params, grads))
    real = order.stages.real[0].reshape(-1)

    def of_layers(tree, infos):  # without padding, in the order of stages
        leaves, structure = jax.tree.flatten(tree)
        where = map(order.run_of, jax.tree.leaves(infos))
        rows = [np.asarray(x) if run is None else np.asarray(x)[real] for x, run in zip(leaves, where, strict=True)]
        return structure.unflatten([np.asarray(x, np.float64) for x in rows])

    leaves, structure = jax.tree.flatten(more)
    where = map(order.run_of, jax.tree.leaves(blueprint.infos))
    factor = np.where(real, 1.0, padding).astype(np.float32)
    more = structure.unflatten(
        [
            x if run is None else x * factor.reshape(-1, *[1] * (x.ndim - 1))
            for x, run in zip(leaves, where, strict=True)
        ]
    )
    again, other = jax.jit(functools.partial(update, order.steps.tx))(longer, more)
    for got, want, names in ((again, updates, blueprint.infos), (other, state, infos["opt_state"])):
        assert_leaves_agree(of_layers(got, names), of_layers(permuted(want, names), names))
    return longer, again


@pytest.mark.long
def test_a_state_is_put_in_order_again_bit_for_bit():
    setup = build(MODEL, RING, js.optim.Lion())
    blueprint = by_stage(setup.blueprint)
    with RING:
        want = jax.device_get(setup.state.params)
        state = in_stages(blueprint, setup.state)
        moved = jax.device_get(state.params)
        assert_same_bits(jax.device_get(blueprint.weights(state)), want)
        state = in_layers(blueprint, state)
    assert_same_bits(jax.device_get(state.params), want)
    order = [0, 2, 1, 3]  # a stage has every second layer
    stack = lambda tree: tree["runs"][0]["blocks"][0]["attn"]["q"]["kernel"]  # noqa: E731
    np.testing.assert_array_equal(stack(moved), stack(want)[order])


@pytest.mark.parametrize(
    "changes",
    [
        dict(layout=FLOW),
        dict(layout=UNEVEN, model=ODD, optimizer=optax.sgd(0.1)),
        dict(layout=UNEVEN, model=ODD, histograms=Histograms()),
        dict(layout=Layout("pipeline=4"), model=dataclasses.replace(MODEL, depth=5)),
        dict(layout=V, algorithm=MeZO()),
    ],
    ids=["neighbours", "any optimizer", "histograms", "more padding than half", "algorithm"],
)
def test_other_runs_have_layers_in_order(changes):
    blueprint = blueprint_of(config(**changes))[0]
    assert by_stage(blueprint) is blueprint


def test_frozen_layers_are_put_in_order_with_their_adapters():
    settings = config(V, adapters=LoRA(rank=2, targets=("q",)), start=js.train.FromRun("other"))
    blueprint = by_stage(blueprint_of(settings)[0])
    places = blueprint.shardings()

    def numbered(info, place):
        first, *rest = info.shape
        return jax.device_put(np.broadcast_to(np.arange(first).reshape(first, *[1] * len(rest)), info.shape), place)

    infos = blueprint.infos, blueprint.frozen
    with V:
        moved = blueprint.order.weights_to_layers(*jax.tree.map(numbered, infos, (places.params, places.frozen)))
    for info, x in zip(jax.tree.leaves(infos), jax.device_get(jax.tree.leaves(moved)), strict=True):
        layers = blueprint.order.stages.index[0].reshape(-1) if "layers" in info.axes else np.arange(len(x))
        np.testing.assert_array_equal(x.reshape(len(x), -1)[layers, 0], np.arange(len(x)), info.path)
    assert {i.path.split("/")[0] for i in jax.tree.leaves(infos)} > {"runs"}
