"""Generation from a run's model: completions of prompts, whole or as a stream."""

from __future__ import annotations

import bisect
import dataclasses
import functools
import logging
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from jaxscale.data import Tokenizer
from jaxscale.errors import ConfigError, DataError, near
from jaxscale.infer.cache import Paged
from jaxscale.infer.completion import Completion, PendingCompletion
from jaxscale.infer.engine import Cached, Engine, Request
from jaxscale.infer.loaded import load_model, prompt_ids
from jaxscale.infer.sampling import Sampling
from jaxscale.infer.steppers import stepper_of
from jaxscale.infer.streaming import Streamed
from jaxscale.infer.text import TextStream
from jaxscale.layout import Layout
from jaxscale.models.base import ExtendsContext, LimitsLength, ModelConfig
from jaxscale.nn import Cache, WeightFormat

if TYPE_CHECKING:
    from jaxscale.run import Run

log = logging.getLogger("jaxscale")

Prompt = str | Sequence[int]
_LENGTH = 256
"""Caches are made for this many tokens times a power of two, so that few programs are compiled."""


class Piece(NamedTuple):
    """New text of one of several prompts.

    Args:
      prompt: the prompt's index.
      text: to be appended; may be empty.
      completion: the whole completion, with the last piece.
    """

    prompt: int
    text: str
    completion: Completion | None = None


def generate(
    run: Run,
    prompts: Prompt | Sequence[Prompt],
    *,
    sampling: Sampling | Sequence[Sampling] | None = None,
    layout: Layout | None = None,
    step: int | None = None,
    rows: int = 8,
    cache: Cache | None = None,
    draft: Run | str | None = None,
    draft_tokens: int = 4,
    stream_layers: str | None = None,
    weights: WeightFormat | None = None,
    **fields: Any,
) -> Any:
    """Complete prompts with a run's model; also `Run.generate`.

    A sequence may become longer than those that the model was trained on (`train.seq_len`), with a warning: rotary
    positions are extrapolated, and at the end of learned positions the sequence ends.

    Args:
      run: the run.
      prompts: a text or token ids; or a list of them, which are generated together.
      sampling: settings for all prompts, or a list with one for each.
      layout: where to compute; `None` is the run's own layout while its state is in memory, else one device.
      step: the checkpoint's step; the newest by default.
      rows: decode slots: sequences that may run at once on each of the devices that shard the batch.
      cache: the kind of KV cache; `Paged()` by default.
      draft: the run of a smaller model with the same tokenizer that proposes tokens (speculative decoding), or "mtp"
        for the model's own modules of multi-token prediction; the output is distributed alike, and identical for
        greedy decoding.
      draft_tokens: how many tokens the draft proposes in a round.
      stream_layers: for models larger than the device's memory: layers wait in memory of the "host" or on "disk", and
        each is loaded while the one before computes. A warning tells the most bytes that were on the device.
      weights: a weight format for the matrices that it supports, such as a quantised one; not for those of a draft.
      **fields: fields of `Sampling`, as `temperature=0.7, stop="END"`; they replace those of `sampling`.

    Returns:
      a `Completion`, or a list of them for a list of prompts.

    Raises:
      ConfigError: a setting out of range, or a prompt that the model cannot continue.
      DataError: a text cannot be encoded, or the run has no tokenizer for a text or stop strings.
      CheckpointError: there is no such checkpoint.
      RunError: the run has no checkpoint.
      LayoutError: the model does not fit the layout.
    """
    if not isinstance(prompts, str) and not hasattr(prompts, "__len__"):
        raise ConfigError(f"prompts = {prompts!r}: must be a text, token ids, or a list of them")
    one = _is_one(prompts)
    several: Sequence[Prompt] = [prompts] if one else prompts  # type: ignore[list-item, assignment]
    completions: dict[int, Completion] = {}
    options: dict[str, Any] = dict(layout=layout, step=step, rows=rows, cache=cache, draft=draft)
    options |= dict(stream_layers=stream_layers, weights=weights)
    for piece in pieces(run, several, _settings(sampling, fields, len(several)), draft_tokens=draft_tokens, **options):
        if piece.completion is not None:
            completions[piece.prompt] = piece.completion
    return completions[0] if one else [completions[i] for i in range(len(several))]


def stream(run: Run, prompt: Prompt, **options: Any) -> Iterator[str]:
    """Yield the completion of a prompt piece by piece, as it is generated; also `Run.stream`.

        for piece in run.stream("def "):
            print(piece, end="", flush=True)

    Leaving the loop ends generation.

    Args:
      run: the run.
      prompt: a text or token ids.
      **options: as for `generate`.

    Yields:
      new text.

    Raises:
      ConfigError: several prompts, and as for `generate`.
    """
    names = {f.name for f in dataclasses.fields(Sampling)}
    fields = {n: options.pop(n) for n in list(options) if n in names}
    settings = _settings(options.pop("sampling", None), fields, 1)
    if not _is_one(prompt):
        raise ConfigError("stream takes one prompt; use generate for several")
    for piece in pieces(run, [prompt], settings, **options):
        if piece.text:
            yield piece.text


