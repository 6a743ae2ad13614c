"""Collectives of a compiled step, grouped by kind, mesh axes, loop and source line."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from pathlib import Path

from jaxscale.plan.collectives import Collective
from jaxscale.plan.scopes import scopes_of, stage_of

_PACKAGE = Path(__file__).parents[2]


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Collectives of one kind, over the same mesh axes, in the same loop, from the same source line.

    Args:
      kind: as of `Collective`; for a ring of permutes, the collective that it replaces.
      axes: as of `Collective`.
      module: the model's module; "" if the compiler does not record it.
      loop: the scopes of the loops around them, the outer one first; "" outside of loops.
      stage: "forward", "recomputed", "backward" or "other".
      source: "file:line", relative to the current folder.
      instructions: number of instructions in the program.
      times: number of executions in a step on average, all instructions together.
      payload: bytes that they move in all executions.
      sent: bytes that each device sends in all executions.
      certain: whether `times` is certain (see `Collective`).
    """

    kind: str
    axes: tuple[str, ...]
    module: str
    loop: str
    stage: str
    source: str
    instructions: int
    times: float
    payload: int
    sent: int
    certain: bool


def traffic(collectives: Iterable[Collective]) -> tuple[Traffic, ...]:
    """Group collectives; the group that sends most comes first."""
    groups: dict[tuple[str, ...], list[Collective]] = {}
    for c in collectives:
        kind = f"{c.ring} in a ring" if c.ring else c.kind
        key = (kind, *c.axes, module_of(c.name), loop_of(c.name), stage_of(c.name), short_source(c.source))
        groups.setdefault(key, []).append(c)
    rows = []
    for (kind, *axes, module, loop, stage, source), of in groups.items():
        times, payload = sum(c.times * c.share for c in of), round(sum(c.payload * c.times * c.share for c in of))
        sent, certain = sum(c.sent for c in of), all(c.certain for c in of)
        rows.append(Traffic(kind, tuple(axes), module, loop, stage, source, len(of), times, payload, sent, certain))
    return tuple(sorted(rows, key=lambda t: -t.sent))


def module_of(name: str) -> str:
    """Return the module of an operation: the scopes in its name, without the primitive.

    A fused operation, "block/(attn/dot|mlp/dot)", belongs to the module that its parts have in common.

    Args:
      name: the operation's name in a compiled program.
    """
    one, several, _ = name.partition("/(")
    return scopes_of(one if several else name.rpartition("/")[0])


def loop_of(name: str) -> str:
    """Return the scopes of the loops around an operation, the outer one first; "a loop" for one without scopes."""
    before = name.split("while/body")[:-1]
    return ", ".join(scopes_of(part) or "a loop" for part in before)


def short_source(source: str) -> str:
    """Return "file:line" relative to the current folder or, for our own files, to the repository."""
    path, colon, line = source.rpartition(":")
    for root in (Path.cwd(), _PACKAGE):
        if path and Path(path).is_relative_to(root):
            return f"{Path(path).relative_to(root)}{colon}{line}"
    return source
