"""Compare two plans for the same hardware term by term: memory, FLOPs and time."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from typing import TYPE_CHECKING, Any

from jaxscale.hardware import Topology, topology
from jaxscale.plan.planner import Plan, groups, plan_for
from jaxscale.plan.printing import Printable, table_of
from jaxscale.plan.roofline import StepTime
from jaxscale.plan.waterfall import step_terms
from jaxscale.step import TrainConfig
from jaxscale.units import human_bytes, human_seconds

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

TITLES = {
    "memory": "bytes of a device",
    "flops": "FLOPs of a step",
    "seconds": "seconds of a step",
    "throughput": "throughput",
}
"""Groups of terms and the titles of their tables."""


@dataclasses.dataclass(frozen=True)
class Term:
    """One quantity of two plans.

    Args:
      group: one of `TITLES`.
      name: the quantity.
      a, b: its value in each plan; 0 where a plan has no such term.
    """

    group: str
    name: str
    a: float
    b: float


@dataclasses.dataclass(frozen=True)
class Comparison(Printable):
    """Two plans for the same hardware; prints as tables.

    Args:
      a, b: the plans.
      names: names of the two plans.
    """

    a: Plan
    b: Plan
    names: tuple[str, str] = ("a", "b")

    @property
    def compiled(self) -> bool:
        """Whether the times of both plans are of compiled programs; otherwise both are analytic."""
        return all(p.compiled is not None and p.compiled.step is not None for p in (self.a, self.b))

    @property
    def terms(self) -> tuple[Term, ...]:
        """The quantities of both plans, group by group."""
        each = [_terms(p, p.best if self.compiled else p.step) for p in (self.a, self.b)]
        names = dict.fromkeys(name for values in each for name in values)
        order = [*TITLES]
        terms = (Term(group, name, *(v.get((group, name), 0.0) for v in each)) for group, name in names)
        return tuple(sorted(terms, key=lambda t: (order.index(t.group), _is_total(t))))

    def to_json(self) -> dict[str, Any]:
        """Return terms and both plans as plain values."""
        terms: dict[str, dict[str, dict[str, float]]] = defaultdict(dict)
        for t in self.terms:
            terms[t.group][t.name] = {"a": t.a, "b": t.b, "difference": t.b - t.a}
        return {
            "topology": self.a.hardware.name,
            "compiled": self.compiled,
            "names": list(self.names),
            "terms": dict(terms),
            "a": self.a.to_json(),
            "b": self.b.to_json(),
        }

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        source = "of the compiled steps" if self.compiled else "by arithmetic"
        yield f"{self.a.hardware.name}; memory by arithmetic, times {source}"
        for letter, name, plan in zip("AB", self.names, (self.a, self.b), strict=True):
            fits = "fits" if plan.fits else "does not fit, or may not"
            yield f"{letter}: {name}, {plan.config.layout}; {plan.basis}; {fits}"
        yield ""
        for group, title in TITLES.items():
            table = table_of(title, "", "A", "B", "B - A", "B / A")
            for t in self.terms:
                if t.group != group:
                    continue
                if _is_total(t):
                    table.add_section()
                d = t.b - t.a
                sign = "" if d == 0 else "-" if d < 0 else "+"
                ratio = f"{t.b / t.a:.3g}" if t.a else "-"
                table.add_row(t.name, _words(t, t.a), _words(t, t.b), sign + _words(t, abs(d)), ratio)
            yield table


def compare(
    a: TrainConfig,
    b: TrainConfig,
    hardware: str | Topology,
    *,
    names: tuple[str, str] = ("a", "b"),
    **options: Any,
) -> Comparison:
    """Plan two runs on the same hardware and compare the plans.

    Args:
      a: settings of one run.
      b: settings of the other.
      hardware: a topology or its name, as for `plan_for`.
      names: names of the two runs for the tables.
      **options: keyword arguments of `plan_for`: `tokens`, `price`, `watts`, `restarts`, `compile`.

    Returns:
      both plans; `terms` has their quantities.

    Raises:
      ConfigError, LayoutError: `plan_for` refuses one of the runs.
    """
    target = topology(hardware) if isinstance(hardware, str) else hardware
    return Comparison(plan_for(a, target, **options), plan_for(b, target, **options), names)


def _terms(plan: Plan, step: StepTime) -> dict[tuple[str, str], float]:
    """Return a plan's quantities by group and name; terms of memory and of seconds add up to their totals."""
    terms: dict[tuple[str, str], float] = {("memory", name): size for name, size in groups(plan.memory).items()}
    terms["memory", "on a device"] = plan.memory.device
    terms["memory", "in host memory"] = plan.memory.host
    if plan.compiled is not None:
        terms["memory", "on a device, compiled"] = plan.compiled.bytes
    terms |= {("seconds", name): value for name, value in step_terms(plan.work, step, plan.hardware).items()}
    terms["seconds", "total"] = step.total
    flops: dict[str, float] = defaultdict(float)
    for op in plan.work.ops:
        flops[op.kind] += op.flops
    terms |= {("flops", f"of a device, {kind}"): count for kind, count in flops.items() if count}
    terms["flops", "the model's own"] = plan.work.flops
    terms["throughput", "tokens a step"] = step.tokens
    terms["throughput", "tokens/s"] = step.tokens_per_second
    terms["throughput", "MFU"] = step.mfu
    if plan.budget is not None:
        terms["throughput", "days"] = plan.budget.days
        if plan.budget.cost is not None:
            terms["throughput", "cost"] = plan.budget.cost
    return terms


def _is_total(t: Term) -> bool:
    """Return whether a term is a total of its group, or does not count towards it; such terms are listed last."""
    return (t.group == "memory" and t.name.startswith(("on a device", "in host"))) or t.name == "total"


def _words(t: Term, value: float) -> str:
    if t.group == "memory":
        return human_bytes(int(value))
    if t.group == "seconds":
        return human_seconds(value)
    if t.name == "MFU":
        return f"{value:.1%}"
    return f"{value:.4g}" if t.group == "flops" or value < 1000 else f"{value:,.0f}"
