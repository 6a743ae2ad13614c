"""Compare every model family with `transformers`: logits, and 64 greedy tokens with and without cache, three layouts.

    python -m experiments.interop.proof                 # all of them, and results/proof.jsonl
    python -m experiments.interop.proof --only qwen3

For each family `transformers` saves a tiny float32 model with random weights, and continues two prompts of 16 tokens by
64, greedily. Without a cache, our model gets the whole sequence, and each of the 64 tokens has to have the largest
logit, which is equivalent to greedy generation; with a cache, our model generates them one by one.
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
    """Compare, and write a line per family and layout."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="only this family")
    parser.add_argument("--missing", action="store_true", help="only families and layouts that the file lacks")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "proof.jsonl", help="the file of results")
    args = parser.parse_args()
    js.simulate_devices(8)
    out = args.out
    out.parent.mkdir(exist_ok=True)
    lines = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
    done = {(x["family"], x["layout"]) for x in lines} if args.missing else set()
    for name in [args.only] if args.only else foreign.MODELS:
        if all((name, where) in done for where in LAYOUTS):
            continue
        text = foreign.continued(name, PROMPT, NEW)
        expected = foreign.logits(name, text)
        with tempfile.TemporaryDirectory() as folder:
            opened = open_pretrained(foreign.save(name, Path(folder)), dtype="float32")
            for where in LAYOUTS:
                began = time.monotonic()
                got = greedy.run(opened, None if where == "none" else js.Layout(where), text, PROMPT)
                at = np.s_[:, PROMPT - 1 : -1]
                line = {
                    "family": name,
                    "layout": where,
                    "error": float(np.abs(got.logits - expected).max()),
                    "largest": float(np.abs(expected).max()),
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
