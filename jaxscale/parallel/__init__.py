"""Algorithms with explicit collectives: everything that runs under `shard_map`."""

from jaxscale.parallel.sharded import sharded_op

__all__ = ["sharded_op"]
