"""`jaxscale report`: a page and pictures of runs, written where nobody's own files are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from jaxscale import reading
from jaxscale.errors import JaxscaleError, RunError
from jaxscale.run import Run
from jaxscale.sweep.comparing.folders import Patterns, Ran, read_runs
from jaxscale.sweep.comparing.page import GENERATOR, page
from jaxscale.sweep.comparing.pictures import draw_curves, draw_parallel
from jaxscale.train.files import write_text

PAGE = "report.html"
PICTURES = {"curves.png": draw_curves, "parallel.png": draw_parallel}


def report(
    what: Patterns,
    out: str | Path | None = None,
    *,
    metric: str | None = None,
    prompt: str | None = None,
    pictures: bool = True,
    tell: Callable[[str], None] = lambda text: None,
) -> Path:
    """Writes `report.html`, and beside it `curves.png` and, where settings differ, `parallel.png`.

    Args:
      what: a run's folder, a sweep's, a pattern, or a list of them.
      out: the folder to write into; by default that of the one run or sweep that was named, else `report`.
      metric: what runs are judged by, less being better; by default a held-out loss where there is one.
      prompt: continue this text with each run's newest checkpoint, beside the samples that runs kept.
      pictures: draw `curves.png` and `parallel.png`.
      tell: told what could not be done, a sentence each.

    Returns:
      the page.

    Raises:
      RunError: no run was named, or what would be written over is not a report of ours.
    """
    runs = read_runs(what)
    only = Path(what if isinstance(what, str | Path) else next(iter(what))) if _is_one(what) else None
    folder = Path(out) if out is not None else only if only is not None and only.is_dir() else Path("report")
    for name in (PAGE, *PICTURES):
        _check_own(folder / name)
    if prompt is not None:
        for run in runs:
            _sample(run, prompt, tell)
    title = only.resolve().name if only is not None and only.is_dir() else f"{len(runs)} runs"
    text = page(runs, title, metric, times=_times(runs, tell))
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise RunError(f"cannot make the folder {folder}: {e.strerror}") from e
    for name, draw in PICTURES.items():
        (folder / name).unlink(missing_ok=True)  # an earlier report's, which may show what is no longer so
        if not pictures:
            continue
        try:
            draw(runs, metric, folder / name)
        except RunError as e:
            tell(str(e))
    write_text(folder / PAGE, text)
    return folder / PAGE


def _is_one(what: Patterns) -> bool:
    return isinstance(what, str | Path) or len(what) == 1


def _check_own(path: Path) -> None:
    try:
        with reading.open_file(path) as file:
            own = GENERATOR.encode() in file.read(2048)
    except FileNotFoundError:
        return
    except OSError:
        own = False
    if not own:
        raise RunError(f"{path} is there, and no report of ours; name another folder with --out")


def _times(runs: Sequence[Ran], tell: Callable[[str], None]) -> dict[str, str]:
    """Of runs that were trained with a profile, what it shows, beside the plan for GPUs that they ran on."""
    times = {}
    for run in runs:
        if (run.path / "profile").is_dir():
            from jaxscale.plan import measured

            try:
                times[run.name] = str(measured(Run(run.path), compile="never"))
            except JaxscaleError as e:
                tell(f"the time of {run.name}'s steps is not shown: {e}")
    return times


def _sample(run: Ran, prompt: str, tell: Callable[[str], None]) -> None:
    try:
        trained = Run(run.path)
        run.samples.append({"step": trained.last_step(), "prompt": prompt, "text": trained.sample(prompt, 300)})
    except JaxscaleError as e:
        tell(f"{run.name} gives no sample: {e}")
