"""Batches from a file of token ids: our loader and grain's, in turns, without a training step.

Both read the same nanoGPT file (random ids, documents of 50 to 1,000 tokens), memory-mapped and in the page cache.

- `stream`: random windows. grain's `MapDataset` shuffles and batches the same windows; once with the five arrays that
  our loader gives (checked to be equal), and once with tokens and targets alone, as in nanoGPT.
- `fit`: whole documents in rows. grain packs with `FirstFitPackIterDataset`, in the order of a shuffle; ours packs by
  best fit when the corpus is opened, and gives any batch by its number.

    python experiments/benchmarks/loader.py                 # about two minutes
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import measure
import numpy as np

VOCAB, EOS = 50257, 50256
SHAPES = {"32 x 1024": (32, 1024, 60), "512 x 2048": (512, 2048, 20)}  # rows, tokens of a row, rounds


def main() -> None:
    """Measure, print the table, write `results/loader.json` and the README's table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megatokens", type=float, default=40, help="tokens of the file")
    args = parser.parse_args()
    rows, opening = [], {}
    with tempfile.TemporaryDirectory() as scratch:
        os.environ["JAXSCALE_CACHE"] = scratch
        path = Path(scratch) / "train.bin"
        write_ids(path, int(args.megatokens * 1e6))
        for shape, (batch, seq_len, rounds) in SHAPES.items():
            for packing, make in {"stream": stream_rows, "fit": fit_rows}.items():
                start = time.perf_counter()
                loader = ours(path, packing, batch, seq_len)
                opening[f"{packing}, {shape}"] = time.perf_counter() - start
                for first in range(0, int(args.megatokens * 1e6), 2**20):  # compares each chunk with its digest
                    loader.source.documents.tokens[first : first + 2**20]
                calls = {"jaxscale": steps(loader.batch_at), **make(path, loader, batch, seq_len)}
                check = {name: call() for name, call in calls.items()}
                assert all(b["tokens"].shape == (batch, seq_len) for b in check.values())
                timed = measure.interleaved(calls, rounds)
                for name, row in timed.items():
                    wall = measure.ratio(timed["jaxscale"].wall, row.wall)
                    cpu = measure.ratio(timed["jaxscale"].cpu, row.cpu)
                    rows.append({
                        "batch": shape, "packing": packing, "row": name,
                        "ms": 1e3 * statistics.median(row.wall), "cpu_ms": 1e3 * statistics.median(row.cpu),
                        "padding": float(np.mean(check[name]["segment_ids"] == 0)) if packing == "fit" else 0.0,
                        "ratio": vars(wall), "cpu_ratio": vars(cpu), "wall": row.wall, "cpu": row.cpu,
                    })  # fmt: skip
                    print(shape, packing, name, round(rows[-1]["ms"], 2), round(wall.median, 3), flush=True)
    libraries = {name: importlib.metadata.version(name) for name in ("grain", "numpy")}
    settings = {"megatokens": args.megatokens, "load": os.getloadavg()}
    result = {**measure.facts("cpu"), "libraries": libraries, "settings": settings, "opening": opening, "rows": rows}
    measure.write("loader", result)
    header = ["batch", "packing", "loader", "ms a step", "processor ms", "padding", "ours / theirs", "quartiles"]
    cells = [
        [r["batch"], r["packing"], r["row"], f"{r['ms']:.2f}", f"{r['cpu_ms']:.2f}", f"{r['padding']:.1%}",
         *(["", ""] if r["row"] == "jaxscale" else
           [f"{r['ratio']['median']:.2f}", f"{r['ratio']['low']:.2f}–{r['ratio']['high']:.2f}"])] for r in rows
    ]  # fmt: skip
    measure.fill("loader", header, cells)


