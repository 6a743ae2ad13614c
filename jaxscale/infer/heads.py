"""Outputs of a model with a head (`WithHead`): rewards of answers, and classes or values of texts."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxscale.data import preference_files
from jaxscale.data.conversations import ConversationFiles, tokenized
from jaxscale.errors import ConfigError
from jaxscale.infer.forward import replicated
from jaxscale.infer.loaded import Loaded, load_model
from jaxscale.layout import Layout
from jaxscale.layout.tensors import Tree
from jaxscale.models import WithHead
from jaxscale.step import Classification, RewardModel
from jaxscale.step.objectives.heads import head_outputs
from jaxscale.step.step import batch_sharding

if TYPE_CHECKING:
    from jaxscale.run import Run

Text = str | Sequence[Any]
"""A text, or a list of messages."""


def rewards(
    run: Run,
    prompts: Sequence[Text],
    answers: Sequence[Text],
    *,
    layout: Layout | None = None,
    step: int | None = None,
    rows: int = 8,
) -> Float[np.ndarray, " n"]:
    """Return the rewards that a reward model gives to answers.

    Answers are tokenized as in training. They may be longer than `train.seq_len`, and empty.

    Args:
      run: a run with `@RewardModel()`.
      prompts: texts, or lists of messages.
      answers: an answer to each prompt, of its kind.
      layout: the devices; `None` is the run's own layout while its state is in memory, else one device.
      step: the checkpoint's step; by default the parameters in memory, else the newest checkpoint.
      rows: batch rows, rounded up to what the layout divides.

    Returns:
      float32 (n,).

    Raises:
      ConfigError: the run's objective is another, or the numbers of prompts and answers differ.
      DataError: a prompt or an answer cannot be tokenized.
    """
    if not isinstance(run.config.objective, RewardModel):
        raise ConfigError(
            f"rewards needs a run with train.objective = @RewardModel(), and {run.path} has "
            f"@{type(run.config.objective).__name__}()"
        )
    for name, x in (("prompts", prompts), ("answers", answers)):
        if isinstance(x, str) or not isinstance(x, Sequence):
            raise ConfigError(f"{name} = {x!r}: must be a list, with one entry for each answer")
    if len(prompts) != len(answers):
        raise ConfigError(f"there are {len(prompts)} prompts and {len(answers)} answers; give a prompt for each answer")
    corpus = run.config.data if isinstance(run.config.data, ConversationFiles) else preference_files("")
    template = functools.cache(lambda: corpus.chat_template(run.tokenizer))
    documents = []
    for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        if not prompt and not answer:
            raise ConfigError(f"prompts[{i}] and answers[{i}] are both empty; give one of them")
        record = {"prompt": prompt, "completion": answer} if answer else {"prompt": "", "completion": prompt}
        documents.append(tokenized(record, run.tokenizer, template, "all"))
    return _scores(run, documents, layout, step, rows)[:, 0]


def classify(
    run: Run, texts: Sequence[str], *, layout: Layout | None = None, step: int | None = None, rows: int = 8
) -> Float[np.ndarray, "n ..."]:
    """Return the probabilities of the classes of texts, or the numbers predicted for them.

    Args:
      run: a run with `@Classification()`.
      texts: the texts.
      layout: as of `rewards`.
      step: as of `rewards`.
      rows: as of `rewards`.

    Returns:
      float32 (n, classes); with `Classification.value_loss` (n,).

    Raises:
      ConfigError: the run's objective is another, or `texts` is no list.
      DataError: a text cannot be tokenized.
    """
    objective = run.config.objective
    if not isinstance(objective, Classification):
        raise ConfigError(
            f"classify needs a run with train.objective = @Classification(), and {run.path} has "
            f"@{type(objective).__name__}()"
        )
    if isinstance(texts, str) or not isinstance(texts, Sequence):
        raise ConfigError(f"texts = {texts!r}: must be a list of texts")
    for i, t in enumerate(texts):
        if not isinstance(t, str) or not t:
            raise ConfigError(f"texts[{i}] = {t!r}: must be a text, and not empty")
    corpus = preference_files("")
    documents = [
        tokenized({"prompt": "", "completion": t}, run.tokenizer, lambda: corpus.chat_template(run.tokenizer), "all")
        for t in texts
    ]
    outputs = _scores(run, documents, layout, step, rows)
    value = objective.value_loss
    return np.asarray(jax.nn.softmax(outputs, axis=1) if value is None else value.mean(jnp.asarray(outputs)))


def _scores(
    run: Run,
    documents: Sequence[tuple[Int[np.ndarray, " t"], np.ndarray]],
    layout: Layout | None,
    step: int | None,
    rows: int,
) -> Float[np.ndarray, "n o"]:
    if rows < 1:
        raise ConfigError(f"rows = {rows}: must be at least 1")
    loaded = load_model(run, layout, step, text=False)
    split = 1 if loaded.layout is None else loaded.layout.split("batch")
    rows = -(-rows // split) * split
    assert isinstance(run.config.model, WithHead)  # see the objectives' `check`
    out = np.zeros((len(documents), run.config.model.outputs), np.float32)
    order = sorted(range(len(documents)), key=lambda i: len(documents[i][0]))  # similar lengths together
    for first in range(0, len(order), rows):
        chosen = order[first : first + rows]
        length = -(-max(len(documents[i][0]) - 1 for i in chosen) // run.config.seq_len) * run.config.seq_len
        batch = {k: np.zeros((rows, length), np.int32) for k in ("tokens", "segment_ids", "positions")}
        batch["weights"] = np.zeros((rows, length), np.float32)
        for row, i in enumerate(chosen):
            ids, learned = documents[i]
            n = len(ids) - 1
            batch["tokens"][row, :n], batch["weights"][row, :n] = ids[:-1], learned[1:]
            batch["segment_ids"][row, :n], batch["positions"][row, :n] = 1, np.arange(n)
        out[chosen] = _of_batch(loaded, batch)[: len(chosen)]
    return out


def _of_batch(loaded: Loaded, batch: dict[str, np.ndarray]) -> Float[np.ndarray, "b o"]:
    with loaded.in_force():
        where = batch_sharding(loaded.layout, *batch["tokens"].shape)
        arrays: Any = batch if where is None else jax.device_put(batch, dict.fromkeys(batch, where))
        return np.asarray(_compute(loaded.graphdef, loaded.params, arrays))


@functools.partial(jax.jit, static_argnums=0)
def _compute(graphdef: nnx.GraphDef[Any], params: Tree, batch: dict[str, Array]) -> Float[Array, "b o"]:
    model: Any = nnx.merge(graphdef, params)
    return replicated(head_outputs(model, batch)[0])
