"""Steps of a model whose layers are streamed: layers are loaded one by one, the caches of all stay on the device."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from jaxscale.errors import ConfigError, LayoutError
from jaxscale.infer.cache import ModelCache
from jaxscale.infer.engine import Cached, FirstCome
from jaxscale.infer.engine.device import ChosenTokens, Pick, Scored, Scores, Step, Steps, next_tokens, score_tokens
from jaxscale.infer.engine.packing import StepInputs, sampling_inputs
from jaxscale.infer.forward import hidden_at, replicated
from jaxscale.infer.streaming.experts import ExpertLayers, Guess, guesses_of
from jaxscale.infer.streaming.layers import Layers, Resident
from jaxscale.layout import Layout, TensorInfo, path_name
from jaxscale.layout.tensors import Tree
from jaxscale.nn import Cache, Packed, Part, RunCache
from jaxscale.nn.stats import BY_LAYER


class Streamed(Cached):
    """A `Stepper` with a cache for models larger than the device's memory: same requests, same tokens.

    A step takes as long as loading all layers, however many tokens it has, so that many slots cost little more than
    one.

    Args:
      graphdef: the model's graph definition.
      layers: its parameters.
      layout: where both are; `None` is one device.
      **options: see `Cached`.

    Raises:
      ConfigError: see `Cached`; or the model has no runs of blocks.
      LayoutError: see `Cached`; or the layout has pipeline stages.
    """

    def __init__(self, graphdef: nnx.GraphDef[Any], layers: Layers, *, layout: Layout | None = None, **options: Any):
        if layout is not None and layout.stages > 1:
            raise LayoutError("layers on pipeline stages cannot be streamed; use a mesh without 'pipeline'")
        if "runs" not in layers.infos:
            raise ConfigError("this model has no runs of blocks, so that its layers cannot be streamed")
        self.layers = layers
        scheduler = options.pop("scheduler", FirstCome(ahead=1))
        super().__init__(graphdef, layers.infos, layout=layout, scheduler=scheduler, **options)
        self._one, self._ahead, self._pick, self._score = streamed_steps(graphdef, layers, self.cache)

    @property
    def resident(self) -> Resident:
        """Bytes of parameters on the devices."""
        return self.layers.resident


def streamed_steps(graphdef: nnx.GraphDef[Any], layers: Layers, cache: Cache) -> tuple[Step, Steps, Pick, Scores]:
    """Return the functions of `jaxscale.infer.engine.device`; a step is three programs: before, in and after layers.

    Args:
      graphdef: the model.
      layers: its parameters, used in place of the argument `params` of the functions.
      cache: the kind of KV cache.
    """
    runs = list(layers.infos["runs"])

    def model_of(rest: Tree, run: int | None = None, params: Tree = None) -> Any:
        """The model with these parameters; the others are infos without arrays."""
        of_runs = {name: params if n == run else layers.infos["runs"][name] for n, name in enumerate(runs)}
        return nnx.merge(graphdef, {**layers.infos, **rest, "runs": of_runs})

    @jax.jit
    def before(rest: Tree, inputs: StepInputs) -> Tree:
        return model_of(rest).begin(inputs.tokens, inputs.step.positions, packed=True)

    @functools.partial(jax.jit, static_argnums=0, donate_argnums=(2, 3))
    def within(
        run: int, params: Tree, x: Tree, states: Tree, step: Packed, repeat: Int[Array, ""]
    ) -> tuple[Tree, Tree]:
        model = model_of({}, run, params)
        context = model.context(step.slots.shape[1], positions=step.positions, segment_ids=step.slots + 1)
        run_cache = RunCache(cache, step, states)
        x, _ = model.runs[run](x, context.caching(run_cache), Part(jnp.asarray(repeat)[None]))
        return x, run_cache.states

    @jax.jit
    def after(rest: Tree, x: Tree, columns: Int[Array, "b n"]) -> tuple[Array, Array]:
        hidden = model_of(rest).finish(x)
        return hidden_at(hidden, columns), hidden

    @jax.jit
    def picked(rest: Tree, last: Float[Array, "b n e"], inputs: StepInputs) -> ChosenTokens:
        token, logprob, top, top_logprob = (x[None] for x in next_tokens(model_of(rest), last, inputs))
        return replicated(ChosenTokens(token, logprob, top, top_logprob, jnp.int32(1)))

    @jax.jit
    def scored(rest: Tree, hidden: Float[Array, "b s e"], targets: Int[Array, "b s"]) -> Scored:
        return score_tokens(model_of(rest), hidden, targets)

    @functools.partial(jax.jit, static_argnums=0)
    def guessed(run: int, arrays: dict[str, Array], x: Tree, step: Packed) -> dict[int, Guess]:
        infos = layers.infos["runs"][runs[run]]
        params = jax.tree_util.tree_map_with_path(lambda path, i: arrays.get(path_name(path), i), infos)
        return guesses_of(model_of({}, run, params), run, x, step)

    @functools.partial(jax.jit, static_argnums=0)
    def tried(
        run: int, params: Tree, x: Tree, states: Tree, step: Packed, repeat: Int[Array, ""]
    ) -> tuple[Tree, Tree, dict[int, Array]]:
        """As `within`, with the loads of experts; the inputs stay, to compute again with other experts."""
        model = model_of({}, run, params)
        context = model.context(step.slots.shape[1], positions=step.positions, segment_ids=step.slots + 1)
        run_cache = RunCache(cache, step, states)
        own = model.runs[run]
        x, stats = own(x, context.caching(run_cache), Part(jnp.asarray(repeat)[None]))
        loads = {}
        for n, block in enumerate(own.blocks):
            if hasattr(block.mlp, "router"):
                experts = block.mlp.config.experts
                table = stats[f"{BY_LAYER}experts_{experts}/{experts + 2}"].reshape(-1, experts + 2)
                loads[n] = table[own.first + repeat * len(own.blocks) + n, :experts]
        return x, run_cache.states, loads

    def with_experts(layers: ExpertLayers, states: ModelCache, inputs: StepInputs) -> tuple[Array, Array, ModelCache]:
        x, new = before(layers.rest, inputs), list(states)
        for run, repeat, part in layers.each():
            leaves = jax.tree_util.tree_leaves_with_path(part)
            arrays = {path_name(path): a for path, a in leaves if not isinstance(a, TensorInfo)}
            keys = list(layers.infos["runs"][runs[run]]["blocks"])
            guesses = guessed(run, arrays, x, inputs.step)
            layers.expect(run, repeat, {keys[n]: g for n, g in guesses.items()})
            while True:
                own = layers.with_experts(part, run, repeat)
                y, after_it, loads = tried(run, own, x, new[run], inputs.step, jnp.int32(repeat))
                if layers.complete(run, repeat, {keys[n]: np.asarray(v) for n, v in loads.items()}):
                    break
            x, new[run] = jax.block_until_ready(y), after_it
        return *after(layers.rest, x, inputs.columns), tuple(new)

    def one(params: Tree, states: ModelCache, inputs: StepInputs) -> tuple[Array, Array, ModelCache]:
        if isinstance(layers, ExpertLayers):
            return with_experts(layers, states, inputs)
        x, new = before(layers.rest, inputs), list(states)
        for run, repeat, part in layers.each():
            x, new[run] = within(run, part, x, new[run], inputs.step, jnp.int32(repeat))
            jax.block_until_ready(x)  # else more than two layers would be on the device
        return *after(layers.rest, x, inputs.columns), tuple(new)

    def ahead(
        params: Tree,
        states: ModelCache,
        inputs: StepInputs,
        steps: int | Int[Array, ""],
        until_end: bool | Bool[Array, ""],
    ) -> tuple[ChosenTokens, ModelCache]:
        if steps != 1:
            raise ConfigError(
                f"the scheduler wants {steps} steps at once, and streamed layers can do one; use FirstCome(ahead=1)"
            )
        last, _, states = one(params, states, inputs)
        return picked(layers.rest, last, sampling_inputs(inputs)), states

    def pick(params: Tree, last: Float[Array, "b n e"], inputs: StepInputs) -> ChosenTokens:
        return picked(layers.rest, last, inputs)

    def score(params: Tree, hidden: Float[Array, "b s e"], targets: Int[Array, "b s"]) -> Scored:
        return scored(layers.rest, hidden, targets)

    return one, ahead, pick, score
