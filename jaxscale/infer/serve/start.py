"""From a run's folder to an engine that has compiled what it needs."""

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
from jaxscale.infer.loaded import load_model, prompt_ids, say_length, trained_length
from jaxscale.infer.serve.asked import Served
from jaxscale.infer.steppers import stepper_of
from jaxscale.layout import Layout
from jaxscale.models.base import vocab_of
from jaxscale.nn import WeightFormat
from jaxscale.step.texts import check_texts

if TYPE_CHECKING:
    from jaxscale.run import Run

_LOG = logging.getLogger("jaxscale.serve")
_TEMPLATE = 5.0
"""Seconds that a chat template may take for a conversation."""


def served_by(run: Run, name: str | None = None, length: int | None = None, *, choice: bool = True) -> Served:
    """A run's model as clients know it.

    Args:
      run: the run.
      name: what clients call it; by default its folder's name.
      length: tokens that a text may have; by default what the model was trained on, before adapters were.
      choice: a request that says nothing of temperature, cuts or penalty gets those that the checkpoint came with.

    Raises:
      ConfigError: the model is none of texts.
      DataError: it came without a tokenizer, or its generation config has a number out of its range.
    """
    check_texts(run.config)
    tokenizer: Any = run.tokenizer
    if length is None:
        length = trained_length(run)
    else:
        say_length(run, length)
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
    """That of a folder as it came; a model without one was not made to converse, and may serve all the same."""
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
    draft: Run | None = None,
    draft_tokens: int = 4,
    stream_layers: str | None = None,
    weights: WeightFormat | None = None,
    note: Callable[[int, int], None] = lambda done, of: None,
) -> Engine:
    """An engine for a run's model, every step of which is compiled.

    Args:
      run, served: the model.
      layout: where it lives.
      rows, budget: see `jaxscale.infer.engine.Cached`.
      pages, page: see `Paged`.
      draft, draft_tokens, stream_layers: see `jaxscale.infer.steppers.stepper_of`.
      weights: a form in which the matrices that it covers are kept; by default as they were trained.
      note: see `Engine.compile`.

    Raises:
      ConfigError, LayoutError: sizes that do not fit, or several processes.
      CheckpointError, RunError: there are no parameters.
    """
    if jax.process_count() > 1:
        raise ConfigError(
            f"a server runs in one process, and there are {jax.process_count()}, of which one alone would hear of a "
            "request; start one on each machine, with a layout of its own devices"
        )
    length = served.length
    found = None
    if stream_layers is None:
        found = load_model(run, layout, generation=True, length=length, weights=weights)
    more: dict[str, Any] = dict(draft=draft, draft_tokens=draft_tokens, stream_layers=stream_layers, layout=layout)
    more["weights"] = weights
    engine = Engine(stepper_of(run, found, length=length, rows=rows, budget=budget, cache=Paged(page, pages), **more))
    engine.compile(note)
    return engine
