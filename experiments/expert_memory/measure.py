"""Experts in less memory: a cache of them, fewer of them, and fewer bits of them, on small trained models.

    python experiments/expert_memory/measure.py           # train two seeds of two models, measure, draw
    python experiments/expert_memory/measure.py --show    # tables and figure of results.json

The choices of experts are recorded while a model generates with its experts outside the device, and replayed through
the same cache with other capacities and rules. Times are simulated, for layers of Qwen3-30B-A3B on an H100.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import pathlib
import shutil
import statistics
from typing import Any

import jax
import numpy as np
from matplotlib.figure import Figure

import jaxscale as js
from jaxscale.convert.fewer_experts import loads_of, reduced, with_experts
from jaxscale.convert.quantize import quantize
from jaxscale.convert.recipes import QMoE
from jaxscale.hardware import chip
from jaxscale.infer.cache import Paged
from jaxscale.infer.engine import Engine, Request
from jaxscale.infer.sampling import Sampling
from jaxscale.infer.streaming import Eviction, ExpertLayers, LeastRecent, OnHost, RecentScores, Streamed
from jaxscale.infer.streaming.experts import Guess
from jaxscale.layout import path_name
from jaxscale.nn import MixtureOfExperts, SoftmaxRouter
from jaxscale.nn.formats import NestedBits
from jaxscale.plan.expert_streaming import Costs, hottest_first, in_order, layer_time, sliced
from jaxscale.step import NextToken, TrainConfig, blueprint_of, describe_model
from jaxscale.step.step import make_eval

HERE = pathlib.Path(__file__).parent
RUNS = pathlib.Path("runs/expert_memory")
SEEDS = (0, 1)
EXPERTS, TOP = 16, 2
MODEL = js.models.Transformer.Config(
    depth=3, width=64, heads=2, hidden=64, mlp=MixtureOfExperts(EXPERTS, TOP, hidden=64, balance_loss=0.01)
)
SETTINGS: dict[str, Any] = dict(
    model=MODEL, layout=None, batch_size=8, seq_len=64, eval_batches=0, lr=4e-3, steps=200, segments=False
)
CAPACITIES = (16, 24, 36)
"""Of the 48 experts of all layers."""
ROUTERS = {"after attention": False, "before attention": True}
"""What the router reads (`MixtureOfExperts.before_attention`)."""
PROMPTS, PROMPT, ANSWER = 3, 16, 48
REMAINING = (8, 4)
BITS = (8, 4, 2)
QMOE = (1.0,)
TOKENS = (1_000, 20_000, 40_000)
"""Of a prompt, in the simulation of slices of bits."""
HOST = 200e9
"""Bytes/s of the host's memory in simulated times: an assumption, about that of a server with eight channels."""
WIDTH, HIDDEN, HEADS, KEYS = 2048, 768, 32 * 128, 4 * 128
"""Sizes of Qwen3-30B-A3B, whose layers are simulated."""

Layer = tuple[int, int]
Step = tuple[Layer, dict[Any, Guess], dict[Any, np.ndarray]]


class FirstIn(Eviction):
    """The expert that has been in the cache for longest leaves: of equal worth, the cache drops its oldest."""

    def saw(self, layer: Any, chosen: np.ndarray, scores: np.ndarray) -> None:
        """See `Eviction`."""

    def worth(self, key: Any) -> float:
        """See `Eviction`."""
        return 0.0


RULES: dict[str, type[Eviction]] = {"FIFO": FirstIn, "LRU": LeastRecent, "scores": RecentScores}


class Noted(SoftmaxRouter):
    """Notes the experts and weights of all tokens."""

    def __call__(self, *args: Any, **options: Any) -> Any:
        """See `Router`."""
        routed = super().__call__(*args, **options)
        jax.debug.callback(lambda *a: noted.append(tuple(map(np.asarray, a))), routed.ids, routed.weights)
        return routed


noted: list[tuple[np.ndarray, np.ndarray]] = []
"""Experts and weights of each call of `Noted`."""


class Recorded(ExpertLayers):
    """Notes what the routers guessed and chose."""

    def __init__(self, *args: Any):
        super().__init__(*args)
        self.steps: list[Step] = []

    def expect(self, run: int, repeat: int, guesses: dict[Any, Guess]) -> None:
        """See `ExpertLayers`."""
        self.guesses = {k: Guess(np.asarray(g.load), np.asarray(g.scores)) for k, g in guesses.items()}
        super().expect(run, repeat, guesses)

    def complete(self, run: int, repeat: int, loads: dict[Any, np.ndarray]) -> bool:
        """See `ExpertLayers`."""
        done = super().complete(run, repeat, loads)
        if done:
            self.steps.append(((run, repeat), self.guesses, loads))
        return done


