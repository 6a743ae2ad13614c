"""Rich tables of an explanation: tensors, FLOPs by module, memory by group, collectives by source line."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from jaxscale.layout import TensorRow
from jaxscale.layout.tensors import tensor_table
from jaxscale.plan.flops import flops_table
from jaxscale.plan.printing import table_of
from jaxscale.plan.program_memory import ProgramMemory
from jaxscale.plan.remedies import estimate_table
from jaxscale.plan.traffic import Traffic
from jaxscale.units import human_bytes

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

    from jaxscale.plan.explain import Compiled, Explanation

LARGEST = 10
"""Number of buffers that are listed."""

LINES = 30
"""Number of groups of collectives that are listed."""


def explanation_tables(explanation: Explanation) -> Iterator[RenderableType]:
    """Yield the tables and lines of an explanation."""
    yield tensor_table(f"parameters, laid out {explanation.layout}", explanation.params, why=True)
    yield _laid_out("gradients", explanation.gradients, explanation.params)
    yield from _unlike_parameters("gradients", explanation.gradients, explanation.params)
    state = f"{human_bytes(explanation.state_bytes_per_device)} per device in {len(explanation.state)} arrays"
    yield f"optimizer state: {state}"
    yield from _unlike_parameters("optimizer state", explanation.state, explanation.params)
    yield f"loss: {explanation.loss}"
    if explanation.attention:
        yield f"attention: {explanation.attention}"
    for sentence in explanation.kernels:
        yield f"kernel: {sentence}"
    yield from explanation.notes
    if explanation.flops is not None:
        yield ""
        yield flops_table(explanation.flops)
    if explanation.compiled is not None:
        yield from compiled_tables(explanation.compiled)
    if explanation.estimated is not None:
        yield f"for {explanation.estimated.where}"
        yield estimate_table(explanation.estimated.memory)
        yield traffic_table(explanation.estimated.traffic)


def compiled_tables(compiled: Compiled) -> Iterator[RenderableType]:
    """Yield the tables of a compiled step's memory and collectives."""
    yield f"compiled for {compiled.where}"
    yield memory_table(compiled.memory, compiled.activations)
    yield largest_table(compiled.memory)
    if compiled.traffic:
        yield traffic_table(compiled.traffic)
    else:
        yield "the step has no collectives"


def _laid_out(what: str, rows: Sequence[TensorRow], params: Sequence[TensorRow]) -> str:
    """Return a line on arrays that belong to parameters: their bytes, and whether they are sharded alike."""
    specs = {r.path: r.spec for r in params}
    other = sum(r.spec != specs[r.path] for r in rows)
    sharding = f"{other} of {len(rows)} unlike their parameters" if other else "laid out as their parameters"
    return f"{what}: {human_bytes(sum(r.bytes_per_device for r in rows))} per device, {sharding}"


def _unlike_parameters(what: str, rows: Sequence[TensorRow], params: Sequence[TensorRow]) -> Iterator[RenderableType]:
    """Yield a table of arrays that are sharded unlike their parameters, if there are any."""
    specs = {r.path: r.spec for r in params}
    other = [r for r in rows if r.path in specs and len(r.spec) == len(specs[r.path]) and r.spec != specs[r.path]]
    if other:
        yield tensor_table(f"{what} sharded unlike their parameters", other, why=True)


def memory_table(memory: ProgramMemory, activations: dict[str, int]) -> Table:
    """Return a table of bytes by group at the peak, with activations by tensor.

    Args:
      memory: memory of a compiled step.
      activations: bytes of activations by name.
    """
    table = table_of("peak memory of the compiled program", "group", "bytes", "share")
    for group, n in memory.groups.items():
        table.add_row(group, human_bytes(n) if n >= 0 else f"-{human_bytes(-n)}", f"{n / max(1, memory.total):.1%}")
        if group == "activations":
            for tensor, part in activations.items():
                table.add_row(f"  {tensor}", human_bytes(part), f"{part / max(1, memory.total):.1%}")
    table.add_section()
    table.add_row("allocated by the compiler", human_bytes(memory.total), "")
    if memory.host:
        table.add_row("also, in host memory", human_bytes(memory.host), "")
    table.caption, table.caption_justify = f"peak at {memory.moment}", "left"
    return table


def largest_table(memory: ProgramMemory) -> Table:
    """Return a table of the largest buffers at the peak; buffers with equal name and shape share a line."""
    table = table_of("largest buffers at the peak", "buffer", "shape", "bytes each", "count", "group", "source")
    groups: dict[tuple[str, ...], list[int]] = {}
    for b in memory.buffers:
        groups.setdefault((b.name, b.shape, b.group, b.source), []).append(b.bytes)
    for (name, shape, group, source), sizes in sorted(groups.items(), key=lambda g: -sum(g[1]))[:LARGEST]:
        table.add_row(name, shape, human_bytes(sizes[0]), str(len(sizes)), group, source)
    return table


def traffic_table(groups: Sequence[Traffic]) -> Table:
    """Return a table with a line per group of collectives."""
    title = f"collectives of a step: each device sends {human_bytes(sum(t.sent for t in groups))}"
    names = ("collective", "mesh axes", "sends", "times", "module", "pass", "in the loop", "because of")
    table = table_of(title, *names)
    for column in table.columns[1:2] + table.columns[4:]:
        column.justify, column.overflow = "left", "fold"
    for t in groups[:LINES]:
        times = f"{round(t.times, 3):.10g}" if t.certain else f"{t.times:.10g}, depends on data"
        table.add_row(
            t.kind, " ".join(t.axes), human_bytes(t.sent), times, t.module, t.stage, t.loop, t.source or "the compiler"
        )
    if rest := groups[LINES:]:
        table.add_row(f"{len(rest)} more", "", human_bytes(sum(t.sent for t in rest)), "", "", "", "", "")
    return table
