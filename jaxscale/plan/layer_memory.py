"""The buffers of a layer on its way back, in the order in which a compiled step makes them and gives them back.

What is walked through here is what programs for TPUs were seen to hold (`experiments/planner_accuracy/MEMORY.md`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxscale.layout import Layout, TensorInfo, as_used
from jaxscale.layout.rules import Kind
from jaxscale.nn import GatherAttention, MemoryPolicy
from jaxscale.plan.heap import Buffer, SteadyHeap
from jaxscale.step import Blueprint, TrainConfig

_FEED = ("mlp_up", "mlp_hidden")
_DEAR = {"qkv", "scores", "attn_out", "lse", "residual_mid", "mlp_up"}
"""What products make."""


def local_bytes(info: TensorInfo, layout: Layout, kind: Kind = "activations", *, dtype: Any = None) -> int:
    """A tensor's bytes on one device; `kv_seq` of scores stays whole."""
    shape = as_used(info, layout).shape if kind == "activations" else info.shape
    sizes = zip(info.axes, shape, strict=True)
    pieces = math.prod(layout.split(a, kind, size=n) for a, n in sizes if a is not None and a != "kv_seq")
    return math.prod(shape) // pieces * np.dtype(info.dtype if dtype is None else dtype).itemsize


@dataclasses.dataclass(frozen=True)
class Weight:
    """A matrix of one layer, or a table; bytes on one device.

    Args:
      name: what it is.
      used: while it is used, in the type of the arithmetic; 0 where what is used is a piece of what is kept.
      made: its gradient as a product makes it, before devices sum it and cut it up.
      kept: its gradient thereafter.
    """

    name: str
    used: int
    made: int
    kept: int

    @classmethod
    def of(cls, info: TensorInfo, layout: Layout, dtype: str) -> Weight:
        """Of a parameter, or of one layer of a stacked one."""
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
        """The same without a gradient."""
        return dataclasses.replace(self, made=0, kept=0)


@dataclasses.dataclass(frozen=True)
class LayerBytes:
    """One layer on one device, for so many rows.

    Args:
      tensors: its activations, by the names that memory policies use.
      gathered: what a sub-layer takes where the stream is split along its sequence, the whole of it; else 0.
      attention, feed: weights of the two sub-layers.
      tile: the share of the sequence that the feed-forward layer works at.
      rows: of a layer of experts, tokens as they are sorted by expert, once for each expert they are given to.
      sent: the same where the experts are, with room for all that might come; 0 where nothing is sent.
      keys: keys of the whole sequence (values are as many), where each device gathers them; else 0.
    """

    tensors: Mapping[str, int]
    gathered: int
    attention: tuple[Weight, ...]
    feed: tuple[Weight, ...]
    tile: float
    rows: int = 0
    sent: int = 0
    keys: int = 0

    @classmethod
    def of(
        cls, model: Any, infos: Iterable[TensorInfo], layout: Layout, rows: int, seq: int, layer: int = -1
    ) -> LayerBytes:
        """Of one of the model's layers, by default the last, whose parameters are `infos`."""
        policy = MemoryPolicy.of(model.memory)
        tensors = model.activations(rows, seq, layer)
        tensors, sorted_rows, sent = _dispatched(model.layer_mlps()[layer], model.sizes.width, tensors, layout)
        found = {name: sum(local_bytes(i, layout) for i in held) for name, held in tensors.items()}
        whole = local_bytes(dataclasses.replace(tensors["residual"][0], axes=("batch", "seq", "embed")), layout)
        gathered = whole if whole > found["residual"] else 0
        found["unnamed"] += 2 * gathered  # each sub-layer's input
        if model.dtype != "float32":  # whoever keeps all of it has the stream in float32, and not in its own type
            found["unnamed"] -= found["residual"] + found["residual_mid"]
        matrices = [i for i in infos if len(i.axes) > 2]
        weights = [Weight.of(i, layout, model.dtype) for i in matrices]
        feed = ["mlp" in w.name.split("/") for w in weights]
        return cls(
            found,
            gathered,
            tuple(w for w, f in zip(weights, feed, strict=True) if not f),
            tuple(w for w, f in zip(weights, feed, strict=True) if f),
            min(1.0, policy.tile_size / seq) if "mlp_hidden" in policy.tile else 1.0,
            sorted_rows,
            sent,
            local_bytes(tensors["qkv"][1], layout) * layout.split("seq") * isinstance(model.attention, GatherAttention),
        )

    def frozen(self) -> LayerBytes:
        """The same where no step changes the weights, so that they have no gradients."""
        without = lambda weights: tuple(w.frozen() for w in weights)  # noqa: E731
        return dataclasses.replace(self, attention=without(self.attention), feed=without(self.feed))

    @property
    def stream(self) -> int:
        """The residual stream's."""
        return self.tensors["residual"]


