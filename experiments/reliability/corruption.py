"""Damage the bytes of a checkpoint, and test that none of the damage loads silently.

    python -m experiments.reliability.corruption --faults 500

A run on eight devices has checkpoints of steps 2 and 4. Each trial damages a copy of the run in one of twelve ways, and
restores the newest intact state onto another layout. The outcomes:

  older     the damage was named (file and array) and the older checkpoint was restored, bit for bit
  refused   an error of one sentence, nothing was loaded
  unharmed  the newest was restored bit for bit: the damaged bytes have no effect (white space, `zarr.json`)
  SILENT    anything else
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import numpy as np

import jaxscale as js
from experiments.reliability.small import config
from jaxscale.errors import JaxscaleError
from jaxscale.step import blueprint_of
from jaxscale.train import checkpoints_in
from jaxscale.train.checkpoints import flatten

RESULTS = Path(__file__).parent / "results" / "corruption.json"
SAVED, RESTORED = js.Layout("data=2,fsdp=2,tensor=2"), js.Layout("fsdp=4")
MODEL = js.models.Transformer.Config(depth=2, width=64, heads=4, kv_heads=2, head_dim=16, hidden=128, vocab=64)


class Runs:
    """A good run, another run of the same model, and a run of a smaller model.

    Args:
      folder: where they are made.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        common = dict(model=MODEL, layout=SAVED, steps=4, checkpoint_every=2)
        self.good = js.fit(config(**common), run=folder / "good", quiet=True).path
        self.other = js.fit(config(**common, seed=1), run=folder / "other", quiet=True).path
        small = js.models.Transformer.Config(depth=2, width=32, heads=4, kv_heads=2, head_dim=8, hidden=64, vocab=64)
        self.small = js.fit(config(**common | {"model": small}), run=folder / "small", quiet=True).path
        self.blueprint, _ = blueprint_of(config(**common | {"layout": RESTORED}))
        self.abstract, self.shardings = self.blueprint.abstract_state(), self.blueprint.shardings()
        self.want = {step: self.restored(self.good, step) for step in (2, 4)}

    def restored(self, run: Path, step: int | None) -> dict[str, bytes]:
        """Return the bytes of every array that is restored from a step, or from the newest intact one."""
        state = checkpoints_in(run).restore(step, self.abstract, self.shardings)
        return {name: np.asarray(x).tobytes() for name, x in flatten(state).items()}


def _bit(runs: Runs, at: Path, random: random.Random) -> list[Path]:
    path = random.choice(_chunks(at))
    data = bytearray(path.read_bytes())
    data[random.randrange(len(data))] ^= 1 << random.randrange(8)
    path.write_bytes(data)
    return [path]


