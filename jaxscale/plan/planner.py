"""A plan: predicted memory, time and cost of a run on named hardware."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import re
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import jax

from jaxscale.errors import ConfigError, LayoutError
from jaxscale.hardware import Topology, topology
from jaxscale.layout import Layout
from jaxscale.layout.mesh import parse_mesh
from jaxscale.plan.budget import Budget, budget_of
from jaxscale.plan.by_tracing import traced_plan, with_traced_memory
from jaxscale.plan.collectives import Collective, collectives
from jaxscale.plan.communication import partition, sized
from jaxscale.plan.compile import bytes_needed, bytes_of, compile_step
from jaxscale.plan.covered import NotCovered, check_attention, covered
from jaxscale.plan.error_bars import ErrorBar, error_bar, time_error_bar, unusual
from jaxscale.plan.expert_loads import EVEN, Loads, SlowestRows, mixture_of, slowest_rows
from jaxscale.plan.memory import Estimate, estimate
from jaxscale.plan.partition import Partitioned
from jaxscale.plan.printing import Printable
from jaxscale.plan.restarts import Restarts
from jaxscale.plan.roofline import StepTime, Work, step_time
from jaxscale.plan.scopes import share_in
from jaxscale.plan.slow_links import simulated_notes, wire_notes
from jaxscale.plan.stand_ins import as_compiled
from jaxscale.plan.waterfall import step_terms
from jaxscale.plan.work import waited_for, work_of
from jaxscale.renamed import renamed
from jaxscale.step import TrainConfig, blueprint_of, check, check_quickly
from pallas_kernels.aot import GPUS, why_no_gpu, why_no_tpu

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

COMPILE = ("auto", "never", "always")
"""When to compile the step: if a compiler is installed; never; always, so that a missing compiler is an error."""

_REACH = {
    "matmul": "products with weights reach",
    "attention": "attention's products reach",
    "experts": "experts' products reach",
    "memory": "memory traffic reaches",
    "link": "links reach",
}


@dataclasses.dataclass(frozen=True)
class Compiled:
    """Result of compiling the step with the hardware's compiler.

    Args:
      bytes: bytes on each device.
      step: time of the step by the same roofline with the collectives of the compiled program; `None` if the program
        did not fit in memory, so that there is none.
      seconds: compile time.
    """

    bytes: int
    step: StepTime | None
    seconds: float


@renamed(how="basis")
@dataclasses.dataclass(frozen=True)
class Plan(Printable):
    """Predicted memory, time and cost of a run on named hardware; prints as tables.

    Args:
      config: the run's settings, with a mesh without -1.
      hardware: the hardware that is planned for.
      memory: analytic bytes on each device.
      work: analytic FLOPs, bytes and collectives of a step.
      step: analytic time of a step.
      compiled: results of compiling the step; `None` if it was not compiled.
      basis: "compiled", or "analytic" and the reason.
      budget: time, energy and cost of training on `tokens`; `None` without them.
      notes: remarks, one sentence each.
      error_bar: interval of `memory`.
      time_error_bar: interval of the time of a step.
    """

    config: TrainConfig
    hardware: Topology
    memory: Estimate
    work: Work
    step: StepTime
    compiled: Compiled | None
    basis: str
    budget: Budget | None
    notes: tuple[str, ...] = ()
    error_bar: ErrorBar | None = None
    time_error_bar: ErrorBar | None = None

    @property
    def bytes(self) -> int:
        """Bytes on each device: of the compiled step if there is one, else analytic."""
        return self.memory.device if self.compiled is None else self.compiled.bytes

    @property
    def best(self) -> StepTime:
        """Time of the step: with the compiled program's collectives if there are any, else analytic."""
        return self.step if self.compiled is None or self.compiled.step is None else self.compiled.step

    @property
    def terms(self) -> dict[str, float]:
        """Seconds of `best` by term, as the tables draw them (`jaxscale.plan.waterfall.step_terms`)."""
        return step_terms(self.work, self.best, self.hardware)

    @property
    def fits(self) -> bool:
        """Whether the upper end of `bytes_range` fits in a device's memory."""
        return self.bytes_range[1] <= self.hardware.chip.capacity

    @property
    def bytes_range(self) -> tuple[int, int]:
        """Interval of the bytes on each device; for a compiled step both ends are its bytes."""
        if self.compiled is not None or self.error_bar is None:
            return self.bytes, self.bytes
        return self.error_bar.bytes(self.bytes)

    @property
    def seconds_range(self) -> tuple[float, float]:
        """Interval of the seconds of a step."""
        bar, total = self.time_error_bar, self.best.total
        return (total, total) if bar is None else (bar.low * total, bar.high * total)

    @property
    def days_range(self) -> tuple[float, float]:
        """Interval of the days of its budget, which must not be `None`."""
        assert self.budget is not None
        low, high = (end / self.best.total * self.budget.days for end in self.seconds_range)
        return low, high

    def to_json(self) -> dict[str, Any]:
        """Return the plan as JSON values."""
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
            "how": self.basis,
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
    loads: Loads | None = None,
) -> Plan:
    """Plan a run: memory, FLOPs, traffic and time of a step, and the cost of training on a number of tokens.

    The analytic part needs no compiler. Collectives come from the traced step. Memory and FLOPs come from formulas; if
    these do not cover the run, both come from the traced step, as does memory in the cases where tracing was measured
    to be more accurate (`jaxscale.plan.by_tracing.better_traced`). Rates come from data sheets. If the hardware's
    compiler is installed, the compiled step is analysed as well. Nothing is allocated.

    Args:
      config: the run's settings; its data is not opened. A mesh smaller than the hardware uses the first devices.
      hardware: a topology or its name, such as "v5p:8x8x8", "h100:8x4", or "my_chip.json:8" for your own file.
      tokens: tokens to train on; adds days, device-hours, energy and cost to the plan.
      price: price of one device for an hour, in any currency.
      watts: power of one device; by default from its data sheet.
      restarts: rate of failures and speed of checkpoints; by default as in Llama 3's run.
      compile: "auto", "never" or "always".
      loads: of the model's experts, for the time of a step, in which all devices wait for the one whose experts have
        the most rows; by default every expert has as many, and no tile of a kernel is filled up.

    Raises:
      ConfigError: the run has no layout, training would refuse it, or an argument is out of range; loads of a model
        without experts, with other numbers of them, or that no formula covers.
      LayoutError: the topology is unknown, an array cannot be laid out, or no compiler for `compile="always"`.
    """
    if not isinstance(config, TrainConfig):
        raise ConfigError(
            f"a plan takes a TrainConfig, not {config!r}; a gin file is planned by `jaxscale plan FILE --topology NAME`"
        )
    if compile not in COMPILE:
        raise ConfigError(f"compile='{compile}': give one of {', '.join(COMPILE)}")
    target = topology(hardware) if isinstance(hardware, str) else hardware
    config = on_hardware(config, target)
    why = why_not_compiled(target)
    if compile == "always" and why is not None:
        raise LayoutError(f"{target.name} cannot be compiled for: {why}")
    notes: tuple[str, ...] = ()
    method = "formulas"
    try:
        memory = estimate(config, target)
        work, traced = traced_work(config, target, memory, loads)
        memory, method = with_traced_memory(memory, config, target, traced)
        if method == "traced":
            reasons = " and ".join(unusual(config, target))
            notes = (f"memory is predicted from the traced step, as for all runs with {reasons}",)
    except LayoutError:
        _check_as_training(config, target)
        raise
    except NotCovered as e:
        if loads is not None:
            raise ConfigError(f"{e.why}; loads of experts change the formulas only, so leave loads out") from None
        _check_as_training(config, target)
        memory, work = traced_plan(config, target)
        method, notes = "traced", (f"{e.why}: they are those of the traced step", *_branches(work))
        if _layout(config).stages > 1:
            notes = (*notes, "the time that pipeline stages wait for each other is not counted")
    compiled, basis = None, "analytic, as requested"
    if compile != "never":
        exchanged = 1.0 if loads is None else slowest_of(config, target, loads).exchanged
        compiled, basis = None, f"analytic: {why}"
        if why is None:
            compiled, basis = _compiled(config, target, work, exchanged), "compiled"
    bar = error_bar(config, target, memory.device, method)
    time_bar = time_error_bar(config, target)
    about_memory = str(bar) if compiled is None else _compared_with_compiled(compiled, memory, bar, target)
    notes = (about_memory, str(time_bar), *notes)
    if work.uncounted:
        notes = (*notes, f"communication of {', '.join(work.uncounted)} over sharded dimensions is not counted")
    step = step_time(work, target)
    if loads is not None:
        notes = (*notes, _about_loads(loads, slowest_of(config, target, loads)))
    notes = (*notes, *_notes(config, target, step))
    plan = Plan(config, target, memory, work, step, compiled, basis, None, notes, bar, time_bar)
    return with_budget(plan, tokens, price, watts, restarts)