def chat(run: Run, messages: Sequence[Any], **options: Any) -> Completion:
    """Complete a conversation with the assistant's next message; also `Run.chat`.

    Args:
      run: a run whose folder has a chat template (`hf/`, of an imported or fine-tuned checkpoint).
      messages: the conversation, as `[{"role": "user", "content": "Hello"}]`.
      **options: as for `generate`.

    Returns:
      a `Completion`.

    Raises:
      DataError: there is no chat template, or it refuses these messages.
    """
    from jaxscale.data.chat import ChatTemplate

    if not len(messages):
        raise DataError('messages is empty; pass at least [{"role": "user", "content": "Hello"}]')
    template = ChatTemplate.read(run.path / "hf")
    return generate(run, template.ids(messages, run.tokenizer).tolist(), **options)  # type: ignore[arg-type]


def sample_text(
    run: Run, prompt: str, tokens: int = 200, *, temperature: float = 0.8, top_k: int | None = None, seed: int = 0
) -> str:
    """Return a prompt and its completion, as one text; also `Run.sample`.

    Args:
      run: the run.
      prompt: a text.
      tokens: the most new tokens.
      temperature: as in `Sampling`.
      top_k: as in `Sampling`.
      seed: as in `Sampling`.
    """
    s = Sampling(max_tokens=tokens, temperature=temperature, top_k=top_k, seed=seed)
    return prompt + generate(run, prompt, sampling=s).text


def pieces(
    run: Run,
    prompts: Sequence[Prompt],
    settings: Sequence[Sampling],
    *,
    layout: Layout | None = None,
    step: int | None = None,
    rows: int = 8,
    cache: Cache | None = None,
    draft: Run | str | None = None,
    draft_tokens: int = 4,
    stream_layers: str | None = None,
    weights: WeightFormat | None = None,
) -> Iterator[Piece]:
    """Yield new text of each prompt as it is generated, and each one's completion at its end.

    Args:
      run: the run.
      prompts: texts or token ids.
      settings: sampling settings of each.
      layout: as for `generate`, like all that follow.
      step: likewise.
      rows: likewise.
      cache: likewise.
      draft: likewise.
      draft_tokens: likewise.
      stream_layers: likewise.
      weights: likewise.
    """
    if not prompts:
        raise ConfigError("there is no prompt; pass at least one, such as ''")
    if not isinstance(rows, int) or rows < 1:
        raise ConfigError(f"rows = {rows!r}: must be a whole number of at least 1")
    ids = [prompt_ids(run, p) for p in prompts]
    positions = _positions(run, draft)
    for prompt in ids:
        if positions is not None and len(prompt) >= positions:
            raise ConfigError(
                f"the prompt has {len(prompt)} tokens and the model {positions} learned positions, which leaves none "
                f"for a new token; use at most {positions - 1} tokens"
            )
    limited = [
        s if positions is None else dataclasses.replace(s, max_tokens=min(s.max_tokens, positions - len(i)))
        for s, i in zip(settings, ids, strict=True)
    ]
    need = max((len(i) + s.max_tokens for i, s in zip(ids, limited, strict=True)), default=1)
    rows = 1 if len(ids) == 1 else rows  # few different sizes, so that few programs are compiled
    length = _cache_length(_models(run, draft), need, positions)
    engine, loaded = None, None
    if stream_layers is None:
        loaded = load_model(run, layout, step, generation=True, length=length, weights=weights)
        if draft is None:
            engine = run.session.take_engine(loaded, functools.partial(_suits, cache=cache, rows=rows, need=need))
    if engine is None:
        more: dict[str, Any] = dict(draft=draft, draft_tokens=draft_tokens, stream_layers=stream_layers, layout=layout)
        more |= dict(step=step, weights=weights)
        engine = Engine(stepper_of(run, loaded, length=length, rows=rows, cache=cache, **more))
    tokenizer = _tokenizer(run, prompts, settings)
    pending = []
    for prompt, s in zip(ids, limited, strict=True):
        text = None if tokenizer is None else TextStream(tokenizer, s.stop, prompt.tolist())
        pending.append(PendingCompletion(prompt, s, text, run.end_ids))
    names = [object() for _ in pending]  # unique: a reused engine may have requests of an abandoned stream
    number = {name: i for i, name in enumerate(names)}
    intact = False
    try:
        for i, one in enumerate(pending):
            engine.submit(Request(tuple(one.prompt.tolist()), one.sampling, names[i]))
        while any(p.completion is None for p in pending):
            for event in engine.step():
                i = number.get(event.id, -1)
                if i < 0 or pending[i].completion is not None:
                    continue
                new = pending[i].add(event)
                done = pending[i].completion
                if done is not None:
                    if event.finished is None:
                        engine.cancel(event.id)
                    _warn_length(run, done, limited[i], settings[i], positions)
                    acceptance = None if draft is None else engine.stats.acceptance
                    done = dataclasses.replace(done, acceptance=acceptance)
                yield Piece(i, new, done)
        intact = True
    except GeneratorExit:  # abandoned between two steps
        intact = True
        raise
    finally:
        if intact:
            for i, one in enumerate(pending):
                if one.completion is None:
                    engine.cancel(names[i])
            if loaded is not None and draft is None:
                run.session.keep_engine(loaded, engine)
        if isinstance(engine.stepper, Streamed):
            _warn_resident(engine.stepper)


