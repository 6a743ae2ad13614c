"""What a run will do, before it does it: its tensors, FLOPs and kernels, and what its compiled step holds and sends."""

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
from jaxscale.plan.program_memory import ProgramBuffer, ProgramMemory, dims_key, program_memory, weight_shapes
from jaxscale.plan.remedies import out_of_memory_said
from jaxscale.plan.shown import Shown
from jaxscale.plan.stand_ins import as_compiled
from jaxscale.plan.traffic import Traffic, traffic
from jaxscale.step import Blueprint, TrainConfig, blueprint_of, is_pipelined, pipelined
from pallas_kernels.dispatch import choosing

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

    from jaxscale.run import Run


@dataclasses.dataclass(frozen=True)
class Compiled:
    """What a compiled step holds and sends.

    Args:
      where: what it was compiled for.
      traffic: its collectives, what sends most first.
      memory: what a device holds at its fullest.
      activations: bytes of the activations there, by the names that memory policies have for them; "other" has none.
    """

    where: str
    traffic: tuple[Traffic, ...]
    memory: ProgramMemory
    activations: dict[str, int]


@dataclasses.dataclass(frozen=True)
class Estimated:
    """What a step holds and sends by arithmetic.

    Args:
      where: the hardware, and why nothing was compiled for it.
      memory: what a device holds.
      traffic: collectives, as `jaxscale.plan.communication.predict` has them.
    """

    where: str
    memory: Estimate
    traffic: tuple[Traffic, ...]


@dataclasses.dataclass(frozen=True)
class Explanation(Shown):
    """Where every tensor of a run lives and why, and what its step does; prints as tables, here or in a notebook.

    Args:
      layout: the layout, in words.
      params: a row per parameter.
      gradients: a row per gradient, by the rules for them.
      state: a row per array of the optimizer's state, by the rules for it.
      state_bytes_per_device: of all of those.
      loss: which one runs, in words.
      attention: the attention kernel, by name; "" for a model that has none to choose.
      kernels: which implementation of each op is chosen for this hardware and why, a sentence each.
      flops: of a step, whole machine; `None` where a batch of this size cannot be laid out, and a note says so.
      compiled: what the compiled step holds and sends, if it was compiled.
      estimated: the same by arithmetic, for hardware whose compiler is not here.
      notes: what else to know, such as which state keeps 32 bits and why, or what stages cost, a sentence each.
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
        """The same as plain values."""
        found = dataclasses.asdict(self) | {"flops": None if self.flops is None else self.flops.to_json()}
        if self.compiled is not None:
            found["compiled"]["memory"]["groups"] = self.compiled.memory.groups
        return found

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from jaxscale.plan.explain_tables import explanation_tables

        yield from explanation_tables(self)


def explain(run: Run | TrainConfig, topology: str | None = None, *, compile: bool = False) -> Explanation:
    """Explains a run, or the settings of one that has not started; needs no devices unless it compiles for them.

    Args:
      run: a run or its settings.
      topology: hardware that need not be here, as "v5p:8x8x8": the step is compiled for it, and read; where its
        compiler is not installed, its memory and traffic are by arithmetic, and said to be.
      compile: without a topology, compile for the devices of this machine.

    Raises:
      LayoutError: naming the tensor that cannot be laid out, or unknown hardware.
      OutOfMemory: the step does not fit; says what takes how much, and what would help.
    """
    config = run if isinstance(run, TrainConfig) else run.config
    there = None if topology is None else hardware(topology)
    if there is not None and config.layout is not None:
        layout: Layout | None = sized(config.layout, there.devices)
    else:
        layout = config.layout
    blueprint, _ = blueprint_of(dataclasses.replace(config, layout=layout))
    if layout is not None:
        check_state(blueprint.tx, blueprint.infos, layout)
    infos = blueprint.algorithm.infos(blueprint)
    state = tuple(row for part in ("opt_state", "extra") for row in describe(infos[part], layout, "opt_state"))
    kind = there.chip.kinds[0] if there is not None and there.chip.kinds else None
    compiled = estimated = flops = None
    notes = [*getattr(blueprint.tx, "notes", ()), *_of_stages(blueprint, config)]
    notes += filled_notes([blueprint.infos, blueprint.frozen], layout)
    if blueprint.adaptation is not None:
        notes.append(blueprint.adaptation.describe())
    with choosing() as kernels:
        try:
            flops = of_step(config, there.devices if there else None, kind=kind)
        except LayoutError as e:  # of the batch, say; tensors are told all the same
            if there is not None or compile:
                raise
            notes.append(f"a step is not counted, since it cannot be laid out: {e}")
        if there is not None and (why := why_not_compiled(there)):
            found = traffic(as_compiled(predict(config, there), there)) if layout is not None else ()
            estimated = Estimated(f"{there.name}: {why}", estimate(config, there), found)
        elif topology is not None or compile:
            compiled = _compiled(config, topology, blueprint, layout)
    return Explanation(
        "on one device" if layout is None else str(layout),
        tuple(row for tree in (blueprint.frozen, infos["params"]) for row in describe(tree, layout)),
        tuple(describe(blueprint.infos, layout, "grads")),
        state,
        sum(r.bytes_per_device for r in state),
        config.objective.describe(config),
        _called(getattr(config.model, "attention", None)),
        tuple(dict.fromkeys(str(c) for c in kernels.values())),
        flops,
        compiled,
        estimated,
        tuple(notes),
    )


def _compiled(config: TrainConfig, topology: str | None, blueprint: Blueprint, layout: Layout | None) -> Compiled:
    with out_of_memory_said(config, topology):
        program = compile_step(config, topology)
    where = topology or f"{jax.device_count()} device(s) of this machine ({jax.devices()[0].device_kind})"
    sizes = {} if layout is None else layout.sizes
    found = traffic(collectives(program, sizes, None if layout is None else layout.across)) if sizes else ()
    memory = program_memory(program, weight_shapes([blueprint.infos, blueprint.frozen], layout))
    return Compiled(where, found, memory, _by_tensor(memory, config, layout))


_WHERE = {
    "norm": ("norm",),
    "qkv": ("attn/qkv",),
    "scores": ("attn/mix",),
    "attn_out": ("attn/mix",),
    "lse": ("attn/mix",),
    "residual_mid": ("attn/out", ""),
    "mlp_up": ("mlp/up", "mlp/experts", "mlp/shared/up"),
    "mlp_hidden": ("mlp/up", "mlp/experts", "mlp/shared/up"),
}
"""A layer's tensors -> the modules that make them, within a block."""


