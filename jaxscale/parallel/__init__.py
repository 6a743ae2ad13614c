"""Algorithms with explicit collectives: everything that runs under `shard_map`."""

from jaxscale.parallel.collective_matmul import gather_matmul, matmul_scatter, why_no_overlap
from jaxscale.parallel.cross_entropy import sharded_cross_entropy
from jaxscale.parallel.embedding import sharded_lookup
from jaxscale.parallel.experts import Capacity, Choices, Slots, Weights, expert_mlp, wire_rows
from jaxscale.parallel.reductions import sharded_logsumexp
from jaxscale.parallel.sharded import sharded_op

__all__ = [
    "Capacity",
    "Choices",
    "Slots",
    "Weights",
    "expert_mlp",
    "gather_matmul",
    "matmul_scatter",
    "sharded_cross_entropy",
    "sharded_logsumexp",
    "sharded_lookup",
    "sharded_op",
    "why_no_overlap",
    "wire_rows",
]
