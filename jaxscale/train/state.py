"""The state of training: one plain tree, born laid out."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from jaxscale.layout import Layout, abstract, shardings_of
from jaxscale.models import ModelConfig
from jaxscale.optim import state_shardings
from jaxscale.train.guards import Guard, memory_of, with_memory

Tree = Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """Everything a step reads and writes.

    Args:
      step: optimizer steps taken, int32 scalar.
      params: nested dict of arrays.
      opt_state: the optimizer's.
      rng: the run's random key; step k folds k into it.
      guards: what the run's guards remember, by name (see `jaxscale.train.guards`).
    """

    step: jax.Array
    params: Tree
    opt_state: Tree
    rng: jax.Array
    guards: Tree = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Blueprint:
    """A model, an optimizer and a layout, before any array exists.

    Args:
      graphdef: the module's structure, for `nnx.merge(graphdef, params)`.
      infos: a `TensorInfo` per parameter.
      tx: the optimizer.
      layout: where things live; `None` is one device.
      make_params: builds the parameters (under `jit`).
      guards: those of the run.
    """

    graphdef: nnx.GraphDef
    infos: Tree
    tx: optax.GradientTransformation
    layout: Layout | None
    make_params: Any
    guards: tuple[Guard, ...] = ()

    def shardings(self) -> TrainState | None:
        """A sharding per array of the state, or `None` without a layout.

        Raises:
          LayoutError: naming the tensor that cannot be laid out.
        """
        if self.layout is None:
            return None
        whole = self.layout.replicated
        return TrainState(
            whole,  # type: ignore[arg-type]  # a tree of shardings in the state's own structure
            shardings_of(self.infos, self.layout),
            state_shardings(self.tx, self.infos, self.layout),
            whole,  # type: ignore[arg-type]
            jax.tree.map(lambda _: whole, jax.eval_shape(lambda: memory_of(self.guards))),
        )

    def abstract_state(self) -> TrainState:
        """Shapes and dtypes of the state."""
        return jax.eval_shape(lambda: self.make(0))

    def init(self, seed: int) -> TrainState:
        """The first state. Its values depend on the seed alone, not on the layout."""
        return jax.jit(self.make, static_argnums=0, out_shardings=self.shardings())(seed)

    def with_guards(self, state: TrainState) -> TrainState:
        """A restored state of which each guard remembers what was saved of it, or begins anew."""
        return dataclasses.replace(state, guards=with_memory(self.guards, state.guards, state.step.sharding))

    def make(self, seed: Any) -> TrainState:
        """The first state, as traced; `seed` may be traced too."""
        params = self.make_params(seed)
        key, kept = jax.random.key(seed), memory_of(self.guards)
        return TrainState(jnp.zeros([], jnp.int32), params, self.tx.init(params), key, kept)


def make_params(model: ModelConfig, seed: int) -> Tree:
    """The model's initial parameters, a nested dict of arrays."""
    return nnx.to_pure_dict(nnx.split(model.make(nnx.Rngs(params=jax.random.key(seed))))[1])


def describe_model(model: ModelConfig) -> tuple[nnx.GraphDef, Tree]:
    """The model's structure and a `TensorInfo` per parameter; makes no array.

    Of the last few models it is remembered: planning asks for one on a thousand layouts.
    """
    try:
        graphdef, infos = _remembered(model)  # type: ignore[arg-type]  # where a field of it is a list
    except TypeError:
        return _describe(model)
    return graphdef, jax.tree.map(lambda i: i, infos)  # a tree of the caller's own


def _describe(model: ModelConfig) -> tuple[nnx.GraphDef, Tree]:
    return abstract(lambda: model.make(nnx.Rngs(params=0)))


_remembered = functools.lru_cache(16)(_describe)
