"""Our training step compared with one written by hand in plain JAX: same model, initial weights and batches.

    python experiments/benchmarks/train_step.py            a 10.8M-parameter model, about ten minutes on two cores
    python experiments/benchmarks/train_step.py --quick    a small one, about two minutes

Losses have to agree before anything is timed. On simulated devices a ratio compares two programs and says nothing about
scaling. Results are in `results/train_step.json`; `README.md` explains them.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import itertools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import measure
import numpy as np
from plain_step import Sizes

SIZES = {"full": Sizes(), "quick": Sizes(layers=4, width=128, heads=4, hidden=384, seq=128)}
ROUNDS = {"full": 16, "quick": 40}
SCHEDULE, WARMUP, LR = 400, 20, 3e-3  # steps of the learning-rate schedule; fewer are taken
CHECKED, TOLERANCE = 5, {"plain": 1e-5, "torch": 1e-4}
TARGET = 1.03

Batch = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Case:
    """A mesh by its sizes of data, fsdp and tensor, or one device; with `segments` attention stays within documents."""

    name: str
    mesh: tuple[int, int, int] | None = None
    segments: bool = False

    @property
    def devices(self) -> int:
        """Return the number of devices."""
        return 1 if self.mesh is None else int(np.prod(self.mesh))

    @property
    def text(self) -> str:
        """Return the mesh in the notation of `Layout` and `--mesh`."""
        sizes = zip(("data", "fsdp", "tensor"), self.mesh or (1, 1, 1), strict=True)
        return ",".join(f"{axis}={n}" for axis, n in sizes if n > 1) or "data=1"


CASES = {
    "one": Case("1 device"),
    "one-segments": Case("1 device, documents apart", segments=True),
    "eight-2x2x2": Case("8 devices, data=2,fsdp=2,tensor=2", (2, 2, 2)),
    "eight-fsdp": Case("8 devices, fsdp=8", (1, 8, 1)),
}


# ---- the steps that are compared


class Step(Protocol):
    """A step and its training state: a call with a batch takes a step, waits for its loss and returns it."""

    def __call__(self, batch: Batch) -> float:
        """Take a step and return its loss."""
        ...


class Ours:
    """Our step, built as `jaxscale.fit` builds it."""

    def __init__(self, case: Case, z: Sizes):
        import jaxscale as js
        from jaxscale.step import jit_step, make_loss_and_grads, make_step, prepare

        model = js.models.TransformerConfig(
            depth=z.layers, width=z.width, heads=z.heads, hidden=z.hidden, vocab=z.vocab
        )
        config = js.TrainConfig(
            model=model,
            layout=js.Layout(case.text),
            steps=SCHEDULE,
            lr=LR,
            batch_size=z.batch,
            seq_len=z.seq,
            segments=case.segments,
            eval_batches=0,
        )
        prepared = prepare(config)
        blueprint = prepared.blueprint
        self.layout, self.loader, self.keys = config.layout, prepared.loader, tuple(prepared.batch)
        self.rates = [float(prepared.schedule(i)) for i in range(SCHEDULE)]
        self.parameters = model.param_count()
        batch = prepared.batch_shardings()
        self.step = jit_step(make_step(make_loss_and_grads(blueprint), blueprint.tx), blueprint, batch)
        with self.layout:
            self.state = blueprint.init(0)
        self.place = _once(batch)

    def batches(self, n: int) -> list[Batch]:
        """Return the first `n` batches; with segment ids, the first `n` that have several documents in some row."""
        batches = map(self.loader.batch_at, itertools.count())
        if "segment_ids" in self.keys:
            batches = (b for b in batches if b["segment_ids"].max() > 1)
        return [{k: b[k] for k in self.keys} for b in itertools.islice(batches, n)]

    def values(self) -> dict[str, Any]:
        """Return a copy of the parameters in the structure of `plain_step`: same shapes, other names."""
        import jax

        p = jax.tree.map(np.array, self.state.params)
        block = p["runs"][0]["blocks"][0]
        layers = {
            "attn_norm": block["attn_norm"]["scale"],
            **{f"w{n}": block["attn"][n]["kernel"] for n in "qkv"},
            "wo": block["attn"]["out"]["kernel"],
            "mlp_norm": block["mlp_norm"]["scale"],
            **{n: block["mlp"][n]["kernel"] for n in ("gate", "up", "down")},
        }
        ends = {"embed": p["embed"]["weight"], "norm": p["norm"]["scale"], "head": p["head"]["weight"]}
        return {**ends, "layers": layers}

    def compile(self, batch: Batch) -> dict[str, Any]:
        """Return compile time and temporary bytes; see `_compile`."""
        with self.layout:
            return _compile(self.step, self.state, self.place(batch))

    def __call__(self, batch: Batch) -> float:
        """Take a step and return its loss."""
        with self.layout:  # a run enters it once; entering takes microseconds
            self.state, metrics = self.step(self.state, self.place(batch))
        return float(metrics["loss"])


class Plain:
    """The step of `plain_step.py`, with our initial weights."""

    def __init__(self, case: Case, z: Sizes, values: dict[str, Any]):
        import jax
        import plain_step
        from jax.sharding import NamedSharding, PartitionSpec

        mesh = None if case.mesh is None else plain_step.make_mesh(*case.mesh)
        tx = plain_step.make_optimizer(LR, SCHEDULE, WARMUP)
        rows, params, opt_state = None, None, None
        if mesh is not None:
            params, opt_state = plain_step.shardings(tx, mesh)
            rows = NamedSharding(mesh, PartitionSpec(plain_step.ROWS))
        self.params = jax.device_put(values, params)
        self.opt_state = jax.jit(tx.init, out_shardings=opt_state)(self.params)
        self.step = plain_step.make_step(tx, mesh)
        self.place = _once(rows)

    def compile(self, batch: Batch) -> dict[str, Any]:
        """Return compile time and temporary bytes; see `_compile`."""
        return _compile(self.step, self.params, self.opt_state, self.place(batch))

    def __call__(self, batch: Batch) -> float:
        """Take a step and return its loss."""
        self.params, self.opt_state, loss, _ = self.step(self.params, self.opt_state, self.place(batch))
        return float(loss)


def _once(sharding: Any) -> Callable[[Batch], Any]:
    """Return a function that places a batch on the devices once, so that only the step is timed."""
    import jax

    placed: dict[int, tuple[Batch, Any]] = {}

    def place(batch: Batch) -> Any:
        if id(batch) not in placed:
            placed[id(batch)] = batch, jax.device_put(batch, sharding)
        return placed[id(batch)][1]

    return place


def _compile(step: Any, *args: Any) -> dict[str, Any]:
    """Return the seconds to trace and compile a jitted step, and the temporary bytes of its program on one device."""
    start = time.perf_counter()
    compiled = step.lower(*args).compile()
    seconds = time.perf_counter() - start
    return {"seconds": seconds, "temporary_bytes": compiled.memory_analysis().temp_size_in_bytes}


# ---- measuring


def run_case(case: Case, z: Sizes, rounds: int) -> dict[str, Any]:
    """Check that the steps agree, then time them in turns; return a row."""
    import jax

    import jaxscale as js

    js.simulate_devices(case.devices)
    ours = Ours(case, z)
    batches = ours.batches(CHECKED)
    plain = Plain(case, z, ours.values())
    steps: dict[str, Step] = {"ours": ours, "plain": plain}
    if case == CASES["one"]:
        if importlib.util.find_spec("torch"):
            import torch_step

            steps["torch"] = torch_step.Trainer(z, ours.values(), ours.rates)
        else:
            print("torch is not installed: no torch row")
    compiled = {"ours": ours.compile(batches[0]), "plain": plain.compile(batches[0])}
    losses = {name: [step(b) for b in batches] for name, step in steps.items()}
    worst = {name: _furthest(case, name, losses) for name in losses if name != "ours"}
    turn = itertools.count()
    calls = {n: lambda s=s: s(batches[next(turn) % CHECKED]) for n, s in steps.items()}
    # one comparison at a time: idle threads of a third library could slow the two that are timed
    timed = {n: measure.interleaved({"ours": calls["ours"], n: calls[n]}, rounds) for n in steps if n != "ours"}
    speeds = {"ours": timed["plain"]["ours"], **{n: t[n] for n, t in timed.items()}}
    return {
        "device": jax.devices()[0].device_kind,
        "parameters": ours.parameters,
        "tokens_per_second": {n: z.batch * z.seq / statistics.median(t.wall) for n, t in speeds.items()},
        "step_ratio": {n: _ratio(t["ours"].wall, t[n].wall) for n, t in timed.items()},
        "step_cpu_ratio": {n: _ratio(t["ours"].cpu, t[n].cpu) for n, t in timed.items()},
        "compile_seconds": {n: c["seconds"] for n, c in compiled.items()},
        "temporary_bytes_per_device": {n: c["temporary_bytes"] for n, c in compiled.items()},
        "loss_difference": worst,
        "step_seconds": {n: {k: dataclasses.asdict(t) for k, t in pair.items()} for n, pair in timed.items()},
    }


def _ratio(ours: list[float], theirs: list[float]) -> dict[str, Any]:
    return dataclasses.asdict(measure.ratio(ours, theirs))


def _furthest(case: Case, name: str, losses: dict[str, list[float]]) -> float:
    """Return the largest relative difference from our losses; exit where it is beyond the tolerance."""
    apart = max(abs(a - b) / abs(b) for a, b in zip(losses["ours"], losses[name], strict=True))
    if not apart <= TOLERANCE[name]:
        raise SystemExit(f"{case.name}: our losses {losses['ours']} differ from those of {name}: {losses[name]}")
    return apart


def time_starts(case: Case, size: str, rounds: int) -> dict[str, Any]:
    """Time from a command to the first step's metrics on disk, in fresh processes without a compilation cache."""
    z = SIZES[size]
    starts: dict[str, list[measure.Start]] = {"ours": [], "plain": []}
    with tempfile.TemporaryDirectory() as folder:
        for i in range(rounds + 1):  # the first round fills the corpus cache and the disk cache, and is dropped
            for name in ("ours", "plain"):
                into = Path(folder) / f"{name}-{i}"
                command, file = _start_ours(case, z, into) if name == "ours" else _start_plain(case, z, into)
                starts[name].append(measure.first_line(command, file, folder=Path(folder)))
    timed = {name: s[1:] for name, s in starts.items()}
    seconds = {name: [s.seconds for s in each] for name, each in timed.items()}
    return {
        "start_seconds": {name: statistics.median(s) for name, s in seconds.items()},
        "start_ratio": {"plain": _ratio(seconds["ours"], seconds["plain"])},
        "peak_rss": {name: max(s.peak_rss or 0 for s in each) or None for name, each in timed.items()},
    }


