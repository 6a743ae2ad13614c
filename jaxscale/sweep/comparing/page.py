"""The page of a report: one self-contained HTML file, in which all text of runs is escaped."""

from __future__ import annotations

import base64
import html
import importlib.resources
import io
import json
import math
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxscale.errors import RunError
from jaxscale.sweep.base import BAD, FAILED
from jaxscale.sweep.comparing.differences import (
    Curves,
    Group,
    best,
    curves_of,
    differing,
    groups_of,
    is_loss,
    last,
    metrics_of,
    objective_of,
    shared,
    short_names,
    worded,
)
from jaxscale.sweep.comparing.folders import INTERRUPTED, SEED, UNKNOWN, Ran
from jaxscale.sweep.comparing.table import mesh
from jaxscale.train.expert_load import dead, draw_experts
from jaxscale.train.goodput import PARTS, words
from jaxscale.units import span
from jaxscale.version import __version__

GENERATOR = "jaxscale report"
"""Marks pages and pictures of jaxscale's, so that a report overwrites no other files."""

AXES = 9
"""At most this many differing bindings are drawn as parallel axes."""

SAMPLE = 1500
"""Number of characters of a sample on the page."""

CARDS = 6
"""Number of samples that are visible at first; the rest are folded."""


def page(
    runs: Sequence[Ran],
    title: str,
    metric: str | None = None,
    notes: Iterable[str] = (),
    times: Mapping[str, str] | None = None,
) -> str:
    """Return the HTML of a report.

    Args:
      runs: the runs, in the order of the page.
      title: title of the page.
      metric: the metric to compare by, lower being better; by default a held-out loss if there is one.
      notes: sentences for the foot of the page.
      times: a table of step times, as text, by the run's name.

    Raises:
      RunError: no run has the metric.
    """
    objective = objective_of(runs, metric)
    differs = differing(runs)
    groups = groups_of(runs, differs)
    names = [name for name in metrics_of(runs) if name != objective]
    metrics = [curves_of(runs, name) for name in ([objective] if objective else []) + names]
    axes = parallel_axes(runs, differs, objective)
    data = {
        "runs": [run.name for run in runs],
        "groups": [_group(group, runs, objective) for group in groups],
        "metrics": [_curves(curves, groups) for curves in metrics],
        "parallel": {"axes": axes} if axes else None,
    }
    sections = [
        _section("Curves", '<div id="curves"></div>') if metrics else _section("Curves", "<p>No run has numbers.</p>"),
        _section("Differing settings and results", '<div id="parallel"></div>') if axes else "",
        _section("Runs", _runs_table(runs, objective)),
        _section("Differences in config", _differences(runs, differs, objective)) if len(runs) > 1 else "",
        _samples(runs, groups),
        _wall_time(runs),
        _times(times or {}),
        _experts(runs),
        _failures(runs),
        _section("Hardware and versions", _facts(runs)),
        _section(
            "Settings in common" if len(runs) > 1 else "Settings",
            _folded(f"{len(shared(runs))} bindings", _definitions({k: repr(v) for k, v in shared(runs).items()})),
        ),
    ]
    stamp = f"Made by jaxscale {__version__} on {time.strftime('%Y-%m-%d %H:%M %Z').strip()}."
    parts = {
        "generator": GENERATOR,
        "title": _safe(title),
        "style": _own("page.css"),
        "lead": _safe(_lead(runs, groups, objective)),
        "sections": "\n".join(sections),
        "foot": _safe(" ".join([stamp, *notes])),
        "data": json.dumps(data, allow_nan=False).replace("<", "\\u003c"),
        "script": _own("page.js"),
    }
    text = re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], _own("page.html"))
    return text.encode(errors="replace").decode()


def parallel_axes(runs: Sequence[Ran], differs: Mapping[str, list[Any]], objective: str | None) -> list[dict[str, Any]]:
    """Return differing bindings as parallel axes, with the objective's last value as the last axis.

    Args:
      runs: the runs.
      differs: as from `differing`.
      objective: the metric to compare by.

    Returns:
      the axes as the page's JSON has them; empty if only seeds differ or no run has a finite objective.
    """
    names = [name for name in differs if name != SEED][:AXES]
    if not names or objective is None:
        return []
    columns = {name: differs[name] for name in names}
    columns[objective] = [_finite(last(run, objective)) for run in runs]
    if all(value is None for value in columns[objective]):
        return []
    labels = [*short_names(names), objective]
    axes = [_axis(*pair) for pair in zip(columns, labels, columns.values(), strict=True)]
    axes[-1]["missing"] = "above"  # lower is better, so runs without a value do not belong below
    return axes


