"""Explain a run before it starts: its tensors, FLOPs and kernels, and memory and collectives of its step."""

from __future__ import annotations

import dataclasses
import functools
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import jax

from jaxscale.errors import LayoutError
from jaxscale.hardware import topology as hardware
from jaxscale.layout import Layout, TensorInfo, TensorRow, describe, filled_notes
from jaxscale.models.base import NamesActivations
from jaxscale.optim import check_state
from jaxscale.plan.collectives import collectives
from jaxscale.plan.communication import predict, sized
from jaxscale.plan.compile import compile_step
from jaxscale.plan.flops import Flops, of_step
from jaxscale.plan.memory import Estimate, estimate
from jaxscale.plan.planner import why_not_compiled
from jaxscale.plan.printing import Printable
from jaxscale.plan.program_memory import ProgramBuffer, ProgramMemory, dims_key, program_memory, weight_shapes
from jaxscale.plan.remedies import reported_out_of_memory
from jaxscale.plan.slow_links import wire_notes
from jaxscale.plan.stand_ins import as_compiled
from jaxscale.plan.traffic import Traffic, traffic
from jaxscale.step import Blueprint, TrainConfig, blueprint_of, is_pipelined, pipelined
from jaxscale.step.stage_order import by_stage
from pallas_kernels.dispatch import choosing

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

    from jaxscale.run import Run


@dataclasses.dataclass(frozen=True)
class Compiled:
    """Memory and collectives of a compiled step.

    Args:
      where: the hardware that it was compiled for.
      traffic: its collectives in groups, those that send the most bytes first.
      memory: memory of a device at its peak.
      activations: bytes of activations at the peak, by the names that memory policies use; others by their operation.
    """

    where: str
    traffic: tuple[Traffic, ...]
    memory: ProgramMemory
    activations: dict[str, int]


@dataclasses.dataclass(frozen=True)
class Estimated:
    """Memory and collectives of a step that was not compiled, by formulas.

    Args:
      where: the hardware, and why the step was not compiled for it.
      memory: memory of a device.
      traffic: collectives in groups, as `jaxscale.plan.communication.predict` predicts them.
    """

    where: str
    memory: Estimate
    traffic: tuple[Traffic, ...]


