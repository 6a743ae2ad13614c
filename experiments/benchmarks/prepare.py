"""Preparing text for training: our preparation, `datasets.map`, and the loop of nanoGPT's `prepare.py`.

All three read the same JSON-lines file, tokenize it with the same byte-level BPE (trained on the standard library's
source, 8,192 tokens) and leave token ids on disk; each run is a fresh process with an empty cache, in turns. Processor
seconds count the process and all that it started, so that tokens per processor second are tokens per second of one core
that does nothing else. With `--memory` it also prepares 2 GB and reports the peak of resident memory.

    python experiments/benchmarks/prepare.py                # about five minutes on two idle cores
    python experiments/benchmarks/prepare.py --memory       # ten
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import random
import resource
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import measure
import numpy as np

VOCAB = 8192


def main() -> None:
    """Measure, print the table, write `results/prepare.json` and the README's table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, default=40, help="text of the comparison")
    parser.add_argument("--rounds", type=int, default=5, help="runs of each row")
    parser.add_argument("--processes", type=int, default=2, help="processes of each row")
    parser.add_argument("--memory", action="store_true", help="also prepare a file of --gigabytes, for its memory")
    parser.add_argument("--gigabytes", type=float, default=2.0, help="text of --memory")
    parser.add_argument("--case", help=argparse.SUPPRESS)  # one run, in a process of its own
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--into", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.case:
        args.into.write_text(json.dumps(run_case(args.case, args.folder, args.processes)))
        return

    from jaxscale import data

    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        texts = list(data.python_stdlib().texts())
        data.train_bpe(texts, VOCAB, folder / "bpe.json")
        write_text(folder / "small.jsonl", texts, args.megabytes * 1e6)
        runs: dict[str, list[dict[str, Any]]] = {name: [] for name in CASES}
        for i in range(args.rounds):
            for name in list(CASES)[:: -1 if i % 2 else 1]:
                runs[name].append(one(name, folder, args.processes))
                print(name, runs[name][-1], file=sys.stderr)
        assert len({run["tokens"] for row in runs.values() for run in row}) == 1, "rows have other tokens"
        memory = None
        if args.memory:
            write_text(folder / "large.jsonl", texts, args.gigabytes * 1e9)
            memory = one("memory", folder, args.processes)
            print(memory, file=sys.stderr)
    report(args, runs, memory)


def report(args: argparse.Namespace, runs: dict[str, list[dict[str, Any]]], memory: dict[str, Any] | None) -> None:
    """Print and write the results."""
    rows, ours = [], runs["ours"]
    for name, row in runs.items():
        wall = measure.ratio([r["seconds"] for r in row], [r["seconds"] for r in ours])
        cpu = measure.ratio([r["cpu"] for r in row], [r["cpu"] for r in ours])
        rate = statistics.median(r["tokens"] / r["cpu"] for r in row)
        seconds = statistics.median(r["seconds"] for r in row)
        ratios = {"wall_ratio": vars(wall), "cpu_ratio": vars(cpu)}
        rows.append({"row": name, "tokens_per_cpu_second": rate, "seconds": seconds, **ratios})
    settings = {name: getattr(args, name) for name in ("megabytes", "rounds", "processes", "gigabytes")}
    libraries = {name: importlib.metadata.version(name) for name in ("tokenizers", "datasets", "pyarrow")}
    result = {
        **measure.facts("cpu"),
        "libraries": libraries,
        "settings": {**settings, "load": os.getloadavg()},
        "rows": rows,
        "runs": runs,
    }
    measure.write("prepare", result | {"memory": memory})
    cells = [
        [LABELS[r["row"]], f"{r['tokens_per_cpu_second']:,.0f}", f"{r['seconds']:.1f}",
         f"{r['wall_ratio']['median']:.2f}", f"{r['cpu_ratio']['median']:.2f}"] for r in rows
    ]  # fmt: skip
    header = ["preparation", "tokens per second and core", "seconds", "time, ratio to ours", "processor time, ratio"]
    measure.fill("prepare", header, cells)
    for line in [header, *cells]:
        print(" | ".join(line))


def one(case: str, folder: Path, processes: int) -> dict[str, Any]:
    """Run a case in a process of its own."""
    return measure.in_subprocess(__file__, ["--case", case, "--folder", str(folder), "--processes", str(processes)])


def write_text(path: Path, texts: list[str], size: float) -> None:
    """Write documents of 200 to 12,000 characters of the standard library as JSON lines, `size` bytes together."""
    draw, done, number = random.Random(0), 0, 0
    with open(path, "w") as out:
        while done < size:
            text = draw.choice(texts)
            start = draw.randrange(max(1, len(text) - 200))
            text = text[start : start + draw.randrange(200, 12_000)] or "\n"
            done += out.write(json.dumps({"id": number, "text": text}) + "\n")
            number += 1