def trained(seed: int, before: bool) -> js.Run:
    """Return the run of a seed and a router; train it if it does not exist."""
    folder = RUNS / f"experts-{seed}{'-before' * before}"
    if folder.exists():
        return js.load(str(folder))
    mlp = dataclasses.replace(MODEL.mlp, before_attention=before)
    settings = SETTINGS | {"model": dataclasses.replace(MODEL, mlp=mlp)}
    return js.fit(TrainConfig(seed=seed, **settings), run=folder, quiet=True)


def heldout(config: TrainConfig, params: Any) -> float:
    """Return the loss of 4 batches of held-out rows, in nats a byte."""
    source = config.data.source(config.tokenizer, seq_len=64, split="heldout", packing=config.packing)
    evaluate, objective = evaluator(config.model), NextToken()
    batches = (source.rows(np.arange(16 * n, 16 * (n + 1))) for n in range(4))
    return statistics.fmean(float(objective.value(evaluate(params, b))) for b in batches)


@functools.cache
def evaluator(model: Any) -> Any:
    """Return the compiled evaluation of a model."""
    return make_eval(blueprint_of(TrainConfig(**SETTINGS | {"model": model}))[0], None)


def recorded(run: js.Run, arrays: dict[str, np.ndarray]) -> Recorded:
    """Return the choices of a model that continues held-out text, one prompt after the other."""
    graphdef, infos = describe_model(run.config.model)
    layers = Recorded(infos, OnHost(arrays), 24, RecentScores(), True)
    sizes: dict[str, Any] = dict(rows=1, length=PROMPT + ANSWER, budget=PROMPT)
    engine = Engine(Streamed(graphdef, layers, cache=Paged(16), **sizes))
    c = run.config
    source = c.data.source(c.tokenizer, seq_len=64, split="heldout", packing=c.packing)
    for row in source.rows(np.arange(PROMPTS))["tokens"]:
        engine.submit(Request(tuple(row[:PROMPT].tolist()), Sampling(max_tokens=ANSWER, temperature=1.0), 0))
        while engine.busy:
            engine.step()
    return layers


def replayed(infos: Any, arrays: dict[str, np.ndarray], steps: list[Step], **options: Any) -> dict[str, Any]:
    """Return what a cache does with recorded choices, and the simulated seconds of a token with each way to compute."""
    layers = ExpertLayers(infos, OnHost(arrays), **options)
    matrices = 2 * (2 * WIDTH * HEADS + 2 * WIDTH * KEYS), 2 * 3 * WIDTH * HIDDEN  # bytes in bfloat16
    costs = {name: Costs.of(chip("h100"), *matrices, host) for name, host in (("device", None), ("host", HOST))}
    seconds, tokens, before = dict.fromkeys(costs, 0.0), 0, dataclasses.replace(layers.hits)
    for (run, repeat), guesses, loads in steps:
        layers.expect(run, repeat, guesses)
        while not layers.complete(run, repeat, loads):
            pass
        now = layers.hits
        counts = {n: getattr(now, n) - getattr(before, n) for n in ("cached", "guessed", "missed", "wasted")}
        before = dataclasses.replace(now)
        if sum(float(load.sum()) for load in loads.values()) == TOP:  # one token
            tokens += repeat == 0
            for name, cost in costs.items():
                seconds[name] += layer_time(cost, **counts)
    layers.close()
    times = {name: 1e3 * s / tokens for name, s in seconds.items()}
    return {"hit rate": before.rate, **dataclasses.asdict(before), "milliseconds": times}


def cached(run: js.Run) -> dict[str, Any]:
    """Return hit rates and simulated times by capacity and rule, with guesses and without."""
    infos = describe_model(run.config.model)[1]
    params = jax.tree.map(np.asarray, run.params())
    arrays = {i.path: x for i, x in zip(jax.tree.leaves(infos), jax.tree.leaves(params), strict=True)}
    layers = recorded(run, arrays)
    lines: dict[str, Any] = {}
    for capacity in CAPACITIES:
        for name, rule in RULES.items():
            for guess in (True, False):
                key = f"{capacity}, {name}, {'guesses' if guess else 'no guesses'}"
                lines[key] = replayed(infos, arrays, layers.steps, capacity=capacity, eviction=rule(), guess=guess)
    same = lines["24, scores, guesses"]
    assert {k: same[k] for k in dataclasses.asdict(layers.hits)} == dataclasses.asdict(layers.hits), "replay differs"
    return lines


