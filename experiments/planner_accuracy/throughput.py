"""Published throughputs against the planner's: predicted over published, for every run of `published/`.

    python experiments/planner_accuracy/throughput.py           # predict, print, write throughput.json
    python experiments/planner_accuracy/throughput.py --fit     # before that, fit the chips' constants
    python experiments/planner_accuracy/throughput.py --calibrate  # writes error bars of time

Nothing is compiled. Constants are fitted on `split.json`'s runs for fitting and on nothing else: see `fit`.
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

    @property
    def regime(self) -> str:
        """What sets it apart, one of `error_bars.TIME_REGIMES`."""
        return error_bars.time_regime(self.config)

    @property
    def split(self) -> str:
        """ "fit" or "held_out": whether constants may be fitted on it."""
        return "fit" if self.name in SPLIT["fit"] else "held_out"

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


SYSTEMS: dict[str, Callable[[TrainConfig, Topology], Work]] = {
    "automodel": megatron.work_unpadded,
    "nemo": megatron.work_of_stage,
}
"""Systems that go about a step otherwise than ours, by the first word of their runs' names."""


def config_of(fields: dict[str, Any], sizes: dict[str, Any]) -> TrainConfig:
    """The same shapes, batch, layout and memory policy, in our words."""
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
"""What sets runs apart (`Run.regime`)."""
ENOUGH = {"long": 3, "experts": 2}
"""Runs for fitting that a chip needs before these are given a share of their own."""


def fit(found: Sequence[Run], names: Sequence[str], fixed: Mapping[str, float]) -> dict[str, float]:
    """Shares of peak: those with the least squared logarithms of `ratio`, every regime weighing the same.

    Args:
      found: one chip's runs for fitting.
      names: of `jaxscale.plan.roofline.EFFICIENCIES`.
      fixed: other shares, which stay as they are.
    """
    regimes = [[run for run in found if run.regime == name] for name in sorted({run.regime for run in found})]

    def error(values: Sequence[int]) -> float:
        shares = {**fixed, **{name: v / 100 for name, v in zip(names, values, strict=True)}}
        return round(sum(statistics.mean(math.log(r.ratio(shares)) ** 2 for r in some) for some in regimes), 9)

    best = (95,) * len(names)
    for step, reach in ((10, 90), (2, 10), (1, 2)):
        around = [range(max(5, v - reach), min(100, v + reach) + 1, step) for v in best]
        best = min(itertools.product(*around), key=lambda values: (error(values), -sum(values)))
    return {name: v / 100 for name, v in zip(names, best, strict=True)}


def constants(mine: Sequence[Run]) -> dict[str, tuple[dict[str, float], list[str]]]:
    """A chip's shares of peak, and the runs they are fitted on.

    Products with weights and attention go by the runs without experts, attention only where enough of them are long;
    else the long ones say nothing about the products either, and are left out. Experts' products come after that, and
    are given a share of their own only where it is below that of other products.

    Args:
      mine: the chip's runs for fitting.
    """
    some = {name: [run for run in mine if run.regime == name] for name in REGIMES}
    long = some["long"] if len(some["long"]) >= ENOUGH["long"] else []
    plain = [*some["dense"], *some["small"], *long]
    shares = fit(plain, ["matmul", *(["attention"] if long else [])], {})
    found = {", ".join(shares): (shares, [run.name for run in plain])}
    if len(some["experts"]) >= ENOUGH["experts"]:
        experts = fit(some["experts"], ["experts"], shares)
        if experts["experts"] < shares["matmul"]:
            found["experts"] = (experts, [run.name for run in some["experts"]])
    return found


def write_constants(found: list[Run]) -> None:
    """Fits every chip's and writes them into its file."""
    for family in sorted({run.family for run in found}):
        path = CHIPS / f"{family}.json"
        fields = json.loads(path.read_text())
        fitted = constants([run for run in found if run.family == family and run.split == "fit"])
        fields["efficiency"] = {name: share for shares, _ in fitted.values() for name, share in shares.items()}
        fields["sources"]["efficiency"] = "fitted by experiments/planner_accuracy/throughput.py --fit: " + "; ".join(
            f"{names} on {', '.join(on)}" for names, (_, on) in fitted.items()
        )
        path.write_text(json.dumps(fields, indent=2) + "\n")


# ---- error bars


def calibrate() -> str:
    """Writes error bars of time from throughput.json, and says how many of the other held-out runs lie within.

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
    """A line of the table."""
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
    """Of predicted over published the median, that of its distance from 1, and the ends: for all, by regime and chip.

    Under "fit" of the runs for fitting, under "held_out" of the others.
    """

    def of(**fields: Any) -> dict[str, Any]:
        found = {}
        for split in ("fit", "held_out"):
            ratios = [row["ratio"] for row in rows if row.items() >= {**fields, "split": split}.items()]
            if ratios:
                found[split] = {
                    "runs": len(ratios),
                    "median_ratio": round(statistics.median(ratios), 3),
                    "median_error": round(statistics.median(abs(r - 1) for r in ratios), 3),
                    "lowest": min(ratios),
                    "highest": max(ratios),
                }
        return found

    chips = sorted({row["chip"] for row in rows})
    by_chip = {f"{regime}, {chip}": of(regime=regime, chip=chip) for regime in REGIMES for chip in chips}
    return {
        "all": of(),
        "fully stated": of(fully_stated=True),
        **{regime: of(regime=regime) for regime in REGIMES},
        **{name: found for name, found in by_chip.items() if found},
    }


def main() -> None:
    """Predicts, prints, writes."""
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
    for name, found in summary(rows).items():
        cells = [c for split in ("fit", "held_out") for c in _cells(found.get(split))]
        print(f"| {name} | {' | '.join(cells)} |")


def _cells(found: Mapping[str, Any] | None) -> tuple[str, ...]:
    if found is None:
        return ("",) * 5
    ends = (f"{found['lowest']:.2f}", f"{found['highest']:.2f}")
    return str(found["runs"]), f"{found['median_ratio']:.2f}", f"{found['median_error']:.1%}", *ends


if __name__ == "__main__":
    main()
