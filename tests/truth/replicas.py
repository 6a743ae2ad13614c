"""Small runs of algorithms over the mesh axis `replica`, and what a replica does in them, for references in NumPy."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jaxscale as js
from jaxscale.layout import Layout
from jaxscale.parallel import Float32Wire, SignWire
from jaxscale.plan.collectives import collectives
from jaxscale.step import DiLoCo, TrainConfig, blueprint_of, prepare
from tests.truth.layouts import in_force
from tests.truth.runs import bigram

STEPS = 6
MESHES = {
    "one device": None,
    "replica, data, tensor": Layout("replica=2,data=2,tensor=2", "zero1"),
    "replica, fsdp": Layout("replica=2,fsdp=2"),
    "two replicas on a device": Layout("fsdp=2"),
}


def config(**changes):
    return TrainConfig(**bigram(**{"algorithm": DiLoCo(every=2), "steps": STEPS, "seq_len": 8} | changes))


def host(tree):
    return jax.tree.map(np.array, tree)


def rounded(x, wire):
    """Round along the last dimension, in NumPy; one block has the 8 numbers of a row."""
    if isinstance(wire, Float32Wire):
        return x
    if isinstance(wire, SignWire):
        return np.where(x >= 0, 1, -1) * np.abs(x).mean(-1, keepdims=True)
    top = {8: 127, 4: 7}[wire.bits]
    scale = np.abs(x).max(-1, keepdims=True) / top
    return np.rint(x / np.where(scale > 0, scale, 1)) * scale


@functools.cache
def local_updates():
    """The first state of one replica, and a function from replica, step, parameters and optimizer state to new ones."""
    prepared = prepare(one := config(algorithm=js.step.Backprop(), layout=None))
    tx, graphdef = prepared.blueprint.tx, prepared.blueprint.graphdef

    def loss(params, batch):
        logits = nnx.merge(graphdef, params)(batch["tokens"])
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]))

    @jax.jit
    def update(params, opt_state, batch):
        updates, opt_state = tx.update(jax.grad(loss)(params, batch), opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    def run(r, i, params, opt_state):
        batch = prepared.loader.batch_at(i)
        return update(params, opt_state, {k: jnp.asarray(batch[k][4 * r : 4 * r + 4]) for k in ("tokens", "targets")})

    params = blueprint_of(one)[0].init(0).params
    return (params, tx.init(params)), run


@functools.cache
def local_gradients():
    """The first parameters, and a function from replica, step and parameters to the gradient, by name of table."""
    prepared = prepare(config(algorithm=js.step.Backprop(), layout=None))
    graphdef = prepared.blueprint.graphdef

    @jax.jit
    @jax.grad
    def gradient(params, batch):
        logits = nnx.merge(graphdef, params)(batch["tokens"])
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]))

    def run(r, i, params, rows=4):
        batch = prepared.loader.batch_at(i)
        own = {k: jnp.asarray(batch[k][rows * r : rows * (r + 1)]) for k in ("tokens", "targets")}
        params = {k: {"weight": jnp.asarray(v, jnp.float32)} for k, v in params.items()}
        return {k: np.float64(v["weight"]) for k, v in gradient(params, own).items()}

    return {k: np.float64(v["weight"]) for k, v in prepared.blueprint.init(0).params.items()}, run


def trained(layout, steps=STEPS, **changes):
    """The state after some steps."""
    prepared = prepare(one := config(layout=layout, **changes))
    with in_force(layout):
        state, step = prepared.blueprint.init(one.seed), prepared.step_of(one)
        for i in range(steps):
            state, _ = step(state, prepared.place(prepared.loader, i))
    return state


def crossing(layout, **changes):
    """The collectives over `replica` of the compiled step, without those of metrics, and the bytes stated."""
    prepared = prepare(one := config(layout=layout, **changes))
    with layout:
        args = prepared.blueprint.init(0), prepared.place(prepared.loader, 0)
        text = prepared.step_of(one).lower(*args).compile().as_text()
    sent = [c for c in collectives(text, layout.sizes) if "replica" in c.axes]
    exchanged = [c for c in sent if "average_copies" in c.name or "aggregate" in c.name]
    assert all(c.payload <= 32 for c in sent if c not in exchanged), "metrics alone"
    return exchanged, one.algorithm.wire_bytes(prepared.blueprint)
