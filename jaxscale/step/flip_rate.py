"""`FlipRate`: how many rounded weights change from one step to the next."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxscale.config import register
from jaxscale.errors import ConfigError
from jaxscale.layout.tensors import Tree
from jaxscale.nn.formats import FORMATS, Stored, StoredWeight
from jaxscale.nn.formats.presets import named
from jaxscale.step.callbacks import Callback, Running
from jaxscale.step.state import describe_model
from jaxscale.step.user_metrics import log


@register
@dataclasses.dataclass(frozen=True)
class FlipRate(Callback):
    """Logs `flip_rate`, the share of weights whose code is not that of the last call, for `train.callbacks`.

    Weights that jump back and forth between two numbers (oscillate, Nagel et al. 2022) raise it late in training with
    rounded weights (`Rounded`), when the learning rate is small. The codes of one step stay on the devices.

    Args:
      weights: the format to which weights are rounded, or its name, as "int4".
      every: steps from one call to the next.

    Raises:
      ConfigError: there is no such format, or a number of steps below 1.
    """

    weights: str | Stored = "int4"
    every: int = 1
    _last: dict[str, Any] = dataclasses.field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "weights", named(self.weights, "FlipRate.weights"))
        if self.every < 1:
            raise ConfigError(f"FlipRate.every = {self.every}: must be at least 1")

    def on_step(self, step: int, row: Mapping[str, Any], run: Running) -> None:
        """See `Callback`."""
        if step % self.every:
            return
        last = self._last
        if last.get("run") != (run.path, step - self.every):  # another run, or steps were left out
            last.clear()
        if "encode" not in last:
            weights = FORMATS[self.weights][0] if isinstance(self.weights, str) else self.weights
            infos = describe_model(run.config.model)[1]
            last["encode"] = jax.jit(lambda params: codes_of(weights, params, infos))
        before, last["codes"] = last.get("codes"), last["encode"](run.params)
        last["run"] = run.path, step
        if before is not None:
            log({"flip_rate": float(flip_rate(before, last["codes"]))})


def codes_of(weights: Stored, params: Tree, infos: Tree) -> list[Array]:
    """Return the codes, not packed, of the matrices that a format covers.

    Args:
      weights: the format.
      params: a model's parameters.
      infos: a `TensorInfo` per parameter.
    """

    def one(info: Any, kernel: Array) -> Array | None:
        if info.contracted is None or not weights.covers(info):
            return None
        weight = weights.encode(kernel, info.contracted)
        assert isinstance(weight, StoredWeight)
        return weight.unpacked()

    return jax.tree.leaves(jax.tree.map(one, infos, params))


@jax.jit
def flip_rate(before: list[Array], after: list[Array]) -> Float[Array, ""]:
    """Return the share of codes that differ.

    Args:
      before: from `codes_of`.
      after: those of a later step.
    """
    changed = [jnp.sum(a != b, dtype=jnp.float32) for a, b in zip(before, after, strict=True)]
    return sum(changed, jnp.zeros([])) / sum(a.size for a in before)
