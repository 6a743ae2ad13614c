"""`jaxscale export`: writes a run's parameters as a Hugging Face folder."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from jaxscale.commands.shared import TEXT, accept_argument, import_argument, no_bindings


def add(commands: Any) -> None:
    """Adds the command."""
    parser = commands.add_parser(
        "export",
        help="write a run's parameters as a Hugging Face folder",
        description="Writes a run's parameters as a Hugging Face folder: config.json, safetensors, and what came with "
        "an imported checkpoint.\nA model that no family can say is refused, with what the nearest cannot.\n\n"
        "  jaxscale export runs/qwen3-tuned models/qwen3-tuned\n"
        "  jaxscale export runs/demo-1 models/demo --family llama --dtype bfloat16\n"
        "  jaxscale export runs/lora-1 models/lora --adapters",
        formatter_class=TEXT,
    )
    parser.add_argument("run", metavar="RUN", help="a run folder, as runs/demo-1")
    parser.add_argument("out", metavar="OUT", help="the folder to make")
    import_argument(parser)
    accept_argument(parser)
    parser.add_argument("--family", help="theirs, as llama (default: the one it came from, else the first that fits)")
    parser.add_argument("--step", type=int, help="whose checkpoint (default: the newest)")
    parser.add_argument("--dtype", help="bfloat16 or float32 (default: as it is kept)")
    parser.add_argument("--shard-size", type=float, metavar="GB", help="the most of a file (default 5)")
    parser.add_argument(
        "--adapters",
        action="store_true",
        help="of a run with adapters those alone, as PEFT keeps them (default: the weights with them added)",
    )
    parser.add_argument(
        "--base",
        metavar="HF",
        help="with --adapters, the folder or name of their model for adapter_config.json (default: where it came from)",
    )
    parser.add_argument(
        "--check", action="store_true", help="compare logits with transformers, which has to be installed, in float32"
    )
    parser.set_defaults(run_command=run)


def run(args: argparse.Namespace, bindings: list[str]) -> int:
    """Does it."""
    no_bindings(args, bindings)
    from jaxscale import load
    from jaxscale.convert.pretrained import export_checkpoint
    from jaxscale.errors import ConfigError

    if args.adapters:
        return _adapters(args)
    if args.base is not None:
        raise ConfigError("--base says whose adapters they are; give --adapters as well, or leave it out")
    size = 5.0 if args.shard_size is None else args.shard_size
    if not size > 0:
        raise ConfigError(f"--shard-size {size}: must be above 0")

    if args.check:
        from jaxscale.convert.same_logits import packages

        packages()  # before anything is written

    told = {"family": args.family, "step": args.step, "dtype": args.dtype, "say": _say}
    out = export_checkpoint(load(args.run), args.out, shard_bytes=int(size * 10**9), **told)
    files = sorted(out.glob("*.safetensors"))
    print(f"{out}: {sum(f.stat().st_size for f in files):,} bytes of safetensors in {len(files)} file(s)")
    if args.check:
        from jaxscale.convert.same_logits import compare

        print(compare(out))
    return 0


def _adapters(args: argparse.Namespace) -> int:
    from jaxscale import load
    from jaxscale.convert.exporting_adapters import export_adapters
    from jaxscale.errors import ConfigError

    for name, given in (("--check", args.check), ("--shard-size", args.shard_size is not None)):
        if given:
            raise ConfigError(f"{name} is of whole models; leave it out, or --adapters")
    told = {"base": args.base, "family": args.family, "step": args.step, "dtype": args.dtype, "say": _say}
    out = export_adapters(load(args.run), args.out, **told)
    size = sum(f.stat().st_size for f in out.glob("*.safetensors"))
    print(f"{out}: {size:,} bytes of adapters; peft.PeftModel.from_pretrained(base, '{out}')")
    return 0


def _say(sentence: str) -> None:
    print(f"jaxscale: {sentence}", file=sys.stderr)