def run_case(case: str, folder: Path, processes: int) -> dict[str, Any]:
    """Prepare in this process; returns seconds, processor seconds and tokens, or the memory."""
    if case == "memory":
        return memory_of(folder, processes)
    with tempfile.TemporaryDirectory() as scratch:
        os.environ |= {"HF_HOME": scratch, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        prepare = CASES[case](folder, Path(scratch), processes)  # imports are not counted
        before, wall = cpu_seconds(), time.perf_counter()
        tokens = prepare()
        return {"seconds": time.perf_counter() - wall, "cpu": cpu_seconds() - before, "tokens": tokens}


def cpu_seconds() -> float:
    """Processor seconds of this process and of those that it started and that have ended."""
    both = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in both)


def ours(folder: Path, scratch: Path, processes: int) -> Any:
    """Our preparation; starting the processes that tokenize counts."""
    from jaxscale import data

    tokenizer = data.HFTokenizer(str(folder / "bpe.json"))
    corpus = data.jsonl_files(str(folder / "small.jsonl"))
    return lambda: len(data.prepare(scratch / "out", corpus, tokenizer, processes=processes).tokens)


def datasets_map(folder: Path, scratch: Path, processes: int) -> Any:
    """`load_dataset("json").map(..., batched=True, num_proc=...)`, which leaves Arrow files."""
    import datasets
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "bpe.json"))
    eos = tokenizer.token_to_id("<|endoftext|>")
    datasets.disable_progress_bars()

    def encode(batch: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        return {"ids": [e.ids + [eos] for e in tokenizer.encode_batch(batch["text"], add_special_tokens=False)]}

    def prepare() -> int:
        rows = datasets.load_dataset("json", data_files=str(folder / "small.jsonl"), split="train")
        rows = rows.map(encode, batched=True, remove_columns=["id", "text"], num_proc=processes)
        return int(sum(len(chunk.flatten()) for chunk in rows.data.column("ids").chunks))

    return prepare


def nanogpt(folder: Path, scratch: Path, processes: int) -> Any:
    """The loop of nanoGPT's `data/openwebtext/prepare.py`: map document by document, then fill a memmap by shards."""
    import datasets
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "bpe.json"))
    eos = tokenizer.token_to_id("<|endoftext|>")
    datasets.disable_progress_bars()

    def process(example: dict[str, str]) -> dict[str, Any]:
        ids = tokenizer.encode(example["text"], add_special_tokens=False).ids
        ids.append(eos)
        return {"ids": ids, "len": len(ids)}

    def prepare() -> int:
        rows = datasets.load_dataset("json", data_files=str(folder / "small.jsonl"), split="train")
        rows = rows.map(process, remove_columns=["id", "text"], num_proc=processes)
        total = int(np.sum(rows["len"], dtype=np.uint64))
        out = np.memmap(scratch / "train.bin", dtype=np.uint16, mode="w+", shape=(total,))
        at, shards = 0, 1024
        for i in range(shards):
            batch = rows.shard(num_shards=shards, index=i, contiguous=True).with_format("numpy")
            ids = np.concatenate(batch["ids"])
            out[at : at + len(ids)] = ids
            at += len(ids)
        out.flush()
        return total

    return prepare


CASES = {"ours": ours, "datasets_map": datasets_map, "nanogpt": nanogpt}
LABELS = {
    "ours": "`js.data.prepare`",
    "datasets_map": "`datasets.map(batched=True)`",
    "nanogpt": "nanoGPT's loop",
}


def memory_of(folder: Path, processes: int) -> dict[str, Any]:
    """Prepare the large file; returns peaks of resident memory in bytes: this process, another one, all together."""
    from jaxscale import data

    tokenizer = data.HFTokenizer(str(folder / "bpe.json"))
    peaks, done = {"all": 0}, threading.Event()

    def watch() -> None:
        while not done.wait(0.05):
            children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
            peaks["all"] = max(peaks["all"], sum(map(resident, [str(os.getpid()), *children])))

    watcher = threading.Thread(target=watch)
    watcher.start()
    start = time.perf_counter()
    corpus = data.jsonl_files(str(folder / "large.jsonl"))
    file = data.prepare(folder / "large", corpus, tokenizer, processes=processes)
    seconds = time.perf_counter() - start
    done.set()
    watcher.join()
    peak = {who: resource.getrusage(getattr(resource, f"RUSAGE_{who.upper()}")).ru_maxrss * 1024 for who in
            ("self", "children")}  # fmt: skip
    text = file.meta["text"]["bytes"]
    return {"text": text, "tokens": len(file.tokens), "seconds": seconds, "peak": peak | peaks, "processes": processes}


def resident(process: str) -> int:
    """Resident bytes of a process; 0 if it has ended."""
    try:
        return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError):
        return 0


if __name__ == "__main__":
    main()
