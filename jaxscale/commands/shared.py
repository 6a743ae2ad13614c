"""What commands that take a gin file have in common."""

from __future__ import annotations

import argparse
import dataclasses
import glob
import importlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, cast

from jaxscale.errors import ConfigError, LayoutError, near
from jaxscale.other_names import same

if TYPE_CHECKING:
    from jaxscale.layout import Layout
    from jaxscale.nn import WeightFormat
    from jaxscale.run import Run
    from jaxscale.step import TrainConfig

TEXT = argparse.RawDescriptionHelpFormatter


def import_argument(parser: argparse.ArgumentParser) -> None:
    """`--import MODULE`."""
    parser.add_argument(
        "--import",
        dest="modules",
        action="append",
        metavar="MODULE",
        help="import a module of yours first, whose layers, corpora or optimizers the config names",
    )


def accept_argument(parser: argparse.ArgumentParser) -> None:
    """`--accept-edits`, which `accept` carries out."""
    parser.add_argument(
        "--accept-edits",
        action="store_true",
        help="take the small files of the run (config.gin, run.json, a sweep's) as they are now, though they are not "
        "what was written",
    )


def accept(args: argparse.Namespace) -> None:
    """Seals anew what was edited in the folders that a command names, and says what that was.

    Raises:
      ConfigError: it names none, or several processes would do it at once.
      AlteredFile: a file cannot be read at all.
    """
    from jaxscale.train.files import accept_edits

    if getattr(args, "distributed", None) is not None:
        raise ConfigError(
            "--accept-edits is for one process; first run jaxscale checkpoint verify RUN --accept-edits alone"
        )
    named = [getattr(args, name, None) for name in ("run", "resume", "start", "config", "table")]
    named += getattr(args, "runs", None) or []
    folders = [Path(p) for name in named if name for p in [name, *sorted(glob.glob(name))] if Path(p).is_dir()]
    if not folders:
        raise ConfigError("--accept-edits takes the files of a run's or a sweep's folder as they are; name one")
    for folder in dict.fromkeys(folders):
        for path in accept_edits(folder):
            print(f"jaxscale: {path} is taken as it is now", file=sys.stderr)


def config_arguments(parser: argparse.ArgumentParser) -> None:
    """A gin file, and what changes it or says what it runs on."""
    import_argument(parser)
    parser.add_argument("config", nargs="?", metavar="CONFIG", help="a gin file (explain takes a run, too)")
    parser.add_argument(
        "--gin.NAME=VALUE", action="store_true", dest="unused", help="change a binding, as --gin.train.lr=3e-4"
    )
    parser.add_argument("--mesh", metavar="SIZES", help='the mesh, as "data=2,fsdp=2,tensor=2"; one size may be -1')
    parser.add_argument(
        "--pipeline",
        metavar="SCHEDULE",
        help='the schedule of a pipeline axis, as "1f1b" or with micro-batches "1f1b:8"',
    )
    parser.add_argument("--devices", type=int, metavar="N", help="simulate N devices on this machine's CPU")
    parser.add_argument(
        "--distributed",
        nargs="?",
        const="auto",
        metavar="HOST:PORT,N,I",
        help="join the other hosts: alone on SLURM, Cloud TPU and GKE; elsewhere with the address of process 0, the "
        "number of processes, and this one's",
    )


def layout_arguments(parser: argparse.ArgumentParser) -> None:
    """Where a trained model runs."""
    parser.add_argument("--mesh", metavar="SIZES", help='lay the model out on a mesh, as "tensor=4"; else one device')
    parser.add_argument("--devices", type=int, metavar="N", help="simulate N devices on this machine's CPU")


def layout_of(args: argparse.Namespace) -> Layout | None:
    """As `layout_arguments` were given.

    Raises:
      LayoutError: the mesh does not fit the devices.
    """
    from jaxscale.layout import Layout

    layout = None if args.mesh is None else Layout(args.mesh)
    if layout is not None:
        _ = layout.device_mesh  # too few devices: say so first
    return layout


def weights_argument(parser: argparse.ArgumentParser) -> None:
    """`--weights FORMAT`, which `weights_of` makes."""
    parser.add_argument(
        "--weights",
        metavar="FORMAT",
        help="keep matrices in this form, a registered WeightFormat of a module of yours (--import); its fields are "
        "set with --gin.FORMAT.FIELD=VALUE",
    )


