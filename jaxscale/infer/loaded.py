"""A run's model loaded for inference, and the token ids of prompts."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np
from flax import nnx
from jaxtyping import Int

from jaxscale.errors import ConfigError, LayoutError, RunError
from jaxscale.infer.cache import generating
from jaxscale.infer.stages import on_stages
from jaxscale.layout import Layout
from jaxscale.layout.tensors import Tree
from jaxscale.models import ModelConfig
from jaxscale.models.base import CutsSequences, DropsTokens, ExtendsContext, SendsToExperts, vocab_of
from jaxscale.nn import WeightFormat
from jaxscale.step.state import describe_model
from jaxscale.step.texts import check_texts, checked

if TYPE_CHECKING:
    from jaxscale.run import Run
    from jaxscale.train.run import RunFolder

log = logging.getLogger("jaxscale")


class Loaded(NamedTuple):
    """A model on the devices where it runs.

    Args:
      graphdef: the model's graph definition.
      params: its parameters.
      layout: how they are sharded; `None` is one device.
      step: of the checkpoint, or of the state in memory.
    """

    graphdef: nnx.GraphDef[Any]
    params: Any
    layout: Layout | None
    step: int

    @property
    def nbytes(self) -> int:
        """Bytes of the parameters in their format; copies on several devices count once."""
        return sum(x.nbytes for x in jax.tree.leaves(self.params))

    def in_force(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context in which its layout is in force."""
        return self.layout if self.layout is not None else contextlib.nullcontext()


def load_model(
    run: Run,
    layout: Layout | None = None,
    step: int | None = None,
    *,
    generation: bool = False,
    length: int | None = None,
    weights: WeightFormat | None = None,
    text: bool = True,
) -> Loaded:
    """Load a run's model onto a layout; the parameters that were read last are reused (`Run.session`).

    Args:
      run: the run.
      layout: where to put it; `None` is the run's own layout while its state is in memory, else one device.
      step: the checkpoint's step; by default the parameters in memory, else the newest checkpoint.
      generation: prepare for steps of few tokens: layers on their pipeline stages, and experts that drop no token,
        since a sequence would depend on others in the step.
      length: the most tokens of a sequence, for position encodings that depend on it.
      weights: a weight format for the matrices that it supports; by default as they were trained.
      text: check that the model can continue text.

    Raises:
      CheckpointError: there is no such checkpoint.
      RunError: the run has no checkpoint.
      LayoutError: the model does not fit the layout.
    """
    if text:
        check_texts(run.config)
    live = run.state is not None and step is None
    if live and layout is None:
        layout = run.config.layout
    model = dropless(run.config.model) if generation else on_any_mesh(run.config.model)
    graphdef, infos = describe_model(for_length(model, length))
    part = None
    if weights is not None and run.config.stored is not None:
        part = weights.part_of(run.config.stored, infos, lambda some: run.some_weights(some, step))
    if part is None:
        refuse_second_format(run, weights)
    held = run.config.stored if part is None else part

    def prepare(params: Tree) -> Tree:
        stored = infos if held is None else held.infos(infos)
        if weights is not None and part is None:
            params, stored = weights.encoded(params, infos, layout), weights.infos(infos)
        return on_stages(graphdef, params, stored, generating(layout)) if generation else params

    if live:
        assert run.state is not None
        return Loaded(graphdef, prepare(run.params(layout=layout)), layout, int(run.state.step))
    number = run.last_step() if step is None else step
    params = run.session.params(number, layout, generation, weights, lambda: prepare(run.weights(step, layout, part)))
    return Loaded(graphdef, params, layout, number)


def refuse_second_format(run: Run, weights: WeightFormat | None) -> None:
    """Check that a weight format is not set for a run that stores its matrices in one.

    Args:
      run: the run.
      weights: the format; `None` is as they are stored.

    Raises:
      ConfigError: both have one.
    """
    if weights is not None and run.config.stored is not None:
        raise ConfigError(
            f"{run.place} stores its matrices as {run.config.stored.describe()}; "
            f"leave out the weight format ({weights.describe()}), or "
            f"write plain arrays first with jaxscale merge {run.place} OUT"
        )


