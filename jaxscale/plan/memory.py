"""What a training step holds, by arithmetic alone: no compiler, no devices."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax

from jaxscale.errors import ConfigError
from jaxscale.hardware import Topology
from jaxscale.hardware import topology as hardware
from jaxscale.layout import Layout, TensorInfo, describe
from jaxscale.nn import MemoryPolicy
from jaxscale.optim import HostState
from jaxscale.plan.communication import sized
from jaxscale.plan.covered import NotCovered, covered
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
from jaxscale.plan.pipeline_memory import walk_pipeline
from jaxscale.step import Blueprint, TrainConfig, blueprint_of, model_flops, token_loss


@dataclasses.dataclass(frozen=True)
class Estimate:
    """What a step costs by arithmetic; all bytes are per device.

    Args:
      state: parameters, frozen ones with them, and optimizer state.
      gradients: of the parameters.
      copies: of the layers' weights in the type of the arithmetic, made once and not layer by layer.
      kept: activations on the device from forward to backward pass; with pipeline stages, stashed inputs and cotangents
        as well.
      peak: the most that there is at once besides the state, gaps between buffers included.
      host: activations and optimizer state in host memory.
      extra_flops: matrix products made again, whole machine, as a share of the model's own three passes.
      at_peak: what is there at the worst moment besides the state, the largest first.
    """

    state: int
    gradients: int
    copies: int
    kept: int
    peak: int
    host: int
    extra_flops: float
    at_peak: tuple[Buffer, ...] = ()

    @property
    def device(self) -> int:
        """Bytes on the device."""
        return self.state + self.peak

    @property
    def working(self) -> int:
        """Bytes besides what lasts: the loss, one layer on its way back, or the gradients of the tables."""
        return max(0, self.peak - self.gradients - self.copies - self.kept)


def estimate(config: TrainConfig, topology: str | Topology) -> Estimate:
    """What a run's step takes of each device, by arithmetic.

    The step's buffers are dealt out in the order in which a compiled one makes them (`jaxscale.plan.layer_memory`), as
    XLA for TPUs deals them out (`jaxscale.plan.heap`), so that more layers, width, tokens or rows never take less. Two
    exceptions are real: two layers may take less than one, which is not recomputed, and a side of a matrix that grows
    beyond SOAP's `max_size` has no preconditioner. Needs no compiler and no devices.

    Args:
      config: the run's settings, with a layout.
      topology: hardware or its name, as "v5p:4x4x4" or "h200:8".

    With adapters the model's own weights have no gradients; what a policy keeps is counted as if all of it were needed,
    though the input of a projection that none adapts is not.

    Raises:
      ConfigError: a model without memory policies, a run without a layout, or adapters over pipeline stages.
      LayoutError: what cannot be laid out, or an unknown topology.
    """
    model = covered(config, adapters=True)
    if config.layout is None:
        raise ConfigError("a run with layout=None is for one local device; give it Layout('data=1') to plan it")
    there = hardware(topology) if isinstance(topology, str) else topology
    layout = sized(config.layout, there.devices)
    if config.adapters is not None and layout.stages > 1:
        raise NotCovered("adapters over pipeline stages")
    policy = MemoryPolicy.of(model.memory)
    blueprint, _ = blueprint_of(dataclasses.replace(config, layout=layout))
    state, gradients, away = held_bytes(blueprint, blueprint.algorithm.infos(blueprint), layout)
    walk = walk_pipeline if layout.stages > 1 else walk_layers
    tokens = TensorInfo("tokens", (config.batch_size, config.seq_len), jax.numpy.dtype("int32"), ("batch", "seq"))
    batch = (5 if config.segments else 3) * local_bytes(tokens, layout)
    heap, kept, copies, host = walk(config, blueprint, layout, Sums.of(model, there, layout))
    flops = model_flops(config)
    assert flops is not None  # a model with `products` has `flops`
    per_layer = LayerBytes.of(model, _last_block(blueprint.of_model()), layout, config.micro_batch, config.seq_len)
    return Estimate(
        state + batch,
        gradients,
        copies,
        kept,
        heap.peak,
        host + away,
        _extra_flops(
            policy, model.products(config.batch_size, config.seq_len), "lse" if per_layer.tensors["lse"] else None
        )
        / flops,
        heap.at_peak,
    )


def held_bytes(blueprint: Blueprint, infos: dict[str, Any], layout: Layout) -> tuple[int, int, int]:
    """Bytes of the state on a device, of gradients, and of optimizer state in host memory.

    Args:
      blueprint: the run's.
      infos: of its state (see `Algorithm.infos`).
      layout: where it lies.

    Raises:
      LayoutError: naming what cannot be laid out.
    """
    held = lambda infos, kind: sum(r.bytes_per_device for r in describe(infos, layout, kind))  # noqa: E731
    away = held(_of_host(infos["opt_state"]), "opt_state")
    kept = held(infos["opt_state"], "opt_state") + held(infos["extra"], "opt_state") - away
    return (
        held(infos["params"], "params") + held(blueprint.frozen, "params") + kept,
        held(blueprint.infos, "grads"),
        away,
    )


def walk_layers(
    config: TrainConfig, blueprint: Blueprint, layout: Layout, sums: Sums
) -> tuple[SteadyHeap, int, int, int]:
    """The buffers of a step that goes through all layers and back; and bytes kept, copied, and in host memory."""
    model, heap, whole = covered(config, adapters=True), SteadyHeap(), blueprint.of_model()
    infos, trained = jax.tree.leaves(blueprint.frozen or blueprint.infos), jax.tree.leaves(blueprint.infos)
    adapts = blueprint.adaptation is not None
    policy = MemoryPolicy.of(model.memory)
    rows, seq = config.micro_batch, config.seq_len
    tables = [i for i in infos if "vocab" in i.axes]
    ends = Ends.of(model, tables, layout, token_loss(config), rows, seq, sums)
    layer = LayerBytes.of(model, _last_block(whole), layout, rows, seq)
    if adapts:
        ends, layer = ends.frozen(), layer.frozen()
    kept, host = saved_bytes(policy, layer.tensors, model.depth, sum(repeats for _, repeats in model.runs))
    gradients = lambda infos, of: [heap.take(f"{of} of {i.path}", local_bytes(i, layout, "grads")) for i in infos]  # noqa: E731
    for i in trained:
        if local_bytes(i, layout, "params") != local_bytes(i, layout, "opt_state"):
            # new ones are gathered into the place of the old, which are therefore copied first
            heap.take(f"copy of {i.path}", local_bytes(i, layout, "params"))
    if config.accumulate > 1:
        gradients(trained, "gradient so far")
    shared = ends.look_up(heap)
    weights = [*infos, *(trained if adapts else [])]
    stash = [heap.take(f"cast {i.path}", copied_bytes(i, layout, model.dtype)) for i in weights if i not in tables]
    if adapts:  # heads stand otherwise in products than as they are kept; what is cast is turned with it
        turned = [i for i in infos if "heads" in i.axes and not copied_bytes(i, layout, model.dtype)]
        stash += [heap.take(f"turned {i.path}", local_bytes(i, layout, "params")) for i in turned]
    copies = sum(b.size for b in stash)
    stash += [heap.take(f"activations, {name}", size) for name, size in kept.items()]
    alone = single_layers(config, whole, layout, [repeats for _, repeats in model.runs], rows)
    stash += [heap.take("activations of a layer by itself", saved_by_single(one, policy)) for one in alone]
    waiting = ends.loss(heap, shared)
    gradients([i for i in trained if i not in tables], "gradient")
    backward(heap, layer, policy, blocks=max(len(group) for group, _ in model.runs))
    heap.drop(*stash)
    ends.finish(heap, waiting)
    gradients([] if adapts else tables, "gradient")
    return heap, sum(kept.values()), copies, host


def _last_block(blueprint: Blueprint) -> list[TensorInfo]:
    """Parameters of the last layer, one of a stack."""
    run = list(blueprint.infos["runs"].values())[-1]
    return jax.tree.leaves(list(run["blocks"].values())[-1])


def _of_host(state: Any) -> list[TensorInfo]:
    """Of optimizer state, what lives in host memory."""
    parts = jax.tree.leaves(state, is_leaf=lambda s: isinstance(s, HostState))
    return [i for part in parts if isinstance(part, HostState) for i in jax.tree.leaves(part) if i.path]


def _extra_flops(policy: MemoryPolicy, products: Mapping[str, int], lse: str | None) -> int:
    """Products that the backward pass makes again. A layer's last one is not needed."""
    if policy.rest == "keep":
        return products["mlp_up"] if "mlp_hidden" in policy.tile else 0
    found = {*policy.keep, *policy.offload}
    if policy.rest == "dots":
        found |= {"qkv", "residual_mid", "mlp_up"}
    again = {t for t in ("qkv", "residual_mid", "mlp_up") if t not in found}
    if policy.rest != "dots":
        again |= {"router"} & products.keys()
    if lse is None:  # dense attention: the weights are made again whatever is kept of what they mix
        again |= {"scores"} | ({"attn_out"} - found)
    elif not {"attn_out", lse} <= found:
        again |= {"scores", "attn_out"}
    return sum(products[t] for t in again)