def weights_of(args: argparse.Namespace, bindings: list[str]) -> WeightFormat | None:
    """The weight format of `--weights`, its fields set by the bindings; `None` without the option.

    Raises:
      ConfigError: no weight format has this name, or a binding is none of its fields.
    """
    if args.weights is None:
        no_bindings(args, bindings)
        return None
    from jaxscale import config as gin_config
    from jaxscale.nn import WeightFormat

    formats = [n for n, o in gin_config.registered().items() if isinstance(o, type) and issubclass(o, WeightFormat)]
    if args.weights not in formats:
        raise ConfigError(
            f"--weights {args.weights}: no registered weight format has this name"
            f"{near(args.weights, formats) or '; name the module that registers it with --import'}"
        )
    with gin_config.isolated():
        gin_config.load([], bindings)
        weights = cast("WeightFormat", gin_config.call(args.weights))
        unread = gin_config.unused()
    if unread:
        raise ConfigError(f"--gin.{unread[0]} is not part of --weights {args.weights}; leave it out")
    return weights


def load(own: Path | None, args: argparse.Namespace, bindings: list[str]) -> TrainConfig:
    """The settings in a gin file, or a run's own `config.gin`, with what the command line changes."""
    from jaxscale import config as gin_config
    from jaxscale.layout import Layout, parse_mesh
    from jaxscale.step import settled
    from jaxscale.train import read_config

    if own is not None:
        settings = read_config(own.parent, bindings)
    elif args.config is not None or getattr(args, "start", None):
        if getattr(args, "start", None):
            bindings = [*bindings, "train.start = @FromRun()", f"FromRun.path = {args.start!r}"]
        try:
            gin_config.load([] if args.config is None else [args.config], bindings)
        except ConfigError as e:
            if "registered as 'sweep'" not in str(e):
                raise
            raise ConfigError(f"{args.config} describes a sweep: jaxscale sweep {args.config}") from None
        settings = settled(cast("TrainConfig", gin_config.call("train")))
        for name in gin_config.unused():
            print(f"jaxscale: warning: nothing reads the binding {name}{_to_be_read(name)}", file=sys.stderr)
    else:
        raise ConfigError("name a gin file, as experiments/demo.gin, or a run (explain RUN, train --resume RUN)")
    given = {name: getattr(args, name) for name in ("mesh", "pipeline") if getattr(args, name) is not None}
    if given:
        layout = settings.layout if settings.layout is not None else Layout()
        layout = dataclasses.replace(layout, **given)
        if "pipeline" in given and parse_mesh(layout.mesh).get("pipeline", 1) == 1:
            raise LayoutError(
                f"--pipeline {given['pipeline']} has no effect on the mesh '{layout.mesh}', which has no such axis; "
                "give it one, as --mesh pipeline=2, or leave out --pipeline"
            )
        settings = dataclasses.replace(settings, layout=layout)
    return settings


def _to_be_read(name: str) -> str:
    """What has a binding that nothing reads be read: a setting's full name, or a part that the config leaves out."""
    from jaxscale.config import registered
    from jaxscale.step import TrainConfig

    fields = dataclasses.fields(TrainConfig)
    if "." not in name:
        found = same(name, [f.name for f in fields], bindings=True)
        return f"; did you mean {' or '.join(f if '.' in f else f'train.{f}' for f in found)}?" if found else ""
    part = name.rpartition(".")[0].rpartition("/")[2]
    made = registered().get(part)
    found = [f.name for f in fields if isinstance(made, type) and type(f.default) is made]
    return f"; it is read where train.{found[0]} = @{part}()" if found and "/" not in name else ""


def import_module(module: str) -> None:
    """Imports what `--import` names.

    Raises:
      ConfigError: that fails.
    """
    try:
        importlib.import_module(module)
    except ImportError as e:
        raise ConfigError(f"--import {module}: {e}") from e


def join(spec: str) -> None:
    """Joins the other hosts, as `--distributed` says.

    Raises:
      ConfigError: it cannot be read.
    """
    from jaxscale.layout import init_distributed

    if spec == "auto":
        init_distributed()
        return
    try:
        address, processes, process = spec.split(",")
        numbers = int(processes), int(process)
    except ValueError:
        raise ConfigError(f"--distributed {spec} is not of the form host:port,processes,process") from None
    init_distributed(address, *numbers)


def no_bindings(args: argparse.Namespace, bindings: list[str]) -> None:
    """For commands that read no gin file.

    Raises:
      ConfigError: a binding was given.
    """
    if bindings:
        name = bindings[0].partition(" =")[0]
        raise ConfigError(f"{args.command} takes a run or a schedule as it is; leave out --gin.{name}")


def imports_of(run: Run) -> str:
    """What a command about a run has to import first, as ` --import my_parts`; mostly nothing."""
    return "".join(f" --import {module}" for module in run.info.get("imports", []))


def continuing(made: Run) -> str:
    """How to have a run just written continue a text; in ids where no tokenizer came along, which is said."""
    own = made.path / "hf"
    if own.is_dir() and not (own / "tokenizer.json").is_file():
        print("jaxscale: there is no tokenizer.json: the model takes token ids, and no text", file=sys.stderr)
        return f"in Python, js.load({str(made.path)!r}).generate([1, 2, 3]).ids"
    return f"jaxscale sample {made.path} --prompt ...{imports_of(made)}"