def _axis(name: str, label: str, values: list[Any]) -> dict[str, Any]:
    known = [v for v in values if v is not None]
    numeric = all(isinstance(v, int | float) and not isinstance(v, bool) and math.isfinite(v) for v in known)
    log = numeric and min(known) > 0 and max(known) >= 4 * min(known)
    cells = [v if v is None or numeric else worded(v) for v in values]
    return {"name": name, "label": label, "numeric": numeric, "log": log, "missing": "below", "values": cells}


def _group(group: Group, runs: Sequence[Ran], objective: str | None) -> dict[str, Any]:
    ends = [_finite(last(runs[r], objective)) for r in group.runs] if objective else []
    known = [end for end in ends if end is not None]
    return {"label": group.label, "runs": group.runs, "best": _finite(sum(known) / len(known)) if known else None}


def _curves(curves: Curves, groups: Sequence[Group]) -> dict[str, Any]:
    values = [
        [_json_number(v) if t else None for v, t in zip(*row, strict=True)]
        for row in zip(curves.values, curves.present, strict=True)
    ]
    bands: list[dict[str, Any] | None] = []
    for group in groups:
        if len(group.runs) == 1:
            bands.append(None)
            continue
        mean, low, high, count = (x.tolist() for x in curves.band(group.runs))
        present = np.any(curves.present[list(group.runs)], axis=0)
        middle = [_json_number(v) if t else None for v, t in zip(mean, present, strict=True)]
        bands.append({"mid": middle, "low": [*map(_finite, low)], "high": [*map(_finite, high)], "n": count})
    steps = curves.steps.tolist()
    return {"name": curves.metric, "steps": steps, "thinned": curves.thinned, "runs": values, "bands": bands}


def _finite(value: float | None) -> float | None:
    return float(f"{value:.6g}") if value is not None and math.isfinite(value) else None


def _json_number(value: float) -> float | str:
    return float(f"{value:.6g}") if math.isfinite(value) else "nan"


# --- sections ---------------------------------------------------------------------------------------------------------


def _lead(runs: Sequence[Ran], groups: Sequence[Group], objective: str | None) -> str:
    states = [run.state for run in runs]
    counts = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
    words = [f"{len(runs)} run{'s' * (len(runs) > 1)}: {counts}."]
    if len(groups) < len(runs):
        words.append(f"They have {len(groups)} different setting{'s' * (len(groups) > 1)}, not counting seeds.")
    ends = [(value, run.name) for run in runs if objective and (value := _finite(last(run, objective))) is not None]
    if ends:
        value, name = min(ends)
        words.append(
            f"{'Lowest' if len(runs) > 1 else 'Last'} {objective}: {value:.4g}" + f" ({name})." * (len(runs) > 1)
        )
    return " ".join(words)


def _runs_table(runs: Sequence[Ran], objective: str | None) -> str:
    losses = [name for name in metrics_of(runs) if name == objective or is_loss(name)]
    heads = ["run", "state", *losses]
    heads += [f"best {objective}", "at step"] if objective else []
    heads += ["steps", "parameters", "tokens/s", "ms a step", "wall time", "goodput", "started"]
    rows = []
    for i, run in enumerate(runs):
        lowest = best(run, objective) if objective else None
        seconds = run.step_seconds
        cells = [
            _cell(run.state, classes="bad" if run.state in (*BAD, INTERRUPTED, UNKNOWN) else ""),
            *(_number(last(run, name)) for name in losses),
            *([_number(lowest and lowest[1]), _number(lowest and lowest[0])] if objective else []),
            _number(run.steps),
            _number(run.info.get("parameters")),
            _number(run.median("tokens_per_second")),
            _number(None if seconds is None else seconds * 1000),
            _cell("" if run.seconds is None else span(run.seconds), run.seconds, "n"),
            _cell("", classes="n") if run.goodput is None else _share(run.goodput["share"]),
            _cell(str(run.info.get("started", "")).replace("T", " ")[:16]),
        ]
        rows.append(_row(run.name, cells, i))
    note = "<p class='note'>Rates are medians over steps, without the first. Click a heading to sort.</p>"
    return _table(heads, rows, numeric=set(heads[2:-1])) + note


