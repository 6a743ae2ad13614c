"""Mono-forward on sharded layers: float64 NumPy's local gradients, and nothing is sent backwards."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from experiments.zeroth_order import local

STAGES, PARTS, ROWS = 2, 3, 4


def numpy_layer(kernel, head, x, labels):
    """A layer's activations, and its kernel and head after a step, by the derivatives of softmax and ReLU on paper."""
    scaled = x / np.sqrt(np.mean(x * x, -1, keepdims=True) + 1e-6)
    y = np.maximum(scaled @ kernel, 0)
    logits = y @ head
    p = np.exp(logits - logits.max(-1, keepdims=True))
    p = (p / p.sum(-1, keepdims=True) - np.eye(local.CLASSES)[labels]) / len(labels)
    of_kernel = scaled.T @ ((p @ head.T) * (y > 0))
    return y, kernel - local.RATE * of_kernel, head - local.RATE * y.T @ p


def test_layers_on_two_devices_are_trained_by_their_own_losses(monkeypatch):
    monkeypatch.setattr(local, "RATE", 0.5)
    draw = np.random.default_rng(0)
    net = local.made(jax.random.key(0), STAGES)
    net = net._replace(head=draw.normal(size=net.head.shape).astype(np.float32))
    x = draw.normal(size=(PARTS, ROWS, local.WIDTH)).astype(np.float32)
    labels = draw.integers(local.CLASSES, size=(PARTS, ROWS)).astype(np.int32)
    got = local.sharded_step("mono-forward", STAGES, PARTS)(net, x, labels)
    kernels, heads = (np.array(part, np.float64) for part in net)
    for part, right in zip(x.astype(np.float64), labels, strict=True):
        for i in range(STAGES):
            part, kernels[i], heads[i] = numpy_layer(kernels[i], heads[i], part, right)
    for a, b, first in zip(got, (kernels, heads), net, strict=True):
        assert np.linalg.norm(a - b) <= 1e-5 * np.linalg.norm(b - first)


def test_only_backpropagation_sends_backwards():
    back = local.permutes("backpropagation", STAGES, PARTS, ROWS)
    assert set(back["permutes"]) == {"{{0,1}}", "{{1,0}}"}
    assert local.permutes("mono-forward", STAGES, PARTS, ROWS) == {"permutes": ["{{0,1}}"], "others": []}


@pytest.mark.long
@pytest.mark.parametrize(("name", "least"), [("mono-forward", 0.95), ("forward-forward", 0.85)])
def test_digits_are_learned(name, least):
    pytest.importorskip("sklearn")
    assert local.accuracy(name, 2, 0, epochs=20) > least
