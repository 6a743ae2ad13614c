"""Runs: a repeating group of blocks, stacked along `layers` and applied by one scan."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxscale.errors import ConfigError, near
from jaxscale.nn.block import Block
from jaxscale.nn.context import Context

REMAT: dict[str, Callable | None] = {
    "none": None,
    "full": jax.checkpoint_policies.nothing_saveable,
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "attention": jax.checkpoint_policies.save_only_these_names("attn_out"),
    "flash": jax.checkpoint_policies.save_only_these_names("flash_out", "flash_lse"),
}
"""What the backward pass finds saved, by name: everything; only each group's input; the products with weights as
well; the attention outputs; or of `flash_attention` what keeps its backward pass from running it again."""


class Run(nnx.Module):
    """`repeats` copies of a group of (possibly unlike) blocks.

    Parameters are stacked along a leading `layers` dimension, one stack per block of the group, so that compile time
    does not grow with depth.

    Args:
      make_group: builds one copy of the group from its own random streams.
      repeats: number of copies.
      first: how many layers of the model come before this run (each layer's randomness is its own).
      remat: a key of `REMAT`.
      scan: apply by `lax.scan`; else unrolled, the same parameters and values, for comparison.
    """

    def __init__(
        self,
        make_group: Callable[[nnx.Rngs], Sequence[Block]],
        repeats: int,
        *,
        first: int = 0,
        remat: str = "none",
        scan: bool = True,
        rngs: nnx.Rngs,
    ):
        if remat not in REMAT:
            raise ConfigError(f"there is no rematerialisation policy '{remat}'{near(remat, REMAT)}")
        self.blocks = nnx.List(jax.vmap(lambda r: list(make_group(r)))(rngs.split(repeats)))
        for _, variable in nnx.iter_graph(self.blocks):
            axes = variable.get_metadata().get("axes") if isinstance(variable, nnx.Variable) else None
            if axes is not None:  # a parameter without names is refused, by its own name, where names are collected
                variable.set_metadata(axes=("layers", *axes))
        self.repeats, self.first, self.remat, self.scan = repeats, first, remat, scan

    def __call__(self, x: Float[Array, "b s e"], context: Context) -> Float[Array, "b s e"]:
        def group(x: Array, slice_: tuple[list[Block], Array]) -> tuple[Array, None]:
            blocks, i = slice_
            for j, block in enumerate(blocks):
                x = block(x, context.at(self.first + i * len(blocks) + j))
            return x, None

        if self.remat != "none":
            group = jax.checkpoint(group, policy=REMAT[self.remat], prevent_cse=not self.scan)
        stacked = (list(self.blocks), jnp.arange(self.repeats))
        if self.scan:
            return jax.lax.scan(group, x, stacked)[0]
        for i in range(self.repeats):
            x, _ = group(x, jax.tree.map(lambda a, i=i: a[i], stacked))
        return x