@dataclasses.dataclass(frozen=True)
class Explanation(Printable):
    """How each tensor of a run is sharded and why, and what its step does; prints as tables, also in notebooks.

    Args:
      layout: the layout, in words.
      params: a row per parameter.
      gradients: a row per gradient.
      state: a row per array of optimizer state.
      state_bytes_per_device: bytes of optimizer state on a device.
      loss: the loss, in words.
      attention: name of the attention kernel; "" for a model without a choice of kernels.
      kernels: for each op a sentence on the implementation that this hardware uses, and why.
      flops: FLOPs of a step over all devices; `None` where the batch cannot be laid out, with a note that says so.
      compiled: memory and collectives of the compiled step, if it was compiled.
      estimated: the same by formulas, for hardware whose compiler is not installed.
      notes: other sentences, such as which optimizer state keeps 32 bits, or what pipeline stages cost.
    """

    layout: str
    params: tuple[TensorRow, ...]
    gradients: tuple[TensorRow, ...]
    state: tuple[TensorRow, ...]
    state_bytes_per_device: int
    loss: str
    attention: str
    kernels: tuple[str, ...]
    flops: Flops | None
    compiled: Compiled | None = None
    estimated: Estimated | None = None
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return all fields as plain values."""
        values = dataclasses.asdict(self) | {"flops": None if self.flops is None else self.flops.to_json()}
        if self.compiled is not None:
            values["compiled"]["memory"]["groups"] = self.compiled.memory.groups
        return values

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from jaxscale.plan.explain_tables import explanation_tables

        yield from explanation_tables(self)


def explain(run: Run | TrainConfig, topology: str | None = None, *, compile: bool = False) -> Explanation:
    """Explain a run, or the settings of one that has not started.

    Args:
      run: a run or its settings.
      topology: named hardware, such as "v5p:8x8x8", which this machine need not have. The step is compiled for it and
        its memory and collectives are read; where the compiler is not installed, they are estimated by formulas.
      compile: without a topology, whether to compile for this machine's devices. Otherwise no devices are used.

    Raises:
      LayoutError: a tensor cannot be laid out, or the hardware is unknown.
      OutOfMemory: the step does not fit; the message lists what takes the memory and what would help.
    """
    config = run if isinstance(run, TrainConfig) else run.config
    target = None if topology is None else hardware(topology)
    if target is not None and config.layout is not None:
        layout: Layout | None = sized(config.layout, target.devices)
    else:
        layout = config.layout
    blueprint, _ = blueprint_of(dataclasses.replace(config, layout=layout))
    if layout is not None:
        check_state(blueprint.tx, blueprint.infos, layout)
    infos = blueprint.algorithm.infos(blueprint)
    state = tuple(row for part in ("opt_state", "extra") for row in describe(infos[part], layout, "opt_state"))
    kind = target.chip.kinds[0] if target is not None and target.chip.kinds else None
    compiled = estimated = flops = None
    notes = [*getattr(blueprint.tx, "notes", ()), *_pipeline_notes(blueprint, config)]
    notes += wire_notes(blueprint)
    notes += filled_notes([blueprint.infos, blueprint.frozen], layout)
    if blueprint.adaptation is not None:
        notes.append(blueprint.adaptation.describe())
    with choosing() as kernels:
        try:
            flops = of_step(config, target.devices if target else None, kind=kind)
        except LayoutError as e:  # for example of the batch; tensors are listed all the same
            if target is not None or compile:
                raise
            notes.append(f"FLOPs are not counted, since the step cannot be laid out: {e}")
        if target is not None and (why := why_not_compiled(target)):
            sent = traffic(as_compiled(predict(config, target), target)) if layout is not None else ()
            estimated = Estimated(f"{target.name}: {why}", estimate(config, target), sent)
        elif topology is not None or compile:
            compiled = _compiled(config, topology, blueprint, layout)
    return Explanation(
        "on one device" if layout is None else str(layout),
        tuple(row for tree in (blueprint.frozen, infos["params"]) for row in describe(tree, layout)),
        tuple(describe(blueprint.infos, layout, "grads")),
        state,
        sum(r.bytes_per_device for r in state),
        config.objective.describe(config),
        _name_of(getattr(config.model, "attention", None)),
        tuple(dict.fromkeys(str(c) for c in kernels.values())),
        flops,
        compiled,
        estimated,
        tuple(notes),
    )


def _compiled(config: TrainConfig, topology: str | None, blueprint: Blueprint, layout: Layout | None) -> Compiled:
    with reported_out_of_memory(config, topology):
        program = compile_step(config, topology)
    where = topology or f"{jax.device_count()} device(s) of this machine ({jax.devices()[0].device_kind})"
    sizes = {} if layout is None else layout.sizes
    sent = traffic(collectives(program, sizes, None if layout is None else layout.across)) if sizes else ()
    memory = program_memory(program, weight_shapes([blueprint.infos, blueprint.frozen], layout))
    return Compiled(where, sent, memory, _by_tensor(memory, config, layout))


_MODULES = {
    "norm": ("norm",),
    "qkv": ("attn/qkv",),
    "scores": ("attn/mix",),
    "attn_out": ("attn/mix",),
    "lse": ("attn/mix",),
    "residual_mid": ("attn/out", ""),
    "mlp_up": ("mlp/up", "mlp/experts", "mlp/shared/up"),
    "mlp_hidden": ("mlp/up", "mlp/experts", "mlp/shared/up"),
}
"""By activation of a block, the modules within the block that compute it."""


def _by_tensor(memory: ProgramMemory, config: TrainConfig, layout: Layout | None) -> dict[str, int]:
    """Return bytes of activations by name, identified by shape and, among equal shapes, by the module."""
    model = config.model
    tensors = model.activations(config.micro_batch, config.seq_len) if isinstance(model, NamesActivations) else {}
    shapes: dict[str, set[tuple[int, ...]]] = {
        name: {dims_key(_local(i, layout)) for i in infos} for name, infos in tensors.items() if name != "unnamed"
    }
    total: dict[str, int] = defaultdict(int)
    for b in memory.buffers:
        if b.group == "activations":
            total[_tensor(b, shapes)] += b.bytes
    return dict(sorted(total.items(), key=lambda item: -item[1]))


def _tensor(b: ProgramBuffer, shapes: dict[str, set[tuple[int, ...]]]) -> str:
    """Return the names of the activations that a buffer may hold; its own name if none has its shape."""
    dims = dims_key(int(n) for n in b.shape.partition("[")[2].rstrip("]").split(",") if n)
    same_shape = [t for t, of_tensor in shapes.items() if any(not _differs(shape, dims) for shape in of_tensor)]
    same_module = [t for t in same_shape if any(b.name.endswith(module) for module in _MODULES.get(t, ()) if module)]
    return ", ".join(same_module or same_shape[:1]) or b.name


def _differs(shape: tuple[int, ...], dims: tuple[int, ...]) -> bool:
    """Return whether an array of dimensions `dims` is neither of a shape nor a stack of such arrays."""
    rest = list(dims)
    for n in shape:
        if n not in rest:
            return True
        rest.remove(n)
    return len(rest) > 1


def _local(info: TensorInfo, layout: Layout | None) -> tuple[int, ...]:
    """Return the shape of a tensor's shard."""
    sizes = zip(info.axes, info.shape, strict=True)
    return tuple(n if layout is None or a is None else -(-n // layout.split(a, size=n)) for a, n in sizes)


def _pipeline_notes(blueprint: Blueprint, config: TrainConfig) -> tuple[str, ...]:
    if not is_pipelined(blueprint):
        return ()
    return pipelined(by_stage(blueprint).of_model(), config.objective).notes(config.micro_batch)


def _name_of(kernel: object) -> str:
    """Return a callable's name, with the arguments that are bound to it."""
    if kernel is None:
        return ""
    if isinstance(kernel, functools.partial):
        arguments = [repr(a) for a in kernel.args] + [f"{name}={value!r}" for name, value in kernel.keywords.items()]
        return f"{_name_of(kernel.func)}({', '.join(arguments)})"
    return getattr(kernel, "__name__", None) or repr(kernel)
