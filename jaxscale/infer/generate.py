"""Texts from a run's model: all at once, or piece by piece as they come."""

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
from jaxscale.infer.completion import Arriving, Completion
from jaxscale.infer.engine import Cached, Engine, Request
from jaxscale.infer.loaded import load_model, prompt_ids
from jaxscale.infer.sampling import Sampling
from jaxscale.infer.steppers import stepper_of
from jaxscale.infer.streaming import Streamed
from jaxscale.infer.text import TextStream
from jaxscale.layout import Layout
from jaxscale.models.base import ExtendsContext, LimitsLength
from jaxscale.nn import Cache, WeightFormat

if TYPE_CHECKING:
    from jaxscale.run import Run

log = logging.getLogger("jaxscale")

Prompt = str | Sequence[int]
_ROOM = 256
"""A cache has this many places, or twice, four times as many: few shapes."""


class Piece(NamedTuple):
    """New text of one of several prompts.

    Args:
      prompt: its number.
      text: to be added; may be empty.
      completion: with the last piece, all of it.
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
    draft: Run | None = None,
    draft_tokens: int = 4,
    stream_layers: str | None = None,
    weights: WeightFormat | None = None,
    **fields: Any,
) -> Any:
    """Continues prompts with a run's model; also `Run.generate`.

    A text may become longer than those that the model was trained on (`train.seq_len`), which is said: rotary positions
    go on, learned ones end, and the text with them.

    Args:
      run: the run.
      prompts: a text, or token ids as they are; or several, which are computed side by side.
      sampling: how, for all or for each; or its fields by name, as `temperature=0.7, stop="\\n\\n"`.
      layout: where; `None` is the run's own while its state is in memory, else one device.
      step: of which checkpoint, by default the newest.
      rows: texts under way at once, of each of the devices that cut the batch.
      cache: how keys and values are kept, `Paged()` by default.
      draft: a run whose smaller model proposes tokens, for texts that are distributed alike and the same where greedy;
        its tokenizer must be the same.
      draft_tokens: proposals of a round.
      stream_layers: for models larger than the device's memory: layers wait in the "host"'s, or on "disk", and each
        comes while the one before computes. How many bytes were on the device at most is said.
      weights: a form in which the matrices that it covers are kept, such as a quantised one; those of a draft stay.

    Returns:
      a `Completion`, or a list of them for several prompts.

    Raises:
      ConfigError: settings out of range, or a prompt that the model cannot take.
      DataError: a text cannot be encoded, or the run has no tokenizer (ids it takes all the same).
      CheckpointError, RunError: there is no checkpoint.
      LayoutError: the model cannot be laid out.
    """
    if not isinstance(prompts, str) and not hasattr(prompts, "__len__"):
        raise ConfigError(f"prompts = {prompts!r}: give a text, token ids, or a list of them")
    one = _is_one(prompts)
    several: Sequence[Prompt] = [prompts] if one else prompts  # type: ignore[list-item, assignment]
    found: dict[int, Completion] = {}
    options: dict[str, Any] = dict(layout=layout, step=step, rows=rows, cache=cache, draft=draft)
    options |= dict(stream_layers=stream_layers, weights=weights)
    for piece in pieces(run, several, _settings(sampling, fields, len(several)), draft_tokens=draft_tokens, **options):
        if piece.completion is not None:
            found[piece.prompt] = piece.completion
    return found[0] if one else [found[i] for i in range(len(several))]


def stream(run: Run, prompt: Prompt, **options: Any) -> Iterator[str]:
    """Continues a prompt piece by piece, as the text comes; also `Run.stream`. Arguments as `generate`'s.

        for piece in run.stream("def "):
            print(piece, end="", flush=True)

    Leaving the loop ends the text.
    """
    names = {f.name for f in dataclasses.fields(Sampling)}
    fields = {n: options.pop(n) for n in list(options) if n in names}
    settings = _settings(options.pop("sampling", None), fields, 1)
    if not _is_one(prompt):
        raise ConfigError("a stream is of one prompt; use generate for several")
    for piece in pieces(run, [prompt], settings, **options):
        if piece.text:
            yield piece.text


def chat(run: Run, messages: Sequence[Any], **options: Any) -> Any:
    """What the assistant says next in a conversation; also `Run.chat`. Arguments as `generate`'s.

    Args:
      run: one whose folder has a chat template (`hf/`, of an imported or fine-tuned checkpoint).
      messages: as `[{"role": "user", "content": "Hello"}]`.

    Raises:
      DataError: there is no chat template, or it refuses these messages.
    """
    from jaxscale.data.chat import ChatTemplate

    if not len(messages):
        raise DataError('there is no message; give at least [{"role": "user", "content": "Hello"}]')
    template = ChatTemplate.read(run.path / "hf")
    return generate(run, template.ids(messages, run.tokenizer).tolist(), **options)  # type: ignore[arg-type]


def sample_text(
    run: Run, prompt: str, tokens: int = 200, *, temperature: float = 0.8, top_k: int | None = None, seed: int = 0
) -> str:
    """A prompt and its continuation; arguments as those of `Sampling`."""
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
    draft: Run | None = None,
    draft_tokens: int = 4,
    stream_layers: str | None = None,
    weights: WeightFormat | None = None,
) -> Iterator[Piece]:
    """New text of each prompt as it comes, and each one's completion at its end. Arguments as `generate`'s."""
    if not prompts:
        raise ConfigError("there is no prompt; give at least one, such as ''")
    if not isinstance(rows, int) or rows < 1:
        raise ConfigError(f"rows = {rows!r}: must be a whole number of at least 1")
    ids = [prompt_ids(run, p) for p in prompts]
    positions = _positions(run, draft)
    for prompt in ids:
        if positions is not None and len(prompt) >= positions:
            raise ConfigError(
                f"the prompt has {len(prompt)} tokens and the model {positions} learned positions, so that nothing can "
                f"follow; give at most {positions - 1}"
            )
    asked = [
        s if positions is None else dataclasses.replace(s, max_tokens=min(s.max_tokens, positions - len(i)))
        for s, i in zip(settings, ids, strict=True)
    ]
    need = max((len(i) + s.max_tokens for i, s in zip(ids, asked, strict=True)), default=1)
    rows = 1 if len(ids) == 1 else rows  # few shapes, so that little is compiled
    length = _room([r.config.model for r in (run, draft) if r is not None], need, positions)
    engine, found = None, None
    if stream_layers is None:
        found = load_model(run, layout, step, generation=True, length=length, weights=weights)
        if draft is None:
            engine = run.session.take_engine(found, functools.partial(_suits, cache=cache, rows=rows, need=need))
    if engine is None:
        more: dict[str, Any] = dict(draft=draft, draft_tokens=draft_tokens, stream_layers=stream_layers, layout=layout)
        more |= dict(step=step, weights=weights)
        engine = Engine(stepper_of(run, found, length=length, rows=rows, cache=cache, **more))
    tokenizer = _tokenizer(run, prompts, settings)
    show = lambda prompt, s: None if tokenizer is None else TextStream(tokenizer, s.stop, prompt.tolist())  # noqa: E731
    texts = [Arriving(prompt, s, show(prompt, s), run.end_ids) for prompt, s in zip(ids, asked, strict=True)]
    names = [object() for _ in texts]  # an engine is kept, and may have been left with others' requests
    number = {name: i for i, name in enumerate(names)}
    sound = False
    try:
        for i, text in enumerate(texts):
            engine.submit(Request(tuple(text.prompt.tolist()), text.sampling, names[i]))
        while any(t.completion is None for t in texts):
            for event in engine.step():
                i = number.get(event.id, -1)
                if i < 0 or texts[i].completion is not None:
                    continue
                new = texts[i].take(event)
                done = texts[i].completion
                if done is not None:
                    if event.finished is None:
                        engine.cancel(event.id)
                    _say_length(run, done, asked[i], settings[i], positions)
                    share = None if draft is None else engine.stats.acceptance
                    done = dataclasses.replace(done, acceptance=share)
                yield Piece(i, new, done)
        sound = True
    except GeneratorExit:  # left between two steps
        sound = True
        raise
    finally:
        if sound:
            for i, text in enumerate(texts):
                if text.completion is None:
                    engine.cancel(names[i])
            if found is not None and draft is None and run.state is None:  # training would change the state
                run.session.keep_engine(found, engine)
        if isinstance(engine.stepper, Streamed):
            _say_resident(engine.stepper)


def _is_one(prompts: Any) -> bool:
    """A text or ids, and not several."""
    return isinstance(prompts, str) or (len(prompts) > 0 and not hasattr(prompts[0], "__len__"))


def _settings(sampling: Any, fields: dict[str, Any], n: int) -> list[Sampling]:
    known = [f.name for f in dataclasses.fields(Sampling)]
    for name in fields:
        if name not in known:
            raise ConfigError(f"there is no setting '{name}' of generation{near(name, known)}")
    if sampling is None:
        return [Sampling(**fields)] * n
    if isinstance(sampling, Sampling):
        return [dataclasses.replace(sampling, **fields)] * n
    if len(sampling) != n:
        raise ConfigError(f"there are {len(sampling)} samplings for {n} prompts; give one, or one for each")
    return [dataclasses.replace(s, **fields) for s in sampling]


def _tokenizer(run: Run, prompts: Sequence[Prompt], settings: Sequence[Sampling]) -> Tokenizer | None:
    """What makes text of tokens; ids go on without."""
    try:
        return run.session.tokenizer
    except DataError:
        if any(isinstance(p, str) for p in prompts) or any(s.stop for s in settings):
            raise
        return None


def _positions(run: Run, draft: Run | None) -> int | None:
    """The learned positions of the models, if they have any."""
    models = [r.config.model for r in (run, draft) if r is not None]
    limits = [m.max_length for m in models if isinstance(m, LimitsLength)]
    return min((n for n in limits if n is not None), default=None)


def _say_length(run: Run, done: Completion, room: Sampling, asked: Sampling, positions: int | None) -> None:
    """What became of a text that is longer than those that the model knows."""
    n, trained = done.prompt_tokens + len(done.ids), run.config.seq_len
    if done.finished == "length" and room.max_tokens < asked.max_tokens:
        log.warning(
            "the text ends after %d of %d new tokens: the model has %d learned positions",
            len(done.ids), asked.max_tokens, positions,
        )  # fmt: skip
    if n > trained:
        log.warning(
            "the text has %d tokens, and the model was trained on texts of %d (train.seq_len): the rest is untried",
            n, trained,
        )  # fmt: skip


def _room(models: Sequence[Any], need: int, positions: int | None) -> int:
    """Places for a text of `need` tokens: more, so that many lengths are one, but not other positions."""
    room = _ROOM * 2 ** max(0, math.ceil(math.log2(need / _ROOM)))
    room = room if positions is None else min(room, positions)
    return min((_alike(m, need, room) for m in models), default=room)


def _alike(model: Any, need: int, room: int) -> int:
    """At most `room`, where texts of that many tokens have the positions of those of `need`."""
    if not isinstance(model, ExtendsContext) or model.for_texts_of(need) != model:
        return room
    return need + bisect.bisect_left(range(need + 1, room + 1), True, key=lambda n: model.for_texts_of(n) != model)


def _say_resident(stepper: Streamed) -> None:
    """How much of the model was on the device, which has it no more."""
    there = stepper.resident
    stepper.layers.close()
    log.warning(
        "layers were streamed: at most %.1f of %.1f MiB of parameters were on the device at once",
        there.peak / 2**20, there.whole / 2**20,
    )  # fmt: skip


def _suits(engine: Engine, cache: Cache | None, rows: int, need: int) -> bool:
    """Whether an engine of an earlier call has room for these texts; one without a cache has nothing to keep."""
    stepper = engine.stepper
    wanted = Paged() if cache is None else cache
    return (
        isinstance(stepper, Cached)
        and stepper.cache == wanted
        and stepper.pages.rows >= rows
        and stepper.length >= need
    )
