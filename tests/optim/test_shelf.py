"""The optimizer shelf, every member through one table: reference, layouts, layers, state, composition, descent."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import jaxscale as js
from jaxscale import optim
from jaxscale.errors import ConfigError
from jaxscale.layout import STACKED, Layout, TensorInfo, shardings_of
from jaxscale.models import Learned, TransformerConfig
from jaxscale.nn import MixtureOfExperts
from jaxscale.optim import state_infos, state_shardings, view_of
from jaxscale.optim.layers import gather_matrices, scatter_matrices
from jaxscale.step.prepare import prepare
from jaxscale.step.state import describe_model
from jaxscale.step.step import make_eval
from tests.truth.compare import TOLERANCE, assert_leaves_agree
from tests.truth.errors import raises_saying
from tests.truth.layouts import QUICKLY
from tests.truth.runs import bigram, losses

RATE = optax.linear_schedule(0.1, 0.02, 8)
CLIP = 5.0
STEPS = 4


def _info(path, shape, *axes):
    return TensorInfo(path, shape, np.dtype("float32"), axes)


INFOS = {
    "embed": {"weight": _info("embed/weight", (32, 16), "vocab", "embed")},
    "q": {"kernel": _info("q/kernel", (2, 16, 4, 4), "layers", "embed", "heads", "head_dim")},
    "out": {"kernel": _info("out/kernel", (2, 4, 4, 16), "layers", "heads", "head_dim", "embed")},
    "up": {"kernel": _info("up/kernel", (2, 16, 32), "layers", "embed", "mlp")},
    "experts": _info("experts", (2, 2, 16, 16), "layers", "experts", "expert_embed", "expert_mlp"),
    "norm": {"scale": _info("norm/scale", (2, 16), "layers", "norm")},
}
SIZE = sum(i.size for i in jax.tree.leaves(INFOS))
HIDDEN = ("q", "out", "up", "experts")


def _draw(seed, scale=1.0):
    """Normal arrays whose layers differ in magnitude, so that a norm over all layers together is wrong."""
    random = np.random.default_rng(seed)

    def one(info):
        x = scale * random.normal(size=info.shape)
        for dim, axis in enumerate(info.axes):
            if axis in STACKED:
                x = x * np.arange(1, 1 + info.shape[dim]).reshape([-1 if i == dim else 1 for i in range(x.ndim)])
        return x.astype(np.float32)

    return jax.tree.map(one, INFOS)


PARAMS, GRADS = _draw(0), [_draw(1 + i, 0.1) for i in range(STEPS)]


def _unrolled(tree):
    """{path: {layer: matrix}}: the parameters without stacks."""
    out = {}
    for info, x in zip(jax.tree.leaves(INFOS), jax.tree.leaves(tree), strict=True):
        view = view_of(info)
        stack = [n for n, a in zip(view.shape, view.axes, strict=True) if a in STACKED]
        x = np.asarray(x).reshape(view.shape)
        out[info.path] = {str(at): x[at] for at in itertools.product(*map(range, stack))}
    return out


DECAYS = {path: {at: path != "norm/scale" for at in layers} for path, layers in _unrolled(PARAMS).items()}
LABELS = {path: {at: "hidden" if path.split("/")[0] in HIDDEN else "rest" for at in layers}
          for path, layers in _unrolled(PARAMS).items()}  # fmt: skip


def _muon():
    rest = optax.adamw(RATE, 0.9, 0.95, weight_decay=0.1, mask=lambda p: jax.tree.map(lambda x: x.ndim == 2, p))
    muon = optax.contrib.muon(RATE, consistent_rms=0.2, weight_decay=0.1)
    return optax.multi_transform({"hidden": muon, "rest": rest}, LABELS)


def _schedule_free(base, b1=0.9):
    return optax.contrib.schedule_free(base, RATE, b1)


@dataclasses.dataclass(frozen=True)
class Member:
    """A row of the table.

    Args:
      optimizer: as in a config.
      reference: optax's optimizer for single layers; `None` where a NumPy version is the reference.
      held: bytes of state, in closed form.
      tolerance: allowed relative error of parameters.
    """

    optimizer: optim.Optimizer
    reference: Callable[[], optax.GradientTransformation] | None
    held: int
    tolerance: float = TOLERANCE


def _bytes(of: Callable[[int, int], int]) -> int:
    """Return bytes of float32 state of all hidden matrices, `of(rows, columns)` numbers for each layer."""
    views = [view_of(i) for i in jax.tree.leaves(INFOS) if i.path.split("/")[0] in HIDDEN]
    return sum(4 * math.prod(v.shape[:-2]) * of(*v.shape[-2:]) for v in views)


COUNT, REST = 4, 4 * (32 * 16 + 2 * 16)
# "up" is wider than tall: its bases have a null space, in which rounding decides the eigenvectors
WIDE = 16
MEMBERS = {
    "lion": Member(optim.Lion(), lambda: optax.lion(RATE, weight_decay=0.1, mask=DECAYS), 4 * SIZE + 2 * COUNT),
    "lamb": Member(
        optim.LAMB(), lambda: optax.lamb(RATE, weight_decay=0.01, mask=DECAYS), 8 * SIZE + 2 * COUNT
    ),
    "lars": Member(
        optim.LARS(trust_coefficient=0.5),
        lambda: optax.lars(RATE, 1e-4, DECAYS, 0.5, trust_ratio_mask=DECAYS),
        4 * SIZE + COUNT,
    ),
    "adafactor": Member(
        optim.Adafactor(min_dim_size_to_factor=8),
        lambda: optax.adafactor(RATE, 8),
        # row and column moments; full moments of what is not factored, and a placeholder per layer for absent ones
        _bytes(lambda m, n: m + n + 1) + 4 * (32 + 16 + 1) + 4 * 2 * (16 + 1 + 1) + 4 * COUNT,
    ),
    "schedule-free adamw": Member(
        optim.ScheduleFreeAdamW(),
        lambda: _schedule_free(
            optax.adamw(RATE, 0.0, 0.999, weight_decay=0.1, mask=DECAYS)
        ),
        8 * SIZE + 6 * COUNT,
    ),
    "schedule-free sgd": Member(optim.ScheduleFreeSGD(), lambda: _schedule_free(optax.sgd(RATE)), 4 * SIZE + 5 * COUNT),
    "muon": Member(optim.Muon(), _muon, _bytes(lambda m, n: m * n) + 2 * REST + 3 * COUNT),
    "soap": Member(
        optim.SOAP(max_size=WIDE, frequency=2, eps=1e-3),
        None,
        _bytes(lambda m, n: 2 * m * n + 2 * sum(s * s for s in (m, n) if s <= WIDE)) + 2 * REST + 3 * COUNT,
        tolerance=1e-4,  # an eigenvector moves by the rounding of its matrix over the gap to the next eigenvalue
    ),
}  # fmt: skip

ZERO1 = Layout("data=2,fsdp=4", "zero1")
LAYOUTS = [ZERO1, Layout("pipeline=2,fsdp=2,tensor=2")]


def _plain(member):
    return member.optimizer.make(RATE, INFOS)


def _injected(member):
    return optax.inject_hyperparams(member.optimizer.make)(learning_rate=RATE, infos=INFOS)


@functools.cache
def _program(layout=None, wrap=_plain):
    """A compiled step of every optimizer, with clipping, and the initial state."""
    txs = {name: optim.chain(optax.clip_by_global_norm(CLIP), wrap(m)) for name, m in MEMBERS.items()}
    params, state = dict.fromkeys(txs, PARAMS), {name: tx.init(PARAMS) for name, tx in txs.items()}
    where = None
    if layout is not None:
        states = {name: state_shardings(tx, INFOS, layout) for name, tx in txs.items()}
        where = dict.fromkeys(txs, shardings_of(INFOS, layout)), states
        params, state = jax.device_put((params, state), where)

    def step(params, state, grads):
        new = {name: optim.apply_gradients(tx, grads[name], state[name], params[name]) for name, tx in txs.items()}
        return {name: p for name, (p, _) in new.items()}, {name: s for name, (_, s) in new.items()}

    run = jax.jit(step, out_shardings=where).lower(params, state, dict.fromkeys(txs, PARAMS)).compile(QUICKLY)
    return run, params, state


@functools.cache
def _all(layout=None, wrap=_plain):
    """Parameters and state of every optimizer after a few steps, in NumPy."""
    run, params, state = _program(layout, wrap)
    for grads in GRADS:
        params, state = jax.block_until_ready(run(params, state, dict.fromkeys(MEMBERS, grads)))
    return jax.tree.map(np.asarray, (params, state))


@pytest.mark.parametrize("name", [n for n, m in MEMBERS.items() if m.reference])
def test_stacked_layers_equal_optax_on_each_layer_alone(name):
    tx = optax.chain(optax.clip_by_global_norm(CLIP), MEMBERS[name].reference())
    params, state = _unrolled(PARAMS), tx.init(_unrolled(PARAMS))
    update = jax.jit(tx.update).lower(params, state, params).compile(QUICKLY)
    for grads in GRADS:
        updates, state = update(_unrolled(grads), state, params)
        params = jax.tree.map(np.add, params, jax.tree.map(np.asarray, updates))
    assert_leaves_agree(_unrolled(_all()[0][name]), params, gradient_norm=0.0)


def _soap_reference(g, hidden, decay, state):
    """SOAP (Vyas et al. 2024, algorithm 3) and, for what is not hidden, AdamW; one matrix in float64."""
    b1, b2, eps = 0.95, 0.95, 1e-3
    t, m, v, gram, basis = state
    if not hidden:
        t, m, v = t + 1, b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g**2
        return m / (1 - b1**t) / (np.sqrt(v / (1 - b2**t)) + eps), (t, m, v, gram, basis)
    into = lambda x: basis[0].T @ x @ basis[1]  # noqa: E731
    u = np.zeros_like(g)
    if t:
        m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * into(g) ** 2
        u = basis[0] @ (into(m) / (1 - b1**t) / (np.sqrt(v / (1 - b2**t)) + eps)) @ basis[1].T
    gram = [b2 * old + (1 - b2) * new for old, new in zip(gram, (g @ g.T, g.T @ g), strict=True)]
    if t % 2 == 0:
        basis = [
            np.eye(len(q)) if len(q) > WIDE else np.linalg.qr(a @ q)[0] if t else np.linalg.eigh(a)[1][:, ::-1]
            for a, q in zip(gram, basis, strict=True)
        ]
    return u, (t + 1, m, v, gram, basis)


def test_soap_equals_its_paper_in_float64():
    params, states = _unrolled(jax.tree.map(np.float64, PARAMS)), {}
    for step, tree in enumerate(GRADS):
        norm = np.sqrt(sum(np.sum(np.float64(g) ** 2) for g in jax.tree.leaves(tree)))
        for path, layers in _unrolled(tree).items():
            for at, g in layers.items():
                g, p = np.float64(g) * min(1.0, CLIP / norm), params[path][at]
                square = [np.eye(n) for n in p.shape]
                before = states.get((path, at), (0, 0 * p, 0 * p, [0 * a for a in square], square))
                u, states[path, at] = _soap_reference(g, path.split("/")[0] in HIDDEN, DECAYS[path][at], before)
                params[path][at] = p - RATE(step) * (u + 0.01 * DECAYS[path][at] * p)
    assert_leaves_agree(_unrolled(_all()[0]["soap"]), params, gradient_norm=0.0, tolerance=MEMBERS["soap"].tolerance)


@pytest.mark.parametrize("layout", [ZERO1, pytest.param(LAYOUTS[1], marks=pytest.mark.long)], ids=str)
@pytest.mark.parametrize("name", MEMBERS)
def test_sharded_equals_unsharded(name, layout):
    with layout:
        got = _all(layout, _injected if layout is ZERO1 else _plain)[0][name]
    assert_leaves_agree(got, _all()[0][name], gradient_norm=0.0, tolerance=MEMBERS[name].tolerance)


@pytest.mark.parametrize("name", MEMBERS)
def test_hyperparameters_can_be_injected(name):
    with ZERO1:
        state = _all(ZERO1, _injected)[1][name][-1]
    assert state.hyperparams["learning_rate"] == pytest.approx(RATE(STEPS - 1))  # and its numbers are compared above


@pytest.mark.parametrize("name", MEMBERS)
def test_state_has_the_bytes_that_are_told(name):
    state = jax.eval_shape(_plain(MEMBERS[name]).init, PARAMS)
    assert sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state)) == MEMBERS[name].held


@pytest.mark.parametrize("name", MEMBERS)
def test_all_state_of_any_size_has_names(name):
    tx = _plain(MEMBERS[name])
    whole = [i.shape for i in jax.tree.leaves(state_infos(tx, INFOS)) if not i.path and i.size > 1]
    assert whole == []


@functools.cache
def _descents():
    """For every optimizer the squared distance from a target, at first and after 40 steps of descent."""
    run, params, state = _program()
    target = jax.tree.map(lambda p, d: p + 0.3 * d, PARAMS, _draw(9))
    away = lambda params: {n: jax.tree.map(np.subtract, p, target) for n, p in params.items()}  # noqa: E731
    size = lambda tree: float(sum(np.sum(np.square(x)) for x in jax.tree.leaves(tree)))  # noqa: E731
    first = away(params)
    for _ in range(40):
        params, state = run(params, state, away(params))
    return {name: (size(first[name]), size(last)) for name, last in away(params).items()}


@pytest.mark.parametrize("name", MEMBERS)
def test_it_descends(name):
    first, last = _descents()[name]
    assert last < 0.8 * first


def test_members_in_8_bits_are_the_same_rule():
    keep = optim.EightBit(min_size=10**9)
    makes = {"lamb": optim.LAMB8bit(storage=keep), "lion": optim.Lion8bit(storage=keep)}
    txs = {name: optim.chain(optax.clip_by_global_norm(CLIP), m.make(RATE, INFOS)) for name, m in makes.items()}
    params, state = dict.fromkeys(txs, PARAMS), {name: tx.init(PARAMS) for name, tx in txs.items()}

    @jax.jit
    def step(params, state, grads):
        new = {name: tx.update_and_apply(grads, state[name], params[name]) for name, tx in txs.items()}
        return {name: p for name, (p, _) in new.items()}, {name: s for name, (_, s) in new.items()}

    for grads in GRADS:
        params, state = step(params, state, grads)
    assert_leaves_agree(params, {name: _all()[0][name] for name in txs}, gradient_norm=0.0)


def test_factored_moments_and_preconditioners_are_cut_as_their_parameters():
    layout = Layout("fsdp=2,tensor=2")
    (factored, *_) = state_shardings(_plain(MEMBERS["adafactor"]), INFOS, layout)[0]["layers=2"]
    at = lambda named: tuple(named.value.spec)  # noqa: E731
    assert (at(factored.v_row["up/kernel"]), at(factored.v_col["up/kernel"])) == ((None, "fsdp"), (None, "tensor"))
    assert (at(factored.v_row["q/kernel"]), at(factored.v_col["q/kernel"])) == ((None, "fsdp"), (None, "tensor"))
    soap = state_shardings(_plain(MEMBERS["soap"]), INFOS, layout)[0].inner_states["matrices"].inner_state
    assert at(soap.rows["q"]["kernel"].basis) == (None, "fsdp", None)
    assert at(soap.cols["q"]["kernel"].gram) == (None, "tensor", None)
    assert soap.cols["up"]["kernel"] is None


@pytest.mark.parametrize(
    "mesh, layers, spec",
    [
        ("fsdp=2,tensor=2", 4, P(("fsdp", "tensor"))),
        ("fsdp=2,tensor=2", 2, P("fsdp")),
        ("pipeline=2,fsdp=4", 8, P(("pipeline", "fsdp"))),
    ],
)
def test_whole_matrices_are_dealt_out_over_the_stack(mesh, layers, spec):
    info = _info("up/kernel", (layers, 16, 32), "layers", "embed", "mlp")
    layout = Layout(mesh)
    with layout:
        x = jax.device_put(np.ones(info.shape, np.float32), layout.sharding(info.axes, info.shape, kind="opt_state"))
        program = (
            jax.jit(lambda x: (y := gather_matrices(x, *info.axes), scatter_matrices(y, *info.axes))).lower(x).compile()
        )
        out, back = program(x)
    assert ("all-gather" in program.as_text()) == (spec == P("fsdp"))  # where what is left does not divide the stack
    assert back.sharding.is_equivalent_to(x.sharding, 3)
    assert out.sharding.is_equivalent_to(jax.NamedSharding(layout.device_mesh, spec), 3)


def test_newton_schulz_takes_singular_values_near_one_and_leaves_singular_vectors():
    x = np.random.default_rng(0).normal(size=(3, 24, 8)).astype(np.float32)
    u, _, v = np.linalg.svd(x, full_matrices=False)
    inner = np.swapaxes(u, -1, -2) @ np.asarray(optim.newton_schulz(x)) @ np.swapaxes(v, -1, -2)
    near = np.diagonal(inner, axis1=-2, axis2=-1)
    assert 0.6 < near.min() and near.max() < 1.3
    assert np.abs(inner - near[..., None] * np.eye(8)).max() < 1e-4


def test_names_say_what_is_a_matrix_between_hidden_features():
    model = TransformerConfig(depth=2, vocab=64, width=32, heads=4, hidden=64, mlp=MixtureOfExperts(experts=4),
                              dense_layers=1, positions=Learned(16), qk_norm=True, qkv_bias=True)  # fmt: skip
    infos = [i for i in jax.tree.leaves(describe_model(model)[1])]
    chosen = {i.path.split("/", 4)[-1] for i in infos if optim.is_hidden_matrix(i)}
    attention = {f"attn/{p}/kernel" for p in ("q", "k", "v", "out")}
    assert chosen == attention | {f"mlp/{p}" for p in ("gate", "up", "down")} | {
        f"mlp/{p}/kernel" for p in ("gate", "up", "down")
    }


def _average(state, params):
    """x of y = (1 - b1) z + b1 x, in float64."""
    z = state.opt_state[-1].z
    return jax.tree.map(lambda y, z: (np.float64(y) - 0.1 * np.float64(z)) / 0.9, params, z)


def test_schedule_free_runs_are_evaluated_saved_and_sampled_at_the_average(tmp_path):
    settings = bigram(optimizer=optim.ScheduleFreeAdamW(), eval_batches=2, steps=6, lr=0.1, layout=Layout("data=2"))
    run = js.fit(js.TrainConfig(**settings), run=tmp_path / "run", quiet=True)
    want = _average(run.state, run.state.params)
    assert_leaves_agree(run.params(), want, gradient_norm=0.0)
    assert_leaves_agree(js.Run(tmp_path / "run", run.config).params(), want, gradient_norm=0.0, what="saved")
    prepared = prepare(run.config)
    rows = prepared.heldout[""]
    with run.config.layout:
        evaluate = make_eval(prepared.blueprint, prepared.batch_shardings())
        at = lambda params: [evaluate(params, prepared.place(rows.__getitem__, i)) for i in range(len(rows))]  # noqa: E731
        total = lambda batches, name: sum(float(totals[name]) for totals in batches)  # noqa: E731
        mean = lambda batches: total(batches, "nats") / total(batches, "tokens")  # noqa: E731
        seen = run.metrics()[-1]["eval_loss"]
        assert seen == mean(at(run.params())) != mean(at(run.state.params))


def test_an_average_is_of_each_group_and_of_no_other_parameter():
    parts = {n: optax.contrib.schedule_free(optax.sgd(0.1), 0.1, b1) for n, b1 in {"one": 0.5, "two": 0.8}.items()}
    z = {name: jnp.full(3, 1.0) for name in ("one", "two", "none")}
    state = optax.multi_transform({**parts, "none": optax.sgd(0.1)}, {name: name for name in z}).init(z)
    x = optim.averaged(state, {name: jnp.full(3, 2.0) for name in z})
    assert {n: round(float(a[0]), 5) for n, a in x.items()} == {"one": 3.0, "two": 2.25, "none": 2.0}


@pytest.mark.long
def test_muon_is_chosen_in_gin_and_trains_on_a_pipeline(tmp_path):
    bindings = ["train.model = @Transformer()", "train.optimizer = @Muon()", "Muon.rms = None", "train.lr = 0.02"]
    sizes = dict(depth=2, width=16, heads=2, hidden=32, vocab=32)
    js.config.load(bindings=bindings + [f"Transformer.{name} = {value}" for name, value in sizes.items()])
    config = js.config.call("train")
    assert config.optimizer == optim.Muon(rms=None)
    chosen = {"model": config.model, "optimizer": config.optimizer, "lr": config.lr}
    run = js.fit(js.TrainConfig(**bigram(**chosen, layout=Layout("pipeline=2,fsdp=2"))), run=tmp_path / "r", quiet=True)
    assert losses(run)[-1] < losses(run)[0]


WRONG = {
    "others": (lambda: optim.Muon(others=("atn",)).make(RATE, INFOS), ("Muon.others names 'atn'",)),
    "text": (lambda: optim.SOAP(others="q").make(RATE, INFOS), ("SOAP.others = 'q'", "('q',)")),
    "no matrix": (lambda: optim.Muon().make(RATE, {"norm": INFOS["norm"]}), ("Muon finds no matrix", "AdamW")),
    "3-d": (
        lambda: optim.Muon().make(RATE, {"w": _info("conv/kernel", (3, 8, 8), None, "embed", "mlp")}),
        ("conv/kernel", "others=('kernel',)"),
    ),
    "b1": (lambda: optim.ScheduleFreeSGD(b1=0.0), ("ScheduleFreeSGD.b1 = 0.0", "above 0")),
    "steps": (lambda: optim.Muon(ns_steps=0), ("Muon.ns_steps = 0", "at least 1")),
    "threshold": (lambda: optim.Adafactor(clipping_threshold=0.5), ("Adafactor.clipping_threshold = 0.5",)),
    "on host": (
        lambda: optim.OnHost(optim.Adafactor(min_dim_size_to_factor=8)).make(RATE, INFOS),
        ("OnHost needs states", "AdamW, SGD"),
    ),
    "other parameters": (
        lambda: _plain(MEMBERS["adafactor"]).init({"other": jnp.ones((4, 4))}), ("'other' of shape (4, 4)",)
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_what_cannot_be_is_one_sentence(what):
    make, words = WRONG[what]
    with raises_saying(ConfigError, *words):
        make()


@pytest.mark.parametrize(
    "schedule, falls", [(optim.WarmupCosine(), True), (optim.Constant(2), False)], ids=["cosine", "flat"]
)
def test_a_rate_that_falls_beside_an_average_is_said(schedule, falls, caplog):
    prepare(js.TrainConfig(**bigram(optimizer=optim.ScheduleFreeAdamW(), schedule=schedule)))
    assert ("set train.schedule = @Constant()" in caplog.text) == falls
