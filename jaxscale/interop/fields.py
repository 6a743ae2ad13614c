"""Reading a config.json so that nothing in it is passed over: every field is taken, fixed, or told of."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TypeVar

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
        if value is None and default is _MISSING:
            raise CheckpointError(f"{self.what} has no '{name}'{near(name, self.values)}")
        return default if value is None else value

    def size(self, name: str, default: Any = _MISSING) -> Any:
        """A whole number of at least 1.

        Raises:
          CheckpointError: something else.
        """
        value = self.get(name, default)
        if value is not default and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise CheckpointError(f"{self.what} has {name} = {value!r}, which is no size; it must be at least 1")
        return value

    def number(self, name: str, default: Any = _MISSING) -> float:
        """A number.

        Raises:
          CheckpointError: something else.
        """
        value = self.get(name, default)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise CheckpointError(f"{self.what} has {name} = {value!r}, which is no number")
        return float(value)

    def only(self, name: str, *known: Any, default: Any = None) -> Any:
        """A field that may have some values alone; not there is `default`, or the first of them.

        Raises:
          CheckpointError: it has another.
        """
        value = self.get(name, known[0] if default is None else default)
        if value not in known:
            if all(isinstance(k, str) for k in known):
                raise CheckpointError(f"{self.what} has {name} = {value!r}{near(str(value), known)}")
            one = " or ".join(map(repr, known))
            raise CheckpointError(f"{self.what} has {name} = {value!r}, which is not expressed here; only {one}")
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
        found = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(found, dict):
            raise ValueError("it holds no object")
        return found
    except (OSError, ValueError, RecursionError) as e:
        raise CheckpointError(f"{file} cannot be read: {e}") from None
