"""Algorithms with explicit collectives: everything that runs under `shard_map`."""

from jaxscale.parallel.cross_entropy import sharded_cross_entropy
from jaxscale.parallel.embedding import sharded_lookup
from jaxscale.parallel.reductions import sharded_logsumexp
from jaxscale.parallel.sharded import sharded_op

__all__ = ["sharded_cross_entropy", "sharded_logsumexp", "sharded_lookup", "sharded_op"]
