"""Layers trained by losses of their own on scikit-learn's digits: accuracy, memory, and what crosses sharded layers.

    python experiments/zeroth_order/local.py          # writes local.json beside this file

A network is `depth` layers of one width, each with a head of its own; every layer gets its input divided by the input's
root mean square. Backpropagation trains all layers by the last head's cross-entropy. Mono-forward (Gong et al. 2025,
arXiv:2501.09238) trains layer and head by that head's cross-entropy, and no gradient goes to the layer before.
Forward-forward (Hinton 2022, arXiv:2212.13345) has no heads: a layer's mean square should be large for an image with
its label in the first pixels, and small with a wrong one. CaFo (Zhao et al. 2023, arXiv:2303.09728), in its form
without any backward pass, trains the heads of random layers, whose logits are added up.

These are functions of plain arrays and not an `Algorithm`: a local loss needs the labels' classes at every layer, so it
is the model and its objective that differ, and forward-forward also changes the inputs.
"""

from __future__ import annotations

import functools
import json
import pathlib
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float, Int

sys.path.insert(0, str(pathlib.Path(__file__).parents[2]))  # so that it runs as a file

from experiments.bring_your_own.digits import CLASSES, Digits

WIDTH, RATE, ROWS, EPOCHS, SEEDS = 128, 1e-3, 64, 60, 3
THRESHOLD = 2.0
AXIS = "pipeline"


class Layers(NamedTuple):
    """A network, or one layer of it without the first dimension.

    Args:
      kernel: (depth, width, width).
      head: (depth, width, classes).
    """

    kernel: Float[Array, "l i o"]
    head: Float[Array, "l o c"]


def made(key: Array, depth: int, width: int = WIDTH) -> Layers:
    """Return random layers, scaled for ReLU, and heads of zeros."""
    kernel = jax.random.normal(key, (depth, width, width)) * np.sqrt(2 / width)
    return Layers(kernel, jnp.zeros((depth, width, CLASSES)))


def layer(one: Layers, x: Float[Array, "b i"]) -> Float[Array, "b o"]:
    """Return the activations of one layer."""
    scale = jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)
    return jax.nn.relu((x * scale) @ one.kernel)


def nats(logits: Float[Array, "b c"], labels: Int[Array, " b"]) -> Array:
    """Return the mean cross-entropy."""
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, labels))


def mono_forward_loss(one: Layers, x: Float[Array, "b i"], labels: Int[Array, " b"]) -> tuple[Array, Array]:
    """Return a layer's own loss, and its activations for the next layer."""
    y = layer(one, x)
    return nats(y @ one.head, labels), y


def cafo_loss(one: Layers, x: Float[Array, "b i"], labels: Int[Array, " b"]) -> tuple[Array, Array]:
    """Return the loss of a head on a random layer, which is not trained."""
    return mono_forward_loss(one._replace(kernel=jax.lax.stop_gradient(one.kernel)), x, labels)


def forward_forward_loss(one: Layers, x: Float[Array, "b i"], labels: Int[Array, " b"]) -> tuple[Array, Array]:
    """Return a layer's loss on rows of which the first half are right and the second half wrong."""
    y = layer(one, x)
    right, wrong = jnp.split(jnp.mean(y * y, -1), 2)
    return jnp.mean(jax.nn.softplus(THRESHOLD - right) + jax.nn.softplus(wrong - THRESHOLD)), y


def labelled(x: Float[Array, "b i"], labels: Int[Array, " b"]) -> Float[Array, "b i"]:
    """Return images with their label in the first pixels."""
    return x.at[:, :CLASSES].set(jax.nn.one_hot(labels, CLASSES))


Local = Callable[[Layers, Array, Array], tuple[Array, Array]]
Step = Callable[[Layers, Any, Array, Array, Array], tuple[Layers, Any]]
TX = optax.adam(RATE)


def local_step(loss: Local, contrast: bool = False) -> Step:
    """Return a step that goes through the layers once, and trains each before it goes on to the next."""

    def step(net: Layers, state: Any, x: Array, labels: Array, key: Array) -> tuple[Layers, Any]:
        if contrast:
            wrong = (labels + jax.random.randint(key, labels.shape, 1, CLASSES)) % CLASSES
            x = jnp.concatenate([labelled(x, labels), labelled(x, wrong)])

        def one(x: Array, own: tuple[Layers, Any]) -> tuple[Array, tuple[Layers, Any]]:
            params, state = own
            grads, y = jax.grad(loss, has_aux=True)(params, x, labels)
            updates, state = TX.update(grads, state)
            return y, (optax.apply_updates(params, updates), state)

        return jax.lax.scan(one, x, (net, state))[1]

    return step


