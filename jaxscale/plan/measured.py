"""Measured step time of a profiled run beside the time that a plan of the run predicts, term by term."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxscale.errors import LayoutError, RunError
from jaxscale.hardware import Chip, Topology, chip_of
from jaxscale.hardware import topology as topology_of
from jaxscale.layout import Layout
from jaxscale.plan.collectives import Program
from jaxscale.plan.instruction_terms import InstructionTerms
from jaxscale.plan.planner import Plan, plan_for
from jaxscale.plan.printing import Printable
from jaxscale.plan.profile import ADVICE, read_profile
from jaxscale.plan.timeline import BETWEEN, WITHIN, term_times
from jaxscale.plan.waterfall import ARITHMETIC, EXPOSED, waterfall
from jaxscale.step.rates import examples
from jaxscale.units import human_seconds
from jaxscale.working_copy import local

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

    from jaxscale.run import Run


@dataclasses.dataclass(frozen=True)
class Measured(Printable):
    """Measured time of a run's profiled steps, and the run's plan; prints as tables.

    Args:
      run: the run's folder.
      device: JAX's name of the device kind.
      devices: number of devices in the profile.
      steps: numbers of the profiled steps.
      terms: seconds of a step by term, averaged over devices and steps, in the order of the picture: the terms of
        `Plan.terms`, and idle time.
      unprofiled: median seconds of the run's other steps (profiling slows the host between steps); `None` if all steps
        were profiled.
      plan: the prediction; `None` if the hardware is unknown and none was named.
      comparable: whether `plan` is for the kind of device that the run used.
      notes: remarks, one sentence each.
    """

    run: str
    device: str
    devices: int
    steps: tuple[int, ...]
    terms: dict[str, float]
    unprofiled: float | None
    plan: Plan | None
    comparable: bool
    notes: tuple[str, ...] = ()

    @property
    def total(self) -> float:
        """Seconds of a step: the sum of all terms."""
        return sum(self.terms.values())

    @property
    def predicted(self) -> dict[str, float]:
        """The plan's terms; empty without a plan."""
        return {} if self.plan is None else self.plan.terms

    @property
    def ratios(self) -> dict[str, float]:
        """Measured over predicted time of each common term and of the "step"; empty unless `comparable`."""
        if self.plan is None or not self.comparable:
            return {}
        both = {name: time / self.predicted[name] for name, time in self.terms.items() if self.predicted.get(name)}
        return both | {"step": self.total / self.plan.best.total}

    def to_json(self) -> dict[str, Any]:
        """Return the measurement as JSON values."""
        return {
            "run": self.run,
            "device": self.device,
            "devices": self.devices,
            "steps": list(self.steps),
            "measured": self.terms,
            "step": self.total,
            "unprofiled": self.unprofiled,
            "topology": None if self.plan is None else self.plan.hardware.name,
            "predicted": self.predicted,
            "predicted_step": None if self.plan is None else self.plan.best.total,
            "comparable": self.comparable,
            "ratios": self.ratios,
            "notes": list(self.notes),
        }

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        one, *more = self.steps
        steps = f"steps {one} to {more[-1]}" if more else f"step {one}"
        yield f"{self.run}: {steps} on {self.devices} device{'s' * (self.devices > 1)} ({self.device})\n"
        columns = {"measured": self.terms}
        if self.plan is not None:
            columns = {f"predicted, {self.plan.hardware.name}": self.predicted, **columns}
        yield waterfall("a step's time", columns, "measured", ratios=self.ratios or None)
        yield from self.notes


