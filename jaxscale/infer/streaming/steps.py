"""Steps of a model that passes through the device: the layers come and go, the caches of all stay."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxscale.errors import ConfigError, LayoutError
from jaxscale.infer.cache import ModelCache
from jaxscale.infer.engine import Cached, FirstCome
from jaxscale.infer.engine.device import Found, Pick, Scored, Scores, Step, Steps, given_tokens, next_tokens
from jaxscale.infer.engine.packing import Told, how_to_pick
from jaxscale.infer.forward import everywhere, hidden_at
from jaxscale.infer.streaming.layers import Layers, Resident
from jaxscale.layout import Layout
from jaxscale.nn import Cache, Packed, Part, RunCache


class Streamed(Cached):
    """Steps with a cache, of models that are larger than the device's memory: same requests, same tokens.

    A step takes as long as bringing all layers does, however many tokens it has, so that many rows cost little more
    than one.

    Args:
      graphdef: the model.
      layers: its parameters.
      layout: where both live.
      **options: see `Cached`.

    Raises:
      ConfigError, LayoutError: see `Cached`; and layers lie on pipeline stages.
    """

    def __init__(self, graphdef: nnx.GraphDef[Any], layers: Layers, *, layout: Layout | None = None, **options: Any):
        if layout is not None and layout.stages > 1:
            raise LayoutError("layers that lie on pipeline stages stay there; stream them on a mesh without 'pipeline'")
        if "runs" not in layers.infos:
            raise ConfigError("this model has no runs of layers, so that nothing can be streamed")
        self.layers = layers
        scheduler = options.pop("scheduler", FirstCome(ahead=1))
        super().__init__(graphdef, layers.infos, layout=layout, scheduler=scheduler, **options)
        self._one, self._ahead, self._pick, self._score = streamed_steps(graphdef, layers, self.cache)

    @property
    def resident(self) -> Resident:
        """Bytes of parameters on the devices."""
        return self.layers.resident


def streamed_steps(graphdef: nnx.GraphDef[Any], layers: Layers, how: Cache) -> tuple[Step, Steps, Pick, Scores]:
    """As `jaxscale.infer.engine.device` gives them; a step is three programs (before, in, after layers).

    Args:
      graphdef: the model.
      layers: its parameters, in place of those that the steps are given.
      how: its cache.
    """
    runs = list(layers.infos["runs"])

    def model_of(rest: Any, run: int | None = None, params: Any = None) -> Any:
        """The model, of which only these parameters are there."""
        there = {name: params if n == run else layers.infos["runs"][name] for n, name in enumerate(runs)}
        return nnx.merge(graphdef, {**layers.infos, **rest, "runs": there})

    @jax.jit
    def before(rest: Any, told: Told) -> Any:
        return model_of(rest).begin(told.tokens, told.step.positions, packed=True)

    @functools.partial(jax.jit, static_argnums=0, donate_argnums=(2, 3))
    def within(run: int, params: Any, x: Any, states: Any, step: Packed, copy: Any) -> Any:
        model = model_of({}, run, params)
        context = model.context(step.rows.shape[1], positions=step.positions, segment_ids=step.rows + 1)
        kept = RunCache(how, step, states)
        x, _ = model.runs[run](x, context.caching(kept), Part(jnp.asarray(copy)[None]))
        return x, kept.states

    @jax.jit
    def after(rest: Any, x: Any, columns: Any) -> tuple[Any, Any]:
        hidden = model_of(rest).finish(x)
        return hidden_at(hidden, columns), hidden

    @jax.jit
    def picked(rest: Any, last: Any, told: Told) -> Found:
        token, logprob, top, top_logprob = (x[None] for x in next_tokens(model_of(rest), last, told))
        return everywhere(Found(token, logprob, top, top_logprob, jnp.int32(1)))

    @jax.jit
    def of_given(rest: Any, hidden: Any, targets: Any) -> Scored:
        return given_tokens(model_of(rest), hidden, targets)

    def one(params: Any, states: ModelCache, told: Told) -> tuple[Any, Any, ModelCache]:
        x, new = before(layers.rest, told), list(states)
        for run, copy, part in layers.each():
            x, new[run] = within(run, part, x, new[run], told.step, jnp.int32(copy))
            jax.block_until_ready(x)  # or more layers would be on their way than there is room for
        return *after(layers.rest, x, told.columns), tuple(new)

    def ahead(params: Any, states: ModelCache, told: Told, steps: Any, until_end: Any) -> tuple[Found, ModelCache]:
        if steps != 1:
            raise ConfigError(f"a scheduler wants {steps} steps at once, and layers do one; FirstCome(ahead=1)")
        last, _, states = one(params, states, told)
        return picked(layers.rest, last, how_to_pick(told)), states

    pick = lambda _, last, told: picked(layers.rest, last, told)  # noqa: E731
    return one, ahead, pick, lambda _, hidden, targets: of_given(layers.rest, hidden, targets)
