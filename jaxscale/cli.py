"""The command line `jaxscale COMMAND`; each command is a module of `jaxscale/commands`."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import io
import logging
import re
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from jaxscale.commands import (
    annotate,
    checkpoint,
    coordcheck,
    data,
    eval,
    explain,
    export,
    fold,
    grow,
    import_,
    launch,
    laws,
    merge,
    microbench,
    new,
    peers,
    plan,
    prune,
    quantize,
    replay,
    report,
    rl,
    sample,
    schedule,
    serve,
    settings,
    sweep,
    train,
    tune,
)
from jaxscale.commands.shared import TEXT, accept, import_module, join
from jaxscale.errors import INTERRUPTED, MISTAKE, ConfigError, JaxscaleError, near
from jaxscale.import_path import append_current_folder, drop_current_folder
from jaxscale.other_names import same
from jaxscale.version import __version__
from pallas_kernels.errors import KernelError

COMMANDS = (
    new, data, annotate, train, rl, launch, peers, sweep, laws, explain, plan, coordcheck, sample, eval, serve, import_,
    merge, quantize, tune, fold, prune, grow, export, report, checkpoint, replay, schedule, microbench, settings,
)  # fmt: skip
"""Modules of the commands, in the order of `--help`."""

OWN_MODULES = ("train", "sweep", "rl")
"""Commands whose gin file may import modules of the current folder. Others may read untrusted folders."""

_DESCRIPTION = """\
Train, sample, explain and plan sharded models.

A configuration is a gin file; any binding in it can be changed from here:

  jaxscale new my_study
  jaxscale data experiments/demo.gin
  jaxscale train experiments/demo.gin --devices 8
  jaxscale train experiments/demo.gin --gin.train.steps=50 --mesh "data=2,tensor=4" --devices 8
  jaxscale train --resume runs/demo-1
  jaxscale launch --nproc 2 -- train experiments/demo.gin --devices 4
  jaxscale peers --port 29400
  jaxscale explain experiments/demo.gin --mesh "fsdp=8"
  jaxscale plan experiments/llama3_8b.gin --topology v5p:4x4x4 --tokens 1T
  jaxscale sweep experiments/lr_sweep.gin --run runs/lr
  jaxscale coordcheck experiments/mup_transfer/mup.gin
  jaxscale rl my_rewards.gin --from runs/demo-1
  jaxscale sample runs/demo-1 --prompt "def "
  jaxscale eval runs/demo-1
  jaxscale serve runs/demo-1
  jaxscale import Qwen/Qwen3-0.6B runs/qwen3
  jaxscale train --from runs/qwen3 experiments/finetune/lora.gin
  jaxscale merge runs/lora-1 runs/merged
  jaxscale quantize runs/demo-1 runs/demo-int4 --recipe '@GPTQ(bits=4, group=32)'
  jaxscale fold runs/demo-1 runs/folded --uses 2
  jaxscale prune runs/experts-1 runs/fewer --experts 6
  jaxscale grow runs/small --layers 12 --out runs/large
  jaxscale export runs/merged models/qwen3
  jaxscale report runs/demo-1 runs/demo-2
  jaxscale checkpoint verify runs/demo-1
  jaxscale replay runs/demo-1 --step 200
  jaxscale schedule 1f1b --stages 4 --microbatches 8
  jaxscale laws fit runs/sweep --law chinchilla --out laws
  jaxscale microbench --out my.json
  jaxscale settings AdamW
