"""Memory of a training step by formulas: needs no compiler and no devices."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax

from jaxscale.errors import ConfigError
from jaxscale.hardware import Topology
from jaxscale.hardware import topology as hardware
from jaxscale.layout import Layout, TensorInfo, describe
from jaxscale.layout.rules import Kind
from jaxscale.layout.tensors import Tree
from jaxscale.nn import MemoryPolicy
from jaxscale.optim import HostState
from jaxscale.optim.base import hosted
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
from jaxscale.renamed import renamed
from jaxscale.step import Blueprint, TrainConfig, blueprint_of, model_flops, token_loss
from jaxscale.step.stage_order import by_stage


@renamed(kept="saved")
@dataclasses.dataclass(frozen=True)
class Estimate:
    """Predicted memory of a step; all bytes are per device.

    Args:
      state: bytes of parameters, including frozen ones, and of optimizer state.
      gradients: bytes of the parameters' gradients.
      copies: bytes of the layers' weights in the compute dtype, if they are cast once for all layers.
      saved: bytes of activations on the device from forward to backward pass; with pipeline stages, also of stashed
        inputs and cotangents.
      peak: peak bytes besides the state, gaps between buffers included.
      host: bytes of activations and optimizer state in host memory.
      extra_flops: FLOPs of recomputed matrix products on all devices, as a fraction of the model's forward and backward
        FLOPs.
      at_peak: the buffers at peak memory besides the state, the largest first.
    """

    state: int
    gradients: int
    copies: int
    saved: int
    peak: int
    host: int
    extra_flops: float
    at_peak: tuple[Buffer, ...] = ()

    @property
    def device(self) -> int:
        """Peak bytes on the device."""
        return self.state + self.peak

    @property
    def working(self) -> int:
        """Bytes of short-lived buffers at the peak: of the loss, a layer's backward pass or embedding gradients."""
        return max(0, self.peak - self.gradients - self.copies - self.saved)


def estimate(config: TrainConfig, topology: str | Topology) -> Estimate:
    """Estimate the memory of a run's step on each device by formulas.

    The step's buffers are allocated in the order in which a compiled step makes them (`jaxscale.plan.layer_memory`) and
    as XLA for TPUs allocates them (`jaxscale.plan.heap`), so more layers, width, tokens or rows never take less memory.
    There are two real exceptions: two layers may take less than one, because a single layer is not recomputed; and a
    side of a matrix that exceeds SOAP's `max_size` has no preconditioner. Needs no compiler and no devices.

    With adapters the model's own weights have no gradients. All activations that the memory policy saves are counted,
    although the input of a projection without an adapter is not needed.

    Args:
      config: the run's settings, with a layout.
      topology: hardware or its name, such as "v5p:4x4x4" or "h200:8".

    Raises:
      ConfigError: the model has no memory policies, the run has no layout, or adapters are on pipeline stages.
      LayoutError: an array cannot be laid out, or the topology is unknown.
    """
    model = covered(config, adapters=True)
    if config.layout is None:
        raise ConfigError("a run with layout=None is for one local device; give it Layout('data=1') to plan it")
    target = hardware(topology) if isinstance(topology, str) else topology
    layout = sized(config.layout, target.devices)
    if config.adapters is not None and layout.stages > 1:
        raise NotCovered("adapters over pipeline stages")
    policy = MemoryPolicy.of(model.memory)
    blueprint, _ = blueprint_of(dataclasses.replace(config, layout=layout))
    stored = by_stage(blueprint)
    state, gradients, offloaded = held_bytes(stored, stored.algorithm.infos(stored), layout)
    walk = walk_pipeline if layout.stages > 1 else walk_layers
    tokens = TensorInfo("tokens", (config.batch_size, config.seq_len), jax.numpy.dtype("int32"), ("batch", "seq"))
    batch = (5 if config.segments else 3) * local_bytes(tokens, layout)
    heap, saved, copies, host = walk(config, blueprint, layout, Sums.of(model, target, layout))
    flops = model_flops(config)
    assert flops is not None  # a model with `product_flops` has `flops`
    per_layer = LayerBytes.of(model, _last_block(blueprint.of_model()), layout, config.micro_batch, config.seq_len)
    return Estimate(
        state + batch,
        gradients,
        copies,
        saved,
        heap.peak,
        host + offloaded,
        _extra_flops(
            policy, model.product_flops(config.batch_size, config.seq_len), "lse" if per_layer.tensors["lse"] else None
        )
        / flops,
        heap.at_peak,
    )


