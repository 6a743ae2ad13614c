"""Resume a run on other devices and other numbers of processes: test that samples, bits and losses stay the same.

    python -m experiments.reliability.elastic

Fifty float32 steps, split into pieces that run on 8, 4, 1 and 8 devices, and on 1, 2 and 4 processes. Each process
records which rows of the data it read; every restored state is compared bit for bit with what TensorStore, an
independent reader, reads from disk; losses are compared with those of one device without interruption. Then a state is
saved on each of a dozen layouts and restored on each.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

import jaxscale as js
from experiments.reliability import lives
from experiments.reliability.small import config
from jaxscale.data import Loader
from jaxscale.step import blueprint_of
from jaxscale.train.checkpoints import flatten

RESULTS = Path(__file__).parent / "results" / "elastic.json"
STEPS = 50
CHAINS: dict[str, list[tuple[int, int, str]]] = {
    "8 -> 4 -> 1 -> 8 devices": [
        (1, 8, "data=8"),
        (1, 4, "fsdp=4"),
        (1, 1, "data=1"),
        (1, 8, "data=2,fsdp=2,tensor=2"),
    ],
    "1 -> 2 -> 4 processes": [(1, 4, "data=4"), (2, 2, "data=2,fsdp=2"), (4, 1, "fsdp=4")],
}
"""(processes, devices of each, mesh) of the pieces of a run."""

LAYOUTS = {
    "one device": None,
    **{
        mesh: js.Layout(mesh)
        for mesh in (
            "data=8",
            "fsdp=8",
            "tensor=4",
            "context=4,data=2",
            "pipeline=4",
            "fsdp=3",
            "data=2,fsdp=2,tensor=2",
            "fsdp=4,tensor=2",
            "pipeline=2,fsdp=2,tensor=2",
            "pipeline=2,data=2,context=2",
        )
    },
    "data=8 (zero2)": js.Layout("data=8", rules="zero2"),
}


@contextlib.contextmanager
def reading_logged(path: Path) -> Iterator[None]:
    """Append every read of training rows to a file: step, [first row, end) and ids."""
    batch_at = Loader.batch_at

    def logged(self: Loader, step: int, rows: slice | None = None) -> Any:
        rows = rows if rows is not None else slice(0, self.batch_size)
        with path.open("a") as file:
            ids = self.ids_at(step)[rows].tolist()
            file.write(json.dumps({"step": step, "rows": [rows.start, rows.stop], "ids": ids}) + "\n")
        return batch_at(self, step, rows)

    Loader.batch_at = logged  # type: ignore[method-assign]
    try:
        yield
    finally:
        Loader.batch_at = batch_at  # type: ignore[method-assign]


def piece(run: Path, reads: Path, mesh: str, until: int, steps: int = STEPS) -> None:
    """Continue a run on a mesh until a step; record the rows that were read, and the digest of the restored state."""
    settings = config(layout=js.Layout(mesh), steps=steps)
    restore = js.train.Checkpoints.restore

    def noting(self: Any, *args: Any, **named: Any) -> Any:
        state = restore(self, *args, **named)
        whole = jax.jit(lambda x: x, out_shardings=settings.layout.replicated)  # type: ignore[union-attr]
        bits = {k: np.asarray(whole(x).addressable_data(0)).tobytes() for k, x in flatten(state).items()}
        reads.with_suffix(f".state-{jax.process_index()}").write_text(_digest(bits))
        return state

    js.train.Checkpoints.restore = noting  # type: ignore[method-assign]
    place = js.train.loop.Loop._place

    def stopping(self: Any, done: int) -> Any:
        if done + 1 == until and until != steps:
            self._stopping = lambda step: step == until
            self.signals["signal"] = "the plan"
        return place(self, done)

    js.train.loop.Loop._place = stopping  # type: ignore[method-assign]
    try:
        with reading_logged(reads.with_suffix(f".reads-{jax.process_index()}")):
            js.fit(settings, run=run, resume="newest", quiet=True)
    finally:
        js.train.Checkpoints.restore = restore  # type: ignore[method-assign]
        js.train.loop.Loop._place = place  # type: ignore[method-assign]


def on_disk(checkpoint: Path) -> dict[str, bytes]:
    """Return the bytes of every array of a checkpoint, which TensorStore reads as Zarr arrays."""
    import tensorstore as ts

    root = checkpoint / "tensors"
    out = {}
    for about in root.rglob("zarr.json"):
        store = {"driver": "zarr3", "kvstore": f"file://{about.parent}/", "fill_missing_data_reads": False}
        array = ts.open(store, open=True, read=True).result()
        out[str(about.parent.relative_to(root))] = np.asarray(array.read().result()).tobytes()
    return out


def _digest(bits: dict[str, bytes]) -> str:
    return hashlib.sha256(b"".join(k.encode() + bits[k] for k in sorted(bits))).hexdigest()


Live = Callable[[Callable[[], None], int, int], None]
"""`live(run, processes, devices)` calls a function in each of several processes, and waits."""


def chain(folder: Path, pieces: list[tuple[int, int, str]], live: Live, steps: int = STEPS) -> dict[str, Any]:
    """Train in pieces; return the steps with wrong samples, whether restored states are equal, and the losses."""
    run = folder / "run"
    ends = [steps * (i + 1) // len(pieces) for i in range(len(pieces))]
    same = True
    seen: dict[int, list[tuple[int, int, tuple[int, ...]]]] = {}
    for i, ((processes, devices, mesh), end) in enumerate(zip(pieces, ends, strict=True)):
        reads = folder / f"piece{i}"
        had = _digest(on_disk(run / "checkpoints" / str(ends[i - 1]))) if i else ""
        live(functools.partial(piece, run, reads, mesh, end, steps), processes, devices)
        for process in range(processes):
            if i:
                same &= reads.with_suffix(f".state-{process}").read_text() == had
            lines = reads.with_suffix(f".reads-{process}").read_text().splitlines()
            for row in {(r["step"], *r["rows"], tuple(r["ids"])) for r in map(json.loads, lines)}:
                seen.setdefault(row[0], []).append((row[1], row[2], row[3]))
    loader = _loader()
    wrong = [step for step in range(steps) if not _covers(seen.get(step, []), loader.ids_at(step).tolist())]
    losses = [row["loss"] for row in js.Run(run, config()).metrics()]
    return {"steps with a sample twice or missing": len(wrong), "restored bit for bit": bool(same), "losses": losses}


def _covers(reads: list[tuple[int, int, tuple[int, ...]]], ids: list[int]) -> bool:
    """Return whether the reads of a step are exactly its rows, each row by one process."""
    at = 0
    for start, stop, read in sorted(reads):
        if start != at or list(read) != ids[start:stop]:
            return False
        at = stop
    return at == len(ids)


def _loader() -> Loader:
    settings = config()
    source = settings.data.source(settings.tokenizer, split="train", seq_len=settings.seq_len, packing=settings.packing)
    return Loader(source, settings.batch_size, settings.seed)


def pairs(folder: Path, layouts: dict[str, js.Layout | None]) -> list[tuple[str, str]]:
    """Save a state on each layout and restore it on each; return the pairs that differ in a bit."""
    blueprints = {name: blueprint_of(_pair_config(layout))[0] for name, layout in layouts.items()}
    wrong = []
    for name, blueprint in blueprints.items():
        state = jax.tree.map(_noise, blueprint.init(0))
        want = {k: np.asarray(x).tobytes() for k, x in flatten(state).items()}
        saved = js.train.Checkpoints(folder / hashlib.sha256(name.encode()).hexdigest()[:8])
        saved.save(state, blueprint.algorithm.infos(blueprint), {})
        saved.close()
        wrong += [(name, "disk")] if on_disk(saved.place.path / "0") != want else []
        for other, target in blueprints.items():
            got = saved.restore(0, target.abstract_state(), target.shardings())
            if {k: np.asarray(x).tobytes() for k, x in flatten(got).items()} != want:
                wrong.append((name, other))
    return wrong


def _noise(x: jax.Array) -> jax.Array:
    """Replace floats by noise: zeros would hide errors."""
    if not jax.numpy.issubdtype(x.dtype, jax.numpy.floating):
        return x
    return jax.device_put(np.random.default_rng(x.size).standard_normal(x.shape).astype(x.dtype), x.sharding)


def _pair_config(layout: js.Layout | None) -> js.TrainConfig:
    # 24 is divisible by 3 and by 8, so that a layout of three devices is possible too
    model = js.models.Transformer.Config(depth=4, width=24, heads=4, kv_heads=4, head_dim=6, hidden=48, vocab=48)
    return config(model=model, layout=layout)


def _run_pairs(folder: Path) -> None:
    wrong = pairs(folder, LAYOUTS)
    (folder / "pairs.json").write_text(json.dumps(wrong))


def main() -> None:
    """Run both halves, print and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--only", choices=["pairs", "chains"], help="only this half; the other half of the results stays"
    )
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args()
    print("seed 0")
    report: dict[str, Any] = json.loads(args.results.read_text()) if args.only and args.results.exists() else {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        lives.configure(folder / "cache")

        def live(run: Callable[[], None], processes: int, devices: int) -> None:
            codes = lives.wait(lives.start(run, processes, devices, folder / "log"))
            if any(codes):
                raise SystemExit((folder / "log").read_text())

        if args.only != "chains":  # in a child, and first: a process cannot fork after it has used TensorStore
            live(functools.partial(_run_pairs, folder), 1, 8)
            wrong = json.loads((folder / "pairs.json").read_text())
            report["pairs of layouts"] = {"tried": len(LAYOUTS) ** 2, "that differ in a bit": wrong}
            print("pairs of layouts", report["pairs of layouts"], flush=True)
        if args.only != "pairs":
            (folder / "whole").mkdir()
            whole = chain(folder / "whole", [(1, 1, "data=1")], live)["losses"]
            for what, pieces in CHAINS.items():
                (folder / what).mkdir()
                numbers = chain(folder / what, pieces, live)
                apart = [abs(a - b) / abs(b) for a, b in zip(numbers.pop("losses"), whole, strict=True)]
                report[what] = {**numbers, "loss apart after 50 steps": apart[-1], "at most": max(apart)}
                print(what, report[what], flush=True)
    args.results.write_text(json.dumps(report, indent=1) + "\n")
    bad = [
        what
        for what, r in report.items()
        if r.get("steps with a sample twice or missing")
        or not r.get("restored bit for bit", True)
        or r.get("at most", 0) > 1e-6
        or r.get("that differ in a bit")
    ]
    if bad:
        raise SystemExit(1)


if __name__ == "__main__":
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    main()
