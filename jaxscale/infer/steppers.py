"""Choosing an engine's stepper for a run: with a cache, with a draft, with streamed layers, or without a cache."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from jaxscale.errors import ConfigError
from jaxscale.infer.cache import Paged
from jaxscale.infer.engine import Cached, Stepper
from jaxscale.infer.loaded import Loaded, load_model
from jaxscale.infer.speculative import WithDraft
from jaxscale.infer.streaming import Streamed, stream_model
from jaxscale.infer.whole import WholeSequences, why_no_cache
from jaxscale.layout import Layout
from jaxscale.nn import Cache, WeightFormat

if TYPE_CHECKING:
    from jaxscale.run import Run

MTP = "mtp"
"""As a draft: the model's own modules of multi-token prediction."""

log = logging.getLogger("jaxscale")


def stepper_of(
    run: Run,
    loaded: Loaded | None,
    *,
    length: int,
    rows: int = 8,
    budget: int | None = None,
    cache: Cache | None = None,
    draft: Run | str | None = None,
    draft_tokens: int = 4,
    stream_layers: str | None = None,
    layout: Layout | None = None,
    step: int | None = None,
    weights: WeightFormat | None = None,
) -> Stepper:
    """Return what computes the steps of an engine for a run's model.

    Args:
      run: the run.
      loaded: its model from `load_model`; `None` with `stream_layers`.
      length: the most tokens of a sequence, prompt included.
      rows: decode slots, as in `Cached`.
      budget: as in `Cached`.
      cache: the kind of KV cache; `Paged()` by default.
      draft: the run of a smaller model that proposes tokens, or "mtp": the model's own modules of multi-token
        prediction do (see `WithDraft`).
      draft_tokens: how many tokens the draft proposes in a round.
      stream_layers: "host" or "disk": where layers wait, to be brought to the device one by one (see `stream_model`).
      layout: with `stream_layers`: where layers are computed.
      step: with `stream_layers`: the checkpoint's step.
      weights: with `stream_layers`: the format of the weights.

    Raises:
      ConfigError: options that exclude each other, or sizes that do not fit together.
      LayoutError: arrays that do not divide over their mesh axes.
      CheckpointError: there is no such checkpoint.
      RunError: the run has no checkpoint.
    """
    few = getattr(cache, "numbers", None)
    if few is not None and draft is not None:
        raise ConfigError(f"a draft needs keys and values in the type of the computation; leave out {few} or the draft")
    ring = getattr(cache, "ring", None)
    common: dict[str, Any] = dict(rows=rows, length=length, end_ids=run.end_ids)
    cached = dict(common, cache=Paged() if cache is None else cache, budget=budget)
    if stream_layers is not None:
        if draft is not None:
            raise ConfigError("draft and stream_layers cannot be combined; leave out one of them")
        graphdef, layers = stream_model(run, stream_layers, layout, step, length, weights)
        return Streamed(graphdef, layers, layout=layout, **cached)
    assert loaded is not None
    if draft is not None:
        if isinstance(draft, str):
            if draft != MTP:
                raise ConfigError(f"draft = {draft!r}: must be a run, or {MTP!r} for the model's own modules")
            return WithDraft(loaded, None, draft_tokens=draft_tokens, ring=ring, **common)
        _check_same_tokenizer(run, draft)
        small = load_model(draft, loaded.layout, generation=True, length=length)
        if small.layout != loaded.layout:
            raise ConfigError(
                f"the draft is in memory on {small.layout}, and {run.place} is on one device; pass a layout"
            )
        return WithDraft(loaded, small, draft_tokens=draft_tokens, ring=ring, **common)
    why = why_no_cache(loaded)
    if why is not None:
        if few is not None:
            raise ConfigError(f"keys and values are not stored at all, so not as {few} either; leave it out: {why}")
        log.warning("each token recomputes the whole sequence (slow): %s", why)
        return WholeSequences(loaded.graphdef, loaded.params, layout=loaded.layout, **common)
    return Cached(loaded.graphdef, loaded.params, layout=loaded.layout, **cached)


def _check_same_tokenizer(run: Run, draft: Run) -> None:
    own, other = run.tokenizer, draft.tokenizer
    if own.fingerprint != other.fingerprint:
        raise ConfigError(
            f"the draft {draft.place} has the tokenizer '{other.name}' ({other.vocab_size} ids) and {run.place} has "
            f"'{own.name}' ({own.vocab_size} ids); a draft must have the same tokenizer"
        )