def _differences(runs: Sequence[Ran], differs: Mapping[str, list[Any]], objective: str | None) -> str:
    if not differs:
        return "<p>None: every binding that these runs have in common is the same.</p>"
    if len(differs) > len(runs):
        rows = [_row(name, [_value(v) for v in values]) for name, values in differs.items()]
        return _table(["binding", *(run.name for run in runs)], rows, sortable=False)
    heads = ["run", *differs, *([objective] if objective else [])]
    rows = []
    for i, run in enumerate(runs):
        cells = [_value(values[i]) for values in differs.values()]
        rows.append(_row(run.name, [*cells, *([_number(last(run, objective))] if objective else [])], i))
    numeric = {n for n, v in differs.items() if all(isinstance(x, int | float) for x in v if x is not None)}
    return _table(heads, rows, numeric=numeric | {objective or ""})


def _samples(runs: Sequence[Ran], groups: Sequence[Group]) -> str:
    labels = {r: group.label for group in groups for r in group.runs}
    cards = []
    for r, run in enumerate(runs):
        if not run.samples:
            continue
        sample = run.samples[-1]
        prompt, text, step = str(sample.get("prompt", "")), sample["text"], sample.get("step")
        more = "…" if len(text) > SAMPLE else ""
        begun = prompt if text.startswith(prompt) else ""
        marked = f"<mark>{_safe(begun)}</mark>{_safe(text[len(begun) : SAMPLE])}{more}"
        where = run.name if labels[r] in ("", run.name) else f"{run.name} · {labels[r]}"
        cards.append(f"<div><h3>{_safe(where)} · step {_safe(step)}</h3><pre>{marked}</pre></div>")
    first, rest = (f'<div class="samples">{"".join(some)}</div>' for some in (cards[:CARDS], cards[CARDS:]))
    more = _folded(f"{len(cards) - CARDS} more", rest) if len(cards) > CARDS else ""
    return _section("Samples", first + more) if cards else ""


def _wall_time(runs: Sequence[Ran]) -> str:
    """Where the wall time of each run went: a bar of its parts, and a table of their seconds."""
    counted = [(run, run.goodput) for run in runs if run.goodput is not None]
    if not counted:
        return ""
    parts = [part for part in PARTS if any(entry["seconds"].get(part) for _, entry in counted)]
    rows = []
    for run, entry in counted:
        wall, seconds = entry["wall_seconds"], entry["seconds"]
        bar = "".join(
            f"<i class='part{list(PARTS).index(part)}' style='width:{seconds.get(part, 0) / (wall or 1):.2%}' "
            f"title='{_safe(f'{words(part)}: {span(seconds.get(part, 0))}')}'></i>"
            for part in parts
        )
        cells = [_cell(span(seconds.get(part, 0)), seconds.get(part, 0), "n") for part in parts]
        drawn = f"<td><div class='parts'>{bar}</div></td>"
        rows.append(_row(run.name, [drawn, _share(entry["share"]), *cells], runs.index(run)))
    names = [words(part) for part in parts]
    colors = "".join(
        f"<i class='part{list(PARTS).index(part)}'></i>{name} " for part, name in zip(parts, names, strict=True)
    )
    note = "Goodput is the time of steps that count, over the wall time of all sessions."
    table = _table(["run", "", "goodput", *names], rows, numeric={"goodput", *names})
    return _section("Wall time", f"{table}<p class='note colors'>{colors}</p><p class='note'>{note}</p>")


def _times(times: Mapping[str, str]) -> str:
    tables = [f"<div><h3>{_safe(run)}</h3><pre>{_safe(table)}</pre></div>" for run, table in times.items()]
    return _section("A step's time", "".join(tables)) if tables else ""


def _experts(runs: Sequence[Ran]) -> str:
    """The load of experts by layer at the last recorded step of each run, experts without tokens, and a picture."""
    parts = []
    for run in runs:
        if not any(run.experts.values()):
            continue
        without, step = dead(run.experts), max(run.experts)
        rows = [
            _row(
                str(layer),
                [
                    _number(len(at.load)),
                    _number(at.max_load),
                    _number(at.entropy),
                    _share(at.evenness),
                    _cell(", ".join(map(str, without.get(layer, ()))), classes="bad"),
                ],
            )
            for layer, at in run.experts[step].items()
        ]
        heads = ["layer", "experts", "largest load / mean", "router entropy", "of the largest entropy", "dead experts"]
        table = _table(heads, rows, numeric=set(heads[1:-1]))
        parts.append(f"<div><h3>{_safe(run.name)}, step {step}</h3>{table}{_drawn(run)}</div>")
    note = "Dead experts have no token in the last tenth of the recorded steps; entropies are in nats."
    return _section("Experts", f"{''.join(parts)}<p class='note'>{note}</p>") if parts else ""


