"""A plan: what a run takes of named hardware, before anybody switches it on."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import re
import time
from collections import defaultdict
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import jax

from jaxscale.errors import ConfigError, LayoutError
from jaxscale.hardware import Topology, topology
from jaxscale.layout import Layout
from jaxscale.layout.mesh import parse_mesh
from jaxscale.plan.by_tracing import traced_plan, with_traced_memory
from jaxscale.plan.collectives import collectives
from jaxscale.plan.communication import partition, sized
from jaxscale.plan.compile import bytes_needed, bytes_of, compile_step
from jaxscale.plan.covered import NotCovered, check_attention, covered
from jaxscale.plan.error_bars import ErrorBar, error_bar, time_error_bar, unusual
from jaxscale.plan.memory import Estimate, estimate
from jaxscale.plan.partition import Partitioned
from jaxscale.plan.restarts import Restarts, best_interval, slowdown
from jaxscale.plan.roofline import StepTime, Work, step_time
from jaxscale.plan.shown import Shown
from jaxscale.plan.stand_ins import as_compiled
from jaxscale.plan.waterfall import step_terms
from jaxscale.plan.work import work_of
from jaxscale.step import TrainConfig, blueprint_of, check, check_quickly
from jaxscale.units import human_bytes
from pallas_kernels.aot import GPUS, why_no_gpu, why_no_tpu

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

COMPILE = ("auto", "never", "always")
"""Whether to compile: where a compiler is installed, not at all, or else not to plan."""


@dataclasses.dataclass(frozen=True)
class Budget:
    """What training on so many tokens takes.

    Args:
      tokens: of the training run.
      ideal_days: of wall-clock time, if nothing fails and nothing is saved.
      days: with failures and checkpoints, on average.
      failures: on average.
      checkpoint: bytes of one.
      save: seconds that a checkpoint takes.
      every: seconds of training between checkpoints.
      between: seconds between failures.
      restart: seconds from a failure until training continues.
      device_hours: of all devices of the hardware for `days`, idle ones too.
      kilowatt_hours: at the devices' full power, without hosts, network and cooling; `None` where that is not known.
      cost: device-hours times their price, `None` without one.
    """

    tokens: float
    ideal_days: float
    days: float
    failures: float
    checkpoint: int
    save: float
    every: float
    between: float
    restart: float
    device_hours: float
    kilowatt_hours: float | None
    cost: float | None


@dataclasses.dataclass(frozen=True)
class Compiled:
    """What the hardware's own compiler made of the step.

    Args:
      bytes: on each device.
      step: its time, by the same roofline, with the collectives of the compiled program; `None` where the program did
        not fit, and there is none.
      seconds: that compiling took.
    """

    bytes: int
    step: StepTime | None
    seconds: float


@dataclasses.dataclass(frozen=True)
class Plan(Shown):
    """What a run takes of named hardware; prints as tables.

    Args:
      config: the run's settings, every size of its mesh known.
      hardware: what it is planned for.
      memory: bytes on each device, by arithmetic.
      work: what a step computes and sends, by arithmetic.
      step: how long it takes, by arithmetic.
      compiled: the same of the compiled step, `None` where it was not compiled.
      how: "compiled", or why not.
      budget: of a number of tokens, where one was given.
      notes: what else to know, a sentence each.
      error_bar: of `memory`.
      time_error_bar: of the time of a step.
    """

    config: TrainConfig
    hardware: Topology
    memory: Estimate
    work: Work
    step: StepTime
    compiled: Compiled | None
    how: str
    budget: Budget | None
    notes: tuple[str, ...] = ()
    error_bar: ErrorBar | None = None
    time_error_bar: ErrorBar | None = None

    @property
    def bytes(self) -> int:
        """Bytes on each device: the compiler's, else by arithmetic."""
        return self.memory.device if self.compiled is None else self.compiled.bytes

    @property
    def best(self) -> StepTime:
        """The step's time: with the compiled program's collectives, else by arithmetic."""
        return self.step if self.compiled is None or self.compiled.step is None else self.compiled.step

    @property
    def terms(self) -> dict[str, float]:
        """Seconds of `best` by term, as the tables draw them (`jaxscale.plan.waterfall.step_terms`)."""
        return step_terms(self.work, self.best, self.hardware)

    @property
    def fits(self) -> bool:
        """Whether it fits the devices' memory: a step that was not compiled, at the upper end of its error bar."""
        return self.bytes_range[1] <= self.hardware.chip.capacity

    @property
    def bytes_range(self) -> tuple[int, int]:
        """The error bar of the bytes on each device; of a compiled step, both ends are what it takes."""
        if self.compiled is not None or self.error_bar is None:
            return self.bytes, self.bytes
        return self.error_bar.bytes(self.bytes)

    @property
    def seconds_range(self) -> tuple[float, float]:
        """The error bar of the seconds of a step."""
        bar, total = self.time_error_bar, self.best.total
        return (total, total) if bar is None else (bar.low * total, bar.high * total)

    @property
    def days_range(self) -> tuple[float, float]:
        """The same of the days of its budget, which it must have."""
        assert self.budget is not None
        low, high = (end / self.best.total * self.budget.days for end in self.seconds_range)
        return low, high

    def to_json(self) -> dict[str, Any]:
        """The same as plain values."""
        layout = _layout(self.config)
        compiled = None
        if self.compiled is not None:
            step = self.compiled.step
            compiled = dataclasses.asdict(self.compiled) | {"step": None if step is None else step.to_json()}
        return {
            "topology": self.hardware.name,
            "devices": layout.devices,
            "mesh": layout.mesh,
            "layout": str(layout),
            "how": self.how,
            "fits": self.fits,
            "capacity": self.hardware.chip.capacity,
            "bytes": self.bytes,
            "bytes_range": list(self.bytes_range),
            "error_bar": None if self.error_bar is None else dataclasses.asdict(self.error_bar),
            "memory": groups(self.memory) | {"host": self.memory.host},
            "flops": {"model": self.work.flops, "device": sum(op.flops for op in self.work.ops)},
            "step": self.step.to_json(),
            "terms": self.terms,
            "seconds_range": list(self.seconds_range),
            "time_error_bar": None if self.time_error_bar is None else dataclasses.asdict(self.time_error_bar),
            "compiled": compiled,
            "efficiency": dict(self.hardware.chip.efficiency),
            "budget": None if self.budget is None else dataclasses.asdict(self.budget),
            "days_range": None if self.budget is None else list(self.days_range),
            "notes": list(self.notes),
        }

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from jaxscale.plan.plan_tables import plan_tables

        yield from plan_tables(self)