def backprop_loss(net: Layers, x: Float[Array, "b i"], labels: Int[Array, " b"]) -> Array:
    """Return the cross-entropy of the last layer's head."""
    y, _ = jax.lax.scan(lambda x, one: (layer(one, x), None), x, net)
    return nats(y @ net.head[-1], labels)


def backprop_step(net: Layers, state: Any, x: Array, labels: Array, key: Array) -> tuple[Layers, Any]:
    """Train all layers by the last one's loss."""
    updates, state = jax.vmap(TX.update)(jax.grad(backprop_loss)(net, x, labels), state)
    return optax.apply_updates(net, updates), state


def outputs(net: Layers, x: Float[Array, "b i"]) -> Float[Array, "l b o"]:
    """Return the activations of all layers."""

    def one(x: Array, own: Layers) -> tuple[Array, Array]:
        y = layer(own, x)
        return y, y

    return jax.lax.scan(one, x, net)[1]


def of_last(net: Layers, x: Array) -> Array:
    """Return the class by the last head."""
    return jnp.argmax(outputs(net, x)[-1] @ net.head[-1], -1)


def of_all(net: Layers, x: Array) -> Array:
    """Return the class by the sum of all heads' logits."""
    return jnp.argmax(jnp.einsum("lbo,loc->bc", outputs(net, x), net.head), -1)


def of_goodness(net: Layers, x: Array) -> Array:
    """Return the class whose label in the image makes the layers after the first most active."""

    def goodness(label: Array) -> Array:
        y = outputs(net, labelled(x, jnp.full(len(x), label)))
        return jnp.sum(jnp.mean(y * y, -1)[min(1, len(net.kernel) - 1) :], 0)

    return jnp.argmax(jax.vmap(goodness)(jnp.arange(CLASSES)), 0)


METHODS: dict[str, tuple[Step, Callable[[Layers, Array], Array]]] = {
    "backpropagation": (backprop_step, of_last),
    "mono-forward": (local_step(mono_forward_loss), of_last),
    "forward-forward": (local_step(forward_forward_loss, contrast=True), of_goodness),
    "CaFo, random layers": (local_step(cafo_loss), of_all),
}


def digits(split: str) -> tuple[np.ndarray, np.ndarray]:
    """Return images (n, WIDTH), zeros after the 64 pixels, and labels."""
    rows = Digits().source(None, split=split)
    images = rows.images.reshape(len(rows), -1)
    return np.pad(images, ((0, 0), (0, WIDTH - images.shape[1]))), rows.labels