"""


class _Parser(argparse.ArgumentParser):
    """An argument parser without abbreviations that raises `ConfigError`, printed as one sentence with exit code 2."""

    def __init__(self, **options: Any):
        super().__init__(**{"allow_abbrev": False, **options})

    def error(self, message: str) -> NoReturn:
        """Raise the message of argparse."""
        raise ConfigError(f"{message}; see {self.prog} --help")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="jaxscale", description=_DESCRIPTION, formatter_class=TEXT)
    parser.add_argument("--version", action="version", version=f"jaxscale {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=_Parser)
    for command in COMMANDS:
        command.add(commands)
    return parser


def _help_of(argv: list[str]) -> str:
    """The output of a command's `--help`."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        _parser().parse_args([argv[0], "--help"])
    return out.getvalue()


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        argv: arguments; by default those of the process.

    Returns:
        The exit code: 0, 2 for an error of the user, 70 for one that may pass, 130 after Ctrl-C, or the command's own.
    """
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    if argv is None:
        drop_current_folder()
    try:
        return _run(list(sys.argv[1:] if argv is None else argv))
    except (JaxscaleError, KernelError) as e:
        print(f"jaxscale: {e}", file=sys.stderr)
        return e.code if isinstance(e, JaxscaleError) else MISTAKE
    except BrokenPipeError:
        return 1
    except KeyboardInterrupt:
        print("jaxscale: interrupted", file=sys.stderr)
        return INTERRUPTED


def _run(argv: list[str]) -> int:
    from jaxscale.config import split_overrides

    bindings, rest = split_overrides(argv)
    parser = _parser()
    names = [command.__name__.rpartition(".")[2].rstrip("_") for command in COMMANDS]
    if rest and not rest[0].startswith("-") and rest[0] not in names:
        raise ConfigError(f"there is no command '{rest[0]}' (see jaxscale --help){near(rest[0], names)}")
    try:
        args, more = parser.parse_known_args(rest)
    except ConfigError as e:
        raise _misspelt(str(e), rest) or e from None
    if more:
        options = [a for a in more if a.startswith("--") or "=" in a][:1]
        known = re.findall(r"--[a-z][a-z-]*", parser.format_help() if args.command is None else _help_of(rest))
        hint = _hint(options[0], sorted(set(known))) if options else ""
        program = "jaxscale" if args.command is None else f"jaxscale {rest[0]}"
        raise ConfigError(f"unrecognized arguments: {' '.join(more)}; see {program} --help{hint}")
    if args.command is None:
        parser.print_help()
        return 0
    modules = getattr(args, "modules", None) or []
    if modules or args.command in OWN_MODULES:
        append_current_folder()
    for module in modules:
        import_module(module)
    if getattr(args, "devices", None) is not None:
        from jaxscale.layout import simulate_devices

        simulate_devices(args.devices)
    if getattr(args, "distributed", None) is not None:
        join(args.distributed)
    if getattr(args, "accept_edits", False):
        accept(args)
    return args.run_command(args, bindings)


def _misspelt(message: str, argv: list[str]) -> ConfigError | None:
    """An error that names the option which nearly is the one that argparse misses, or `None`."""
    _, _, missing = message.partition("; see ")[0].partition("are required: ")
    for word in argv:
        close = difflib.get_close_matches(word.partition("=")[0], missing.split(", "), 1, cutoff=0.8)
        if word.startswith("--") and close:
            return ConfigError(f"unrecognized arguments: {word}; did you mean '{close[0]}'?")
    return None


def _hint(word: str, known: list[str]) -> str:
    """What an unknown option, or `name=value`, may stand for: an option, a binding, or an axis of the mesh."""
    name, _, value = word.partition("=")
    bare, value = name.lstrip("-"), value or "..."
    options = [option.removeprefix("--") for option in known]
    close = difflib.get_close_matches(bare, options, 1, cutoff=0.85) or same(bare, options)  # before a mesh axis
    if close:
        return f"; did you mean '--{close[0]}'?"
    if "--gin" not in known:
        return near(name, known)
    from jaxscale.config import registered
    from jaxscale.layout.axes import MESH_AXES
    from jaxscale.step import TrainConfig

    if "." in bare and bare.partition(".")[0] in registered():
        return f"; did you mean '--gin.{bare}={value}'?"
    if axes := same(bare, MESH_AXES):
        return f"""; did you mean '--mesh "{axes[0]}={value}"'?"""
    fields = same(bare, TrainConfig.__dataclass_fields__, bindings=True)
    if fields:
        return f"; did you mean '--gin.{fields[0] if '.' in fields[0] else f'train.{fields[0]}'}={value}'?"
    if bare in ("config", "config-file", "config_file", "cfg"):
        return "; name the gin file without an option, as in jaxscale train experiments/demo.gin"

    return near(name, known)


if __name__ == "__main__":
    sys.exit(main())
