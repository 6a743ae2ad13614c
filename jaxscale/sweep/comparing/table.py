"""`jaxscale.runs` and `jaxscale.curves`: run folders as pandas tables."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from jaxscale.errors import ConfigError, RunError, near
from jaxscale.sweep.comparing.differences import best, is_loss, metrics_of
from jaxscale.sweep.comparing.folders import Patterns, Ran, is_finite, read_runs

if TYPE_CHECKING:
    import pandas as pd


def runs(what: Patterns = "runs/*") -> pd.DataFrame:
    """Return a table of runs, a row each; a damaged folder is a row with what could be read.

    Columns: `run`, `path`, `state`, `error`, `problems`; `seed`, `steps`, `tokens`, `parameters`, `flops`; the axes of
    a sweep and every operative binding, named as the binding (`train.lr`, `model/Transformer.depth`); the last value of
    each metric by its name, and for losses the lowest as `best_<metric>` and `best_<metric>_step`; `tokens_per_second`
    and `step_seconds` (medians over steps without the first, which compiles), `seconds` (wall time), `goodput` (share);
    `device`, `devices`, `processes`, `cores`, `mesh`, `started`, and the versions of `jaxscale`, `jax`, ...

    Args:
      what: a pattern such as `"runs/*"`, a run folder, a sweep's folder, or a list of them.

    Raises:
      RunError: one names no run, or pandas is not installed.
    """
    pandas = _pandas("jaxscale.runs")
    read = read_runs(what)
    names = metrics_of(read)
    return pandas.DataFrame([row(run, names) for run in read])


def curves(what: Patterns = "runs/*", metrics: str | Iterable[str] | None = None) -> pd.DataFrame:
    """Return metrics over steps, a row per value: `run`, `path`, `step`, `metric`, `value`.

    Args:
      what: as in `runs`.
      metrics: one or several names; all by default.

    Raises:
      RunError: one names no run, or pandas is not installed.
      ConfigError: no run has a metric of that name, but they have others.
    """
    pandas = _pandas("jaxscale.curves")
    read = read_runs(what)
    known = metrics_of(read)
    names = [metrics] if isinstance(metrics, str) else known if metrics is None else list(metrics)
    for name in names if known else ():
        if name not in known:
            raise ConfigError(f"no run has a metric '{name}'{near(name, known)}")
    rows = [
        (run.name, str(run.path), step, name, value)
        for run in read
        for name in names
        for step, value in run.metrics.get(name, [])
    ]
    return pandas.DataFrame(rows, columns=["run", "path", "step", "metric", "value"])


def row(run: Ran, metrics: Iterable[str]) -> dict[str, Any]:
    """Return a run's row of the table; see `runs`."""
    hardware, layout = run.info.get("hardware") or {}, run.info.get("layout") or {}
    tokens = None if run.tokens_per_step is None else run.steps * run.tokens_per_step
    per_token = [
        r["model_flops_per_second"] / r["tokens_per_second"]
        for r in run.rows[-1:]
        if all(is_finite(r.get(name)) for name in ("tokens_per_second", "model_flops_per_second"))
        and r["tokens_per_second"]
    ]
    cells: dict[str, Any] = {
        "run": run.name,
        "path": str(run.path),
        "state": run.state,
        "error": run.error,
        "problems": "; ".join(run.problems) or None,
        "seed": run.bindings.get("train.seed", run.info.get("seed")),
        "steps": run.steps,
        "tokens": tokens,
        "parameters": run.info.get("parameters"),
        "flops": round(tokens * per_token[0]) if per_token and tokens else None,
        **run.axes,
        **{name: value for name, value in run.bindings.items() if name not in run.axes},
    }
    for name in metrics:
        points = run.metrics.get(name)
        cells[name] = points[-1][1] if points else math.nan
        if is_loss(name):
            step, value = best(run, name) or (None, math.nan)
            cells[f"best_{name}"], cells[f"best_{name}_step"] = value, step
    return {
        **cells,
        "tokens_per_second": run.median("tokens_per_second"),
        "step_seconds": run.step_seconds,
        "seconds": run.seconds,
        "goodput": run.goodput and run.goodput["share"],
        **{name: hardware.get(name) for name in ("device", "devices", "processes", "cores")},
        "mesh": mesh(layout),
        "started": run.info.get("started"),
        "jaxscale": run.info.get("jaxscale"),
        **(run.info.get("versions") or {}),
    }


def mesh(layout: dict[str, Any]) -> str | None:
    """Return the mesh in the layout of a `run.json` as text, such as "data=2,fsdp=4"; `None` for one device."""
    sizes = layout.get("mesh") or {}
    return ",".join(f"{name}={size}" for name, size in sizes.items() if size != 1) or None


def _pandas(who: str) -> Any:
    try:
        import pandas
    except ImportError:
        raise RunError(f"{who} needs pandas, which is not installed: pip install 'jaxscale[sweep]'") from None
    return pandas
