"""A model's log-probabilities of every row of a corpus, computed once for objectives that read them from the data."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array

from jaxscale.data import Batch, Source
from jaxscale.data.annotations import Annotated, write_annotations
from jaxscale.data.loader import filled, weighted
from jaxscale.errors import ConfigError
from jaxscale.infer.forward import replicated
from jaxscale.infer.loaded import load_model
from jaxscale.layout import Layout
from jaxscale.layout.tensors import Tree
from jaxscale.models.base import logits_of, order_of
from jaxscale.parallel import token_logprobs, top_logprobs
from jaxscale.step import TrainConfig
from jaxscale.step.objective import hidden_of
from jaxscale.step.objectives.answers import CACHED
from jaxscale.step.objectives.distill import IDS, LOGPROBS, check_same_tokens
from jaxscale.step.step import batch_sharding

if TYPE_CHECKING:
    from jaxscale.run import Run


def annotate(
    config: TrainConfig,
    by: Run,
    folder: str | Path | None = None,
    *,
    layout: Layout | None = None,
    step: int | None = None,
    rows: int = 8,
    say: Callable[[str], None] = print,
) -> str | Path:
    """Compute what a config's objective reads of another model for all rows of its data, and write it to a folder.

    For `Distill.top = K` that are the model's K most likely tokens at each position with their log-probabilities, for
    `DPO.cached` and its like the log-probability of each target. The other model has a layout of its own. A call that
    is interrupted leaves nothing, and is made again from the beginning.

    Args:
      config: the settings of the run that will read them.
      by: the run of the other model: the teacher, or the reference.
      folder: the folder to write, or its URL in a bucket; by default that of the config's `annotated` corpus.
      layout: of the other model; `None` is one device.
      step: of its checkpoint; by default the newest.
      rows: rows of a batch, rounded up to what the layout divides.
      say: receives progress, a line at a time.

    Returns:
      The folder.

    Raises:
      ConfigError: the objective reads nothing of the kind, the folder is not known, the vocabularies differ, or `rows`
        is below 1.
      DataError: the folder exists or cannot be written, or the corpus cannot be read.
    """
    corpus = config.data
    if isinstance(corpus, Annotated):
        folder, corpus = folder or corpus.folder, corpus.data
    if folder is None:
        raise ConfigError("the config's train.data is not @annotated(), so name the folder to write with --out")
    if rows < 1:
        raise ConfigError(f"rows = {rows}: a batch has at least 1 row")
    inputs = config.objective.inputs(config)
    names = [n for n in (IDS, LOGPROBS, CACHED) if n in inputs]
    if not names:
        raise ConfigError(
            f"{type(config.objective).__name__} reads nothing that another model computes; set Distill.top, or "
            "DPO.cached = True"
        )
    check_same_tokens(str(by.path), by.config, config)
    loaded = load_model(by, layout, step)
    splits = ("train", "heldout") if config.eval_batches else ("train",)
    sources = {
        split: corpus.source(config.tokenizer, seq_len=config.seq_len, split=split, packing=config.packing)
        for split in splits
    }
    for source in sources.values():
        config.objective.check_data(source, config)
    parts = 1 if loaded.layout is None else loaded.layout.split("batch")
    size = -(-rows // parts) * parts
    sharding = batch_sharding(loaded.layout, size, config.seq_len)
    top = inputs[IDS].shape[1] if IDS in names else 0

    def compute(source: Source) -> Iterator[Batch]:
        began, count = time.monotonic(), len(source)
        for first in range(0, count, size):
            ids = np.arange(first, min(first + size, count))
            batch = filled(weighted(source.rows(ids)), size)
            batch = {k: batch[k] for k in ("tokens", "targets", "segment_ids", "positions") if k in inputs}
            with loaded.in_force():
                placed = batch if sharding is None else jax.device_put(batch, dict.fromkeys(batch, sharding))
                results = _compute(loaded.graphdef, top, loaded.params, placed)
            yield {n: np.asarray(x)[: len(ids)] for n, x in zip(names, results, strict=True)}
            if (first // size) % 100 == 0 or first + size >= count:
                done = min(first + size, count)
                rate = done * config.seq_len / (time.monotonic() - began)
                say(f"{source.name}: {done:,} of {count:,} rows, {rate:,.0f} tokens/s")

    arrays = {n: (inputs[n].shape, inputs[n].dtype) for n in names}
    about: dict[str, Any] = {"run": by.info.get("id"), "path": str(by.path), "step": loaded.step}
    return write_annotations(folder, sources, arrays, compute, {"by": about})


@functools.partial(jax.jit, static_argnums=(0, 1))
def _compute(graphdef: nnx.GraphDef[Any], top: int, params: Tree, batch: dict[str, Array]) -> tuple[Array, ...]:
    """Return the `top` most likely tokens and their log-probabilities, or with 0 the targets' log-probability."""
    model: Any = nnx.merge(graphdef, params)
    hidden, _, arranged = hidden_of(model, batch)
    logits = logits_of(model, hidden)
    results: tuple[Array, ...]
    if top:
        logprobs, ids = top_logprobs(logits, top)
        results = (ids, logprobs)
    else:
        results = (token_logprobs(logits, arranged["targets"]),)
    order = order_of(model, batch["tokens"].shape[1])
    if order is not None:
        results = tuple(jnp.take(x, np.argsort(order), axis=1) for x in results)
    return tuple(map(replicated, results))
