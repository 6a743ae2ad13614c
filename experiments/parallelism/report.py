"""Tables and picture of this study, from the results of `measure.py` and the schedule simulator."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ring
from measure import CASES, MODELS, ORDER, ROWS, TOKENS

from jaxscale.layout import SCHEDULES, simulate

GIB = 2**30
Cells = dict[tuple[str, str, int], dict[str, Any]]
AXES = {"data": "#8fb8de", "fsdp": "#5b8cc0", "tensor": "#f4c27a", "context": "#8fce9b", "expert": "#d98cb3",
        "pipeline": "#a58fd0"}  # fmt: skip
PARTS = {"params": "#5b8cc0", "opt_state": "#8fb8de", "temporaries": "#f4c27a"}
FIELDS = {"params": "parameters", "opt_state": "optimizer state", "temporaries": "temporaries"}


def by_axis(row: dict[str, Any]) -> dict[str, int]:
    """Return mesh axes -> bytes that a device sends along them in a step."""
    sums: dict[str, int] = defaultdict(int)
    for c in row["collectives"]:
        sums[" x ".join(c["axes"])] += c["sent"]
    return dict(sums)


def certain(row: dict[str, Any]) -> int:
    """Return the bytes of `by_axis` that are sent unconditionally."""
    return sum(c["sent"] for c in row["collectives"] if c["certain"])


def by_kind(row: dict[str, Any]) -> dict[str, int]:
    """Return collective -> number of executions in a step."""
    sums: dict[str, int] = defaultdict(int)
    for c in row["collectives"]:
        sums[c["kind"]] += c["times"]
    return dict(sums)


def tables(cells: Cells) -> str:
    """Return all tables of the README."""
    return "\n\n".join([*(f"### {model}\n\n{layouts(cells, model)}" for model in MODELS), published(cells)])


def layouts(cells: Cells, model: str) -> str:
    """Return the table with a row for each layout of a model."""
    out = [
        "| layout | mesh | state: parameters + gradients + optimizer | arguments + temporaries | sent, by axis | "
        "collectives |",
        "|---|---|---|---|---|---|",
    ]
    for name, case in CASES.items():
        row = next((r for (m, c, _), r in cells.items() if (m, c) == (model, name)), None)
        what = f"| {case.what} | `{case.layout['mesh']}` | "
        if row is None:
            planned = any((m, c) == (model, name) for m, c, _ in ORDER)
            out.append(what + ("not compiled | | | |" if planned else "no such cell | | | |"))
            continue
        state = " + ".join(f"{n / GIB:.2f}" for n in row["state"].values())
        layers = "" if row["depth"] == 32 else f" ({row['depth']} layers)"
        if "does_not_fit" in row:
            out.append(f"{what}{state}{layers} | does not fit: {row['does_not_fit'] / GIB:.0f} | | |")
            continue
        most = sorted(by_axis(row).items(), key=lambda i: -i[1])
        sent = ", ".join(f"{a} {n / GIB:.2f}" for a, n in most if n > 2**24)
        sent = sent if certain(row) == sum(by_axis(row).values()) else f"at most {sent}"
        kinds = ", ".join(f"{n} {k}" for k, n in sorted(by_kind(row).items()))
        compiled = f"{row['arguments'] / GIB:.2f} + {row['temporaries'] / GIB:.2f}"
        out.append(f"{what}{state}{layers} | {compiled} | {sent} | {kinds} |")
    return "\n".join(out)


def published(cells: Cells) -> str:
    """Return the table that compares papers' formulas with what was counted here."""
    llama = {c: r for (m, c, _), r in cells.items() if m == MODELS[0]}
    rows = [*_states(llama), *_volumes(llama), *_streams(llama), *_rings(), *_bubbles()]
    head = ["| published | formula | by the formula | counted | in |", "|---|---|---|---|---|"]
    return "\n".join([*head, *("| " + " | ".join(r) + " |" for r in rows)])


def _states(llama: dict[str, dict[str, Any]]) -> Iterator[tuple[str, ...]]:
    for stage, case, formula, over in (
        ("0", "data", "16 Ψ", (1, 1, 1)),
        ("1 and 2", "zero2", "4 Ψ + 12 Ψ / N", (1, 64, 64)),
        ("3", "fsdp", "16 Ψ / N", (64, 64, 64)),
    ):
        if r := llama.get(case):
            expected = sum(b * r["params"] / n for b, n in zip((4, 4, 8), over, strict=True))
            counted = sum(r["state"].values())
            yield f"ZeRO-{stage}, bytes of state, N = 64", formula, f"{expected:,.0f}", f"{counted:,}", "rules"