def _by_tensor(memory: ProgramMemory, config: TrainConfig, layout: Layout | None) -> dict[str, int]:
    """Activations by name. Told by shape, and by the module that made them where shapes are alike."""
    model = config.model
    tensors = model.activations(config.micro_batch, config.seq_len) if isinstance(model, NamesActivations) else {}
    shapes: dict[str, set[tuple[int, ...]]] = {
        name: {dims_key(_local(i, layout)) for i in infos} for name, infos in tensors.items() if name != "unnamed"
    }
    found: dict[str, int] = defaultdict(int)
    for b in memory.buffers:
        if b.group == "activations":
            found[_tensor(b, shapes)] += b.bytes
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def _tensor(b: ProgramBuffer, shapes: dict[str, set[tuple[int, ...]]]) -> str:
    dims = dims_key(int(n) for n in b.shape.partition("[")[2].rstrip("]").split(",") if n)
    alike = [t for t, known in shapes.items() if any(not _missing(k, dims) for k in known)]
    placed = [t for t in alike if any(b.name.endswith(where) for where in _WHERE.get(t, ()) if where)]
    return ", ".join(placed or alike[:1]) or b.name


def _missing(known: tuple[int, ...], dims: tuple[int, ...]) -> bool:
    """Whether an array is not one of this shape, nor a stack of such."""
    rest = list(dims)
    for n in known:
        if n not in rest:
            return True
        rest.remove(n)
    return len(rest) > 1


def _local(info: TensorInfo, layout: Layout | None) -> tuple[int, ...]:
    sizes = zip(info.axes, info.shape, strict=True)
    return tuple(n if layout is None or a is None else -(-n // layout.split(a, size=n)) for a, n in sizes)


def _of_stages(blueprint: Blueprint, config: TrainConfig) -> tuple[str, ...]:
    if not is_pipelined(blueprint):
        return ()
    return pipelined(blueprint.of_model(), config.objective).notes(config.micro_batch)


def _called(kernel: Any) -> str:
    """A callable's name, with what is bound to it."""
    if kernel is None:
        return ""
    if isinstance(kernel, functools.partial):
        given = [repr(a) for a in kernel.args] + [f"{name}={value!r}" for name, value in kernel.keywords.items()]
        return f"{_called(kernel.func)}({', '.join(given)})"
    return getattr(kernel, "__name__", None) or repr(kernel)
