"""The table of logical axis names, which models, rules and error messages read."""

from __future__ import annotations

from jaxscale.errors import LayoutError, near

AXES: dict[str, str] = {
    # batches and sequences
    "batch": "sequences of a batch; sharded over data, fsdp and expert",
    "seq": "positions of a sequence inside attention and MLP; sharded over context",
    "residual_seq": "positions of the residual stream between blocks; sharded over context, and with sequence sharding "
    "(Megatron) also over tensor",
    "kv_seq": "positions of the keys and values that a query attends to",
    # the KV cache
    "cache_rows": "slots of a KV cache, each for one sequence at a time",
    "cache_seq": "positions of a sequence in a KV cache; sharded over context",
    "pages": "pages of a KV cache, of a fixed number of positions each; sharded over context",
    # widths
    "embed": "the width of the residual stream (d_model); FSDP shards parameters along it",
    "mlp": "the hidden width of a feed-forward layer",
    "heads": "query heads",
    "kv_heads": "key and value heads (fewer than `heads` in grouped-query attention); replicated where the mesh does "
    "not divide them",
    "head_dim": "the width of one head",
    "latent": "the narrow vector from which all heads' keys and values, or queries, are projected (multi-head latent "
    "attention)",
    "latent_in": "`latent` as the input dimension of the matrices that project it to heads; FSDP shards parameters "
    "along it",
    "layer_inputs": "the inputs that layers have of their own (`PerLayer`), of one layer or of all",
    "vocab": "token ids",
    "positions": "learned absolute positions",
    "rank": "the rank of an adapter's two matrices",
    "norm": "the width of a normalisation's scale and bias; FSDP does not shard it",
    # stacks
    "replicas": "copies of the training state that differ (`LocalSteps`, `DiLoCo`); sharded over replica",
    "layers": "repeats of a group of blocks, stacked and scanned; sharded over pipeline",
    "uses": "applications of one group of blocks, whose layers share its matrices",
    "experts": "experts of a mixture; sharded over expert",
    # separate names for expert layers, so that rules can shard them over other mesh axes than attention (folding)
    "expert_batch": "`batch` inside a layer of experts",
    "expert_seq": "`seq` inside a layer of experts",
    "expert_embed": "`embed` in the weights of experts",
    "expert_mlp": "the hidden width of one expert",
    "index_heads": "heads of the indexer that selects tokens for sparse attention (`DSA`); replicated",
    "router": "a router's score for each expert",
    "outputs": "the numbers that a head gives for a sequence: a reward, or a score of each class",
}
"""Logical axis name -> what a dimension of that name is, and the mesh axes that it is usually sharded over."""

SETTINGS = {"embed": "Transformer.width", "expert_embed": "Transformer.width", "experts": "MixtureOfExperts.experts"}
"""Logical axis name -> the setting that has its size in every `Transformer`, for error messages."""

STACKED = ("layers", "uses", "experts")
"""Axes that stack separate tensors: whatever is defined per tensor (a norm, fan-in) is computed per index of them."""

FILLED = ("vocab",)
"""Axes whose size the mesh need not divide: such a tensor is stored sharded along another dimension, and padded with
rows of zeros while a layer uses it."""

REPLICABLE = ("kv_heads",)
"""Axes that are replicated where their mesh axes do not divide them; for any other axis that is an error.

Grouped-query attention can have fewer key heads than `tensor` has devices, and they are small beside the query heads.
"""

MESH_AXES: tuple[str, ...] = ("replica", "pipeline", "data", "fsdp", "expert", "context", "tensor")
"""Mesh axes, slowest-varying first: neighbours along `tensor` are the closest devices."""


def check_axis(name: str, where: str) -> None:
    """Check that a logical axis exists.

    Args:
      name: the logical axis.
      where: what uses it, for the message.

    Raises:
      LayoutError: `name` is not in `AXES`.
    """
    if name not in AXES:
        raise LayoutError(f"{where} uses the logical axis '{name}', which does not exist{near(name, AXES)}")


def check_mesh_axis(name: str, where: str) -> None:
    """Check that a mesh axis exists.

    Args:
      name: the mesh axis.
      where: what uses it, for the message.

    Raises:
      LayoutError: `name` is not in `MESH_AXES`.
    """
    if name not in MESH_AXES:
        raise LayoutError(f"{where} uses the mesh axis '{name}', which does not exist{near(name, MESH_AXES)}")
