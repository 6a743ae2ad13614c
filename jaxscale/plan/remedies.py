"""Remedies for a step that does not fit in memory: changes of settings, each with the bytes that it saves."""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from jaxscale.errors import JaxscaleError, OutOfMemory
from jaxscale.hardware import Topology, chip_of, topology
from jaxscale.layout import MESH_AXES, Layout
from jaxscale.nn import POLICIES, MemoryPolicy, dot_product_attention, flash_attention
from jaxscale.optim import AdamW, AdamW8bit, OnHost
from jaxscale.plan.communication import sized
from jaxscale.plan.memory import Estimate, estimate
from jaxscale.plan.printing import table_of, text_of
from jaxscale.step import CutLoss, LoRA, NextToken, TrainConfig, token_loss
from jaxscale.step.loss import holds_logits
from jaxscale.step.state import describe_model
from jaxscale.units import human_bytes

if TYPE_CHECKING:
    from rich.table import Table

ROWS, LARGEST = 16, 10
"""Numbers of remedies and of buffers that the tables list."""

MARGIN = 0.05
"""Fraction of the budget: remedies that leave less than this free are listed after those that leave more."""

Changes = Iterator[tuple[str, TrainConfig]]


@dataclasses.dataclass(frozen=True)
class Remedy:
    """A change of settings and its effect, predicted by `jaxscale.plan.memory.estimate`.

    Args:
      change: the change in words and as a gin binding.
      saves: bytes per device that it saves.
      device: bytes per device of the changed step.
      extra_flops: additional recomputed matrix products, as a fraction of the model's FLOPs.
      fits: whether the changed step is within the budget.
      config: the changed settings.
    """

    change: str
    saves: int
    device: int
    extra_flops: float
    fits: bool
    config: TrainConfig = dataclasses.field(repr=False)

    def to_json(self) -> dict[str, Any]:
        """Return the remedy as JSON values."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "config"}


def remedies(config: TrainConfig, target: Topology, budget: int) -> list[Remedy]:
    """Return changes that make a step smaller: first those that fit the budget, cheapest first, then by bytes saved.

    If no single change fits, a combination is added: at each turn the change that saves most.

    Args:
      config: the run's settings, with a layout.
      target: the hardware.
      budget: bytes per device that a program may use.

    Raises:
      ConfigError: as `estimate` for the unchanged settings.
      LayoutError: as `estimate` for the unchanged settings.
    """
    base = estimate(config, target)
    options = _tried(config, target, budget, base)
    if not any(r.fits for r in options) and options:
        options.append(_together(config, target, budget, base))

    def order(r: Remedy) -> tuple[bool, bool, float]:
        return (False, r.device > (1 - MARGIN) * budget, r.extra_flops) if r.fits else (True, False, -r.saves)

    return sorted(options, key=order)


def _tried(config: TrainConfig, target: Topology, budget: int, base: Estimate) -> list[Remedy]:
    options = []
    for way in WAYS:
        for change, changed in way(config, target):
            with contextlib.suppress(JaxscaleError):  # indivisible, or incompatible settings
                e = estimate(changed, target)
                if e.device < base.device:
                    more = e.extra_flops - base.extra_flops
                    saves = base.device - e.device
                    options.append(Remedy(change, saves, e.device, more, e.device <= budget, changed))
    return options


def _together(config: TrainConfig, target: Topology, budget: int, base: Estimate) -> Remedy:
    changes: list[str] = []
    e = base
    while e.device > budget and (options := _tried(config, target, budget, e)):
        best = max(options, key=lambda r: (r.fits, r.saves))
        changes, config, e = [*changes, best.change], best.config, estimate(best.config, target)
    more = e.extra_flops - base.extra_flops
    return Remedy("; ".join(changes), base.device - e.device, e.device, more, e.device <= budget, config)


def _policies(config: TrainConfig, target: Topology) -> Changes:
    model: Any = config.model
    for name, policy in POLICIES.items():
        if policy != MemoryPolicy.of(model.memory):
            with contextlib.suppress(JaxscaleError):
                changed = dataclasses.replace(model, memory=name)
                yield f"memory policy: Transformer.memory = '{name}'", dataclasses.replace(config, model=changed)


def _attention(config: TrainConfig, target: Topology) -> Changes:
    model: Any = config.model
    if model.attention is dot_product_attention:
        changed = dataclasses.replace(config, model=dataclasses.replace(model, attention=flash_attention))
        yield "no stored scores: Transformer.attention = @flash_attention", changed


def _loss(config: TrainConfig, target: Topology) -> Changes:
    if isinstance(config.objective, NextToken) and holds_logits(token_loss(config)):
        objective = dataclasses.replace(config.objective, loss=CutLoss())
        yield "no stored logits: NextToken.loss = @CutLoss()", dataclasses.replace(config, objective=objective)


def _accumulation(config: TrainConfig, target: Topology) -> Changes:
    for more in (2, 4, 8):
        n = config.accumulate * more
        if config.batch_size % n == 0:
            yield f"smaller micro-batches: train.accumulate = {n}", dataclasses.replace(config, accumulate=n)


def _optimizer(config: TrainConfig, target: Topology) -> Changes:
    optimizer = config.optimizer
    if type(optimizer) is AdamW:
        shared = {f.name: getattr(optimizer, f.name) for f in dataclasses.fields(optimizer) if f.name in _ADAM}
        changed = dataclasses.replace(config, optimizer=AdamW8bit(**shared))
        yield "8-bit optimizer states: train.optimizer = @AdamW8bit()", changed
    if isinstance(optimizer, AdamW | AdamW8bit):
        changed = dataclasses.replace(config, optimizer=OnHost(optimizer))
        yield "optimizer states in host memory: train.optimizer = @OnHost()", changed


def _frozen(config: TrainConfig, target: Topology) -> Changes:
    lora = config.adapters
    if not isinstance(lora, LoRA) or lora.base_dtype is not None or lora.base is not None:
        return
    kernels = [i for i in jax.tree.leaves(describe_model(config.model)[1]) if len(i.shape) > 1]
    if any(i.dtype == jnp.float32 for i in kernels):
        changed = dataclasses.replace(config, adapters=dataclasses.replace(lora, base_dtype="bfloat16"))
        yield "frozen matrices in half the bytes: LoRA.base_dtype = 'bfloat16'", changed


_ADAM = {f.name for f in dataclasses.fields(AdamW8bit)}


def _layouts(config: TrainConfig, target: Topology) -> Changes:
    assert config.layout is not None
    sizes = sized(config.layout, target.devices).sizes
    if sizes["tensor"] > 1 and not config.layout.sequence_sharded and isinstance(config.layout.rules, str):
        changed = dataclasses.replace(config.layout, sequence_sharded=True)
        yield (
            "residual stream sharded over tensor: Layout.sequence_sharded = True",
            dataclasses.replace(config, layout=changed),
        )
    for source, to in (("data", "fsdp"), ("data", "tensor"), ("fsdp", "tensor"), ("tensor", "fsdp")):
        for by in (2, 4, 8):
            if sizes[source] > 1 and sizes[source] % by == 0:
                yield _moved(config, sizes, {source: sizes[source] // by, to: sizes[to] * by})
    spare = target.devices // sized(config.layout, target.devices).devices
    if spare > 1:
        yield _moved(config, sizes, {"fsdp": sizes["fsdp"] * spare})


def _moved(config: TrainConfig, sizes: dict[str, int], new: dict[str, int]) -> tuple[str, TrainConfig]:
    assert config.layout is not None
    mesh = ",".join(f"{a}={n}" for a in MESH_AXES if (n := (sizes | new)[a]) > 1) or "data=1"
    layout: Layout = dataclasses.replace(config.layout.specification, mesh=mesh)
    return f"layout: Layout.mesh = '{mesh}'", dataclasses.replace(config, layout=layout)


WAYS: tuple[Callable[[TrainConfig, Topology], Changes], ...] = (
    _policies,
    _attention,
    _loss,
    _accumulation,
    _layouts,
    _optimizer,
    _frozen,
)
"""Functions that propose changes; each change is tried alone."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error of a compiler or a device means that memory ran out."""
    return isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" in str(error)


