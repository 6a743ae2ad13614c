"""`jaxscale export`: writes a run's parameters as a Hugging Face folder."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from jaxscale.commands.shared import TEXT, accept_argument, import_argument, no_bindings
from jaxscale.working_copy import as_named


def add(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "export",
        help="write a run's parameters as a Hugging Face folder",
        description="Writes a run's parameters as a Hugging Face folder: config.json, safetensors, and the other files "
        "of an imported\ncheckpoint. A model that no Hugging Face family can express is refused; the message says what "
        "the closest one lacks.\n\n"
        "  jaxscale export runs/qwen3-tuned models/qwen3-tuned\n"
        "  jaxscale export runs/demo-1 models/demo --family llama --dtype bfloat16\n"
        "  jaxscale export runs/lora-1 models/lora --adapters\n"
        "  jaxscale export runs/demo-int4 models/demo-int4 --as compressed-tensors\n"
        "  jaxscale export runs/qwen3-tuned models/tuned.gguf --type q8_0",
        formatter_class=TEXT,
    )
    parser.add_argument("run", metavar="RUN", help="a run folder, such as runs/demo-1")
    parser.add_argument("out", metavar="OUT", help="the folder to write, or a file NAME.gguf for llama.cpp")
    import_argument(parser)
    accept_argument(parser)
    parser.add_argument("--family", help="Hugging Face family, such as llama (default: imported one, or first fit)")
    parser.add_argument("--step", type=int, help="step of the checkpoint (default: the newest)")
    parser.add_argument("--dtype", help="bfloat16 or float32 (default: that of the parameters)")
    parser.add_argument("--type", help="of the matrices of a GGUF file: f32, f16, bf16, q8_0 or q4_0 (default: own)")
    parser.add_argument("--shard-size", type=float, metavar="GB", help="largest file in GB (default 5)")
    parser.add_argument(
        "--as-imported",
        action="store_true",
        help="write quantised weights that the import kept as they were (default: dense)",
    )
    parser.add_argument(
        "--as",
        dest="stored_as",
        metavar="LAYOUT",
        help="write the codes of a quantised run as compressed-tensors, gptq or awq (default: dense)",
    )
    parser.add_argument(
        "--adapters",
        action="store_true",
        help="write only the adapters of the run, in PEFT's format (default: the weights with adapters added)",
    )
    parser.add_argument(
        "--base",
        metavar="HF",
        help="with --adapters: the base model's folder or name, for adapter_config.json (default: the imported one)",
    )
    parser.add_argument(
        "--check", action="store_true", help="compare float32 logits with transformers, which must be installed"
    )
    parser.set_defaults(run_command=run)


def run(args: argparse.Namespace, bindings: list[str]) -> int:
    """Export and print the size; returns the exit code 0."""
    no_bindings(args, bindings)
    from jaxscale import load
    from jaxscale.convert.pretrained import export_checkpoint
    from jaxscale.errors import ConfigError

    if args.adapters:
        return _adapters(args)
    if args.out.endswith(".gguf"):
        return _gguf(args)
    if args.type is not None:
        raise ConfigError(f"--type {args.type} is for GGUF files; name one, such as {args.out}.gguf, or leave it out")
    if args.stored_as is not None and args.as_imported:
        raise ConfigError(f"--as {args.stored_as} and --as-imported each name a layout; leave one of them out")
    if args.base is not None:
        raise ConfigError("--base names the base model of adapters; add --adapters or leave it out")
    size = 5.0 if args.shard_size is None else args.shard_size
    if not size > 0:
        raise ConfigError(f"--shard-size {size}: must be above 0")

    if args.check:
        from jaxscale.convert.same_logits import packages

        packages()  # before anything is written

    options = {
        "family": args.family,
        "step": args.step,
        "dtype": args.dtype,
        "as_imported": args.as_imported,
        "stored_as": args.stored_as,
        "say": _say,
    }
    out = export_checkpoint(load(args.run), args.out, shard_bytes=int(size * 10**9), **options)
    files = sorted(out.glob("*.safetensors"))
    print(f"{as_named(out)}: {sum(f.stat().st_size for f in files):,} bytes of safetensors in {len(files)} file(s)")
    if args.check:
        from jaxscale.convert.same_logits import compare

        print(compare(out))
    return 0


def _gguf(args: argparse.Namespace) -> int:
    from jaxscale import load
    from jaxscale.convert.exporting_gguf import export_gguf
    from jaxscale.errors import ConfigError

    for name, present in (
        ("--dtype", args.dtype),
        ("--shard-size", args.shard_size),
        ("--base", args.base),
        ("--as-imported", args.as_imported or None),
        ("--as", args.stored_as),
    ):
        if present is not None:
            raise ConfigError(f"{name} is for Hugging Face folders; leave it out, or use --type for a GGUF file")
    out = export_gguf(load(args.run), args.out, type=args.type, family=args.family, step=args.step, say=_say)
    print(f"{as_named(out)}: {out.stat().st_size:,} bytes")
    if args.check:
        from jaxscale.convert.same_logits import compare

        print(compare(out))
    return 0


def _adapters(args: argparse.Namespace) -> int:
    from jaxscale import load
    from jaxscale.convert.exporting_adapters import export_adapters
    from jaxscale.errors import ConfigError

    whole = (
        ("--check", args.check),
        ("--shard-size", args.shard_size is not None),
        ("--as-imported", args.as_imported),
        ("--as", args.stored_as is not None),
    )
    for name, present in whole:
        if present:
            raise ConfigError(f"{name} applies to whole models; leave out {name} or --adapters")
    options = {"base": args.base, "family": args.family, "step": args.step, "dtype": args.dtype, "say": _say}
    out = export_adapters(load(args.run), args.out, **options)

    size = sum(f.stat().st_size for f in out.glob("*.safetensors"))
    place = as_named(out)
    print(f"{place}: {size:,} bytes of adapters; peft.PeftModel.from_pretrained(base, '{place}')")
    return 0


def _say(sentence: str) -> None:
    print(f"jaxscale: {sentence}", file=sys.stderr)
