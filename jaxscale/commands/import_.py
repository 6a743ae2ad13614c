"""`jaxscale import`: converts a Hugging Face checkpoint to a run folder."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from jaxscale.commands.shared import TEXT, continuing, no_bindings


def add(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "import",
        help="convert a Hugging Face checkpoint to a run folder",
        description="Converts a Hugging Face checkpoint (a folder with config.json and safetensors, or a name on the "
        "Hub) to a run folder.\nTensors are streamed; the same command continues an interrupted import.\n\n"
        "  jaxscale import ~/models/Qwen3-0.6B runs/qwen3\n"
        "  jaxscale import Qwen/Qwen3-0.6B runs/qwen3 --layout tensor=4 --devices 4\n"
        "  jaxscale import s3://BUCKET/hf/qwen3 s3://BUCKET/runs/qwen3\n"
        "  jaxscale import Qwen/Qwen3-0.6B runs/tuned --adapters models/lora",
        formatter_class=TEXT,
    )
    parser.add_argument(
        "source",
        metavar="HF_DIR",
        help="a folder or URL with config.json and safetensors, owner/model, or a GGUF file",
    )
    parser.add_argument("out", metavar="OUT", help="the run folder to write")
    parser.add_argument("--layout", metavar="SIZES", help='mesh to load onto, such as "tensor=4" (default: one device)')
    parser.add_argument("--dtype", help="bfloat16 or float32 (default: the one that represents all values exactly)")
    parser.add_argument("--revision", help="for a name on the Hub: a branch, tag or commit")
    parser.add_argument("--adapters", metavar="PEFT", help="a folder with PEFT's LoRA adapters, to add to the weights")
    parser.add_argument(
        "--widen",
        action="store_true",
        help="import quantised weights as the values they stand for (default: as they are)",
    )
    parser.add_argument(
        "--check", action="store_true", help="compare float32 logits with transformers, which must be installed"
    )
    parser.add_argument("--devices", type=int, metavar="N", help="simulate N devices on this machine's CPU")
    parser.set_defaults(run_command=run)


def run(args: argparse.Namespace, bindings: list[str]) -> int:
    """Import and print the result; returns the exit code 0."""
    no_bindings(args, bindings)
    from jaxscale.convert.pretrained import import_checkpoint
    from jaxscale.errors import ConfigError

    if args.check and args.adapters is not None:
        raise ConfigError("--check compares the model without adapters; leave out --check or --adapters")

    def say(sentence: str) -> None:
        print(f"jaxscale: {sentence}", file=sys.stderr)

    if args.check:
        from jaxscale.convert.same_logits import compare

        print(compare(args.source, revision=args.revision))
    options = {
        "layout": args.layout,
        "dtype": args.dtype,
        "revision": args.revision,
        "adapters": args.adapters,
        "widen": args.widen,
        "say": say,
    }
    imported = import_checkpoint(args.source, args.out, **options)
    model: Any = imported.config.model
    size = f"{model.param_count():,} parameters in {model.param_dtype}"
    if imported.config.stored is not None:
        size += f" (matrices stored as {imported.config.stored.describe()})"
    print(f"{imported.place}: {imported.info['family']}, {size}; {continuing(imported)}")
    return 0
