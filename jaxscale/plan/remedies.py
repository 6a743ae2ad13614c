"""What to do about a step that does not fit: changes of its settings, each with the bytes it saves by arithmetic."""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from jaxscale.errors import JaxscaleError, OutOfMemory
from jaxscale.hardware import Topology, chip_of, topology
from jaxscale.layout import MESH_AXES, Layout
from jaxscale.nn import POLICIES, MemoryPolicy, dot_product_attention, flash_attention
from jaxscale.optim import AdamW, AdamW8bit, OnHost
from jaxscale.plan.communication import sized
from jaxscale.plan.memory import Estimate, estimate
from jaxscale.plan.shown import table_of, text_of
from jaxscale.step import CutLoss, LoRA, NextToken, TrainConfig, token_loss
from jaxscale.step.loss import holds_logits
from jaxscale.step.state import describe_model
from jaxscale.units import human_bytes

SHOWN, LARGEST = 16, 10
"""So many remedies are listed, and buffers."""

MARGIN = 0.05
"""What arithmetic may be off by: a remedy that fits with less to spare comes after those with more."""

Changes = Iterator[tuple[str, TrainConfig]]


@dataclasses.dataclass(frozen=True)
class Remedy:
    """A change, and what it does, by `jaxscale.plan.memory.estimate` of the changed settings.

    Args:
      change: what to set, in words and as gin has it.
      saves: bytes per device.
      device: bytes per device that it leaves the step with.
      extra_flops: matrix products made again, as a share of the model's own, beyond those made again before.
      fits: whether that is within the budget.
      config: the settings, changed.
    """

    change: str
    saves: int
    device: int
    extra_flops: float
    fits: bool
    config: TrainConfig = dataclasses.field(repr=False)

    def to_json(self) -> dict[str, Any]:
        """The same as plain values."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "config"}


def remedies(config: TrainConfig, there: Topology, budget: int) -> list[Remedy]:
    """What makes a step smaller: first what fits the budget by itself, cheapest first, then what saves most.

    Where no single change fits, the last one is several together: at each turn the one that saves most.

    Args:
      config: the run's settings, with a layout.
      there: the hardware.
      budget: bytes per device that a program may take.

    Raises:
      ConfigError, LayoutError: as `estimate`, of the settings as they are.
    """
    base = estimate(config, there)
    found = _tried(config, there, budget, base)
    if not any(r.fits for r in found) and found:
        found.append(_together(config, there, budget, base))
    tight = lambda r: r.device > (1 - MARGIN) * budget  # noqa: E731
    return sorted(found, key=lambda r: (False, tight(r), r.extra_flops) if r.fits else (True, False, -r.saves))


def _tried(config: TrainConfig, there: Topology, budget: int, base: Estimate) -> list[Remedy]:
    found = []
    for way in WAYS:
        for change, changed in way(config, there):
            with contextlib.suppress(JaxscaleError):  # it does not divide, or does not go together
                e = estimate(changed, there)
                if e.device < base.device:
                    more = e.extra_flops - base.extra_flops
                    saves = base.device - e.device
                    found.append(Remedy(change, saves, e.device, more, e.device <= budget, changed))
    return found


def _together(config: TrainConfig, there: Topology, budget: int, base: Estimate) -> Remedy:
    changes: list[str] = []
    e = base
    while e.device > budget and (found := _tried(config, there, budget, e)):
        best = max(found, key=lambda r: (r.fits, r.saves))
        changes, config, e = [*changes, best.change], best.config, estimate(best.config, there)
    more = e.extra_flops - base.extra_flops
    return Remedy("; ".join(changes), base.device - e.device, e.device, more, e.device <= budget, config)


def _policies(config: TrainConfig, there: Topology) -> Changes:
    model: Any = config.model
    for name, policy in POLICIES.items():
        if policy != MemoryPolicy.of(model.memory):
            with contextlib.suppress(JaxscaleError):
                changed = dataclasses.replace(model, memory=name)
                yield f"memory policy: Transformer.memory = '{name}'", dataclasses.replace(config, model=changed)


def _attention(config: TrainConfig, there: Topology) -> Changes:
    model: Any = config.model
    if model.attention is dot_product_attention:
        changed = dataclasses.replace(config, model=dataclasses.replace(model, attention=flash_attention))
        yield "no scores held: Transformer.attention = @flash_attention", changed


def _loss(config: TrainConfig, there: Topology) -> Changes:
    if isinstance(config.objective, NextToken) and holds_logits(token_loss(config)):
        objective = dataclasses.replace(config.objective, loss=CutLoss())
        yield "no logits held: NextToken.loss = @CutLoss()", dataclasses.replace(config, objective=objective)


def _accumulation(config: TrainConfig, there: Topology) -> Changes:
    for more in (2, 4, 8):
        n = config.accumulate * more
        if config.batch_size % n == 0:
            yield f"smaller micro-batches: train.accumulate = {n}", dataclasses.replace(config, accumulate=n)


def _optimizer(config: TrainConfig, there: Topology) -> Changes:
    optimizer = config.optimizer
    if type(optimizer) is AdamW:
        shared = {f.name: getattr(optimizer, f.name) for f in dataclasses.fields(optimizer) if f.name in _ADAM}
        changed = dataclasses.replace(config, optimizer=AdamW8bit(**shared))
        yield "8-bit optimizer states: train.optimizer = @AdamW8bit()", changed
    if isinstance(optimizer, AdamW | AdamW8bit):
        changed = dataclasses.replace(config, optimizer=OnHost(optimizer))
        yield "optimizer states in host memory: train.optimizer = @OnHost()", changed


def _frozen(config: TrainConfig, there: Topology) -> Changes:
    lora = config.adapters
    if not isinstance(lora, LoRA) or lora.base_dtype is not None or lora.base is not None:
        return
    kernels = [i for i in jax.tree.leaves(describe_model(config.model)[1]) if len(i.shape) > 1]
    if any(i.dtype == jnp.float32 for i in kernels):
        changed = dataclasses.replace(config, adapters=dataclasses.replace(lora, base_dtype="bfloat16"))
        yield "frozen matrices in half the bytes: LoRA.base_dtype = 'bfloat16'", changed


_ADAM = {f.name for f in dataclasses.fields(AdamW8bit)}


def _layouts(config: TrainConfig, there: Topology) -> Changes:
    assert config.layout is not None
    sizes = sized(config.layout, there.devices).sizes
    if sizes["tensor"] > 1 and not config.layout.sequence_sharded and isinstance(config.layout.rules, str):
        changed = dataclasses.replace(config.layout, sequence_sharded=True)
        yield (
            "residual stream split over tensor: Layout.sequence_sharded = True",
            dataclasses.replace(config, layout=changed),
        )
    for source, to in (("data", "fsdp"), ("data", "tensor"), ("fsdp", "tensor"), ("tensor", "fsdp")):
        for by in (2, 4, 8):
            if sizes[source] > 1 and sizes[source] % by == 0:
                yield _moved(config, sizes, {source: sizes[source] // by, to: sizes[to] * by})
    spare = there.devices // sized(config.layout, there.devices).devices
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
"""What is tried, each alone."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a compiler or a device says that memory does not suffice."""
    return isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" in str(error)