def plan_for(
    config: TrainConfig,
    hardware: str | Topology,
    *,
    tokens: float | None = None,
    price: float | None = None,
    watts: float | None = None,
    restarts: Restarts | None = None,
    compile: str = "auto",
) -> Plan:
    """Plans a run: bytes, FLOPs, traffic and time of a step, and what a number of tokens takes.

    Always without a compiler: collectives from the traced step; memory and FLOPs by formulas, or where these do not
    cover a run from the traced step as well, as memory is where that was seen to be closer
    (`jaxscale.plan.by_tracing.better_traced`); rates from data sheets. Where the hardware's own compiler is installed,
    from the compiled step as well. Nothing is allocated.

    Args:
      config: the run's settings; its data is not opened. A mesh of fewer devices than there are uses the first ones.
      hardware: a topology or its name, as "v5p:8x8x8", "h100:8x4", or "my_chip.json:8" of a file of your own.
      tokens: to train on; adds days, device-hours, energy and cost.
      price: of one device for an hour, in whatever currency.
      watts: of one device; by default what its data sheet says.
      restarts: how often devices fail, and how checkpoints are written; by default as in Llama 3's run.
      compile: "auto", "never" or "always".

    Raises:
      ConfigError: a run without a layout, what training refuses, or an argument out of its range.
      LayoutError: an unknown topology, what cannot be laid out, or `compile="always"` without a compiler.
    """
    if not isinstance(config, TrainConfig):
        raise ConfigError(
            f"a plan takes a TrainConfig, not {config!r}; a gin file is planned by `jaxscale plan FILE --topology NAME`"
        )
    if compile not in COMPILE:
        raise ConfigError(f"compile='{compile}': give one of {', '.join(COMPILE)}")
    there = topology(hardware) if isinstance(hardware, str) else hardware
    config = on_hardware(config, there)
    why = why_not_compiled(there)
    if compile == "always" and why is not None:
        raise LayoutError(f"{there.name} cannot be compiled for: {why}")
    notes: tuple[str, ...] = ()
    method = "formulas"
    try:
        memory = estimate(config, there)
        work, traced = traced_work(config, there, memory)
        memory, method = with_traced_memory(memory, config, there, traced)
        if method == "traced":
            reasons = " and ".join(unusual(config, there))
            notes = (f"memory is predicted from the traced step, as for all runs with {reasons}",)
    except LayoutError:
        _check_as_training(config, there)
        raise
    except NotCovered as e:
        _check_as_training(config, there)
        memory, work = traced_plan(config, there)
        method, notes = "traced", (f"{e.why}: they are those of the traced step", *_branches(work))
        if _layout(config).stages > 1:
            notes = (*notes, "the time that pipeline stages wait for each other is not counted")
    compiled, how = None, "analytic, as was asked"
    if compile != "never":
        compiled, how = (_compiled(config, there, work), "compiled") if why is None else (None, f"analytic: {why}")
    bar = error_bar(config, there, memory.device, method)
    time_bar = time_error_bar(config, there)
    about_memory = str(bar) if compiled is None else _compared_with_compiled(compiled, memory, bar, there)
    notes = (about_memory, str(time_bar), *notes)
    if work.uncounted:
        notes = (*notes, f"what {', '.join(work.uncounted)} send over sharded dimensions is not counted")
    notes = (*notes, *_notes(config, there))
    plan = Plan(config, there, memory, work, step_time(work, there), compiled, how, None, notes, bar, time_bar)
    return with_budget(plan, tokens, price, watts, restarts)


