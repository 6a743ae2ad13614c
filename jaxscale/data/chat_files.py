"""Corpora for fine-tuning: conversations, and prompts with completions; only the answers are learned."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from jaxscale.config import register
from jaxscale.data.batch import Source
from jaxscale.data.cache import cached
from jaxscale.data.chat import TURNS, ChatTemplate
from jaxscale.data.packing import pack
from jaxscale.data.progress import tracked
from jaxscale.data.storage import Document
from jaxscale.data.text import Files, file_key, matching, read_text
from jaxscale.data.tokenizer import Tokenizer
from jaxscale.errors import DataError, JaxscaleError, near

_FORMS = ("messages", "prompt", "completion", "tools")


@register(name="chat_files")
@dataclass(frozen=True)
class ChatFiles:
    """Conversations in JSON-lines files.

    Each line is a document, in one of two forms:

        {"messages": [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi!"}]}
        {"prompt": "1, 2, ", "completion": "3"}

    Conversations are written by the model's chat template; the assistant's messages are learned, with the end of its
    turns. Of texts the completion and the end of the document are learned; prompt and completion are tokenized
    separately, as in generation. They may also be lists of messages.

    Args:
      glob: pattern of the files.
      template: a folder or file with the chat template; by default the tokenizer's folder.
      turns: whether "all" turns of the assistant are learned, or the "last" of each conversation.
      heldout: fraction of lines held out.

    Raises:
      DataError: `turns` does not exist.
    """

    glob: str
    template: str | None = None
    turns: str = "all"
    heldout: float = 0.05
    name: ClassVar[str] = "chat_files"

    def __post_init__(self) -> None:
        if self.turns not in TURNS:
            raise DataError(f"chat_files.turns = '{self.turns}' does not exist{near(self.turns, TURNS)}")

    def source(
        self,
        tokenizer: Tokenizer | None,
        *,
        seq_len: int,
        split: str,
        packing: str = "stream",
        cache: str | Path | None = None,
    ) -> Source:
        """Return packed rows of one split; all lines are tokenized once, into the cache."""
        if tokenizer is None:
            raise DataError(f"corpus '{self.name}' is text and needs a tokenizer; pass ByteTokenizer().")
        files = matching(self.glob, ".jsonl")
        template = functools.cache(lambda: self._template(tokenizer))
        try:
            text = template().text
        except DataError:
            text = ""  # only conversations need a template; the first one raises this error again
        opening = getattr(tokenizer, "opening", ())
        key = hashlib.sha256(f"{file_key(files, tokenizer)} {self.turns} {text} {opening}".encode()).hexdigest()[:16]

        def documents() -> Iterator[Document]:
            return _documents(files, tokenizer, template, self.turns)

        prepared = cached(self.name, key, documents, tokenizer, cache, masked=True)
        return pack(prepared.documents(split, self.heldout, self.name), packing, seq_len)

    def token_ids(self, tokenizer: Tokenizer | None) -> int | None:
        """Return the size of the tokenizer's vocabulary.

        Args:
          tokenizer: the tokenizer.
        """
        return None if tokenizer is None else tokenizer.vocab_size

    def _template(self, tokenizer: Tokenizer) -> ChatTemplate:
        where = self.template or getattr(tokenizer, "path", None)
        if where is None:
            raise DataError(
                f"conversations need a chat template, but the tokenizer '{tokenizer.name}' has no folder with one; set "
                "chat_files.template to a folder or a file of Jinja"
            )
        path = Path(where).expanduser()
        return ChatTemplate.read(path if self.template or path.is_dir() else path.parent)


def _documents(
    files: Files, tokenizer: Tokenizer, template: Callable[[], ChatTemplate], turns: str
) -> Iterator[Document]:
    for name, path in tracked(files, len(files), "tokenizing"):
        for n, line in enumerate(read_text(path).split("\n"), 1):
            if not line.strip():
                continue
            try:
                ids, learned = _tokenized(_read(line), tokenizer, template, turns)
            except JaxscaleError as e:
                raise DataError(f"{path}, line {n}: {e}") from e
            yield f"{name}#{n}", ids, learned


def _read(line: str) -> Mapping[str, Any]:
    try:
        document = json.loads(line)
    except ValueError as e:
        raise DataError(f"it is not valid JSON ({e})") from None
    keys = sorted(document) if isinstance(document, dict) else []
    if "messages" not in keys and not {"prompt", "completion"} <= set(keys):
        unknown = next((k for k in keys if k not in _FORMS), "")
        raise DataError(f"it has neither 'messages' nor 'prompt' and 'completion'{near(unknown, _FORMS)}")
    return document


def _tokenized(
    document: Mapping[str, Any], tokenizer: Any, template: Callable[[], ChatTemplate], turns: str
) -> tuple[np.ndarray, np.ndarray]:
    """Return a document's token ids, and a mask of those to learn."""
    more = {"tools": document["tools"]} if document.get("tools") else {}
    if "messages" in document:
        return template().ids_and_mask(document["messages"], tokenizer, turns, **more)
    prompt, completion = document["prompt"], document["completion"]
    if isinstance(prompt, list) and isinstance(completion, list):
        return template().ids_and_mask([*prompt, *completion], tokenizer, turns, len(prompt), **more)
    if not isinstance(prompt, str) or not isinstance(completion, str):
        raise DataError("'prompt' and 'completion' must be two texts, or two lists of messages")
    if not completion:
        raise DataError("'completion' is empty, so there is nothing to learn from")
    before, after = tokenizer.encode(prompt), tokenizer.encode(completion)
    opening = getattr(tokenizer, "opening", ())
    if not opening and not (len(before) and getattr(tokenizer, "opens_with_nothing", False)):
        opening = (tokenizer.eos_id,)
    ids = np.concatenate([opening, before, after, [tokenizer.eos_id]]).astype(np.int32)
    return ids, np.arange(len(ids)) >= len(opening) + len(before)
