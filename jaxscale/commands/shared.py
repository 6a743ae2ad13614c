"""Options and steps that several commands share."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import glob
import importlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from jaxscale.bucket_files import matching_folders
from jaxscale.buckets import BucketError, failure, is_url
from jaxscale.errors import ConfigError, LayoutError, near
from jaxscale.other_names import same

if TYPE_CHECKING:
    from jaxscale.layout import Layout
    from jaxscale.nn import WeightFormat
    from jaxscale.run import Run
    from jaxscale.step import TrainConfig

TEXT = argparse.RawDescriptionHelpFormatter


def import_argument(parser: argparse.ArgumentParser) -> None:
    """Add the option `--import MODULE`."""
    parser.add_argument(
        "--import",
        dest="modules",
        action="append",
        metavar="MODULE",
        help="first import your own module with layers, corpora or optimizers that the config uses",
    )


def accept_argument(parser: argparse.ArgumentParser) -> None:
    """Add the option `--accept-edits`; `accept` acts on it."""
    parser.add_argument(
        "--accept-edits",
        action="store_true",
        help="accept edits of the run's small files (config.gin, run.json, a sweep's), whose digests no longer match",
    )


def accept(args: argparse.Namespace) -> None:
    """Write new digests of the edited files in the folders that a command names, and print their names.

    Raises:
      ConfigError: no folder is named, or several processes would do it at once.
      AlteredFile: a file cannot be read.
    """
    from jaxscale.train.files import accept_edits
    from jaxscale.working_copy import as_named

    if getattr(args, "distributed", None) is not None:
        raise ConfigError(
            "--accept-edits is for one process; first run jaxscale checkpoint verify RUN --accept-edits alone"
        )
    names = [getattr(args, name, None) for name in ("run", "resume", "start", "config", "table")]
    names += getattr(args, "runs", None) or []
    in_buckets = [name for name in names if name and is_url(name)]
    on_disk = [name for name in names if name and name not in in_buckets]
    try:
        folders: list[str | Path] = [
            folder for name in in_buckets for folder in (matching_folders(name) if glob.has_magic(name) else [name])
        ]
    except BucketError as e:
        raise failure(ConfigError, e) from None
    folders += [Path(p) for name in on_disk for p in [name, *sorted(glob.glob(name))] if Path(p).is_dir()]
    if not folders:
        raise ConfigError("--accept-edits needs the folder of a run or a sweep; name one")
    for folder in dict.fromkeys(folders):
        for path in accept_edits(folder):
            print(f"jaxscale: accepted the edit of {as_named(path)}", file=sys.stderr)


def config_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the argument for a gin file and the options that change its settings, mesh and devices."""
    import_argument(parser)
    parser.add_argument("config", nargs="?", metavar="CONFIG", help="a gin file (explain also takes a run)")
    parser.add_argument(
        "--gin.NAME=VALUE", action="store_true", dest="unused", help="change a binding, such as --gin.train.lr=3e-4"
    )
    parser.add_argument(
        "--mesh", metavar="SIZES", help='the mesh, such as "data=2,fsdp=2,tensor=2"; one size may be -1 (the rest)'
    )
    parser.add_argument(
        "--pipeline",
        metavar="SCHEDULE",
        help='the pipeline schedule, such as "1f1b", or with micro-batches "1f1b:8"',
    )
    parser.add_argument("--devices", type=int, metavar="N", help="simulate N devices on this machine's CPU")
    parser.add_argument(
        "--distributed",
        nargs="?",
        const="auto",
        metavar="HOST:PORT,N,I",
        help="join the other hosts: without a value on SLURM, Cloud TPU and GKE; elsewhere with the address of process "
        "0, the number of processes, and the index of this one",
    )


def layout_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options for the mesh of a trained model."""
    parser.add_argument("--mesh", metavar="SIZES", help='shard the model over a mesh, such as "tensor=4"')
    parser.add_argument("--devices", type=int, metavar="N", help="simulate N devices on this machine's CPU")


def layout_of(args: argparse.Namespace) -> Layout | None:
    """The layout of the options of `layout_arguments`; `None` without `--mesh`.

    Raises:
      LayoutError: the mesh does not fit the devices.
    """
    from jaxscale.layout import Layout

    layout = None if args.mesh is None else Layout(args.mesh)
    if layout is not None:
        _ = layout.device_mesh  # raises if there are too few devices
    return layout


def calibration_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of commands that compute on a run's calibration rows: which rows, which checkpoint and layout."""
    parser.add_argument("--rows", type=int, default=64, metavar="N", help="calibration rows of seq_len tokens (64)")
    parser.add_argument("--batch", type=int, default=8, metavar="N", help="rows that are computed at once (8)")
    parser.add_argument("--step", type=int, metavar="N", help="step of the checkpoint (default: the newest)")
    import_argument(parser)
    accept_argument(parser)
    layout_arguments(parser)


