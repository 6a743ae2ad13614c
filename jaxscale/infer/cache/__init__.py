"""KV caches: keys and values of past tokens, contiguous or in pages, and the cache of a whole model."""

from jaxscale.infer.cache.contiguous import Contiguous
from jaxscale.infer.cache.model import (
    ModelCache,
    cache_bytes,
    decodable,
    describe_cache,
    generating,
    init_cache,
    reuses_prefixes,
    run_caches,
)
from jaxscale.infer.cache.paged import Paged

__all__ = [
    "Contiguous",
    "ModelCache",
    "Paged",
    "cache_bytes",
    "decodable",
    "describe_cache",
    "generating",
    "init_cache",
    "reuses_prefixes",
    "run_caches",
]
