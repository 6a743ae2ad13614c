"""Collectives of a compiled program: mesh axes, bytes, how often each runs, and the source line that caused it."""

from __future__ import annotations

import dataclasses
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping

import jax
import numpy as np

from jaxscale.errors import LayoutError

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
"""The collectives, by their names in HLO; a `ragged-all-to-all` counts as an all-to-all."""

COLLECTIVE = re.compile(
    r"\b(all-gather|all-reduce|reduce-scatter|(?:ragged-)?all-to-all|collective-permute)(-start)?\("
)
_BETWEEN_SLICES = re.compile(
    r" send\(%?([\w.-]+).*_xla_megascale_target=\"?\{+([^}]*)\}.*_xla_megascale_transfer_type=\"(\w+)\""
)
_SLICE = 100_000
"""A device's number in an all-to-all between slices is its slice times this, and its number in the slice; in other
transfers the slices themselves are listed."""
_MOVES = ("copy", "copy-start", "copy-done", "bitcast", "reshape", "transpose", "convert", "get-tuple-element")
_BITS = {"pred": 8, "f8": 8, "bf16": 16, "f16": 16, "f32": 32, "f64": 64, "c64": 64, "c128": 128}
# Bits of an element by the beginning of its type's name; for other types, the number at the end of the name.
_ARRAY = re.compile(r"\b(pred|bf16|f8\w*|[fsuc]\d+)\[([\d,]*)\]")


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective instruction of a compiled program.

    Args:
      kind: one of `KINDS`.
      axes: the mesh axes it runs over.
      devices: number of devices in one group.
      payload: bytes of the unsharded array: the result of an all-gather, the operand of the other collectives.
      times: how often a step runs it, all iterations of loops counted.
      certain: False in a loop whose length cannot be read and in a branch; `times` then counts one iteration of such
        a loop, and every branch once.
      share: fraction of the steps that run it, where a named scope says so (see `share_of_updates`).
      ring: "all-gather" or "reduce-scatter" for a permute of a ring that the compiler made of one; else "".
      name: the operation it came from, as JAX names it.
      source: "file:line" of the model or step that caused it; "" where the compiler does not say.
      pairs: of a permute, the pairs of sending and receiving device.
      flops: of a predicted reduce-scatter, FLOPs per device of the matrix product that it sums, where a compiler may
        make a ring of the two; else 0.
    """

    kind: str
    axes: tuple[str, ...]
    devices: int
    payload: int
    times: int = 1
    certain: bool = True
    share: float = 1.0
    ring: str = ""
    name: str = ""
    source: str = ""
    pairs: tuple[tuple[int, int], ...] = ()
    flops: float = 0.0

    @property
    def sent(self) -> int:
        """Bytes that each device sends in a step on average, by the ring algorithms (Patarasuk & Yuan 2009)."""
        part = {"collective-permute": 1.0, "all-reduce": 2 * (self.devices - 1) / self.devices}
        return round(self.payload * self.times * self.share * part.get(self.kind, (self.devices - 1) / self.devices))


def collectives(
    compiled: jax.stages.Compiled | str, sizes: Mapping[str, int], across: str | None = None
) -> list[Collective]:
    """Return the collectives of a compiled program, in the program's order.

    Compile for a TPU to see what runs there (`compile_for`): the CPU compiler widens bfloat16 to float32 and replaces
    reduce-scatters by all-reduces.

    Args:
      compiled: a `jax.stages.Compiled`, or its `as_text()`.
      sizes: size by mesh axis, in mesh order, of the mesh it was compiled for (`Layout.sizes`).
      across: the mesh axis that goes over several TPU slices (`Layout.across`). Transfers between slices count as
        collectives along it, of the shard that each device has after the collectives within its slice.

    Returns:
      a `Collective` for each instruction that communicates.

    Raises:
      LayoutError: the program was compiled for another mesh, or it goes over several slices and `across` is missing.
    """
    text = compiled if isinstance(compiled, str) else compiled.as_text()
    assert text is not None  # of backends without HLO
    program = Program(text, sizes, across)
    return list(program.walk(program.entry, 1, True, "", ""))


def sent_by_axis(collectives: list[Collective]) -> dict[tuple[str, ...], int]:
    """Return the bytes that each device sends, by the mesh axes of the collectives."""
    total: dict[tuple[str, ...], int] = defaultdict(int)
    for c in collectives:
        total[c.axes] += c.sent
    return dict(total)


def array_bytes(text: str) -> int:
    """Return the bytes of a type as HLO prints it: `f32[2,3]` or a tuple of such."""
    bits = 0
    for name, dims in _ARRAY.findall(text):
        width = next((b for prefix, b in _BITS.items() if name.startswith(prefix)), None) or int(name[1:])
        bits += width * math.prod(int(d) for d in dims.split(",") if d)
    return -(-bits // 8)


class Program:
    """An HLO module, parsed from its text.

    Args:
      text: the module, as `jax.stages.Compiled.as_text()` prints it.
      sizes: size by mesh axis, in mesh order.
      across: the mesh axis that goes over several TPU slices, if any.

    Attributes:
      computations: by name, the texts of a computation's instructions in order, without "name = ".
      made: text of each instruction by its name.
      order: by computation, the names of its instructions in order.
      roots: by computation, the name of its root instruction.
      header: the module's first line.
      entry: name of the entry computation.
      tables: the module's tables of files and stack frames, by name and row.
    """

    def __init__(self, text: str, sizes: Mapping[str, int], across: str | None = None):
        self.across = across
        self.names, self.shape = tuple(sizes), tuple(sizes.values())
        self.computations: dict[str, list[str]] = {}
        self.made: dict[str, str] = {}
        self.order: dict[str, list[str]] = {}
        self.roots: dict[str, str] = {}
        self.header, self.entry = text.partition("\n")[0], ""
        self.tables: dict[str, dict[int, str]] = defaultdict(dict)
        self.chains: dict[tuple[str, ...], str] = {}
        body: list[str] | None = None
        inside = table = ""
        for line in text.splitlines():
            if line.endswith("{") and (head := re.match(r"(ENTRY )?%?([^\s(]+) ?\(.*->", line)):
                inside, body = head[2], self.computations.setdefault(head[2], [])
                self.entry = head[2] if head[1] else self.entry
            elif line.startswith("}"):
                body = None
            elif body is not None and (op := re.match(r"\s+(ROOT )?%?([\w.-]+) = (.*)", line)):
                body.append(op[3])
                self.made[op[2]] = op[3]
                self.order.setdefault(inside, []).append(op[2])
                self.roots.update({inside: op[2]} if op[1] else {})
            elif body is None and re.fullmatch(r"[A-Z]\w+", line):
                table = line
            elif body is None and (row := re.match(r"(\d+) (.*)", line)):
                self.tables[table][int(row[1])] = row[2]

    def walk(self, computation: str, times: int, certain: bool, ring: str, caller: str) -> Iterator[Collective]:
        """Yield the collectives of a computation.

        Args:
          computation: its name.
          times: how often a step runs it.
          certain: whether `times` is exact.
          ring: what a ring of permutes stands for, if the computation is the body of one.
          caller: text of the calling instruction, whose name and source stand in for missing ones.
        """
        for line in self.computations.get(computation, ()):
            if op := COLLECTIVE.search(line):
                # on TPUs the start, the fusions and the end of an asynchronous collective all contain it: count one
                chain = re.search(r"channel_id=(\d+),.*chain_id=\"(\d+)\"", line)
                if chain and self.chains.setdefault(chain.groups(), line) != line:
                    continue
                yield self._collective(line, op, times, certain, ring, computation, caller)
            elif transfer := _BETWEEN_SLICES.search(line):
                yield self._between_slices(line, transfer, times, certain, caller)
            elif loop := re.search(r" while\(.*condition=%?([\w.-]+), body=%?([\w.-]+)", line):
                trips = self._trips(line, loop[1], loop[2])
                yield from self.walk(loop[2], times * (trips or 1), certain and trips is not None, _ring(loop[2]), line)
            elif branches := re.search(
                r"branch_computations=\{([^}]*)\}|true_computation=(\S+), false_computation=(\S+)", line
            ):
                for name in re.findall(r"[\w.-]+", " ".join(filter(None, branches.groups()))):
                    yield from self.walk(name, times, False, ring, line)
            elif call := re.search(r"\b(?:calls|to_apply|called_computations)=\{?%?([\w.-]+)", line):
                if not re.search(r" (reduce|scatter|sort|map|select-and-scatter|reduce-window)\(", line):
                    yield from self.walk(call[1], times, certain, ring, line)

    def _collective(
        self, line: str, op: re.Match[str], times: int, certain: bool, ring: str, computation: str, caller: str
    ) -> Collective:
        kind = op[1].removeprefix("ragged-")
        operands = re.findall(r"%([\w.-]+)", line[op.end() :].split(")")[0])
        size = sum(array_bytes(type_of(self.made[o])) for o in operands)
        if op[1].startswith("ragged"):  # operands are the input, the output buffer and row counts
            size = min(array_bytes(type_of(self.made[o])) for o in operands[:2])
        axes, devices = self.along(line)
        if kind == "all-reduce" and computation.startswith("all-reduce-scatter"):
            kind = "reduce-scatter"  # TPU fusion of an all-reduce and the slice of each device's shard
        payload = size * devices if kind == "all-gather" else size
        named = next(filter(_named, (line, *map(self._maker, operands), caller)), None)
        name = _named(named) if named else None
        return Collective(
            kind,
            axes,
            devices,
            payload,
            times,
            certain,
            1.0,
            ring,
            name[1] if name else "",
            self.source(line) or (self.source(named) if named else "") or self.source(caller),
            tuple((a, b) for a, b in _pairs(line)),
        )

    def _between_slices(self, line: str, transfer: re.Match[str], times: int, certain: bool, caller: str) -> Collective:
        """Return a collective between TPU slices, which compiles to a send to the host and a receive."""
        if self.across is None:
            raise LayoutError(
                "the program goes over several slices; name the mesh axis that does with across=layout.across"
            )
        kind, listed = transfer[3].lower().replace("_", "-"), map(int, transfer[2].split(","))
        slices = len({i // _SLICE if i >= _SLICE else i for i in listed})
        kind = "collective-permute" if kind == "one-to-one" else kind
        size = array_bytes(type_of(self.made[transfer[1]]))
        name = re.search(r'op_name="([^"]*)"', line) or re.search(r'op_name="([^"]*)"', caller)
        return Collective(
            kind,
            (self.across,),
            slices,
            size * slices if kind == "all-gather" else size,
            times,
            certain,
            name=name[1] if name else "",
            source=self.source(line) or self.source(caller),
        )

    def _maker(self, operand: str) -> str:
        """Return the instruction that computes an operand, skipping copies, casts and reshapes without a name.

        Where the TPU compiler makes an all-reduce of a reduce-scatter, the name stays with the operand.
        """
        for _ in range(16):
            text = self.made.get(operand, "")
            moved = None if _named(text) else re.search(rf" (?:{'|'.join(_MOVES)})\(%([\w.-]+)", text)
            if moved is None:
                return text
            operand = moved[1]
        return ""

    def along(self, line: str) -> tuple[tuple[str, ...], int]:
        """Return the mesh axes of a collective and the number of devices in a group, from its text."""
        return self._axes(_pairs(line) or self._groups(line))

    def _trips(self, line: str, condition: str, body: str) -> int | None:
        """Return the number of iterations of a loop, `None` where it cannot be read."""
        if known := re.search(r'known_trip_count[":{]+n"?:"?(\d+)', line):
            return int(known[1])
        # scans and the compiler's own loops count from 0 up to a limit
        test = next((t for t in self.computations.get(condition, ()) if " compare(" in t and "direction=LT" in t), "")
        at, limit = None, None
        for operand in re.findall(r"%([\w.-]+)", test.partition(" compare(")[2].split(")")[0]):
            element = re.search(r"get-tuple-element\(.*index=(\d+)", self.made[operand])
            at, limit = (int(element[1]) if element else at), (limit if element else self._constant(operand))
        last = self.computations.get(body, [""])[-1].rpartition(" tuple(")[2].split(")")[0]
        after = re.findall(r"%([\w.-]+)", last)
        if at is None or limit is None or at >= len(after):
            return None
        step = self._step(after[at])
        return None if step is None else -(-limit // step)

    def _step(self, name: str) -> int | None:
        """Return the increment of a loop's counter, from the instruction that computes its next value."""
        text = self.made[name]
        if called := re.search(r" fusion\(.*calls=%?([\w.-]+)", text):
            text = self.computations[called[1]][-1]
        if not (operands := re.search(r" add\(([^)]*)\)", text)):
            return None
        steps = [self._constant(o) for o in re.findall(r"%([\w.-]+)", operands[1])]
        return next((s for s in steps if s), None)

    def _constant(self, name: str) -> int | None:
        """Return the value of an integer constant, `None` for another instruction."""
        value = re.match(r"[su]\d+\[\]\S* constant\((\d+)\)", self.made[name])
        return int(value[1]) if value else None

    def _groups(self, line: str) -> list[list[int]]:
        """Return the groups of device numbers of a collective, in any of the forms that HLO prints."""
        everyone = [list(range(math.prod(self.shape)))]
        if listed := re.search(r"replica_groups=\{(\{.*?\})\}", line):
            return [[int(i) for i in re.findall(r"\d+", g)] for g in re.findall(r"\{([^}]*)\}", listed[1])]
        if iota := re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", line):
            shape, dims = _ints(iota[1]), _ints(iota[2])
            ids = np.arange(math.prod(dims)).reshape(dims)
            return (ids.transpose(_ints(iota[3])) if iota[3] else ids).reshape(shape).tolist()
        if meshed := re.search(r"replica_groups=mesh\[(.*?)\](.*?)\{([^}]*)\}", line):
            sizes = {n: int(s) for n, s in re.findall(r"'(\w+)'=(\d+)", meshed[1])}
            ids = np.arange(math.prod(sizes.values()))
            if turned := re.search(r"device_ids=\(\[([\d,]+)\]T\(([\d,]+)\)\)", meshed[2]):
                ids = ids.reshape(_ints(turned[1])).transpose(_ints(turned[2])).ravel()
            elif order := re.search(r"device_ids=\(([\d,]+)\)", meshed[2]):
                ids = np.asarray(_ints(order[1]))
            return _along(ids, sizes, re.findall(r"'(\w+)'(?::\((\d+)\)(\d+))?", meshed[3]))
        return everyone

    def _axes(self, groups: list[list[int]]) -> tuple[tuple[str, ...], int]:
        """Return the mesh axes along which the members of a group differ, and the size of the largest group."""
        count = math.prod(self.shape)
        if max(i for g in groups for i in g) >= count:
            raise LayoutError(
                f"the program's devices are numbered up to {max(map(max, groups))}, and the mesh "
                f"{dict(zip(self.names, self.shape, strict=True))} has {count}; pass the mesh it was compiled for"
            )
        places = [np.stack(np.unravel_index(g, self.shape), axis=1) for g in groups]
        differs = np.any([p.min(0) != p.max(0) for p in places], axis=0)
        return tuple(n for n, d in zip(self.names, differs, strict=True) if d), max(map(len, groups))

    def source(self, line: str) -> str:
        """Return "file:line" of the innermost frame outside of `PLUMBING`; "" where there is none."""
        if plain := re.search(r'source_file="([^"]*)" source_line=(\d+)', line):
            return f"{plain[1]}:{plain[2]}"
        if not (frame := re.search(r"stack_frame_id=(\d+)", line)):
            return ""
        at, frames = int(frame[1]), self.tables["StackFrames"]
        while at in frames:
            location, parent = (int(i) for i in re.findall(r"=(\d+)", frames[at])[:2])
            file, _, row = (int(i) for i in re.findall(r"=(\d+)", self.tables["FileLocations"][location])[:3])
            path = self.tables["FileNames"][file].strip('"')
            if not any(part in path for part in PLUMBING):
                return f"{path}:{row}"
            if parent - 1 in (at, 0):  # `parent_frame_id` is one more than the frame's row
                break
            at = parent - 1
        return ""


