"""The buffers of a step over pipeline stages: stashes by schedule, a micro-batch's layers, ends cut over stages."""

from __future__ import annotations

from typing import Any

import jax

from jaxscale.layout import Layout, TensorInfo
from jaxscale.nn import MemoryPolicy
from jaxscale.parallel.pipeline import lower
from jaxscale.plan.heap import Heap
from jaxscale.plan.step_memory import Ends, LayerBytes, backward, copied_bytes, kept_bytes, local_bytes
from jaxscale.train import Blueprint, TrainConfig, pipelined


def walk_pipeline(
    config: TrainConfig, blueprint: Blueprint, layout: Layout, *, whole: bool
) -> tuple[Heap, int, int, int]:
    """As `walk_layers`, of the executor of `jaxscale.parallel.pipeline`: one tick, with every phase in it."""
    model: Any = config.model
    pipeline = pipelined(blueprint, config.loss, config.z_loss, config.accumulate)
    table = pipeline.table(config.micro_batch)
    rows, slots = config.micro_batch // table.microbatches, lower(table).size
    infos = jax.tree.leaves(blueprint.infos)
    ends = Ends.of(model, [i for i in infos if "vocab" in i.axes], layout, config.loss, rows, config.seq_len, whole)
    runs = list(blueprint.infos["runs"].values())
    layer = LayerBytes.of(model, jax.tree.leaves(list(runs[-1]["blocks"].values())[-1]), layout, rows, config.seq_len)
    policy = MemoryPolicy.of(model.memory)
    held = [index.shape[2] for index in pipeline.stages.index]  # groups of each run in a chunk
    blocks = [len(run["blocks"]) for run in runs]
    depth = sum(n * b for n, b in zip(held, blocks, strict=True))
    kept, host = kept_bytes(policy, layer.tensors, depth, sum(held))

    def of_chunk(bytes_of: Any) -> int:
        """Of a chunk's layers, padding included."""
        return sum(
            n * bytes_of(i) // i.shape[0] * _cut_of_layers(i, layout)
            for run, n in zip(runs, held, strict=True)
            for i in jax.tree.leaves(run)
        )

    heap, chunks = Heap(), layout.schedule.chunks_per_stage
    moved = [n for n in range(len(runs)) if not pipeline.stages.in_place(n)]
    params = of_chunk(lambda i: local_bytes(i, layout, "params"))
    gradients = of_chunk(lambda i: local_bytes(i, layout, "grads"))
    copies = of_chunk(lambda i: copied_bytes(i, layout, model.dtype))
    if moved:
        heap.take("layers, dealt out", chunks * params)
    inputs = heap.take("stashed inputs", (slots["inputs"] + 1) * layer.stream)
    cotangents = heap.take("stashed cotangents", (slots["cotangents"] + 1) * layer.stream)
    pairs = heap.take("stashed products", _pair_bytes(layer) * depth * (slots["pairs"] + 1) if table.phases > 2 else 0)
    heap.take("gradients", chunks * gradients)
    tables = heap.take("gradients of tables", ends.kept)
    ends.look_up(heap)
    cast = heap.take("weights, cast", copies)
    sent = [heap.take("a stage's input", layer.stream), heap.take("a stage's output", layer.stream)]
    heap.drop(ends.lose(heap))
    now = [heap.take("activations", kept), heap.take("a micro-batch's gradients", gradients)]
    backward(heap, layer, policy, blocks=max(blocks))
    heap.drop(*now, cast)
    ends.look_up_backward(heap, heap.take("", 0))
    heap.drop(*sent, tables)
    if moved:
        heap.take("gradients, collected", gradients * chunks)
    stashed = inputs.size + cotangents.size + pairs.size
    return heap, kept + stashed, copies, host


def _cut_of_layers(info: TensorInfo, layout: Layout) -> int:
    """Into how many pieces the stack is counted as cut, which `of_chunk` counts layer by layer."""
    return layout.split("layers", "params")


def _pair_bytes(layer: LayerBytes) -> int:
    """What a layer's products took and the cotangents of what they made, kept for their weights' gradients."""
    t = layer.tensors
    return t["norm"] + t["attn_out"] + t["mlp_hidden"] + t["qkv"] + t["mlp_up"] + 2 * layer.stream
