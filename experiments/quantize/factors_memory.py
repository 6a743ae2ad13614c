"""Temporaries of a forward pass with low-rank factors, read off compiled programs for a CPU.

    python experiments/quantize/factors_memory.py

Prints a Markdown table: dense matrices, factors, and factors whose feed-forward layers are computed in tiles.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from jaxscale.models import TransformerConfig
from jaxscale.nn import MemoryPolicy
from jaxscale.nn.formats import Factors
from jaxscale.step.state import describe_model

ROWS, TOKENS = 16, 256
MODEL = dict(vocab=512, depth=2, width=512, heads=2, hidden=4096)


def temporaries(factors: Factors | None, policy: MemoryPolicy | str) -> int:
    """Return the temporaries of the final hidden states of all rows, in bytes.

    Args:
      factors: the format of the matrices, or `None` for dense ones.
      policy: the model's memory policy.
    """
    graphdef, infos = describe_model(TransformerConfig(**MODEL, memory=policy))
    infos = infos if factors is None else factors.infos(infos)
    params = jax.tree.map(lambda i: jax.ShapeDtypeStruct(i.shape, i.dtype), infos)
    ids = jax.ShapeDtypeStruct((ROWS, TOKENS), jnp.int32)
    compiled = jax.jit(lambda p, ids: nnx.merge(graphdef, p).hidden(ids)).lower(params, ids).compile()
    return compiled.memory_analysis().temp_size_in_bytes


def main() -> None:
    """Print the table."""
    print("| matrices | feed-forward layer | temporaries |\n|---|---|---|")
    for factors in (None, Factors(64)):
        for size in (None, 64, 16):
            policy = "none" if size is None else MemoryPolicy(tile=("mlp_hidden",), tile_size=size)
            what = "whole" if size is None else f"in tiles of {size} positions"
            name = "dense" if factors is None else f"factors of rank {factors.rank}"
            print(f"| {name} | {what} | {temporaries(factors, policy) / 2**20:.1f} MiB |", flush=True)


if __name__ == "__main__":
    main()