def for_length(model: ModelConfig, length: int | None) -> ModelConfig:
    """Return a model config for sequences of up to `length` tokens; warn if it changes the position encoding.

    Args:
      model: a model config.
      length: the most tokens of a sequence; `None` leaves the model as it is.
    """
    if length is None or not isinstance(model, ExtendsContext):
        return model
    extended = model.for_length(length)
    if extended != model:
        log.warning("sequences may reach %d tokens: using LongRoPE's long factors for every position", length)
    return extended


def warn_length(run: Run, length: int) -> None:
    """Warn if sequences may be longer than those that the model was trained on.

    Args:
      run: the model's run.
      length: the most tokens of a sequence.
    """
    if length > trained_length(run):
        log.warning(
            "sequences may have %d tokens, and the model was trained on sequences of %d (train.seq_len); quality "
            "beyond that is unknown",
            length, trained_length(run),
        )  # fmt: skip


def check_length(run: Run, layout: Layout | None, length: int) -> None:
    """Check that the devices that shard sequences divide their length.

    Args:
      run: the model's run.
      layout: the layout that the model is on; `None` is one device.
      length: tokens of a sequence.

    Raises:
      LayoutError: they do not; the message has the nearest lengths that they divide.
    """
    if layout is None or length < 1:
        return
    model = run.config.model
    with layout:
        unit = model.length_unit() if isinstance(model, CutsSequences) else 1
    experts = any("experts" in i.axes for i in jax.tree.leaves(describe_model(model)[1]))
    unit = math.lcm(unit, *map(layout.split, ("seq", "residual_seq", *(["expert_seq"] if experts else []))))
    if length % unit:
        below, above = length // unit * unit, -(-length // unit) * unit
        raise LayoutError(
            f"length = {length}: this model on {layout} needs a multiple of {unit}; the nearest is "
            f"{f'{below} or {above}' if below else above}"
        )


def trained_length(run: RunFolder) -> int:
    """Return the longest sequence length of the run's training, or of the training that its adapters start from.

    Args:
      run: the run.
    """
    longest = run.config.seq_len
    if run.config.adapters is not None and run.config.start is not None:
        try:
            longest = max(longest, trained_length(run.config.start.run))
        except RunError:  # that run was deleted
            return longest
    return longest


def dropless(model: ModelConfig) -> ModelConfig:
    """Return a model config whose experts drop no tokens on any mesh, with a warning if that may change results.

    Args:
      model: a model config; capacities stay where routers cannot work without.
    """
    if not isinstance(model, DropsTokens) or model.dropless() == model:
        return model
    limited = on_any_mesh(model)
    if model.dropless() != limited:
        log.warning("experts drop no tokens in generation; in training they may have (MixtureOfExperts.capacity)")
    return model.dropless()


def on_any_mesh(model: ModelConfig) -> ModelConfig:
    """Return a model config with the default dispatcher to experts, since the one of training may need its mesh.

    Only a dispatcher that sends codes in place of rows changes results by more than rounding; that is a warning.

    Args:
      model: a model config.
    """
    if not isinstance(model, SendsToExperts) or (changed := model.on_any_mesh()) == model:
        return model
    if model.sends_codes:
        log.warning("experts get exact rows in inference; in training they got codes (the dispatcher's payload)")
    return changed


def prompt_ids(run: Run, prompt: str | Sequence[int]) -> Int[np.ndarray, " n"]:
    """Return a prompt's token ids.

    Args:
      run: the run.
      prompt: a text, which gets the tokenizer's opening token if there is one; or ids, which are used as they are.

    Returns:
      int32 (n,).

    Raises:
      ConfigError: an id is outside the model's vocabulary, or the prompt is neither a text nor ids.
      DataError: the text cannot be encoded.
    """
    if isinstance(prompt, str):
        return np.asarray(run.prompt_ids(prompt), np.int32)
    ids = np.asarray(prompt)
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        raise ConfigError(f"a prompt must be a text or a list of token ids, not {prompt!r}")
    return checked(ids.astype(np.int32), vocab_of(run.config.model))


def scored_ids(run: Run, text: str) -> Int[np.ndarray, " n"]:
    """Return a text's token ids after an opening one, so that each token of the text has a prediction.

    The opening token is the tokenizer's, else the end-of-text token.

    Args:
      run: the run.
      text: the text.
    """
    ids = prompt_ids(run, text)
    opened = len(ids) > len(run.tokenizer.encode(text))
    return ids if opened else np.concatenate([[run.end_ids[0]], ids]).astype(np.int32)
