"""Reading a config.json so that nothing in it is passed over: every field is taken, fixed, or told of."""

from __future__ import annotations

import math
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
"""What says nothing of the values that a forward pass makes: names, ids of tokens, training's own settings."""


LARGEST = 2**31 - 1
"""Of sizes."""


def is_number(value: Any) -> bool:
    """Whether it is a finite number that a float holds, and no boolean."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def short(value: Any) -> str:
    """A value for a message, which may be as long as it likes."""
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:97]}..."


def _list_of(fits: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(map(fits, value))


def _is_object(value: Any) -> bool:
    return isinstance(value, dict)


_WHOLE = (reading.is_whole, "whole number")
_KINDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "sliding_window": _WHOLE,
    "max_window_layers": _WHOLE,
    "first_k_dense_replace": _WHOLE,
    "original_max_position_embeddings": (lambda value: reading.is_whole(value, 1), "size"),
    "max_position_embeddings": (lambda value: reading.is_whole(value, 1), "size"),
    "layer_types": (_list_of(lambda value: isinstance(value, str)), "list of names"),
    "mlp_only_layers": (_list_of(reading.is_whole), "list of layers"),
    "rope_parameters": (_is_object, "object"),
    "rope_scaling": (_is_object, "object"),
}
"""What fields are that are neither a size, a number nor one of a few values."""


class Fields:
    """The fields of a config.json; what is never asked for is found by `unread`.

    Args:
      values: as JSON gives them.
      what: whose, for messages.
    """

    def __init__(self, values: dict[str, Any], what: str):
        self.values, self.what = values, what
        self._read: set[str] = set()

    def get(self, name: str, default: T | Any = _MISSING) -> Any:
        """A field; `default` where it is not there (null counts as not there when there is a default).

        Raises:
          CheckpointError: it is not there, and has no default.
        """
        self._read.add(name)
        value = self.values.get(name)
        kind = _KINDS.get(name)
        if value is not None and kind is not None and not kind[0](value):
            raise CheckpointError(f"{self.what} has {name} = {short(value)}, which is no {kind[1]}")
        if value is None and default is _MISSING:
            raise CheckpointError(f"{self.what} has no '{name}'{near(name, self.values)}")
        return default if value is None else value

    def size(self, name: str, default: Any = _MISSING) -> Any:
        """A whole number of at least 1.

        Raises:
          CheckpointError: something else.
        """
        value = self.get(name, default)
        if value is not default and (not reading.is_whole(value, 1) or value > LARGEST):
            raise CheckpointError(
                f"{self.what} has {name} = {short(value)}, which is no size; it must be a whole number of at least 1 "
                f"and at most {LARGEST}"
            )
        return value

    def number(self, name: str, default: Any = _MISSING) -> float:
        """A number.

        Raises:
          CheckpointError: something else.
        """
        value = self.get(name, default)
        if not is_number(value):
            raise CheckpointError(f"{self.what} has {name} = {short(value)}, which is no finite number")
        return float(value)

    def only(self, name: str, *known: Any, default: Any = None) -> Any:
        """A field that may have some values alone; not there is `default`, or the first of them.

        Raises:
          CheckpointError: it has another.
        """
        value = self.get(name, known[0] if default is None else default)
        if value not in known:
            if all(isinstance(k, str) for k in known):
                raise CheckpointError(f"{self.what} has {name} = {short(value)}{near(short(value), known)}")
            one = " or ".join(map(repr, known))
            raise CheckpointError(f"{self.what} has {name} = {short(value)}, which is not expressed here; only {one}")
        return value

    def unread(self) -> list[str]:
        """Fields with a value that nobody asked for, and that may mean something."""
        empty: tuple[Any, ...] = (None, False, [], {}, "")
        return [k for k, v in self.values.items() if k not in self._read | _HARMLESS and v not in empty]


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object.

    Raises:
      CheckpointError: there is none.
    """
    try:
        return reading.read_json(file)
    except (OSError, ValueError) as e:
        raise CheckpointError(f"{file} cannot be read: {e}") from None