def _drawn(run: Ran) -> str:
    """The loads over steps, as a picture within the page; empty without matplotlib."""
    data = io.BytesIO()
    try:
        draw_experts(run.experts, run.name).savefig(data, format="png")
    except RunError:
        return ""
    picture = base64.b64encode(data.getvalue()).decode()
    return f"<img alt='load of each expert over steps' style='max-width: 100%' src='data:image/png;base64,{picture}'>"


def _failures(runs: Sequence[Ran]) -> str:
    rows = []
    for run in runs:
        errors = [*([run.error] if run.error else []), *(f"unreadable: {p}" for p in run.problems)]
        if run.state == FAILED and not run.error:
            errors.insert(0, "failed; its folder has no error message")
        if errors:
            rows.append(f"<dt>{_safe(run.name)}</dt><dd class='bad'>{_safe('; '.join(errors))}</dd>")
    return _section("Failures", f"<dl>{''.join(rows)}</dl>") if rows else ""


def _facts(runs: Sequence[Ran]) -> str:
    facts = [_facts_of(run) for run in runs]
    names = list(dict.fromkeys(name for one in facts for name in one))
    same = {n: facts[0].get(n, "none") for n in names if len({one.get(n) for one in facts}) == 1}
    other = [n for n in names if n not in same]
    rows = [
        _row(run.name, [_cell(one.get(n, "")) for n in other], i)
        for i, (run, one) in enumerate(zip(runs, facts, strict=True))
    ]
    return _definitions(same) + (_table(["run", *other], rows) if other else "")


def _facts_of(run: Ran) -> dict[str, str]:
    info, hardware = run.info, run.info.get("hardware") or {}
    data = info.get("data") or {}
    facts = {
        "device": f"{hardware['device']} × {hardware.get('devices', 1)}" if "device" in hardware else None,
        "processes": hardware.get("processes"),
        "host": f"{hardware['host']}, {hardware.get('cores')} cores" if "host" in hardware else None,
        "mesh": (mesh(info.get("layout") or {}) or "one device") if info else None,
        "data": f"{data['corpus']} {str(data.get('fingerprint', ''))[:12]}" if "corpus" in data else None,
        "jaxscale": info.get("jaxscale"),
        **(info.get("versions") or {}),
        **(info.get("flags") or {}),
    }
    return {name: str(value) for name, value in facts.items() if value is not None}


# --- pieces -----------------------------------------------------------------------------------------------------------


def _section(title: str, inner: str) -> str:
    return f"<section><h2>{_safe(title)}</h2>\n{inner}\n</section>"


def _folded(title: str, inner: str) -> str:
    return f"<details><summary>{_safe(title)}</summary>{inner}</details>"


def _definitions(facts: Mapping[str, object]) -> str:
    return "<dl>" + "".join(f"<dt>{_safe(k)}</dt><dd>{_safe(v)}</dd>" for k, v in facts.items()) + "</dl>"


def _table(heads: Sequence[str], rows: Iterable[str], *, numeric: set[str] = frozenset(), sortable: bool = True) -> str:  # type: ignore[assignment]
    cells = "".join(f'<th scope="col"{" class=n" * (h in numeric)}>{_safe(h)}</th>' for h in heads)
    kind = ' class="sortable"' if sortable else ""
    return (
        f'<div class="scroll"><table{kind}><thead><tr>{cells}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'
    )


def _row(head: str, cells: Iterable[str], run: int | None = None) -> str:
    mark = "" if run is None else f' data-run="{run}"'
    return f'<tr{mark}><th scope="row" title="{_safe(head)}">{_safe(head)}</th>{"".join(cells)}</tr>'


def _cell(text: object, value: float | None = None, classes: str = "") -> str:
    attributes = (f' class="{classes}"' if classes else "") + (f' data-value="{value}"' if value is not None else "")
    return f"<td{attributes}>{_safe(text)}</td>"


def _share(value: float) -> str:
    return _cell(f"{value:.0%}", value, "n")


def _number(value: object) -> str:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return _cell("", classes="n")
    whole = isinstance(value, int) or (abs(value) >= 1000 and math.isfinite(value))
    return _cell(f"{value:,.0f}" if whole else f"{value:.4g}", value, "n" if math.isfinite(value) else "n bad")


def _value(value: object) -> str:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return _cell(worded(value), value, "n")
    return _cell("" if value is None else worded(value))


def _safe(text: object) -> str:
    return html.escape(str(text), quote=True)


def _own(name: str) -> str:
    return (importlib.resources.files(__package__) / name).read_text(encoding="utf-8").rstrip("\n")