def held_bytes(blueprint: Blueprint, infos: dict[str, Any], layout: Layout) -> tuple[int, int, int]:
    """Bytes of the state on a device, of gradients there, and of the state in host memory.

    Gradients of parameters in host memory are not on the device, either.

    Args:
      blueprint: the run's blueprint.
      infos: tensor infos of its state (see `Algorithm.infos`).
      layout: the run's layout.

    Raises:
      LayoutError: a tensor cannot be laid out; the message names it.
    """

    def size(infos: Tree, kind: Kind) -> int:
        return sum(r.bytes_per_device for r in describe(infos, layout, kind))

    away = [i for i in jax.tree.leaves(infos["params"]) if i.host]
    offloaded = size(_of_host(infos["opt_state"]), "opt_state") + size(away, "params")
    state = size(infos["opt_state"], "opt_state") + size(infos["extra"], "opt_state")
    return (
        state + size(infos["params"], "params") + size(blueprint.frozen, "params") - offloaded,
        size(blueprint.infos, "grads") - size(away, "grads"),
        offloaded,
    )


def walk_layers(
    config: TrainConfig, blueprint: Blueprint, layout: Layout, sums: Sums
) -> tuple[SteadyHeap, int, int, int]:
    """Allocate the buffers of a step without pipeline stages.

    Returns:
      the heap, and bytes of saved activations, of cast weights, and in host memory.
    """
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
    saved, host = saved_bytes(policy, layer.tensors, model.depth, sum(repeats for _, repeats in model.runs))

    def gradients(infos: list[TensorInfo], what: str) -> None:
        for i in infos:
            heap.take(f"{what} of {i.path}", local_bytes(i, layout, "grads"))

    for i in trained:
        if local_bytes(i, layout, "params") != local_bytes(i, layout, "opt_state"):
            # New parameters are gathered into the buffer of the old ones, which are therefore copied first.
            heap.take(f"copy of {i.path}", local_bytes(i, layout, "params"))
    if config.accumulate > 1:
        gradients(trained, "accumulated gradient")
    shared = ends.look_up(heap)
    weights = [*infos, *(trained if adapts else [])]
    stash = [heap.take(f"cast {i.path}", copied_bytes(i, layout, model.dtype)) for i in weights if i not in tables]
    if adapts:  # products need another order of heads than weights are stored in; a cast changes the order as well
        transposed = [i for i in infos if "heads" in i.axes and not copied_bytes(i, layout, model.dtype)]
        stash += [heap.take(f"transposed {i.path}", local_bytes(i, layout, "params")) for i in transposed]
    copies = sum(b.size for b in stash)
    stash += [heap.take(f"activations, {name}", size) for name, size in saved.items()]
    alone = single_layers(config, whole, layout, [repeats for _, repeats in model.runs], rows)
    stash += [heap.take("activations of a layer by itself", saved_by_single(one, policy)) for one in alone]
    waiting = ends.loss(heap, shared)
    gradients([i for i in trained if i not in tables], "gradient")
    backward(heap, layer, policy, blocks=max(len(group) for group, _ in model.runs))
    heap.drop(*stash)
    ends.finish(heap, waiting)
    gradients([] if adapts else tables, "gradient")
    return heap, sum(saved.values()), copies, host


def _last_block(blueprint: Blueprint) -> list[TensorInfo]:
    """Parameters of the last layer, which is one of a stack."""
    run = list(blueprint.infos["runs"].values())[-1]
    return jax.tree.leaves(list(run["blocks"].values())[-1])


def _of_host(state: Tree) -> list[TensorInfo]:
    """The part of optimizer state that is in host memory."""
    parts = jax.tree.leaves(state, is_leaf=lambda s: isinstance(s, HostState))
    return [i for part in parts if isinstance(part, HostState) for i in jax.tree.leaves(part) if hosted(i)]


def _extra_flops(policy: MemoryPolicy, products: Mapping[str, int], lse: str | None) -> int:
    """FLOPs of the products that the backward pass recomputes. The last product of a layer is never recomputed."""
    if policy.rest == "keep":
        return products["mlp_up"] if "mlp_hidden" in policy.tile else 0
    saved = {*policy.keep, *policy.offload}
    if policy.rest == "dots":
        saved |= {"qkv", "residual_mid", "mlp_up"}
    again = {t for t in ("qkv", "residual_mid", "mlp_up") if t not in saved}
    if policy.rest != "dots":
        again |= {"router"} & products.keys()
    if lse is None:  # dense attention: its weights are always recomputed
        again |= {"scores"} | ({"attn_out"} - saved)
    elif not {"attn_out", lse} <= saved:
        again |= {"scores", "attn_out"}
    return sum(products[t] for t in again)
