"""What a long context costs whoever serves it: four figures that come from the size of the cache of keys and values.

    concurrency   users whose caches fit beside the weights        bound by the size of device memory
    prefill       seconds until the first token                    by arithmetic
    decode        seconds of an answer                             by the bandwidth of device memory
    swap          seconds until another user's cache is in place   by the bandwidth to the host

From "Challenges in Deploying Long-Context Transformers: A Theoretical Peak Performance Analysis" (Fu 2024,
arXiv:2405.08944): everything at the hardware's peak, and tensor parallelism for nothing, as there.
"""

from __future__ import annotations

import dataclasses

from jaxscale.errors import ConfigError
from jaxscale.hardware import Chip
from jaxscale.models import TransformerConfig
from jaxscale.plan.covered import covered_model


@dataclasses.dataclass(frozen=True)
class Costs:
    """What a context costs.

    Args:
      cache: bytes of one user's keys and values.
      weights: bytes of the model.
      concurrency: users whose caches fit beside the weights; 0 if not even one does.
      prefill: seconds of the forward pass over the context.
      decode: seconds of an answer, all users' caches and the weights read once for each of its tokens.
      swap: seconds to put one user's cache into the host's memory and to bring another's.
    """

    cache: int
    weights: int
    concurrency: int
    prefill: float
    decode: float
    swap: float

    def to_json(self) -> dict[str, float]:
        """As plain numbers."""
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
    """The four costs of serving a context.

    Args:
      config: the model.
      chip: what it runs on; of its memory, everything is taken to be free.
      context: tokens before the answer.
      answer: tokens of it; the cache is taken to be as long as the context all the while.
      users: that are answered at the same time, each with such a context.
      devices: chips that share the work evenly.
      dtype: of the products.
      itemsize: bytes of a weight, and of a cached number.

    Raises:
      ConfigError: a length or number below 1, or weights that do not fit.
    """
    for name, value in (("context", context), ("answer", answer), ("users", users), ("devices", devices)):
        if value < 1:
            raise ConfigError(f"long-context costs: {name} = {value}: must be at least 1")
    weights, cache = config.param_count() * itemsize, cache_bytes(config, context, itemsize)
    room = chip.memory * devices - weights
    if room < 0:
        raise ConfigError(
            f"long-context costs: the weights take {weights / 1e9:.0f} GB and {devices} x {chip.name} has "
            f"{chip.memory * devices / 1e9:.0f}; use at least {-(-weights // chip.memory)} devices"
        )
    return Costs(
        cache=cache,
        weights=weights,
        concurrency=room // cache,
        prefill=config.flops(1, context, training=False) / (chip.rate(dtype) * devices),
        decode=answer * (weights + users * cache) / (chip.bandwidth * devices),
        swap=2 * cache / (chip.host_bandwidth * devices),
    )


def cache_bytes(config: TransformerConfig, context: int, itemsize: int = 2) -> int:
    """Bytes of what is kept of one user's tokens: `config.kept_width` a position and layer, of a window its length.

    That is 2 x kv heads x head dim, or of multi-head latent attention what keys and values are made of.
    """
    covered_model(config)
    positions = sum(min(window or context, context) for window in config.layer_windows())
    return positions * config.kept_width * itemsize
