"""ZO2: MeZO with the layers in host memory; a device holds the layer that runs, and its perturbed copy."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxscale.config import register
from jaxscale.errors import ConfigError
from jaxscale.layout import TensorInfo, fetched, layers_in_host_memory, on_device, stored_like
from jaxscale.nn import Run
from jaxscale.nn.late import Late
from jaxscale.optim import decay_mask
from jaxscale.step.algorithm import Metrics, Tree
from jaxscale.step.algorithms.mezo import MeZO, spreads
from jaxscale.step.algorithms.perturbations import Value, along, is_stack, stays, tensor_key
from jaxscale.step.objective import Batch
from jaxscale.step.state import Blueprint, TrainState

if TYPE_CHECKING:
    from jaxscale.step.config import TrainConfig


@register
@dataclasses.dataclass(frozen=True)
class ZO2(MeZO):
    """`MeZO` for models larger than the device's memory (Wang et al. 2025, arXiv:2503.12668).

    The parameters of all layers are in host memory. A forward pass copies one layer after the other to the device and
    perturbs the copy; the update copies each layer to the device and back. So with one perturbation a step reads every
    layer three times and writes it once. The embedding, the last norm and the output head stay on the device, with a
    perturbed copy during an evaluation. Stored parameters are never perturbed: a refused step leaves them as they are,
    and nothing is rounded between steps. Otherwise a step is that of `MeZO` for equal seeds. Evaluation, sampling and
    export need the whole model on the device (`jaxscale.infer` can stream it). On hardware without host memory
    everything stays on the device, with a warning.
    """

    def infos(self, blueprint: Blueprint) -> dict[str, Tree]:
        """Return the infos of the parameters; those of layers are in host memory."""

        def placed(i: TensorInfo) -> TensorInfo:
            return dataclasses.replace(i, host=is_stack(i) and layers_in_host_memory(i.shape, i.dtype))

        return {"params": jax.tree.map(placed, blueprint.infos), "opt_state": {}, "extra": {}}

    def _evaluate(
        self, blueprint: Blueprint, value: Value, state: TrainState, batch: Batch, key: jax.Array, keys: jax.Array
    ) -> tuple[Tree, jax.Array, Metrics]:
        def at(own: jax.Array, by: jax.Array) -> Tree:
            def one(info: TensorInfo, x: jax.Array) -> jax.Array | Late:
                own_key = tensor_key(own, info.path)
                if not is_stack(info):
                    return x if stays(info) else along(x, own_key, by, info.axes)
                of_layers = jax.vmap(lambda i: jax.random.fold_in(own_key, i))(jnp.arange(x.shape[0]))
                steps = jnp.broadcast_to(jnp.float32(0) if stays(info) else by, x.shape[:1])
                return _Perturbed(x, jax.random.key_data(of_layers), steps, info.axes[1:])

            return jax.tree.map(one, blueprint.infos, state.params)

        def side(_: None, own: tuple[jax.Array, jax.Array]) -> tuple[None, tuple[jax.Array, Metrics]]:
            return None, value(at(*own), batch, key, state.frozen)

        sides = jnp.tile(jnp.asarray([self.eps, -self.eps], jnp.float32), self.perturbations)
        _, (values, metrics) = jax.lax.scan(side, None, (jnp.repeat(keys, 2), sides))
        return state.params, values.reshape(-1, 2), metrics

    def _update(
        self, blueprint: Blueprint, params: Tree, keys: jax.Array, by: jax.Array, shrink: jax.Array | None
    ) -> Tree:
        def moved(x: jax.Array, of: tuple[jax.Array, ...], axes: tuple[str | None, ...], decays: bool) -> jax.Array:
            def one(x: jax.Array, own: tuple[jax.Array, ...]) -> tuple[jax.Array, None]:
                return along(x, own[0], own[1], axes, own[2] if len(own) > 2 and decays else None), None

            return jax.lax.scan(one, x, of)[0]

        def tensor(info: TensorInfo, x: jax.Array, decays: bool) -> jax.Array:
            if stays(info):
                return x
            own = jax.vmap(lambda k: tensor_key(k, info.path))(keys)
            rest = (by, *(() if shrink is None else (shrink,)))
            if not is_stack(info):
                return moved(x, (own, *rest), info.axes, decays)

            def layer(_: None, row: tuple[jax.Array, jax.Array]) -> tuple[None, jax.Array]:
                x, i = row
                of_layer = jax.vmap(lambda k: jax.random.fold_in(k, i))(own)
                new = moved(fetched(x), (of_layer, *rest), info.axes[1:], decays)
                return None, stored_like(new, x)

            return jax.lax.scan(layer, None, (x, jnp.arange(x.shape[0])))[1]

        return jax.tree.map(tensor, blueprint.infos, params, decay_mask(blueprint.infos))

    def weights(self, state: TrainState) -> Tree:
        """Return the parameters on the device."""
        return on_device(state.params)

    def check(self, config: TrainConfig, blueprint: Blueprint) -> None:
        """Check that the model has layers that can be copied one by one, and that nothing else needs all of them."""
        super().check(config, blueprint)
        layout, model = config.layout, config.model
        if config.algorithm is not self:
            raise ConfigError(
                f"{type(config.algorithm).__name__} computes with all parameters, but those of ZO2 are in host memory; "
                "use MeZO() in it"
            )
        if layout is None:
            raise ConfigError("ZO2 needs a layout; set train.layout = Layout('data=1'), which is one device")
        if layout.stages > 1 or spreads(layout):
            raise ConfigError(f"ZO2 does not work with {layout}; use a mesh without pipeline and replica, or MeZO()")
        if config.adapters is not None:
            raise ConfigError(
                f"ZO2 copies trained layers, but {type(config.adapters).__name__} freezes them on the device; use "
                "MeZO()"
            )
        if getattr(model, "stack", None) is not Run or not any(map(is_stack, jax.tree.leaves(blueprint.infos))):
            raise ConfigError(
                f"ZO2 copies the layers of stacks (Transformer.stack = @Run), which {type(model).__name__} has none of "
                "here; use MeZO()"
            )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Perturbed(Late):
    """A stack of layers' parameter in host memory, and the perturbation of each layer.

    Args:
      stored: the stack.
      keys: data of each layer's key.
      by: the step along the perturbation, of each layer.
      axes: logical axes of a layer.
    """

    stored: Float[Array, "..."]
    keys: Array
    by: Array
    axes: tuple[str | None, ...] = dataclasses.field(metadata={"static": True})

    def array(self) -> Float[Array, "..."]:
        """Return the perturbed parameter of a layer, on the device."""
        return along(fetched(self.stored), jax.random.wrap_key_data(self.keys), self.by, self.axes)
