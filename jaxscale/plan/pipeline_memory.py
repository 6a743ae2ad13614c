"""Buffers of a pipelined step: stashes of the schedule, a micro-batch's layers, embedding and head over stages."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from jaxscale.layout import Layout, TensorInfo, as_used
from jaxscale.nn import MemoryPolicy
from jaxscale.parallel.pipeline import lower
from jaxscale.plan.ends_memory import Ends, Sums
from jaxscale.plan.heap import Buffer, SteadyHeap
from jaxscale.plan.layer_memory import (
    LayerBytes,
    backward,
    copied_bytes,
    local_bytes,
    saved_by_single,
    saved_bytes,
    single_layers,
)
from jaxscale.step import Blueprint, TrainConfig, pipelined, token_loss
from jaxscale.step.stage_order import by_stage


def walk_pipeline(
    config: TrainConfig, blueprint: Blueprint, layout: Layout, sums: Sums
) -> tuple[SteadyHeap, int, int, int]:
    """Allocate the buffers of a pipelined step, as `walk_layers` does: of one tick with every phase in it.

    The executor is `jaxscale.parallel.pipeline`.
    """
    model: Any = config.model
    pipeline = pipelined(by_stage(blueprint), config.objective, config.accumulate)
    table = pipeline.table(config.micro_batch)
    rows, slots = config.micro_batch // table.microbatches, lower(table).size
    infos = jax.tree.leaves(blueprint.infos)
    tables = [i for i in infos if "vocab" in i.axes]
    inside = _of_replicas(layout, pipeline.replicas)
    ends = Ends.of(model, tables, inside, token_loss(config), rows, config.seq_len, sums)
    runs = list(blueprint.infos["runs"].values())
    layer = LayerBytes.of(model, jax.tree.leaves(list(runs[-1]["blocks"].values())[-1]), layout, rows, config.seq_len)
    policy = MemoryPolicy.of(model.memory)
    groups = [index.shape[2] for index in pipeline.stages.index]  # of each run of blocks in a chunk
    blocks = [len(run["blocks"]) for run in runs]
    depth = sum(n * b for n, b in zip(groups, blocks, strict=True))
    activations, host = saved_bytes(policy, layer.tensors, depth, sum(groups))

    def of_chunk(what: str, bytes_of: Callable[[TensorInfo], int], copies: int = 1) -> list[Buffer]:
        """Allocate buffers for the layers of `copies` chunks, padding included."""
        pieces = layout.split("layers", "params")
        return [
            heap.take(f"{what} {i.path}", copies * n * bytes_of(i) // i.shape[0] * pieces)
            for run, n in zip(runs, groups, strict=True)
            for i in jax.tree.leaves(run)
        ]

    def gradient(i: TensorInfo) -> int:
        return local_bytes(i, inside, "grads")

    def summed(i: TensorInfo) -> int:
        return local_bytes(i, layout, "grads")

    def uncast(i: TensorInfo) -> int:
        return 0 if copied_bytes(i, inside, model.dtype) else local_bytes(i, inside)

    def gathered(i: TensorInfo) -> int:
        return uncast(i) if local_bytes(i, inside, "params") > local_bytes(i, layout, "params") else 0

    heap, chunks = SteadyHeap(), layout.schedule.chunks_per_stage
    if (
        pipeline.moves
    ):  # parameters that are cast are cast before they are sent to their stage, so they need no buffer here
        of_chunk("sent to stages", uncast, chunks)
    elif layout.schedule.gather == "step":
        of_chunk("gathered", gathered, chunks)
    holders = layout.stages if layout.schedule.vocabulary == "whole" else 1  # stages that hold the same rows of tables
    if holders > 1:
        for i in tables:  # those that are cast are gathered after that
            heap.take(f"gathered {i.path}", uncast(i))
    for i in tables:  # a vocabulary that the devices do not divide is copied to the rows that stages use
        if (used := as_used(i, layout)) is not i:
            heap.take(f"{i.path}, in rows", local_bytes(used, layout, "params"))
    stash = [heap.take("stashed inputs", (slots["inputs"] + 1) * layer.stream)]
    stash.append(heap.take("stashed cotangents", (slots["cotangents"] + 1) * layer.stream))
    if table.phases > 2:
        stash.append(heap.take("stashed products", _pair_bytes(layer) * depth * (slots["pairs"] + 1)))
    of_chunk("gradient of", gradient, chunks)
    heap.take("gradients of tables", ends.reduced * holders)
    cast = of_chunk("cast", lambda i: copied_bytes(i, inside, model.dtype))
    cast += [heap.take(f"cast {i.path}", copied_bytes(i, inside, model.dtype) * holders) for i in tables]
    ends = dataclasses.replace(ends, cast=0)  # casts last for the whole step, as those of layers do
    ends.look_up(heap, at_once=True)
    sent = [heap.take("a stage's input", layer.stream), heap.take("a stage's output", layer.stream)]
    heap.drop(*ends.loss(heap, at_once=True))
    now = [heap.take(f"activations, {name}", size) for name, size in activations.items()]
    alone = single_layers(config, blueprint, layout, groups, rows)
    now += [heap.take("activations of a layer by itself", saved_by_single(one, policy)) for one in alone]
    if table.phases > 2 or _has_terms(layout, pipeline.replicas):  # gradients are products of what these hold
        now.append(heap.take("a micro-batch's products", _pair_bytes(layer) * depth))
    else:
        now += of_chunk("a micro-batch's gradient of", gradient)
    backward(heap, layer, policy, blocks=max(blocks))
    heap.drop(*now)
    ends.finish(heap, [])
    heap.drop(*sent, *cast)
    if pipeline.replicas:
        of_chunk("sum over replicas, gradient of", summed, chunks)
    if pipeline.moves:
        of_chunk("collected gradient of", summed, chunks)
    saved = sum(activations.values()) + sum(b.size for b in stash)
    return heap, saved, sum(b.size for b in cast), host


def _has_terms(layout: Layout, replicas: tuple[str, ...]) -> bool:
    """Whether devices sum kernels' gradients over their own tokens (`jaxscale.parallel.pipeline.split.terms_of`)."""
    tokens = {m for a in ("batch", "seq") for m in layout.cut(a)} - set(replicas)
    return bool(tokens - set(layout.cut("embed", "grads")))


def _of_replicas(layout: Layout, replicas: tuple[str, ...]) -> Layout:
    """Layout until the last micro-batch: replicas hold parameters and their own gradients, not yet summed, whole."""
    if not replicas:
        return layout
    rules = layout.resolved_rules
    grads = {a: tuple(m for m in rules.target("grads", a) if m not in replicas) for a in rules.grads or ()}
    params = {a: tuple(m for m in rules.target("params", a) if m not in replicas) for a in rules.params}
    rules = dataclasses.replace(rules, grads=grads, params=params)
    return dataclasses.replace(layout, rules=rules, sequence_sharded=False).abstract(layout.devices)


def _pair_bytes(layer: LayerBytes) -> int:
    """Bytes of the inputs and output cotangents of a layer's products, saved for the weight gradients."""
    t = layer.tensors
    return t["norm"] + t["attn_out"] + t["mlp_hidden"] + t["qkv"] + t["mlp_up"] + 2 * layer.stream
