"""Training steps of a 1.3B and an 8B Llama on one GPU: speed, share of a matrix product's rate, memory, trace.

    python experiments/benchmarks/train_gpu.py --json FILE --seconds 520             rows that fit into ten minutes
    python experiments/benchmarks/train_gpu.py --json FILE --seconds 520 --resume    the other rows; repeat until done
    python experiments/benchmarks/train_gpu.py --only "1.3B 4k"                      rows whose name contains it
    python experiments/benchmarks/train_gpu.py --longest --json FILE --seconds 520   only the longest sequence

Every row is a process of its own with a time limit (`train_case.py`, `torch_llama.py`), most valuable first; the file
is complete after each row. No row runs beyond --seconds: a row without time says so, and --resume measures it later.
Parameters and arithmetic are bfloat16, attention and loss use our kernels, the optimizer is 8-bit AdamW, and the memory
policy is the one that `jaxscale.plan.choose` selects for the card's memory; the number of batch rows and, where
necessary, of layers are chosen to fit. A step takes one batch that is already on the device, and is timed in turns with
bfloat16 products of 8192 x 8192 random numbers.

Model FLOPs count only what the model needs: 6 for each token and weight that multiplies, and in attention the pairs
that a causal mask within documents leaves (`step_flops.model_flops`). PaLM's formula is reported beside it (Chowdhery
et al. 2022: 6 N + 12 L H Q T a token, the whole square), since published MFU values use it, those in `PUBLISHED` too.

The target counts model FLOPs in the first way: at 1.3B and 4k, 0.70 of the product's rate in that run. Where our
kernels fail on the device, the first row is tried once more by XLA alone, and says so in "runs". On a CPU the same code
trains toy models, and no target applies.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import measure
import record

PUBLISHED = {"MaxText": "51%", "Megatron-LM": "47–48%", "AXLearn": "39%", "TorchTitan": "33–39%"}
"""MFU on H100s as the projects publish it, by their own counts, mostly for many GPUs."""
TARGETS = {"1.3B 4k": 0.70}
ROWS = (
    "1.3B 4k",
    "1.3B 4k torch",
    "8B 4k",
    "1.3B 4k none",
    "1.3B 32k packed",
    "8B 32k packed",
    "1.3B 4k packed",
)
"""Most valuable first; the longest sequence comes after them."""
LIMIT = {"1.3B 4k torch": 300.0}
CASE_LIMIT = 240.0
LEAST = 45.0
"""No process is started with fewer seconds left."""
ALST = 500_000
"""Published tokens of the longest row of Llama 3 8B on one H100 of 80 GB, with weights and optimizer state in host
memory (Bekman et al. 2025, ALST)."""
BISECTIONS = 2
ENVIRONMENT = {
    "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.94",  # the rest is for libraries and the driver
    "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB": "112",  # for offloaded layer inputs of long rows; the default is 64
}


class Late(Exception):
    """A row has no time left."""


class Run:
    """Measures rows, each in a process of its own, and adds them to the results.

    Args:
      args: options of the command.
      results: results of all rows.
      folder: where our initial weights are saved for torch.
      toy: whether there is no accelerator, so that models are toys.
    """

    def __init__(self, args: argparse.Namespace, results: record.Results, folder: Path, toy: bool):
        self.args, self.results, self.folder, self.toy = args, results, folder, toy
        self.end = float("inf") if args.seconds is None else time.monotonic() + args.seconds

    def each(self, cases: Sequence[tuple[str, Any]], run: Callable[[Any], Any]) -> None:
        """Call `Results.each` for rows that run in other processes; `run` may raise `Late`."""

        def in_time(case: Any) -> tuple[dict[str, Any], Sequence[record.Line]]:
            try:
                return run(case)
            except Late:
                return {"problem": record.LATE}, ()

        self.results.each(cases, in_time, own_process=True)

    def row(self, name: str) -> tuple[dict[str, Any], list[record.Line]]:
        """Measure one of `ROWS`."""
        return self.torch(name) if name.endswith("torch") else self.case(name)

    def process(self, script: str, arguments: Sequence[str], limit: float) -> dict[str, Any]:
        """Run a script for at most `limit` seconds, and no longer than --seconds allows; return its row.

        Raises:
          Late: too little time is left, or it was not enough.
          RuntimeError: the script failed; has its reason.
        """
        left = self.end - time.monotonic()
        if left < LEAST:
            raise Late
        try:
            row = measure.in_subprocess(measure.FOLDER / script, arguments, limit=min(limit, left))
        except RuntimeError as e:
            if left < limit and time.monotonic() >= self.end:
                raise Late from e
            raise
        if "problem" in row:
            raise RuntimeError(row["problem"])
        return row

    def child(self, case: str, *more: str, limit: float = CASE_LIMIT) -> dict[str, Any]:
        """Run `train_case.py` for a case; raises what `process` raises."""
        return self.process("train_case.py", ["--case", case, "--rounds", str(self.args.rounds), *more], limit)

    def case(self, name: str) -> tuple[dict[str, Any], list[record.Line]]:
        """Measure one of `train_case.CASES`; where it fails, once more with less memory or without our kernels."""
        more = ["--xla"] if self.args.xla else []
        if name == "1.3B 4k":
            more += ["--values", str(self.folder)]
        try:
            row = self.child(name, *more)
        except RuntimeError as e:
            if out_of_memory(e) and not planned(e):  # less memory does not help where the plan did not fit
                again = ["--share", "0.85"]
            elif name == "1.3B 4k" and not self.args.xla and not planned(e):
                again = ["--xla"]
            else:
                raise
            print(f"{name}: {e}; once more with {' '.join(again)}", flush=True)
            row = self.child(name, *more, *again) | {"first_problem": str(e), "again": again}
        return row, [self.line(name, row)]

    def line(self, name: str, row: dict[str, Any]) -> record.Line:
        """Return the table's line of a measured case."""
        share, target = row["share_of_matmul"]["causal"], TARGETS.get(name)
        what = f"{name}: {row['tokens_per_step']:,} tokens a step, {row['preset']['depth']} layers"
        runs = f"{row['runs']}; memory policy {row['policy']}"
        if "again" in row:
            runs += f"; with {' '.join(row['again'])}, since: {row['first_problem'][:80]}"
        return record.Line(
            what, runs, "tokens/s", row["tokens_per_second"]["median"], ratio=share, against="matmul", target=target,
            verdict=record.judge(share, target, None, row["device"]), matmul=row["matmul_tflops"],
        )  # fmt: skip

    def torch(self, name: str) -> tuple[dict[str, Any], list[record.Line]]:
        """Measure the first row's model in torch, and compare with ours."""
        ours = self.results.content["rows"].get(name.removesuffix(" torch"), {"problem": "it was not measured"})
        if importlib.util.find_spec("torch") is None:
            raise RuntimeError("torch is not installed")
        if "problem" in ours:
            raise RuntimeError(f"our own row is missing, so there is nothing to compare with: {ours['problem']}")
        arguments = ["--sizes", json.dumps(ours["preset"]), "--rows", str(ours["rows"]), "--seq", str(ours["seq"])]
        arguments += ["--rounds", str(self.args.rounds)]
        if (self.folder / "tokens.npy").exists():  # missing where our row was measured by an earlier call
            arguments += ["--values", str(self.folder)]
        row = self.process("torch_llama.py", arguments, LIMIT[name])
        row["loss_apart"] = abs(row["losses"][0] - ours["losses"][0])
        row["grad_norm_apart"] = abs(row["grad_norm"] / ours["grad_norm"] - 1)
        same = row["same_values"] and row["loss_apart"] < 0.01 and row["grad_norm_apart"] < 0.02
        row["same_model"] = same
        a, b = ours["tokens_per_second"], row["tokens_per_second"]
        ratio = {"median": a["median"] / b["median"], "low": a["low"] / b["high"], "high": a["high"] / b["low"]}
        rival = f"torch {'compiled' if row['compiled'] else 'eager'}, {row['attention']} attention"
        what = "1.3B 4k against torch" + ("" if same else ": the same shape, not the same values")
        line = record.Line(
            what, ours["runs"], "tokens/s", a["median"], others={rival: b["median"]}, against=rival,
            ratio=ratio | {"rounds": len(row["timings"]["step"]["wall"])}, matmul=row["matmul_tflops"],
        )  # fmt: skip
        return row, [line]

    def longest(self) -> None:
        """Double the length of one row until it does not fit or time is up, then bisect; each length is a row."""
        lengths = Search(self.args.start or (1024 if self.toy else 131072))
        last: dict[str, Any] | None = None
        while (n := lengths.next()) is not None and n <= self.args.longest_cap:
            name = f"8B longest {n}"
            expected = 4 * sum(last["step_seconds"]) + last["compile_seconds"] if last else 0.0
            if self.end - time.monotonic() < max(expected + 30, LEAST):
                print(f"{name}: no time left for it ({expected:.0f} s expected)", flush=True)
                break
            self.each([(name, n)], self.one_length)
            row = self.results.content["rows"][name]
            if "problem" in row and not out_of_memory(row["problem"]):
                break  # a limit of time, or a failure that says nothing about memory
            lengths.record("problem" not in row)
            last = row if "problem" not in row else last
        if lengths.fits:
            what = f"8B longest: {lengths.fits:,} tokens trained"
            what += f", {lengths.fails:,} did not fit" if lengths.fails else ", and the search did not end"
            line = record.Line(what, unit="tokens", ours=lengths.fits, others={"ALST, one H100": ALST})
            self.results.content["rows"].pop("8B longest", None)  # left by an earlier, shorter search
            self.args.seconds = None  # this row takes no time, and the search mostly ends because time is up
            self.each([("8B longest", line)], lambda line: ({"fits": lengths.fits, "fails": lengths.fails}, [line]))

    def one_length(self, n: int) -> tuple[dict[str, Any], list[record.Line]]:
        """Measure one row of `n` tokens."""
        row = self.child(str(n), *(["--xla"] if self.args.xla else []), limit=600)
        what = f"8B, one row of {n:,} tokens, {row['preset']['depth']} layers"
        runs = f"{row['runs']}; memory policy {row['policy']}"
        return row, [record.Line(what, runs, "tokens/s", row["tokens_per_second"])]


