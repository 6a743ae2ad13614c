"""The coordinate check: do activations, and their changes in training, have the same size at every width of a model?

As in Yang et al. 2022 (Tensor Programs V, appendix D.1), a model is trained for a few steps at several widths, and the
mean magnitude of each module's output is recorded. Under a parametrisation whose hyperparameters transfer, these are
flat in the width. Two may shrink: logits and attention scores. µP divides these sums by the number of their terms,
which is right for terms that training has aligned; at initialisation the terms are independent, so that the sum is
smaller by the square root of their number. The same holds for the part of the logits' change that the initial head
makes of changed features.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxscale.errors import ConfigError
from jaxscale.layout.tensors import Tree
from jaxscale.models import ModelConfig
from jaxscale.models.base import HasWidths, Parametrised, ScansLayers
from jaxscale.nn import head_logits
from jaxscale.optim import Constant
from jaxscale.plan.activations import recorded
from jaxscale.plan.search_front import Tell, silent
from jaxscale.step import TrainConfig, blueprint_of, step_of
from jaxscale.step.prepare import prepare
from jaxscale.step.state import TrainState
from jaxscale.step.trace import quickly

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

WIDTHS = (32, 64, 128, 256)
TOLERANCE = 0.15
"""A size is flat if it goes as the width to a power between minus this and this."""

SUMS = ("logits", "scores")
"""Activations that may shrink as the width grows."""

_MODULES = re.compile(r"embed|norm|logits|scores|runs/\d+/blocks/\d+(/(attn|mlp|scores))?")
"""Modules that are checked: every block and its sub-layers, embedding, last norm, logits, and attention scores."""

Sizes = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Coordinate:
    """Mean magnitudes of one module's output by width, and their slopes in log width.

    Args:
      name: the module's scope; all layers of a stack are one module.
      at_init: mean magnitude before training, by width (the geometric mean over seeds and layers).
      moved: mean magnitude of the change since then, by step and width.
      init_slope: slope of log `at_init` in log width.
      moved_slope: slope of log `moved`, of the step where it is steepest; for `SUMS`, where it is largest.
    """

    name: str
    at_init: tuple[float, ...]
    moved: tuple[tuple[float, ...], ...]
    init_slope: float
    moved_slope: float

    def why_not_flat(self, tolerance: float) -> str | None:
        """Return why the module is not flat, in words; `None` if it is flat.

        Args:
          tolerance: the steepest slope that counts as flat.
        """
        if not all(np.isfinite(x).all() for x in (self.at_init, self.moved, self.init_slope, self.moved_slope)):
            return "is not finite, or is zero at some widths only"
        shrinks = not self.name.endswith(SUMS)
        for what, slope in (("is", self.init_slope), ("is moved", self.moved_slope)):
            if slope > tolerance or shrinks and slope < -tolerance:
                return f"{what} {'more' if slope > 0 else 'less'}, the wider the model: width to the power {slope:+.2f}"
        return None


@dataclasses.dataclass(frozen=True)
class CoordCheck:
    """Result of a coordinate check; prints as a table.

    Args:
      parametrisation: the model's parametrisation, in words.
      widths: widths of the residual stream.
      steps: steps of training.
      seeds: number of seeds that sizes are averaged over.
      tolerance: the steepest slope that counts as flat.
      coordinates: one for every module.
      losses: by step and width, the mean over seeds.
    """

    parametrisation: str
    widths: tuple[int, ...]
    steps: int
    seeds: int
    tolerance: float
    coordinates: tuple[Coordinate, ...]
    losses: tuple[tuple[float, ...], ...]

    @property
    def flat(self) -> bool:
        """Whether every module is flat."""
        return not self.failures

    @property
    def failures(self) -> tuple[str, ...]:
        """A sentence for each module that is not flat."""
        reasons = ((c, c.why_not_flat(self.tolerance)) for c in self.coordinates)
        return tuple(f"{c.name} {why}" for c, why in reasons if why)

    @property
    def verdict(self) -> str:
        """The result in words."""
        if self.flat:
            return f"flat: no slope beyond {self.tolerance:g} under {self.parametrisation}"
        return "\n".join([f"not flat under {self.parametrisation}:", *self.failures])

    def to_json(self) -> dict[str, Any]:
        """Return all fields, `flat` and `failures` as plain values."""
        return {**dataclasses.asdict(self), "flat": self.flat, "failures": list(self.failures)}

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.box import SIMPLE_HEAD
        from rich.table import Table

        title = f"mean magnitudes by width, under {self.parametrisation}: {self.seeds} seeds, {self.steps} steps"
        table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
        table.add_column("module", no_wrap=True)
        for name in (
            *(f"start, {w}" for w in self.widths),
            "slope",
            *(f"moved, {w}" for w in self.widths),
            "slope",
            "flat",
        ):
            table.add_column(name, justify="right")
        for c in self.coordinates:
            numbers = *(f"{n:.3g}" for n in c.at_init), f"{c.init_slope:+.2f}"
            changes = *(f"{n:.3g}" for n in c.moved[-1]), f"{c.moved_slope:+.2f}"
            table.add_row(c.name, *numbers, *changes, "no" if c.why_not_flat(self.tolerance) else "yes")
        yield table
        yield f"flat: no slope in log width beyond ±{self.tolerance:g}; {' and '.join(SUMS)} may shrink"
        if len(self.widths) < 3:
            yield f"a slope over {len(self.widths)} widths is noisy; use three or more"
        yield self.verdict

    def draw(self, path: str | Path) -> Path:
        """Plot sizes over widths, at initialisation and of the change after each step.

        Args:
          path: the file to write; its suffix is the format, such as ".png".

        Returns:
          `path`.
        """
        from matplotlib.figure import Figure

        figure = Figure(figsize=(3.2 * (self.steps + 1) + 2.2, 3.4), dpi=90, layout="constrained")
        axes = figure.subplots(1, self.steps + 1)
        for n, ax in enumerate(axes):
            for c in self.coordinates:
                sizes = c.at_init if n == 0 else c.moved[n - 1]
                ax.plot(self.widths, np.where(np.array(sizes) > 0, sizes, np.nan), "o-", markersize=3, label=c.name)
            ax.set(xscale="log", yscale="log", xlabel="width", title="at the start" if n == 0 else f"moved by step {n}")
            ax.set_xticks(self.widths, labels=list(map(str, self.widths)))
            ax.minorticks_off()
            ax.grid(alpha=0.25)
        axes[0].set_ylabel("mean magnitude of a coordinate")
        figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right upper", frameon=False, fontsize=8)
        figure.suptitle(f"{self.parametrisation}: {'flat' if self.flat else 'not flat'}", fontsize=11)
        figure.savefig(path)
        return Path(path)


def coordcheck(
    config: TrainConfig,
    widths: Sequence[int] = WIDTHS,
    *,
    steps: int = 4,
    seeds: int = 2,
    tolerance: float = TOLERANCE,
    tell: Tell = silent,
) -> CoordCheck:
    """Train a model at several widths for a few steps and measure the sizes of its activations.

    This runs on one device for any layout, and at the peak learning rate from the first step on, since a warm-up would
    hide the effect of a step. All widths train on the same batches; activations are recorded on the first of them.

    Args:
      config: the run's settings; its model has a method `at_width`.
      widths: two or more widths of the residual stream, in any order.
      steps: steps of training.
      seeds: runs of each width, over which sizes are averaged.
      tolerance: the steepest slope that counts as flat.
      tell: called with progress: what is done ("width"), how far it is, and of how much.

    Raises:
      ConfigError: an argument is out of its range, or the model cannot be built at a width.
    """
    widths = tuple(sorted(set(widths)))
    if len(widths) < 2 or widths[0] < 1:
        raise ConfigError(f"a slope needs two widths of at least 1, not {list(widths)}; use for example {WIDTHS}")
    for name, value in (("steps", steps), ("seeds", seeds)):
        if value < 1:
            raise ConfigError(f"{name} = {value}: must be at least 1")
    if not isinstance(config.model, HasWidths):
        raise ConfigError(f"{type(config.model).__name__} has no at_width(width), so it has no other widths to check")
    plain: dict[str, Any] = dict(layout=None, schedule=Constant(), steps=steps, guards=(), eval_batches=0, prompt=None)
    plain["batching"] = None
    configs = [dataclasses.replace(config, model=config.model.at_width(w), **plain) for w in widths]
    prepared = prepare(configs[0])
    # sizes are recorded before each step, so that those after the last step take one batch more
    each = [prepared.place(prepared.loader, step) for step in range(steps + 1)]
    batches = {k: jnp.stack([b[k] for b in each]) for k in each[0]}
    results = []
    for width, one in zip(widths, configs, strict=True):
        tell("width", width, widths[-1])
        run = quickly(jax.vmap(_measured(one), in_axes=(0, None)))
        results.append(jax.device_get(run(jnp.arange(config.seed, config.seed + seeds), batches)))
    return CoordCheck(
        _parametrisation(config.model), widths, steps, seeds, tolerance, _coordinates(widths, results),
        tuple(zip(*(np.mean(r["loss"], axis=0).tolist() for r in results), strict=True)),
    )  # fmt: skip


def _parametrisation(model: ModelConfig) -> str:
    """Return the name of a model's parametrisation."""
    widening = model.widening if isinstance(model, Parametrised) else None
    return "the standard parametrisation" if widening is None else repr(widening.parametrisation)


