"""The training state, one plain tree, and the blueprint from which it is created sharded."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

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

if TYPE_CHECKING:
    from jaxscale.step.stage_order import StageOrder

Tree = Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """Everything that a step reads and writes.

    Args:
      step: steps so far, int32 scalar.
      params: trained parameters as the run's algorithm stores them: a nested dict, of the model or of its adapters.
      opt_state: the optimizer's state.
      rng: the run's random key; step k folds k into it.
      guards: memory of the run's guards, by name (see `jaxscale.step.guards`).
      frozen: parameters of the model that no step changes: those beside adapters, or an objective's reference; else
        `{}`. They are donated and returned with the rest, but are not in checkpoints (see `saved`).
      extra: further trees of the algorithm, by name (see `jaxscale.step.algorithm`).
    """

    step: jax.Array
    params: Tree
    opt_state: Tree
    rng: jax.Array
    guards: Tree = dataclasses.field(default_factory=dict)
    frozen: Tree = dataclasses.field(default_factory=dict)
    extra: Tree = dataclasses.field(default_factory=dict)

    def replace(self, **changes: Any) -> TrainState:
        """Return a copy with other values of some fields.

        Args:
          **changes: new values by name of field.
        """
        return TrainState(**{f.name: getattr(self, f.name) for f in dataclasses.fields(TrainState)} | changes)

    @property
    def saved(self) -> TrainState:
        """The part that checkpoints and snapshots hold: all but the frozen parameters, which are in another run."""
        return self.replace(frozen={})


@dataclasses.dataclass(frozen=True)
class Teacher:
    """A frozen model of another run, which an objective compares with.

    Args:
      graphdef: its structure.
      infos: a `TensorInfo` per parameter.
      start: where its parameters are from.
    """

    graphdef: nnx.GraphDef[Any]
    infos: Tree
    start: Start

    @classmethod
    def of(cls, start: Start) -> Teacher:
        """Return the model of a run.

        Args:
          start: the run.
        """
        return cls(*describe_model(start.run.config.model), start)


@dataclasses.dataclass(frozen=True)
class Blueprint:
    """A model, an optimizer and a layout, before any array exists.

    Args:
      graphdef: the module's structure, for `nnx.merge(graphdef, params)`.
      infos: a `TensorInfo` per trained parameter.
      tx: the optimizer.
      layout: mesh and rules; `None` is one device.
      make_params: seed -> initial trained parameters; called under `jit`.
      guards: the run's guards.
      start: where initial or frozen parameters are from, or `None`.
      adaptation: the split into trained and frozen parameters, or `None` if all are trained.
      inputs: the arrays of a batch (see `Objective.inputs`); `None` means that all dimensions after the rows are `seq`.
      algorithm: the training algorithm.
      reference: whether the objective needs a frozen model (see `Objective.reference`).
      teacher: that model, if it is not the initial one.
      order: the order of layers in the states that its steps take, if it is not the model's (see
        `jaxscale.step.stage_order`).
      make_tx: makes the optimizer for other numbers of stacked layers, from a `TensorInfo` per parameter; `None` if
        steps count or combine the numbers of different layers, so that padding would change them.
    """

    graphdef: nnx.GraphDef[Any]
    infos: Tree
    tx: optax.GradientTransformation
    layout: Layout | None
    make_params: Callable[..., Tree]
    guards: tuple[Guard, ...] = ()
    start: Start | None = None
    adaptation: Adaptation | None = None
    inputs: Mapping[str, Input] | None = None
    algorithm: Algorithm = Algorithm()
    reference: bool = False
    teacher: Teacher | None = None
    order: StageOrder | None = None
    make_tx: Callable[[Tree], optax.GradientTransformation] | None = None

    def axes_of(self, name: str, dimensions: int) -> tuple[str | None, ...]:
        """Return the logical axes of an array of a batch, without the rows.

        Args:
          name: name of the array.
          dimensions: its number of dimensions, without the rows.
        """
        if self.inputs is None or name not in self.inputs:
            return ("seq",) * dimensions
        return self.inputs[name].axes

    @property
    def frozen(self) -> Tree:
        """A `TensorInfo` per array of `TrainState.frozen`: parameters beside adapters, or for reference."""
        if self.teacher is not None:
            return {"own": self._frozen, "teacher": _under("teacher", self.teacher.infos)}
        return self._frozen

    @property
    def _frozen(self) -> Tree:
        if self.adaptation is not None:
            return self.adaptation.base
        return _under("reference", self.infos) if self.reference and self.teacher is None else {}

    def own(self, frozen: Tree) -> Tree:
        """Return the frozen parameters without the teacher's.

        Args:
          frozen: `TrainState.frozen`.
        """
        return frozen if self.teacher is None else frozen["own"]

    def reference_of(self, frozen: Tree = None) -> nnx.Module | None:
        """Return the reference model for the objective, or `None` if it needs none.

        Args:
          frozen: `TrainState.frozen`.
        """
        if self.teacher is not None:
            return nnx.merge(self.teacher.graphdef, frozen["teacher"])
        return nnx.merge(self.graphdef, frozen) if self.reference else None

    def of_model(self) -> Blueprint:
        """Return the blueprint with all of the model's parameters in place of an adaptation."""
        if self.adaptation is None:
            return self
        return dataclasses.replace(self, infos=self.adaptation.infos, adaptation=None)

    @property
    def start_infos(self) -> Tree:
        """A `TensorInfo` per parameter of the run that training starts from, which an adaptation may add others to."""
        model = self.of_model().infos
        return getattr(self.adaptation, "start_infos", model)

    def weights(self, state: TrainState) -> Tree:
        """Return the model's parameters for evaluation; kernels with adapters are `Adapted`.

        Args:
          state: the training state.
        """
        params, frozen = self.algorithm.weights(state), state.frozen
        if self.order is not None:
            params, frozen = self.order.weights_to_layers(params, frozen)
        return self.model_params(params, frozen)

    def model_params(self, params: Tree, frozen: Tree) -> Tree:
        """Return all parameters of the model, for `nnx.merge(graphdef, ...)`.

        Args:
          params: the trained parameters, one copy.
          frozen: `TrainState.frozen`.
        """
        return params if self.adaptation is None else self.adaptation.over(params, self.own(frozen))

    def read_frozen(self) -> Tree:
        """Read the frozen parameters from the run that they are from; each device reads its shards.

        Raises:
          CheckpointError: the checkpoint cannot be read, or is of another model.
          RunError: the run cannot be read.
        """
        if self.teacher is not None:
            return {"own": self._read_frozen(), "teacher": self.teacher.start.params(self.teacher.infos, self.layout)}
        return self._read_frozen()

    def _read_frozen(self) -> Tree:
        if self.adaptation is None and (not self.reference or self.teacher is not None):
            return {}
        assert self.start is not None  # see `TrainConfig`
        if self.adaptation is None:
            return self.start.params(self.infos, self.layout)
        return self.adaptation.freeze(functools.partial(self.start.params, layout=self.layout), self.layout)

    def shardings(self) -> TrainState | None:
        """Return a sharding per array of the state, or `None` without a layout.

        Raises:
          LayoutError: a tensor cannot be sharded; the message names it.
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
        """Return the shapes and dtypes of the state."""
        frozen = jax.tree.map(lambda i: jax.ShapeDtypeStruct(i.shape, i.dtype), self.frozen)
        return jax.eval_shape(lambda: self.make(0)).replace(frozen=frozen)

    def init(self, seed: int) -> TrainState:
        """Return the initial state, sharded. Its values depend on the seed and on `train.start`, not on the layout.

        Args:
          seed: the run's seed.

        Raises:
          LayoutError: a tensor cannot be sharded.
          CheckpointError: the checkpoint of `train.start` cannot be read, or is of another model.
          RunError: the run of `train.start` cannot be read.
        """
        shardings = self.shardings()
        saved_shardings = None if shardings is None else shardings.saved
        read = None if self.start is None else functools.partial(self.start.params, layout=self.layout)
        if read is not None:
            params = read(self.infos) if self.adaptation is None else self.adaptation.first(read)
        if read is None or params is None:
            state = jax.jit(self.make, static_argnums=0, out_shardings=saved_shardings)(seed)
            return state.replace(frozen=self.read_frozen())
        copied = self.reference and self.adaptation is None and self.teacher is None
        frozen = jax.tree.map(jnp.copy, params) if copied else self.read_frozen()
        state = jax.jit(self._first, static_argnums=1, donate_argnums=0, out_shardings=saved_shardings)(params, seed)
        return state.replace(frozen=frozen)

    def completed(self, state: TrainState) -> TrainState:
        """Add to a restored state what checkpoints do not have: frozen parameters, and the memory of new guards.

        Args:
          state: a state from a checkpoint or snapshot.

        Raises:
          CheckpointError: see `read_frozen`.
          RunError: see `read_frozen`.
        """
        guards = with_memory(self.guards, state.guards, state.step.sharding)
        return state.replace(guards=guards, frozen=self.read_frozen())

    def make(self, seed: int | jax.Array) -> TrainState:
        """Return a randomly initialised state without the frozen parameters; called under `jit`.

        Args:
          seed: the run's seed, an int or a traced int32 scalar.
        """
        return self._first(self.make_params(seed), seed)

    def _first(self, params: Tree, seed: int | jax.Array) -> TrainState:
        key, memory = jax.random.key(seed), memory_of(self.guards)
        return TrainState(jnp.zeros([], jnp.int32), rng=key, guards=memory, **self.algorithm.init(self, params))


def _under(name: str, infos: Tree) -> Tree:
    return jax.tree.map(lambda i: dataclasses.replace(i, path=f"{name}/{i.path}"), infos)


def make_params(model: ModelConfig, seed: int) -> Tree:
    """Return a model's initial parameters, a nested dict of arrays.

    Args:
      model: the model's config.
      seed: seed of the random initial values.
    """
    return nnx.to_pure_dict(nnx.split(model.make(nnx.Rngs(params=jax.random.key(seed))))[1])


def describe_model(model: ModelConfig) -> tuple[nnx.GraphDef[Any], Tree]:
    """Return a model's structure and a `TensorInfo` per parameter, without creating arrays.

    If no parameter has logical axes, all its axes are `None` (see `jaxscale.layout.infer_names`). Results for the last
    few models are cached, since planning needs them for each of a thousand layouts.

    Args:
      model: the model's config.
    """
    try:
        graphdef, infos = _cached(model)  # type: ignore[arg-type]
    except TypeError:  # a field of the config, such as a list, is not hashable
        return _describe(model)
    return graphdef, jax.tree.map(lambda i: i, infos)  # a copy, which the caller may change


def _describe(model: ModelConfig) -> tuple[nnx.GraphDef[Any], Tree]:
    return abstract(lambda: model.make(nnx.Rngs(params=0)), unnamed=True)


_cached = functools.lru_cache(16)(_describe)
