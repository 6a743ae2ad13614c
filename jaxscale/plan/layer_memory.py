"""Memory of a layer: its parameters and activations, and the buffers of its backward pass in the order of a step.

The order and the buffers are those of compiled programs for TPUs (`experiments/planner_accuracy/MEMORY.md`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxscale.layout import Layout, TensorInfo, as_used
from jaxscale.layout.rules import Kind
from jaxscale.models import TransformerConfig
from jaxscale.nn import GatherAttention, MemoryPolicy
from jaxscale.plan.expert_loads import dispatcher_of, sent_axes
from jaxscale.plan.heap import Buffer, SteadyHeap
from jaxscale.step import Blueprint, TrainConfig

_FEED = ("mlp_up", "mlp_hidden")
_EXPENSIVE = {"qkv", "scores", "attn_out", "lse", "residual_mid", "mlp_up"}
"""Activations that matrix products make, and are therefore expensive to recompute."""


def local_bytes(info: TensorInfo, layout: Layout, kind: Kind = "activations", *, dtype: DTypeLike | None = None) -> int:
    """Return a tensor's bytes on one device; the axis `kv_seq` of attention scores is not sharded.

    Args:
      info: the tensor.
      layout: the layout, every size of its mesh known.
      kind: the rules that shard it, such as "params" or "grads". For "activations" its shape is that of computation
        (`as_used`).
      dtype: of the array, if it is not the tensor's own.
    """
    shape = as_used(info, layout).shape if kind == "activations" else info.shape
    sizes = zip(info.axes, shape, strict=True)
    pieces = math.prod(layout.split(a, kind, size=n) for a, n in sizes if a is not None and a != "kv_seq")
    return math.prod(shape) // pieces * np.dtype(info.dtype if dtype is None else dtype).itemsize


@dataclasses.dataclass(frozen=True)
class Weight:
    """Bytes on one device of one layer's matrix, or of a table.

    Args:
      name: path of the parameter.
      used: the gathered array that products read, in the computation's dtype; 0 where nothing is gathered.
      gradient: its gradient as a product computes it, before it is reduced over devices.
      reduced: its gradient after that, sharded.
    """

    name: str
    used: int
    gradient: int
    reduced: int

    @classmethod
    def of(cls, info: TensorInfo, layout: Layout, dtype: str) -> Weight:
        """Return the bytes of a parameter, or of one layer of a stacked parameter.

        Args:
          info: the parameter.
          layout: the layout, every size of its mesh known.
          dtype: of computation.
        """
        if info.axes and info.axes[0] == "layers":
            info = dataclasses.replace(info, shape=info.shape[1:], axes=info.axes[1:])
        gathered = local_bytes(info, layout) != local_bytes(info, layout, "params")
        return cls(
            info.path,
            local_bytes(info, layout, dtype=dtype) if gathered else 0,
            local_bytes(info, layout),
            local_bytes(info, layout, "grads"),
        )

    def frozen(self) -> Weight:
        """Return the weight without a gradient."""
        return dataclasses.replace(self, gradient=0, reduced=0)


@dataclasses.dataclass(frozen=True)
class LayerBytes:
    """Bytes of one layer on one device.

    Args:
      tensors: its activations, by the names that memory policies use.
      gathered: a sub-layer's input after an all-gather along the sequence, with sequence sharding; else 0.
      attention, feed: weights of the two sub-layers.
      tile: the share of the sequence that the feed-forward layer computes at a time.
      rows: in a layer of experts, tokens sorted by expert, with a copy for each expert of a token; else 0.
      sent: the same rows after the all-to-all to the experts' devices, as many as may arrive; 0 without one.
      tokens: tokens of other devices, before they are copied for each of their experts; 0 without such a buffer.
      keys: keys of the whole sequence, where each device gathers them (values take as much); else 0.
    """

    tensors: Mapping[str, int]
    gathered: int
    attention: tuple[Weight, ...]
    feed: tuple[Weight, ...]
    tile: float
    rows: int = 0
    sent: int = 0
    tokens: int = 0
    keys: int = 0

    @classmethod
    def of(
        cls, model: TransformerConfig, infos: Iterable[TensorInfo], layout: Layout, rows: int, seq: int, layer: int = -1
    ) -> LayerBytes:
        """Return the bytes of one of a model's layers.

        Args:
          model: a `TransformerConfig`.
          infos: the layer's parameters.
          layout: the layout, every size of its mesh known.
          rows: rows of a micro-batch, over all devices.
          seq: tokens of a row.
          layer: number of the layer; the last one by default.
        """
        policy = MemoryPolicy.of(model.memory)
        tensors = model.activations(rows, seq, layer)
        tensors, sorted_rows, sent, unsent = _dispatched(model.layer_mlps()[layer], model.sizes.width, tensors, layout)
        sizes = {name: sum(local_bytes(i, layout) for i in infos) for name, infos in tensors.items()}
        whole = local_bytes(dataclasses.replace(tensors["residual"][0], axes=("batch", "seq", "embed")), layout)
        gathered = whole if whole > sizes["residual"] else 0
        sizes["unnamed"] += 2 * gathered  # each sub-layer's input
        if model.dtype != "float32":  # a policy that saves everything has the stream in float32 only
            sizes["unnamed"] -= sizes["residual"] + sizes["residual_mid"]
        matrices = [i for i in infos if len(i.axes) > 2]
        weights = [Weight.of(i, layout, model.dtype) for i in matrices]
        feed = ["mlp" in w.name.split("/") for w in weights]
        return cls(
            sizes,
            gathered,
            tuple(w for w, f in zip(weights, feed, strict=True) if not f),
            tuple(w for w, f in zip(weights, feed, strict=True) if f),
            min(1.0, policy.tile_size / seq) if "mlp_hidden" in policy.tile else 1.0,
            sorted_rows,
            sent,
            unsent,
            local_bytes(tensors["qkv"][1], layout) * layout.split("seq") * isinstance(model.attention, GatherAttention),
        )

    def frozen(self) -> LayerBytes:
        """Return the layer with frozen weights, which have no gradients."""
        attention, feed = (tuple(w.frozen() for w in weights) for weights in (self.attention, self.feed))
        return dataclasses.replace(self, attention=attention, feed=feed)

    @property
    def stream(self) -> int:
        """Bytes of the residual stream."""
        return self.tensors["residual"]


def _dispatched(
    moe: Any, width: int, tensors: Mapping[str, Any], layout: Layout
) -> tuple[dict[str, Any], int, int, int]:
    """Return a layer's tensors with as many rows of experts as its dispatcher's buffers have, and the bytes of these.

    The bytes are those of `LayerBytes.rows`, `LayerBytes.sent` and `LayerBytes.tokens`.
    """
    of_experts = [i for i in tensors["mlp_hidden"] if "expert_mlp" in i.axes]
    if not of_experts:
        return dict(tensors), 0, 0, 0
    hidden = of_experts[0]
    held = dispatcher_of(moe).rows(sent_axes(layout), moe.top_k, moe.experts // layout.split("experts"))

    def at_capacity(i: TensorInfo) -> TensorInfo:
        if "expert_mlp" not in i.axes:
            return i
        return dataclasses.replace(i, shape=(i.shape[0], int(i.shape[1] * held.multiplied), i.shape[2]))

    buffers = {name: tuple(map(at_capacity, infos)) for name, infos in tensors.items()}
    one = TensorInfo("rows", (*hidden.shape[:2], width), hidden.dtype, (*hidden.axes[:2], "embed"))
    rows = local_bytes(one, layout)
    return buffers, int(rows * held.sorted), int(rows * held.received), int(rows * held.tokens)


def saved_on_device(policy: MemoryPolicy, layers: Mapping[str, int]) -> set[str]:
    """Return the names of a layer's activations that are saved on the device; a group saves only its first residual.

    Args:
      policy: the memory policy.
      layers: bytes of a layer's activations by name.
    """
    if policy.rest == "keep":
        tiled = {*_FEED, "unnamed"} if "mlp_hidden" in policy.tile else set()
        return set(layers) - {*policy.offload} - tiled
    products = {"qkv", "residual_mid", "mlp_up"} if policy.rest == "dots" else set()
    return ({"residual", *policy.keep} | products) - {*policy.offload}


def saved_bytes(policy: MemoryPolicy, layers: Mapping[str, int], depth: int, groups: int) -> tuple[dict[str, int], int]:
    """Return bytes that are saved for the backward pass: on the device by activation, and in host memory.

    Args:
      policy: the memory policy.
      layers: bytes of a layer's activations by name.
      depth: number of layers.
      groups: number of groups of layers that are recomputed together.
    """
    every = policy.rest == "keep" or "residual" in policy.keep  # otherwise one residual per group, to recompute from
    count = {t: depth if every or t != "residual" else groups for t in saved_on_device(policy, layers)}
    return {t: layers[t] * count[t] for t in layers if t in count}, sum(layers[t] for t in policy.offload) * depth


def saved_by_single(layer: LayerBytes, policy: MemoryPolicy) -> int:
    """Return bytes that a layer in a run of its own saves beyond its policy.

    A scan over one layer is no loop, so that the compiler finds recomputed matrix products equal to those of the
    forward pass and saves their results instead.
    """
    expensive = _EXPENSIVE - saved_on_device(policy, layer.tensors) - {*policy.offload}
    return sum(layer.tensors[t] for t in expensive)


def single_layers(
    config: TrainConfig, blueprint: Blueprint, layout: Layout, repeats: Sequence[int], rows: int
) -> list[LayerBytes]:
    """Return the layers of runs that are not repeated.

    Args:
      config: the run's settings.
      blueprint: the run's blueprint.
      layout: the layout, every size of its mesh known.
      repeats: for each run of blocks, how often its group is scanned.
      rows: rows of a micro-batch, over all devices.
    """
    model: Any = config.model
    layers, first = [], 0
    for (group, whole), n, run in zip(model.runs, repeats, blueprint.infos["runs"].values(), strict=True):
        for at, block in enumerate(run["blocks"].values()) if n == 1 else ():
            layers.append(LayerBytes.of(model, jax.tree.leaves(block), layout, rows, config.seq_len, first + at))
        first += whole * len(group)
    return layers


def copied_bytes(info: TensorInfo, layout: Layout, dtype: str) -> int:
    """Return the bytes of a weight cast to the computation's dtype; XLA casts a whole stack before its loop.

    Args:
      info: the weight.
      layout: the layout, every size of its mesh known.
      dtype: of computation.

    Returns:
      bytes on one device; 0 for a weight that has this dtype, and for weights of norms, which are not cast.
    """
    if "norm" in info.axes or jnp.dtype(dtype) == info.dtype:
        return 0
    return local_bytes(info, layout, "params", dtype=dtype)


def backward(heap: SteadyHeap, layer: LayerBytes, policy: MemoryPolicy, *, blocks: int = 1) -> None:
    """Allocate and free the buffers of the backward pass of a group of layers, except for reduced gradients.

    Args:
      heap: the memory.
      layer: one layer of the group.
      policy: the memory policy.
      blocks: number of layers in the group.
    """
    t, saved = layer.tensors, saved_on_device(policy, layer.tensors)

    def recomputed(name: str) -> int:
        return 0 if name in saved else t[name]

    held = [heap.take("the stream's cotangent", layer.stream)]
    if "residual" not in saved:
        held.append(heap.take("residual, fetched", layer.stream))
    if policy.rest != "keep":
        # outputs of norms are recomputed where they are used; inputs of norms after a sub-layer have no other name
        after = max(0, t["norm"] - 2 * layer.stream)
        others = layer.stream + after + sum(t[name] for name in _EXPENSIVE - saved)
        held += [heap.take("other layers of the group", others) for _ in range(blocks - 1)]
        held.append(heap.take("inputs of norms after sub-layers", after))
    norm = min(recomputed("norm"), layer.stream)  # of norms before a sub-layer
    held += [heap.take("norm", norm), heap.take("gathered", layer.gathered)]
    held += [heap.take(w.name, w.used) for w in layer.attention]
    inputs = [heap.take("qkv", recomputed("qkv")), heap.take("scores", recomputed("scores"))]
    held += [heap.take("attn_out", recomputed("attn_out")), heap.take("lse", recomputed("lse"))]
    mid = [heap.take("residual_mid", recomputed("residual_mid")), heap.take("norm", norm)]
    _feed_backward(heap, layer)
    if layer.tile < 1:  # tiles accumulate into these
        held += [heap.take(f"gradient of {w.name} over tiles", w.reduced) for w in layer.feed]
    heap.drop(*mid)
    _attention_backward(heap, layer, inputs)
    heap.drop(*held)


def _feed_backward(heap: SteadyHeap, layer: LayerBytes) -> None:
    """Allocate and free the buffers of the feed-forward layer; it copies saved activations, and recomputes others."""

    def tile(size: int) -> int:
        return int(layer.tile * size)

    up, hidden = tile(layer.tensors["mlp_up"]), tile(layer.tensors["mlp_hidden"])
    held = [heap.take("gathered", tile(layer.gathered))]
    held += [heap.take("rows, sorted", layer.rows), heap.take("rows, sent", layer.sent)]
    held.append(heap.take("tokens of other devices", layer.tokens))
    moved = [heap.take("rows in all-to-all", layer.sent or layer.rows) for _ in range(3)]
    weights = [heap.take(w.name, w.used) for w in layer.feed]
    # One of gate, up and their cotangents reuses the memory of another; fusion decides which, and whether two do.
    gates = round(up / max(1, hidden))
    reused = [heap.take("mlp_up", hidden) for _ in range(gates - 1)] + [heap.take("cotangent of mlp_hidden", hidden)]
    heap.drop(*moved)
    held.append(heap.take("gathered cotangent", tile(layer.gathered)))
    held += [heap.take("rows' cotangents", layer.rows), heap.take("rows' cotangents, sent", layer.sent)]
    held.append(heap.take("cotangents of tokens of other devices", layer.tokens))
    held += [heap.take("mlp_hidden", hidden)] + [heap.take("cotangent of mlp_up", hidden) for _ in range(gates - 1)]
    heap.drop(*weights, *([] if layer.rows else reused[:1]))  # ragged products are not fused with anything
    projected = layer.sent or layer.rows or tile(layer.gathered or layer.stream)
    heap.drop(*[heap.take("cotangent of the projections' input", projected) for _ in range(gates)])
    heap.drop(*(reused[:1] if layer.rows else []))
    held += [heap.take("a weight's gradient", n) for n in _live_gradients(layer.feed)[: 1 if layer.rows else 2]]
    heap.drop(*reused[1:], *held)


def _live_gradients(weights: Iterable[Weight]) -> list[int]:
    """Return sizes of weight gradients that live at the same time: computing one overlaps reducing the previous."""
    largest = max(weights, key=lambda w: w.gradient, default=Weight("", 0, 0, 0))
    return [largest.gradient] * (1 if largest.gradient == largest.reduced else 2)


def _attention_backward(heap: SteadyHeap, layer: LayerBytes, inputs: Iterable[Buffer]) -> None:
    """Allocate and free the buffers of attention; `inputs` (queries, keys, values) are freed after their cotangents."""
    t, projected = layer.tensors, layer.gathered or layer.stream
    heads = t["attn_out"]
    keys = (t["qkv"] - heads) // 2
    held = [heap.take("cotangent of residual_mid", layer.stream), heap.take("gathered cotangent", layer.gathered)]
    mixed = heap.take("cotangent of attn_out", heads)
    held += [heap.take("gathered keys and values", layer.keys) for _ in range(2)]
    product = heap.take("attn_out by its cotangent, float32", 2 * heads)
    by_head = heap.take("the same, by head", 2 * heads)
    heap.drop(product, by_head)
    scores = heap.take("cotangent of scores", t["scores"])
    cotangents = [heap.take("cotangents of keys and values", layer.keys or keys) for _ in range(2)]
    heap.drop(heap.take("cotangent of keys, float32", 2 * layer.keys))
    cotangents.append(heap.take("cotangent of queries", heads))
    heap.drop(mixed, scores, *inputs)
    held += [heap.take("cotangents of the projections' input", projected) for _ in range(1 if layer.gathered else 2)]
    heap.drop(heap.take("cotangent of queries, float32", 2 * heads))
    held += [heap.take("a weight's gradient", n) for n in _live_gradients(layer.attention)]
    heap.drop(*cotangents, *held)