def _compared_with_compiled(compiled: Compiled, memory: Estimate, bar: ErrorBar, hardware: Topology) -> str:
    """A note that compares the compiled step's memory with the predicted one."""
    ratio = compiled.bytes / memory.device
    within = "within" if bar.low <= ratio <= bar.high else "outside"
    old = hardware.chip.platform == "tpu" and jax.__version_info__ < (0, 11)
    why = "; jax before 0.11 reports more memory than a TPU allocates (newer ones need Python 3.12)" if old else ""
    ends = f"{bar.low} to {bar.high}"
    return f"the compiled step takes {ratio:.2f} times the predicted memory, {within} the error bar ({ends}){why}"


def traced_work(
    config: TrainConfig, target: Topology, memory: Estimate, loads: Loads | None = None
) -> tuple[Work, Partitioned]:
    """Return a step's work, and its traced program.

    Collectives and the optimizer's matrix products come from the traced program, the rest from formulas.

    Args:
      config: the run's settings, with a mesh without -1.
      target: the hardware.
      memory: `jaxscale.plan.estimate` of the same run and hardware.
      loads: as for `plan_for`.

    Raises:
      NotCovered: no formula covers the run.
      ConfigError: as `plan_for`, for loads.
    """
    check_attention(covered(config), _layout(config))
    traced = partition(config, target)
    sent = as_compiled(traced.collectives, target)
    slowest = EVEN if loads is None else slowest_of(config, target, loads)
    work = work_of(config, _layout(config), memory, sent, traced.flops_within("optimizer"), slowest)
    return dataclasses.replace(work, uncounted=traced.without_rule), traced


