"""Change folders in one place: test that readers return the right result or refuse with one sentence.

    python -m experiments.reliability.malformed --mutations 10000 --seconds 480

Eight readers, each with an intact folder; nothing is trained for them. A mutation (see `mutations.py`) depends only on
seed, reader and number, so a command that was stopped continues where it was. The outcomes:

  right      the same values as from the intact folder: the change has no effect
  sentence   one of our errors; for a report, a sentence on the page
  changed    other values, because the file now contains them (`corruption.py` tests digests of files)
  TRACEBACK  any other exception        HANG  no end within the limit        CRASH  the process ended
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import numpy as np

from experiments.reliability.mutations import mutate
from jaxscale import config as gin_config
from jaxscale.convert.pretrained import import_checkpoint
from jaxscale.data import HFTokenizer
from jaxscale.errors import JaxscaleError
from jaxscale.interop import Companions, open_pretrained
from jaxscale.interop.safetensors import SafeTensors, write_header
from jaxscale.run import Run
from jaxscale.sweep.comparing.report import report
from jaxscale.sweep.table import Result

RESULTS = Path(__file__).parent / "results" / "malformed.json"
LIMIT = 10.0
"""Seconds after which a reader counts as hanging."""
MEMORY = 3 * 2**30
"""Bytes that a process may use; reading an endless device such as /dev/zero exceeds them."""
BAD = ("TRACEBACK", "HANG", "CRASH")

CONFIG = {
    "model_type": "llama", "hidden_size": 16, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4,
    "intermediate_size": 24, "num_hidden_layers": 2, "vocab_size": 16, "rms_norm_eps": 1e-5, "hidden_act": "silu",
    "rope_theta": 10000.0, "max_position_embeddings": 64, "tie_word_embeddings": False, "eos_token_id": [2],
    "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                     "original_max_position_embeddings": 32},
}  # fmt: skip


# --- intact folders ---------------------------------------------------------------------------------------------------


def save_tensors(file: Path, tensors: dict[str, np.ndarray]) -> None:
    """Write a safetensors file."""
    with file.open("wb") as out:
        write_header(out, {name: (x.dtype, x.shape) for name, x in tensors.items()})
        for x in tensors.values():
            out.write(x.tobytes())


def make_model(folder: Path) -> None:
    """Write a Llama of two layers with a word-level tokenizer."""
    folder.mkdir()
    rng = np.random.default_rng(0)
    shapes = {"model.embed_tokens": (16, 16), "model.norm": (16,), "lm_head": (16, 16)}
    for n in range(2):
        at = f"model.layers.{n}."
        shapes |= {f"{at}input_layernorm": (16,), f"{at}post_attention_layernorm": (16,)}
        sizes = {"self_attn.q_proj": (16, 16), "self_attn.k_proj": (8, 16), "self_attn.v_proj": (8, 16)}
        sizes |= {"self_attn.o_proj": (16, 16), "mlp.gate_proj": (24, 16), "mlp.up_proj": (24, 16)}
        shapes |= {at + name: shape for name, shape in {**sizes, "mlp.down_proj": (16, 24)}.items()}
    tensors = {f"{name}.weight": rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    save_tensors(folder / "model.safetensors", tensors)
    words = ["<unk>", "<s>", "</s>", "a", "b", "c", "hello", "world", *"defghijk"]
    special = [{"id": i, "content": words[i], "single_word": False, "lstrip": False, "rstrip": False,
                "normalized": False, "special": True} for i in range(3)]  # fmt: skip
    model = {"type": "WordLevel", "vocab": {w: i for i, w in enumerate(words)}, "unk_token": "<unk>"}
    about: dict[str, Any] = dict.fromkeys(("truncation", "padding", "normalizer", "post_processor", "decoder"))
    about |= {"version": "1.0", "added_tokens": special, "pre_tokenizer": {"type": "Whitespace"}, "model": model}
    texts = {
        "config.json": CONFIG,
        "tokenizer.json": about,
        "tokenizer_config.json": {"eos_token": "</s>", "bos_token": {"content": "<s>"}, "add_bos_token": True},
        "generation_config.json": {"eos_token_id": 2, "temperature": 0.7, "top_k": 50, "top_p": 0.9, "do_sample": True},
    }
    for name, value in texts.items():
        (folder / name).write_text(json.dumps(value))


def make_adapters(folder: Path) -> None:
    """Write LoRA adapters for the query projections of both layers."""
    folder.mkdir()
    rng = np.random.default_rng(1)
    names = [f"base_model.model.model.layers.{n}.self_attn.q_proj.lora_" for n in range(2)]
    shapes = {f"{name}{side}.weight": shape for name in names for side, shape in (("A", (2, 16)), ("B", (16, 2)))}
    tensors = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    save_tensors(folder / "adapter_model.safetensors", tensors)
    about = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "alpha_pattern": {"q_proj": 8}, "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(about))


def make_run(folder: Path, model: Path) -> None:
    """Write a run with a checkpoint, metrics of three steps and a sample."""
    import_checkpoint(model, folder, say=lambda text: None)
    rows = [{"step": n, "loss": 3.0 - n, "eval_loss": 3.1 - n, "lr": 1e-3, "tokens_per_second": 100.0 + n,
             "model_flops_per_second": 1e9, "time": 1.0 * n} for n in range(1, 4)]  # fmt: skip
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "samples.jsonl").write_text(json.dumps({"step": 3, "prompt": "a", "text": "a b c"}) + "\n")


def make_sweep(folder: Path, run: Path) -> None:
    """Write a sweep of three trials, one of them unfinished."""
    (folder / "jobs").mkdir(parents=True)
    (folder / "sweep.gin").write_text("sweep.axes = {'train.lr': (0.1, 0.2, 0.3)}\nsweep.objective = 'eval_loss'\n")
    trials = [{"id": n, "bindings": {"train.lr": f"{0.1 * (n + 1):.1f}"}, "until": None, "time": 1.0} for n in range(3)]
    (folder / "trials.jsonl").write_text("".join(json.dumps(one) + "\n" for one in trials))
    for n in range(3):
        trial = folder / f"{n:03}"
        trial.mkdir()
        for name in ("config.gin", "run.json", "metrics.jsonl", "samples.jsonl"):
            (trial / name).write_bytes((run / name).read_bytes())
        sizes = {"tokens": 10, "parameters": 20, "flops": 30}
        if n < 2:
            end = {"state": "finished", "steps": 3, "seconds": 1.5, "error": None, "sizes": sizes}
            (trial / "outcome.json").write_text(json.dumps(end))
        (folder / "jobs" / f"{n:03}.json").write_text(json.dumps({"trial": trials[n], "folder": str(trial)}))


# --- readers ----------------------------------------------------------------------------------------------------------


class Folders:
    """Intact folders, and for each reader its folder, the files to change and the function that reads them.

    Args:
      root: an empty folder; readers return equal results for different roots.
    """

    def __init__(self, root: Path):
        self.root = root
        self.model, self.adapters, self.run = root / "model", root / "adapters", root / "run"
        make_model(self.model)
        make_adapters(self.adapters)
        make_run(self.run, self.model)
        make_sweep(root / "sweep", self.run)
        whole = sorted(p for p in (self.run / "checkpoints").rglob("*") if p.is_file() and p.parent.name != "0")[:4]
        of_run = ["config.gin", "run.json", "metrics.jsonl", "checkpoints/0/manifest.json", "hf/config.json"]
        of_run += [str(p.relative_to(self.run)) for p in whole]
        of_sweep = [
            "sweep.gin",
            "trials.jsonl",
            "000/outcome.json",
            "000/metrics.jsonl",
            "001/run.json",
            "002/config.gin",
        ]
        texts = ["config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"]
        self.readers: dict[str, tuple[Path, list[str], Callable[[], Any]]] = {
            "gin config": (self.run, ["config.gin"], self._config),
            "run folder": (self.run, of_run, self._run),
            "sweep folder": (root / "sweep", of_sweep, self._sweep),
            "report": (root / "sweep", [*of_sweep, "000/samples.jsonl", "jobs/001.json"], self._report),
            "Hugging Face folder": (self.model, [*texts[:1] * 4, *texts[2:], "model.safetensors"], self._model),
            "safetensors": (self.model, ["model.safetensors"], self._tensors),
            "tokenizer": (self.model, ["tokenizer.json"] * 3 + ["tokenizer_config.json"], self._tokenizer),
            "adapters": (self.adapters, ["adapter_config.json", "adapter_model.safetensors"], self._adapters),
        }

    def _config(self) -> Any:
        with gin_config.isolated():
            text = gin_config.load([self.run / "config.gin"], allow_imports=False)
            return text, repr(gin_config.call("train"))

    def _run(self) -> Any:
        run = Run(self.run)
        manifest = run.checkpoints.manifest(0)
        faults = list(run.checkpoints.arrays(0).faults())
        if faults:
            raise JaxscaleError(faults[0])
        own = run.imported
        return run.info, repr(run.config), run.metrics(), manifest, None if own is None else own.end_ids

    def _sweep(self) -> Any:
        sweep = Result(self.root / "sweep")
        return sweep.table(), sweep.best()

    def _report(self) -> Any:
        messages: list[str] = []
        text = report(self.root / "sweep", self.root / "out", pictures=False, tell=messages.append).read_text()
        if "unreadable: " in text:
            raise JaxscaleError("on the page")
        return messages, text.partition("Made by jaxscale")[0]

    def _model(self) -> Any:
        messages: list[str] = []
        opened = open_pretrained(self.model, say=messages.append)
        own = Companions(self.model)
        whole = {
            name: opened.arrays.read(name, [tuple((0, n) for n in b.shape)]) for name, b in opened.arrays.leaves.items()
        }
        return opened.config, opened.length, _bytes_of(whole), own.end_ids, own.choice, messages

    def _tensors(self) -> Any:
        file = SafeTensors(self.model)
        values = {}
        for name in file:
            with file.reading(name) as x:
                values[name] = (x.shape, x.dtype.name, x.tobytes())
        return values

    def _tokenizer(self) -> Any:
        tokenizer = Companions(self.model).tokenizer
        assert isinstance(tokenizer, HFTokenizer)
        ids = tokenizer.encode("hello world a zzz")
        pieces = [tokenizer.token_bytes(int(i)) for i in ids]
        return (
            ids.tolist(),
            tokenizer.decode(ids),
            tokenizer.eos_id,
            tokenizer.vocab_size,
            tokenizer.opening,
            tokenizer.special,
            pieces,
        )

    def _adapters(self) -> Any:
        arrays = open_pretrained(self.model, adapters=self.adapters, say=lambda text: None).arrays
        name = "params/runs/0/blocks/0/attn/q/kernel"
        return _bytes_of({name: arrays.read(name, [tuple((0, n) for n in arrays.leaves[name].shape)])})


def _bytes_of(arrays: dict[str, Any]) -> Any:
    return {name: [(x.shape, x.tobytes()) for x in parts.values()] for name, parts in arrays.items()}


# --- trials -----------------------------------------------------------------------------------------------------------


class Hang(BaseException):
    """The time limit is over."""


@contextmanager
def limit(seconds: float) -> Iterator[None]:
    """Raise `Hang` in the block when it takes longer than `seconds`."""

    def ring(number: int, frame: Any) -> None:
        raise Hang

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def attempt(read: Callable[[], Any], sound: str) -> tuple[str, str]:
    """Call a reader; return the outcome and the message."""
    try:
        with limit(LIMIT):
            result = repr(read())
    except JaxscaleError as e:
        return ("sentence", str(e)) if len(str(e)) < 3000 else ("TRACEBACK", f"{len(str(e))} letters: {str(e)[:100]}")
    except Hang:
        return "HANG", ""
    except BaseException as e:  # noqa: BLE001  # what a user would see as a traceback
        if isinstance(e, KeyboardInterrupt):
            raise
        return "TRACEBACK", f"{type(e).__name__}: {str(e)[:200]}"
    return ("right" if result == sound else "changed"), ""


def tried(folders: Folders, reader: str, numbers: range, seed: int = 0) -> Iterator[tuple[int, str, str, str]]:
    """Yield (number, outcome, mutation, message) of each mutation."""
    folder, names, read = folders.readers[reader]
    sound = repr(read())
    for number in numbers:
        change, undo = mutate(folder, names, random.Random(f"{seed} {reader} {number}"), folders.root / "spare")
        try:
            end, message = attempt(read, sound)
        finally:
            undo()
        yield number, end, change, message


# --- the table --------------------------------------------------------------------------------------------------------


def main() -> None:
    """Try mutations in a process for each reader, print a table and write results/malformed.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--mutations", type=int, default=1000, help="mutations for each reader (default %(default)s)")
    parser.add_argument(
        "--seconds",
        type=float,
        default=600.0,
        help="time for all readers; the next call continues (default %(default)s)",
    )
    parser.add_argument("--only", help="only this reader")
    parser.add_argument("--again", action="store_true", help="start again from the first mutation")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        return work(args)
    state = json.loads(RESULTS.read_text()) if RESULTS.is_file() and not args.again else {}
    if state.get("seed") != args.seed:
        state = {"seed": args.seed, "readers": {}}
    with tempfile.TemporaryDirectory() as root:
        names = [args.only] if args.only else list(Folders(Path(root)).readers)
    until = time.monotonic() + args.seconds
    for n, name in enumerate(names):
        share = max(5.0, (until - time.monotonic()) / (len(names) - n))
        one = state["readers"].setdefault(name, {"done": 0, "ends": {}, "bad": [], "seconds": 0.0})
        run_worker(args, name, one, share)
        RESULTS.write_text(json.dumps(state, indent=1) + "\n")
        for bad in one["bad"]:
            print(f"{name} {bad}")
    print(table(state))


