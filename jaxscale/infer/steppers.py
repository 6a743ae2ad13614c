"""What takes an engine's steps for a run: with a cache, with a draft, over streamed layers, or whole texts."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from jaxscale.errors import ConfigError
from jaxscale.infer.cache import Paged
from jaxscale.infer.engine import Cached, Stepper
from jaxscale.infer.loaded import Loaded, load_model
from jaxscale.infer.speculative import WithDraft
from jaxscale.infer.streaming import Streamed, stream_model
from jaxscale.infer.whole import WholeTexts, keeps_nothing
from jaxscale.layout import Layout
from jaxscale.nn import Cache, WeightFormat

if TYPE_CHECKING:
    from jaxscale.run import Run

log = logging.getLogger("jaxscale")


def stepper_of(
    run: Run,
    found: Loaded | None,
    *,
    length: int,
    rows: int = 8,
    budget: int | None = None,
    cache: Cache | None = None,
    draft: Run | None = None,
    draft_tokens: int = 4,
    stream_layers: str | None = None,
    layout: Layout | None = None,
    step: int | None = None,
    weights: WeightFormat | None = None,
) -> Stepper:
    """What takes the steps of an engine for a run's model.

    Args:
      run: the run.
      found: its model where it runs (`load_model`); `None` with `stream_layers`.
      length: the most tokens of a text, prompt and continuation.
      rows, budget: see `Cached`.
      cache: how keys and values are kept; by default `Paged()`.
      draft: a smaller model that proposes tokens, and `draft_tokens` how many in a round (see `WithDraft`).
      stream_layers: "host" or "disk", from where layers come to the device one by one; `layout`, `step` and `weights`
        are then where to, of which checkpoint and in which form (see `stream_model`).

    Raises:
      ConfigError, LayoutError: what does not go together, or does not fit.
      CheckpointError, RunError: there are no parameters.
    """
    common: dict[str, Any] = dict(rows=rows, length=length, end_ids=run.end_ids)
    cached = dict(common, cache=Paged() if cache is None else cache, budget=budget)
    if stream_layers is not None:
        if draft is not None:
            raise ConfigError("a draft and stream_layers do not go together; leave out one of them")
        graphdef, layers = stream_model(run, stream_layers, layout, step, length, weights)
        return Streamed(graphdef, layers, layout=layout, **cached)
    assert found is not None
    if draft is not None:
        _check_same_ids(run, draft)
        small = load_model(draft, found.layout, generation=True, length=length)
        if small.layout != found.layout:
            raise ConfigError(
                f"the draft is in memory on {small.layout}, and {run.path} is on one device; give a layout"
            )
        return WithDraft(found, small, draft_tokens=draft_tokens, **common)
    why = keeps_nothing(found)
    if why is not None:
        log.warning("%s: every token takes the whole text again", why)
        return WholeTexts(found.graphdef, found.params, layout=found.layout, **common)
    return Cached(found.graphdef, found.params, layout=found.layout, **cached)


def _check_same_ids(run: Run, draft: Run) -> None:
    own, other = run.tokenizer, draft.tokenizer
    if own.fingerprint != other.fingerprint:
        raise ConfigError(
            f"the draft {draft.path} has the tokenizer '{other.name}' ({other.vocab_size} ids) and {run.path} has "
            f"'{own.name}' ({own.vocab_size} ids); a draft must have the same tokenizer"
        )