def _compared_with_compiled(compiled: Compiled, memory: Estimate, bar: ErrorBar, hardware: Topology) -> str:
    """A note that compares the compiled step's memory with the predicted one."""
    ratio = compiled.bytes / memory.device
    within = "within" if bar.low <= ratio <= bar.high else "outside"
    old = hardware.chip.platform == "tpu" and jax.__version_info__ < (0, 11)
    why = "; jax before 0.11 reports more memory than a TPU allocates (newer ones need Python 3.12)" if old else ""
    ends = f"{bar.low} to {bar.high}"
    return f"the compiled step takes {ratio:.2f} times the predicted memory, {within} the error bar ({ends}){why}"


def traced_work(config: TrainConfig, there: Topology, memory: Estimate) -> tuple[Work, Partitioned]:
    """A step's work, and its traced program.

    Collectives and the optimizer's matrix products are the traced program's, the rest is by formulas.

    Args:
      config: the run's settings, every size of its mesh known.
      there: the hardware.
      memory: `jaxscale.plan.estimate` of the same.

    Raises:
      NotCovered: no formula covers the run.
    """
    check_attention(covered(config), _layout(config))
    traced = partition(config, there)
    sent = as_compiled(traced.collectives, there)
    work = work_of(config, _layout(config), memory, sent, traced.flops_within("optimizer"))
    return dataclasses.replace(work, uncounted=traced.without_rule), traced


def on_hardware(config: TrainConfig, there: Topology) -> TrainConfig:
    """A run's settings with a mesh whose every size is known, and checked to fit batch and model.

    Raises:
      ConfigError: a run without a layout, or what training refuses.
      LayoutError: too few devices, a -1 that they do not fill, or what training refuses.
    """
    if config.layout is None:
        raise ConfigError("a run with layout=None is for one local device; give it Layout('data=1') to plan it")
    asked = math.prod(parse_mesh(config.layout.mesh).values())
    if asked > there.devices:
        raise LayoutError(
            f"mesh '{config.layout.mesh}' needs {asked} devices and {there.name} has {there.devices}; give one of at "
            "most as many, as --mesh 'fsdp=-1'"
        )
    sizes = sized(config.layout, there.devices).sizes
    mesh = ",".join(f"{axis}={size}" for axis, size in sizes.items() if size > 1) or "data=1"
    layout = dataclasses.replace(config.layout.specification, mesh=mesh)
    check_trainable(dataclasses.replace(config, layout=layout))
    for rows, name in ((config.batch_size, "a batch"), (config.micro_batch, "a micro-batch")):
        for array, i in config.objective.inputs(config).items():
            layout.spec(("batch", *i.axes), (rows, *i.shape), kind="activations", name=f"{name}'s {array}")
    return dataclasses.replace(config, layout=layout)


def check_trainable(config: TrainConfig) -> None:
    """Refuses what training refuses before it traces a model; the layout's sizes are known, and it needs no devices.

    Raises:
      LayoutError, ConfigError: those of training (see `jaxscale.step.check_quickly`).
    """
    config = dataclasses.replace(config, layout=_layout(config).abstract())
    check_quickly(blueprint_of(config)[0], config)


def why_not_compiled(there: Topology) -> str | None:
    """Why the step cannot be compiled for some hardware on this machine, or `None` where it can."""
    if there.chip.platform == "cpu":
        return "a CPU's compiler says nothing of accelerators"
    if there.name.partition(":")[0].endswith(".json"):
        return "hardware of a file is known by its figures alone"
    if there.chip.platform == "gpu" and there.chip.name not in GPUS:
        return f"XLA's compiler has no description of {there.chip.name} here, only of {', '.join(GPUS)}"
    return {"tpu": why_no_tpu, "gpu": why_no_gpu}[there.chip.platform]()


def groups(memory: Estimate) -> dict[str, int]:
    """Bytes on a device at the worst moment by what they are, together `memory.device`; the largest first."""
    parts: dict[str, int] = defaultdict(int)
    parts["parameters and optimizer state"] = memory.state
    for buffer in memory.at_peak:
        parts[buffer.what] += buffer.size
    parts["gaps between buffers"] = memory.device - sum(parts.values())
    return {what: size for what, size in sorted(parts.items(), key=lambda part: -part[1]) if size}