def weights_argument(parser: argparse.ArgumentParser) -> None:
    """Add the option `--weights FORMAT`; `weights_of` reads it."""
    parser.add_argument(
        "--weights",
        metavar="FORMAT",
        help="store matrices in this format: int8, int4, nf4, mxfp4, nvfp4, fp8, ...; Stored, with --gin.Stored.FIELD="
        "VALUE; or a WeightFormat that your module registers (--import)",
    )


def cache_argument(parser: argparse.ArgumentParser) -> None:
    """Add `--kv-cache` and `--ring`; `cache_of` reads them."""
    parser.add_argument(
        "--kv-cache",
        metavar="NUMBERS",
        help="store keys and values in 8 bits, int8 or fp8 (default: the type of the computation)",
    )
    parser.add_argument(
        "--ring",
        type=int,
        metavar="TOKENS",
        help="layers with a window store it and this many tokens more, such as 128, in place of all tokens; sequences "
        "that begin alike are then computed one by one",
    )


def cache_of(args: argparse.Namespace) -> dict[str, Any]:
    """The fields of `jaxscale.infer.cache.Paged` that the options set."""
    fields = {"numbers": args.kv_cache, "ring": args.ring}
    return {name: value for name, value in fields.items() if value is not None}


def draft_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of speculative decoding; `draft_of` reads the first."""
    parser.add_argument(
        "--draft",
        metavar="RUN",
        help="a run whose smaller model drafts tokens (speculative decoding), or mtp: the model's own modules of "
        "multi-token prediction",
    )
    parser.add_argument("--draft-tokens", type=int, default=4, metavar="N", help="tokens per draft (default 4)")


def draft_of(args: argparse.Namespace) -> Run | str | None:
    """The draft of `--draft`: a run, "mtp", or `None` without the option.

    Raises:
      ConfigError: it is nearly "mtp", and no folder has that name.
      RunError: the folder is not a run.
    """
    from jaxscale import load
    from jaxscale.infer.steppers import MTP

    if args.draft in (None, MTP):
        return args.draft
    if difflib.get_close_matches(args.draft, [MTP]) and not Path(args.draft).exists():
        raise ConfigError(f"--draft {args.draft} is neither a run folder nor '{MTP}'; did you mean '{MTP}'?")
    return load(args.draft)


def weights_of(args: argparse.Namespace, bindings: list[str]) -> WeightFormat | None:
    """The weight format of `--weights`, its fields set by the bindings; `None` without the option.

    Raises:
      ConfigError: no weight format has this name, or a binding does not belong to it.
    """
    if args.weights is None:
        no_bindings(args, bindings)
        return None
    from jaxscale import config as gin_config
    from jaxscale.config_types import parameters
    from jaxscale.nn import WeightFormat
    from jaxscale.nn.formats import PRESETS

    registered = gin_config.registered()
    formats = [n for n, o in registered.items() if isinstance(o, type) and issubclass(o, WeightFormat)] + [*PRESETS]
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
        own = [f"--gin.{args.weights}.{field}" for field in parameters(registered[args.weights])]
        takes = f", which takes {', '.join(own)}" if own else ""
        raise ConfigError(f"--gin.{unread[0]} is not part of --weights {args.weights}{takes}; leave it out")
    return weights


def say_bytes(run: Run, weights: WeightFormat | None, name: str | None) -> None:
    """Print the bytes of a run's parameters in few bits to stderr, and those as plain arrays.

    Nothing is printed for plain arrays, nor for a run that stores its matrices in few bits and is read in others.

    Args:
      run: the run.
      weights: the format, or `None` for that of the run's checkpoint.
      name: what the user calls it.
    """
    few = weights or run.config.stored
    if few is None or (weights is not None and run.config.stored is not None):
        return
    import jax

    from jaxscale.step.state import describe_model
    from jaxscale.units import human_bytes

    _, infos = describe_model(run.config.model)
    size, whole = (human_bytes(sum(i.nbytes for i in jax.tree.leaves(t))) for t in (few.infos(infos), infos))
    which = "as they are stored" if weights is None else f"with --weights {name}"
    types = ", ".join(sorted({str(i.dtype) for i in jax.tree.leaves(infos)}))
    print(f"jaxscale: parameters take {size} {which}, and {whole} as plain arrays ({types})", file=sys.stderr)


def load(own: Path | None, args: argparse.Namespace, bindings: list[str], also: tuple[str, ...] = ()) -> TrainConfig:
    """The settings of a gin file, or of a run's `config.gin`, with the changes of the command line.

    Args:
      own: a run's `config.gin`, or `None` for the file in `args.config`.
      args: the parsed options.
      bindings: the `--gin.` options.
      also: other objects that read bindings of the file.

    Raises:
      ConfigError: no file is named, or it is invalid.
      LayoutError: `--pipeline` without a pipeline axis in the mesh.
    """
    from jaxscale import config as gin_config
    from jaxscale.layout import Layout, parse_mesh
    from jaxscale.step import settled
    from jaxscale.train import read_config

    if own is not None:
        settings = read_config(own.parent, bindings)
    elif args.config is not None or getattr(args, "start", None):
        if getattr(args, "start", None):
            # a scope of its own: the file's FromRun.path may be that of a teacher
            bindings = [*bindings, "train.start = @start/FromRun()", f"start/FromRun.path = {args.start!r}"]
        try:
            gin_config.load([] if args.config is None else [args.config], bindings)
        except ConfigError as e:
            if "registered as 'sweep'" not in str(e):
                raise
            raise ConfigError(f"{args.config} describes a sweep: jaxscale sweep {args.config}") from None
        settings = settled(cast("TrainConfig", gin_config.call("train")))
        for name in also:
            gin_config.call(name)
        for name in gin_config.unused():
            if getattr(args, "start", None):
                _check_model_of(args.start, name, settings)
            print(f"jaxscale: warning: the binding {name} has no effect{_hint_for_unused(name)}", file=sys.stderr)
    else:
        raise ConfigError("name a gin file, such as experiments/demo.gin, or a run (explain RUN, train --resume RUN)")
    changes = {name: getattr(args, name) for name in ("mesh", "pipeline") if getattr(args, name) is not None}
    if changes:
        layout = settings.layout if settings.layout is not None else Layout()
        layout = dataclasses.replace(layout, **changes)
        if "pipeline" in changes and parse_mesh(layout.mesh).get("pipeline", 1) == 1:
            raise LayoutError(
                f"--pipeline {changes['pipeline']} has no effect on the mesh '{layout.mesh}', which has no pipeline "
                "axis; add one, such as --mesh pipeline=2, or leave out --pipeline"
            )
        settings = dataclasses.replace(settings, layout=layout)
    return settings


def _check_model_of(start: str, name: str, settings: TrainConfig) -> None:
    """Check that an unused binding is not one of the model that `--from` names, or of a part of it.

    Raises:
      ConfigError: it is, and the model has its own settings.
    """
    from jaxscale import config as gin_config

    lines = gin_config.dumps("train", {"model": settings.model}).splitlines()
    names = [line.partition(" = ")[0] for line in lines if line.startswith(("model/", "model_"))]
    same_name = [n for n in names if n.rpartition("/")[2] == name.rpartition("/")[2]]
    if same_name:
        raise ConfigError(
            f"{name} has no effect, since the model is that of {start} with its own settings; leave it out, or change "
            f"them: jaxscale train {start}/config.gin --from {start} --gin.{same_name[0]}=..."
        )


def _hint_for_unused(name: str) -> str:
    """How an unused binding takes effect: by the setting's full name, or by using the object that it configures."""
    from jaxscale.config import registered
    from jaxscale.step import TrainConfig

    fields = dataclasses.fields(TrainConfig)
    if "." not in name:
        settings = same(name, [f.name for f in fields], bindings=True)
        return f"; did you mean {' or '.join(f if '.' in f else f'train.{f}' for f in settings)}?" if settings else ""
    part = name.rpartition(".")[0].rpartition("/")[2]
    kind = registered().get(part)
    settings = [f.name for f in fields if isinstance(kind, type) and type(f.default) is kind]
    return f"; add train.{settings[0]} = @{part}() to use it" if settings and "/" not in name else ""


