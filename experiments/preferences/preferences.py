"""Learn one-digit sums from preferences between right and wrong results: DPO, IPO, SimPO, ORPO and KTO.

python experiments/preferences/preferences.py          # minutes on two cores; resumes where it stopped
python experiments/preferences/preferences.py --draw   # the picture from results/results.json
"""

from __future__ import annotations

import functools
import json
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jaxscale as js
from jaxscale.infer.sampling import Sampling
from jaxscale.step.state import describe_model
from jaxscale.train.start import FromRun

HERE = Path(__file__).resolve().parent
OUT = HERE / "results" / "results.json"
RUNS = Path("runs/preferences")
SUMS = js.data.arithmetic(9).prompts()  # all 100, in a fixed random order
TRAINED, HELD_OUT = SUMS[:70], SUMS[70:]
SAMPLES = 8
BASE = js.TrainConfig(
    model=js.models.Transformer.Config(depth=2, width=64, heads=4, hidden=256, vocab=257), data=js.data.arithmetic(9),
    packing="fit", layout=None, steps=25, batch_size=16, seq_len=48, lr=3e-3, eval_batches=0,
)  # fmt: skip
STEPS, RATES, SEEDS = 200, (3e-4, 1e-3, 3e-3), (0, 1)
PAIRS, RATED = str(RUNS / "pairs.jsonl"), str(RUNS / "rated.jsonl")
METHODS = {
    "DPO": js.step.DPO(), "IPO": js.step.IPO(), "SimPO": js.step.SimPO(), "ORPO": js.step.ORPO(), "KTO": js.step.KTO(),
    "cross-entropy": js.step.NextToken(),
}  # fmt: skip
LENGTH = 8
"""Tokens of a sum with its result and the end, at most `18` and an end after `9+9=`."""