def _layout(config: TrainConfig) -> Layout:
    assert config.layout is not None
    return config.layout


def _check_as_training(config: TrainConfig, there: Topology) -> None:
    """Raises what training raises, if it does: of what cannot be planned, that says more."""
    check(dataclasses.replace(config, layout=_layout(config).abstract(kind=next(iter(there.chip.kinds), None))))


def _compiled(config: TrainConfig, there: Topology, work: Work) -> Compiled:
    began = time.perf_counter()
    try:
        program = compile_step(config, there.name)
    except jax.errors.JaxRuntimeError as e:
        return Compiled(bytes_needed(e), None, time.perf_counter() - began)
    seconds = time.perf_counter() - began
    found = tuple(collectives(program, work.sizes, work.crosses))
    return Compiled(bytes_of(program), step_time(dataclasses.replace(work, collectives=found), there), seconds)


def _branches(work: Work) -> Iterator[str]:
    """A note about collectives of the compiled step that are in a branch."""
    axes = sorted({" × ".join(c.axes) for c in work.collectives if not c.certain})
    if axes:
        yield f"collectives over {', '.join(axes)} that only some steps execute are counted in every step"


def _notes(config: TrainConfig, there: Topology) -> tuple[str, ...]:
    layout, notes = _layout(config), []
    if layout.devices < there.devices:
        notes.append(f"the mesh {layout.mesh} uses {layout.devices} of the {there.devices} devices")
    if there.chip.efficiency:
        shares = ", ".join(f"{name} {value:.0%}" for name, value in sorted(there.chip.efficiency.items()))
        notes.append(f"shares of the data sheet's rates that are reached: {shares}")
    else:
        notes.append(
            f"nothing was measured on {there.chip.name}: times are by its data sheet, and no program beats them"
        )
    return tuple(notes)


def with_budget(
    plan: Plan,
    tokens: float | None,
    price: float | None = None,
    watts: float | None = None,
    restarts: Restarts | None = None,
) -> Plan:
    """A plan and what training on so many tokens takes, failures and checkpoints with it; arguments as `plan_for`.

    Raises:
      ConfigError: one is not above 0, or a run that fails too often to get from one checkpoint to the next.
    """
    for name, value in (("tokens", tokens), ("price", price), ("watts", watts)):
        if value is not None and not (value > 0 and math.isfinite(value)):
            raise ConfigError(f"{name} = {value:g}: must be above 0, and finite")
    if tokens is None:
        return dataclasses.replace(plan, budget=None)
    restarts = restarts or Restarts()
    devices = _layout(plan.config).devices
    size, between = checkpoint_bytes(plan.config), restarts.between(devices)
    save = restarts.save(size, devices)
    every = best_interval(save, between) if restarts.save_every is None else restarts.save_every
    if restarts.save_every is not None and every < save:
        raise ConfigError(
            f"save_every = {every:g} s is less than the {save:g} s that a checkpoint of {human_bytes(size)} takes; "
            "save more rarely, or write faster (--write-speed)"
        )
    ideal = tokens / plan.best.tokens_per_second
    seconds = ideal * slowdown(every, save, between, restarts.restart_time)
    hours = seconds / 3600 * plan.hardware.devices  # those that a mesh leaves idle are paid for, too
    power = plan.hardware.chip.watts if watts is None else watts
    budget = Budget(
        tokens,
        ideal / 86400,
        seconds / 86400,
        seconds / between,
        size,
        save,
        every,
        between,
        restarts.restart_time,
        hours,
        None if power is None else hours * power / 1000,
        None if price is None else hours * price,
    )
    return dataclasses.replace(plan, budget=budget)


def checkpoint_bytes(config: TrainConfig) -> int:
    """Bytes of a run's state, each tensor once: what is trained and what its optimizer keeps."""
    blueprint, _ = blueprint_of(dataclasses.replace(config, layout=_layout(config).abstract()))
    return sum(info.nbytes for info in jax.tree.leaves(blueprint.algorithm.infos(blueprint)))


def count_of(text: str) -> float:
    """A number as people write it: "1T", "15.6T", "300B", "2e12".

    Raises:
      ConfigError: it is none.
    """
    found = re.fullmatch(r"([\d.]+(?:e\d+)?)([KMBT]?)", text.strip(), re.IGNORECASE)
    with contextlib.suppress(ValueError):
        if found is not None:
            return float(found[1]) * 1000 ** " KMBT".index(found[2].upper() or " ")
    raise ConfigError(f"'{text}' is no number of tokens; write it as 300B, 1.5T or 2e12")
