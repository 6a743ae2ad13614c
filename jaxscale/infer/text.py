"""Streaming detokenization: whole characters only, and nothing that may become a stop string."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

import numpy as np

from jaxscale.data import Tokenizer

_CONTEXT = 4
_HALF = "\ufffd"


class TextStream:
    """Decodes a completion token by token; the returned pieces, joined, are the text up to a stop string.

    A character that consists of several tokens is returned when it is complete; bytes that are not UTF-8 become U+FFFD.
    The stop string that is completed first ends the text before it, also when it spans several tokens. Special tokens
    (`tokenizer.special`) are left out, except those that occur in a stop string.

    Args:
      tokenizer: its `token_bytes` gives the bytes of a token; without this method only `decode` is used.
      stop: strings that end the text.
      before: ids of the prompt; the last few are the context of the first token, since tokenizers may drop the first
        space of a text.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = (), before: Sequence[int] = ()):
        self._tokenizer, self._stop = tokenizer, tuple(stop)
        self._bytes = getattr(tokenizer, "token_bytes", lambda _: None)
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._context, self._pending = [int(i) for i in before][-_CONTEXT:], []  # type: tuple[list[int], list[int]]
        self._held = ""
        self.stopped = False
        hidden = [s for s in getattr(tokenizer, "special", ()) if not any(s in one or one in s for one in self._stop)]
        self._hidden = {tokenizer.token_to_id(s) for s in hidden}  # type: ignore[attr-defined]

    def push(self, token: int) -> str:
        """Add a token, and return the text that is final now, often none.

        Args:
          token: its id.
        """
        if self.stopped:
            return ""
        if int(token) in self._hidden:  # no character spans a special token
            text = self._utf8.decode(b"", final=True) + self._new(self._pending)
            self._add_context(self._pending)
            return self._up_to_stop(text)
        return self._up_to_stop(self._decoded(int(token)))

    def finish(self) -> str:
        """Return the rest of the text, after the last token."""
        if self.stopped:
            return ""
        text = self._up_to_stop(self._utf8.decode(b"", final=True) + self._new(self._pending))
        rest, self._held, self._pending = self._held, "", []
        return text if self.stopped else text + rest

    def _decoded(self, token: int) -> str:
        """New text; incomplete characters are held back."""
        data = self._bytes(token)
        if data is not None:
            # the text of a token with known bytes does not depend on its neighbours
            text = self._new(self._pending) + self._utf8.decode(data)
            self._add_context([*self._pending, token])
            return text
        text = self._utf8.decode(b"", final=True)
        self._pending.append(token)
        new = self._new(self._pending)
        if new.endswith(_HALF):  # may be an incomplete character, of a tokenizer without `token_bytes`
            return text
        self._add_context(self._pending)
        return text + new

    def _new(self, ids: list[int]) -> str:
        """The text that these ids add to the context."""
        if not ids:
            return ""
        before = self._decode(self._context)
        return self._decode([*self._context, *ids])[len(before) :]

    def _add_context(self, ids: list[int]) -> None:
        self._context, self._pending = [*self._context, *ids][-_CONTEXT:], []

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(np.asarray(ids, np.int64)) if ids else ""

    def _up_to_stop(self, new: str) -> str:
        """The final text: up to a stop string, or what cannot be the beginning of one."""
        text = self._held + new
        stops = [(at + len(s), at) for s in self._stop if (at := text.find(s)) >= 0]
        if stops:
            self.stopped, self._held = True, ""
            return text[: min(stops)[1]]
        overlap = max((_overlap(text, s) for s in self._stop), default=0)
        self._held = text[len(text) - overlap :]
        return text[: len(text) - overlap]


def _overlap(text: str, stop: str) -> int:
    """The length of the longest end of a text that is a proper beginning of the stop string."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
