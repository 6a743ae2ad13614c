"""Caches of keys and values: how a model's past tokens are kept while it generates."""

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