def write_pairs(base: Any) -> int:
    """Write the right result of each sum beside each wrong one that the base samples; return the number of pairs."""
    prompts = [p.text for p in TRAINED for _ in range(SAMPLES)]
    sampling = [Sampling(4, 1.0, seed=i) for i in range(len(prompts))]
    completions = base.generate(prompts, sampling=sampling, rows=64)
    answers = [p.answer for p in TRAINED for _ in range(SAMPLES)]
    wrong = {
        (prompt, answer, c.text)
        for prompt, answer, c in zip(prompts, answers, completions, strict=True)
        if c.text != answer and c.finished == "stop" and c.text.isascii() and c.text
    }
    pairs, rated, texts = [], [], []
    for prompt, answer, text in sorted(wrong):
        pairs.append({"prompt": prompt, "chosen": answer, "rejected": text})
        rated += [{"prompt": prompt, "completion": t, "label": t == answer} for t in (answer, text)]
        texts.append({"prompt": prompt, "completion": answer})
    for name, lines in (("pairs", pairs), ("rated", rated), ("right", texts)):
        (RUNS / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return len(pairs)


def corpus(name: str) -> Any:
    """Return the data of a method."""
    if name == "KTO":
        return js.data.rated_files(RATED, heldout=0.0)
    if name == "cross-entropy":
        return js.data.chat_files(str(RUNS / "right.jsonl"), heldout=0.0)
    return js.data.preference_files(PAIRS, heldout=0.0)


def rows_of(run: Any, texts: list[tuple[str, str]]) -> dict[str, np.ndarray]:
    """Return tokens, targets and weights of prompts with an answer and the end, (n, LENGTH)."""
    arrays = {n: np.zeros((len(texts), LENGTH), t) for n, t in (("tokens", int), ("targets", int), ("weights", float))}
    for row, (prompt, answer) in enumerate(texts):
        start, rest = run.prompt_ids(prompt).tolist(), [*run.tokenizer.encode(answer), run.end_ids[0]]
        ids = [*start, *rest]
        n = len(ids) - 1
        arrays["tokens"][row, :n], arrays["targets"][row, :n] = ids[:-1], ids[1:]
        arrays["weights"][row, len(start) - 1 : n] = 1
    return arrays


@functools.partial(jax.jit, static_argnums=0)
def scored(graphdef: Any, params: Any, batch: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Return the log-probability of each answer, and whether greedy decoding gives it."""
    logits = nnx.merge(graphdef, params)(batch["tokens"])
    logprobs = jnp.take_along_axis(jax.nn.log_softmax(logits), batch["targets"][..., None], 2)[..., 0]
    greedy = (jnp.argmax(logits, axis=2) == batch["targets"]) | (batch["weights"] == 0)
    return jnp.sum(logprobs * batch["weights"], axis=1), jnp.all(greedy, axis=1)


def measured(run: Any) -> dict[str, float]:
    """Return greedy accuracy on trained and held-out sums, and mean log-probabilities of right and wrong results."""
    graphdef, _ = describe_model(run.config.model)
    params = run.params()
    right = [(p.text, p.answer) for p in SUMS]
    lines = [json.loads(line) for line in Path(PAIRS).read_text().splitlines()]
    wrong = [(x["prompt"], x["rejected"]) for x in lines]
    logprobs, greedy = map(np.asarray, scored(graphdef, params, rows_of(run, right)))
    bad, _ = scored(graphdef, params, rows_of(run, wrong))
    n, own = len(TRAINED), dict(zip((t for t, _ in right), logprobs, strict=True))
    better = [own[prompt] > x for (prompt, _), x in zip(wrong, np.asarray(bad), strict=True)]
    return {
        "trained": float(greedy[:n].mean()), "held_out": float(greedy[n:].mean()),
        "right": float(logprobs[:n].mean()), "right_held_out": float(logprobs[n:].mean()),
        "wrong": float(np.mean(np.asarray(bad))), "pairs": float(np.mean(better)),
    }  # fmt: skip


def finished(place: Path) -> bool:
    """Whether a run has finished."""
    try:
        return bool(js.load(str(place)).info["status"] == "finished")
    except js.errors.RunError:
        return False


def trained(name: str, rate: float, seed: int) -> dict[str, float]:
    """Train by a method from the base, and measure the run."""
    place = RUNS / f"{name}-{rate:g}-{seed}"
    if not finished(place):
        config = js.TrainConfig(
            start=FromRun(str(RUNS / "base")), data=corpus(name), objective=METHODS[name], layout=None, steps=STEPS,
            batch_size=32, seq_len=12, lr=rate, seed=seed, eval_batches=0,
        )  # fmt: skip
        js.fit(config, run=place, resume="newest", quiet=True)
    return measured(js.load(str(place)))


def main() -> None:
    """Measure, and write `results/results.json`."""
    RUNS.mkdir(parents=True, exist_ok=True)
    if not finished(RUNS / "base"):
        js.fit(BASE, run=RUNS / "base", quiet=True)
    base = js.load(str(RUNS / "base"))
    pairs = len(Path(PAIRS).read_text().splitlines()) if Path(PAIRS).exists() else write_pairs(base)
    result: dict[str, Any] = {"jax": jax.__version__, "pairs": pairs, "base": measured(base), "rates": {}, "best": {}}
    print("base", result["base"])
    for name in METHODS:
        began = time.perf_counter()
        tried = {rate: trained(name, rate, SEEDS[0]) for rate in RATES}
        result["rates"][name] = {f"{rate:g}": numbers for rate, numbers in tried.items()}
        # held-out sums have no part in the choice
        best = max(RATES, key=lambda rate: (tried[rate]["trained"], tried[rate]["right"]))
        result["best"][name] = {"rate": best, "seeds": [trained(name, best, seed) for seed in SEEDS]}
        print(name, best, result["best"][name]["seeds"], f"{time.perf_counter() - began:.0f} s", flush=True)
        OUT.parent.mkdir(exist_ok=True)
        OUT.write_text(json.dumps(result, indent=1) + "\n")
    draw()


def draw() -> None:
    """Draw `results/preferences.png` from the numbers, and print the table."""
    from matplotlib.figure import Figure

    result = json.loads(OUT.read_text())
    figure = Figure(figsize=(9, 3.6), dpi=110, layout="constrained")
    left, right = figure.subplots(1, 2)
    names = list(result["best"])
    for i, name in enumerate(names):
        for seed in result["best"][name]["seeds"]:
            left.plot([i - 0.1], [seed["trained"]], "o", color="tab:blue")
            left.plot([i + 0.1], [seed["held_out"]], "o", color="tab:orange", fillstyle="none")
            right.plot([i - 0.1], [seed["right"]], "o", color="tab:green")
            right.plot([i + 0.1], [seed["wrong"]], "x", color="tab:red")
    for axes, drawn in ((left, ("trained", "held_out")), (right, ("right", "wrong"))):
        colors = {"trained": "tab:blue", "held_out": "tab:orange", "right": "tab:green", "wrong": "tab:red"}
        for key in drawn:
            axes.axhline(result["base"][key], color=colors[key], linewidth=0.7, linestyle="--")
        axes.set_xticks(range(len(names)), names, rotation=30)
        axes.grid(alpha=0.25)
    left.set(ylabel="greedy accuracy", ylim=(0, 1.03), title="trained sums (full), held-out sums (open)")
    right.set(ylabel="nats", yscale="symlog", ylim=(-60, 0.5), title="log-probability of right (o), wrong (x) results")
    figure.savefig(OUT.with_name("preferences.png"))
    for name in names:
        seeds = result["best"][name]["seeds"]
        cells = [f"{np.mean([s[k] for s in seeds]):.3f} ± {np.std([s[k] for s in seeds]):.3f}" for k in seeds[0]]
        print(f"| {name} ({result['best'][name]['rate']:g}) | {' | '.join(cells)} |")


if __name__ == "__main__":
    draw() if "--draw" in sys.argv else main()