def import_module(module: str) -> None:
    """Import the module of `--import`.

    Raises:
      ConfigError: the import fails.
    """
    try:
        importlib.import_module(module)
    except ImportError as e:
        raise ConfigError(f"--import {module}: {e}") from e


def join(spec: str) -> None:
    """Join the other hosts of a run.

    Args:
      spec: the value of `--distributed`: "auto", or "host:port,processes,process".

    Raises:
      ConfigError: the value cannot be parsed.
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
    """Refuse `--gin.` options, for commands that read no gin file.

    Raises:
      ConfigError: there is one.
    """
    if bindings:
        name = bindings[0].partition(" =")[0]
        raise ConfigError(f"{args.command} has no settings to change; leave out --gin.{name}")


def imports_of(run: Run) -> str:
    """The `--import` options that commands on a run need, such as ` --import my_parts`; usually empty."""
    return "".join(f" --import {module}" for module in run.info.get("imports", []))


def on_disk(path: str) -> Path:
    """Return the path of what a command writes to a disk only.

    Args:
      path: as the user wrote it.

    Raises:
      ConfigError: it is a URL, which would become a folder named `s3:`.
    """
    if is_url(path):
        raise ConfigError(f"{path} is in a bucket, and this is written to a disk; name a path, and copy it later")
    return Path(path)


def continuing(run: Run) -> str:
    """The command that generates text with a new run; with token ids, and a warning, if it has no tokenizer."""
    own = run.path / "hf"
    if own.is_dir() and not (own / "tokenizer.json").is_file():
        print("jaxscale: there is no tokenizer.json: the model takes token ids and not text", file=sys.stderr)
        return f"in Python, js.load({run.place!r}).generate([1, 2, 3]).ids"
    return f"jaxscale sample {run.place} --prompt ...{imports_of(run)}"
