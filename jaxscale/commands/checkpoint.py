"""`jaxscale checkpoint`: lists, verifies, converts and exports a run's checkpoints."""

from __future__ import annotations

import argparse
import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxscale.commands.shared import TEXT, accept_argument, no_bindings
from jaxscale.errors import CheckpointError, DamagedCheckpoint, JaxscaleError
from jaxscale.working_copy import as_named, inside, local, url_of

if TYPE_CHECKING:
    from jaxscale.train import Checkpoints


def add(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "checkpoint",
        help="list, show, verify, convert or export a run's checkpoints",
        description="Reads the checkpoints of a run. No model is built and no device is used.",
        formatter_class=TEXT,
    )
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    for name, (action, text) in _ACTIONS.items():
        one = actions.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        one.add_argument("run", metavar="RUN", help="a run folder, such as runs/demo-1")
        accept_argument(one)
        one.add_argument(
            "--step",
            type=int,
            help=f"one checkpoint (default: {'the newest' if name in ('show', 'export') else 'all'})",
        )
        if action is _export:
            one.add_argument("--out", metavar="DIR", help="folder to write; it must not exist")
        one.set_defaults(run_command=run, action_command=action)


def run(args: argparse.Namespace, bindings: list[str]) -> int:
    """Run the action; returns the exit code, 1 if `verify` finds damage."""
    no_bindings(args, bindings)
    from jaxscale.train import checkpoints_in

    if args.action_command is _verify:
        return _verify(args)
    checkpoints = checkpoints_in(args.run)
    steps = checkpoints.steps()
    if not steps and args.action_command is _list and _print_unfinished(checkpoints):
        return 0
    if not steps:
        why = "has no finished checkpoint" if local(args.run).is_dir() else "does not exist"
        raise CheckpointError(f"{args.run} {why}; name a run folder, such as runs/demo-1")
    if args.step is not None:
        checkpoints.manifest(args.step)  # raises, with the existing steps
        steps = [args.step]
    return args.action_command(checkpoints, steps, args)


def _list(checkpoints: Checkpoints, steps: list[int], args: argparse.Namespace) -> int:
    rows: list[tuple[str, ...]] = [("step", "schema", "arrays", "bytes", "digest", "saved", "layout")]
    for step in steps:
        try:
            about = checkpoints.manifest(step)
        except DamagedCheckpoint as e:
            print(e)
            continue
        size = sum(map(_bytes, about["leaves"].values()))
        facts = (about["written"], len(about["leaves"]), f"{size:,}", about["digest"] or "none")
        rows.append(tuple(map(str, (step, *facts, about.get("time", "?"), about["layout"] or "one device"))))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip())
    _print_unfinished(checkpoints)
    return 0


def _print_unfinished(checkpoints: Checkpoints) -> bool:
    """Print the checkpoints that are not finished or were set aside; returns whether there are any."""
    others = checkpoints.unfinished()
    if others:
        print(f"not finished, or set aside: {', '.join(others)}")
    return bool(others)


def _show(checkpoints: Checkpoints, steps: list[int], args: argparse.Namespace) -> int:
    about = checkpoints.manifest(steps[-1])
    for key, value in about.items():
        if key != "leaves":
            print(f"{key}: {value}")
    for name, leaf in about["leaves"].items():
        axes = f" ({', '.join(str(a) for a in leaf['axes'])})" if leaf["axes"] else ""
        files = f" in {len(leaf['files'])} files" if "files" in leaf else ""
        print(f"{name}  {leaf['dtype']}{leaf['shape']}{axes}  {_bytes(leaf):,} bytes{files}")
    return 0