def fewer(run: js.Run) -> dict[str, float]:
    """Return held-out losses with fewer experts, by which remain: not trained afterwards."""
    model = run.config.model
    params = jax.tree.map(np.asarray, run.params())
    loads, rng = loads_of(run), np.random.default_rng(run.config.seed)
    chances = {layer: rng.random(EXPERTS) for layer in loads}
    mlp = next(iter(params["runs"].values()))["blocks"]
    sizes = {
        layer: sum(np.sum(np.square(x[layer], dtype=np.float64), (1, 2)) for x in (m["gate"], m["up"], m["down"]))
        for m in [next(iter(mlp.values()))["mlp"]]
        for layer in loads
    }
    lines = {}
    for experts in REMAINING:
        config = dataclasses.replace(run.config, model=with_experts(model, experts))
        for name, ranks, method in (
            ("most chosen", loads, "drop"),
            ("merged", loads, "merge"),
            ("largest matrices", sizes, "drop"),
            ("random", chances, "drop"),
        ):
            lines[f"{experts}, {name}"] = heldout(config, reduced(model, params, ranks, experts, method))
    return lines


def bits(run: js.Run) -> dict[str, dict[str, float]]:
    """Return held-out losses and bits of a weight with experts in fewer bits; other matrices stay as they are."""
    params, infos = run.params(), describe_model(run.config.model)[1]
    paths = [i.path for i in jax.tree.leaves(infos) if "experts" in i.axes]
    lines: dict[str, dict[str, float]] = {}
    for loaded, width in enumerate(sorted(BITS), start=1):
        form, stored, weights = NestedBits((2, 2, 4), 64), 0, 0

        def one(x: Any, info: Any, form: Any = form, loaded: int = loaded) -> Any:
            nonlocal stored, weights
            if info.path not in paths:
                return x
            code = form.encode(x, (-2,))
            code = dataclasses.replace(code, slices=code.slices[:loaded])
            stored += sum(a.nbytes for a in jax.tree.leaves(code))
            weights += x.size
            return code.dense(x.dtype)

        changed = jax.tree.map(one, params, infos)
        lines[f"nested, {width} bits"] = {"loss": heldout(run.config, changed), "bits": 8 * stored / weights}
    for width in QMOE:
        out = RUNS / f"qmoe-{width}-{run.config.seed}"
        shutil.rmtree(out, ignore_errors=True)
        new = quantize(run, out, QMoE(bits=width), rows=64, batch=64, say=lambda _: None)
        leaves = jax.tree_util.tree_leaves_with_path(new.weights())
        own = [a for path, a in leaves if any(path_name(path).startswith(p) for p in paths)]
        count = sum(i.size for i in jax.tree.leaves(infos) if i.path in paths)
        lines[f"QMoE, {width}"] = {
            "loss": heldout(run.config, new.weights()), "bits": 8 * sum(a.nbytes for a in own) / count
        }  # fmt: skip
    return lines


def slices(run: js.Run) -> dict[str, dict[str, float]]:
    """Return the simulated time of a layer whose experts are loaded in slices of bits, by tokens and order.

    Choices are those of held-out text. A third of them, of the least weight, needs 2 bits of its expert, a third 4 and
    a third 8: D²MoE trains a router of bits, which is not here.
    """
    model = dataclasses.replace(run.config.model, mlp=dataclasses.replace(run.config.model.mlp, router=Noted()))
    noted.clear()
    heldout(dataclasses.replace(run.config, model=model), run.params())
    jax.effects_barrier()
    h100, matrices = chip("h100"), 3 * WIDTH * HIDDEN
    loads = [matrices * b / 8 / h100.host_bandwidth for b in (2, 2, 4)]
    compute, lines = 2 * matrices / h100.flops["bfloat16"], {}
    for tokens in TOKENS:
        sums = dict.fromkeys(("first in, first out", "hottest first"), np.zeros(2))
        for ids, weights in noted:
            scale, cuts = tokens / ids[..., 0].size, np.quantile(weights, (1 / 3, 2 / 3))
            need = {
                e: [round(scale * np.sum((ids == e) & (weights >= least))) for least in (0.0, *cuts)]
                for e in range(EXPERTS)
            }
            attention = tokens * 2 * (2 * WIDTH * HEADS + 2 * WIDTH * KEYS) / h100.flops["bfloat16"]
            for name, order in (("first in, first out", in_order), ("hottest first", hottest_first)):
                sums[name] = sums[name] + sliced(need, order(need), loads, compute, attention)
        for name, total in sums.items():
            seconds, idle = 1e3 * total / len(noted)
            lines[f"{tokens}, {name}"] = {"milliseconds": float(seconds), "idle": float(idle)}
    return lines


