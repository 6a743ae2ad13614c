"""Choose and lock the folder of a run: a new one, or one to resume; never one that is in use."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import IO

import jax

from jaxscale import config as gin_config
from jaxscale.errors import MISTAKE, AlteredFile, JaxscaleError, RunError
from jaxscale.step.config import TrainConfig
from jaxscale.train import agree
from jaxscale.train.checkpoints import Checkpoints
from jaxscale.train.files import CONFIG, INFO, read_gin, read_json
from jaxscale.train.run import RunFolder
from jaxscale.working_copy import as_named, inside, url_of


def choose_folder(
    config: TrainConfig, path: Path | None, resume: bool | str, name: str, say: Callable[[str], None]
) -> tuple[Path, bool, IO[str] | None]:
    """Choose the run's folder and lock it; process 0 decides for all.

    Args:
      config: the settings; `resume="newest"` looks for runs with the same ones.
      path: the folder, or `None` for `runs/<name>-<n>`.
      resume: as in `fit`.
      name: prefix of new folders.
      say: prints a line about the choice if the caller left it open.

    Returns:
      the folder, whether to resume from a checkpoint in it, and the lock file (on process 0).

    Raises:
      RunError: the folder exists already, is in use, or has no checkpoint to resume from.
    """
    choice, lock_file = ["", ""], None
    if jax.process_index() == 0:
        try:
            folder, resuming = _choose(config, path, resume, name, say)
            lock_file = lock(folder)
            choice = [str(folder), "resume" if resuming else "new"]
        except (JaxscaleError, OSError) as e:
            choice = [str(e), f"error {getattr(e, 'code', MISTAKE)}"]  # raised below: others wait for an answer
    choice = agree.broadcast(choice)
    if choice[1].startswith("error"):
        error = RunError(choice[0])
        error.code = int(choice[1].split()[1])
        raise error
    folder = Path(choice[0]) if path is None else path  # a working copy may be elsewhere on another machine
    return folder, choice[1] == "resume", lock_file


def _choose(
    config: TrainConfig, path: Path | None, resume: bool | str, name: str, say: Callable[[str], None]
) -> tuple[Path, bool]:
    if not resume:
        return new_folder(path, name), False
    if path is None:
        if resume is True:
            raise RunError("resuming needs the run's folder: pass run=")
        previous = unfinished(name, config)
        if previous is not None:
            say(f"resuming {previous}, the newest run with these settings, which is unfinished")
            return previous, True
        folder = new_folder(None, name)
        say(f"starting {folder} (no unfinished runs/{name}-* has these settings)")
        return folder, False
    if RunFolder(path, config).checkpoints.steps():  # also of a disk from which none has been uploaded yet
        check_files(path)
        return path, True
    if resume is True:
        raise RunError(
            f"{as_named(path)} has no finished checkpoint to resume from; use --run {as_named(path)} --continue to "
            "start again in it"
        )
    if any((path / name).exists() for name in (".lock", "run.json")):  # killed before its first checkpoint
        say(f"starting again in {as_named(path)}, which has no finished checkpoint")
        return path, False
    return new_folder(path, name), False


def check_files(path: Path) -> None:
    """Check that `run.json` and `config.gin` of a run to be resumed are what was written.

    Raises:
      AlteredFile: one of them is not.
    """
    for name, read in ((INFO, read_json), (CONFIG, read_gin)):
        with contextlib.suppress(FileNotFoundError):
            read(path / name)


def is_new(path: Path) -> bool:
    """Whether a folder is empty, apart from a file that a killed process had not finished writing."""
    left = all(p.name.endswith(".partial") for p in path.iterdir())
    return left and (url_of(path) is None or not Checkpoints(inside(path, "checkpoints")).steps())


def new_folder(path: Path | None, stem: str = "run") -> Path:
    """Make the folder of a new run: `path`, or the next free `runs/<stem>-<n>`.

    Raises:
      RunError: `path` exists and is not empty, or cannot be made.
    """
    try:
        if path is not None:
            path.mkdir(parents=True, exist_ok=True)
            if not is_new(path):
                place = as_named(path)
                raise RunError(f"{place} already exists; resume it with --resume {place}, or name another folder")
            return path
        root = Path("runs")
        root.mkdir(exist_ok=True)
        newest = max(_numbers(root, stem), default=0)
        for n in range(newest + 1, newest + 1000):
            with contextlib.suppress(FileExistsError):  # another run took the number just now
                (root / f"{stem}-{n}").mkdir()
                return root / f"{stem}-{n}"
    except OSError as e:
        raise RunError(f"cannot make the run folder {path or 'runs'}: {e.strerror}") from e
    raise RunError(f"no free number for a run called {stem} in runs; name a folder with --run")


def remove_unbegun(path: Path) -> None:
    """Remove the folder of a run that failed before anything was written, so that its name can be used again.

    Args:
      path: the folder; it stays if it has files.
    """
    if is_new(path) or [p.name for p in path.iterdir()] == [".lock"]:
        with contextlib.suppress(OSError):
            (path / ".lock").unlink()
            path.rmdir()


def unfinished(stem: str, config: TrainConfig) -> Path | None:
    """Return the newest `runs/<stem>-<n>` with these settings, if it is unfinished, unused and has a checkpoint."""
    root = Path("runs")
    settings = gin_config.dumps("train", config.values())
    for n in sorted(_numbers(root, stem), reverse=True) if root.is_dir() else []:
        path = root / f"{stem}-{n}"
        try:
            same = read_gin(path / CONFIG) == settings
            finished = read_json(path / INFO).get("status") == "finished"
            lock(path).close()
        except AlteredFile as e:
            raise AlteredFile(f"{e}; or name another folder with --run, which leaves {path} as it is") from None
        except (OSError, ValueError, RunError):
            continue
        if same:
            return path if not finished and Checkpoints(path / "checkpoints").steps() else None
    return None


def lock(path: Path) -> IO[str]:
    """Lock a run folder until the returned file is closed or the process ends.

    Raises:
      RunError: another process holds the lock, or the folder cannot be written to.
    """
    import fcntl

    try:
        file = (path / ".lock").open("w")
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return file
    except BlockingIOError:
        place = as_named(path)
        raise RunError(f"{place} is being trained by another process; wait for it, or start a new run") from None
    except OSError as e:
        raise RunError(f"cannot write into {path}: {e.strerror}") from e


def _numbers(root: Path, stem: str) -> list[int]:
    """The n of every `<stem>-<n>` in `root`."""
    tails = [p.name.removeprefix(f"{stem}-") for p in root.iterdir() if p.name.startswith(f"{stem}-")]
    return [int(tail) for tail in tails if tail.isdecimal()]