def _start_ours(case: Case, z: Sizes, folder: Path) -> tuple[list[str], Path]:
    sizes = {"depth": z.layers, "width": z.width, "heads": z.heads, "hidden": z.hidden, "vocab": z.vocab}
    bindings = {f"Transformer.{k}": v for k, v in sizes.items()}
    bindings |= {"train.batch_size": z.batch, "train.seq_len": z.seq, "train.eval_batches": 0}
    bindings |= {"train.segments": case.segments, "train.steps": 1, "train.prompt": None}
    command = [sys.executable, "-m", "jaxscale.cli", "train", str(measure.ROOT / "experiments" / "demo.gin")]
    command += [f"--gin.{k}={v}" for k, v in bindings.items()]
    command += ["--mesh", case.text, "--devices", str(case.devices), "--run", str(folder)]
    return command, folder / "metrics.jsonl"


def _start_plain(case: Case, z: Sizes, file: Path) -> tuple[list[str], Path]:
    command = [sys.executable, str(measure.FOLDER / "plain_step.py"), "--metrics", str(file)]
    command += [f"--{k}={v}" for k, v in dataclasses.asdict(z).items()]
    if case.mesh is not None:
        command += ["--mesh", ",".join(map(str, case.mesh))]
    return command, file


# ---- the run as a whole