def _measured(config: TrainConfig) -> Callable[[jax.Array, Any], dict[str, Any]]:
    """Return a function that trains from a seed on batches, and records sizes and changes before each step."""
    model: Any = config.model
    scans = isinstance(model, ScansLayers) and model.scan == "auto"
    if scans:  # so that a module's layers are recorded as one stacked array
        config = dataclasses.replace(config, model=dataclasses.replace(model, scan=True))
    blueprint, schedule = blueprint_of(config)
    step = step_of(blueprint, config, schedule)

    def run(seed: jax.Array, batches: dict[str, jax.Array]) -> dict[str, Any]:
        first = {k: v[0] for k, v in batches.items()}
        watch = functools.partial(_activations, config, blueprint.graphdef, first)

        def turn(carry: tuple[TrainState, Sizes], at: tuple[jax.Array, Any]) -> tuple[tuple[TrainState, Sizes], Any]:
            (state, start), (number, batch) = carry, at
            now = watch(state.params)
            start = jax.tree.map(lambda a, b: jnp.where(number == 0, a, b), now, start)
            moved = jax.tree.map(lambda a, b: a - b, now, start)
            state, metrics = step(state, batch)
            return (state, start), {"size": _sizes(now), "moved": _sizes(moved), "loss": metrics["loss"]}

        state = blueprint.make(seed)
        start = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(watch, state.params))
        numbers = jnp.arange(batches["tokens"].shape[0])
        return jax.lax.scan(turn, (state, start), (numbers, batches))[1]

    return run


