"""The planner's throughput over the published one, for every run of `published/`.

    python experiments/planner_accuracy/throughput.py           # predict, print, write throughput.json
    python experiments/planner_accuracy/throughput.py --fit     # fit the chips' constants first
    python experiments/planner_accuracy/throughput.py --calibrate  # write error bars of time

Nothing is compiled. Constants are fitted only on the runs that `split.json` lists for fitting (see `fit`).
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
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
from jaxscale.nn import (
    GELU,
    LayerNorm,
    MemoryPolicy,
    MixtureOfExperts,
    MultiHeadLatent,
    RingAttention,
    RMSNorm,
    Rotary,
    SwiGLU,
    flash_attention,
)
from jaxscale.plan import error_bars
from jaxscale.plan.roofline import StepTime, Work, step_time
from jaxscale.step import TrainConfig

HERE = Path(__file__).parent
CHIPS = Path(jaxscale.hardware.__file__).parent / "chips"
SPLIT = json.loads((HERE / "published" / "split.json").read_text())


@dataclasses.dataclass(frozen=True)
class Run:
    """A published run, and the same step in our terms.

    Args:
      fields: its entry in `published/*.json`.
      config: its shapes, batch, layout and memory policy as our config.
      work: the work of a step in its own system.
      ours: the work of the same step in jaxscale.
      target: the hardware.
    """

    fields: dict[str, Any]
    config: TrainConfig
    work: Work
    ours: Work
    target: Topology

    @property
    def name(self) -> str:
        """Name of the run."""
        return str(self.fields["name"])

    @property
    def family(self) -> str:
        """Name of the chip."""
        return self.target.chip.name

    @property
    def regime(self) -> str:
        """The kind of run, one of `error_bars.TIME_REGIMES`."""
        return error_bars.time_regime(self.config)

    @property
    def split(self) -> str:
        """Whether constants may be fitted on the run: "fit" or "held_out"."""
        return "fit" if self.name in SPLIT["fit"] else "held_out"

    def published(self) -> float:
        """Published tokens per second and device."""
        return METRICS[self.fields["metric"]](self)

    def predicted(self, efficiency: Mapping[str, float] | None = None, *, ours: bool = False) -> StepTime:
        """Predict the time of a step.

        Args:
          efficiency: fractions of peak rates; by default the chip's.
          ours: whether to predict our own step instead of the other system's.
        """
        chip = self.target.chip
        chip = chip if efficiency is None else dataclasses.replace(chip, efficiency=efficiency)
        return step_time(self.ours if ours else self.work, dataclasses.replace(self.target, chip=chip))

    def ratio(self, efficiency: Mapping[str, float] | None = None, *, ours: bool = False) -> float:
        """Predicted over published throughput; arguments as for `predicted`."""
        return self.work.tokens / self.predicted(efficiency, ours=ours).total / self.target.devices / self.published()


def _maxtext(run: Run) -> float:
    """Convert MaxText's metric: 6 x parameters + 6 x layers x heads x head_dim x sequence FLOPs a token (causal)."""
    z, model = run.config.model.sizes, run.config.model
    per_token = 6 * model.param_count() + 6 * model.depth * z.heads * z.head_dim * run.config.seq_len
    return float(run.fields["value"]) * 1e12 / per_token


METRICS = {
    "tokens/s/device": lambda run: float(run.fields["value"]),
    "seconds/step": lambda run: run.work.tokens / run.fields["value"] / run.target.devices,
    "maxtext TFLOP/s/device": _maxtext,
}
"""Conversions of published figures to tokens per second and device, by metric."""


def runs() -> Iterator[Run]:
    """Yield every published run."""
    for path in sorted((HERE / "published").glob("*.json")):
        file = json.loads(path.read_text())
        for fields in file.get("runs", ()):
            yield run_of(fields, file["models"][fields["model"]])


def run_of(fields: dict[str, Any], sizes: dict[str, Any]) -> Run:
    """Build a published run from its entry and its model's sizes."""
    config, target = config_of(fields, sizes), topology(fields["topology"])
    ours = megatron.work(config, target)
    system = SYSTEMS.get(fields["name"].split("-")[0])
    return Run(fields, config, ours if system is None else system(config, target), ours, target)


SYSTEMS: dict[str, Callable[[TrainConfig, Topology], Work]] = {
    "automodel": megatron.work_unpadded,
    "nemo": megatron.work_of_stage,
}
"""Systems whose steps differ from ours, by the first word of their runs' names."""