def main() -> None:
    """Measure every case, print the table and write the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a small model; another result file")
    parser.add_argument("--only", choices=CASES, action="append", help="only these rows; nothing is written")
    parser.add_argument("--rounds", type=int, help="timed steps of each (default 16, quick 40)")
    parser.add_argument("--case", choices=CASES, help=argparse.SUPPRESS)  # one row, in this process
    parser.add_argument("--into", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    size = "quick" if args.quick else "full"
    rounds = args.rounds or ROUNDS[size]
    if args.case:
        args.into.write_text(json.dumps(run_case(CASES[args.case], SIZES[size], rounds)))
        return
    rows: dict[str, Any] = {}
    for key in args.only or CASES:
        print(f"measuring {CASES[key].name} …", flush=True)
        own = ["--case", key, "--rounds", str(rounds), *(["--quick"] if args.quick else [])]
        rows[key] = {"name": CASES[key].name, **measure.in_subprocess(__file__, own)}
        if not CASES[key].segments:
            rows[key] |= time_starts(CASES[key], size, rounds=3)
    facts = measure.facts(next(iter(rows.values()))["device"])
    result = {**facts, "sizes": dataclasses.asdict(SIZES[size]), "target_step_ratio": TARGET, "rows": rows}
    show(result)
    if not args.only:
        name = "train_step" if size == "full" else "train_step_quick"
        print(f"written to {measure.write(name, result).relative_to(measure.ROOT)}")
        if size == "full":
            measure.fill("train_step", HEADER, lines(result))


HEADER = ("row", "ours", "theirs", "ratio", "quartiles", "target", "verdict")


def show(result: dict[str, Any]) -> None:
    """Print the table."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    z = result["sizes"]
    machine = f"{result['host']}, {result['cores']} cores"
    title = f"ours against plain JAX · {z['batch']} × {z['seq']} tokens a step · {machine}"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for name in HEADER:
        table.add_column(name, justify="left" if name == "row" else "right")
    for line in lines(result):
        table.add_row(*line)
    console = Console(highlight=False)
    Console(highlight=False, width=None if console.is_terminal else 132).print(table)


