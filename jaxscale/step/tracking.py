"""Delayed scaling: the largest magnitudes of products' operands in earlier steps, a part of the training state."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxscale.errors import ConfigError
from jaxscale.layout import TensorInfo
from jaxscale.nn import Block, Linear
from jaxscale.nn.products import layers_of
from jaxscale.parallel.tracked import OPERANDS, Tracked

if TYPE_CHECKING:
    from jaxscale.step.state import Blueprint

Tree = Any
EXTRA = "largest"
"""The name of the histories in `TrainState.extra`: by path of a layer, float32 (layers, 3, steps)."""


def histories(blueprint: Blueprint) -> dict[str, TensorInfo]:
    """Return the history of each layer with delayed scaling, by its path; `{}` if there are none.

    Args:
      blueprint: the run's blueprint.
    """
    out = {}
    model = nnx.merge(blueprint.graphdef, blueprint.of_model().infos)
    for path, layer, _ in layers_of(model):
        steps = layer.arithmetic.history
        if steps and isinstance(layer, Linear):
            info: Any = layer.kernel.get_value()
            stack = 1 if info.axes[0] == "layers" else 0
            shape, axes = (*info.shape[:stack], len(OPERANDS), steps), (*info.axes[:stack], None, None)
            out[path] = TensorInfo(f"{path}/{EXTRA}", shape, jnp.dtype("float32"), axes)
    return out


def check_histories(blueprint: Blueprint, *, keeps: bool, name: str) -> None:
    """Check that a run can keep the histories of delayed scaling.

    Args:
      blueprint: the run's blueprint.
      keeps: whether its algorithm keeps them.
      name: the algorithm.

    Raises:
      ConfigError: it cannot.
    """
    if not histories(blueprint):
        return
    instead = "use scaling = 'tensor', which scales by the operand itself"
    if not keeps:
        raise ConfigError(f"scaling = 'delayed' keeps magnitudes of earlier steps, which {name} does not; {instead}")
    if blueprint.adaptation is not None:
        raise ConfigError(f"scaling = 'delayed' is for kernels that are trained, not for adapters; {instead}")
    model = nnx.merge(blueprint.graphdef, blueprint.of_model().infos)
    if any(isinstance(m, Block) and "mlp_hidden" in m.memory.tile for _, m in nnx.iter_graph(model)):
        raise ConfigError(
            "scaling = 'delayed' is for layers that are called once a step, not for feed-forward layers in tiles of "
            f"the sequence (MemoryPolicy.tile); choose a memory policy without tiles, or {instead}"
        )
    if blueprint.layout is not None and blueprint.layout.stages > 1:
        raise ConfigError(f"scaling = 'delayed' is not for pipeline stages, whose weight gradients are late; {instead}")


@dataclasses.dataclass(frozen=True)
class Tracking:
    """The layers with delayed scaling of a run.

    Args:
      paths: of the layers.
    """

    paths: tuple[str, ...]

    def infos(self, blueprint: Blueprint) -> Tree:
        """Return the infos of the parameters, with the kernels of the layers `Tracked`.

        Args:
          blueprint: the run's blueprint.
        """
        return self.over(blueprint.infos, histories(blueprint))

    def over(self, params: Tree, histories: Tree) -> Tree:
        """Return parameters with the kernels of the layers `Tracked`.

        Args:
          params: arrays or infos.
          histories: an array or info for each layer.
        """

        def tracked(kernel: Any, history: Any) -> Tracked:
            if isinstance(history, TensorInfo):
                largest: Any = dataclasses.replace(history, shape=history.shape[:-1], axes=history.axes[:-1])
            else:
                largest = jnp.zeros(history.shape[:-1], jnp.float32)
            return Tracked(kernel, history, largest)

        out = jax.tree.map(lambda x: x, params)  # copies of the dicts
        for path in self.paths:
            layer = _at(out, path)
            layer["kernel"] = tracked(layer["kernel"], histories[path])
        return out

    def split(self, grads: Tree) -> tuple[Tree, dict[str, jax.Array]]:
        """Return gradients of arrays, and the largest magnitudes of each layer's operands.

        Args:
          grads: gradients of `over`.
        """
        out, largest = jax.tree.map(lambda x: x, grads), {}
        for path in self.paths:
            layer = _at(out, path)
            largest[path] = layer["kernel"].largest
            layer["kernel"] = layer["kernel"].kernel
        return out, largest


def renewed(histories: Tree, largest: dict[str, jax.Array]) -> Tree:
    """Return histories with the magnitudes of this step in place of the oldest ones.

    Args:
      histories: by layer.
      largest: by layer; numbers that are not finite count as none.
    """

    def one(history: jax.Array, now: jax.Array) -> jax.Array:
        now = jnp.where(jnp.isfinite(now), now, 0.0).astype(jnp.float32)
        return jnp.concatenate([history[..., 1:], now[..., None]], axis=-1)

    return {path: one(history, largest[path]) for path, history in histories.items()}


def summed(carry: Tree, grads: Tree) -> Tree:
    """Add the gradients of a micro-batch; of the largest magnitudes keep the larger.

    Args:
      carry: the sums, float32.
      grads: the gradients of a micro-batch.
    """

    def one(a: Any, b: Any) -> Any:
        if isinstance(a, Tracked):
            return Tracked(a.kernel + b.kernel.astype(jnp.float32), a.history, jnp.maximum(a.largest, b.largest))
        return a + b.astype(jnp.float32)

    return jax.tree.map(one, carry, grads, is_leaf=lambda x: isinstance(x, Tracked))


def _at(params: Tree, path: str) -> Tree:
    for part in path.split("/"):
        params = params[part if part in params else int(part)]
    return params