def measured(run: Run, topology: str | Topology | None = None, *, compile: str = "auto") -> Measured:
    """Read the newest profile of a run, and plan the run for the hardware that it used.

    The terms are those of a plan, with three differences. "exposed, AXES" is the time of collectives along these axes
    while the device does nothing else, including the wait for other devices; simulated CPU devices share a machine's
    cores, so nearly all of their exposed time is waiting. There is no "bubble": a waiting pipeline stage waits in a
    collective. Idle time, in which a device executes nothing, is never predicted.

    Args:
      run: a run that was trained with a profile (`js.fit(..., profile=(5, 7))`, `jaxscale train ... --profile 5:7`).
      topology: hardware to plan for; by default the GPUs that run.json names. TPUs need the shape of their slice, as
        "v5p:2x2x2"; CPUs need a file that `jaxscale microbench` wrote, as "my_cpu.json:8".
      compile: as for `plan_for`.

    Raises:
      RunError: the run does not exist or has no profile of its steps.
      ConfigError: as `plan_for`.
      LayoutError: as `plan_for`.
    """
    if isinstance(run, str | Path):
        raise RunError(f"measured takes a Run, as js.Run({str(run)!r}), not its path")
    info = run.info
    local(run.place, profile=True)
    profile = read_profile(run.path)
    try:
        sizes = {"data": 1} if info["layout"] is None else info["layout"]["mesh"]
        kind, platform, count = (info["hardware"][name] for name in ("device", "platform", "devices"))
    except (KeyError, TypeError):
        raise RunError(f"{run.path / 'run.json'} does not name the run's devices and mesh; {ADVICE}") from None
    config = run.config if run.config.layout is not None else dataclasses.replace(run.config, layout=Layout("data=1"))
    assert config.layout is not None
    program = Program(profile.program, sizes, config.layout.across)
    terms = term_times(profile.devices, InstructionTerms(program).of)
    notes = []
    hardware = topology_of(topology) if isinstance(topology, str) else topology
    if hardware is None:
        hardware, why = _ran_on(kind, count)
        notes += [why] if hardware is None else []
    plan = None if hardware is None else plan_for(config, hardware, compile=compile)
    comparable = hardware is not None and _is_kind(kind, platform, hardware.chip)
    if hardware is not None and not comparable:
        notes.append(
            f"the run was on {kind} and the plan is for {hardware.name}: compare the shares of terms, not their times"
        )
    if hardware is not None and hardware.chip.name == "cpu":
        notes.append("the rates of 'cpu' are generic; `jaxscale microbench` writes a file with those of this machine")
    if len(profile.steps) == 1:
        notes.append("only one step was profiled, so the time between steps is unknown; profile two or more")
    seconds = _unprofiled(run, profile.steps)
    if seconds is not None:
        notes.append(f"steps without a profile took {human_seconds(seconds)} (the median of metrics.jsonl)")
    return Measured(
        str(run.path),
        kind,
        len(profile.devices),
        profile.steps,
        _ordered(terms),
        seconds,
        plan,
        comparable,
        tuple(notes),
    )


def _ran_on(kind: str, devices: int) -> tuple[Topology | None, str]:
    """Return the hardware of a run, or `None` and the reason why it is unknown."""
    chip = chip_of(kind)
    if chip is None:
        return None, (
            f"nothing is predicted, because the rates of '{kind}' are not known; name the hardware with --topology: a "
            "file that jaxscale microbench wrote on it, as my.json:8, or other hardware"
        )
    if chip.torus:
        like = f"{chip.name}:{chip.slice_of(devices // chip.devices)}"
        return None, f"nothing is predicted, because run.json has no slice shape; name it, as --topology {like}"
    try:
        return topology_of(f"{chip.name}:{devices}"), ""
    except LayoutError as e:
        return None, f"nothing is predicted: {e}"


def _is_kind(kind: str, platform: str, chip: Chip) -> bool:
    """Whether a device kind is a chip's; a CPU is known only by the hardware file that the user names."""
    known = chip_of(kind)
    if known is None:
        return platform == chip.platform == "cpu"
    return known.name == chip.name or any(kind.startswith(name) for name in chip.kinds)


def _unprofiled(run: Run, profiled: Collection[int]) -> float | None:
    """Median seconds of the steps outside the profile, except the first, which compiles."""
    unit, count = examples(run.config)
    rows = run.metrics()[1:]
    times = [count / r[f"{unit}_per_second"] for r in rows if r["step"] not in profiled and r.get(f"{unit}_per_second")]
    return statistics.median(times) if times else None


def _ordered(terms: Mapping[str, float]) -> dict[str, float]:
    """Order terms as a plan does: arithmetic, communication (longest first), other terms, idle time."""
    sent = sorted((name for name in terms if name.startswith(EXPOSED)), key=lambda name: -terms[name])
    rest = [name for name in terms if name not in (*ARITHMETIC, *sent, WITHIN, BETWEEN)]
    return {name: terms[name] for name in (*ARITHMETIC, *sent, *rest, WITHIN, BETWEEN) if terms.get(name)}
