"""Simulate steps of long-tailed batches with one layout for all sequences, and with layouts per step.

    python experiments/layouts_per_step/simulate.py           # half a minute: writes results.json and seconds.png
    python experiments/layouts_per_step/simulate.py --costs   # minutes: traces Llama 3 8B again, writes costs.json

Nothing is run on the hardware: costs of sequences are the planner's, at its efficiencies for the chip.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int64
from matplotlib.figure import Figure

import jaxscale as js
from jaxscale.data.batching import HDP, BatchPlan, FlexSP, SequenceCosts, Static
from jaxscale.data.text import PythonStdlib
from jaxscale.layout import Layout
from jaxscale.nn import RingAttention
from jaxscale.plan.sequence_costs import sequence_costs
from jaxscale.step import TrainConfig
from jaxscale.step.by_group import plan_of, rows_of
from jaxscale.step.degrees import padded

HERE = Path(__file__).parent
HARDWARE, DEGREES = "h100:8x8", (1, 2, 4, 8, 16, 32, 64)
STEPS, SEQUENCES = 20, 512
"""Steps of a run, and sequences of each; 512 is FlexSP's global batch."""
POLICIES = ("none", "attention_only")
"""Memory policies: every activation is saved, or only attention's outputs."""

HISTOGRAMS: dict[str, dict[tuple[int, int], int]] = {
    # huggingface.co/datasets/seonglae/wikipedia_token, "Token count"; the last bin is empty.
    "Wikipedia": {
        (64, 1024): 5320881,
        (1024, 2048): 693911,
        (2048, 4096): 300935,
        (4096, 8192): 106221,
        (8192, 16384): 30611,
        (16384, 32768): 4812,
        (32768, 65536): 1253,
        (65536, 128000): 46,
    },
    # huggingface.co/datasets/yuyijiong/LongAlpaca-Chinese; 196 samples are longer than 32768, up to a length not given.
    "LongAlpaca-Chinese": {
        (256, 4096): 1144,
        (4096, 8192): 1103,
        (8192, 16384): 2245,
        (16384, 24576): 990,
        (24576, 32768): 3661,
        (32768, 65536): 196,
    },
}
"""Published numbers of documents by tokens. Within a bin we draw lengths evenly in their logarithm."""


def published(name: str, count: int, seed: int) -> Int64[np.ndarray, " n"]:
    """Draw lengths of a published distribution."""
    rng, bins = np.random.default_rng(seed), HISTOGRAMS[name]
    share = np.array([*bins.values()]) / sum(bins.values())
    low, high = np.log(np.array([*bins])).T
    of = rng.choice(len(share), count, p=share)
    return np.exp(rng.uniform(low[of], high[of])).astype(np.int64)


def measured() -> Int64[np.ndarray, " n"]:
    """Return the bytes of each file of the Python standard library, which are tokens of a byte tokenizer."""
    return np.array([max(1, path.stat().st_size) for _, path in PythonStdlib().files()], np.int64)


def batches(corpus: str) -> list[Int64[np.ndarray, " n"]]:
    """Return the lengths of each step's sequences."""
    if corpus in HISTOGRAMS:
        return [published(corpus, SEQUENCES, step) for step in range(STEPS)]
    files = measured()
    return [np.random.default_rng(step).choice(files, SEQUENCES) for step in range(STEPS)]


def costs_of(policy: str) -> SequenceCosts:
    """Predict the costs of Llama 3 8B's sequences."""
    model = js.models.llama3_8b(attention=RingAttention(), memory=policy)
    return sequence_costs(TrainConfig(model=model, layout=Layout("fsdp=64"), seq_len=4096), HARDWARE, DEGREES)


def read_costs() -> dict[str, SequenceCosts]:
    """Return the costs of costs.json by memory policy."""
    rows = json.loads((HERE / "costs.json").read_text())
    number = {"exchange", "latency"}
    return {
        policy: SequenceCosts(**{k: {int(d): v for d, v in x.items()} if k in number else x for k, x in row.items()})
        for policy, row in rows.items()
    }


def static_run(
    method: Callable[[int, int], Any], lengths: list[Int64[np.ndarray, " n"]], devices: int, costs: SequenceCosts
) -> tuple[int, list[float]]:
    """Return the one degree that is fastest over all steps and holds their longest sequence, and seconds of steps.

    Args:
      method: degree, tokens of the longest sequence -> how to plan a step.
      lengths: tokens of each step's sequences.
      devices: number of devices.
      costs: the costs.
    """
    longest = max(int(batch.max()) for batch in lengths)
    fit = [d for d in costs.degrees if longest <= d * costs.capacity]
    runs = {d: [method(d, longest).plan(batch, devices, costs).seconds for batch in lengths] for d in fit}
    best = min(runs, key=lambda d: sum(runs[d]))
    return best, runs[best]


