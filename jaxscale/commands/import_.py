"""`jaxscale import`: makes a run folder of a Hugging Face checkpoint."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from jaxscale.commands.shared import TEXT, continuing, no_bindings


def add(commands: Any) -> None:
    """Adds the command."""
    parser = commands.add_parser(
        "import",
        help="make a run folder of a Hugging Face checkpoint",
        description="Makes a run folder of a Hugging Face checkpoint: a folder with config.json and safetensors, or a "
        "name on the Hub.\nTensors are streamed; an import that was interrupted goes on when it is started again.\n\n"
        "  jaxscale import ~/models/Qwen3-0.6B runs/qwen3\n"
        "  jaxscale import Qwen/Qwen3-0.6B runs/qwen3 --layout tensor=4 --devices 4\n"
        "  jaxscale import Qwen/Qwen3-0.6B runs/tuned --adapters models/lora",
        formatter_class=TEXT,
    )
    parser.add_argument("source", metavar="HF_DIR", help="a folder with config.json and safetensors, or owner/model")
    parser.add_argument("out", metavar="OUT", help="the run folder to make")
    parser.add_argument("--layout", metavar="SIZES", help='the mesh it is for, as "tensor=4" (default: one device)')
    parser.add_argument("--dtype", help="bfloat16 or float32 (default: whichever holds every value)")
    parser.add_argument("--revision", help="of a name on the Hub: a branch, tag or commit")
    parser.add_argument("--adapters", metavar="PEFT", help="a folder of PEFT's LoRA adapters, to add to the weights")
    parser.add_argument(
        "--check", action="store_true", help="compare logits with transformers, which has to be installed, in float32"
    )
    parser.add_argument("--devices", type=int, metavar="N", help="simulate N devices on this machine's CPU")
    parser.set_defaults(run_command=run)


def run(args: argparse.Namespace, bindings: list[str]) -> int:
    """Does it."""
    no_bindings(args, bindings)
    from jaxscale.convert.pretrained import import_checkpoint
    from jaxscale.errors import ConfigError

    if args.check and args.adapters is not None:
        raise ConfigError("--check compares a model as it came; leave out --check or --adapters")

    def say(sentence: str) -> None:
        print(f"jaxscale: {sentence}", file=sys.stderr)

    if args.check:
        from jaxscale.convert.same_logits import compare

        print(compare(args.source, revision=args.revision))
    told = {
        "layout": args.layout,
        "dtype": args.dtype,
        "revision": args.revision,
        "adapters": args.adapters,
        "say": say,
    }
    made = import_checkpoint(args.source, args.out, **told)
    model = made.config.model
    of = f"{made.info['family']}, {model.param_count():,} parameters in {model.param_dtype}"  # type: ignore[attr-defined]
    print(f"{made.path}: {of}; {continuing(made)}")
    return 0
