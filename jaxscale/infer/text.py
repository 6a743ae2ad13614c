"""Text from tokens as they come: whole characters only, and nothing that may become a stop string."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

import numpy as np

from jaxscale.data import Tokenizer

_CONTEXT = 4
_HALF = "\ufffd"


class TextStream:
    """Decodes a continuation token by token; what `push` returns, joined, is the whole text up to a stop string.

    A character that several tokens make is shown when it is whole. Where the bytes can be no text, U+FFFD stands. The
    first stop string to be completed ends the text where it begins, also when it came in several tokens.

    Args:
      tokenizer: its `token_bytes`, where it has one, says which bytes a token is; else `decode` alone is asked.
      stop: texts that end it.
      before: ids of the prompt, of which the last few are looked at: a tokenizer may drop a text's first space.

    Special tokens (`tokenizer.special`) are not shown, except to stop strings that are written with them.
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
        """Takes a token; the text that is safe to show now, often none."""
        if self.stopped:
            return ""
        if int(token) in self._hidden:  # what came before it is whole
            text = self._utf8.decode(b"", final=True) + self._new(self._pending)
            self._seen(self._pending)
            return self._show(text)
        return self._show(self._decoded(int(token)))

    def finish(self) -> str:
        """The rest, when no token comes any more."""
        if self.stopped:
            return ""
        shown = self._show(self._utf8.decode(b"", final=True) + self._new(self._pending))
        rest, self._held, self._pending = self._held, "", []
        return shown if self.stopped else shown + rest

    def _decoded(self, token: int) -> str:
        """New text; characters that are not whole are kept back."""
        known = self._bytes(token)
        if known is not None:
            # only of tokens that are no bytes does a neighbour matter
            text = self._new(self._pending) + self._utf8.decode(known)
            self._seen([*self._pending, token])
            return text
        text = self._utf8.decode(b"", final=True)
        self._pending.append(token)
        new = self._new(self._pending)
        if new.endswith(_HALF):  # may be the beginning of a character: so it is with tokenizers that tell no bytes
            return text
        self._seen(self._pending)
        return text + new

    def _new(self, ids: list[int]) -> str:
        """The text of ids behind those before."""
        if not ids:
            return ""
        before = self._decode(self._context)
        return self._decode([*self._context, *ids])[len(before) :]

    def _seen(self, ids: list[int]) -> None:
        self._context, self._pending = [*self._context, *ids][-_CONTEXT:], []

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(np.asarray(ids, np.int64)) if ids else ""

    def _show(self, new: str) -> str:
        text = self._held + new
        found = [(at + len(s), at) for s in self._stop if (at := text.find(s)) >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)[1]]
        begun = max((_overlap(text, s) for s in self._stop), default=0)
        self._held = text[len(text) - begun :]
        return text[: len(text) - begun]


def _overlap(text: str, stop: str) -> int:
    """How much of the end of a text is a beginning of the stop string."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
