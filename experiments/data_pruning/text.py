"""Pruned text: held-out loss after training on the hardest, the easiest or a random share of documents.

python experiments/data_pruning/text.py           # train; runs/data_pruning keeps what is finished
python experiments/data_pruning/text.py --draw    # the table of results/text.json
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import jaxscale as js
from jaxscale.data import pruned, python_stdlib
from jaxscale.models import TransformerConfig
from jaxscale.optim import Constant

HERE = Path(__file__).parent
RUNS = Path("runs/data_pruning")
CORPUS = python_stdlib()
SHARES = {
    "few documents": (0.02, 300),
    "many documents": (0.3, 300),
}
"""Share of the documents that stays, and steps: of 604 documents 12 are read several times, and 181 hardly once."""
ORDERS = ("hardest", "easiest", "random")
ROWS, LENGTH = 8, 128


def tokens(corpus: pruned) -> int:
    """Return the tokens of the training documents that stay."""
    return int(corpus.documents(js.data.ByteTokenizer(), "train").lengths.sum())


def measure() -> list[dict]:
    """Train on every share in every order."""
    rows = []
    for name, (share, steps) in SHARES.items():
        for order in ORDERS:
            corpus = pruned(CORPUS, keep=share, order=order)
            path = RUNS / f"{order}-{share:g}"
            run = js.load(path) if (path / "checkpoints" / str(steps)).exists() else js.fit(
                run=path, resume="newest", quiet=True, model=TransformerConfig(depth=2, width=64, heads=2, hidden=192),
                layout=None, data=corpus, steps=steps, batch_size=ROWS, seq_len=LENGTH, lr=3e-3, schedule=Constant(),
                eval_every=100, eval_batches=64,
            )  # fmt: skip
            curve = [(r["step"], r["loss"], r["eval_loss"]) for r in run.metrics() if "eval_loss" in r]
            rows.append(dict(name=name, share=share, order=order, tokens=tokens(corpus), curve=curve))
            print(name, order, rows[-1]["tokens"], curve[-1], flush=True)
    return rows


def main() -> None:
    """Train, or print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draw", action="store_true", help="print what is measured")
    file = HERE / "results/text.json"
    if not parser.parse_args().draw:
        file.write_text(json.dumps(measure()) + "\n")
    print("| | share | tokens that stay | passes | training loss | held-out nats per byte |\n|---|---|---|---|---|---|")
    for row in json.loads(file.read_text()):
        step, loss, heldout = row["curve"][-1]
        passes = step * ROWS * LENGTH / row["tokens"]
        print(f"| {row['order']} | {row['share']:g} | {row['tokens']:,} | {passes:.1f} | {loss:.3f} | {heldout:.3f} |")


if __name__ == "__main__":
    main()
