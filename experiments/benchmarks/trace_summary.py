"""What a training step's time goes to, read from a profile that `jax.profiler.trace` left: by kernel, and in groups.

A device's kernels are events of its streams; on a CPU, of the threads that run a program's operations. Events of one
line that lie within another (a loop and its body) count for what they do themselves. What a kernel belongs to is read
from the scopes of the operation it was made for ("runs/0/blocks/0/attn/mix"), which the compiled program's text tells,
and where the profile does not name the operation (kernels of a CUDA graph), from the kernel's own name.
"""

from __future__ import annotations

import dataclasses
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

TOP = 30
"""So many kernels are listed."""

GROUPS: dict[str, tuple[str, str]] = {
    # group: (what of the scopes, what of the kernel's name) tells it; the first that does
    "optimizer": (r"\boptimizer\b|\bgradient_norm\b|\bis_finite\b|\breduce_and\b", r"^blockwise_update"),
    "loss": (r"\bloss\b", r"^cut_cross_entropy"),
    "attention": (r"\battn/mix\b", r"^flash_|fmha|flash"),
    "matmuls": (r"\bdot_general$", r"nvjet|gemm|gemv|cutlass|xmma|cublas|wgmma|^dot|splitk"),
    "copies": (
        r"\bdynamic_(update_)?slice$|\btranspose$",
        r"memcpy|memset|copy|transpose|dynamic.(update.)?slice",
    ),
    "norm and elementwise": (r"\bnorm\b", r"fusion|^(reduce|wrapped_|broadcast|convert|add|multiply)"),
}


@dataclasses.dataclass(frozen=True)
class Event:
    """One execution of a kernel.

    Args:
      kernel: its name.
      op: the operation of the compiled program that it was made for; "" where that is not known.
      line: the stream or thread; what lies within another event of one line is part of that.
      start, duration: ns.
    """

    kernel: str
    op: str
    line: str
    start: float
    duration: float


def summarise(folder: Path, program: str, steps: int) -> dict[str, Any]:
    """The newest profile in a folder, as `table` has it.

    Args:
      folder: what `jax.profiler.trace` was given.
      program: text of the compiled step.
      steps: that were traced.

    Raises:
      FileNotFoundError: there is no profile.
      ValueError: it holds no kernels.
    """
    files = sorted(folder.rglob("*.xplane.pb"), key=lambda path: path.stat().st_mtime)
    if not files:
        raise FileNotFoundError(f"no profile was written to {folder}")
    events = list(events_of(files[-1]))
    if not events:
        raise ValueError("the profile holds no kernels; of a GPU they need CUPTI, and leave to read its counters")
    return table(events, scopes_of(program), steps)


def events_of(file: Path) -> Iterator[Event]:
    """The kernels of a profile: of the first GPU where it has one, else the operations that a CPU's threads ran."""
    from jax.profiler import ProfileData

    data = ProfileData.from_file(str(file))
    planes = list(data.planes)
    gpus = [plane for plane in planes if plane.name.startswith("/device:GPU")]
    for plane in gpus[:1] or planes:
        lines = list(plane.lines)
        if gpus:  # other lines tell of the same time in other words: modules, operations, scopes
            lines = [line for line in lines if line.name.startswith("Stream")] or lines
        for line in lines:
            for event in line.events:
                op = str(dict(event.stats).get("hlo_op", ""))
                if gpus or op:
                    yield Event(event.name, op, line.name, float(event.start_ns), float(event.duration_ns))


def scopes_of(program: str) -> dict[str, str]:
    """Operations and kernels of a compiled program -> the scopes they were traced in, from its text.

    A kernel that XLA makes is named as its operation, other signs for those that C does not take: both are in it.
    """
    found = re.findall(r"^\s*(?:ROOT )?%?([\w.\-]+) = .*?op_name=\"([^\"]*)\"", program, re.MULTILINE)
    scopes = dict(found)
    return {re.sub(r"\W", "_", op): scope for op, scope in scopes.items()} | scopes


def group_of(kernel: str, scope: str) -> str:
    """Which of `GROUPS` a kernel belongs to, or "other"."""
    for group, (of_scope, of_name) in GROUPS.items():
        if re.search(of_scope, scope) or re.search(of_name, kernel, re.IGNORECASE):
            return group
    return "other"


def table(events: Iterable[Event], scopes: Mapping[str, str], steps: int) -> dict[str, Any]:
    """Milliseconds a step by group and by kernel.

    Args:
      events: of all steps.
      scopes: of `scopes_of`.
      steps: that they are of.

    Returns:
      "step_ms" from the first event's start to the last one's end, "groups" (name -> ms a step and share of that; with
      "idle", when no kernel ran; where streams overlap, shares add up to more than 1), and "kernels": group, kernel,
      scope, calls a step, ms a step, share, the longest first.
    """
    ours = list(events)
    window = max(e.start + e.duration for e in ours) - min(e.start for e in ours)
    spent: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    for event, own in _own_time(ours):
        scope = scopes.get(event.op) or scopes.get(event.kernel, "")
        group = group_of(event.kernel, scope)
        spent[group, re.sub(r"[._]\d+$", "", event.kernel), _short(scope)].append(own)
    groups: dict[str, float] = defaultdict(float)
    for (group, _, _), times in spent.items():
        groups[group] += sum(times)
    groups["idle"] = window - _covered(ours)
    per_step = lambda ns: {"ms": ns / steps / 1e6, "share": ns / window}  # noqa: E731
    longest = sorted(spent.items(), key=lambda item: -sum(item[1]))[:TOP]
    return {
        "steps": steps,
        "step_ms": window / steps / 1e6,
        "groups": {name: per_step(ns) for name, ns in sorted(groups.items(), key=lambda item: -item[1])},
        "kernels": [
            {"group": group, "kernel": kernel, "scope": scope, "calls": len(times) / steps} | per_step(sum(times))
            for (group, kernel, scope), times in longest
        ],
    }


def _short(scope: str) -> str:
    """The last parts of a scope, which say what an operation is of."""
    return "/".join(scope.split("/")[-4:])


def _own_time(events: Sequence[Event]) -> Iterator[tuple[Event, float]]:
    """Each event, and its time without that of the events within it on its line."""
    lines: dict[str, list[Event]] = defaultdict(list)
    for event in events:
        lines[event.line].append(event)
    for line in lines.values():
        open_: list[tuple[Event, list[float]]] = []  # an event, and the durations of what lies within it
        for event in sorted(line, key=lambda e: (e.start, -e.duration)):
            while open_ and open_[-1][0].start + open_[-1][0].duration <= event.start:
                closed, within = open_.pop()
                yield closed, closed.duration - sum(within)
            if open_:
                open_[-1][1].append(event.duration)
            open_.append((event, []))
        for closed, within in open_:
            yield closed, closed.duration - sum(within)


def _covered(events: Sequence[Event]) -> float:
    """Nanoseconds in which at least one event was under way."""
    covered, until = 0.0, float("-inf")
    for event in sorted(events, key=lambda e: e.start):
        end = event.start + event.duration
        covered += max(0.0, end - max(until, event.start))
        until = max(until, end)
    return covered
