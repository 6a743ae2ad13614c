"""What a compiled step sends, grouped by who asked for it: kind, mesh axes, loop and source line."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from pathlib import Path

from jaxscale.plan.collectives import Collective
from jaxscale.plan.scopes import scopes_of, stage_of

_PACKAGE = Path(__file__).parents[2]


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Collectives of one kind, over the same mesh axes, in the same loop, for the same line.

    Args:
      kind, axes: as of `Collective`; of a ring of permutes the kind says what it stands for.
      module: the model's module, "" where the compiler does not say.
      loop: the scan they run in, by the scopes it stands in, the outer one first; "" outside of any.
      stage: "forward", "recomputed", "backward" or "other".
      source: "file:line", relative to where we are.
      instructions: how many the program has.
      times: how often one runs in a step, all of them together.
      payload: bytes of what they move, in all `times`.
      sent: bytes that each device sends, in all `times`.
      certain: False where `times` is a guess (see `Collective`).
    """

    kind: str
    axes: tuple[str, ...]
    module: str
    loop: str
    stage: str
    source: str
    instructions: int
    times: int
    payload: int
    sent: int
    certain: bool


def traffic(found: Iterable[Collective]) -> tuple[Traffic, ...]:
    """Groups collectives, what sends most first."""
    groups: dict[tuple[str, ...], list[Collective]] = {}
    for c in found:
        kind = f"{c.ring} in a ring" if c.ring else c.kind
        key = (kind, *c.axes, module_of(c.name), loop_of(c.name), stage_of(c.name), short_source(c.source))
        groups.setdefault(key, []).append(c)
    rows = []
    for (kind, *axes, module, loop, stage, source), of in groups.items():
        times, payload = sum(c.times for c in of), sum(c.payload * c.times for c in of)
        sent, certain = sum(c.sent for c in of), all(c.certain for c in of)
        rows.append(Traffic(kind, tuple(axes), module, loop, stage, source, len(of), times, payload, sent, certain))
    return tuple(sorted(rows, key=lambda t: -t.sent))


def module_of(name: str) -> str:
    """The module of an operation's name as a program has it: its scopes, the primitive left out.

    Of one that does the work of several, "block/(attn/dot|mlp/dot)", what they have in common.
    """
    one, several, _ = name.partition("/(")
    return scopes_of(one if several else name.rpartition("/")[0])


def loop_of(name: str) -> str:
    """The loops an operation stands in, by the scopes each stands in; "a loop" where that has none."""
    before = name.split("while/body")[:-1]
    return ", ".join(scopes_of(part) or "a loop" for part in before)


def short_source(source: str) -> str:
    """A source line, relative to the current folder, else to where jaxscale lies."""
    path, colon, line = source.rpartition(":")
    for root in (Path.cwd(), _PACKAGE):
        if path and Path(path).is_relative_to(root):
            return f"{Path(path).relative_to(root)}{colon}{line}"
    return source
