"""Token ids of prompts, and whether a model can continue text."""

from __future__ import annotations

import numpy as np
from jaxtyping import Int

from jaxscale.errors import ConfigError
from jaxscale.models.base import LanguageModelConfig, is_causal, vocab_of
from jaxscale.step.config import TrainConfig


def check_texts(config: TrainConfig) -> None:
    """Check that a run's model is a causal language model.

    Args:
      config: the run's settings.

    Raises:
      ConfigError: it is not.
    """
    if why := no_texts(config):
        raise ConfigError(f"{why}; call what Run.model() returns")


def no_texts(config: TrainConfig) -> str | None:
    """Return why a run's model cannot continue text, or `None` if it can.

    Args:
      config: the run's settings.
    """
    if not isinstance(config.model, LanguageModelConfig):
        return f"{type(config.model).__name__} is not a language model, so it cannot continue text"
    if not is_causal(config.model):
        return "the model's attention is Bidirectional, so it does not predict a token from those before it"
    return None


def text_ids(config: TrainConfig, text: str, ids: Int[np.ndarray, " n"] | None = None) -> Int[np.ndarray, " n"]:
    """Return the token ids of a text after an end-of-document token, which precedes each document in training.

    Args:
      config: the run's settings.
      text: the text.
      ids: token ids to check and return instead, int32.

    Raises:
      ConfigError: the model cannot continue text, or an id is not in its vocabulary.
      DataError: the text cannot be encoded.
    """
    check_texts(config)
    if ids is None:
        ids = np.concatenate([[config.tokenizer.eos_id], config.tokenizer.encode(text)]).astype(np.int32)
    return checked(ids, vocab_of(config.model))


def checked(ids: Int[np.ndarray, " n"], vocab: int) -> Int[np.ndarray, " n"]:
    """Return token ids after a check that there is one, and that all are in the vocabulary.

    Args:
      ids: token ids.
      vocab: size of the model's vocabulary.

    Raises:
      ConfigError: there is no id, or one is not in the vocabulary.
    """
    if not len(ids):
        raise ConfigError("the prompt has no token; give at least one id, or a text, which always has one")
    if ids.max() >= vocab or ids.min() < 0:
        wrong = ids.max() if ids.max() >= vocab else ids.min()
        raise ConfigError(
            f"the prompt has token id {wrong}, but the model's vocabulary has only ids below {vocab}; its corpus was "
            "not text, so it cannot continue one"
        )
    return ids
