"""Context parallelism: attention over a sequence that is sharded over devices, for use inside `shard_map`."""

from jaxscale.parallel.context.gather import gather_attention
from jaxscale.parallel.context.local import Attend, Ring, Tokens
from jaxscale.parallel.context.merge import Part, merge, merge_over
from jaxscale.parallel.context.order import Chunks, Visit, products, visits, zigzag
from jaxscale.parallel.context.ring import ring_attention
from jaxscale.parallel.context.token_ring import token_ring_attention
from jaxscale.parallel.context.ulysses import ulysses_attention

__all__ = [
    "Attend",
    "Chunks",
    "Part",
    "Ring",
    "Tokens",
    "Visit",
    "gather_attention",
    "merge",
    "merge_over",
    "products",
    "ring_attention",
    "token_ring_attention",
    "ulysses_attention",
    "visits",
    "zigzag",
]