@contextlib.contextmanager
def reported_out_of_memory(config: TrainConfig, hardware: str | None = None) -> Iterator[None]:
    """Context in which running out of memory raises `OutOfMemory` with a report instead of XLA's dump.

    Args:
      config: the run's settings.
      hardware: a topology such as "v5p:8x8x8"; `None` for this machine.

    Raises:
      OutOfMemory: memory ran out in the body.
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as e:
        if not is_out_of_memory(e):
            raise
        raise out_of_memory(e, config, hardware) from None


def out_of_memory(error: BaseException, config: TrainConfig, hardware: str | None = None) -> OutOfMemory:
    """Return an error that lists what takes a step's memory, and remedies with the bytes that each saves.

    A program that did not compile has no buffers to list, so the analytic estimate is listed and labelled as such.

    Args:
      error: the error of the compiler or device; needed and available bytes are read from its text if it has them.
      config: the run's settings.
      hardware: as for `reported_out_of_memory`.
    """
    try:
        target = topology(hardware) if hardware is not None else this_machine()
    except JaxscaleError:  # no hardware file matches this number of devices
        target = None
    message = str(error)
    needed = _bytes_in(r"(?:Used |temporaries \(|allocat(?:e|ing) )([\d.]+)([KMGT]?)", message)
    limit = _bytes_in(r"(?:available HBM \(|of )([\d.]+)([KMGT])", message)
    what = "this machine" if hardware is None else hardware
    first = f"the step does not fit {what}"
    if needed is not None and "allocat" in message:
        first += f": one allocation of {human_bytes(needed)} failed"
    elif needed is not None:
        first += f": its compiler asks for {'temporaries of ' * ('temporaries' in message)}{human_bytes(needed)}"
    if target is None or config.layout is None:
        return OutOfMemory(f"{first}; try memory='full', or a smaller batch (with train.accumulate for the same steps)")
    budget = limit or (_allowed() if hardware is None else None) or target.chip.capacity
    first += f", and a device has {human_bytes(budget)}"
    try:
        base, options = estimate(config, target), remedies(config, target, budget)
    except JaxscaleError as e:
        return OutOfMemory(f"{first}; no remedies are known, because {e}")
    best = next((r for r in options if r.fits), None)
    first += f"; the cheapest remedy: {best.change}" if best else "; none of the known remedies makes it fit"
    tables = [estimate_table(base, budget), remedy_table(options[:ROWS])]
    return OutOfMemory("\n".join([first, "", *(text_of(t) for t in tables)]).rstrip())


def this_machine() -> Topology | None:
    """Return the hardware of this machine, or `None` if it has no hardware file."""
    devices = jax.devices()
    chip = chip_of(devices[0].device_kind)
    if chip is None:
        return None
    coords = [d.coords for d in devices if hasattr(d, "coords")]
    if coords and chip.torus:
        shape = [max(c[i] for c in coords) - min(c[i] for c in coords) + 1 for i in range(len(chip.smallest))]
    else:
        hosts = len({d.process_index for d in devices})
        shape = [len(devices) // hosts, *([hosts] if hosts > 1 else [])]
    return topology(f"{chip.name}:{'x'.join(map(str, shape))}")


def _allowed() -> int | None:
    """Bytes of a device that this process may use: less than a GPU has, and different for chips of one name."""
    try:
        return (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")
    except jax.errors.JaxRuntimeError:
        return None


def _bytes_in(pattern: str, text: str) -> int | None:
    match = re.search(pattern, text)
    return None if match is None else int(float(match[1]) * 1024 ** (" KMGT".index(match[2] or " ")))


def estimate_table(memory: Estimate, budget: int | None = None) -> Table:
    """Rich table of an estimate: bytes by group and the largest buffers at peak memory, with shares of the budget."""
    whole = budget or memory.device
    share = "of the device" if budget else "share"
    table = table_of("peak memory, by arithmetic", "group", "per device", share)
    groups = {
        "parameters and optimizer states": memory.state,
        "gradients": memory.gradients,
        "weight copies": memory.copies,
        "activations": memory.saved,
        "temporaries": memory.working,
    }
    for name, n in groups.items():
        table.add_row(name, human_bytes(n), f"{n / whole:.0%}")
    table.add_section()
    table.add_row("peak", human_bytes(memory.device), f"{memory.device / whole:.0%}")
    for b in memory.at_peak[:LARGEST]:
        table.add_row(f"  buffer: {b.what}", human_bytes(b.size), f"{b.size / whole:.0%}")
    if memory.host:
        table.add_row("in host memory", human_bytes(memory.host), "")
    return table


def remedy_table(rows: list[Remedy]) -> Table:
    """Rich table of remedies: change, bytes saved and left, extra FLOPs, whether the step then fits."""
    table = table_of("remedies, each alone, by arithmetic", "change", "saves", "leaves", "extra FLOPs", "fits")
    for r in rows:
        extra = f"{100 * r.extra_flops:+.1f}%"
        table.add_row(r.change, human_bytes(r.saves), human_bytes(r.device), extra, "yes" if r.fits else "no")
    return table
