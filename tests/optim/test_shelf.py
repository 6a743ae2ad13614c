"""The optimizer shelf, every member through one table: reference, layouts, layers, state, composition, descent."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxscale import optim
from jaxscale.errors import ConfigError
from jaxscale.layout import STACKED, Layout, TensorInfo, shardings_of
from jaxscale.optim import decay_mask, state_infos, state_shardings, view_of
from tests.truth.compare import TOLERANCE, assert_leaves_agree
from tests.truth.errors import raises_saying
from tests.truth.layouts import QUICKLY

RATE = optax.linear_schedule(0.1, 0.01, 8)
CLIP = 0.5
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
    """Normal arrays whose layers differ in size, so that what is taken over all of them at once is wrong."""
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
    """{path: {layer: matrix}}, as someone writes it who stacks nothing."""
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
      optimizer: as a config holds it.
      reference: optax's, for layers by themselves; `None` where NumPy has the word.
      held: bytes of state, in closed form.
      tolerance: of its parameters.
    """

    optimizer: optim.Optimizer
    reference: Callable[[], optax.GradientTransformation] | None
    held: int
    tolerance: float = TOLERANCE


def _bytes(of: Callable[[int, int], int]) -> int:
    """Of all matrices between hidden features: 4 times a function of a side and the other, for each layer."""
    views = [view_of(i) for i in jax.tree.leaves(INFOS) if i.path.split("/")[0] in HIDDEN]
    return sum(4 * math.prod(v.shape[:-2]) * of(*v.shape[-2:]) for v in views)


COUNT, REST = 4, 4 * (32 * 16 + 2 * 16)
# up is wider than the bases that are kept, where what rotates it is settled by rounding
WIDE = 16
MEMBERS = {
    "lion": Member(optim.Lion(), lambda: optax.lion(RATE, weight_decay=0.1, mask=DECAYS), 4 * SIZE + 2 * COUNT),
    "lamb": Member(
        optim.LAMB(), lambda: optax.lamb(RATE, weight_decay=0.01, mask=DECAYS), 8 * SIZE + 2 * COUNT
    ),
    "lars": Member(
        optim.LARS(trust_coefficient=0.1),
        lambda: optax.lars(RATE, 1e-4, DECAYS, 0.1, trust_ratio_mask=DECAYS),
        4 * SIZE + COUNT,
    ),
    "adafactor": Member(
        optim.Adafactor(min_dim_size_to_factor=8),
        lambda: optax.adafactor(RATE, 8),
        # rows and columns; what is not factored whole, and a placeholder per layer for what is not there
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
LAYOUTS = [ZERO1, Layout("data=2,fsdp=2,tensor=2"), Layout("pipeline=2,fsdp=2,expert=2")]


def _plain(member):
    return member.optimizer.make(RATE, INFOS)


def _injected(member):
    return optax.inject_hyperparams(member.optimizer.make)(learning_rate=RATE, infos=INFOS)


@functools.cache
def _all(layout=None, wrap=_plain):
    """A few steps of every member, after clipping; parameters and state in NumPy. One program, compiled once."""
    txs = {name: optim.chain(optax.clip_by_global_norm(CLIP), wrap(m)) for name, m in MEMBERS.items()}
    params = dict.fromkeys(txs, PARAMS)
    state = {name: tx.init(PARAMS) for name, tx in txs.items()}
    where = None
    if layout is not None:
        where = dict.fromkeys(txs, shardings_of(INFOS, layout)), {
            name: state_shardings(tx, INFOS, layout) for name, tx in txs.items()
        }
        params, state = jax.device_put((params, state), where)

    def step(params, state, grads):
        new = {name: optim.apply_gradients(tx, grads, state[name], params[name]) for name, tx in txs.items()}
        return {name: p for name, (p, _) in new.items()}, {name: s for name, (_, s) in new.items()}

    run = jax.jit(step, out_shardings=where).lower(params, state, GRADS[0]).compile(QUICKLY)
    for grads in GRADS:
        params, state = jax.block_until_ready(run(params, state, grads))
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


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("name", MEMBERS)
def test_sharded_equals_unsharded(name, layout):
    with layout:
        got = _all(layout, _injected if layout is ZERO1 else _plain)[0][name]
    assert_leaves_agree(got, _all()[0][name], gradient_norm=0.0, tolerance=MEMBERS[name].tolerance)


@pytest.mark.parametrize("name", MEMBERS)
def test_hyperparameters_can_be_injected(name):
    with ZERO1:
        state = _all(ZERO1, _injected)[1][name][-1]
    assert float(state.hyperparams["learning_rate"]) == float(RATE(STEPS - 1))  # and its numbers are compared above


@pytest.mark.parametrize("name", MEMBERS)
def test_state_has_the_bytes_that_are_told(name):
    state = jax.eval_shape(_plain(MEMBERS[name]).init, PARAMS)
    assert sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state)) == MEMBERS[name].held


@pytest.mark.parametrize("name", MEMBERS)
def test_all_state_of_any_size_has_names(name):
    tx = _plain(MEMBERS[name])
    whole = [i.shape for i in jax.tree.leaves(state_infos(tx, INFOS)) if not i.path and i.size > 1]
    assert whole == []