PLUMBING = ("site-packages", "jaxscale/layout/", "jaxscale/parallel/", "jaxscale/nn/linear.py", "pallas_kernels/")
"""Parts of paths whose lines are never a source: they multiply and lay out arrays on behalf of their callers."""


def _named(instruction: str) -> re.Match[str] | None:
    """Match the name of the JAX operation in an instruction's text."""
    return re.search(r'op_name="([^"]*)"', instruction)


def type_of(instruction: str) -> str:
    """Return the type that an instruction's text begins with."""
    if not instruction.startswith("("):
        return instruction.split(" ", 1)[0]
    depth = 0
    for i, c in enumerate(instruction):
        depth += (c == "(") - (c == ")")
        if not depth:
            return instruction[: i + 1]
    return instruction


def _pairs(instruction: str) -> list[list[int]]:
    """Return pairs of sending and receiving device from a permute's text."""
    listed = re.search(r"source_target_pairs=\{(.*?)\}\}", instruction)
    return [[int(i) for i in re.findall(r"\d+", p)] for p in listed[1].split("},")] if listed else []


def _ring(body: str) -> str:
    """Return what a ring of permutes stands for, from the name of its loop's body; "" for another loop."""
    match = re.search(r"windowed_dot_general_body_(rs|ag)", body)
    return {"rs": "reduce-scatter", "ag": "all-gather"}[match[1]] if match else ""


def _ints(text: str) -> list[int]:
    return [int(i) for i in text.split(",") if i]


def _along(ids: np.ndarray, sizes: dict[str, int], over: list[tuple[str, str, str]]) -> list[list[int]]:
    """Return groups along axes of a mesh in HLO's own naming, where a part of an axis is written `name:(before)size`.

    Args:
      ids: device numbers in the order of that mesh.
      sizes: size by axis.
      over: axes as (name, before, size), the last two "" for a whole axis.
    """
    shape: list[int] = []
    chosen: list[int] = []
    for name, size in sizes.items():
        parts = [(int(before), int(part)) for n, before, part in over if n == name and part]
        whole = any(n == name and not part for n, _, part in over)
        if not parts:
            chosen += [len(shape)] if whole else []
            shape.append(size)
            continue
        at = 1
        for before, part in sorted(parts):
            if before > at:
                shape.append(before // at)
            chosen.append(len(shape))
            shape.append(part)
            at = before * part
        if at < size:
            shape.append(size // at)
    rest = [i for i in range(len(shape)) if i not in chosen]
    group = math.prod(shape[i] for i in chosen)
    return ids.reshape(shape).transpose(rest + chosen).reshape(-1, group).tolist()
