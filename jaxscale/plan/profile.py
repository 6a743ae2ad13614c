"""Reader of profiles of training steps: when each instruction of the compiled step ran, on which device.

`jax.profiler` writes an XSpace to `profile/plugins/profile/<time>/<host>.xplane.pb`, which also holds the compiled
programs. Devices appear in two forms. A CPU's operations are events of the threads that ran them, with the statistics
`hlo_op`, `hlo_module`, `run_id` and `device_ordinal`. Accelerators have planes "/device:TPU:0" and "/device:GPU:0": a
TPU's with the lines "XLA Ops" and "XLA Modules", whose events are named after instructions and programs; a GPU's with a
line for each stream, whose kernels have `hlo_op` and `hlo_module`. The CPU's form was tested on profiles of jax 0.10.2
and 0.12; those of accelerators only on XSpaces that tests write by hand.
"""

from __future__ import annotations

import bisect
import dataclasses
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from jaxscale import reading
from jaxscale.errors import RunError

STEP = "jit_step"
"""Name of the compiled program of a training step."""

ADVICE = "train one with a profile, as jaxscale train ... --profile 5:7"
"""Advice in errors about a run without a usable profile."""

_PROGRAMS = b"/host:metadata"  # the plane that holds the compiled programs
_DEVICE = re.compile(r"/device:(?:TPU|GPU):(\d+)")


class Event(NamedTuple):
    """One execution of an instruction.

    Args:
      name: the instruction's name.
      line: the thread or stream; an event that lies within another event of the same line is part of it.
      start: ns.
      end: ns.
      module: the program, such as "jit_step(2)"; "" if the profile does not name it.
      run: identifies the execution of the program; "" if the profile does not.
    """

    name: str
    line: str
    start: float
    end: float
    module: str
    run: str


@dataclasses.dataclass(frozen=True)
class Execution:
    """One device's execution of a step.

    Args:
      start: ns.
      end: ns.
      events: executions of instructions in it.
    """

    start: float
    end: float
    events: tuple[Event, ...]


@dataclasses.dataclass(frozen=True)
class Profile:
    """Profiled steps of a run.

    Args:
      program: HLO text of the compiled step.
      devices: for each device its executions of the step, in order.
      steps: numbers of the profiled steps.
    """

    program: str
    devices: tuple[tuple[Execution, ...], ...]
    steps: tuple[int, ...]


def read_profile(run: Path) -> Profile:
    """Read the newest profile in a run's folder, of all hosts that wrote a file.

    Args:
      run: the run's folder.

    Raises:
      RunError: the run has no profile, or the profile is damaged or lacks the training step.
    """
    folders = sorted({file.parent for file in (run / "profile").rglob("*.xplane.pb")})
    if not folders:
        why = "has no profile" if not (run / "profile").exists() else "has a profile/ folder without a complete trace"
        raise RunError(f"{run} {why}; {ADVICE}, of steps that it reaches")
    events: dict[tuple[Path, str], list[Event]] = {}
    programs: dict[str, bytes] = {}
    steps: dict[Path, list[int]] = {}
    for file in sorted(folders[-1].glob("*.xplane.pb")):
        try:
            data = reading.read_bytes(file)
            programs |= _programs(data)
            ran, steps[file] = _events(data)
        except (OSError, RuntimeError, ValueError, LookupError) as e:
            raise RunError(f"{file} is damaged ({type(e).__name__}: {e}); {ADVICE}") from None
        events |= {(file, device): executed for device, executed in ran.items()}
    module = _step_module(events.values())
    if module is None:
        raise RunError(
            f"the profile in {folders[-1]} has no operations of a training step; {ADVICE}, of two steps or more"
        )
    if module not in programs:
        raise RunError(f"the profile in {folders[-1]} lacks the compiled program of its steps; {ADVICE}")
    devices: list[tuple[Execution, ...]] = []
    for (file, _), of_device in sorted(events.items()):
        # The profile may also contain the end of the step before the first profiled one.
        if executions := tuple(_executions(of_device, module))[-len(steps[file]) :]:
            devices.append(executions)
    numbers = tuple(sorted({number for of_file in steps.values() for number in of_file}))
    try:
        text = _text(programs[module])
    except (RuntimeError, ValueError) as e:
        reason = (str(e).strip() or type(e).__name__).splitlines()[0]
        raise RunError(f"the program in the profile in {folders[-1]} is damaged ({reason}); {ADVICE}") from None
    return Profile(text, tuple(devices), numbers or tuple(range(1, len(devices[0]) + 1)))


def _step_module(devices: Iterable[list[Event]]) -> str | None:
    """Return the program of the training step by its name; if several have it, the one that took longest."""
    spent: dict[str, float] = defaultdict(float)
    for events in devices:
        for e in events:
            spent[e.module] += e.end - e.start
    named = [m for m in spent if m.partition("(")[0] == STEP]
    return max(named, key=lambda m: spent[m], default=None)


# --- events -----------------------------------------------------------------------------------------------------------


