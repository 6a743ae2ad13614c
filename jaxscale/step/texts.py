"""Whether a model continues texts, and the ids of those that it is given."""

from __future__ import annotations

import numpy as np
from jaxtyping import Int

from jaxscale.errors import ConfigError
from jaxscale.models.base import LanguageModelConfig, is_causal, vocab_of
from jaxscale.step.config import TrainConfig


def check_texts(config: TrainConfig) -> None:
    """Raises `ConfigError` where the model is no causal language model."""
    if why := no_texts(config):
        raise ConfigError(f"{why}; call what Run.model() returns")


def no_texts(config: TrainConfig) -> str | None:
    """Why a run's model continues no text, or `None` where it does."""
    if not isinstance(config.model, LanguageModelConfig):
        return f"{type(config.model).__name__} is no language model, so it has no texts"
    if not is_causal(config.model):
        return "the model's attention is Bidirectional, so no token is foreseen from those before it"
    return None


def text_ids(config: TrainConfig, text: str, ids: Int[np.ndarray, " n"] | None = None) -> Int[np.ndarray, " n"]:
    """A text's ids behind the end of the one before, which opens each of ours; or `ids`, checked.

    Raises:
      ConfigError: the model does not know one of them.
      DataError: the text cannot be encoded.
    """
    check_texts(config)
    if ids is None:
        ids = np.concatenate([[config.tokenizer.eos_id], config.tokenizer.encode(text)]).astype(np.int32)
    return checked(ids, vocab_of(config.model))


def checked(ids: Int[np.ndarray, " n"], vocab: int) -> Int[np.ndarray, " n"]:
    """Ids that a model of so many knows.

    Raises:
      ConfigError: it does not, or there is none.
    """
    if not len(ids):
        raise ConfigError("the prompt has no token; give at least one id, or a text, which is opened by one")
    if ids.max() >= vocab or ids.min() < 0:
        wrong = ids.max() if ids.max() >= vocab else ids.min()
        raise ConfigError(
            f"the prompt has token id {wrong} and the model knows ids below {vocab}; its corpus was not text, so it "
            "cannot continue one"
        )
    return ids
