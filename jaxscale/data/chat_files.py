"""Corpora for fine-tuning: conversations, and prompts with completions; only the answers are learned."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from jaxscale.config import register
from jaxscale.data.batch import Source
from jaxscale.data.cache import cached_corpus
from jaxscale.data.chat import TURNS, ChatTemplate
from jaxscale.data.documents import needed
from jaxscale.data.encoded import Document, Encoded, encode_documents
from jaxscale.data.files import Files, check_readable, files_key, matching
from jaxscale.data.jsonl_files import parsed
from jaxscale.data.lines import line_pieces
from jaxscale.data.packing import pack
from jaxscale.data.pieces import Piece
from jaxscale.data.storage import TokenFile
from jaxscale.data.tokenizer import Tokenizer
from jaxscale.errors import DataError, JaxscaleError, near

_FORMS = ("messages", "prompt", "completion", "tools")


@register(name="chat_files")
@dataclass(frozen=True)
class ChatFiles:
    """Conversations in JSON-lines files, plain or compressed by gzip or Zstandard.

    Each line is a document, in one of two forms:

        {"messages": [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi!"}]}
        {"prompt": "1, 2, ", "completion": "3"}

    Conversations are written by the model's chat template; the assistant's messages are learned, with the end of its
    turns. Of texts the completion and the end of the document are learned; prompt and completion are tokenized
    separately, as in generation. They may also be lists of messages.

    Args:
      glob: pattern of the files, with `~`, `*` and `**`, also in a bucket.
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
    duplicates: ClassVar[str] = "keep"
    processes: ClassVar[int | None] = None
    masked: ClassVar[bool] = True

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
        return pack(self.prepared(tokenizer, cache).documents(split, self.heldout, self.name), packing, seq_len)

    def prepared(self, tokenizer: Tokenizer | None, cache: str | Path | None = None) -> TokenFile:
        """Return the token file of all lines, of both splits, which is prepared once, into the cache.

        Args:
          tokenizer: turns texts into token ids.
          cache: the cache; `None` is the default (see `cache_folder`).

        Raises:
          DataError: there is no tokenizer, or a line cannot be read or tokenized.
        """
        tokenizer = needed(tokenizer, self.name)
        try:
            text = self._template(tokenizer).text
        except DataError:
            text = ""  # only conversations need a template; the first one raises this error again
        opening = getattr(tokenizer, "opening", ())
        key = files_key(self.files(), tokenizer.fingerprint, self.turns, text, str(opening))
        return cached_corpus(self, key, tokenizer, cache)

    def files(self) -> Files:
        """Return the files that match."""
        return matching(self.glob, ".jsonl")

    def origin(self) -> str:
        """Return the glob and the settings."""
        return f"{self.glob} {self.template} {self.turns}"

    def total(self) -> int | None:
        """Return the bytes of all files, compressed as they are; `None` if they are in a bucket."""
        return check_readable(self.files())

    def pieces(self) -> Iterator[Piece]:
        """Yield lines of 4 MB together."""
        files = self.files()
        check_readable(files)
        return line_pieces(files)

    def encode(self, piece: Piece, tokenizer: Tokenizer) -> Encoded:
        """Tokenize the lines of a piece, with masks of the tokens to learn."""
        template = functools.cache(lambda: self._template(tokenizer))
        return encode_documents(_documents(piece, tokenizer, template, self.turns), tokenizer, masked=True)

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
    piece: Piece, tokenizer: Tokenizer, template: Callable[[], ChatTemplate], turns: str
) -> Iterator[Document]:
    for n, line in piece.records.numbered():
        try:
            ids, learned = _tokenized(_read(line), tokenizer, template, turns)
        except JaxscaleError as e:
            raise DataError(f"{piece.records.path}, line {n}: {e}") from e
        yield f"{piece.records.name}#{n}", ids, learned


def _read(line: bytes) -> Mapping[str, Any]:
    document = parsed(line)
    keys = sorted(document)
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
