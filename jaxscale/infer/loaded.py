"""A run's model, ready to be asked, and the ids of what it is asked."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from flax import nnx
from jaxtyping import Int

from jaxscale.errors import ConfigError, RunError
from jaxscale.infer.cache import generating
from jaxscale.infer.stages import on_stages
from jaxscale.layout import Layout
from jaxscale.models.base import DropsTokens, ExtendsContext, vocab_of
from jaxscale.nn import WeightFormat
from jaxscale.step.state import describe_model
from jaxscale.step.texts import check_texts, checked

if TYPE_CHECKING:
    from jaxscale.run import Run

log = logging.getLogger("jaxscale")


class Loaded(NamedTuple):
    """A model where it shall run.

    Args:
      graphdef, params: the model.
      layout: where the parameters are; `None` is one device.
      step: of the checkpoint, or of the state in memory.
    """

    graphdef: nnx.GraphDef[Any]
    params: Any
    layout: Layout | None
    step: int

    def in_force(self) -> Any:
        """A context in which its layout is in force."""
        return self.layout if self.layout is not None else contextlib.nullcontext()


def load_model(
    run: Run,
    layout: Layout | None = None,
    step: int | None = None,
    *,
    generation: bool = False,
    length: int | None = None,
    weights: WeightFormat | None = None,
) -> Loaded:
    """A run's model on a layout; what was read from disk last is kept (`Run.session`).

    Args:
      run: the run.
      layout: where; `None` is the run's own layout while its state is in memory, else one device.
      step: of which checkpoint; by default the live parameters, or those of the newest.
      generation: ready for steps of few tokens: layers on their pipeline stages, and experts that drop no token, since
        a text would depend on what else is in a step.
      length: how long texts may become, for positions that go by it.
      weights: a form in which the matrices that it covers are kept; by default as they were trained.

    Raises:
      CheckpointError, RunError: there is none.
      LayoutError: it cannot be laid out.
    """
    check_texts(run.config)
    live = run.state is not None and step is None
    if live and layout is None:
        layout = run.config.layout
    model = dropless(run.config.model) if generation else run.config.model
    graphdef, infos = describe_model(for_texts_of(model, length))

    def ready(params: Any) -> Any:
        arrays = infos
        if weights is not None:
            params, arrays = weights.encoded(params, infos, layout), weights.infos(infos)
        return on_stages(graphdef, params, arrays, generating(layout)) if generation else params

    if live:
        assert run.state is not None
        return Loaded(graphdef, ready(run.params(layout=layout)), layout, int(run.state.step))
    number = run.last_step() if step is None else step
    params = run.session.params(number, layout, generation, weights, lambda: ready(run.params(step, layout=layout)))
    return Loaded(graphdef, params, layout, number)


def for_texts_of(model: Any, length: int | None) -> Any:
    """A model for texts that may reach `length`, whose positions may be others than for short ones; this is said."""
    if length is None or not isinstance(model, ExtendsContext):
        return model
    told = model.for_texts_of(length)
    if told != model:
        log.warning(
            "texts may reach %d tokens here: positions are turned as the model's long texts are, in all", length
        )
    return told


def say_length(run: Run, length: int) -> None:
    """That texts may be longer than those which the model was trained on."""
    if length > trained_length(run):
        log.warning(
            "texts may have %d tokens, and the model was trained on texts of %d (train.seq_len): the rest is untried",
            length, trained_length(run),
        )  # fmt: skip


def trained_length(run: Run) -> int:
    """Tokens of the longest texts that a model was trained on: its own, or those of the run that its adapters adapt."""
    longest = run.config.seq_len
    if run.config.adapters is not None and run.config.start is not None:
        try:
            longest = max(longest, trained_length(run.config.start.run))
        except RunError:  # its folder is gone; the adapters alone say less
            return longest
    return longest


def dropless(model: Any) -> Any:
    """A model whose experts have room for all tokens, where their router can do without a capacity; this is said."""
    if not isinstance(model, DropsTokens) or (free := model.dropless()) == model:
        return model
    log.warning("experts drop no tokens in generation; in training they may have (MixtureOfExperts.capacity)")
    return free


def prompt_ids(run: Run, prompt: str | Sequence[int]) -> Int[np.ndarray, " n"]:
    """The ids that a prompt starts from: what opens a text, and its own; ids are taken as they are.

    Raises:
      ConfigError: the model does not know one of them, or there is none.
      DataError: the text cannot be encoded.
    """
    if isinstance(prompt, str):
        return np.asarray(run.prompt_ids(prompt), np.int32)
    ids = np.asarray(prompt)
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        raise ConfigError(f"a prompt is a text or a list of token ids, not {prompt!r}")
    return checked(ids.astype(np.int32), vocab_of(run.config.model))


def scored_ids(run: Run, text: str) -> Int[np.ndarray, " n"]:
    """A prompt's ids behind something: where nothing opens a text, the id that ends one does, so that each counts."""
    ids = prompt_ids(run, text)
    opened = len(ids) > len(run.tokenizer.encode(text))
    return ids if opened else np.concatenate([[run.end_ids[0]], ids]).astype(np.int32)