def run_worker(args: argparse.Namespace, name: str, one: dict[str, Any], share: float) -> None:
    """Continue a reader's mutations in other processes; one that dies counts as a crash."""
    end = time.monotonic() + share
    while one["done"] < args.mutations and time.monotonic() < end:
        job = json.dumps([name, one["done"], max(1.0, end - time.monotonic())])
        command = [sys.executable, "-m", "experiments.reliability.malformed", "--worker", job]
        command += ["--seed", str(args.seed), "--mutations", str(args.mutations)]
        worker = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        assert worker.stdout is not None
        for line in worker.stdout:
            progress = json.loads(line)
            one["done"] = progress["done"]
            one["ends"] = dict(Counter(one["ends"]) + Counter(progress["ends"]))
            one["bad"] += progress["bad"]
            one["seconds"] = round(one["seconds"] + progress["seconds"], 3)
        if worker.wait() != 0:
            one["ends"] = dict(Counter(one["ends"]) + Counter(["CRASH"]))
            one["bad"].append([one["done"], "CRASH", f"exit code {worker.returncode}", ""])
            one["done"] += 1


def work(args: argparse.Namespace) -> None:
    """Continue one reader's mutations and print a line of JSON for every fifty."""
    name, first, seconds = json.loads(args.worker)
    end = time.monotonic() + seconds
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as root:
        folders = Folders(Path(root))
        for begin in range(first, args.mutations, 50):
            start, ends, bad = time.process_time(), Counter[str](), []
            for one in tried(folders, name, range(begin, min(begin + 50, args.mutations)), args.seed):
                ends[one[1]] += 1
                bad += [one] if one[1] in BAD else []
            progress = {"done": min(begin + 50, args.mutations), "ends": ends, "bad": bad}
            print(json.dumps({**progress, "seconds": time.process_time() - start}), flush=True)
            if time.monotonic() > end:
                return


def table(state: dict[str, Any]) -> str:
    """Return the outcomes by reader as a Markdown table."""
    ends = ("right", "sentence", "changed", *BAD)
    lines = [f"| reader | mutations | {' | '.join(ends)} | CPU s |", "|---" * (len(ends) + 3) + "|"]
    for name, one in state["readers"].items():
        counts = " | ".join(f"{one['ends'].get(end, 0):,}" for end in ends)
        lines.append(f"| {name} | {one['done']:,} | {counts} | {one['seconds']:.0f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
