"""What the rate of a step is told by: the operations that its model needs, and the peak of the device at hand."""

from __future__ import annotations

import jax

from jaxscale.hardware import chip_of
from jaxscale.models.base import CountsFlops, CountsProducts
from jaxscale.step.config import TrainConfig
from jaxscale.step.state import describe_model

_WITHOUT_WEIGHTS = ("scores", "attn_out")
"""Products of a model's `products` whose two operands are both activations."""


def model_flops(config: TrainConfig) -> int | None:
    """Matrix-multiplication FLOPs that a training step of a run needs, over the whole machine.

    Three forward passes (PaLM, Chowdhery et al. 2022, appendix B; attention's causal pairs only, see
    `Transformer.flops`). With adapters the frozen weights have no gradient, so that their products count twice and not
    three times, and the adapters' own count three times (Hu et al. 2021): about two thirds. A model of which nothing
    tells its `products` is then taken to multiply by weights alone.

    Returns:
      `None` where the model config has no `flops(batch, seq)`.
    """
    model, rows, seq = config.model, config.batch_size, config.seq_len
    if not isinstance(model, CountsFlops):
        return None
    if config.adapters is None:
        return model.flops(rows, seq)
    forward = model.flops(rows, seq, training=False)
    products = model.products(rows, seq) if isinstance(model, CountsProducts) else {}
    between = sum(products.get(name, 0) for name in _WITHOUT_WEIGHTS)  # both operands have a gradient
    adaptation = config.adapters.adapt(*describe_model(model))
    beside = 2 * rows * seq * sum(i.size for i in jax.tree.leaves(adaptation.adapters))
    return 2 * forward + between + adaptation.passes * beside


def peak_flops(device: jax.Device) -> float | None:
    """The device's datasheet bf16 FLOP/s, or `None` where it is not known (a CPU)."""
    chip = chip_of(device.device_kind)
    return None if chip is None else chip.flops["bfloat16"]


def examples(config: TrainConfig) -> tuple[str, int]:
    """The unit of a step's rate, and how many a step has: tokens, or rows where a batch has no tokens."""
    if "tokens" in config.objective.inputs(config):
        return "tokens", config.batch_size * config.seq_len
    return "rows", config.batch_size


def parameter_count(config: TrainConfig) -> int:
    """Parameters of the model, without adapters."""
    return sum(i.size for i in jax.tree.leaves(describe_model(config.model)[1]))
