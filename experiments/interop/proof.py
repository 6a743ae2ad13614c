"""Every family against `transformers`: logits, and 64 greedy tokens with a cache and without, on three layouts.

    python -m experiments.interop.proof                 # all of them, and results/proof.jsonl
    python -m experiments.interop.proof --only qwen3

A tiny model of each with random weights, written by `transformers` and read from its folder, float32. They continue two
prompts of 16 ids by 64, greedily and with their own cache. Without a cache, ours is given the whole text and has to
find each of the 64 likeliest, which is what choosing them one by one comes to; with a cache they are chosen so.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

import jax
import numpy as np

import jaxscale as js
from jaxscale.interop import open_pretrained
from tests.truth import foreign, greedy

HERE = Path(__file__).parent
LAYOUTS = ("none", "tensor=4", "data=2,tensor=2,context=2")
PROMPT, NEW = 16, 64
WITHIN = 1e-4


def main() -> None:
    """Writes a line per family and layout."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="one family")
    parser.add_argument("--missing", action="store_true", help="only what the file has no line of")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "proof.jsonl", help="the file")
    args = parser.parse_args()
    js.simulate_devices(8)
    out = args.out
    out.parent.mkdir(exist_ok=True)
    lines = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
    there = {(x["family"], x["layout"]) for x in lines} if args.missing else set()
    for name in [args.only] if args.only else foreign.MODELS:
        if all((name, where) in there for where in LAYOUTS):
            continue
        text = foreign.continued(name, PROMPT, NEW)
        wanted = foreign.logits(name, text)
        with tempfile.TemporaryDirectory() as folder:
            found = open_pretrained(foreign.save(name, Path(folder)), dtype="float32")
            for where in LAYOUTS:
                began = time.monotonic()
                got = greedy.run(found, None if where == "none" else js.Layout(where), text, PROMPT)
                at = np.s_[:, PROMPT - 1 : -1]
                line = {
                    "family": name,
                    "layout": where,
                    "error": float(np.abs(got.logits - wanted).max()),
                    "largest": float(np.abs(wanted).max()),
                    "without cache": int((got.logits[at].argmax(-1) == text[:, PROMPT:]).all(0).sum()),
                    "with cache": int((got.cached == text[:, PROMPT:]).all(0).sum()),
                    "seconds": round(time.monotonic() - began, 1),
                    "jax": jax.__version__,
                }
                lines = [x for x in lines if (x["family"], x["layout"]) != (name, where)] + [line]
                out.write_text("".join(json.dumps(x) + "\n" for x in lines))
                print(json.dumps(line), flush=True)
    bad = [x for x in lines if x["error"] > WITHIN or min(x["without cache"], x["with cache"]) < NEW]
    print(f"{len(lines) - len(bad)} of {len(lines)} agree")
    raise SystemExit(1 if bad else 0)


if __name__ == "__main__":
    main()