def _is_one(prompts: Prompt | Sequence[Prompt]) -> bool:
    """Whether it is a single prompt, a text or ids."""
    return isinstance(prompts, str) or (len(prompts) > 0 and not hasattr(prompts[0], "__len__"))


def _settings(sampling: Sampling | Sequence[Sampling] | None, fields: dict[str, Any], n: int) -> list[Sampling]:
    known = [f.name for f in dataclasses.fields(Sampling)]
    for name in fields:
        if name not in known:
            raise ConfigError(f"generation has no setting '{name}'{near(name, known)}")
    if sampling is None:
        return [Sampling(**fields)] * n
    if isinstance(sampling, Sampling):
        return [dataclasses.replace(sampling, **fields)] * n
    if len(sampling) != n:
        raise ConfigError(f"there are {len(sampling)} samplings for {n} prompts; pass one, or one for each")
    return [dataclasses.replace(s, **fields) for s in sampling]


def _tokenizer(run: Run, prompts: Sequence[Prompt], settings: Sequence[Sampling]) -> Tokenizer | None:
    """The run's tokenizer; `None` if it has none and only ids are needed."""
    try:
        return run.session.tokenizer
    except DataError:
        if any(isinstance(p, str) for p in prompts) or any(s.stop for s in settings):
            raise
        return None


def _positions(run: Run, draft: Run | str | None) -> int | None:
    """The number of learned positions of the models, if they have any."""
    limits = [m.max_length for m in _models(run, draft) if isinstance(m, LimitsLength)]
    return min((n for n in limits if n is not None), default=None)


def _models(run: Run, draft: Run | str | None) -> list[ModelConfig]:
    """The configs of the model and of a draft of its own."""
    return [run.config.model, *([] if draft is None or isinstance(draft, str) else [draft.config.model])]


def _warn_length(run: Run, done: Completion, limited: Sampling, settings: Sampling, positions: int | None) -> None:
    """Warn about a sequence that is longer than those that the model was trained on, or that its positions end."""
    n, trained = done.prompt_tokens + len(done.ids), run.config.seq_len
    if done.finished == "length" and limited.max_tokens < settings.max_tokens:
        log.warning(
            "the sequence ends after %d of %d new tokens: the model has %d learned positions",
            len(done.ids), settings.max_tokens, positions,
        )  # fmt: skip
    if n > trained:
        log.warning(
            "the sequence has %d tokens, and the model was trained on sequences of %d (train.seq_len); quality beyond "
            "that is unknown",
            n, trained,
        )  # fmt: skip


def _cache_length(models: Sequence[Any], need: int, positions: int | None) -> int:
    """A length of the cache: at least `need`, rounded up as far as positions of `need` tokens stay the same."""
    length = _LENGTH * 2 ** max(0, math.ceil(math.log2(need / _LENGTH)))
    length = length if positions is None else min(length, positions)
    return min((_same_positions(m, need, length) for m in models), default=length)


def _same_positions(model: ModelConfig, need: int, length: int) -> int:
    """The largest length up to `length` with the position encoding of `need` tokens."""
    if not isinstance(model, ExtendsContext) or model.for_length(need) != model:
        return length
    return need + bisect.bisect_left(range(need + 1, length + 1), True, key=lambda n: model.for_length(n) != model)


def _warn_resident(stepper: Streamed) -> None:
    """Delete the layers on the device, and report how many bytes were there."""
    resident = stepper.resident
    stepper.layers.close()
    log.warning(
        "layers were streamed: at most %.1f of %.1f MiB of parameters were on the device at once",
        resident.peak / 2**20, resident.whole / 2**20,
    )  # fmt: skip


def _suits(engine: Engine, cache: Cache | None, rows: int, need: int) -> bool:
    """Whether an earlier call's engine can serve this call; only engines with a cache are reused."""
    stepper = engine.stepper
    return (
        isinstance(stepper, Cached)
        and stepper.cache == (Paged() if cache is None else cache)
        and stepper.pages.slots >= rows
        and stepper.length >= need
    )
