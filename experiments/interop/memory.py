"""Host memory of an import and an export: peak resident bytes, for a random checkpoint.

    python -m experiments.interop.memory                      # 2 GB, four cases, results/memory.jsonl
    python -m experiments.interop.memory --gigabytes 0.1

Writes a Llama folder of random bfloat16, one tensor at a time, in a process of its own; imports it, imports it for
tensor=4, and exports it again, each in a process that reports its peak (`VmHWM`) above what it had before it opened the
folder. Target: at most twice the largest tensor, plus a constant that does not grow with the checkpoint.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
MIB = 2**20
CONSTANT = 256 * MIB
"""Allowance on top: each thread has a chunk of 64 MiB and a copy of it, and Python modules are imported."""


def make(folder: Path, gigabytes: float, vocab_share: float) -> dict[str, Any]:
    """Write a Llama folder; `vocab_share` of it is the embedding, and as much the output head."""
    import ml_dtypes
    import numpy as np

    from jaxscale.interop.safetensors import write_header

    depth, heads = 16, 16
    total = gigabytes * 1e9 / 2
    width = 64 * max(1, round(math.sqrt(total * (1 - 2 * vocab_share) / (depth * (4 + 3 * 4))) / 64))
    hidden, vocab = 4 * width, max(256, round(total * vocab_share / width))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": width,
        "intermediate_size": hidden,
        "num_hidden_layers": depth,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "vocab_size": vocab - vocab % 8,
        "tie_word_embeddings": False,
    }
    vocab = config["vocab_size"]  # type: ignore[assignment]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, width), "lm_head.weight": (vocab, width)}
    shapes["model.norm.weight"] = (width,)
    for i in range(depth):
        layer = f"model.layers.{i}."
        shapes |= {f"{layer}{n}_layernorm.weight": (width,) for n in ("input", "post_attention")}
        shapes |= {f"{layer}self_attn.{n}_proj.weight": (width, width) for n in "qkvo"}
        shapes |= {f"{layer}mlp.{n}_proj.weight": (hidden, width) for n in ("gate", "up")}
        shapes[f"{layer}mlp.down_proj.weight"] = (width, hidden)
    folder.mkdir(parents=True)
    # repeat a prime number of values, so that no two tensors are equal; the mask leaves small exponents: no NaN
    random = np.random.default_rng(0).integers(0, 2**16, 9_999_991, np.uint16) & 0xBFFF
    at = 0
    with (folder / "model.safetensors").open("wb") as f:
        write_header(f, {k: (np.dtype(ml_dtypes.bfloat16), s) for k, s in shapes.items()})
        for shape in shapes.values():
            stop = at + math.prod(shape)
            f.write(np.take(random, np.arange(at, stop), mode="wrap").tobytes())
            at = stop
    (folder / "config.json").write_text(json.dumps(config))
    sizes = [2 * math.prod(s) for s in shapes.values()]
    return {"bytes": sum(sizes), "largest": max(sizes), "tensors": len(sizes)}


def peak() -> int:
    """Return the peak resident memory of this process in bytes."""
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def case(name: str, source: str, out: str) -> dict[str, Any]:
    """Run one import or export in this process; return its peak memory and time."""
    import jax

    import jaxscale as js
    from jaxscale.convert.pretrained import export_checkpoint, import_checkpoint

    js.simulate_devices(4)
    jax.numpy.zeros(1).block_until_ready()
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before, began = peak(), time.monotonic()
    if name == "export":
        export_checkpoint(source, out)
    else:
        import_checkpoint(source, out, layout=None if name == "import" else "tensor=4")
    return {"case": name, "before": before, "peak": peak(), "seconds": round(time.monotonic() - began, 1)}


def main() -> None:
    """Run every case in a process of its own, and write the results after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--folder", help="where to write (default: a temporary one)")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "memory.jsonl", help="the file of results")
    parser.add_argument("--case", nargs=3, metavar=("NAME", "SOURCE", "OUT"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.case:
        print(json.dumps(case(*args.case)))
        return
    lines = []
    out = args.out
    out.parent.mkdir(exist_ok=True)
    for gigabytes, share in ((args.gigabytes, 0.05), (args.gigabytes, 0.25), (args.gigabytes / 2, 0.1)):
        with tempfile.TemporaryDirectory(dir=args.folder) as temporary:
            root = Path(temporary)
            about = make(root / "theirs", gigabytes, share)
            jobs = [("import", "theirs", "run"), ("import tensor=4", "theirs", "cut"), ("export", "run", "back")]
            for name, source, made in jobs:
                command = [sys.executable, "-m", "experiments.interop.memory"]
                command += ["--case", name, str(root / source), str(root / made)]
                done = subprocess.run(command, check=True, capture_output=True, text=True)
                line = {**about, **json.loads(done.stdout.splitlines()[-1])}
                line["more"] = line["peak"] - line["before"]
                line["allowed"] = 2 * line["largest"] + CONSTANT
                lines.append(line)
                print(json.dumps(line), flush=True)
                out.write_text("".join(json.dumps(x) + "\n" for x in lines))
            lines[-1]["same tensors"] = same_tensors(root / "theirs", root / "back")
    out.write_text("".join(json.dumps(x) + "\n" for x in lines))
    raise SystemExit(any(x["more"] > x["allowed"] for x in lines))


def same_tensors(a: Path, b: Path) -> bool:
    """Return whether two folders have the same tensors, bit for bit."""
    from jaxscale.interop import SafeTensors

    one, two = SafeTensors(a), SafeTensors(b)
    if one.keys() != two.keys():
        return False
    for name in one:
        with one.reading(name) as x, two.reading(name) as y:
            if x.dtype != y.dtype or x.tobytes() != y.tobytes():
                return False
    return True


if __name__ == "__main__":
    main()