def _dispatched(moe: Any, width: int, tensors: Mapping[str, Any], layout: Layout) -> tuple[dict[str, Any], int, int]:
    """A layer's tensors with experts' rows as many as there is room for; bytes of rows, and of those that are sent.

    Experts that drop nothing have room for the worst case: every token of every device that sends to them.
    """
    of_experts = [i for i in tensors["mlp_hidden"] if "expert_mlp" in i.axes]
    if not of_experts:
        return dict(tensors), 0, 0
    hidden = of_experts[0]
    dropless = moe.capacity is None
    tokens = {m for a in ("expert_batch", "expert_seq") for m in layout.resolved_rules.target("activations", a)}
    sent = math.prod(layout.sizes[m] for m in layout.resolved_rules.target("activations", "experts") if m in tokens)
    here = moe.experts // layout.split("experts")
    room = sent * min(moe.top_k, here) / moe.top_k if dropless and sent > 1 else 1
    wide = lambda i: (  # noqa: E731
        dataclasses.replace(i, shape=(i.shape[0], int(i.shape[1] * room), i.shape[2])) if "expert_mlp" in i.axes else i
    )
    grown = {name: tuple(map(wide, held)) for name, held in tensors.items()}
    one = TensorInfo("rows", (*hidden.shape[:2], width), hidden.dtype, (*hidden.axes[:2], "embed"))
    rows = local_bytes(one, layout)
    return grown, rows, int(rows * room) if sent > 1 else 0


def found_on_device(policy: MemoryPolicy, layers: Mapping[str, int]) -> set[str]:
    """What of a layer's tensors its backward pass finds on the device; of a group's layers, but for their inputs."""
    if policy.rest == "keep":
        tiled = {*_FEED, "unnamed"} if "mlp_hidden" in policy.tile else set()
        return set(layers) - {*policy.offload} - tiled
    products = {"qkv", "residual_mid", "mlp_up"} if policy.rest == "dots" else set()
    return ({"residual", *policy.keep} | products) - {*policy.offload}


def kept_bytes(policy: MemoryPolicy, layers: Mapping[str, int], depth: int, groups: int) -> tuple[dict[str, int], int]:
    """Bytes from forward to backward pass, on the device tensor by tensor and in host memory."""
    every = policy.rest == "keep" or "residual" in policy.keep  # else each group's, which recomputing starts from
    count = {t: depth if every or t != "residual" else groups for t in found_on_device(policy, layers)}
    return {t: layers[t] * count[t] for t in layers if t in count}, sum(layers[t] for t in policy.offload) * depth


def kept_of_single(layer: LayerBytes, policy: MemoryPolicy) -> int:
    """What is kept of a layer that is a run by itself besides what the policy says.

    A scan over one layer is no loop, and the compiler finds that what recomputing makes is there already: of all that
    is dear to make.
    """
    dear = _DEAR - found_on_device(policy, layer.tensors) - {*policy.offload}
    return sum(layer.tensors[t] for t in dear)


def single_layers(
    config: TrainConfig, blueprint: Blueprint, layout: Layout, repeats: Sequence[int], rows: int
) -> list[LayerBytes]:
    """The layers of runs of which one copy is walked at a time, `repeats` being how many of each."""
    model: Any = config.model
    found, first = [], 0
    for (group, whole), n, run in zip(model.runs, repeats, blueprint.infos["runs"].values(), strict=True):
        for at, block in enumerate(run["blocks"].values()) if n == 1 else ():
            found.append(LayerBytes.of(model, jax.tree.leaves(block), layout, rows, config.seq_len, first + at))
        first += whole * len(group)
    return found


def copied_bytes(info: TensorInfo, layout: Layout, dtype: str) -> int:
    """A weight in another type than its own: of a stack, XLA casts the whole before it walks it."""
    if "norm" in info.axes or jnp.dtype(dtype) == info.dtype:
        return 0
    return local_bytes(info, layout, "params", dtype=dtype)