def _events(data: bytes) -> tuple[dict[str, list[Event]], list[int]]:
    """Return the events of every device in an XSpace, and the step numbers that the training loop recorded."""
    from jax.profiler import ProfileData

    events: dict[str, list[Event]] = defaultdict(list)
    steps = []
    for plane in ProfileData.from_serialized_xspace(data).planes:
        lines = list(plane.lines)
        if (device := _DEVICE.fullmatch(plane.name)) is not None:
            events[device[0]] += _of_accelerator(lines)
        elif not _DEVICE.match(plane.name):
            for number, line in enumerate(lines):
                for event, stats in _with_stats(line):
                    if event.name == "train" and "step_num" in stats:
                        steps.append(int(stats["step_num"]))
                    elif "hlo_op" in stats:
                        module = f"{stats.get('hlo_module')}({stats.get('program_id')})"
                        where = str(stats.get("device_ordinal", 0))
                        events[where].append(
                            _event(event, stats["hlo_op"], str(number), module, stats.get("run_id", ""))
                        )
    return events, steps


def _of_accelerator(lines: list[Any]) -> Iterator[Event]:
    streams = [line for line in lines if line.name.startswith("Stream")]
    for line in streams:  # of a GPU; its other lines repeat the same time in other forms
        for event, stats in _with_stats(line):
            module = f"{stats['hlo_module']}({stats.get('program_id')})" if "hlo_module" in stats else ""
            yield _event(event, stats.get("hlo_op") or event.name, line.name, module, "")
    by_name = {line.name: line for line in lines}
    if streams or "XLA Modules" not in by_name or "XLA Ops" not in by_name:
        return
    modules = sorted((e.start_ns, e.start_ns + e.duration_ns, e.name) for e in by_name["XLA Modules"].events)
    for event in by_name["XLA Ops"].events:
        at = bisect.bisect_right(modules, event.start_ns, key=lambda m: m[0]) - 1
        if at >= 0 and event.start_ns < modules[at][1]:
            # The name is "fusion.3", or the whole text "%fusion.3 = ...".
            yield _event(event, event.name.partition(" = ")[0].lstrip("%"), "", modules[at][2], str(at))


def _with_stats(line: Any) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Events with their statistics, without those of Python frames."""
    return ((e, {str(name): value for name, value in e.stats}) for e in line.events if not e.name.startswith("$"))


def _event(event: Any, name: object, line: str, module: str, run: object) -> Event:
    return Event(str(name), line, event.start_ns, event.start_ns + event.duration_ns, module, str(run))


def _executions(events: list[Event], module: str) -> Iterator[Execution]:
    """Yield a device's executions of a program; kernels without a program belong to the one around them."""
    ours = sorted((e for e in events if e.module in (module, "")), key=lambda e: e.start)
    first = next((i for i, e in enumerate(ours) if e.module == module), len(ours))
    runs: dict[str, list[Event]] = defaultdict(list)
    if ours and all(e.run for e in ours):
        for e in ours:
            runs[e.run].append(e)
    elif first < len(ours):
        # Most instructions run once a step. A step begins with the first of these.
        counts = Counter(e.name for e in ours if e.module == module)
        steps = Counter(counts.values()).most_common(1)[0][0]
        anchor = next(e.name for e in ours[first:] if counts[e.name] == steps)
        step = 0
        for e in ours[first:]:
            step += e.name == anchor
            if step:
                runs[str(step)].append(e)
    for of_run in sorted(runs.values(), key=lambda es: es[0].start):
        yield Execution(of_run[0].start, max(e.end for e in of_run), tuple(of_run))


# --- programs ---------------------------------------------------------------------------------------------------------


def _programs(data: bytes) -> dict[str, bytes]:
    """Return the compiled programs in an XSpace by name ("jit_step(2)"), each as a serialised HloModuleProto.

    `ProfileData` does not offer them. Field numbers from xplane.proto and hlo.proto: XSpace.planes 1, XPlane.name 2,
    XPlane.event_metadata 4, XEventMetadata.name 2 and .stats 5, XStat.bytes_value 6, HloProto.hlo_module 1, values of a
    map 2.
    """
    programs = {}
    for plane in _field(memoryview(data), 1):
        if next(_field(plane, 2), b"") != _PROGRAMS:
            continue
        for entry in _field(plane, 4):
            for metadata in _field(entry, 2):
                name = bytes(next(_field(metadata, 2), b"")).decode(errors="replace")
                for stat in _field(metadata, 5):
                    for program in _field(stat, 6):
                        programs[name] = b"".join(_field(program, 1))
    return programs


def _field(message: memoryview, field: int) -> Iterator[memoryview]:
    """Yield the values of a field of a serialised protocol buffer; the field is a string, bytes or a message."""
    at = 0

    def number() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = message[at]
            at, value, shift = at + 1, value | (byte & 127) << shift, shift + 7
            if byte < 128:
                return value

    while at < len(message):
        tag, kind = divmod(number(), 8)
        if kind == 0:
            number()
            continue
        size = number() if kind == 2 else {1: 8, 5: 4}[kind]
        if kind == 2 and tag == field:
            yield message[at : at + size]
        at += size


def _text(module: bytes) -> str:
    """HLO text of a serialised HloModuleProto."""
    from jaxlib import xla_client

    hlo: Any = xla_client.hlo  # type: ignore[attr-defined]  # jax uses it as well; it has no stub
    text: str = hlo.HloModule.from_serialized_hlo_module_proto(module).to_string()
    return text
