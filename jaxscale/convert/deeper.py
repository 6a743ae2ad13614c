"""Deeper models: which layer of the trained model each layer of the new one is a copy of."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from jaxscale.errors import ConfigError, near
from jaxscale.layout import STACKED, TensorInfo
from jaxscale.models import TransformerConfig
from jaxscale.nn.norms import UnitOffsetRMSNorm
from jaxscale.optim.mup import STREAM

METHODS = {
    "stack": "whole copies of the model's layers on top of each other: 1 2 3 1 2 3 (G_stack)",
    "interpolate": "each layer repeated in place: 1 1 2 2 3 3",
    "identity": "copies on top that add nothing yet, because their output projections are zero",
}
"""The ways to make a model deeper."""

MOST = 1000
"""The most layers of a deeper model for each layer of the trained one."""

_LAYER = re.compile(r"(|.*/)runs/(\d+)/blocks/(\d+)/(.*)")


@dataclasses.dataclass(frozen=True)
class Deeper:
    """A deeper model, and where its layers are from.

    Args:
      before: the trained model.
      model: the deeper one.
      sources: for each of its layers, the layer of the trained model.
      new: for each of its layers, whether it starts as the identity.
    """

    before: TransformerConfig
    model: TransformerConfig
    sources: tuple[int, ...]
    new: tuple[bool, ...]

    def arrays(
        self, arrays: Mapping[str, jax.Array], before: Mapping[str, TensorInfo], after: Mapping[str, TensorInfo]
    ) -> dict[str, jax.Array]:
        """Return the arrays of the deeper model: parameters, or optimizer state, which is stacked like them.

        Args:
          arrays: by name, of the trained model.
          before: a `TensorInfo` per array.
          after: a `TensorInfo` per array of the deeper model.

        Raises:
          ConfigError: an array is not divided by layers, so that it cannot be stacked.
        """
        return {name: self._one(name, arrays, before, info) for name, info in after.items()}

    def params(
        self, arrays: Mapping[str, jax.Array], before: Mapping[str, TensorInfo], after: Mapping[str, TensorInfo]
    ) -> dict[str, jax.Array]:
        """Return the parameters of the deeper model; arguments as of `arrays`."""
        return self.silenced(self.arrays(arrays, before, after), after)

    def silenced(
        self,
        arrays: Mapping[str, jax.Array],
        after: Mapping[str, TensorInfo],
        first: Mapping[str, jax.Array] | None = None,
    ) -> dict[str, jax.Array]:
        """Return arrays in which the layers that start as the identity add nothing to the residual stream.

        Args:
          arrays: by name, of the deeper model.
          after: a `TensorInfo` per array.
          first: what new layers have instead: for optimizer state its initial values; by default parameters of new
            layers are copies whose output projections are zero.
        """
        if not any(self.new):
            return dict(arrays)
        outputs = {name for name, info in after.items() if first is None and self._is_output(name, info, after)}
        return {
            name: self._replaced(name, x, after[name], self._nothing(name, x) if first is None else first[name])
            if name in outputs or first is not None
            else x
            for name, x in arrays.items()
        }

    def _one(
        self, name: str, arrays: Mapping[str, jax.Array], before: Mapping[str, TensorInfo], info: TensorInfo
    ) -> jax.Array:
        place = _LAYER.fullmatch(name)
        if place is None or "layers" not in info.axes:
            if name not in before or before[name].shape != info.shape:
                raise ConfigError(
                    f"the optimizer's state has an array without an axis for layers, {name}, so that it cannot be "
                    "stacked; grow the weights only (--weights-only)"
                )
            return arrays[name]
        axis = info.axes.index("layers")
        run, block = int(place[2]), int(place[3])
        layers = [n for n, (r, _, b) in enumerate(_places(self.model)) if (r, b) == (run, block)]
        places = [_places(self.before)[self.sources[n]] for n in layers]
        parts = list(dict.fromkeys((r, b) for r, _, b in places))
        names = [f"{place[1]}runs/{r}/blocks/{b}/{place[4]}" for r, b in parts]
        starts = dict(zip(parts, np.cumsum([0, *(arrays[n].shape[axis] for n in names)]), strict=False))
        whole = arrays[names[0]] if len(names) == 1 else jnp.concatenate([arrays[n] for n in names], axis)
        return jnp.take(whole, np.array([starts[r, b] + i for r, i, b in places]), axis)

    def _is_output(self, name: str, info: TensorInfo, after: Mapping[str, TensorInfo]) -> bool:
        """Whether zeros (see `_nothing`) in this parameter make a layer add nothing to the residual stream."""
        if _LAYER.fullmatch(name) is None:
            return False
        if self.model.post_norm:
            return "_post_norm/" in name
        own = [a for a in info.axes if a not in (*STACKED, "replicas")]
        if name.endswith("/bias"):
            kernel = after.get(f"{name.removesuffix('bias')}kernel")
            return kernel is not None and kernel.axes[-1] in STREAM
        return len(own) > 1 and own[-1] in STREAM

    def _nothing(self, name: str, x: jax.Array) -> jax.Array:
        norm = self.model.norm
        offset = isinstance(norm, type) and issubclass(norm, UnitOffsetRMSNorm) and name.endswith("/scale")
        return jnp.full_like(x, -1) if offset else jnp.zeros_like(x)

    def _replaced(self, name: str, x: jax.Array, info: TensorInfo, other: jax.Array) -> jax.Array:
        place = _LAYER.fullmatch(name)
        if place is None or "layers" not in info.axes:
            return x
        run, block = int(place[2]), int(place[3])
        layers = [n for n, (r, _, b) in enumerate(_places(self.model)) if (r, b) == (run, block)]
        shape = [1] * x.ndim
        shape[info.axes.index("layers")] = len(layers)
        return jnp.where(np.array([self.new[n] for n in layers]).reshape(shape), other, x)


def deepened(model: object, layers: int, method: str = "stack") -> Deeper:
    """Return a deeper model and where its layers are from.

    Layers that `Transformer.dense_layers` sets apart stay as they are, and the others grow. A pattern of different
    layers is repeated in whole periods.

    Args:
      model: the trained model's config.
      layers: number of layers of the new model.
      method: a key of `METHODS`.

    Raises:
      ConfigError: the model is no `Transformer`, or cannot have this number of layers.
    """
    if not isinstance(model, TransformerConfig):
        raise ConfigError(f"{type(model).__name__} cannot be made deeper; only a Transformer can")
    if method not in METHODS:
        raise ConfigError(f"method = {method!r}: there is no such way to grow{near(str(method), METHODS)}")
    if not isinstance(layers, int) or isinstance(layers, bool):
        raise ConfigError(f"layers = {layers!r}: must be a whole number")
    depth = model.depth
    if layers > MOST * depth:
        raise ConfigError(f"layers = {layers}: the model has {depth}; choose at most {MOST} times as many")
    deeper = _with(model, layers, method) if layers > depth else None
    if deeper is None:
        fits = [n for n in range(depth + 1, 8 * depth + 1) if _with(model, n, method) is not None]
        fits = sorted(sorted(fits, key=lambda n: abs(n - layers))[:3])
        dense = f" after {model.dense_layers} that stay" if model.dense_layers else ""
        why = "which is not more" if layers <= depth else "of which it is no whole repetition"
        choice = "no number fits its pattern of layers, use 'identity'"
        if fits:
            choice = f"choose {', '.join(map(str, fits[:-1]))} or {fits[-1]}"
        raise ConfigError(
            f"layers = {layers}: the model has {depth} layers{dense}, {why}; for method = '{method}' {choice}"
        )
    return deeper


def _with(model: TransformerConfig, layers: int, method: str) -> Deeper | None:
    """A model with this number of layers, or `None` if a layer would be a copy of one of another kind."""
    depth = model.depth
    dense = model.dense_layers if not model.blocks and model.dense_layers < depth else 0
    rest, more = depth - dense, layers - dense
    if method != "identity" and more % rest:
        return None
    period = max(len(group) for group, _ in model.runs)
    sources = [i if i < dense else dense + (i - dense) % rest for i in range(layers)]
    if method == "interpolate" and rest % period == 0:
        sources[dense:] = [dense + i // period // (more // rest) * period + i % period for i in range(more)]
    deeper = dataclasses.replace(model, depth=layers, width=model.sizes.width)  # the width must not follow the depth
    old, kinds = model.layer_specs(), deeper.layer_specs()
    if method == "identity":  # the last layer of the same kind, if the pattern is not whole
        alike = [[s for s in range(depth) if old[s] == kind] for kind in kinds]
        sources = [s if kinds[n] == old[s] or not alike[n] else alike[n][-1] for n, s in enumerate(sources)]
    if any(kinds[n] != old[source] for n, source in enumerate(sources)):
        return None
    new = tuple(method == "identity" and n >= depth for n in range(layers))
    return Deeper(model, deeper, tuple(sources), new)


def _places(model: TransformerConfig) -> list[tuple[int, int, int]]:
    """The place of every layer: its run, its repeat in the run, and its block in the repeated group."""
    return [
        (run, repeat, block)
        for run, (group, repeats) in enumerate(model.runs)
        for repeat in range(repeats)
        for block in range(len(group))
    ]
