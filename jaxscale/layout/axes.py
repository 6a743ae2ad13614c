"""The logical axis names: the one table that models, rules and errors all read."""

from __future__ import annotations

from jaxscale.errors import LayoutError, near

AXES: dict[str, str] = {
    # batches and sequences
    "batch": "examples; split by data, fsdp and expert",
    "seq": "positions of a sequence inside attention and MLP; split by context",
    "residual_seq": "positions of the residual stream between blocks; Megatron sequence sharding splits it by tensor",
    "kv_seq": "positions that are attended to (keys and values)",
    # what generation keeps of past tokens
    "cache_rows": "slots of a cache, for the sequences of one batch row",
    "cache_seq": "positions of a sequence in a cache; split by context",
    "pages": "pages of a cache, each of a few positions; split by context",
    # widths
    "embed": "the residual stream's width (d_model); FSDP splits it in parameters",
    "mlp": "the feed-forward hidden width",
    "heads": "query heads",
    "kv_heads": "key and value heads (fewer than `heads` in grouped-query attention); whole where the mesh does not "
    "divide them",
    "head_dim": "width of one head",
    "latent": "a narrow vector that all heads' keys and values, or queries, are made of (multi-head latent attention)",
    "latent_in": "`latent` in the matrices that heads are made by; FSDP splits it in parameters",
    "vocab": "token ids",
    "positions": "learned absolute positions",
    "rank": "the rank of an adapter's two matrices",
    "norm": "the width of a normalisation's scale and bias, outside of FSDP's split of `embed`",
    # stacks
    "replicas": "copies of the training state that differ (`LocalSteps`); split by replica",
    "layers": "copies of a repeating group of blocks, stacked and scanned; pipeline splits it",
    "experts": "experts of a mixture",
    # experts: names of their own, so that rules alone can lay them over other mesh axes than attention (folding)
    "expert_batch": "`batch` inside a layer of experts",
    "expert_seq": "`seq` inside a layer of experts",
    "expert_embed": "`embed` in the weights of experts",
    "expert_mlp": "the hidden width of one expert",
    "router": "a router's score for each expert",
}
"""Logical axis name -> what a dimension of that name is."""

STACKED = ("layers", "experts")
"""Axes along which like tensors are stacked: what is defined per tensor is defined for each of them."""

FILLED = ("vocab",)
"""Axes whose sizes devices need not divide: a tensor is kept cut along another dimension, and has rows of zeros behind
its own while it is used."""

REPLICABLE = ("kv_heads",)
"""Axes that every device holds whole where their mesh axes do not divide them; any other axis is then an error.

Grouped-query attention has fewer key heads than a large `tensor` axis, and each is small beside the query heads.
"""

MESH_AXES: tuple[str, ...] = ("replica", "pipeline", "data", "fsdp", "expert", "context", "tensor")
"""Mesh axes, slowest-varying first: neighbours along `tensor` are the closest devices."""


def check_axis(name: str, where: str) -> None:
    """Raises `LayoutError` when `name` is not in the table; `where` says who used it."""
    if name not in AXES:
        raise LayoutError(f"{where} uses the logical axis '{name}', which does not exist{near(name, AXES)}")


def check_mesh_axis(name: str, where: str) -> None:
    """Raises `LayoutError` when `name` is not a mesh axis; `where` says who used it."""
    if name not in MESH_AXES:
        raise LayoutError(f"{where} uses the mesh axis '{name}', which does not exist{near(name, MESH_AXES)}")
