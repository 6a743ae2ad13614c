"""Weights that jump between two numbers (OFQ): rate of flips and held-out loss with StatsQ, CGA and QKR.

python experiments/few_bits_methods/oscillation.py     # writes oscillation.json beside this file
"""

from __future__ import annotations

import dataclasses
import pathlib
import statistics
import sys
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxscale.models.positions import Learned
from jaxscale.nn import MultiHead, QueryKeyProduct, Rounded, StatsQ, Stored, StoredWeight
from jaxscale.optim import AdamW, ConfidenceGuided
from jaxscale.step import TrainConfig
from jaxscale.step.callbacks import Callback, Running

sys.path.insert(0, str(pathlib.Path(__file__).parent))
from common import MODEL, RUNS, SAME, SEEDS, SEQ, heldout, trained, write  # noqa: E402

STEPS = 240
LARGEST, MEAN = Stored("int2", group=32, scale="bfloat16"), StatsQ("int2", group=32, scale="bfloat16")
VARIANTS = {
    "largest magnitude": (LARGEST, False, False),
    "StatsQ": (MEAN, False, False),
    "StatsQ, CGA": (MEAN, True, False),
    "StatsQ, QKR": (MEAN, False, True),
    "StatsQ, CGA, QKR": (MEAN, True, True),
}
"""Format, whether confident weights are frozen late, whether the product of query and key matrices is rounded."""


@dataclasses.dataclass(frozen=True)
class Flips(Callback):
    """Counts the codes that change in a step, of query and key matrices (or of their product) and of the others."""

    weights: Stored
    product: bool
    rates: list[tuple[float, float]] = dataclasses.field(default_factory=list, compare=False)
    last: list[Any] = dataclasses.field(default_factory=list, compare=False)

    def on_step(self, step: int, row: Mapping[str, Any], run: Running) -> None:
        """See `Callback`."""
        if step < STEPS * 2 // 3:
            return
        if not self.last:
            self.last.append(jax.jit(self.codes))
        self.last.append(self.last[0](run.params))
        if len(self.last) == 3:
            before = self.last.pop(1)
            self.rates.append(tuple(share(a, b) for a, b in zip(before, self.last[1], strict=True)))

    def codes(self, params: Any) -> tuple[list[jax.Array], list[jax.Array]]:
        """Return the codes of query and key matrices, and of the others."""
        of_scores, others = [], []
        for block in params["runs"][0]["blocks"].values():
            attn, mlp = block["attn"], block["mlp"]
            q, k = (attn[name]["kernel"] for name in ("q", "k"))
            if self.product:
                both = jnp.einsum("lehd,lfhd->lehf", q, k, precision=jax.lax.Precision.HIGHEST)
                of_scores.append(self.code(both, (-3,)))
            else:
                of_scores += [self.code(x, (-3,)) for x in (q, k)]
            others += [self.code(attn["v"]["kernel"], (-3,)), self.code(attn["out"]["kernel"], (-3, -2))]
            others += [self.code(m["kernel"], (-2,)) for m in mlp.values()]
        return of_scores, others

    def code(self, kernel: jax.Array, contracted: tuple[int, ...]) -> jax.Array:
        """Return the codes of a matrix."""
        weight = self.weights.encode(kernel, contracted)
        assert isinstance(weight, StoredWeight)
        return weight.unpacked()


def share(before: list[jax.Array], after: list[jax.Array]) -> float:
    """Return the share of codes that differ."""
    return float(sum(jnp.sum(a != b) for a, b in zip(before, after, strict=True)) / sum(a.size for a in before))


def main() -> None:
    """Measure and write the results."""
    lines: dict[str, Any] = {}
    plain = dataclasses.replace(MODEL, positions=Learned(SEQ))
    for seed in SEEDS[:2]:
        for name, (weights, guided, product) in VARIANTS.items():
            layer = QueryKeyProduct(weights=weights) if product else MultiHead()
            model = dataclasses.replace(plain, products=Rounded(weights), attention_layer=layer)
            optimizer = ConfidenceGuided(AdamW(), weights, after=STEPS * 2 // 3, boundary=0.05) if guided else AdamW()
            flips = Flips(weights, product)
            config = TrainConfig(
                model=model, optimizer=optimizer, callbacks=(flips,), seed=seed, **{**SAME, "steps": STEPS}
            )
            folder = f"oscillation-{name.replace(', ', '-').replace(' ', '-')}-{seed}"
            if (RUNS / folder).exists():
                raise SystemExit(f"{RUNS / folder} exists, and flips are counted while training; remove it")
            run = trained(folder, config)
            of_scores, others = (statistics.fmean(rates) for rates in zip(*flips.rates, strict=True))
            loss = heldout(run.config, run.params())
            lines[f"{name}, seed {seed}"] = {"heldout": loss, "queries and keys": of_scores, "others": others}
            write("oscillation", lines)


if __name__ == "__main__":
    main()