def accuracy(name: str, depth: int, seed: int, epochs: int = EPOCHS) -> float:
    """Train a network on the digits; return the share of right held-out images."""
    step, predict = METHODS[name]
    images, labels = map(jnp.asarray, digits("train"))
    net = made(jax.random.key(seed), depth)
    state = jax.vmap(TX.init)(net)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def epoch(net: Layers, state: Any, key: Array) -> tuple[Layers, Any]:
        order = jax.random.permutation(key, len(labels))[: len(labels) // ROWS * ROWS].reshape(-1, ROWS)

        def one(carry: tuple[Layers, Any], ids: Array) -> tuple[tuple[Layers, Any], None]:
            return step(*carry, images[ids], labels[ids], jax.random.fold_in(key, ids[0])), None

        return jax.lax.scan(one, (net, state), order)[0]

    for i in range(epochs):
        net, state = epoch(net, state, jax.random.fold_in(jax.random.key(seed + 1000), i))
    held, right = digits("heldout")
    return float(np.mean(np.asarray(jax.jit(predict)(net, jnp.asarray(held))) == right))


def temporaries(name: str, depth: int, rows: int = 4096) -> int:
    """Return the temporary bytes of a compiled step."""
    net = jax.eval_shape(lambda: made(jax.random.key(0), depth))
    state = jax.eval_shape(jax.vmap(TX.init), net)
    x, labels = jax.ShapeDtypeStruct((rows, WIDTH), jnp.float32), jax.ShapeDtypeStruct((rows,), jnp.int32)
    key = jax.eval_shape(lambda: jax.random.key(0))
    compiled = jax.jit(METHODS[name][0], donate_argnums=(0, 1)).lower(net, state, x, labels, key).compile()
    return int(compiled.memory_analysis().temp_size_in_bytes)


def sharded_step(name: str, stages: int, parts: int) -> Callable[[Layers, Array, Array], Layers]:
    """Return an SGD step with a layer on each device: micro-batches go through the devices one after the other.

    Args:
      name: "backpropagation" or "mono-forward".
      stages: devices, and layers.
      parts: micro-batches.
    """
    onwards = [(i, i + 1) for i in range(stages - 1)]
    mesh = Mesh(np.array(jax.devices()[:stages]), (AXIS,))

    def ticks(net: Layers, x: Array, labels: Array, train: bool) -> tuple[Layers, Array]:
        """Run all ticks on one device; x and labels are (parts, rows, ...)."""
        at, own = jax.lax.axis_index(AXIS), Layers(net.kernel[0], net.head[0])

        def tick(carry: tuple[Layers, Array], t: Array) -> tuple[tuple[Layers, Array], Array]:
            own, y = carry
            part = jnp.clip(t - at, 0, parts - 1)
            busy = (t >= at) & (t - at < parts)
            arrived = jax.lax.ppermute(y, AXIS, onwards)
            inputs = jnp.where(at == 0, x[part], arrived)
            if not train:
                y = layer(own, inputs)
                last = nats(y @ own.head, labels[part])
                return (own, y), jnp.where(busy & (at == stages - 1), last, 0.0)
            grads, y = jax.grad(mono_forward_loss, has_aux=True)(own, inputs, labels[part])
            return (jax.tree.map(lambda p, g: jnp.where(busy, p - RATE * g, p), own, grads), y), jnp.float32(0)

        (own, _), losses = jax.lax.scan(tick, (own, jnp.zeros_like(x[0])), jnp.arange(parts + stages - 1))
        return jax.tree.map(lambda p: p[None], own), jnp.sum(losses)[None]

    cut, whole = PartitionSpec(AXIS), PartitionSpec()

    def on_devices(train: bool) -> Callable[[Layers, Array, Array], tuple[Layers, Array]]:
        run = functools.partial(ticks, train=train)
        specs = dict(in_specs=(cut, whole, whole), out_specs=cut, check_vma=False)
        return jax.shard_map(run, mesh=mesh, **specs)

    def mono_forward(net: Layers, x: Array, labels: Array) -> Layers:
        return on_devices(True)(net, x, labels)[0]

    def backprop(net: Layers, x: Array, labels: Array) -> Layers:
        grads = jax.grad(lambda net: jnp.sum(on_devices(False)(net, x, labels)[1]) / parts)(net)
        return jax.tree.map(lambda p, g: p - RATE * g, net, grads)

    return mono_forward if name == "mono-forward" else backprop


def permutes(name: str, stages: int = 4, parts: int = 8, rows: int = 64) -> dict[str, list[str]]:
    """Return the source-target pairs of the compiled step's permutes, and its other collectives by name."""
    x = jax.ShapeDtypeStruct((parts, rows, WIDTH), jnp.float32)
    labels = jax.ShapeDtypeStruct((parts, rows), jnp.int32)
    net = jax.eval_shape(lambda: made(jax.random.key(0), stages))
    text = jax.jit(sharded_step(name, stages, parts)).lower(net, x, labels).compile().as_text()
    assert text is not None
    lines = [line.split("metadata=")[0] for line in text.splitlines()]
    pairs = [line.split("source_target_pairs=")[1].split(", ")[0] for line in lines if "source_target_pairs=" in line]
    others = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all")
    return {"permutes": pairs, "others": [o for o in others for line in lines if f" {o}(" in line]}


def main() -> None:
    """Measure everything and write local.json."""
    jax.config.update("jax_num_cpu_devices", 4)
    depths = (2, 4, 8, 16)
    results: dict[str, Any] = {"accuracy": {}, "temporaries": {}, "permutes": {}}
    for name in METHODS:
        results["accuracy"][name] = {d: [accuracy(name, d, seed) for seed in range(SEEDS)] for d in (2, 4)}
        results["temporaries"][name] = {d: temporaries(name, d) for d in depths}
    for name in ("backpropagation", "mono-forward"):
        results["permutes"][name] = permutes(name)
    out = pathlib.Path(__file__).with_name("local.json")
    out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
