"""Corpora for fine-tuning: conversations, and prompts with completions; only the answers are learned."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from jaxscale.config import register
from jaxscale.data.batch import Source
from jaxscale.data.chat import TURNS, ChatTemplate
from jaxscale.data.conversations import ConversationFiles, Learned, tokenized
from jaxscale.data.packing import pack
from jaxscale.data.tokenizer import Tokenizer
from jaxscale.errors import DataError, near

_FORMS = ("messages", "prompt", "completion", "tools")


@register(name="chat_files")
@dataclass(frozen=True)
class ChatFiles(ConversationFiles):
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

    def of_line(self, record: Mapping[str, Any], tokenizer: Any, template: Callable[[], ChatTemplate]) -> list[Learned]:
        """Return the one document of a line."""
        keys = sorted(record)
        if "messages" not in keys and not {"prompt", "completion"} <= set(keys):
            unknown = next((k for k in keys if k not in _FORMS), "")
            raise DataError(f"it has neither 'messages' nor 'prompt' and 'completion'{near(unknown, _FORMS)}")
        return [tokenized(record, tokenizer, template, self.turns)]
