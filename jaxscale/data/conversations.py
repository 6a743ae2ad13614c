"""Base of corpora of JSON lines with conversations, or prompts with answers, of which only the answers are learned."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from jaxtyping import Bool, Int32

from jaxscale.data.cache import cached_corpus
from jaxscale.data.chat import ChatTemplate
from jaxscale.data.documents import needed
from jaxscale.data.encoded import Document, Encoded, encode_documents
from jaxscale.data.files import Files, check_readable, files_key, matching
from jaxscale.data.jsonl_files import parsed
from jaxscale.data.lines import line_pieces
from jaxscale.data.pieces import Piece
from jaxscale.data.storage import TokenFile
from jaxscale.data.tokenizer import Tokenizer
from jaxscale.errors import DataError, JaxscaleError

Learned = tuple[Int32[np.ndarray, " t"], Bool[np.ndarray, " t"]]
"""Token ids of a document, and a mask of those to learn."""


class ConversationFiles:
    """Base of corpora of JSON lines with conversations or prompts; a subclass has the documents of a line (`of_line`).

    Attributes:
      name: the corpus.
      glob: pattern of the files.
      template: a folder or file with the chat template; `None` is the tokenizer's folder.
      turns: which turns of the assistant are learned, one of `TURNS`.
    """

    name: ClassVar[str]
    duplicates: ClassVar[str] = "keep"
    processes: ClassVar[int | None] = None
    masked: ClassVar[bool] = True
    glob: str
    template: str | None
    turns: str

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
            text = self.chat_template(tokenizer).text
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
        template = functools.cache(lambda: self.chat_template(tokenizer))

        def documents() -> Iterator[Document]:
            for n, line in piece.records.numbered():
                try:
                    for ids, learned in self.of_line(parsed(line), tokenizer, template):
                        yield f"{piece.records.name}#{n}", ids, learned
                except JaxscaleError as e:
                    raise DataError(f"{piece.records.path}, line {n}: {e}") from e

        return encode_documents(documents(), tokenizer, masked=True)

    def of_line(self, record: Mapping[str, Any], tokenizer: Any, template: Callable[[], ChatTemplate]) -> list[Learned]:
        """Return the documents of a line: token ids, and a mask of those to learn.

        Args:
          record: the line.
          tokenizer: turns texts into token ids.
          template: returns the chat template.

        Raises:
          DataError: the line is not of a known form.
        """
        raise NotImplementedError

    def token_ids(self, tokenizer: Tokenizer | None) -> int | None:
        """Return the size of the tokenizer's vocabulary.

        Args:
          tokenizer: the tokenizer.
        """
        return None if tokenizer is None else tokenizer.vocab_size

    def chat_template(self, tokenizer: Tokenizer) -> ChatTemplate:
        """Return the chat template that writes conversations.

        Args:
          tokenizer: the tokenizer, whose folder may have one.

        Raises:
          DataError: there is none.
        """
        where = self.template or getattr(tokenizer, "folder", None)
        if where is None:
            raise DataError(
                f"conversations need a chat template, but the tokenizer '{tokenizer.name}' has no folder with one; set "
                f"{self.name}.template to a folder or a file of Jinja"
            )
        return ChatTemplate.read(Path(where).expanduser())


def tokenized(document: Mapping[str, Any], tokenizer: Any, template: Callable[[], ChatTemplate], turns: str) -> Learned:
    """Return a document's token ids, and a mask of those to learn.

    Args:
      document: "messages", or "prompt" and "completion".
      tokenizer: turns texts into token ids.
      template: returns the chat template.
      turns: which turns of the assistant are learned.

    Raises:
      DataError: the completion is empty, or is not of the prompt's kind.
    """
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