def _verify(args: argparse.Namespace) -> int:
    """Compare all files with their digests; returns 1 if one does not match."""
    from jaxscale.train.checkpoints import Checkpoints
    from jaxscale.train.files import CONFIG, INFO, states

    folder = local(args.run)
    files = list(states(folder)) if folder.is_dir() else []
    candidates = (folder, *sorted(folder.glob("[0-9]*")))
    places = [path / "checkpoints" for path in candidates] if url_of(folder) is None else []
    runs = [place.parent for place in places if place.is_dir()]
    if url_of(folder) is not None:
        runs = [path for path in candidates if (path / INFO).is_file() or (path / CONFIG).is_file()]
    own = {path: Checkpoints(inside(path, "checkpoints"), run=_id(path)) for path in runs}
    if args.step is not None and runs:
        own[runs[0]].manifest(args.step)  # raises, with the existing steps
    steps = {path: [args.step] if args.step is not None else each.steps() for path, each in own.items()}
    if not files and not any(steps.values()):
        why = "has no finished checkpoint" if folder.is_dir() else "does not exist"
        raise CheckpointError(f"{as_named(folder)} {why}; name a run folder, such as runs/demo-1")
    for file in files:
        if file.fault is not None:
            print(file.fault)
    altered = sum(file.fault is not None for file in files)
    intact = sum(file.sealed and file.fault is None for file in files)
    if intact:
        print(f"{intact} small {'file agrees with its' if intact == 1 else 'files agree with their'} digests")
    old = [str(file.path.relative_to(folder)) for file in files if not file.sealed]
    if old:
        print(f"not sealed, since an earlier version wrote them: {', '.join(old[:8])}{' ...' if old[8:] else ''}")
    if altered:
        print(f"{altered} of {len(files)} small files are not what was written")
    lost = [path / CONFIG for path in runs if (path / INFO).is_file() and not os.path.lexists(path / CONFIG)]
    for config in lost:
        print(f"{as_named(config)} is missing, and the run cannot be rebuilt without it; restore it from a copy")
    replaced = [place for place in places if os.path.lexists(place) and not place.is_dir()]
    for place in replaced:
        print(f"{place} is not a folder, so that it has no checkpoints; restore it from a copy")
    bad = sum(_verify_checkpoints(each, steps[path]) for path, each in own.items())
    if url_of(folder) is not None:  # a checkpoint that lost its manifest is among them
        for each in own.values():
            _print_unfinished(each)
    return 1 if bad or altered or lost or replaced else 0


def _id(run: Path) -> str | None:
    """The id in `run.json`; None if that file is missing or damaged."""
    from jaxscale.train.files import INFO, read_json

    try:
        return read_json(run / INFO).get("id")
    except (OSError, JaxscaleError):
        return None


def _verify_checkpoints(checkpoints: Checkpoints, steps: list[int]) -> int:
    """Print the state of some checkpoints; returns the number of damaged ones."""
    bad = 0
    for step in steps:
        try:
            about = checkpoints.manifest(step)
            faults = list(checkpoints.arrays(step).faults())
        except DamagedCheckpoint as e:  # another error says nothing about its files, and ends the command
            about, faults = {}, [str(e)]
        for fault in faults:
            print(fault)
        if not faults:
            files = sum(len(leaf.get("files", ())) for leaf in about["leaves"].values())
            digest = about["digest"]
            state = f"{files} files agree with their {digest}" if digest else (
                f"its arrays can be read, and their values cannot be checked: schema {about['written']} has no digests "
                "(jaxscale checkpoint convert adds them)")  # fmt: skip
            print(f"checkpoint {step}: {len(about['leaves'])} arrays, {state}")
        bad += bool(faults)
    if bad:
        rest = (
            "training continues from the newest intact one"
            if bad < len(steps)
            else "restore one from a copy, or start a new run"
        )
        print(f"{bad} of {len(steps)} checkpoints are damaged; {rest}")
    return bad


def _convert(checkpoints: Checkpoints, steps: list[int], args: argparse.Namespace) -> int:
    from jaxscale.train.checkpoints.convert import convert
    from jaxscale.train.checkpoints.migrate import SCHEMA
    from jaxscale.train.checkpoints.places import DiskPlace
    from jaxscale.train.folders import lock

    if not isinstance(checkpoints.place, DiskPlace):
        raise CheckpointError(f"{checkpoints.place} is in a bucket, where all checkpoints have the newest schema")
    folder = checkpoints.place.path
    with lock(folder.parent):
        for step in steps:
            try:
                done = convert(folder / str(step))
            except OSError as e:
                raise CheckpointError(
                    f"checkpoint {step} in {folder} could not be converted and is unchanged: {e.strerror or e}"
                ) from e
            print(f"checkpoint {step} {'is converted to' if done else 'already has'} schema {SCHEMA}")
    return 0


def _export(checkpoints: Checkpoints, steps: list[int], args: argparse.Namespace) -> int:
    from jaxscale.train.checkpoints.export import to_orbax

    if args.out is None:
        raise CheckpointError("name the folder to write, such as --out demo-orbax")
    count = to_orbax(checkpoints.place.finished(steps[-1]), args.out)
    print(f"checkpoint {steps[-1]}: wrote {count} arrays to {args.out}, for Orbax's StandardCheckpointer")
    return 0


def _bytes(leaf: dict[str, Any]) -> int:
    from jaxscale.train.checkpoints.read import dtype_named

    return math.prod(leaf["shape"]) * dtype_named(leaf["dtype"]).itemsize


_ACTIONS = {
    "list": (_list, "print a line per checkpoint"),
    "show": (_show, "print the arrays of a checkpoint"),
    "verify": (_verify, "compare every file of a run's or a sweep's folder with its digest"),
    "convert": (_convert, "rewrite checkpoints of an older schema, with digests"),
    "export": (_export, "write a checkpoint in Orbax's format, for other programs"),
}
