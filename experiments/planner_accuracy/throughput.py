"""Published throughputs against the planner's: predicted over published, for every run of `published/`.

    python experiments/planner_accuracy/throughput.py           # predict, print, write throughput.json
    python experiments/planner_accuracy/throughput.py --fit     # before that, fit the chips' constants

Nothing is compiled. Constants are fitted on `split.json`'s runs for fitting and on nothing else: see `fit`.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import megatron

import jaxscale.hardware
from jaxscale.hardware import Topology, read_chip, topology
from jaxscale.layout import Layout
from jaxscale.models import Learned, TransformerConfig
from jaxscale.nn import GELU, LayerNorm, MemoryPolicy, RingAttention, RMSNorm, Rotary, SwiGLU, flash_attention
from jaxscale.plan.roofline import StepTime, Work, step_time
from jaxscale.step import TrainConfig

HERE = Path(__file__).parent
CHIPS = Path(jaxscale.hardware.__file__).parent / "chips"
SPLIT = json.loads((HERE / "published" / "split.json").read_text())


@dataclasses.dataclass(frozen=True)
class Run:
    """A published run, and the same as a step of ours.

    Args:
      fields: its entry in `published/*.json`.
      config: the same shapes, batch, layout and memory policy as a configuration of ours.
      work: what a step of it is made of, as its own system goes about it.
      ours: the same as we would run it.
      there: the hardware.
    """

    fields: dict[str, Any]
    config: TrainConfig
    work: Work
    ours: Work
    there: Topology

    @property
    def name(self) -> str:
        return str(self.fields["name"])

    @property
    def family(self) -> str:
        return self.there.chip.name

    def published(self) -> float:
        """Tokens a second and device."""
        return METRICS[self.fields["metric"]](self)

    def predicted(self, efficiency: Mapping[str, float] | None = None, *, ours: bool = False) -> StepTime:
        """By the chip's constants, or by these."""
        chip = self.there.chip
        chip = chip if efficiency is None else dataclasses.replace(chip, efficiency=efficiency)
        return step_time(self.ours if ours else self.work, dataclasses.replace(self.there, chip=chip))

    def ratio(self, efficiency: Mapping[str, float] | None = None, *, ours: bool = False) -> float:
        """Predicted over published throughput."""
        return self.work.tokens / self.predicted(efficiency, ours=ours).total / self.there.devices / self.published()


def _maxtext(run: Run) -> float:
    """6 x parameters and 6 x layers x heads x head_dim x sequence FLOPs a token (causal), as MaxText then counted."""
    z, model = run.config.model.sizes, run.config.model
    per_token = 6 * model.param_count() + 6 * model.depth * z.heads * z.head_dim * run.config.seq_len
    return float(run.fields["value"]) * 1e12 / per_token


METRICS = {
    "tokens/s/device": lambda run: float(run.fields["value"]),
    "seconds/step": lambda run: run.work.tokens / run.fields["value"] / run.there.devices,
    "maxtext TFLOP/s/device": _maxtext,
}
"""How a table's figure becomes tokens a second and device."""


def runs() -> Iterator[Run]:
    """Every published run."""
    for path in sorted((HERE / "published").glob("*.json")):
        file = json.loads(path.read_text())
        for fields in file.get("runs", ()):
            yield run_of(fields, file["models"][fields["model"]])


def run_of(fields: dict[str, Any], sizes: dict[str, Any]) -> Run:
    """A published run as a step of ours."""
    config, there = config_of(fields, sizes), topology(fields["topology"])
    ours = megatron.work(config, there)
    system = SYSTEMS.get(fields["name"].split("-")[0])
    return Run(fields, config, ours if system is None else system(config, there), ours, there)


SYSTEMS: dict[str, Callable[[TrainConfig, Topology], Work]] = {"nemo": megatron.work_of_stage}
"""Systems that go about a step otherwise than ours, by the first word of their runs' names."""


def config_of(fields: dict[str, Any], sizes: dict[str, Any]) -> TrainConfig:
    """The same shapes, batch, layout and memory policy, in our words."""
    ours, memory = fields["ours"], fields["ours"]["memory"]
    gated = sizes["gated"]
    model = TransformerConfig(
        depth=sizes["layers"],
        vocab=sizes["vocab"],
        width=sizes["width"],
        heads=sizes["heads"],
        kv_heads=sizes["kv_heads"],
        head_dim=sizes["head_dim"],
        hidden=sizes["hidden"],
        mlp=SwiGLU if gated else GELU,
        norm=RMSNorm if gated else LayerNorm,
        tied=sizes["tied"],
        positions=Rotary() if sizes["positions"] == "rotary" else Learned(fields["sequence"]),
        attention=RingAttention() if "context=" in ours["mesh"] else flash_attention,
        memory=memory if isinstance(memory, str) else MemoryPolicy(**{k: tuple(v) for k, v in memory.items()}),
        dtype="bfloat16",
    )
    slices = "*" in fields["topology"]
    return TrainConfig(
        model=model,
        layout=Layout(
            ours["mesh"],
            ours["rules"],
            ours["sequence_sharded"],
            ours["pipeline"],
            across=("data" if "data=" in ours["mesh"] else "fsdp") if slices else None,
        ),
        batch_size=fields["global_batch"],
        seq_len=fields["sequence"],
        accumulate=ours["accumulate"],
    )


