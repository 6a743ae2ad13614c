"""Experts of one domain each, trained apart: all of one size, or of the size that their domain needs; equal FLOPs.

python experiments/slow_links/domain_experts.py          # some minutes on two cores
python experiments/slow_links/domain_experts.py --table  # the table from results/domain_experts.json
"""

from __future__ import annotations

import argparse
import json
import pydoc_data.topics
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jaxscale as js
from jaxscale.infer import mixture_logprobs
from jaxscale.step import prepare

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "domain_experts.json"
LIBRARY = Path(sysconfig.get_paths()["stdlib"])
DOMAINS = ("tables", "code", "prose")
ROWS, SEQ, STEPS = 16, 128, 240
WIDTHS: dict[str, tuple[int, ...]] = {"homogeneous": (48, 48, 48), "heterogeneous": (32, 64, 64)}


def write_domains(folder: Path) -> None:
    """Write the files of three domains: character tables, source code, and the language reference's text."""
    texts: dict[str, dict[str, str]] = {
        "tables": {p.name: p.read_text(errors="ignore") for p in sorted((LIBRARY / "encodings").glob("[ckm]*.py"))},
        "code": {
            f"{package}-{p.name}": p.read_text(errors="ignore")
            for package in ("asyncio", "email", "unittest")
            for p in sorted((LIBRARY / package).glob("*.py"))
        },
        "prose": dict(pydoc_data.topics.topics),
    }
    for domain, files in texts.items():
        (folder / domain).mkdir()
        for name, text in files.items():
            (folder / domain / f"{name.replace('/', '-')}.txt").write_text(text)


def settings(folder: Path, domain: str, width: int, steps: int) -> js.TrainConfig:
    """Return the settings of one expert."""
    return js.TrainConfig(
        model=js.models.Transformer.Config(depth=2, width=width, heads=4, vocab=256),
        data=js.data.text_files(f"{folder}/{domain}/*.txt", heldout=0.15),
        layout=None,
        steps=steps,
        batch_size=ROWS,
        seq_len=SEQ,
        lr=3e-3,
        eval_batches=4,
    )


def flops(width: int, steps: int) -> float:
    """Return the FLOPs of training an expert."""
    return steps * settings(HERE, "code", width, steps).model.flops(ROWS, SEQ)


def logprobs_of(config: js.TrainConfig, heldout: list[Any], run: Path) -> np.ndarray:
    """Train an expert; return its log-probabilities of the held-out tokens of all domains, (rows, sequence)."""
    params = js.fit(config, run=run, quiet=True).params()
    graphdef = prepare(config).blueprint.graphdef

    @jax.jit
    def of(params: Any, tokens: jax.Array, targets: jax.Array) -> jax.Array:
        logits = jax.nn.log_softmax(nnx.merge(graphdef, params)(tokens))
        return jnp.take_along_axis(logits, targets[..., None], -1)[..., 0]

    return np.concatenate([of(params, b["tokens"], b["targets"]) for b in heldout])


def measure() -> None:
    """Train two ensembles and one model on all domains, with equal FLOPs."""
    results: dict[str, Any] = {}
    total = sum(flops(w, STEPS) for w in WIDTHS["homogeneous"])
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_domains(folder)
        batches = [prepare(settings(folder, d, 48, STEPS)).heldout[""] for d in DOMAINS]
        rows = [sum(len(b["tokens"]) for b in part) for part in batches]
        heldout = [b for part in batches for b in part]

        def nats(logprobs: np.ndarray) -> dict[str, float]:
            parts = np.split(np.asarray(logprobs), np.cumsum(rows)[:-1])
            return {d: round(float(-p.mean()), 4) for d, p in zip(DOMAINS, parts, strict=True)}

        for kind, widths in WIDTHS.items():
            steps = round(total / sum(flops(w, 1) for w in widths))
            experts = [
                logprobs_of(settings(folder, d, w, steps), heldout, folder / f"{kind}-{d}")
                for d, w in zip(DOMAINS, widths, strict=True)
            ]
            mixed = mixture_logprobs(jnp.stack([jnp.asarray(x) for x in experts]))
            own = {d: nats(x)[d] for d, x in zip(DOMAINS, experts, strict=True)}
            spent = sum(flops(w, steps) for w in widths)
            results[kind] = {"widths": widths, "steps": steps, "flops": spent, "mixed": nats(mixed), "own": own}
            print(kind, results[kind], flush=True)  # noqa: T201
        steps = round(total / flops(48, 1))
        one = logprobs_of(settings(folder, "*", 48, steps), heldout, folder / "one")
        results["one model"] = {"widths": [48], "steps": steps, "flops": flops(48, steps), "mixed": nats(one)}
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")


def table() -> None:
    """Print the README's table."""
    print(f"| | widths | steps each | 10¹² FLOPs | {' | '.join(DOMAINS)} | mean |\n|---|---|---|---|---|---|---|---|")  # noqa: T201
    for name, r in json.loads(RESULTS.read_text()).items():
        losses = [r["mixed"][d] for d in DOMAINS]
        cells = " | ".join(f"{x:.3f}" for x in (*losses, np.mean(losses)))
        widths = ", ".join(map(str, r["widths"]))
        print(f"| {name} | {widths} | {r['steps']} | {r['flops'] / 1e12:.2f} | {cells} |")  # noqa: T201


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--table", action="store_true", help="do not train")
    if not parser.parse_args().table:
        measure()
    table()
