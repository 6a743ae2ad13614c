"""Differentiable k-means (eDKM) beside the straight-through estimator: held-out loss, and memory of a backward pass.

python experiments/few_bits_methods/clustered.py     # writes clustered.json beside this file
"""

from __future__ import annotations

import dataclasses
import pathlib
import sys
from typing import Any

import jax
import jax.numpy as jnp

import jaxscale as js
from jaxscale.nn import Clustered, Rounded, Stored
from jaxscale.nn.products.clustered import for_each_weight, once_for_equal_weights
from jaxscale.step import TrainConfig, describe_model

sys.path.insert(0, str(pathlib.Path(__file__).parent))
from common import MODEL, SAME, SEEDS, base, heldout, trained, write  # noqa: E402

js.simulate_devices(8)


def memory(lines: dict[str, Any]) -> None:
    """Count the temporary bytes of the gradient of one clustered matrix in compiled programs, per weight."""
    for n in (1024, 4096):
        kernel, settings = jax.ShapeDtypeStruct((n, n), jnp.float32), Clustered(bits=3)
        for name, function, mesh in (
            ("each weight", for_each_weight, None),
            ("equal weights once", once_for_equal_weights, None),
            ("equal weights once, fsdp=8, a device", once_for_equal_weights, "fsdp=8"),
        ):
            layout = None if mesh is None else js.Layout(mesh)
            place = None if layout is None else layout.sharding(("embed", "mlp"), (n, n), kind="params")
            of = jax.grad(lambda k, f=function, s=settings: jnp.sum(jnp.sin(f(k, s, jnp.bfloat16))))
            compiled = jax.jit(of, in_shardings=place, out_shardings=place).lower(kernel).compile()
            lines[f"{n} x {n}, {name}"] = compiled.memory_analysis().temp_size_in_bytes
            write("clustered", lines)


def main() -> None:
    """Measure and write the results."""
    lines: dict[str, Any] = {}
    memory(lines)
    infos = describe_model(MODEL)[1]
    for seed in SEEDS[:1]:
        start = base(seed)
        lines[f"float32, seed {seed}"] = heldout(start.config, start.params())
        for bits in (2,):
            stored = Stored(f"kmeans{bits}", group=None, outputs=None)
            after = stored.encoded(start.params(), infos, None)
            lines[f"{bits} bits, afterwards, seed {seed}"] = heldout(start.config, after)
            for name, products in {
                "straight through": Rounded(stored),
                "clustered, temperature 0.05": Clustered(bits),
                "clustered, temperature 0.3": Clustered(bits, temperature=0.3),
                "clustered, temperature 0.7": Clustered(bits, temperature=0.7),
            }.items():
                config = TrainConfig(model=dataclasses.replace(MODEL, products=products), seed=seed, **SAME)
                run = trained(f"{name.replace(' ', '-').replace(',', '')}-{bits}-{seed}", config)
                hard = heldout(run.config, stored.encoded(run.params(), infos, None))
                lines[f"{bits} bits, {name}, seed {seed}"] = hard
                lines[f"{bits} bits, {name}, as trained, seed {seed}"] = heldout(run.config, run.params())
                write("clustered", lines)


if __name__ == "__main__":
    main()