def _activations(config: TrainConfig, graphdef: nnx.GraphDef[Any], batch: dict[str, jax.Array], params: Tree) -> Sizes:
    """Return activations by module, (B, S, ...) or for stacked layers (layers, B, S, ...)."""
    tokens = batch["tokens"]

    def forward(params: Tree) -> tuple[jax.Array, jax.Array]:
        model = nnx.merge(graphdef, params)
        hidden = model.hidden(tokens, positions=batch.get("positions"), segment_ids=batch.get("segment_ids"))
        return hidden, head_logits(hidden, model.head_weight(), softcap=None)

    stream = jax.eval_shape(forward, params)[0].shape  # modules' outputs have it; statistics of experts do not
    (_, logits), activations = recorded(forward, params, keep=lambda shape: shape == stream)
    activations["logits"] = logits
    for name in [n for n in activations if n.endswith("attn/qkv:qkv")]:
        q, k, _ = activations[name]
        scale = getattr(config.model, "score_scale", q.shape[-1] ** -0.5)
        activations[name.replace("attn/qkv:qkv", "scores")] = _scores(q, k, scale)
    return {name: x for name, x in activations.items() if _MODULES.fullmatch(name)}


def _scores(q: jax.Array, k: jax.Array, scale: float) -> jax.Array:
    """Return attention scores, 0 for non-causal pairs, scaled so that their mean is the mean over causal pairs."""
    causal = jnp.tril(jnp.ones((q.shape[-3], q.shape[-3]), jnp.float32))
    k = jnp.repeat(k, q.shape[-2] // k.shape[-2], axis=-2)
    scores = jnp.einsum("...shd,...thd->...sht", q, k, preferred_element_type=jnp.float32)
    return scores * scale * (causal / jnp.mean(causal))[:, None]


def _sizes(activations: Sizes) -> Sizes:
    """Return mean magnitudes by module, one per layer where layers are stacked."""

    def size(name: str, x: jax.Array) -> jax.Array:
        stacked = x.ndim - (4 if name.endswith("scores") else 3)
        return jnp.mean(jnp.abs(x.astype(jnp.float32)), axis=tuple(range(stacked, x.ndim)))

    return {name: size(name, x) for name, x in activations.items()}


def _coordinates(widths: Sequence[int], results: Sequence[dict[str, Any]]) -> tuple[Coordinate, ...]:
    """Return a `Coordinate` for every module from the results of every width."""
    rows = []
    for name in results[0]["size"]:
        at_init = np.array([_pooled(r["size"][name])[0] for r in results])
        moved = np.array([_pooled(r["moved"][name])[1:] for r in results]).T
        slopes = _slope(widths, at_init), _steepest(name, [_slope(widths, m) for m in moved])
        rows.append(Coordinate(name, tuple(at_init.tolist()), tuple(map(tuple, moved.tolist())), *slopes))
    return tuple(rows)


def _steepest(name: str, slopes: Sequence[float]) -> float:
    """Return the slope that is farthest from flat: NaN, else the largest (of `SUMS`) or the largest in magnitude."""

    def distance(slope: float) -> float:
        return np.inf if np.isnan(slope) else slope if name.endswith(SUMS) else abs(slope)

    return max(slopes, key=distance)


def _pooled(sizes: np.ndarray) -> np.ndarray:
    """Return geometric means over seeds and layers by step, of sizes (seeds, steps) or (seeds, steps, layers)."""
    with np.errstate(divide="ignore"):
        logs = np.log(sizes)
    return np.exp(np.mean(logs.reshape(*logs.shape[:2], -1), axis=(0, 2)))


def _slope(widths: Sequence[int], sizes: Sequence[float] | np.ndarray) -> float:
    """Return the slope of log size in log width, by least squares; 0 where all sizes are 0."""
    if not np.any(sizes):
        return 0.0
    with np.errstate(divide="ignore", invalid="ignore"):
        x, y = np.log(widths), np.log(sizes)
        x = x - x.mean()
        return float(np.sum(x * (y - y.mean())) / np.sum(x * x))