def slowest_of(config: TrainConfig, target: Topology, loads: Loads) -> SlowestRows:
    """Return what loads of a run's experts cost the slowest device.

    Args:
      config: the run's settings, with a mesh without -1.
      target: the hardware.
      loads: the loads.

    Raises:
      ConfigError: the model has no experts, another number of them, or not the same in all layers with experts.
    """
    model, layout = covered(config), _layout(config)
    tokens = config.micro_batch * config.seq_len // (layout.split("expert_batch") * layout.split("expert_seq"))
    if layout.stages > 1:
        tokens //= layout.schedule.microbatches_of(layout.stages, config.micro_batch, layout.split("batch"))
    return slowest_rows(loads, mixture_of(model), tokens, model.sizes.width, layout, target.chip, model.dtype)


def on_hardware(config: TrainConfig, target: Topology) -> TrainConfig:
    """Return a run's settings with every size of the mesh filled in, after checking it against batch and model.

    Raises:
      ConfigError: the run has no layout, or training would refuse it.
      LayoutError: the hardware has too few devices, or not a multiple for -1, or training would refuse the layout.
    """
    if config.layout is None:
        raise ConfigError("a run with layout=None is for one local device; give it Layout('data=1') to plan it")
    devices = math.prod(parse_mesh(config.layout.mesh).values())
    if devices > target.devices:
        raise LayoutError(
            f"mesh '{config.layout.mesh}' needs {devices} devices and {target.name} has {target.devices}; use "
            f"a mesh of at most {target.devices} devices, such as --mesh 'fsdp=-1'"
        )
    sizes = sized(config.layout, target.devices).sizes
    mesh = ",".join(f"{axis}={size}" for axis, size in sizes.items() if size > 1) or "data=1"
    layout = dataclasses.replace(config.layout.specification, mesh=mesh)
    check_trainable(dataclasses.replace(config, layout=layout))
    for rows, name in ((config.batch_size, "a batch"), (config.micro_batch, "a micro-batch")):
        for array, i in config.objective.inputs(config).items():
            layout.spec(("batch", *i.axes), (rows, *i.shape), kind="activations", name=f"{name}'s {array}")
    return dataclasses.replace(config, layout=layout)