def _page(runs: Runs, at: Path, random: random.Random) -> list[Path]:
    while True:  # some pages are zeros already
        path = random.choice(_chunks(at))
        data = bytearray(path.read_bytes())
        start = random.randrange(-(-len(data) // 4096)) * 4096
        if any(data[start : start + 4096]):
            data[start : start + 4096] = bytes(len(data[start : start + 4096]))
            path.write_bytes(data)
            return [path]


def _truncation(runs: Runs, at: Path, random: random.Random) -> list[Path]:
    path = random.choice(_chunks(at))
    os.truncate(path, random.randrange(path.stat().st_size))
    return [path]


def _growth(runs: Runs, at: Path, random: random.Random) -> list[Path]:
    path = random.choice(_chunks(at))
    path.write_bytes(path.read_bytes() + random.randbytes(random.randint(1, 64)))
    return [path]


def _deletion(runs: Runs, at: Path, random: random.Random) -> list[Path]:
    path = random.choice(_chunks(at))
    path.unlink()
    return [path]


def _swap(runs: Runs, at: Path, random: random.Random) -> list[Path]:
    while True:  # swapping equal files would be no fault
        one, two = random.sample(_chunks(at), 2)
        a, b = one.read_bytes(), two.read_bytes()
        if a != b and len(a) == len(b):
            one.write_bytes(b)
            two.write_bytes(a)
            return [one, two]


def _stale(runs: Runs, at: Path, random: random.Random) -> list[Path]:
    while True:
        path = random.choice(_chunks(at))
        old = at.parent / "2" / path.relative_to(at)
        if old.read_bytes() != path.read_bytes():
            shutil.copy(old, path)
            return [path]


def _manifest(runs: Runs, at: Path, random: random.Random) -> list[Path]:
    path = at / "manifest.json"
    data = bytearray(path.read_bytes())
    data[random.randrange(len(data))] ^= 1 << random.randrange(8)
    path.write_bytes(data)
    return [path]


def _about(runs: Runs, at: Path, random: random.Random) -> list[Path]:
    path = random.choice(sorted((at / "tensors").rglob("zarr.json")))
    data = bytearray(path.read_bytes())
    data[random.randrange(len(data))] ^= 1 << random.randrange(8)
    path.write_bytes(data)
    return [path]


def _older(runs: Runs, at: Path, random: random.Random) -> list[Path]:
    shutil.rmtree(at)
    shutil.copytree(at.parent / "2", at)
    return [at / "manifest.json"]


def _foreign(runs: Runs, at: Path, random: random.Random) -> list[Path]:
    shutil.rmtree(at)
    shutil.copytree(runs.other / "checkpoints" / "4", at)
    return [at]


def _smaller(runs: Runs, at: Path, random: random.Random) -> list[Path]:
    shutil.rmtree(at.parent)
    shutil.copytree(runs.small / "checkpoints", at.parent)
    if random.random() < 0.5:  # as if somebody copied the whole run, or only its checkpoints
        shutil.copy(runs.small / "run.json", at.parent.parent / "run.json")
    return [at]


FAULTS: dict[str, Callable[[Runs, Path, random.Random], list[Path]]] = {
    "one bit flipped": _bit,
    "a 4 KiB page zeroed": _page,
    "a file cut short": _truncation,
    "a file too long": _growth,
    "a file deleted": _deletion,
    "two files swapped": _swap,
    "a file of an older step": _stale,
    "a bit of the manifest": _manifest,
    "a bit of a zarr.json": _about,
    "an older step under its name": _older,
    "another run's checkpoint": _foreign,
    "a smaller model's checkpoints": _smaller,
}
"""Each function damages the checkpoint `at` of a copy of the run, and returns the paths that it changed."""


def _chunks(at: Path) -> list[Path]:
    return sorted(p for p in (at / "tensors").rglob("*") if p.is_file() and p.name != "zarr.json" and p.stat().st_size)


def trial(runs: Runs, fault: str, number: int, seed: int) -> str:
    """Run one trial and return its outcome."""
    dice = random.Random(f"{seed} {number}")
    copy = runs.folder / "copy"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(runs.good, copy)
    touched = FAULTS[fault](runs, copy / "checkpoints" / "4", dice)
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("jaxscale").addHandler(handler)
    try:
        got = runs.restored(copy, None)
    except JaxscaleError as e:
        return "refused" if "\n" not in str(e) else "SILENT"
    finally:
        logging.getLogger("jaxscale").removeHandler(handler)
    if got == runs.want[4] and not messages:
        return "unharmed"
    tensors = copy / "checkpoints" / "4" / "tensors"
    named = any(
        path.name in " ".join(messages)
        and (not path.is_relative_to(tensors) or str(path.parent.relative_to(tensors)) in " ".join(messages))
        for path in touched
    )
    return "older" if got == runs.want[2] and len(messages) == 1 and named else "SILENT"


def main() -> None:
    """Run the trials, print a table and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--faults", type=int, default=500, help="number of trials (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args()
    js.simulate_devices(8)
    jax.config.update("jax_compilation_cache_dir", str(Path(tempfile.gettempdir()) / "jaxscale-faults-cache"))
    logging.getLogger("jaxscale").propagate = False
    print(f"seed {args.seed}")
    with tempfile.TemporaryDirectory() as folder:
        runs = Runs(Path(folder))
        ends = Counter()
        for number in range(args.faults):
            fault = list(FAULTS)[number % len(FAULTS)]
            ends[fault, trial(runs, fault, number, args.seed)] += 1
    print(table(ends))
    rows: list[Any] = [[*key, count] for key, count in sorted(ends.items())]
    args.results.write_text(json.dumps({"seed": args.seed, "faults": args.faults, "ends": rows}, indent=1) + "\n")
    if any(end == "SILENT" for _, end in ends):
        raise SystemExit(1)


def table(ends: Counter) -> str:
    """Return the results as a Markdown table."""
    names = ("older", "refused", "unharmed", "SILENT")
    lines = ["| fault | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    lines += [f"| {fault} | " + " | ".join(str(ends[fault, end]) for end in names) + " |" for fault in FAULTS]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