class Search:
    """The longest length that fits: doubled (or halved) until one fits and one does not, then bisected."""

    def __init__(self, start: int):
        self.at: int = start
        self.start, self.fits, self.fails, self.bisected = start, 0, 0, 0

    def next(self) -> int | None:
        """Return the next length to try, or `None` when the search is over."""
        if not self.fits and not self.fails:
            self.at = self.start
        elif not self.fails:
            self.at = 2 * self.fits
        elif not self.fits:
            self.at = self.fails // 2
        else:
            self.at = (self.fits + self.fails) // 2 // 128 * 128  # whole tiles of attention
            self.bisected += 1
        done = self.at in (self.fits, self.fails) or self.bisected > BISECTIONS or self.at < 128
        return None if done else self.at

    def record(self, fitted: bool) -> None:
        """Record whether the last length fitted."""
        if fitted:
            self.fits = self.at
        else:
            self.fails = self.at


def out_of_memory(problem: object) -> bool:
    """Return whether a failure is for lack of memory, in the plan or on the device."""
    words = ("RESOURCE_EXHAUSTED", "out of memory", "Out of memory")
    return planned(problem) or any(word in str(problem) for word in words)


def planned(problem: object) -> bool:
    """Return whether the plan already showed that memory does not suffice, before anything ran."""
    return any(word in str(problem) for word in ("no memory policy fits", "by arithmetic"))


