"""`jaxscale report`: an HTML page and pictures of runs; overwrites only earlier reports."""

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
from jaxscale.working_copy import as_named, local, upload_files

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
    """Write `report.html`, and beside it `curves.png` and, if settings differ, `parallel.png`.

    Args:
      what: a run folder, a sweep's folder, a pattern, or a list of them.
      out: the folder to write into; by default the folder of the single run or sweep in `what`, else `report`.
      metric: the metric to compare by, lower being better; by default a held-out loss if there is one.
      prompt: a text to continue with each run's newest checkpoint, besides the samples that runs saved.
      pictures: draw `curves.png` and `parallel.png`.
      tell: called with a sentence for each part that could not be made.

    Returns:
      the path of the page.

    Raises:
      RunError: no run was named, or a file to be overwritten is not a report of jaxscale's.
    """
    runs = read_runs(what)
    only = local(what if isinstance(what, str | Path) else next(iter(what))) if _is_one(what) else None
    folder = local(out) if out is not None else only if only is not None and only.is_dir() else Path("report")
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
        (folder / name).unlink(missing_ok=True)  # an earlier report's picture, now outdated
        if not pictures:
            continue
        try:
            draw(runs, metric, folder / name)
        except RunError as e:
            tell(str(e))
    write_text(folder / PAGE, text)
    upload_files(folder, (PAGE, *PICTURES))
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
        raise RunError(f"{path} exists and is not a report of jaxscale's; name another folder with --out")


def _times(runs: Sequence[Ran], tell: Callable[[str], None]) -> dict[str, str]:
    """Measured step times of runs that have a profile, as tables of text, beside the plan where there is one."""
    times = {}
    for run in runs:
        local(as_named(run.path), profile=True)
        if (run.path / "profile").is_dir():
            from jaxscale.plan import measured

            try:
                times[run.name] = str(measured(Run(run.path), compile="never"))
            except JaxscaleError as e:
                tell(f"the step times of {run.name} are left out: {e}")
    return times


def _sample(run: Ran, prompt: str, tell: Callable[[str], None]) -> None:
    try:
        trained = Run(run.path)
        run.samples.append({"step": trained.last_step(), "prompt": prompt, "text": trained.sample(prompt, 300)})
    except JaxscaleError as e:
        tell(f"{run.name} cannot generate a sample: {e}")
