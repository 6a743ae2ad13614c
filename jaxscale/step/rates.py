"""FLOPs and examples of a step, and a device's peak FLOP/s, from which throughput and MFU are computed."""

from __future__ import annotations

import jax

from jaxscale.hardware import chip_of
from jaxscale.models.base import CountsFlops, CountsProducts
from jaxscale.step.config import TrainConfig
from jaxscale.step.state import describe_model

_WITHOUT_WEIGHTS = ("scores", "attn_out")
"""Those of a model's `product_flops` whose operands are both activations."""


def model_flops(config: TrainConfig) -> int | None:
    """Return the matrix-multiplication FLOPs that a training step of a run needs, over all devices.

    That is three times a forward pass (PaLM, Chowdhery et al. 2022, appendix B; attention counts causal pairs only, see
    `Transformer.flops`). With adapters, products with frozen weights count twice and not three times, since these have
    no gradient, and the adapters' own products three times (Hu et al. 2021): about two thirds in all. If the model has
    no method `product_flops`, all its products are then assumed to be with weights.

    Args:
      config: the run's settings.

    Returns:
      The FLOPs, or `None` if the model config has no `flops(batch, seq)`.
    """
    model, rows, seq = config.model, config.batch_size, config.seq_len
    if not isinstance(model, CountsFlops):
        return None
    if config.adapters is None:
        return model.flops(rows, seq)
    forward = model.flops(rows, seq, training=False)
    products = model.product_flops(rows, seq) if isinstance(model, CountsProducts) else {}
    without_weights = sum(products.get(name, 0) for name in _WITHOUT_WEIGHTS)  # both operands have a gradient
    adaptation = config.adapters.adapt(*describe_model(model))
    trained = 2 * rows * seq * sum(i.size for i in jax.tree.leaves(adaptation.adapters))
    return 2 * forward + without_weights + adaptation.passes * trained


def peak_flops(device: jax.Device) -> float | None:
    """Return a device's bfloat16 FLOP/s by its datasheet, or `None` if it is unknown (a CPU).

    Args:
      device: the device.
    """
    chip = chip_of(device.device_kind)
    return None if chip is None else chip.flops["bfloat16"]


def examples(config: TrainConfig) -> tuple[str, int]:
    """Return the unit of throughput and its number in a step: tokens, or rows if a batch has no tokens.

    Args:
      config: the run's settings.
    """
    if "tokens" in config.objective.inputs(config):
        return "tokens", config.batch_size * config.seq_len
    return "rows", config.batch_size


def parameter_count(config: TrainConfig) -> int:
    """Return the number of the model's parameters, without adapters.

    Args:
      config: the run's settings.
    """
    return sum(i.size for i in jax.tree.leaves(describe_model(config.model)[1]))
