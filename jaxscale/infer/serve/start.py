"""From a run to a served model and its compiled engine."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax

from jaxscale.data.chat import ChatTemplate
from jaxscale.errors import ConfigError, DataError
from jaxscale.infer.cache import Paged
from jaxscale.infer.engine import Engine
from jaxscale.infer.loaded import load_model, prompt_ids, trained_length, warn_length
from jaxscale.infer.serve.requests import Served
from jaxscale.infer.steppers import stepper_of
from jaxscale.layout import Layout
from jaxscale.models.base import vocab_of
from jaxscale.nn import WeightFormat
from jaxscale.step.texts import check_texts

if TYPE_CHECKING:
    from jaxscale.run import Run

_LOG = logging.getLogger("jaxscale.serve")
_TEMPLATE = 5.0
"""The most seconds that a chat template may take for a conversation."""


def served_by(run: Run, name: str | None = None, length: int | None = None, *, choice: bool = True) -> Served:
    """Return a run's model as the server sees it.

    Args:
      run: the run.
      name: what clients call it; by default its folder's name.
      length: the most tokens of a sequence; by default the longest that the model, or the model that its adapters
        adapt, was trained on.
      choice: whether the checkpoint's own generation config sets temperature, cuts and penalty for requests that do
        not.

    Raises:
      ConfigError: the model is not a language model.
      DataError: it came without a tokenizer, or its generation config has a number out of range.
    """
    check_texts(run.config)
    tokenizer: Any = run.tokenizer
    if length is None:
        length = trained_length(run)
    else:
        warn_length(run, length)
    template = _template(run.path / "hf")
    return Served(
        name=name or Path(run.path).resolve().name,
        tokenizer=tokenizer,
        length=length,
        vocab=vocab_of(run.config.model),
        encode=lambda text: prompt_ids(run, text).tolist(),
        chat=None if template is None else lambda messages: template.ids(messages, tokenizer).tolist(),
        end_ids=frozenset(run.end_ids),
        choice=run.choice() if choice else {},
    )


def _template(folder: Path) -> ChatTemplate | None:
    """The chat template of an imported checkpoint; a model without one serves completions only."""
    if not folder.is_dir():
        return None
    try:
        return ChatTemplate.read(folder, seconds=_TEMPLATE)
    except DataError as e:
        _LOG.warning("no /v1/chat/completions: %s", e)
        return None


def engine_of(
    run: Run,
    served: Served,
    *,
    layout: Layout | None = None,
    rows: int = 8,
    budget: int | None = None,
    pages: int | None = None,
    page: int = 16,
    draft: Run | str | None = None,
    draft_tokens: int = 4,
    stream_layers: str | None = None,
    weights: WeightFormat | None = None,
    kv_cache: str | None = None,
    ring: int | None = None,
    note: Callable[[int, int], None] = lambda done, of: None,
) -> Engine:
    """Return an engine for a run's model, with every step compiled.

    Args:
      run: the run.
      served: the model as the server sees it.
      layout: where the model lives; `None` is one device.
      rows: decode slots, see `jaxscale.infer.engine.Cached`.
      budget: the most tokens of a step, see `jaxscale.infer.engine.Cached`.
      pages: pages of the cache, see `jaxscale.infer.cache.Paged`.
      page: positions in a page, see `jaxscale.infer.cache.Paged`.
      draft: a smaller model's run or "mtp", see `jaxscale.infer.steppers.stepper_of`.
      draft_tokens: proposals of a round, see `jaxscale.infer.steppers.stepper_of`.
      stream_layers: "host" or "disk", see `jaxscale.infer.steppers.stepper_of`.
      weights: a weight format for the matrices that it supports; by default as they were trained.
      kv_cache: "int8" or "fp8", see `jaxscale.infer.cache.Paged`.
      ring: tokens of a layer with a window besides the window, see `jaxscale.infer.cache.Paged`.
      note: called before each program is compiled, see `Engine.compile`.

    Raises:
      ConfigError: sizes that do not fit together, or several processes.
      LayoutError: arrays that do not divide over their mesh axes.
      CheckpointError: a checkpoint cannot be read.
      RunError: the run has no checkpoint.
    """
    if jax.process_count() > 1:
        raise ConfigError(
            f"a server runs in one process, and there are {jax.process_count()}, of which only one would receive a "
            "request; start a server on each machine, with a layout of its own devices"
        )
    length = served.length
    loaded = None
    if stream_layers is None:
        loaded = load_model(run, layout, generation=True, length=length, weights=weights)
    more: dict[str, Any] = dict(draft=draft, draft_tokens=draft_tokens, stream_layers=stream_layers, layout=layout)
    more |= dict(weights=weights, cache=Paged(page, pages, kv_cache, ring))
    stepper = stepper_of(run, loaded, length=length, rows=rows, budget=budget, **more)
    engine = Engine(stepper, parameters=None if loaded is None else loaded.nbytes)
    engine.compile(note)
    return engine
