"""Where the time of a training step goes, by kernel and by group, from a profile of `jax.profiler.trace`.

A device's kernels are events of its streams; on a CPU, of the threads that run a program's operations. An event that
encloses others on its line (a loop and its body) counts without their time. The group of a kernel is read from the
scopes of its operation ("runs/0/blocks/0/attn/mix") in the compiled program's text; where the profile does not name the
operation (kernels of a CUDA graph), from the kernel's own name.
"""

from __future__ import annotations

import dataclasses
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

TOP = 30
"""Number of kernels that are listed."""

GROUPS: dict[str, tuple[str, str]] = {
    # group: (pattern of the scopes, pattern of the kernel's name); the first match wins
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
      kernel: name of the kernel.
      op: its operation in the compiled program; "" where that is not known.
      line: the stream or thread; an event within another event of the same line is a part of it.
      start, duration: ns.
    """

    kernel: str
    op: str
    line: str
    start: float
    duration: float


def summarise(folder: Path, program: str, steps: int) -> dict[str, Any]:
    """Return the `table` of the newest profile in a folder.

    Args:
      folder: the argument of `jax.profiler.trace`.
      program: text of the compiled step.
      steps: number of traced steps.

    Raises:
      FileNotFoundError: the folder has no profile.
      ValueError: the profile has no kernels.
    """
    files = sorted(folder.rglob("*.xplane.pb"), key=lambda path: path.stat().st_mtime)
    if not files:
        raise FileNotFoundError(f"no profile was written to {folder}")
    events = list(events_of(files[-1]))
    if not events:
        raise ValueError("the profile has no kernels; on a GPU it needs CUPTI and access to performance counters")
    return table(events, scopes_of(program), steps)


def events_of(file: Path) -> Iterator[Event]:
    """Yield the kernels of a profile: of the first GPU, or the operations of a CPU's threads where it has no GPU."""
    from jax.profiler import ProfileData

    data = ProfileData.from_file(str(file))
    planes = list(data.planes)
    gpus = [plane for plane in planes if plane.name.startswith("/device:GPU")]
    for plane in gpus[:1] or planes:
        lines = list(plane.lines)
        if gpus:  # other lines repeat the same time by module, operation and scope
            lines = [line for line in lines if line.name.startswith("Stream")] or lines
        for line in lines:
            for event in line.events:
                op = str(dict(event.stats).get("hlo_op", ""))
                if gpus or op:
                    yield Event(event.name, op, line.name, float(event.start_ns), float(event.duration_ns))


def scopes_of(program: str) -> dict[str, str]:
    """Return operation and kernel names of a compiled program -> the scopes they were traced in, from its text.

    A kernel that XLA makes has the name of its operation, with "_" for characters that C does not allow.
    """
    names = re.findall(r"^\s*(?:ROOT )?%?([\w.\-]+) = .*?op_name=\"([^\"]*)\"", program, re.MULTILINE)
    scopes = dict(names)
    return {re.sub(r"\W", "_", op): scope for op, scope in scopes.items()} | scopes


def group_of(kernel: str, scope: str) -> str:
    """Return the group in `GROUPS` of a kernel, or "other"."""
    for group, (of_scope, of_name) in GROUPS.items():
        if re.search(of_scope, scope) or re.search(of_name, kernel, re.IGNORECASE):
            return group
    return "other"


def table(events: Iterable[Event], scopes: Mapping[str, str], steps: int) -> dict[str, Any]:
    """Return milliseconds per step by group and by kernel.

    Args:
      events: kernels of all steps.
      scopes: of `scopes_of`.
      steps: number of steps.

    Returns:
      "step_ms" from the first event's start to the last one's end, "groups" (name -> ms a step and share of "step_ms";
      "idle" is time without a kernel; where streams overlap, shares add up to more than 1), and "kernels": group,
      kernel, scope, calls a step, ms a step, share, the longest first.
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
    """Return the last parts of a scope, which name the layer of an operation."""
    return "/".join(scope.split("/")[-4:])


def _own_time(events: Sequence[Event]) -> Iterator[tuple[Event, float]]:
    """Yield each event with its own time on its line: without the events within it, and from the end of the one before.

    A kernel may be launched before the kernel ahead of it in its stream ends, and wait for it ("programmatic dependent
    launch"): it overlaps that one without being a part of it.
    """
    lines: dict[str, list[Event]] = defaultdict(list)
    for event in events:
        lines[event.line].append(event)
    for line in lines.values():
        open_: list[tuple[Event, float, list[float]]] = []  # an event, its end, its time and minus those within it
        for event in sorted(line, key=lambda e: (e.start, -e.duration)):
            start, end = event.start, event.start + event.duration
            while open_ and open_[-1][1] < end:
                before, until, times = open_.pop()
                start = max(start, until)
                yield before, sum(times)
            if open_:
                open_[-1][2].append(start - end)
            open_.append((event, end, [end - start]))
        for event, _, times in open_:
            yield event, sum(times)


def _covered(events: Sequence[Event]) -> float:
    """Return the nanoseconds during which at least one event was running."""
    covered, until = 0.0, float("-inf")
    for event in sorted(events, key=lambda e: e.start):
        end = event.start + event.duration
        covered += max(0.0, end - max(until, event.start))
        until = max(until, end)
    return covered
