"""Rich tables of a plan: memory and capacity, time of a step, traffic by link, the budget."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from jaxscale.errors import count
from jaxscale.plan.printing import table_of
from jaxscale.plan.waterfall import step_terms, waterfall
from jaxscale.units import human_bytes, human_seconds

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

    from jaxscale.plan.planner import Plan

LARGEST = 10
"""Number of groups of buffers that the memory table lists by name."""


def plan_tables(plan: Plan) -> Iterator[RenderableType]:
    """Yield all tables and lines of a plan, top to bottom."""
    devices = plan.config.layout.devices  # type: ignore[union-attr]
    used = f"{devices} devices" if devices == plan.hardware.devices else f"{devices} of {plan.hardware.devices} devices"
    yield f"{plan.hardware.name}, {used}: {plan.config.layout}; {plan.basis}\n"
    yield memory_table(plan)
    yield step_table(plan)
    if plan.step.traffic:
        yield traffic_table(plan)
    step = plan.best
    yield (
        f"{step.tokens:,} tokens and {step.flops:.4g} FLOPs a step; {step.tokens_per_second:,.0f} tokens/s, "
        f"{step.tokens_per_second / devices:,.0f} on each device; MFU {step.mfu:.1%}"
    )
    if plan.budget is not None:
        b = plan.budget
        line = f"{b.tokens:.4g} tokens: {b.ideal_days:,.1f} days if nothing fails, {b.days:,.1f} with restarts and "
        low, high = plan.days_range
        line += f"checkpoints, {low:,.1f} to {high:,.1f} in nine of ten cases; {b.device_hours:,.0f} device-hours"
        line += "" if b.kilowatt_hours is None else f", {b.kilowatt_hours:,.0f} kWh of the devices alone"
        yield line + ("" if b.cost is None else f", costing {b.cost:,.0f}")
        yield (
            f"assumed: a failure every {b.between / 3600:,.1f} hours ({b.failures:,.1f} in all; "
            f"{b.between / 3600 * devices:,.0f} hours of one device), {b.restart / 60:,.1f} minutes to restart, "
            f"a checkpoint every {b.every / 60:,.1f} minutes, of {human_bytes(b.checkpoint)} in {human_seconds(b.save)}"
        )
        if b.kilowatt_hours is None:
            yield f"energy is left out: {plan.hardware.chip.name} has no power figure; give --watts"
    if plan.fits:
        yield _fits(plan)
    else:
        capacity = plan.hardware.chip.capacity
        over = human_bytes(max(plan.bytes, plan.bytes_range[1]) - capacity)
        sure = plan.bytes > capacity
        yield (
            f"this {'does not fit: it is' if sure else 'may not fit: the upper end of its error bar is'} {over} over "
            "a device's memory; --search looks for a layout that fits, and explain --topology lists remedies"
        )
    yield from plan.notes


def _fits(plan: Plan) -> str:
    """Line on a plan that fits, with the upper end of its interval."""
    upper, capacity = human_bytes(plan.bytes_range[1]), human_bytes(plan.hardware.chip.capacity)
    if plan.compiled is not None:
        return f"fits: {upper} of {capacity} a device, as compiled"
    if plan.error_bar is None:
        return f"fits: {upper} of {capacity} a device"
    return f"fits: at most {upper} of {capacity} a device in nine of ten cases"


def memory_table(plan: Plan) -> Table:
    """Table of the bytes on a device by kind, beside its capacity."""
    from jaxscale.plan.planner import groups

    capacity = plan.hardware.chip.capacity
    table = table_of(f"memory of a device, of {human_bytes(capacity)}", "", "bytes", "share")
    parts = list(groups(plan.memory).items())
    rest = parts[LARGEST:]
    for name, size in [*parts[:LARGEST], *([(count(len(rest), "other"), sum(n for _, n in rest))] if rest else [])]:
        table.add_row(name, human_bytes(size), f"{size / capacity:.1%}")
    table.add_section()
    table.add_row("by arithmetic", human_bytes(plan.memory.device), f"{plan.memory.device / capacity:.1%}")
    if plan.compiled is None and plan.error_bar is not None:
        low, high = plan.bytes_range
        shares = f"{low / capacity:.1%} to {high / capacity:.1%}"
        table.add_row("in nine of ten cases", f"{human_bytes(low)} to {human_bytes(high)}", shares)
    if plan.compiled is not None:
        table.add_row("compiled", human_bytes(plan.compiled.bytes), f"{plan.compiled.bytes / capacity:.1%}")
    if plan.memory.host:
        table.add_row("in host memory", human_bytes(plan.memory.host), "")
    return table


def step_table(plan: Plan) -> Table:
    """Table of a step's seconds by term: analytic, and with the compiled program's traffic if there is one."""
    columns = {"by arithmetic": step_terms(plan.work, plan.step, plan.hardware)}
    if plan.compiled is not None and plan.compiled.step is not None:
        columns["compiled"] = plan.terms
    table = waterfall("a step's time", columns, [*columns][-1])
    low, high = plan.seconds_range
    if high > low:
        cells = (*[""] * (2 * len(columns) - 2), f"{human_seconds(low)} to {human_seconds(high)}", "", "")
        table.add_row("in nine of ten cases", *cells)
    return table


def traffic_table(plan: Plan) -> Table:
    """Table of the bytes that a device sends along each mesh axis in a step, and the link that it uses."""
    table = table_of(
        "sent by a device in a step", "axes", "link", "GB/s", "bytes", "takes", "exposed", "compiled bytes"
    )
    compiled = plan.compiled and plan.compiled.step
    real = {t.axes: t for t in compiled.traffic} if compiled else {}
    ours = {t.axes: t for t in plan.step.traffic}
    for axes in (*ours, *(a for a in real if a not in ours)):
        t = ours.get(axes, real.get(axes))
        assert t is not None
        sent = human_bytes(ours[axes].sent) if axes in ours else "-"
        cells = (t.link, f"{t.bandwidth / 1e9:,.0f}", sent, human_seconds(t.seconds), human_seconds(t.exposed))
        table.add_row(" × ".join(axes), *cells, human_bytes(real[axes].sent) if axes in real else "-")
    return table