@contextlib.contextmanager
def out_of_memory_said(config: TrainConfig, hardware: str | None = None) -> Iterator[None]:
    """Within it, running out of memory raises `OutOfMemory` with our report in the place of XLA's dump.

    Args:
      config: the run's settings.
      hardware: what for, as "v5p:8x8x8"; `None` is this machine.

    Raises:
      OutOfMemory: see there.
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as e:
        if not is_out_of_memory(e):
            raise
        raise out_of_memory(e, config, hardware) from None


def out_of_memory(error: BaseException, config: TrainConfig, hardware: str | None = None) -> OutOfMemory:
    """The report on a step that does not fit: what takes how much, and remedies with what each saves.

    What a program that does not compile would hold is told by arithmetic, and said to be.

    Args:
      error: what the compiler or the device said; the bytes wanted and to be had are read from it where it tells them.
      config: the run's settings.
      hardware: as for `out_of_memory_said`.
    """
    try:
        there = topology(hardware) if hardware is not None else this_machine()
    except JaxscaleError:  # a number of devices that no file of ours knows
        there = None
    said = str(error)
    wanted = _bytes_in(r"(?:Used |temporaries \(|allocat(?:e|ing) )([\d.]+)([KMGT]?)", said)
    limit = _bytes_in(r"(?:available HBM \(|of )([\d.]+)([KMGT])", said)
    what = "this machine" if hardware is None else hardware
    first = f"the step does not fit {what}"
    if wanted is not None and "allocat" in said:
        first += f": one allocation of {human_bytes(wanted)} failed"
    elif wanted is not None:
        first += f": its compiler asks for {'temporaries of ' * ('temporaries' in said)}{human_bytes(wanted)}"
    if there is None or config.layout is None:
        return OutOfMemory(f"{first}; try memory='full', or a smaller batch (with train.accumulate for the same steps)")
    budget = limit or (_allowed() if hardware is None else None) or there.chip.capacity
    first += f", and a device has {human_bytes(budget)}"
    try:
        base, found = estimate(config, there), remedies(config, there, budget)
    except JaxscaleError as e:
        return OutOfMemory(f"{first}; no remedies are known, since {e}")
    best = next((r for r in found if r.fits), None)
    first += f"; the cheapest remedy: {best.change}" if best else "; no change that is known here makes it fit"
    tables = [estimate_table(base, budget), remedy_table(found[:SHOWN])]
    return OutOfMemory("\n".join([first, "", *(text_of(t) for t in tables)]).rstrip())


def this_machine() -> Topology | None:
    """The hardware we run on, `None` where there is no file of it."""
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
    """Bytes that this process may take of a device: JAX leaves some of a GPU's alone, and chips of a name differ."""
    try:
        return (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")
    except jax.errors.JaxRuntimeError:
        return None


def _bytes_in(pattern: str, text: str) -> int | None:
    found = re.search(pattern, text)
    return None if found is None else int(float(found[1]) * 1024 ** (" KMGT".index(found[2] or " ")))


def estimate_table(found: Estimate, budget: int | None = None) -> Any:
    """A rich table of an estimate: bytes by group, the largest buffers of the worst moment, as shares of the budget."""
    whole = budget or found.device
    share = "of the device" if budget else "share"
    table = table_of("memory at its fullest, by arithmetic", "group", "per device", share)
    groups = {
        "parameters and optimizer states": found.state,
        "gradients": found.gradients,
        "weight copies": found.copies,
        "activations": found.kept,
        "temporaries": found.working,
    }
    for name, n in groups.items():
        table.add_row(name, human_bytes(n), f"{n / whole:.0%}")
    table.add_section()
    table.add_row("at once", human_bytes(found.device), f"{found.device / whole:.0%}")
    for b in found.at_peak[:LARGEST]:
        table.add_row(f"  of it: {b.what}", human_bytes(b.size), f"{b.size / whole:.0%}")
    if found.host:
        table.add_row("in host memory besides", human_bytes(found.host), "")
    return table


def remedy_table(found: list[Remedy]) -> Any:
    """A rich table: change, bytes it saves and leaves, extra FLOPs, whether it fits then."""
    table = table_of("remedies, each alone, by arithmetic", "change", "saves", "leaves", "extra FLOPs", "fits")
    for r in found:
        extra = f"{100 * r.extra_flops:+.1f}%"
        table.add_row(r.change, human_bytes(r.saves), human_bytes(r.device), extra, "yes" if r.fits else "no")
    return table
