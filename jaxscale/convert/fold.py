"""Fold a run: layers that matter least are removed, and neighbours among the others share one block's matrices."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jaxtyping import Array, Float

from jaxscale.convert.new_run import begin, check_new, finish, save_params
from jaxscale.data import Loader
from jaxscale.errors import ConfigError, DataError, LayoutError, check_whole
from jaxscale.layout import Layout, shardings_of
from jaxscale.layout.tensors import Tree
from jaxscale.models import TransformerConfig
from jaxscale.models.base import logits_of
from jaxscale.models.soft_prompt import with_prompt
from jaxscale.nn import Part, ReversibleRun, SharedBlocks
from jaxscale.parallel import token_logprobs
from jaxscale.run import Run
from jaxscale.step import describe_model
from jaxscale.step.objective import Batch

log = logging.getLogger("jaxscale")

SMALLEST = 0.003
"""The smallest `a` of a gate, where its gradient is not 0."""


@dataclasses.dataclass(frozen=True)
class Gates:
    """Ranking of layers by learned gates (FoldGPT, Liu et al. 2024, arXiv:2407.00928).

    What a layer adds to the residual stream is multiplied by a gate `a² / (a² + eps)` (GDP, Guo et al. 2021,
    arXiv:2109.02220), with `a` trained by Adam from 1 and all weights frozen. The loss is that of the next token plus
    `pressure` times how far the mean gate is from the share of layers to keep. `eps` falls from 0.1 to 0.001, so that
    gates end near 0 or 1. All gates are trained at once, so that a layer whose work another one does can be left out.

    Args:
      steps: steps of Adam; a step reads one batch, and batches come again after the last.
      lr: learning rate of the gates.
      pressure: weight of the distance from the share to keep, in nats.

    Raises:
      ConfigError: a number out of its range.
    """

    steps: int = 100
    lr: float = 0.05
    pressure: float = 10.0

    def __post_init__(self) -> None:
        check_whole("Gates.steps", self.steps)
        for name in ("lr", "pressure"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"Gates.{name} = {getattr(self, name)!r}: must be above 0")

    def trained(
        self,
        model: TransformerConfig,
        params: Tree,
        batches: Sequence[Batch],
        keep: int,
        say: Callable[[str], None] = log.info,
    ) -> np.ndarray:
        """Return the gate of each repeat of the model's block, float32.

        Args:
          model: a model of one run.
          params: its parameters.
          batches: with "tokens", "targets" and "weights".
          keep: how many repeats to keep.
          say: prints a line.
        """
        graphdef, _ = describe_model(model)
        count = model.runs[0][1]
        optimizer = optax.adam(self.lr)

        def loss(a: Array, eps: Array, params: Tree, batch: Batch) -> tuple[Array, Array]:
            gates = a**2 / (a**2 + eps)
            nats = gated_loss(nnx.merge(graphdef, params), gates, batch)
            return nats + self.pressure * jnp.abs(jnp.mean(gates) - keep / count), nats

        @jax.jit
        def step(a: Array, state: Any, eps: Array, params: Tree, batch: Batch) -> tuple[Array, Any, Array]:
            (_, nats), gradient = jax.value_and_grad(loss, has_aux=True)(a, eps, params, batch)
            update, state = optimizer.update(gradient, state)
            # `a` and `-a` are the same gate: a closed one must not open again on the other side of 0
            return jnp.maximum(optax.apply_updates(a, update), SMALLEST), state, nats

        a = jnp.ones([count], jnp.float32)
        state, eps = optimizer.init(a), 0.1
        for n in range(self.steps):
            eps = 0.1 * 0.01 ** (n / self.steps)
            a, state, nats = step(a, state, jnp.float32(eps), params, batches[n % len(batches)])
            if (n + 1) % max(1, self.steps // 5) == 0:
                gates = np.asarray(a**2 / (a**2 + eps))
                say(
                    f"step {n + 1} of {self.steps}: loss {float(nats):.4f}, gates {' '.join(f'{g:.2f}' for g in gates)}"
                )
        return np.asarray(a**2 / (a**2 + eps))


def largest(gates: Float[np.ndarray, " n"], count: int) -> list[int]:
    """Return which gates are the largest, in their order.

    Args:
      gates: one of each repeat.
      count: how many.

    Raises:
      ConfigError: they are not finite.
    """
    if not np.isfinite(gates).all():
        raise ConfigError(
            "gates became NaN, as the loss did, and rank no layers; fold an earlier step of the run (--step), or set a "
            "smaller Gates.lr"
        )
    return sorted(int(n) for n in np.argsort(-gates, kind="stable")[:count])


def gated_loss(model: Any, gates: Float[Array, " n"], batch: Batch) -> Float[Array, ""]:
    """Return the mean loss of the next token if what each layer adds is multiplied by a gate.

    Args:
      model: a `Transformer` of one run.
      gates: a gate for each repeat of its block.
      batch: with "tokens", "targets" and "weights".
    """
    inputs = (batch.get(k) for k in ("positions", "segment_ids"))
    tokens, positions, segments = with_prompt(model.config, batch["tokens"], *inputs)
    context = model.context(tokens.shape[1], positions=positions, segment_ids=segments)
    part = Part(jnp.arange(gates.shape[0]), gates=gates)
    x, _ = model.layers(model.begin(tokens, positions), context, [part])
    x = model.finish(x)[:, model.config.soft_prompt :]
    nats = -token_logprobs(logits_of(model, x), batch["targets"])
    return jnp.sum(nats * batch["weights"]) / jnp.maximum(jnp.sum(batch["weights"]), 1.0)


@dataclasses.dataclass(frozen=True)
class Folded:
    """A model with fewer layers, or layers that share matrices, and where its layers are from.

    Args:
      before: the trained model.
      model: the folded one.
      remaining: which repeats of the trained model's block it has, in order.
    """

    before: TransformerConfig
    model: TransformerConfig
    remaining: tuple[int, ...]

    def params(self, params: Tree) -> Tree:
        """Return the parameters of the folded model.

        A group of layers has the matrices of its first layer; each layer keeps its own norms, and scales begin as 1.

        Args:
          params: of the trained model.
        """
        infos, uses = describe_model(self.model)[1], self.model.uses
        remaining = np.asarray(self.remaining)

        def of(info: Any, x: Array) -> Array:
            if "uses" in info.axes:
                return jnp.take(x, remaining.reshape(-1, uses), 0)
            return jnp.take(x, remaining[::uses], 0)

        runs = {}
        for name, run in infos["runs"].items():
            blocks = jax.tree.map(of, run["blocks"], params["runs"][name]["blocks"])
            own = (
                {"scales": jax.tree.map(lambda i: jnp.ones(i.shape, i.dtype), run["scales"])} if "scales" in run else {}
            )
            runs[name] = {**params["runs"][name], "blocks": blocks, **own}
        return {**params, "runs": runs}


def folded(
    model: object, layers: int, remaining: Sequence[int] | None = None, shared: SharedBlocks | None = None
) -> Folded:
    """Return a model with fewer layers, of which neighbours share matrices.

    Args:
      model: the trained model's config.
      layers: number of layers of the new model.
      remaining: which repeats of its block to keep; the first ones by default.
      shared: how layers share matrices; `None` if each has its own.

    Raises:
      ConfigError: the model's layers are no repetition of one pattern, or the number does not fit.
    """
    if not isinstance(model, TransformerConfig):
        raise ConfigError(f"{type(model).__name__} cannot be folded; only a Transformer can")
    if model.shared is not None:
        raise ConfigError("the model's layers share matrices already (Transformer.shared); fold the run it is from")
    if issubclass(model.stack, ReversibleRun):
        raise ConfigError("a model of Transformer.stack = @ReversibleRun cannot be folded; only one of @Run can")
    if len(model.runs) != 1:
        raise ConfigError(
            "only a model of one pattern of layers, repeated without a rest, can be folded; this one has "
            f"{len(model.runs)} (Transformer.dense_layers, or a pattern that does not divide the depth)"
        )
    group, repeats = model.runs[0]
    unit = len(group) * (1 if shared is None else shared.uses)
    if not isinstance(layers, int) or not 1 <= layers <= model.depth or layers % unit:
        fits = [n for n in range(unit, model.depth + 1, unit)]
        near = sorted(sorted(fits, key=lambda n: abs(n - layers))[:2])
        why = f"choose {' or '.join(map(str, near))}" if near else f"a group of {unit} layers is more than it has"
        if not isinstance(layers, int) or not 1 <= layers <= model.depth:
            raise ConfigError(f"layers = {layers}: the model has {model.depth} layers; {why}")
        other = "" if shared is None else ", or another number of uses"
        raise ConfigError(
            f"layers = {layers} is not a multiple of {unit}, the layers of a group that repeats or shares matrices; "
            f"{why}{other}"
        )
    count = layers // len(group)
    remaining = tuple(range(count) if remaining is None else sorted(remaining))
    assert len(remaining) == count and all(0 <= k < repeats for k in remaining)
    same = dataclasses.replace(model, width=model.sizes.width)  # the width must not follow the depth
    return Folded(model, dataclasses.replace(same, depth=layers, shared=shared), remaining)


def fold(
    run: Run,
    out: str | Path,
    *,
    layers: int | None = None,
    shared: SharedBlocks | None = None,
    gates: Gates = Gates(),  # noqa: B008  (frozen)
    rows: int = 64,
    batch: int = 8,
    step: int | None = None,
    layout: Layout | None = None,
    say: Callable[[str], None] = log.warning,
) -> Run:
    """Write a run with fewer parameters: layers with the smallest gates are removed, and neighbours share matrices.

    The new model is worse than the old one until it is trained, best on the distribution of the old one (`Distill`).

    Args:
      run: a run with a checkpoint; with adapters, they are merged.
      out: the new folder.
      layers: number of layers to keep; by default all.
      shared: how the remaining layers share matrices, such as `SharedBlocks(uses=2)`; `None` if each has its own.
      gates: how layers are ranked.
      rows: calibration rows from the run's training corpus, of `seq_len` tokens.
      batch: rows that are computed at once.
      step: the checkpoint's step; the newest by default.
      layout: where to compute; the default device by default.
      say: prints a line.

    Returns:
      the new run.

    Raises:
      ConfigError: nothing is removed or shared, the model cannot be folded like this, or `batch` does not divide
        `rows`.
      DataError: the corpus has too few rows.
      LayoutError: the layout shards sequences in an order of their own.
      RunError: `out` exists already or is in a bucket, or `run` has no checkpoint.
    """
    config = run.config
    depth = getattr(config.model, "depth", 0)  # a model without layers is refused below
    layers = depth if layers is None else layers
    if layers == depth and shared is None:
        raise ConfigError("nothing is removed or shared; set a smaller number of layers, or the number of uses")
    check_new(out)
    keep = folded(config.model, layers, shared=shared)  # raises for what does not fit
    model, repeats = keep.before, keep.before.runs[0][1]
    step = run.last_step() if step is None else step
    facts: dict[str, Any] = {"run": str(run.path.absolute()), "id": run.info.get("id"), "step": step}
    removes = len(keep.remaining) < repeats
    batches = _batches(run, rows, batch, layout) if removes else []
    params = run.params(step, layout)
    if removes:
        with layout if layout is not None else contextlib.nullcontext():
            learned = gates.trained(model, params, batches, len(keep.remaining), say)
        keep = folded(model, keep.model.depth, largest(learned, len(keep.remaining)), shared)
        facts |= {"gates": learned.tolist(), "by": repr(gates)}
    facts["remaining"] = list(keep.remaining)
    infos = describe_model(keep.model)[1]
    params = jax.jit(keep.params, out_shardings=shardings_of(infos, layout))(params)
    settings = dataclasses.replace(config, model=keep.model, start=None, adapters=None, stored=None, layout=layout)
    new = begin(run, out, settings, {"folded": facts}, "folding")
    save_params(new, params, layout)
    finish(new, "folded")
    return new


def _batches(run: Run, rows: int, batch: int, layout: Layout | None) -> list[Batch]:
    """Calibration rows in the run's order, with the targets of the next token."""
    config = run.config
    if rows < 1 or batch < 1 or rows % batch:
        raise ConfigError(f"{rows} calibration rows are not whole batches of {batch} rows; use a multiple of {batch}")
    if layout is not None and "context" in layout.sizes:
        raise LayoutError("gates are trained on whole rows; use a mesh without the axis context")
    source = config.data.source(config.tokenizer, seq_len=config.seq_len, split="train", packing=config.packing)
    if len(source) < rows:
        raise DataError(f"'{source.name}' has {len(source)} rows, fewer than {rows}; use at most {len(source)} rows")
    loader = Loader(source, batch, config.seed)
    names = ("tokens", "targets", "weights", *(("positions", "segment_ids") if config.segments else ()))
    read = [loader.batch_at(n) for n in range(rows // batch)]
    return [{k: jnp.asarray(b[k]) for k in names if k in b} for b in read]