def show_trace(name: str, trace: dict[str, Any]) -> None:
    """Print a case's groups of kernels on one line, then its longest kernels."""
    if "problem" in trace:
        print(f"{name}: no trace: {trace['problem']}")
        return
    groups = ", ".join(f"{group} {g['share']:.0%}" for group, g in trace["groups"].items())
    print(f"{name}: {trace['step_ms']:.1f} ms a step: {groups}")
    for k in trace["kernels"][:8]:
        print(f"    {k['ms']:8.2f} ms {k['share']:6.1%} {k['calls']:6.0f} x  {k['group']}: {k['kernel']}  {k['scope']}")


def show(rows: dict[str, Any]) -> None:
    """Print what the common table lacks: rates by both formulas, memory, policy, ops, trace."""
    gib = lambda n: "–" if n is None else f"{n / 2**30:.2f}"  # noqa: E731
    for name, row in rows.items():
        if "ops" not in row:
            continue
        print(f"\n{name}: {row['tokens_per_step']:,} tokens a step, compiled in {row['compile_seconds']:.0f} s")
        memory = ", ".join(f"{what} {gib(row['memory'][what])}" for what in ("planned", "compiled", "peak"))
        print(f"    memory policy {row['policy']}; GiB: {memory}")
        for n, rate in row.get("tflops", {}).items():
            sheet = row["share_of_datasheet"].get(n)
            of_sheet = f", {sheet:.1%} of the data sheet" if sheet else ""
            print(f"    {n}: {rate:.4g} TFLOP/s, {row['share_of_matmul'][n]['median']:.3f} of the product's{of_sheet}")
        for op in row["ops"]:
            print(f"    {op}")
        if "trace" in row:
            show_trace(name, row["trace"])
    print("\npublished, of an H100's data sheet: " + ", ".join(f"{who} {share}" for who, share in PUBLISHED.items()))


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure every row, then the longest sequence; print the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    record.options(parser)
    parser.set_defaults(rounds=20)
    parser.add_argument("--longest", action="store_true", help="only the search for the longest sequence")
    parser.add_argument("--torch", action="store_true", help="only the 1.3B model at 4k, ours and torch's")
    parser.add_argument("--start", type=int, help="the first length that --longest tries (default 131072)")
    parser.add_argument(
        "--longest-cap", type=int, default=2**21, help="the longest that it tries (default %(default)s)"
    )
    parser.add_argument("--xla", action="store_true", help="use XLA for all ops instead of our kernels")
    args = parser.parse_args(arguments)
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    began = time.monotonic()
    device = measure.in_subprocess(measure.FOLDER / "train_case.py", ["--case", "device"], limit=120)
    if "problem" in device:
        raise SystemExit(device["problem"])
    if args.seconds is not None:
        args.seconds -= time.monotonic() - began
    if device["toy"]:
        print(f"on {device['kind']}: toy models, to test the script; no target applies")
    results = record.Results("train_gpu", device["kind"], args, published=PUBLISHED, budget=device["budget"])
    names = ROWS[:2] if args.torch else tuple(n for n in ROWS if (args.only or "") in n)
    if not names:
        raise SystemExit(f"--only: no row's name contains '{args.only}'")
    everything, args.only = not args.torch and len(names) == len(ROWS), None
    with tempfile.TemporaryDirectory(prefix="values-") as folder:
        run = Run(args, results, Path(folder), device["toy"])
        if not args.longest:
            run.each([(name, name) for name in names], run.row)
        if args.longest or everything:
            run.longest()
    results.finish()
    results.show()
    show(results.content["rows"])


if __name__ == "__main__":
    main()
