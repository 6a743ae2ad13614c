"""Read a config.json so that no field is ignored silently: each is used, checked to have a fixed value, or reported."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from jaxscale import reading
from jaxscale.errors import CheckpointError, near

T = TypeVar("T")

_MISSING = object()

_HARMLESS = frozenset(
    """_name_or_path _attn_implementation architectures auto_map attn_implementation bos_token_id eos_token_id
    pad_token_id chunk_size_feed_forward dtype torch_dtype finetuning_task id2label initializer_range is_decoder
    is_encoder_decoder keys_to_ignore_at_inference label2id max_length model_type num_labels output_attentions
    output_hidden_states pretraining_tp problem_type return_dict task_specific_params tokenizer_class
    transformers_version use_cache use_return_dict unsloth_version router_aux_loss_coef router_jitter_noise
    output_router_logits classifier_dropout embd_pdrop resid_pdrop attn_pdrop attention_dropout residual_dropout
    hidden_dropout embedding_dropout gradient_checkpointing cache_implementation""".split()
)
"""Fields that do not affect the forward pass: names, token ids, settings of training."""


_PATTERN = 200
"""Most characters of a regular expression in a file."""

LARGEST = 2**31 - 1
"""The largest size."""


def is_number(value: object) -> bool:
    """Whether a value is a finite number that fits a float, and not a boolean."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def short(value: object) -> str:
    """Return the `repr` of a value, at most 100 characters, for a message."""
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:97]}..."


def plain_pattern(pattern: str, where: str) -> None:
    """Check that a file's regular expression for names of modules is quick to match.

    Args:
      pattern: the expression.
      where: the file and the field, for the message.

    Raises:
      CheckpointError: it is not valid, or could take for ever.
    """
    if len(pattern) > _PATTERN or len(re.findall(r"[*+{]", pattern)) > 2 or re.search(r"\)[*+{?]", pattern):
        raise CheckpointError(
            f"{where} has the pattern {short(pattern)}, which could take for ever to match; use the name of a module "
            f"(at most {_PATTERN} letters, two repetitions, none of a group)"
        )
    try:
        re.compile(pattern)
    except re.error as e:
        raise CheckpointError(f"{where} has the pattern {pattern!r}: {e}") from None


def _list_of(fits: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(map(fits, value))


def _is_object(value: object) -> bool:
    return isinstance(value, dict)


_WHOLE = (reading.is_whole, "a whole number")
_KINDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "sliding_window": _WHOLE,
    "max_window_layers": _WHOLE,
    "num_kv_shared_layers": _WHOLE,
    "hidden_size_per_layer_input": _WHOLE,
    "first_k_dense_replace": _WHOLE,
    "original_max_position_embeddings": (lambda value: reading.is_whole(value, 1), "a size"),
    "max_position_embeddings": (lambda value: reading.is_whole(value, 1), "a size"),
    "layer_types": (_list_of(lambda value: isinstance(value, str)), "a list of names"),
    "no_rope_layers": (_list_of(lambda value: value in (0, 1)), "a list of 0 and 1"),
    "mlp_only_layers": (_list_of(reading.is_whole), "a list of layers"),
    "rope_parameters": (_is_object, "an object"),
    "rope_scaling": (_is_object, "an object"),
}
"""Checks for fields that are not a size, a number or one of a few values, and what they should be."""


class Fields:
    """The fields of a config.json; remembers which were read (see `unread`).

    Args:
      values: the parsed JSON object.
      what: the file, for messages.
    """

    def __init__(self, values: dict[str, Any], what: str):
        self.values, self.what = values, what
        self._read: set[str] = set()

    def get(self, name: str, default: T | Any = _MISSING) -> Any:
        """Return a field, or `default` if it is missing or null.

        Args:
          name: the field.
          default: its default; without one the field is required.

        Raises:
          CheckpointError: the field is missing and has no default, or has a value of the wrong kind.
        """
        self._read.add(name)
        value = self.values.get(name)
        kind = _KINDS.get(name)
        if value is not None and kind is not None and not kind[0](value):
            raise CheckpointError(f"{self.what} has {name} = {short(value)}, which is not {kind[1]}")
        if value is None and default is _MISSING:
            raise CheckpointError(f"{self.what} has no '{name}'{near(name, self.values)}")
        return default if value is None else value

    def size(self, name: str, default: Any = _MISSING) -> Any:
        """Return a field that is a whole number of at least 1, or `default`.

        Raises:
          CheckpointError: it is missing and has no default, or is something else.
        """
        value = self.get(name, default)
        if value is not default and (not reading.is_whole(value, 1) or value > LARGEST):
            raise CheckpointError(
                f"{self.what} has {name} = {short(value)}, which is not a size; it must be a whole number of at least "
                f"1 and at most {LARGEST}"
            )
        return value

    def number(self, name: str, default: Any = _MISSING) -> float:
        """Return a field that is a finite number, or `default`.

        Raises:
          CheckpointError: it is missing and has no default, or is something else.
        """
        value = self.get(name, default)
        if not is_number(value):
            raise CheckpointError(f"{self.what} has {name} = {short(value)}, which is not a finite number")
        return float(value)

    def only(self, name: str, *known: Any, default: Any = None) -> Any:
        """Return a field that may have only a few values.

        Args:
          name: the field.
          *known: the values it may have.
          default: the value if it is missing or null; by default the first of `known`.

        Raises:
          CheckpointError: it has another value.
        """
        value = self.get(name, known[0] if default is None else default)
        if value not in known:
            if all(isinstance(k, str) for k in known):
                raise CheckpointError(f"{self.what} has {name} = {short(value)}{near(short(value), known)}")
            one = " or ".join(map(repr, known))
            raise CheckpointError(f"{self.what} has {name} = {short(value)}, but only {one} is supported")
        return value

    def rename(self, names: dict[str, str]) -> None:
        """Read the fields of older files under their newer names.

        Args:
          names: newer name -> older name.

        Raises:
          CheckpointError: both are there, with different values.
        """
        values = dict(self.values)
        for newer, older in names.items():
            if values.get(older) is None:
                continue
            value = values.pop(older)
            if values.get(newer, value) not in (None, value):
                raise CheckpointError(
                    f"{self.what} has {newer} = {short(values[newer])} and {older} = {short(value)}, which mean the "
                    "same; remove one"
                )
            values[newer] = value
        self.values = values

    def unread(self) -> list[str]:
        """Return the fields that were not read, have a value, and may affect the model."""
        empty: tuple[Any, ...] = (None, False, [], {}, "")
        return [k for k, v in self.values.items() if k not in self._read | _HARMLESS and v not in empty]


def read_json(file: Path) -> dict[str, Any]:
    """Read a file with a JSON object.

    Raises:
      CheckpointError: the file cannot be read, or holds something else.
    """
    try:
        return reading.read_json(file)
    except (OSError, ValueError) as e:
        raise CheckpointError(f"{file} cannot be read: {e}") from None