def mean(lines: dict[str, Any], router: str, *keys: str) -> float:
    """Return the mean over seeds of a number of a router's models."""
    rows = [functools.reduce(lambda row, key: row[key], keys, lines[f"{router}, seed {seed}"]) for seed in SEEDS]
    return statistics.fmean(rows)  # type: ignore[arg-type]


def show(lines: dict[str, Any]) -> None:
    """Print the tables of the page, and draw its figure."""
    caches = [(c, r, g) for c in CAPACITIES for r in RULES for g in ("no guesses", "guesses")]
    for router in ROUTERS:
        print(f"router {router}: hit rate, milliseconds a token with the device alone, with the host")
        for case in caches:
            at = "cache", ", ".join(map(str, case))
            times = (mean(lines, router, *at, "milliseconds", where) for where in ("device", "host"))
            print(*case, f"{mean(lines, router, *at, 'hit rate'):.2f}", *(f"{t:.2f}" for t in times), sep=" | ")
    after = next(iter(ROUTERS))
    own = lines[f"{after}, seed {SEEDS[0]}"]
    base = mean(lines, after, "loss")
    for key in own["fewer"]:
        print(key, f"{mean(lines, after, 'fewer', key) - base:+.3f}", sep=" | ")
    for key in own["bits"]:
        loss, width = (mean(lines, after, "bits", key, name) for name in ("loss", "bits"))
        print(key, f"{width:.2f}", f"{loss - base:+.3f}", sep=" | ")
    for key in own["slices"]:
        print(key, *(f"{mean(lines, after, 'slices', key, n):.4f}" for n in ("milliseconds", "idle")), sep=" | ")

    figure = Figure(figsize=(10, 4), dpi=110, layout="constrained")
    left, right = figure.subplots(1, 2)
    for rule, colour in zip(RULES, ("#edae49", "#222222", "#d1495b"), strict=True):
        for router, style in zip(ROUTERS, ("-", "--"), strict=True):
            rates = [mean(lines, router, "cache", f"{c}, {rule}, no guesses", "hit rate") for c in CAPACITIES]
            left.plot(CAPACITIES, rates, style, marker="o", color=colour, label=f"{rule}, router {router}")
    left.set(xlabel="experts on the device, of 48", ylabel="hit rate", title="without guesses")
    bits_of = {key: mean(lines, after, "bits", key, "bits") for key in own["bits"]}
    for key, width in bits_of.items():
        loss = mean(lines, after, "bits", key, "loss") - base
        right.plot(width, loss, "o", color="#d1495b" if "QMoE" in key else "#222222")
        right.annotate(key, (width, loss), textcoords="offset points", xytext=(6, 4))
    right.set(xlabel="bits a weight of experts", ylabel="nats a byte more", xlim=(0, 11.5), title="fewer bits")
    for ax in (left, right):
        ax.grid(alpha=0.25)
    left.legend(frameon=False, fontsize=8)
    figure.savefig(HERE / "memory.png")


def main() -> None:
    """Measure, and write and show the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--show", action="store_true", help="print and draw what is measured")
    file, lines = HERE / "results.json", dict[str, Any]()
    if not parser.parse_args().show:
        for seed in SEEDS:
            for name, before in ROUTERS.items():
                run = trained(seed, before)
                own = {"loss": heldout(run.config, run.params()), "cache": cached(run)}
                if not before:
                    own |= {"slices": slices(run), "fewer": fewer(run), "bits": bits(run)}
                lines[f"{name}, seed {seed}"] = own
                file.write_text(json.dumps(lines, indent=1) + "\n")
    show(json.loads(file.read_text()))


if __name__ == "__main__":
    main()
