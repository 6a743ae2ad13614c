"""`jaxscale launch --on SYSTEM`: writes the file with which a cluster starts and restarts a run."""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from jaxscale.errors import ConfigError, LayoutError, near

if TYPE_CHECKING:
    from jaxscale.clusters import Job, Launcher
    from jaxscale.hardware import Topology
    from jaxscale.step import TrainConfig

SHARED = "nfs nfs4 lustre gpfs beegfs ceph cifs smb3 afs glusterfs wekafs panfs pvfs2 orangefs 9p".split()
"""File systems of network disks; those of FUSE are taken as shared, too."""

KEYS = re.compile(r"KEY|TOKEN|SECRET|PASSWORD|CREDENTIAL")
"""What a name of an environment variable contains if its value is a secret."""


def options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `--on`.

    Args:
      parser: the parser of the command.
    """
    add = parser.add_argument_group("writing what a cluster reads").add_argument
    add("--on", metavar="SYSTEM", help="write what this system reads: slurm, kubernetes, xpk or skypilot")
    add("--topology", metavar="NAME", help="the hardware, such as h100:16, v5p:4x4x4 or v5e:16x16*2 (two slices)")
    add("--run", metavar="DIR", help="the run folder that all hosts and restarts use, such as s3://bucket/run-1")
    add("--mesh", metavar="SIZES", help='the mesh, such as "data=2,fsdp=-1" (default: that of the config)')
    add("--import", dest="modules", action="append", metavar="MODULE", help="a module that the config needs")
    add("-o", "--out", metavar="FILE", help="the file to write (default: the job's name with an ending)")
    add("--name", metavar="NAME", help="name of the job (default: that of the config)")
    add("--image", metavar="IMAGE", help="container image that has jaxscale installed")
    add("--venv", metavar="DIR", help="virtual environment on the hosts (default: the one that runs this command)")
    add("--setup", action="append", metavar="LINE", help='shell line before training, such as "module load cuda"')
    add("--env", action="append", metavar="NAME=VALUE", help="set an environment variable")
    add(
        "--secret",
        action="append",
        metavar="NAME",
        help="environment variable that holds a key, such as WANDB_API_KEY; the file names it without its value",
    )
    add("--time", metavar="LIMIT", help="time limit, such as 90m, 24h or 7d")
    add("--volume", action="append", metavar="CLAIM:/PATH", help="Kubernetes: mount a persistent volume claim")
    add(
        "--option",
        action="append",
        metavar="NAME=VALUE",
        help="an option of the system, such as partition=gpu (slurm: any of sbatch), namespace=team (kubernetes)",
    )
    add("--submit", action="store_true", help="also submit the file, with the system's own tool")


NAMES = "topology run mesh modules out name image venv setup env secret time volume option submit".split()
"""The options that only `--on` has."""


def run(args: argparse.Namespace, bindings: Sequence[str]) -> int:
    """Write the file, and submit it with `--submit`; returns the exit code.

    Args:
      args: the parsed options.
      bindings: the `--gin.` options.

    Raises:
      ConfigError, LayoutError: the job cannot run; nothing is written.
    """
    import jax

    jax.config.update("jax_platforms", "cpu")  # writing a file must not wait for an accelerator
    from jaxscale.clusters import SYSTEMS

    if args.nproc is not None or args.fewer:
        raise ConfigError("--nproc and --fewer are for this machine; with --on the topology says how many hosts run")
    if args.on not in SYSTEMS:
        raise ConfigError(f"--on {args.on}: jaxscale launch writes no file for it{near(args.on, SYSTEMS)}")
    launcher = SYSTEMS[args.on]
    if args.submit and shutil.which(launcher.tool) is None:
        raise ConfigError(
            f"--submit needs {launcher.tool}, which is not on this machine's PATH; leave out --submit and run it where "
            "it is installed"
        )
    job, config = _job(args, bindings)
    launcher.check(job)
    check_mesh(config, job.hardware)
    warn_about_run(job, launcher)
    warn_about_trackers(config, job, launcher)
    text, file = launcher.text(job), Path(args.out or f"{job.name}{launcher.suffix}")
    try:
        with file.open("x") as new:  # never over an older file, which may have been edited
            new.write(text)
    except FileExistsError:
        raise ConfigError(f"{file} exists already; delete it, or write another file with -o") from None
    except OSError as e:
        raise ConfigError(f"{file} cannot be written: {e.strerror}") from None
    words = launcher.submit(job, file)
    if not args.submit:
        print(f"written to {file}; start the job with:\n  {' '.join(words)}")
        return 0
    print(f"written to {file}")
    return subprocess.run(words).returncode


def _job(args: argparse.Namespace, bindings: Sequence[str]) -> tuple[Job, TrainConfig]:
    from jaxscale import config as gin_config
    from jaxscale.clusters import Job, hosts_of
    from jaxscale.commands.shared import import_module, load
    from jaxscale.hardware import topology
    from jaxscale.import_path import append_current_folder

    for name in ("image", "venv", "name", "out"):
        if getattr(args, name) == "":
            raise ConfigError(f"--{name} is empty; check that the shell variable is set")
    for what, value in (("the hardware, such as --topology h100:16", args.topology), ("a gin file", args.config)):
        if not value:
            raise ConfigError(f"jaxscale launch --on {args.on} needs {what}")
    if not args.run:
        raise ConfigError(
            f"jaxscale launch --on {args.on} needs the run folder, in which restarts continue: --run s3://bucket/run-1"
        )
    hardware = topology(args.topology)
    hosts = hosts_of(hardware)
    append_current_folder()
    for module in args.modules or []:
        import_module(module)
    config = load(None, argparse.Namespace(**vars(args) | {"pipeline": None}), list(bindings))
    with gin_config.isolated():
        text = gin_config.load([args.config], bindings)
    if args.restarts is not None and args.restarts < 0:
        raise ConfigError(f"--restarts {args.restarts}: must be at least 0")
    train = [f"--gin.{_plain(line.replace(' = ', '=', 1))}" for line in bindings]
    train += ["--mesh", args.mesh] * (args.mesh is not None)
    train += [word for module in args.modules or [] for word in ("--import", module)]
    job = Job(
        name=_name(args),
        config=args.config,
        text=text,
        train=train,
        hardware=hardware,
        hosts=hosts,
        run=args.run if "://" in args.run or args.image else os.path.abspath(args.run),
        python=os.path.join(args.venv or sys.prefix, "bin", "python"),
        image=args.image,
        setup=args.setup or [],
        env=_env(args),
        secrets=_secrets(args),
        minutes=None if args.time is None else minutes(args.time),
        restarts=args.restarts,
        volumes=args.volume or [],
        options=_pairs("option", args.option),
    )
    return job, config


def _plain(binding: str) -> str:
    """A binding whose string has no quotes, where none are needed; several shells in a row do not lose them."""
    return re.sub(r"='([a-z][a-z0-9_=,-]*)'$", r"=\1", binding)


def check_mesh(config: TrainConfig, hardware: Topology) -> None:
    """Check that a config's mesh takes all devices of the hardware, and that the model and the batch fit it.

    Args:
      config: the settings.
      hardware: the topology.

    Raises:
      LayoutError, ConfigError: they do not fit.
    """
    from jaxscale.layout.mesh import over_slices, parse_mesh
    from jaxscale.step import blueprint_of
    from jaxscale.step.prepare import check_quickly

    layout, devices = config.layout, hardware.devices
    if layout is None:
        if devices > 1:
            raise LayoutError(
                f"the config has no layout, so that it uses one of the {devices} devices of {hardware.name}; add "
                '--mesh "data=-1"'
            )
        return
    sizes = parse_mesh(layout.mesh)
    fixed = math.prod(size for size in sizes.values() if size != -1)
    if devices % fixed or (-1 not in sizes.values() and fixed != devices):
        raise LayoutError(
            f"mesh '{layout.mesh}' does not fit {hardware.name}, which has {devices} devices; sizes must multiply to "
            f'{devices}, and one of them may be -1, such as --mesh "data=-1"'
        )
    placed = dataclasses.replace(config, layout=layout.abstract(devices))
    if hardware.slices > 1:
        assert placed.layout is not None
        full = placed.layout.sizes
        if layout.across is None or full[layout.across] % hardware.slices:
            raise LayoutError(
                f"{hardware.name} has {hardware.slices} slices, and no axis of mesh '{layout.mesh}' spans them; "
                f"{over_slices(full, hardware.slices)}"
            )
    blueprint, _ = blueprint_of(placed)
    check_quickly(blueprint, placed)


def minutes(text: str) -> int:
    """Read a time limit.

    Args:
      text: such as "90m", "24h" or "7d".

    Raises:
      ConfigError: it is not of this form, or 0.
    """
    match = re.fullmatch(r"(\d+)([mhd])", text)
    if match is None or int(match[1]) == 0:
        raise ConfigError(f"--time {text} is not a time limit; write 90m, 24h or 7d")
    return int(match[1]) * {"m": 1, "h": 60, "d": 24 * 60}[match[2]]


def warn_about_run(job: Job, launcher: Launcher) -> None:
    """Print a warning if the run folder is on a disk that hosts do not share.

    Args:
      job: the job.
      launcher: its launcher.
    """
    from jaxscale.clusters import SCHEMES

    if job.run.startswith(SCHEMES):
        return
    shared, kind = launcher.shares(job, job.run), _file_system(job.run)
    if shared is None:
        shared = job.hosts.count == 1 or kind is None or kind in SHARED or kind.startswith("fuse")
        reason = f"is on a disk of this machine ({kind})"
    else:
        reason = "is on a disk that ends with its machine"
    if not shared:
        print(
            f"jaxscale: warning: --run {job.run} {reason}, which the hosts of all restarts do not share; use a bucket, "
            "such as --run s3://bucket/run-1, or a shared disk",
            file=sys.stderr,
        )


def warn_about_trackers(config: TrainConfig, job: Job, launcher: Launcher) -> None:
    """Print a line for each tracker that has none of its environment variables on the hosts.

    Args:
      config: the settings.
      job: the job.
      launcher: its launcher.
    """
    if launcher.environment:
        return
    for tracker in config.trackers:
        names = tracker.variables()
        if names and not {*names} & {*job.secrets, *job.env}:
            print(
                f"jaxscale: warning: train.trackers has {type(tracker).__name__}(), and the hosts do not have "
                f"{' or '.join(names)} of your shell; pass it on with --secret {names[0]}",
                file=sys.stderr,
            )


def _file_system(path: str) -> str | None:
    """The kind of file system that holds a path, by the longest mount point above it; `None` if unknown."""
    try:
        mounts = [line.split()[1:3] for line in Path("/proc/mounts").read_text().splitlines()]
    except OSError:
        return None
    above = [(len(point), kind) for point, kind in mounts if Path(path).is_relative_to(point)]
    return max(above)[1] if above else None


def _name(args: argparse.Namespace) -> str:
    name = args.name or re.sub(r"[^a-z0-9]+", "-", Path(args.config).stem.lower()).strip("-")[:40]
    if not re.fullmatch(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?", name):
        raise ConfigError(
            f"the job's name '{name}' must begin with a letter and have at most 40 lower-case letters, digits and "
            "dashes; choose one with --name"
        )
    return name


def _env(args: argparse.Namespace) -> dict[str, str]:
    env = _pairs("env", args.env)
    for name in env:
        _check_variable("env", name)
        if KEYS.search(name.upper()):
            raise ConfigError(f"--env {name}=... would write a key into the file; pass it with --secret {name}")
    return env


def _secrets(args: argparse.Namespace) -> list[str]:
    for word in args.secret or []:
        name, equals, _ = word.partition("=")
        if equals:
            raise ConfigError(f"--secret {name}=... has a value, which must not be in a file; write --secret {name}")
        _check_variable("secret", name)
    return list(dict.fromkeys(args.secret or []))


def _check_variable(option: str, name: str) -> None:
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
        raise ConfigError(f"--{option} {name}: not the name of an environment variable, such as WANDB_API_KEY")


def _pairs(option: str, words: Sequence[str] | None) -> dict[str, str]:
    pairs = {}
    for word in words or []:
        name, equals, value = word.partition("=")
        if not equals or not re.fullmatch(r"[\w-]+", name):
            raise ConfigError(f"--{option} {word} is not of the form NAME=VALUE")
        if "\n" in value:
            raise ConfigError(f"--{option} {name}: the value has several lines; write one")
        pairs[name.lstrip("-")] = value
    return pairs
