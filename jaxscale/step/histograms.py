"""Histograms of chosen parameters and gradients (`train.histograms`), which the training step counts for trackers."""

from __future__ import annotations

import contextvars
import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxscale.config import register
from jaxscale.errors import ConfigError, near
from jaxscale.layout import path_name
from jaxscale.step.algorithm import Metrics, Step, Tree
from jaxscale.step.objective import Batch
from jaxscale.step.state import Blueprint, TrainState
from jaxscale.step.trackers import Histogram
from jaxscale.step.unfreeze import matches

HISTOGRAMS = "jaxscale.histograms"
"""Key of a step's metrics under which its histograms are, a dict by tensor."""

LARGE = 2**31
"""From this number of elements on, counts are separate for each index of the first dimension, since int32 overflows."""

Counts = dict[str, dict[str, jax.Array]]


@register
@dataclasses.dataclass(frozen=True)
class Histograms:
    """Histograms of chosen parameters and gradients for trackers: `train.histograms = @Histograms()`.

    The step counts them where the shards are; no tensor is gathered. They are named `params/PATH` and `grads/PATH`. The
    parameters are those after the step. The gradients are those of the whole batch, before clipping. A tracker displays
    them as it can (see each); `metrics.jsonl` does not have them.

    Args:
      params: the trained parameters: parts of their paths, such as "embed" or "attn/q", where `*` matches any
        characters.
      grads: the parameters whose gradients are counted, in the same way.
      every: steps between histograms.
      bins: number of bins of equal width between a tensor's smallest and largest finite number.

    Raises:
      ConfigError: no tensor is chosen, or a setting is out of its range.
    """

    params: tuple[str, ...] = ("*",)
    grads: tuple[str, ...] = ()
    every: int = 100
    bins: int = 64

    def __post_init__(self) -> None:
        for name in ("params", "grads"):
            value = getattr(self, name)
            if not isinstance(value, tuple | list) or not all(isinstance(x, str) and x for x in value):
                raise ConfigError(
                    f"Histograms.{name} = {value!r}: must be a tuple of names, such as ('embed', 'attn/q')"
                )
            object.__setattr__(self, name, tuple(value))
        if not self.params and not self.grads:
            raise ConfigError(
                "Histograms.params and Histograms.grads are empty; name a tensor, or set train.histograms = None"
            )
        for name, most in (("every", None), ("bins", 512)):
            value = getattr(self, name)
            whole = isinstance(value, int) and not isinstance(value, bool)
            if not whole or value < 1 or most is not None and value > most:
                upper = "" if most is None else f", and at most {most:,}"
                raise ConfigError(f"Histograms.{name} = {value!r}: must be a whole number of at least 1{upper}")

    def check(self, blueprint: Blueprint) -> None:
        """Check that each name matches a trained parameter.

        Args:
          blueprint: the run's blueprint.

        Raises:
          ConfigError: one does not.
        """
        paths = [i.path for i in jax.tree.leaves(blueprint.infos)]
        for setting in ("params", "grads"):
            for target in getattr(self, setting):
                if not any(matches(path, target) for path in paths):
                    names = {part for path in paths for part in path.split("/") if not part.isdecimal()}
                    raise ConfigError(
                        f"Histograms.{setting} has '{target}', which no trained parameter matches{near(target, names)}"
                    )

    def of(self, kind: str, tree: Tree, step: jax.Array) -> Counts:
        """Return counts of the chosen tensors by name; zeros in steps that are not a multiple of `every`.

        Args:
          kind: "params" or "grads".
          tree: the tensors.
          step: the step, from 1.
        """
        leaves = jax.tree_util.tree_leaves_with_path(tree)
        targets = getattr(self, kind)
        chosen = {n: x for p, x in leaves if any(matches(n := path_name(p), target) for target in targets)}

        def counted() -> Counts:
            return {f"{kind}/{name}": count(x, self.bins) for name, x in chosen.items()}

        def zeros() -> Counts:
            return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(counted))

        return jax.lax.cond(step % self.every == 0, counted, zeros) if chosen else {}


_COUNTING: contextvars.ContextVar[Histograms | None] = contextvars.ContextVar("histograms", default=None)