def row_of(corpus: str, devices: int, costs: SequenceCosts) -> dict[str, Any]:
    """Return the simulated seconds of a run by method, and what the plans look like."""
    lengths = batches(corpus)
    degree, static = static_run(Static, lengths, devices, costs)
    _, balanced = static_run(lambda d, _: FlexSP(degrees=(d,)), lengths, devices, costs)
    methods: dict[str, Any] = {
        "one degree a micro-batch": lambda batch: FlexSP(mixed=False).plan(batch, devices, costs),
        "FlexSP": lambda batch: FlexSP().plan(batch, devices, costs),
        "HDP": lambda batch: HDP().plan(batch, devices, costs),
        "HDP, offload": lambda batch: HDP(offload=True).plan(batch, devices, costs),
    }
    row: dict[str, Any] = {"longest": max(int(b.max()) for b in lengths), "degree": degree, "static": sum(static)}
    row["static, balanced"] = sum(balanced)
    row["quantiles"] = {str(q): int(np.quantile(np.concatenate(lengths), q)) for q in (0.5, 0.9, 0.99)}
    for name, method in methods.items():
        plans: list[BatchPlan] = [method(batch) for batch in lengths]
        for plan, batch in zip(plans, lengths, strict=True):
            plan.check(batch, costs, offload=name == "HDP, offload")
        row[name] = sum(p.seconds for p in plans)
        row[f"{name}: tokens in rings"] = _in_rings(plans, lengths)
    return row | trained(lengths, devices, costs, degree)


def trained(lengths: list[Int64[np.ndarray, " n"]], devices: int, costs: SequenceCosts, degree: int) -> dict[str, Any]:
    """Return the seconds of a run whose rows are padded to one length, as `train.batching` does, by method.

    Args:
      lengths: tokens of each step's sequences.
      devices: number of devices.
      costs: the costs.
      degree: the static degree.

    Returns:
      also, by method, the tokens of a row on a device, of those tried the fastest.
    """
    longest = max(int(batch.max()) for batch in lengths)
    least, capacities = -(-longest // devices), [costs.capacity]
    while capacities[-1] // 2 >= least:
        capacities.append(capacities[-1] // 2)
    whole = dataclasses.replace(
        costs, linear=0.0, latency={degree: costs.of_group(degree) + costs.linear * longest / degree}
    )
    row = {"static, padded": sum(Static(degree, longest).plan(b, devices, whole).seconds for b in lengths)}
    for name, method in (("FlexSP, padded", _flexsp), ("HDP, padded", _hdp)):
        runs = {c: sum(method(b, devices, dataclasses.replace(costs, capacity=c)) for b in lengths) for c in capacities}
        row[f"{name}: tokens of a row on a device"] = min(runs, key=lambda c, runs=runs: runs[c])
        row[name] = min(runs.values())
    return row


def _flexsp(lengths: Int64[np.ndarray, " n"], devices: int, costs: SequenceCosts) -> float:
    return FlexSP(mixed=False).plan(lengths, devices, padded(costs, costs.capacity)).seconds


def _hdp(lengths: Int64[np.ndarray, " n"], devices: int, costs: SequenceCosts) -> float:
    planner = HDP()
    rows = rows_of(lengths, planner, devices, -(-costs.capacity // planner.shapes), costs)
    return plan_of(rows, lengths, devices, costs).seconds


def _in_rings(plans: list[BatchPlan], lengths: list[Int64[np.ndarray, " n"]]) -> float:
    """Share of the tokens whose group has more than one device, which send keys and values."""
    ring = sum(int(b[p.degree_of(len(b)) > 1].sum()) for p, b in zip(plans, lengths, strict=True))
    return ring / sum(int(b.sum()) for b in lengths)


def solver_times(costs: SequenceCosts) -> dict[str, float]:
    """Return the milliseconds of processor time of a plan of 4,096 sequences on 1,024 devices, the fastest of ten."""
    lengths = published("Wikipedia", 4096, 0)
    times = {}
    for name, method in (("FlexSP", FlexSP()), ("HDP", HDP())):
        spent = []
        for _ in range(10):
            begin = time.process_time()
            method.plan(lengths, 1024, costs)
            spent.append(time.process_time() - begin)
        times[name] = 1e3 * min(spent)
    return times


def draw(rows: dict[str, dict[str, Any]]) -> None:
    """Draw speed-ups over the static layout."""
    figure = Figure(figsize=(9, 3.4), dpi=110, layout="constrained")
    axes = figure.subplots()
    methods = ("static, balanced", "one degree a micro-batch", "FlexSP", "HDP", "HDP, offload")
    for i, method in enumerate(methods):
        speed = [row["static"] / row[method] for row in rows.values()]
        axes.bar(np.arange(len(rows)) + 0.16 * (i - 2), speed, 0.15, label=method)
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_xticks(np.arange(len(rows)), [name.replace(", ", "\n") for name in rows], fontsize=8)
    axes.set(ylabel="speed-up over the best static degree", title="simulated steps on 64 H100s, Llama 3 8B")
    axes.legend(frameon=False, fontsize=7)
    figure.savefig(HERE / "seconds.png")


def main() -> None:
    """Simulate every corpus with every memory policy."""
    if "--costs" in sys.argv:
        rows = {policy: dataclasses.asdict(costs_of(policy)) for policy in POLICIES}
        (HERE / "costs.json").write_text(json.dumps(rows, indent=1) + "\n")
    costs = read_costs()
    results = {
        f"{corpus}, {policy}": row_of(corpus, 64, costs[policy])
        for policy in POLICIES
        for corpus in (*HISTOGRAMS, "standard library")
    }
    times = solver_times(dataclasses.replace(costs["attention_only"], capacity=16384))
    (HERE / "results.json").write_text(json.dumps({"runs": results, "milliseconds": times}, indent=1) + "\n")
    draw(results)
    for name, row in results.items():
        print(name, {k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()})  # noqa: T201
    print(times)  # noqa: T201


if __name__ == "__main__":
    main()