def write_ids(path: Path, count: int) -> None:
    """Write random ids in documents of 50 to 1,000 tokens, each ended by an eos."""
    draw = np.random.default_rng(0)
    ids = draw.integers(0, EOS, count, dtype=np.uint16)
    ends = np.cumsum(draw.integers(50, 1000, count // 400, endpoint=True)) - 1
    ids[ends[ends < count]] = EOS
    ids[-1] = EOS
    ids.tofile(path)


def ours(path: Path, packing: str, batch: int, seq_len: int) -> Any:
    """Our loader; the first for a file scans it."""
    from jaxscale import data

    corpus = data.bin_tokens(str(path), heldout=0, vocab_size=VOCAB, eos=EOS)
    return data.Loader(corpus.source(seq_len=seq_len, split="train", packing=packing), batch)


def steps(batch_at: Callable[[int], Any]) -> Callable[[], Any]:
    """Return a function that reads the batches of steps 0, 1, ... in turn."""
    count = iter(range(10**9))
    return lambda: batch_at(next(count))


class Windows:
    """Windows of `seq_len` targets of a file, a data source of grain."""

    def __init__(self, path: Path, seq_len: int, whole: bool):
        self.ids, self.seq_len, self.whole = np.memmap(path, np.uint16, "r"), seq_len, whole

    def __len__(self) -> int:
        return len(self.ids) // self.seq_len

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        start = int(index) * self.seq_len
        targets = self.ids[start : start + self.seq_len].astype(np.int32)
        tokens = np.empty_like(targets)
        tokens[0], tokens[1:] = self.ids[start - 1], targets[:-1]  # the file ends with an eos, which opens it as well
        if not self.whole:
            return {"tokens": tokens, "targets": targets}
        opens = tokens == EOS
        opens[0] = True
        place = np.arange(self.seq_len, dtype=np.int32)
        return {
            "tokens": tokens,
            "targets": targets,
            "weights": np.ones(self.seq_len, np.float32),
            "segment_ids": np.cumsum(opens, dtype=np.int32),
            "positions": place - np.maximum.accumulate(np.where(opens, place, 0)),
        }


def stream_rows(path: Path, loader: Any, batch: int, seq_len: int) -> dict[str, Callable[[], Any]]:
    """grain's shuffled windows, with the arrays of our rows and with two of them."""
    import grain

    ids = loader.ids_at(3)
    expected = loader.source.rows(ids)
    windows = Windows(path, seq_len, whole=True)
    for i, number in enumerate(ids):
        for key, row in windows[number].items():
            assert row.dtype == expected[key].dtype and np.array_equal(row, expected[key][i]), key

    def dataset(whole: bool) -> Any:
        return grain.MapDataset.source(Windows(path, seq_len, whole)).shuffle(seed=0).repeat().batch(batch)

    five, two = dataset(True), dataset(False)
    return {"grain, the same five arrays": steps(lambda i: five[i]), "grain, two arrays": steps(lambda i: two[i])}


class Texts:
    """The documents of a file, a data source of grain: tokens and targets, as `Windows`."""

    def __init__(self, path: Path):
        self.ids = np.memmap(path, np.uint16, "r")
        self.ends = np.flatnonzero(self.ids == EOS) + 1

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        start = int(self.ends[index - 1]) if index else 0
        targets = self.ids[start : self.ends[index]].astype(np.int32)
        return {"tokens": np.concatenate([[EOS], targets[:-1]], dtype=np.int32), "targets": targets}


def fit_rows(path: Path, loader: Any, batch: int, seq_len: int) -> dict[str, Callable[[], Any]]:
    """grain's first-fit packing, with as many bins as the batch has rows."""
    import grain

    documents = grain.MapDataset.source(Texts(path)).shuffle(seed=0).repeat()
    reading = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)  # packing alone; ours does not prefetch either
    lengths = {"tokens": seq_len, "targets": seq_len}
    packed = grain.experimental.FirstFitPackIterDataset(
        documents.to_iter_dataset(reading), length_struct=lengths, num_packing_bins=batch
    )
    batches = iter(packed.batch(batch))

    def read() -> dict[str, np.ndarray]:
        rows = next(batches)
        return {**rows, "segment_ids": rows["tokens_segment_ids"]}

    return {"grain, first fit": read}


if __name__ == "__main__":
    main()