def lines(result: dict[str, Any]) -> list[tuple[str, ...]]:
    """Return the table's cells: speeds with their target, then memory, compilation and start of a step."""
    out: list[tuple[str, ...]] = []
    for row in result["rows"].values():
        name = row["name"]
        for other, r in row["step_ratio"].items():
            speed = [f"{row['tokens_per_second'][n]:,.0f}" for n in ("ours", other)]
            spread = f"{r['low']:.2f}–{r['high']:.2f}"
            judged = ("", "") if other == "torch" else (f"≤ {TARGET}", "met" if r["median"] <= TARGET else "missed")
            what = f"{name}: tokens/s" + (" (theirs: torch, eager)" if other == "torch" else "")
            out.append((what, *speed, f"{r['median']:.3f}", spread, *judged))
            cpu = row["step_cpu_ratio"][other]
            spread = f"{cpu['low']:.2f}–{cpu['high']:.2f}"
            out.append(("– processor seconds a step", "", "", f"{cpu['median']:.3f}", spread, "", ""))
        for key, what, unit in (
            ("temporary_bytes_per_device", "temporaries per device, MiB", 2**20),
            ("compile_seconds", "trace and compile, s", 1),
            ("start_seconds", "command to first step, s", 1),
            ("peak_rss", "resident memory by then, MiB", 2**20),
        ):
            if row.get(key) and row[key]["ours"] and row[key]["plain"]:
                a, b = row[key]["ours"] / unit, row[key]["plain"] / unit
                digits = 0 if unit > 1 else 1
                out.append((f"– {what}", f"{a:,.{digits}f}", f"{b:,.{digits}f}", f"{a / b:.2f}", "", "", ""))
    return out


if __name__ == "__main__":
    main()