def check_trainable(config: TrainConfig) -> None:
    """Run the checks that training runs before it traces a model; needs no devices.

    Args:
      config: the run's settings, with a mesh without -1.

    Raises:
      LayoutError: as `jaxscale.step.check_quickly`.
      ConfigError: as `jaxscale.step.check_quickly`.
    """
    config = dataclasses.replace(config, layout=_layout(config).abstract())
    check_quickly(blueprint_of(config)[0], config)


def why_not_compiled(target: Topology) -> str | None:
    """Return why this machine cannot compile a step for some hardware, or `None` if it can."""
    if target.chip.platform == "cpu":
        return "code that is compiled for a CPU does not show what an accelerator would do"
    if target.name.partition(":")[0].endswith(".json"):
        return "no compiler knows the hardware of a file"
    if target.chip.platform == "gpu" and target.chip.name not in GPUS:
        return f"XLA's compiler has no description of {target.chip.name} here, only of {', '.join(GPUS)}"
    return {"tpu": why_no_tpu, "gpu": why_no_gpu}[target.chip.platform]()


def groups(memory: Estimate) -> dict[str, int]:
    """Return the bytes on a device at peak memory by kind, the largest first; they add up to `memory.device`."""
    parts: dict[str, int] = defaultdict(int)
    parts["parameters and optimizer state"] = memory.state
    for buffer in memory.at_peak:
        parts[buffer.what] += buffer.size
    parts["unused space between arrays (fragmentation)"] = memory.device - sum(parts.values())
    return {what: size for what, size in sorted(parts.items(), key=lambda part: -part[1]) if size}


def _layout(config: TrainConfig) -> Layout:
    assert config.layout is not None
    return config.layout


def _check_as_training(config: TrainConfig, target: Topology) -> None:
    """Raise the error that training raises, if any: it is more specific than the planner's own."""
    check(dataclasses.replace(config, layout=_layout(config).abstract(kind=next(iter(target.chip.kinds), None))))


def _compiled(config: TrainConfig, target: Topology, work: Work, exchanged: float = 1.0) -> Compiled:
    began = time.perf_counter()
    try:
        program = compile_step(config, target.name)
    except jax.errors.JaxRuntimeError as e:
        return Compiled(bytes_needed(e), None, time.perf_counter() - began)
    seconds = time.perf_counter() - began
    sent = tuple(waited_for(_averaged(c), exchanged) for c in collectives(program, work.sizes, work.crosses))
    return Compiled(bytes_of(program), step_time(dataclasses.replace(work, collectives=sent), target), seconds)


