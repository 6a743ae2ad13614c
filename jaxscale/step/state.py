"""The state of training: one plain tree, born laid out."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from jaxscale.layout import Layout, abstract, shardings_of
from jaxscale.models import ModelConfig
from jaxscale.optim import check_state, place_state
from jaxscale.step.adaptation import Adaptation
from jaxscale.step.algorithm import Algorithm
from jaxscale.step.guards import Guard, memory_of, with_memory
from jaxscale.step.objective import Input
from jaxscale.step.start import Start

Tree = Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """Everything a step reads and writes.

    Args:
      step: optimizer steps taken, int32 scalar.
      params: the arrays that are trained, as the run's algorithm keeps them: a nested dict of the model's, or of its
        adapters'.
      opt_state: the optimizer's.
      rng: the run's random key; step k folds k into it.
      guards: what the run's guards remember, by name (see `jaxscale.step.guards`).
      frozen: parameters of the model that no step changes: those that adapters are on, or that an objective takes for
        reference; `{}` where there are none. They are donated and returned with the rest, and no checkpoint holds them
        (see `saved`).
      extra: what else the algorithm keeps, trees by name (see `jaxscale.step.algorithm`).
    """

    step: jax.Array
    params: Tree
    opt_state: Tree
    rng: jax.Array
    guards: Tree = dataclasses.field(default_factory=dict)
    frozen: Tree = dataclasses.field(default_factory=dict)
    extra: Tree = dataclasses.field(default_factory=dict)

    def replace(self, **changes: Any) -> TrainState:
        """The same with other fields."""
        return TrainState(**{f.name: getattr(self, f.name) for f in dataclasses.fields(TrainState)} | changes)

    @property
    def saved(self) -> TrainState:
        """What checkpoints and snapshots hold: all but the frozen parameters, which the run they are of has on disk."""
        return self.replace(frozen={})


@dataclasses.dataclass(frozen=True)
class Blueprint:
    """A model, an optimizer and a layout, before any array exists.

    Args:
      graphdef: the module's structure, for `nnx.merge(graphdef, params)`.
      infos: a `TensorInfo` per parameter that is trained.
      tx: the optimizer.
      layout: where things live; `None` is one device.
      make_params: builds the parameters (under `jit`).
      guards: those of the run.
      start: the run whose parameters are the first ones, or are adapted.
      adaptation: adapters, which are trained in place of the model's own parameters.
      inputs: the arrays of a batch (see `Objective.inputs`); by default every dimension but the rows is a sequence's.
      algorithm: what owns the state.
      reference: whether the first parameters are kept for the objective (see `Objective.reference`).
    """

    graphdef: nnx.GraphDef[Any]
    infos: Tree
    tx: optax.GradientTransformation
    layout: Layout | None
    make_params: Any
    guards: tuple[Guard, ...] = ()
    start: Start | None = None
    adaptation: Adaptation | None = None
    inputs: Mapping[str, Input] | None = None
    algorithm: Algorithm = Algorithm()
    reference: bool = False

    def axes_of(self, name: str, dimensions: int) -> tuple[str | None, ...]:
        """Logical axes of an array of a batch, without the rows."""
        if self.inputs is None or name not in self.inputs:
            return ("seq",) * dimensions
        return self.inputs[name].axes

    @property
    def frozen(self) -> Tree:
        """A `TensorInfo` per parameter of the model that no step changes: under adapters, or for reference."""
        if self.adaptation is not None:
            return self.adaptation.base
        named = lambda i: dataclasses.replace(i, path=f"reference/{i.path}")  # noqa: E731
        return jax.tree.map(named, self.infos) if self.reference else {}

    def reference_of(self, frozen: Tree = None) -> Any:
        """The module with the frozen parameters, for the objective; `None` where it takes none."""
        return nnx.merge(self.graphdef, frozen) if self.reference else None

    def of_model(self) -> Blueprint:
        """The same with the model's own parameters in place of adapters."""
        if self.adaptation is None:
            return self
        return dataclasses.replace(self, infos=self.adaptation.infos, adaptation=None)

    def weights(self, state: TrainState) -> Tree:
        """The model's parameters as evaluation sees them; kernels with adapters are `Adapted`."""
        return self.model_params(self.algorithm.weights(state), state.frozen)

    def model_params(self, params: Tree, frozen: Tree) -> Tree:
        """What `nnx.merge(graphdef, ...)` wants, of the trained parameters and the frozen ones."""
        return params if self.adaptation is None else self.adaptation.over(params, frozen)

    def read_frozen(self) -> Tree:
        """The frozen parameters, from the run they are of, each device its shards.

        Raises:
          CheckpointError, RunError: that run cannot be read, or has another model.
        """
        if self.adaptation is None and not self.reference:
            return {}
        assert self.start is not None  # see `TrainConfig`
        if self.adaptation is None:
            return self.start.params(self.infos, self.layout)
        return self.adaptation.freeze(functools.partial(self.start.params, layout=self.layout), self.layout)

    def shardings(self) -> TrainState | None:
        """A sharding per array of the state, or `None` without a layout.

        Raises:
          LayoutError: naming the tensor that cannot be laid out.
        """
        if self.layout is None:
            return None
        check_state(self.tx, self.infos, self.layout)
        whole, infos = self.layout.replicated, self.algorithm.infos(self)
        return TrainState(
            step=whole,  # type: ignore[arg-type]  # a tree of shardings in the state's own structure
            params=shardings_of(infos["params"], self.layout),
            opt_state=place_state(infos["opt_state"], self.layout),
            rng=whole,  # type: ignore[arg-type]
            guards=jax.tree.map(lambda _: whole, jax.eval_shape(lambda: memory_of(self.guards))),
            frozen=shardings_of(self.frozen, self.layout),
            extra=shardings_of(infos["extra"], self.layout, "opt_state"),
        )

    def abstract_state(self) -> TrainState:
        """Shapes and dtypes of the state."""
        frozen = jax.tree.map(lambda i: jax.ShapeDtypeStruct(i.shape, i.dtype), self.frozen)
        return jax.eval_shape(lambda: self.make(0)).replace(frozen=frozen)

    def init(self, seed: int) -> TrainState:
        """The first state. Its values depend on the seed and on the run it starts from, not on the layout."""
        shardings = self.shardings()
        where = None if shardings is None else shardings.saved
        read = None if self.start is None else functools.partial(self.start.params, layout=self.layout)
        if read is not None:
            params = read(self.infos) if self.adaptation is None else self.adaptation.first(read)
        if read is None or params is None:
            state = jax.jit(self.make, static_argnums=0, out_shardings=where)(seed)
            return state.replace(frozen=self.read_frozen())
        copied = self.reference and self.adaptation is None
        frozen = jax.tree.map(jnp.copy, params) if copied else self.read_frozen()
        state = jax.jit(self._first, static_argnums=1, donate_argnums=0, out_shardings=where)(params, seed)
        return state.replace(frozen=frozen)

    def completed(self, state: TrainState) -> TrainState:
        """A restored state with what is not restored: the frozen parameters, and the memory of new guards.

        Raises:
          CheckpointError, RunError: see `read_frozen`.
        """
        guards = with_memory(self.guards, state.guards, state.step.sharding)
        return state.replace(guards=guards, frozen=self.read_frozen())

    def make(self, seed: Any) -> TrainState:
        """The first state but for the frozen parameters, as traced; `seed` may be traced too."""
        return self._first(self.make_params(seed), seed)

    def _first(self, params: Tree, seed: Any) -> TrainState:
        key, kept = jax.random.key(seed), memory_of(self.guards)
        return TrainState(jnp.zeros([], jnp.int32), rng=key, guards=kept, **self.algorithm.init(self, params))


def make_params(model: ModelConfig, seed: int) -> Tree:
    """The model's initial parameters, a nested dict of arrays."""
    return nnx.to_pure_dict(nnx.split(model.make(nnx.Rngs(params=jax.random.key(seed))))[1])


def describe_model(model: ModelConfig) -> tuple[nnx.GraphDef[Any], Tree]:
    """The model's structure and a `TensorInfo` per parameter; makes no array.

    Where none of the parameters has axis names, each of their dimensions is `None` (see `jaxscale.layout.infer_names`).
    Of the last few models it is remembered: planning asks for one on a thousand layouts.
    """
    try:
        graphdef, infos = _remembered(model)  # type: ignore[arg-type]  # where a field of it is a list
    except TypeError:
        return _describe(model)
    return graphdef, jax.tree.map(lambda i: i, infos)  # a tree of the caller's own


def _describe(model: ModelConfig) -> tuple[nnx.GraphDef[Any], Tree]:
    return abstract(lambda: model.make(nnx.Rngs(params=0)), unnamed=True)


_remembered = functools.lru_cache(16)(_describe)
