"""What a run that was trained with a profile spent its steps on, beside what a plan of it predicts, term by term."""

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
from jaxscale.plan.profile import HOW, read_profile
from jaxscale.plan.shown import Shown
from jaxscale.plan.timeline import BETWEEN, WITHIN, term_times
from jaxscale.plan.waterfall import ARITHMETIC, EXPOSED, waterfall
from jaxscale.step.rates import examples
from jaxscale.units import human_seconds

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

    from jaxscale.run import Run


@dataclasses.dataclass(frozen=True)
class Measured(Shown):
    """A run's steps as its profile has them, and its plan; prints as tables.

    Args:
      run: the run's folder.
      device: what it ran on, as JAX calls it.
      devices: how many of them the profile shows.
      steps: the numbers of its steps.
      terms: seconds of a step by term, averaged over devices and steps, in the order of the picture: those of
        `Plan.terms`, and idle time.
      unprofiled: seconds of the run's other steps, their median: a profile slows what the host does between steps.
        `None` where there are no others.
      plan: what was predicted; `None` where the hardware is not known and none was named.
      comparable: whether `plan` is for the kind of device that the run ran on.
      notes: what else to know, a sentence each.
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
        """Seconds of a step: all terms together."""
        return sum(self.terms.values())

    @property
    def predicted(self) -> dict[str, float]:
        """The plan's terms; empty without a plan."""
        return {} if self.plan is None else self.plan.terms

    @property
    def ratios(self) -> dict[str, float]:
        """Measured over predicted of each term that both have, and of the "step"; empty for other hardware."""
        if self.plan is None or not self.comparable:
            return {}
        both = {name: time / self.predicted[name] for name, time in self.terms.items() if self.predicted.get(name)}
        return both | {"step": self.total / self.plan.best.total}

    def to_json(self) -> dict[str, Any]:
        """The same as plain values."""
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
    """Reads the newest profile of a run, and plans the run for the hardware that it ran on.

    Terms are those of a plan. "exposed, AXES" is the time of collectives along these axes while the device does nothing
    else, waiting for the others included; on simulated CPU devices, which take turns on a machine's cores, nearly all
    of it is waiting. A plan has its "bubble" apart, while stages that wait do so in collectives here. Idle time, in
    which a device executes nothing, no plan predicts.

    Args:
      run: it was trained with a profile (`js.fit(..., profile=(5, 7))`, `jaxscale train ... --profile 5:7`).
      topology: hardware to plan it for; by default the GPUs that run.json names. TPUs need the shape of their slice, as
        "v5p:2x2x2"; of CPUs `jaxscale microbench` makes a file, as "my_cpu.json:8".
      compile: as for `plan_for`.

    Raises:
      RunError: no such run, or it has no profile of its steps.
      ConfigError, LayoutError: those of `plan_for`.
    """
    if isinstance(run, str | Path):
        raise RunError(f"measured takes a Run, as js.Run({str(run)!r}), not its path")
    info = run.info
    profile = read_profile(run.path)
    try:
        sizes = {"data": 1} if info["layout"] is None else info["layout"]["mesh"]
        kind, platform, count = (info["hardware"][name] for name in ("device", "platform", "devices"))
    except (KeyError, TypeError):
        raise RunError(f"{run.path / 'run.json'} does not say on which devices and mesh the run was; {HOW}") from None
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
            f"the run was on {kind} and the plan is for {hardware.name}: their shares compare, their times do not"
        )
    if hardware is not None and hardware.chip.name == "cpu":
        notes.append("the rates of 'cpu' are no machine's; `jaxscale microbench` makes a file of this one's")
    if len(profile.steps) == 1:
        notes.append("one step was profiled, which does not show the time between steps; profile two or more")
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
    """The hardware that a run was on, or why it is not known."""
    chip = chip_of(kind)
    if chip is None:
        return None, (
            f"nothing is predicted, since the rates of '{kind}' are not known; name the hardware with --topology: what "
            "jaxscale microbench measured on it, as my.json:8, or other hardware"
        )
    if chip.torus:
        like = f"{chip.name}:{chip.slice_of(devices // chip.devices)}"
        return None, f"nothing is predicted, since run.json has no shape of its slice; name it, as --topology {like}"
    try:
        return topology_of(f"{chip.name}:{devices}"), ""
    except LayoutError as e:
        return None, f"nothing is predicted: {e}"


def _is_kind(kind: str, platform: str, chip: Chip) -> bool:
    """Whether JAX calls a chip so; what a CPU can do is known from the file that somebody names."""
    known = chip_of(kind)
    if known is None:
        return platform == chip.platform == "cpu"
    return known.name == chip.name or any(kind.startswith(name) for name in chip.kinds)


def _unprofiled(run: Run, profiled: Collection[int]) -> float | None:
    """Seconds of a step, the median of those that are not in the profile; the first one compiles."""
    unit, count = examples(run.config)
    rows = run.metrics()[1:]
    times = [count / r[f"{unit}_per_second"] for r in rows if r["step"] not in profiled and r.get(f"{unit}_per_second")]
    return statistics.median(times) if times else None


def _ordered(terms: Mapping[str, float]) -> dict[str, float]:
    """Terms in the order of a plan's: arithmetic, communication (the longest first), what else there is, idle time."""
    sent = sorted((name for name in terms if name.startswith(EXPOSED)), key=lambda name: -terms[name])
    rest = [name for name in terms if name not in (*ARITHMETIC, *sent, WITHIN, BETWEEN)]
    return {name: terms[name] for name in (*ARITHMETIC, *sent, *rest, WITHIN, BETWEEN) if terms.get(name)}