def _about_loads(loads: Loads, slowest: SlowestRows) -> str:
    """A note on what loads of experts cost the slowest device."""
    return (
        f"with loads of experts '{loads.name}' the slowest device takes {slowest.used:.2f} times the mean rows and "
        f"multiplies {slowest.multiplied:.2f} times, tiles filled up; its buffers hold {slowest.held:.2f} times"
    )


def _averaged(c: Collective) -> Collective:
    """Return a collective of a compiled program with the share of steps that its named scopes state."""
    share = None if c.certain else share_in(c.name.split("/"))
    return c if share is None else dataclasses.replace(c, share=share, certain=True)


def _branches(work: Work) -> Iterator[str]:
    """Yield a note if some collectives of the step are in a branch."""
    axes = sorted({" × ".join(c.axes) for c in work.collectives if not c.certain})
    if axes:
        yield f"collectives over {', '.join(axes)} that only some steps execute are counted in every step"


def _notes(config: TrainConfig, target: Topology, step: StepTime) -> tuple[str, ...]:
    layout, blueprint = _layout(config), blueprint_of(config)[0]
    across = sum(t.exposed for t in step.traffic if "replica" in t.axes)
    notes = [*wire_notes(blueprint), *simulated_notes(blueprint, step.total - across)]
    if config.batching is not None:
        notes.append(f"train.batching is not planned: this is a step whose rows are all on {layout}")
    if layout.devices < target.devices:
        notes.append(f"the mesh {layout.mesh} uses {layout.devices} of the {target.devices} devices")
    if target.chip.efficiency:
        notes.append(_assumed(target.chip.efficiency))
    else:
        notes.append(
            f"nothing was measured on {target.chip.name}: times use its data sheet's rates, which no program exceeds"
        )
    return tuple(notes)


def _assumed(efficiency: Mapping[str, float]) -> str:
    """A note on the fractions of the data sheet's rates that times assume."""
    rates = [f"{_REACH.get(n, f'{n} reaches')} {value:.0%}" for n, value in efficiency.items() if n != "overlap"]
    parts = [f"{', '.join(rates)} of the data sheet's rate{'s' * (len(rates) > 1)}"] * bool(rates)
    if "overlap" in efficiency:
        parts.append(f"communication can overlap with {efficiency['overlap']:.0%} of the arithmetic")
    return f"assumed: {'; '.join(parts)}"


def with_budget(
    plan: Plan,
    tokens: float | None,
    price: float | None = None,
    watts: float | None = None,
    restarts: Restarts | None = None,
) -> Plan:
    """Return a plan with the budget of training on a number of tokens, failures and checkpoints included.

    Args:
      plan: the plan.
      tokens: as for `plan_for`.
      price: as for `plan_for`.
      watts: as for `plan_for`.
      restarts: as for `plan_for`.

    Raises:
      ConfigError: an argument is not above 0, or the run fails too often to get from one checkpoint to the next.
    """
    for name, value in (("tokens", tokens), ("price", price), ("watts", watts)):
        if value is not None and not (value > 0 and math.isfinite(value)):
            raise ConfigError(f"{name} = {value:g}: must be above 0, and finite")
    if tokens is None:
        return dataclasses.replace(plan, budget=None)
    devices = _layout(plan.config).devices
    budget = budget_of(plan.config, plan.hardware, devices, plan.best.tokens_per_second, tokens, price, watts, restarts)
    return dataclasses.replace(plan, budget=budget)


def count_of(text: str) -> float:
    """Parse a number such as "1T", "15.6T", "300B" or "2e12".

    Raises:
      ConfigError: the text is not a number.
    """
    match = re.fullmatch(r"([\d.]+(?:e\d+)?)([KMBT]?)", text.strip(), re.IGNORECASE)
    with contextlib.suppress(ValueError):
        if match is not None:
            return float(match[1]) * 1000 ** " KMBT".index(match[2].upper() or " ")
    raise ConfigError(f"'{text}' is not a number of tokens; write it as 300B, 1.5T or 2e12")