def backward(heap: SteadyHeap, layer: LayerBytes, policy: MemoryPolicy, *, blocks: int = 1) -> None:
    """A group of `blocks` layers on its way back, until nothing of it is left but gradients."""
    t, found = layer.tensors, found_on_device(policy, layer.tensors)
    again = lambda name: 0 if name in found else t[name]  # noqa: E731
    held = [heap.take("the stream's cotangent", layer.stream)]
    if "residual" not in found:
        held.append(heap.take("residual, fetched", layer.stream))
    if policy.rest != "keep":
        # what norms give is made again where it is used; what norms after a sub-layer are given has no other name
        after = max(0, t["norm"] - 2 * layer.stream)
        others = layer.stream + after + sum(t[name] for name in _DEAR - found)
        held += [heap.take("other layers of the group", others) for _ in range(blocks - 1)]
        held.append(heap.take("what norms after sub-layers are given", after))
    norm = min(again("norm"), layer.stream)  # of those before a sub-layer
    held += [heap.take("norm", norm), heap.take("gathered", layer.gathered)]
    held += [heap.take(w.name, w.used) for w in layer.attention]
    asked = [heap.take("qkv", again("qkv")), heap.take("scores", again("scores"))]
    held += [heap.take("attn_out", again("attn_out")), heap.take("lse", again("lse"))]
    mid = [heap.take("residual_mid", again("residual_mid")), heap.take("norm", norm)]
    _feed_backward(heap, layer)
    if layer.tile < 1:  # gradients of weights that tiles add to
        held += [heap.take(f"gradient of {w.name} over tiles", w.kept) for w in layer.feed]
    heap.drop(*mid)
    _attention_backward(heap, layer, asked)
    heap.drop(*held)


def _feed_backward(heap: SteadyHeap, layer: LayerBytes) -> None:
    """The feed-forward half. What it finds of the forward pass it copies out of a stack, what it does not it makes."""
    cut = lambda n: int(layer.tile * n)  # noqa: E731
    up, hidden = cut(layer.tensors["mlp_up"]), cut(layer.tensors["mlp_hidden"])
    held = [heap.take("gathered", cut(layer.gathered))]
    held += [heap.take("rows, sorted", layer.rows), heap.take("rows, sent", layer.sent)]
    moved = [heap.take("rows on their way", layer.sent or layer.rows) for _ in range(3)]
    weights = [heap.take(w.name, w.used) for w in layer.feed]
    # Of gate and up, and of their cotangents, one takes the place of another; which, and whether two do, is up to what
    # is fused with the products.
    gates = round(up / max(1, hidden))
    given = [heap.take("mlp_up", hidden) for _ in range(gates - 1)] + [heap.take("cotangent of mlp_hidden", hidden)]
    heap.drop(*moved)
    held.append(heap.take("gathered cotangent", cut(layer.gathered)))
    held += [heap.take("rows' cotangents", layer.rows), heap.take("rows' cotangents, sent", layer.sent)]
    held += [heap.take("mlp_hidden", hidden)] + [heap.take("cotangent of mlp_up", hidden) for _ in range(gates - 1)]
    heap.drop(*weights, *([] if layer.rows else given[:1]))  # products over ragged groups are fused with nothing
    taken = layer.sent or layer.rows or cut(layer.gathered or layer.stream)
    heap.drop(*[heap.take("cotangent of what was projected", taken) for _ in range(gates)])
    heap.drop(*(given[:1] if layer.rows else []))
    held += [heap.take("a weight's gradient", n) for n in _made(layer.feed)[: 1 if layer.rows else 2]]
    heap.drop(*given[1:], *held)


def _made(weights: Iterable[Weight]) -> list[int]:
    """Gradients that are there at once: one is made while the one before it is sent to where it goes."""
    largest = max(weights, key=lambda w: w.made, default=Weight("", 0, 0, 0))
    return [largest.made] * (1 if largest.made == largest.kept else 2)


def _attention_backward(heap: SteadyHeap, layer: LayerBytes, asked: Iterable[Buffer]) -> None:
    """The attention half; `asked`, queries, keys and values, are given back once their cotangents are there."""
    t, taken = layer.tensors, layer.gathered or layer.stream
    heads = t["attn_out"]
    keys = (t["qkv"] - heads) // 2
    held = [heap.take("cotangent of residual_mid", layer.stream), heap.take("gathered cotangent", layer.gathered)]
    mixed = heap.take("cotangent of attn_out", heads)
    held += [heap.take("keys and values of all", layer.keys) for _ in range(2)]
    product = heap.take("attn_out by its cotangent, float32", 2 * heads)
    by_head = heap.take("the same, by head", 2 * heads)
    heap.drop(product, by_head)
    scores = heap.take("cotangent of scores", t["scores"])
    found = [heap.take("cotangents of keys and values", layer.keys or keys) for _ in range(2)]
    heap.drop(heap.take("cotangent of keys, float32", 2 * layer.keys))
    turned = heap.take("cotangent of queries", heads)
    heap.drop(mixed, scores, *asked)
    held += [heap.take("cotangents of what was projected", taken) for _ in range(1 if layer.gathered else 2)]
    heap.drop(heap.take("cotangent of queries, float32", 2 * heads))
    held += [heap.take("a weight's gradient", n) for n in _made(layer.attention)]
    heap.drop(turned, *found, *held)
