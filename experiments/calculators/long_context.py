"""Cost of serving a long context: four figures that follow from the size of the KV cache.

    concurrency   users whose caches fit beside the weights        bound by the size of device memory
    prefill       seconds until the first token                    bound by arithmetic
    decode        seconds of an answer                             bound by the bandwidth of device memory
    swap          seconds to swap one user's cache for another's   bound by the bandwidth to the host

From "Challenges in Deploying Long-Context Transformers: A Theoretical Peak Performance Analysis" (Fu 2024,
arXiv:2405.08944). As in the paper, all rates are peaks, and tensor parallelism costs nothing.
"""

from __future__ import annotations

import dataclasses

from jaxscale.errors import ConfigError
from jaxscale.hardware import Chip
from jaxscale.models import TransformerConfig
from jaxscale.plan.covered import covered_model


@dataclasses.dataclass(frozen=True)
class Costs:
    """Cost of serving a context.

    Args:
      cache: bytes of one user's keys and values.
      weights: bytes of the model's weights.
      concurrency: number of users whose caches fit beside the weights.
      prefill: seconds of the forward pass over the context.
      decode: seconds of an answer; each token reads the weights and all users' caches once.
      swap: seconds to move one user's cache to host memory and another's back.
    """

    cache: int
    weights: int
    concurrency: int
    prefill: float
    decode: float
    swap: float

    def to_json(self) -> dict[str, float]:
        """Return the costs as JSON values."""
        return dataclasses.asdict(self)


def costs(
    config: TransformerConfig,
    chip: Chip,
    context: int,
    *,
    answer: int = 250,
    users: int = 1,
    devices: int = 1,
    dtype: str = "bfloat16",
    itemsize: int = 2,
) -> Costs:
    """Compute the four costs of serving a context.

    Args:
      config: the model.
      chip: the hardware; all of its memory is assumed to be free.
      context: tokens before the answer.
      answer: tokens of the answer; the cache is assumed to stay as long as the context.
      users: number of users that are answered at the same time, each with such a context.
      devices: number of chips that share the work evenly.
      dtype: dtype of the products.
      itemsize: bytes of a weight, and of a cached number.

    Raises:
      ConfigError: a length or number is below 1, or the weights do not fit.
    """
    for name, value in (("context", context), ("answer", answer), ("users", users), ("devices", devices)):
        if value < 1:
            raise ConfigError(f"long-context costs: {name} = {value}: must be at least 1")
    weights, cache = config.param_count() * itemsize, cache_bytes(config, context, itemsize)
    free = chip.memory * devices - weights
    if free < 0:
        raise ConfigError(
            f"long-context costs: the weights take {weights / 1e9:.0f} GB and {devices} x {chip.name} has "
            f"{chip.memory * devices / 1e9:.0f}; use at least {-(-weights // chip.memory)} devices"
        )
    return Costs(
        cache=cache,
        weights=weights,
        concurrency=free // cache,
        prefill=config.flops(1, context, training=False) / (chip.rate(dtype) * devices),
        decode=answer * (weights + users * cache) / (chip.bandwidth * devices),
        swap=2 * cache / (chip.host_bandwidth * devices),
    )


def cache_bytes(config: TransformerConfig, context: int, itemsize: int = 2) -> int:
    """Bytes of one user's KV cache; a layer with a sliding window caches at most the window.

    A position of a layer has `config.cache_width` numbers: 2 x kv heads x head dim, or for multi-head latent attention
    the latent vector and the rotary key.
    """
    covered_model(config)
    positions = sum(min(window or context, context) for window in config.layer_windows())
    return positions * config.cache_width * itemsize
