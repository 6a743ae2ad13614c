"""An explanation as rich tables: tensors, FLOPs by module, memory by group, collectives by source line."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from jaxscale.layout import TensorRow
from jaxscale.layout.tensors import tensor_table
from jaxscale.plan.flops import flops_table
from jaxscale.plan.program_memory import ProgramMemory
from jaxscale.plan.remedies import estimate_table
from jaxscale.plan.shown import table_of
from jaxscale.plan.traffic import Traffic
from jaxscale.units import human_bytes

if TYPE_CHECKING:
    from jaxscale.plan.explain import Compiled, Explanation

LARGEST = 10
"""So many buffers are shown by name."""

LINES = 30
"""So many groups of collectives are."""


def explanation_tables(found: Explanation) -> Iterator[Any]:
    """Everything an explanation says, top to bottom."""
    yield tensor_table(f"parameters, laid out {found.layout}", found.params, why=True)
    yield _laid_out("gradients", found.gradients, found.params)
    yield from _otherwise("gradients", found.gradients, found.params)
    yield f"optimizer state: {human_bytes(found.state_bytes_per_device)} per device in {len(found.state)} arrays"
    yield from _otherwise("optimizer state", found.state, found.params)
    yield f"loss: {found.loss}"
    if found.attention:
        yield f"attention: {found.attention}"
    for sentence in found.kernels:
        yield f"kernel: {sentence}"
    yield from found.notes
    if found.flops is not None:
        yield ""
        yield flops_table(found.flops)
    if found.compiled is not None:
        yield from compiled_tables(found.compiled)
    if found.estimated is not None:
        yield f"for {found.estimated.where}"
        yield estimate_table(found.estimated.memory)
        yield traffic_table(found.estimated.traffic)


def compiled_tables(found: Compiled) -> Iterator[Any]:
    """What a compiled step holds and sends."""
    yield f"compiled for {found.where}"
    yield memory_table(found.memory, found.activations)
    yield largest_table(found.memory)
    if found.traffic:
        yield traffic_table(found.traffic)
    else:
        yield "it sends nothing"


def _laid_out(what: str, rows: Sequence[TensorRow], params: Sequence[TensorRow]) -> str:
    specs = {r.path: r.spec for r in params}
    other = sum(r.spec != specs[r.path] for r in rows)
    how = f"{other} of {len(rows)} otherwise than their parameters" if other else "laid out as their parameters"
    return f"{what}: {human_bytes(sum(r.bytes_per_device for r in rows))} per device, {how}"


def _otherwise(what: str, rows: Sequence[TensorRow], params: Sequence[TensorRow]) -> Iterator[Any]:
    """A table of those that do not lie as their parameter does."""
    specs = {r.path: r.spec for r in params}
    other = [r for r in rows if r.path in specs and len(r.spec) == len(specs[r.path]) and r.spec != specs[r.path]]
    if other:
        yield tensor_table(f"{what} that lie otherwise than their parameters", other, why=True)


def memory_table(found: ProgramMemory, activations: dict[str, int]) -> Any:
    """Bytes by group at the fullest moment, activations by tensor."""
    table = table_of("memory at its fullest, read off the program", "group", "bytes", "share")
    for group, n in found.groups.items():
        table.add_row(group, human_bytes(n) if n >= 0 else f"-{human_bytes(-n)}", f"{n / max(1, found.total):.1%}")
        if group == "activations":
            for tensor, part in activations.items():
                table.add_row(f"  {tensor}", human_bytes(part), f"{part / max(1, found.total):.1%}")
    table.add_section()
    table.add_row("the compiler allocates", human_bytes(found.total), "")
    if found.host:
        table.add_row("in host memory besides", human_bytes(found.host), "")
    table.caption, table.caption_justify = f"fullest at {found.moment}", "left"
    return table


def largest_table(found: ProgramMemory) -> Any:
    """The largest buffers at that moment; alike ones on one line."""
    table = table_of("the largest buffers then", "buffer", "shape", "bytes each", "how many", "group", "made at")
    groups: dict[tuple[str, ...], list[int]] = {}
    for b in found.buffers:
        groups.setdefault((b.name, b.shape, b.group, b.source), []).append(b.bytes)
    for (name, shape, group, source), sizes in sorted(groups.items(), key=lambda g: -sum(g[1]))[:LARGEST]:
        table.add_row(name, shape, human_bytes(sizes[0]), str(len(sizes)), group, source)
    return table


def traffic_table(found: Sequence[Traffic]) -> Any:
    """A line per group of collectives."""
    title = f"collectives of a step: each device sends {human_bytes(sum(t.sent for t in found))}"
    names = ("collective", "mesh axes", "sends", "times", "module", "pass", "in the loop", "because of")
    table = table_of(title, *names)
    for column in table.columns[1:2] + table.columns[4:]:
        column.justify, column.overflow = "left", "fold"
    for t in found[:LINES]:
        times = f"{t.times}" if t.certain else f"{t.times}, or as data has it"
        table.add_row(
            t.kind, " ".join(t.axes), human_bytes(t.sent), times, t.module, t.stage, t.loop, t.source or "the compiler"
        )
    if rest := found[LINES:]:
        table.add_row(f"{len(rest)} more", "", human_bytes(sum(t.sent for t in rest)), "", "", "", "", "")
    return table