# ---- constants


def fit(found: list[Run], names: Sequence[str]) -> dict[str, float]:
    """Shares of peak, of one chip's runs for fitting: those with the least squared logarithms of `ratio`.

    Among equals the largest: a constant on which nothing depends stays 1 and is left out.
    """

    def error(values: Sequence[int]) -> float:
        shares = {name: v / 100 for name, v in zip(names, values, strict=True)}
        return round(sum(math.log(run.ratio(shares)) ** 2 for run in found), 9)

    best = (100,) * len(names)
    for step, reach in ((10, 70), (2, 10), (1, 2)):
        around = [range(max(20, v - reach), min(100, v + reach) + 1, step) for v in best]
        best = min(itertools.product(*around), key=lambda values: (error(values), -sum(values)))
    return {name: v / 100 for name, v in zip(names, best, strict=True) if v < 100}


def write_constants(found: list[Run], names: Sequence[str]) -> None:
    """Fits every chip's and writes them into its file."""
    for family in sorted({run.family for run in found}):
        mine = [run for run in found if run.family == family and run.name in SPLIT["fit"]]
        path = CHIPS / f"{family}.json"
        fields = json.loads(path.read_text())
        fields["efficiency"] = fit(mine, names)
        fields["sources"]["efficiency"] = "fitted by experiments/planner_accuracy/throughput.py --fit on " + ", ".join(
            run.name for run in mine
        )
        path.write_text(json.dumps(fields, indent=2) + "\n")


# ---- the table


def row_of(run: Run) -> dict[str, Any]:
    """A line of the table."""
    time = run.predicted()
    return {
        "name": run.name,
        "chip": run.family,
        "fitted_on": run.name in SPLIT["fit"],
        "fully_stated": run.fields["fully_stated"],
        "published": run.published(),
        "ratio": round(run.ratio(), 3),
        "ratio_at_peak": round(run.ratio({}), 3),
        "ratio_as_ours": round(run.ratio(ours=True), 3),
        "seconds": {name: round(getattr(time, name), 4) for name in ("compute", "memory", "exposed", "host", "bubble")},
    }


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Median of predicted over published and of its distance from 1, for all and by chip."""

    def of(some: list[dict[str, Any]]) -> dict[str, float]:
        ratios = [row["ratio"] for row in some]
        far = [abs(r - 1) for r in ratios]
        return {
            "runs": len(some),
            "median_ratio": round(statistics.median(ratios), 3),
            "median_error": round(statistics.median(far), 3),
            "largest_error": round(max(far), 3),
        }

    held = [row for row in rows if not row["fitted_on"]]
    return {
        "fitted on": of([row for row in rows if row["fitted_on"]]),
        "held out": of(held),
        "held out, fully stated": of([row for row in held if row["fully_stated"]]),
        **{f"held out, {c}": of([r for r in held if r["chip"] == c]) for c in sorted({r["chip"] for r in held})},
    }


def main() -> None:
    """Predicts, prints, writes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--fit", nargs="*", metavar="NAME", help="fit the chips' constants first: of 'matmul' alone")
    args = parser.parse_args()
    if args.fit is not None:
        write_constants(list(runs()), args.fit or ["matmul"])
        read_chip.cache_clear()
    rows = [row_of(run) for run in runs()]
    (HERE / "throughput.json").write_text(json.dumps({"summary": summary(rows), "runs": rows}, indent=1) + "\n")
    print("| run | chip | tokens/s/device | predicted over it | at peak | as ours | |")
    print("|---|---|---|---|---|---|---|")
    for row in rows:
        kind = "fitted on" if row["fitted_on"] else "held out" if row["fully_stated"] else "held out, not fully stated"
        print(
            f"| {row['name']} | {row['chip']} | {row['published']:.0f} | {row['ratio']:.2f} "
            f"| {row['ratio_at_peak']:.2f} | {row['ratio_as_ours']:.2f} | {kind} |"
        )
    for name, found in summary(rows).items():
        print(f"{name}: {found}")


if __name__ == "__main__":
    main()
