"""Bytes, rounding errors and loss of a trained model in every format of stored weights.

    jaxscale train experiments/demo.gin --devices 8 --run runs/demo-stored
    python experiments/stored_weights/errors.py runs/demo-stored [FORMAT ...]

Writes errors.json beside this file and prints the README's table; with names of formats, only their rows are new.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import pathlib
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jaxscale as js
from jaxscale.nn import StoredWeight, Weight, as_weight
from jaxscale.nn.formats import FORMATS, numbers_of
from jaxscale.step.state import describe_model

ROWS, LENGTH = 512, 128


def in_float64(weight: StoredWeight) -> np.ndarray:
    """Return the kernel that a weight stands for, computed in float64 from its codes and scales."""
    codes = np.asarray(weight.unpacked(), np.int64)
    if weight.table is None:
        x = np.asarray(numbers_of(weight.numbers).values)[codes]
    else:
        table = np.asarray(weight.table, np.float64).reshape(len(codes), -1)
        x = np.stack([row[layer] for row, layer in zip(table, codes, strict=True)])

    def part(value: Any) -> np.ndarray:
        y = in_float64(value) if isinstance(value, StoredWeight) else np.asarray(value, np.float64)
        for d, (m, n) in enumerate(zip(y.shape, codes.shape, strict=True)):
            y = np.repeat(y, n // m, d)
        return y

    x = x if weight.zero is None else x - part(weight.zero)
    x = x if weight.scale is None else x * part(weight.scale)
    return x if weight.offset is None else x + part(weight.offset)


def rows_of(run: js.Run) -> np.ndarray:
    """Return rows of held-out text, evenly spaced: int32 (ROWS, LENGTH + 1)."""
    config = run.config
    source = config.data.source(config.tokenizer, seq_len=config.seq_len, split="heldout", packing=config.packing)
    documents = source.documents
    first, last = documents.starts[0], documents.starts[-1] + documents.lengths[-1]
    starts = np.linspace(first, last - LENGTH - 1, ROWS).astype(int)
    return np.stack([np.asarray(documents.tokens[s : s + LENGTH + 1]) for s in starts]).astype(np.int32)


def main(folder: str, *names: str) -> None:
    """Measure every format on a run's model."""
    run = js.load(folder)
    graphdef, infos = describe_model(run.config.model)
    params, rows = run.params(), rows_of(run)

    @jax.jit
    def loss(params: Any, rows: jax.Array) -> jax.Array:
        logits = nnx.merge(graphdef, params)(rows[:, :-1]).astype(jnp.float32)
        each = jnp.take_along_axis(jax.nn.log_softmax(logits), rows[:, 1:, None], -1)
        return -jnp.mean(each)

    def mean_loss(params: Any) -> float:
        return float(np.mean([loss(params, part) for part in np.split(rows, 8)]))

    matrices = [i.path for i in jax.tree.leaves(infos) if i.contracted and "vocab" not in i.axes]
    count = sum(i.size for i in jax.tree.leaves(infos) if i.path in matrices)
    plain = mean_loss(params)
    table = [dict(name="float32", bits=32.0, error=0.0, worst=0.0, rounding=0.0, added=0.0)]
    file = pathlib.Path(__file__).parent / "errors.json"
    if names:
        table = [row for row in json.loads(file.read_text())["formats"] if row["name"] not in names]
    for name, (made, _) in FORMATS.items():
        if names and name not in names:
            continue
        few = made.encoded(jax.tree.map(jnp.copy, params), infos, None)
        weights = [w for w in jax.tree.leaves(few, is_leaf=lambda w: isinstance(w, Weight)) if isinstance(w, Weight)]
        before = [x for i, x in zip(jax.tree.leaves(infos), jax.tree.leaves(params), strict=True) if i.path in matrices]
        squares, errors, rounding = 0.0, [], 0.0
        total = sum(float(np.sum(np.asarray(x, np.float64) ** 2)) for x in before)
        for weight, kernel in zip(weights, before, strict=True):
            exact, original = in_float64(weight), np.asarray(kernel, np.float64)
            square = float(np.sum((exact - original) ** 2))
            squares, errors = squares + square, [*errors, square / float(np.sum(original**2))]
            rounding = max(rounding, float(np.max(np.abs(np.asarray(weight.dense()) - exact)) / np.max(np.abs(exact))))
        stored = sum(x.nbytes for w in weights for x in jax.tree.leaves(w))
        if made.activations is None:  # else products round activations
            few = jax.tree.map(lambda i, w: as_weight(w).dense(i.dtype), infos, few)
        table.append(
            dict(
                name=name,
                bits=8 * stored / count,
                error=(squares / total) ** 0.5,
                worst=max(errors) ** 0.5,
                rounding=rounding,
                added=mean_loss(few) - plain,
            )
        )
        print(_line(table[-1]), flush=True)
    about = dict(
        date=datetime.date.today().isoformat(),
        jax=jax.__version__,
        device=jax.devices()[0].device_kind,
        weights=count,
        tokens=ROWS * LENGTH,
        loss=plain,
        model=dataclasses.asdict(run.config.model)["width"],
        formats=table,
    )
    file.write_text(json.dumps(about, indent=1) + "\n")


def _line(row: dict[str, Any]) -> str:
    return (
        f"| `{row['name']}` | {row['bits']:.3f} | {100 * row['error']:.2f}% | {100 * row['worst']:.2f}% "
        f"| {row['added']:+.4f} |"
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