def config_of(fields: dict[str, Any], sizes: dict[str, Any]) -> TrainConfig:
    """Return a run's shapes, batch, layout and memory policy as our config."""
    ours, memory = fields["ours"], fields["ours"]["memory"]
    gated = sizes["gated"]
    dense = SwiGLU if gated else GELU
    mixed: dict[str, Any] = {"attention_layer": MultiHeadLatent(**sizes["latent"])} if "latent" in sizes else {}
    if "experts" in sizes:
        mixed |= {"mlp": MixtureOfExperts(**sizes["experts"]), "dense_layers": sizes.get("dense_layers", 0)}
    model = TransformerConfig(
        depth=sizes["layers"],
        vocab=sizes["vocab"],
        width=sizes["width"],
        heads=sizes["heads"],
        kv_heads=None if "latent" in sizes else sizes["kv_heads"],
        head_dim=None if "latent" in sizes else sizes["head_dim"],
        hidden=sizes["hidden"],
        norm=RMSNorm if gated else LayerNorm,
        tied=sizes["tied"],
        positions=Rotary() if sizes["positions"] == "rotary" else Learned(fields["sequence"]),
        attention=RingAttention() if "context=" in ours["mesh"] else flash_attention,
        memory=memory if isinstance(memory, str) else MemoryPolicy(**{k: tuple(v) for k, v in memory.items()}),
        dtype="bfloat16",
        **{"mlp": dense, **mixed},
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

REGIMES = (*error_bars.TIME_REGIMES,)
"""Kinds of runs (`Run.regime`)."""
ENOUGH = {"long": 3, "experts": 2}
"""Least number of a chip's runs for fitting for which a kind of run gets its own fraction of peak."""


def fit(chosen: Sequence[Run], names: Sequence[str], fixed: Mapping[str, float]) -> dict[str, float]:
    """Fit fractions of peak rates: minimise the squared logarithm of `ratio`, with the same weight for every regime.

    Args:
      chosen: one chip's runs for fitting.
      names: names of the fractions, from `jaxscale.plan.roofline.EFFICIENCIES`.
      fixed: other fractions, which are not changed.
    """
    regimes = [[run for run in chosen if run.regime == name] for name in sorted({run.regime for run in chosen})]

    def error(values: Sequence[int]) -> float:
        shares = {**fixed, **{name: v / 100 for name, v in zip(names, values, strict=True)}}
        return round(sum(statistics.mean(math.log(r.ratio(shares)) ** 2 for r in some) for some in regimes), 9)

    best = (95,) * len(names)
    for step, reach in ((10, 90), (2, 10), (1, 2)):
        around = [range(max(5, v - reach), min(100, v + reach) + 1, step) for v in best]
        best = min(itertools.product(*around), key=lambda values: (error(values), -sum(values)))
    return {name: v / 100 for name, v in zip(names, best, strict=True)}


def constants(mine: Sequence[Run]) -> dict[str, tuple[dict[str, float], list[str]]]:
    """Return a chip's fractions of peak rates, and the runs that they are fitted on.

    Products with weights and attention are fitted on runs without experts; attention only if enough of them have long
    sequences, otherwise runs with long sequences are left out. Experts' products are fitted after that, and get their
    own fraction only if it is below that of other products.

    Args:
      mine: the chip's runs for fitting.
    """
    some = {name: [run for run in mine if run.regime == name] for name in REGIMES}
    long = some["long"] if len(some["long"]) >= ENOUGH["long"] else []
    plain = [*some["dense"], *some["small"], *long]
    shares = fit(plain, ["matmul", *(["attention"] if long else [])], {})
    fitted = {", ".join(shares): (shares, [run.name for run in plain])}
    if len(some["experts"]) >= ENOUGH["experts"]:
        experts = fit(some["experts"], ["experts"], shares)
        if experts["experts"] < shares["matmul"]:
            fitted["experts"] = (experts, [run.name for run in some["experts"]])
    return fitted


def write_constants(published: list[Run]) -> None:
    """Fit the constants of every chip and write them to its file."""
    for family in sorted({run.family for run in published}):
        path = CHIPS / f"{family}.json"
        fields = json.loads(path.read_text())
        fitted = constants([run for run in published if run.family == family and run.split == "fit"])
        fields["efficiency"] = {name: share for shares, _ in fitted.values() for name, share in shares.items()}
        fields["sources"]["efficiency"] = "fitted by experiments/planner_accuracy/throughput.py --fit: " + "; ".join(
            f"{names} on {', '.join(on)}" for names, (_, on) in fitted.items()
        )
        path.write_text(json.dumps(fields, indent=2) + "\n")


# ---- error bars


def calibrate() -> str:
    """Write error bars of time from throughput.json, and return a table of how many other held-out runs lie within.

    A run is for calibration if the first byte of the SHA-256 of "error bar " and its name is even.
    """
    sizes = {}
    for path in sorted((HERE / "published").glob("*.json")):
        file = json.loads(path.read_text())
        for fields in file.get("runs", ()):
            sizes[fields["name"]] = config_of(fields, file["models"][fields["model"]]).model.param_count()  # type: ignore[attr-defined]
    rows = json.loads((HERE / "throughput.json").read_text())["runs"]
    for row in rows:
        row["even"] = hashlib.sha256(f"error bar {row['name']}".encode()).digest()[0] % 2 == 0
    bars: dict[str, Any] = {}
    out = ["| regime | runs | from | to | held out from both | of them within | above |", "|" + "---|" * 7]
    for regime in REGIMES:
        mine = [row for row in rows if row["regime"] == regime]
        known = [row["ratio"] for row in mine if row["even"]]
        rest = [row["ratio"] for row in mine if not row["even"] and row["split"] == "held_out"]
        low, high = error_bars.factors(known)
        counts = [sizes[row["name"]] for row in mine]
        bars[regime] = {"low": low, "high": high, "cases": len(known), "smallest": min(counts), "largest": max(counts)}
        bars[regime]["chips"] = sorted({row["chip"] for row in mine})
        within, above = sum(low <= r <= high for r in rest), sum(r > high for r in rest)
        out.append(f"| {regime} | {len(known)} | {low:.2f} | {high:.2f} | {len(rest)} | {within} | {above} |")
    error_bars.write_bars({"time": bars})
    return "\n".join(out)


# ---- the table


def row_of(run: Run) -> dict[str, Any]:
    """Return a row of the table."""
    time = run.predicted()
    return {
        "name": run.name,
        "chip": run.family,
        "regime": run.regime,
        "split": run.split,
        "fully_stated": run.fields["fully_stated"],
        "published": run.published(),
        "ratio": round(run.ratio(), 3),
        "ratio_at_peak": round(run.ratio({}), 3),
        "ratio_as_ours": round(run.ratio(ours=True), 3),
        "seconds": {name: round(getattr(time, name), 4) for name in ("compute", "memory", "exposed", "host", "bubble")},
    }


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return median, median error and range of predicted over published: for all runs, and by regime and chip.

    "fit" has those of the runs for fitting, "held_out" those of the others.
    """

    def of(**fields: Any) -> dict[str, Any]:
        figures = {}
        for split in ("fit", "held_out"):
            ratios = [row["ratio"] for row in rows if row.items() >= {**fields, "split": split}.items()]
            if ratios:
                figures[split] = {
                    "runs": len(ratios),
                    "median_ratio": round(statistics.median(ratios), 3),
                    "median_error": round(statistics.median(abs(r - 1) for r in ratios), 3),
                    "lowest": min(ratios),
                    "highest": max(ratios),
                }
        return figures

    chips = sorted({row["chip"] for row in rows})
    by_chip = {f"{regime}, {chip}": of(regime=regime, chip=chip) for regime in REGIMES for chip in chips}
    return {
        "all": of(),
        "fully stated": of(fully_stated=True),
        **{regime: of(regime=regime) for regime in REGIMES},
        **{name: figures for name, figures in by_chip.items() if figures},
    }


def main() -> None:
    """Predict all runs, print the tables and write throughput.json."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--fit", action="store_true", help="fit the chips' constants first")
    parser.add_argument("--calibrate", action="store_true", help="write error bars of time from throughput.json")
    args = parser.parse_args()
    if args.fit:
        write_constants(list(runs()))
        read_chip.cache_clear()
    if args.calibrate:
        print(calibrate())
        return
    rows = [row_of(run) for run in runs()]
    (HERE / "throughput.json").write_text(json.dumps({"summary": summary(rows), "runs": rows}, indent=1) + "\n")
    print("| run | chip | tokens/s/device | predicted over it | at peak | as we would run it | |")
    print("|---|---|---|---|---|---|---|")
    for row in sorted(rows, key=lambda row: REGIMES.index(row["regime"])):
        kind = row["regime"] + (", fitted on" if row["split"] == "fit" else ", held out")
        kind += "" if row["fully_stated"] else ", not fully stated"
        print(
            f"| {row['name']} | {row['chip']} | {row['published']:.0f} | {row['ratio']:.2f} "
            f"| {row['ratio_at_peak']:.2f} | {row['ratio_as_ours']:.2f} | {kind} |"
        )
    print("\n| runs | fitted on | median | error | from | to | held out | median | error | from | to |")
    print("|" + "---|" * 11)
    for name, figures in summary(rows).items():
        cells = [c for split in ("fit", "held_out") for c in _cells(figures.get(split))]
        print(f"| {name} | {' | '.join(cells)} |")


def _cells(figures: Mapping[str, Any] | None) -> tuple[str, ...]:
    if figures is None:
        return ("",) * 5
    ends = (f"{figures['lowest']:.2f}", f"{figures['highest']:.2f}")
    return str(figures["runs"]), f"{figures['median_ratio']:.2f}", f"{figures['median_error']:.1%}", *ends


if __name__ == "__main__":
    main()