def _volumes(llama: dict[str, dict[str, Any]]) -> Iterator[tuple[str, ...]]:
    tables = 2 * 128256 * 4096
    for stage, cases, formula in (
        ("0", ("data, 4", "data"), "2 Ψ elements of 4 bytes"),
        ("1 and 2", ("zero2, 4", "zero2"), "2 Ψ elements of 4 bytes"),
        ("3", ("fsdp, 4", "fsdp"), "3 Ψ elements, 2 of them of 2 bytes"),
    ):
        for case in cases:
            if (r := llama.get(case)) is None or "collectives" not in r:
                continue
            n = 4 if case.endswith(", 4") else 64
            gathered = 2 * (2 - tables / r["params"])  # tables are used once each way, layers once more
            expected = (8 if stage != "3" else gathered + 4) * (n - 1) / n
            sent = sum(by_axis(r).values()) / r["params"]
            yield (
                f"ZeRO-{stage}, bytes a device sends for each parameter, N = {n}", formula, f"{expected:.2f}",
                f"{sent:.2f}", "compiled step",
            )  # fmt: skip


def _streams(llama: dict[str, dict[str, Any]]) -> Iterator[tuple[str, ...]]:
    if {"tensor", "sequence"} <= llama.keys():
        stream = ROWS // 16 * TOKENS * 4096 * 2 * 32
        less = llama["tensor"]["temporaries"] - llama["sequence"]["temporaries"]
        yield (
            "Megatron-LM, memory saved by sequence sharding, GiB, t = 4", "(1 - 1/t) of the layers' inputs",
            f"{stream * 3 / 4 / GIB:.2f}", f"{less / GIB:.2f}", "compiled step",
        )  # fmt: skip


def _rings() -> Iterator[tuple[str, ...]]:
    held = {n: r["arguments"] + r["outputs"] + r["temporaries"] for n, r in ring.read().items()}
    for n, size in held.items():
        if n > 1 and 1 in held:
            name = f"RSA, bytes of one layer's attention relative to one chip, P = {n}"
            yield name, "1 / P", f"{1 / n:.3f}", f"{size / held[1]:.3f}", "compiled attention"


def _bubbles() -> Iterator[tuple[str, ...]]:
    for k, m in ((4, 8), (4, 32), (8, 32)):
        expected, bubble = (k - 1) / (m + k - 1), simulate(SCHEDULES["gpipe"](k, m)).bubble
        yield (
            f"GPipe, bubble, K = {k}, M = {m}",
            "(K - 1) / (M + K - 1)",
            f"{expected:.4f}",
            f"{bubble:.4f}",
            "simulator",
        )
    k, m = 4, 16
    for v in (2, 4):
        bubble = simulate(SCHEDULES["interleaved"](k, m, chunks=v)).bubble
        name = f"Megatron-LM, interleaved {v} times, idle time over ideal, p = {k}, m = {m}"
        yield name, "(p - 1) / (v m)", f"{(k - 1) / (v * m):.4f}", f"{bubble / (1 - bubble):.4f}", "simulator"
    bubble = simulate(SCHEDULES["zb-h1"](k, m)).bubble
    name, formula = f"Zero bubble (ZB-H1), the same, p = {k}, m = {m}", "(p - 1) (F + B - W) / (m (F + B + W))"
    yield name, formula, f"{(k - 1) / (3 * m):.4f}", f"{bubble / (1 - bubble):.4f}", "simulator"


def plot(cells: Cells, path: Path) -> None:
    """Draw memory, and bytes sent by axis, as a bar for each compiled cell."""
    import matplotlib.pyplot as plt

    order = [(m, c) for m in MODELS for c in CASES]
    compiled = {(m, c): r for (m, c, _), r in cells.items() if c in CASES and "collectives" in r}
    rows = [(c, compiled[m, c]) for m, c in order if (m, c) in compiled]
    size = (10, 0.42 * len(rows) + 1)
    figure, (left, right) = plt.subplots(1, 2, figsize=size, sharey=True, layout="constrained")
    labels = []
    for y, (name, row) in enumerate(rows):
        held = {**row["state"], "temporaries": row["temporaries"]}
        _stack(left, y, {k: held[k] for k in PARTS}, PARTS)
        sent = by_axis(row)
        _stack(right, y, sent, {a: AXES[a.split(" x ")[0]] for a in sent})
        if certain(row) < sum(sent.values()):
            right.text(sum(sent.values()) / GIB, y, " at most", va="center", fontsize=7)
        layers = "" if row["depth"] == 32 else f", {row['depth']} layers"
        labels.append(f"{row['model'].split('_')[0]}{layers}: {CASES[name].layout['mesh']}\n{CASES[name].what}")
    left.set_yticks(range(len(rows)), labels, fontsize=7)
    left.set(title="GiB a chip holds", ylim=(len(rows) - 0.5, -0.5))
    right.set(title="GiB a chip sends in a step", xlim=(0, 1.15 * max(sum(by_axis(r).values()) for _, r in rows) / GIB))
    for ax, words, colors in ((left, FIELDS.values(), PARTS), (right, AXES, AXES)):
        patches = [plt.Rectangle((0, 0), 1, 1, color=c) for c in colors.values()]
        ax.legend(patches, list(words), fontsize=7, frameon=False)
    figure.savefig(path, dpi=90)


def _stack(ax: Any, y: int, parts: dict[str, int], colors: dict[str, str]) -> None:
    at = 0.0
    for name, size in parts.items():
        ax.barh(y, size / GIB, left=at, height=0.7, color=colors[name])
        at += size / GIB