def of_gradients(grads: Tree, step: jax.Array) -> dict[str, Any]:
    """Return histograms of gradients as an entry of a step's metrics; none if `train.histograms` names no gradients.

    Args:
      grads: gradients of the trained parameters.
      step: the step, from 1.
    """
    histograms = _COUNTING.get()
    return {HISTOGRAMS: histograms.of("grads", grads, step)} if histograms is not None and histograms.grads else {}


def with_histograms(step: Step, histograms: Histograms) -> Step:
    """Return a training step with histograms among its metrics, under `HISTOGRAMS`.

    Args:
      step: the training step.
      histograms: the tensors.
    """

    def with_counts(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        token = _COUNTING.set(histograms)
        try:
            state, metrics = step(state, batch)
        finally:
            _COUNTING.reset(token)
        if histograms.grads and HISTOGRAMS not in metrics:
            raise ConfigError(
                "Histograms.grads: the algorithm of this run (train.algorithm) does not take gradients with "
                "jaxscale.step.make_step, as Backprop does; remove Histograms.grads"
            )
        counts: Any = metrics.get(HISTOGRAMS, {})
        with jax.named_scope("histograms"):
            return state, {**metrics, HISTOGRAMS: counts | histograms.of("params", state.params, state.step)}

    return with_counts


def count(x: jax.Array, bins: int) -> dict[str, jax.Array]:
    """Count a tensor's finite elements in bins of equal width, as `numpy.histogram` does with the same edges.

    The tensor is compared with each edge and the results are summed, so that XLA reduces shards where they are, and the
    counts do not depend on the layout. The memory is that of four bytes for each element of a shard at most.

    Args:
      x: the tensor, of any shape.
      bins: number of bins.

    Returns:
      `edges`, float32 (bins + 1,), from the smallest to the largest finite element, or half below and above it if all
      are equal; `counts`, int32 (bins,); `nonfinite`, int32 (), the number of NaNs and infinities. For `LARGE` tensors
      the counts have a dimension more, the tensor's first.
    """
    dimensions = tuple(range(x.size >= LARGE, x.ndim))

    def wide() -> jax.Array:
        return x.astype(jnp.float32)

    def number(which: jax.Array) -> jax.Array:
        return jnp.sum(which, axis=dimensions, dtype=jnp.int32)

    low = jnp.min(jnp.where(jnp.isfinite(x), wide(), jnp.inf), initial=jnp.inf)
    high = jnp.max(jnp.where(jnp.isfinite(x), wide(), -jnp.inf), initial=-jnp.inf)
    low, high = jnp.where(low > high, 0.0, low), jnp.where(low > high, 0.0, high)
    low, high = jnp.where(low == high, low - 0.5, low), jnp.where(low == high, high + 0.5, high)
    part = jnp.arange(bins + 1, dtype=jnp.float32) / bins
    # The barrier keeps the compiler from fusing the products and the sum, which rounds differently in some programs.
    edges = sum(jax.lax.optimization_barrier((low * (1 - part), high * part)))
    edges = jnp.clip(jax.lax.cummax(edges).at[-1].set(high), low, high)
    # One edge at a time, since XLA stores the results of comparing a tensor with several.
    above = jax.lax.map(lambda edge: number(wide() >= edge), edges[:-1]) - number(wide() == jnp.inf)
    counts = jnp.moveaxis(above - jnp.append(above[1:], jnp.zeros_like(above[:1]), axis=0), 0, -1)
    return {"counts": counts, "edges": edges, "nonfinite": number(~jnp.isfinite(x))}


def on_host(counts: Mapping[str, Mapping[str, Any]]) -> dict[str, Histogram]:
    """Return the histograms of a step for trackers.

    Args:
      counts: what the step counted, in host memory.
    """

    def histogram(one: Mapping[str, Any]) -> Histogram:
        by_bin = np.asarray(one["counts"], np.int64)
        nonfinite = int(np.sum(one["nonfinite"], dtype=np.int64))
        return Histogram(by_bin.reshape(-1, by_bin.shape[-1]).sum(0), np.asarray(one["edges"], np.float64), nonfinite)

    return {name: histogram(one) for name, one in counts.items()}
