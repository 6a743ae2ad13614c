"""Warnings about settings that have no effect, or that work against another setting."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxscale.data.markov import Synthetic
from jaxscale.data.mixing import Mixture
from jaxscale.errors import LayoutError
from jaxscale.layout import TensorInfo
from jaxscale.models.base import FindsIdle
from jaxscale.models.transformer_checks import not_default
from jaxscale.optim import EightBit, ScheduleFreeAdamW, ScheduleFreeSGD, is_quantized, without_biases
from jaxscale.optim.storage import check_fits
from jaxscale.reading import clipped
from jaxscale.step.algorithms.stream_layers import StreamLayers, longest_stack
from jaxscale.step.config import TrainConfig
from jaxscale.step.pipeline import replicas_of
from jaxscale.step.state import Blueprint
from pallas_kernels.blockwise import without_kernel

Findings = Iterator[tuple[str, Any, str]]
"""Name and value of a setting, and why it has no effect."""


def without_effect(config: TrainConfig, blueprint: Blueprint) -> list[str]:
    """Return a warning for each setting that differs from its default and changes nothing in this run.

    There is also one for a decaying learning-rate schedule with a schedule-free optimizer, whose averaging replaces
    decay, for blocks of 8-bit optimizer state that no kernel updates, and for routers that the loss does not train.

    Args:
      config: the run's settings.
      blueprint: the run's blueprint.
    """
    findings = [finding for check in _CHECKS for finding in check(config, blueprint)]
    sentences = [f"{name} = {_short(value)} has no effect: {why}" for name, value, why in findings]
    idle = ((type(g).__name__, g.idle(config)) for g in config.guards)
    sentences += [f"{name} in train.guards has no effect: {why}" for name, why in idle if why is not None]
    return [*sentences, *_decays_twice(config), *_without_kernel(config, blueprint), *_untrained_routers(config)]


def _short(value: object) -> str:
    text = getattr(value, "__name__", None) or repr(value)
    if len(text) > 120 and isinstance(value, tuple):
        return f"{len(value)} {type(value[0]).__name__}(...)"
    return clipped(text, 120)


def _of_run(c: TrainConfig, blueprint: Blueprint) -> Findings:
    if isinstance(c.data, Synthetic):
        for name in not_default(c, "tokenizer"):
            yield f"train.{name}", c.tokenizer, "the corpus consists of token ids"
    ends = f"the run ends after train.steps = {c.steps}"
    late = tuple(entry for entry in c.data.schedule if entry[0] >= c.steps) if isinstance(c.data, Mixture) else ()
    if late:
        yield "mixture.schedule", late, ends
    if c.eval_every and not c.eval_batches:
        yield "train.eval_every", c.eval_every, "train.eval_batches = 0 never evaluates"
    elif c.eval_every > c.steps:
        yield "train.eval_every", c.eval_every, ends
    if c.evaluate_on and not c.eval_batches:
        yield "train.evaluate_on", list(c.evaluate_on), "train.eval_batches = 0 never evaluates"
    if c.histograms is not None and not c.trackers:
        yield "train.histograms", c.histograms, "there are no trackers (train.trackers) to send them to"
    elif c.histograms is not None and c.histograms.every > c.steps:
        yield "Histograms.every", c.histograms.every, ends
    if c.checkpoint_every > c.steps:
        yield "train.checkpoint_every", c.checkpoint_every, ends
    once = not c.checkpoint_every or c.checkpoint_every >= c.steps
    if c.overlap_saves and once:
        yield "train.overlap_saves", True, "the only checkpoint is written after the last step"
    for name in not_default(c, "keep") if once else ():
        yield f"train.{name}", getattr(c, name), "one checkpoint is written, at the end"
    if c.keep_every is not None:
        first = c.keep_every if once else math.lcm(c.keep_every, c.checkpoint_every)
        if once and c.keep_every != c.steps:
            yield "train.keep_every", c.keep_every, "one checkpoint is written, at the end"
        elif first > c.steps:
            yield "train.keep_every", c.keep_every, f"no checkpoint's step up to {c.steps} is a multiple of it"
    for name in not_default(c, *c.algorithm.unused):
        yield f"train.{name}", getattr(c, name), f"{c.algorithm.describe()} makes its own updates"
    if len(jax.tree.leaves(without_biases(blueprint.infos))) == len(jax.tree.leaves(blueprint.infos)):
        for name in not_default(c, "balance_rate"):
            yield f"train.{name}", c.balance_rate, "the model has no router with load-balancing biases (SigmoidRouter)"


def _of_streams(c: TrainConfig, blueprint: Blueprint) -> Findings:
    if isinstance(c.algorithm, StreamLayers) and c.algorithm.window > max(2, most := longest_stack(blueprint.infos)):
        yield (
            "StreamLayers.window",
            c.algorithm.window,
            f"it acts as {most}, the repeats of the model's longest stack, all of which are then on the device",
        )


def _of_layout(c: TrainConfig, blueprint: Blueprint) -> Findings:
    layout = c.layout
    if layout is None:
        return
    if layout.pipeline is not None and layout.stages == 1:
        yield "Layout.pipeline", layout.pipeline, "the mesh has no pipeline axis"
    elif layout.schedule.gather == "step":
        each = dataclasses.replace(layout, pipeline=dataclasses.replace(layout.schedule, gather="layer"))
        if replicas_of(blueprint.graphdef, blueprint.infos, each) == replicas_of(
            blueprint.graphdef, blueprint.infos, layout
        ):
            yield (
                "Pipeline.gather",
                "step",
                "the mesh has no axis that shards parameters and, of activations, only rows",
            )
    if layout.sequence_sharded and layout.sizes["tensor"] == 1:
        yield "Layout.sequence_sharded", True, "the mesh has no tensor axis to shard the sequence over"
    if layout.sums is not None and not layout.cut("mlp") + layout.cut("heads"):
        yield "Layout.sums", layout.sums, "no mesh axis shards heads or hidden widths, so that no product is summed"


def _of_optimizer(c: TrainConfig, blueprint: Blueprint) -> Findings:
    optimizer = c.optimizer
    name = type(optimizer).__name__
    if getattr(optimizer, "nesterov", False) and not getattr(optimizer, "momentum", True):  # Muon's is named beta
        yield f"{name}.nesterov", True, "it needs a momentum"
    if hasattr(optimizer, "storage"):
        state = blueprint.abstract_state().opt_state
        if not any(map(is_quantized, jax.tree.leaves(state, is_leaf=is_quantized))):
            yield "train.optimizer", name, "every parameter keeps 32 bits (EightBit.min_size, EightBit.keep)"
        width = optimizer.storage.width
        for name in not_default(optimizer.storage, "block_size") if width else ():
            if optimizer.storage.block_size > width:
                yield f"EightBit.{name}", optimizer.storage.block_size, f"EightBit.width = {width} makes blocks smaller"


def _decays_twice(c: TrainConfig) -> Iterator[str]:
    if not isinstance(c.optimizer, ScheduleFreeAdamW | ScheduleFreeSGD):
        return
    rate = c.schedule.make(c.lr, c.steps)
    *before, last = (float(rate(jnp.asarray(step))) for step in (*range(0, c.steps, -(-c.steps // 8)), c.steps - 1))
    if last < 0.99 * max(before):
        yield (
            f"train.schedule = {c.schedule!r} lowers the learning rate of {type(c.optimizer).__name__}, but its "
            "averaging already replaces that: set train.schedule = @Constant()"
        )


def _without_kernel(c: TrainConfig, blueprint: Blueprint) -> Iterator[str]:
    """Warn about a block size that no kernel takes, if kernels take the default size and the layout fits it."""
    storage = getattr(c.optimizer, "storage", None)
    if not isinstance(storage, EightBit) or getattr(c.optimizer, "implementation", None) is not None:
        return
    usual = dataclasses.replace(storage, block_size=EightBit.block_size, width=None)
    platforms, tiles = set[str](), []
    for info in jax.tree.leaves(blueprint.infos):
        tile, other = storage.tile(info), usual.tile(info)
        if storage.why_32bit(info) is None and tile is not None and other is not None:
            platforms |= {*without_kernel(info.shape, tile)} - {*without_kernel(info.shape, other)}
            tiles.append((info, other))
    if not platforms or not _fit(tiles, c):
        return
    names = [n for n in ("block_size", "width") if getattr(storage, n) != getattr(usual, n)]
    setting, instead = (" and ".join(f"EightBit.{n} = {getattr(s, n)}" for n in names) for s in (storage, usual))
    yield (
        f"{setting}: no kernel for {' or '.join(sorted(platforms))} takes blocks of this size, so XLA updates the "
        f"8-bit states, in several passes over memory; the nearest block size with a kernel is that of {instead}"
    )


def _untrained_routers(c: TrainConfig) -> Iterator[str]:
    layers: Sequence[Any] = getattr(c.model, "layer_mlps", list)()
    if any(getattr(x, "top_k", 0) == 1 and getattr(getattr(x, "router", None), "normalized", False) for x in layers):
        yield (
            "MixtureOfExperts.top_k = 1 with a normalized router: the weight of a token's only expert is 1, whatever "
            "its score, so that the loss does not train the router; set normalized = False (Switch), such as "
            "MixtureOfExperts.router = SoftmaxRouter(normalized=False)"
        )


def _fit(tiles: Sequence[tuple[TensorInfo, tuple[int, ...]]], c: TrainConfig) -> bool:
    try:
        if c.layout is not None:
            check_fits(tiles, c.layout)
    except LayoutError:
        return False
    return True


def _of_model(c: TrainConfig, blueprint: Blueprint) -> Findings:
    if isinstance(c.model, FindsIdle):
        yield from c.model.idle(c.seq_len, c.layout)
    modules = getattr(c.model, "multi_token", 0)
    if modules and not c.objective.trains_ahead:
        name = type(c.objective).__name__
        yield "Transformer.multi_token", modules, f"{name} trains none of its modules (train.objective = @NextTokens())"


_CHECKS: tuple[Callable[[TrainConfig, Blueprint], Findings], ...] = (
    _of_run,
    _of_streams,
    _of_layout,
    _of_optimizer,
    _of_model,
)
