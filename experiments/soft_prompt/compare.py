"""Soft prompts on a compressed model: python experiments/soft_prompt/compare.py RUN [STEPS].

Trains a prompt on each compressed form of one run and on the run as it is, evaluates every prompt on every form, and
prints a table of held-out losses. Writes results.jsonl.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jaxscale as js
from jaxscale.data import Loader, heldout_batches
from jaxscale.nn import WeightFormat, as_weight, head_logits
from jaxscale.nn.formats import Sparse, Stored
from jaxscale.step.state import describe_model

LENGTH, ROWS, EVALUATED, RATE = 16, 8, 8, 0.01
FORMS: dict[str, tuple[WeightFormat, ...]] = {
    "as it is": (),
    "int3": (Stored("int3", group=32),),
    "int2": (Stored("int2", group=32),),
    "50% pruned, int4": (Sparse(0.5), Stored("int4", group=32)),
}
"""The forms of the model: formats that its matrices are rounded to, one after the other."""


def main(path: str, steps: str = "150") -> None:
    """Train and evaluate."""
    run = js.load(path)
    c = run.config
    _, infos = describe_model(c.model)
    source = {
        s: c.data.source(c.tokenizer, seq_len=c.seq_len, split=s, packing=c.packing) for s in ("train", "heldout")
    }
    loader, heldout = Loader(source["train"], ROWS, 1), list(heldout_batches(source["heldout"], ROWS, EVALUATED))

    def nats(prompt: Any, params: Any, batch: Any) -> tuple[jax.Array, jax.Array]:
        """Return the sum of the tokens' nats, and how many tokens there are; a prompt of no vectors is none."""
        graphdef, _ = describe_model(dataclasses.replace(c.model, soft_prompt=len(prompt)))  # type: ignore[type-var]
        own = {"prompt": {"weight": prompt}} if len(prompt) else {}
        model = nnx.merge(graphdef, {**jax.lax.stop_gradient(params), **own})
        context = {k: batch[k] for k in ("positions", "segment_ids") if k in batch}
        hidden = model.hidden(batch["tokens"], **context)
        logs = jax.nn.log_softmax(head_logits(hidden, model.head_weight(), softcap=model.logit_softcap))
        chosen = jnp.take_along_axis(logs, batch["targets"][..., None], -1)[..., 0]
        weight = (batch["segment_ids"] != 0) * batch["weights"] if "segment_ids" in batch else batch["weights"]
        return -jnp.sum(chosen * weight), jnp.sum(weight)

    optimizer = optax.adam(optax.cosine_decay_schedule(RATE, int(steps)))

    @jax.jit
    def step(prompt: Any, state: Any, params: Any, batch: Any) -> Any:
        (total, weight), gradient = jax.value_and_grad(nats, has_aux=True)(prompt, params, batch)
        update, state = optimizer.update(jax.tree.map(lambda g: g / weight, gradient), state)
        return optax.apply_updates(prompt, update), state

    evaluate: Callable[..., Any] = jax.jit(nats)

    def loss(prompt: Any, params: Any) -> float:
        sums = np.sum([jax.device_get(evaluate(prompt, params, b)) for b in heldout], axis=0)
        return float(sums[0] / sums[1])

    forms = {}
    for name, formats in FORMS.items():
        params = run.params()
        for weights in formats:
            few = weights.encoded(params, infos, None)
            params = jax.tree.map(lambda i, w: as_weight(w).dense(i.dtype), infos, few)
        forms[name] = params
    first = forms["as it is"]["embed"]["weight"][: c.model.vocab]
    first = first[np.random.default_rng(0).integers(0, len(first), LENGTH)]
    rows = [{"prompt": "none", **{n: loss(first[:0], p) for n, p in forms.items()}}]
    rows.append({"prompt": "random tokens", **{n: loss(first, p) for n, p in forms.items()}})
    for name, params in forms.items():
        prompt, state = first, optimizer.init(first)
        for n in range(int(steps)):
            prompt, state = step(prompt, state, params, loader.batch_at(n))
        rows.append({"prompt": f"trained on: {name}", **{n: loss(prompt, p) for n, p in forms.items()}})
        print(rows[-1], flush=True)
    (Path(__file__).parent / "results.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    print(f"| prompt | {' | '.join(forms)} |\n{'|---' * (len(forms) + 1)}|")
    for r in rows:
        print(f"| {r['prompt']} | {' | '.join(f'{r[n]:.4f}' for n in forms)} |")  # type: ignore[str-format]


if __name__ == "__main__":
    main(*sys.argv[1:])
