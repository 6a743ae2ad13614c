"""Chat templates: conversations as one text, and which of its tokens the assistant said.

A template is the Jinja text that Hugging Face folders carry (`chat_template.jinja`, or `chat_template` in
`tokenizer_config.json`). It is somebody else's program: it runs in Jinja's sandbox, and sees the messages and the
names of the special tokens, and nothing else. Needs `jinja2` (`pip install 'jaxscale[hf]'`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from jaxtyping import Bool, Int32, Int64

from jaxscale.data.chat_render import SAID as SAID_BEGIN
from jaxscale.data.chat_render import SAID_END, Renderer, TemplateFault, TooSlow, compiled, render
from jaxscale.data.tokenizer import alias
from jaxscale.errors import DataError, near

Message = Mapping[str, Any]
"""`{"role": "user", "content": "..."}`, and whatever else a template knows of."""

TURNS = ("all", "last")
"""Of which turns of the assistant a model learns."""

SAID = "assistant"
"""The role whose words are learned."""

ROLES = ("system", "developer", "user", SAID, "tool", "function")
"""Those that OpenAI's clients send."""

# Noncharacters of Unicode, which no text holds: around a special token's number.
_WORD, _WORD_END = "\ufdd0", "\ufdd1"
_MARKS = re.compile(f"[{_WORD}{_WORD_END}{SAID_BEGIN}{SAID_END}\ufdd4\ufdd5]")
_WORDS = re.compile(f"{_WORD}([0-9]+){_WORD_END}")


class Spelling(Protocol):
    """What a chat needs of a tokenizer."""

    @property
    def special(self) -> tuple[str, ...]:
        """The texts of its special tokens."""
        ...

    def spans(self, text: str, *, aliased: bool = False) -> tuple[Int32[np.ndarray, " t"], Int64[np.ndarray, "t 2"]]:
        """Ids, and the characters (from, to) that each is of; special tokens are read, `aliased` or as they are."""
        ...


class ChatTemplate:
    """How a model wants conversations written.

    Args:
      text: the template.
      names: special tokens by name, as `{"bos_token": "<s>"}`, which templates write.
      where: what messages call it.
      seconds: that a conversation may take, in a process that is killed then; `None` renders in this process.

    Raises:
      DataError: the template is no Jinja, or `jinja2` is not installed.
    """

    def __init__(
        self,
        text: str,
        names: Mapping[str, str] | None = None,
        where: str = "the chat template",
        seconds: float | None = None,
    ):
        self.text, self.names, self.where = text, dict(names or {}), where
        renderer = None if seconds is None else Renderer(seconds)
        _check(text, where, compiled if renderer is None else renderer.check)
        self._render_text = render if renderer is None else renderer.render

    @classmethod
    def read(cls, folder: str | Path, seconds: float | None = None) -> ChatTemplate:
        """The template of a Hugging Face folder, or of a file of Jinja; `seconds` as above.

        Raises:
          DataError: there is none.
        """
        path = Path(folder).expanduser()
        home = path if path.is_dir() else path.parent
        settings = _json(home / "tokenizer_config.json")
        text = settings.get("chat_template")
        file = home / "chat_template.jinja" if path.is_dir() else path
        if file.is_file():
            text = _text(file)
        elif isinstance(text, list):  # several, by name
            text = {one.get("name"): one.get("template") for one in text}.get("default")
        if not isinstance(text, str):
            raise DataError(
                f"{path} has no chat template (chat_template.jinja, or chat_template in tokenizer_config.json); name a "
                "file or folder that has one"
            )
        names = {**_json(home / "special_tokens_map.json"), **settings}
        return cls(text, {k: v for k, v in _spelled(names).items() if k.endswith("_token")}, f"{file or path}", seconds)

    def render(self, messages: Sequence[Message], add_generation_prompt: bool = False, **more: Any) -> str:
        """A conversation as text; with the generation prompt, up to where the assistant begins to speak.

        Args:
          messages: in their order.
          add_generation_prompt: end with what opens the assistant's next turn.
          **more: what else the template is told, as `tools`.

        Raises:
          DataError: the template refuses these messages.
        """
        return _MARKS.sub("", self._render(_without_none(messages), add_generation_prompt, more))

    def ids(
        self, messages: Sequence[Message], tokenizer: Spelling, add_generation_prompt: bool = True, **more: Any
    ) -> Int32[np.ndarray, " t"]:
        """A conversation as token ids.

        The template's special tokens are special. The same words inside of a message are ordinary text, so that nobody
        can end a turn by writing so; that is where this differs from `apply_chat_template` as it is by default.
        """
        marked = _marked(messages, tokenizer.special)
        text = self._render(marked, add_generation_prompt, _marked_names(more, tokenizer.special))
        return _encode(_cleaned(text)[0], tokenizer)[0]

    def said(
        self, messages: Sequence[Message], tokenizer: Spelling, turns: str = "all", first: int = 0, **more: Any
    ) -> tuple[Int32[np.ndarray, " t"], Bool[np.ndarray, " t"]]:
        """Token ids of a conversation, and which of them the assistant said: what ends its turn is said, too.

        A template may mark it (`{% generation %}`). Of one that does not, a turn is what it adds to the text that it
        makes of the turns before with the generation prompt.

        Args:
          messages: in their order.
          tokenizer: whose ids.
          turns: "all" of the assistant's, or its "last" only.
          first: leave out turns before this message.
          **more: as for `render`.

        Raises:
          DataError: there is no turn of the assistant, or the template writes a turn otherwise when others follow.
        """
        if turns not in TURNS:
            raise DataError(f"turns = '{turns}' does not exist{near(turns, TURNS)}")
        marked, more = _marked(messages, tokenizer.special), _marked_names(more, tokenizer.special)
        asked = [i for i, m in enumerate(marked) if m.get("role") == SAID and i >= first]
        if not asked:
            raise DataError(f"no message is the assistant's (role '{SAID}'), so there is nothing to learn from")
        asked = asked if turns == "all" else asked[-1:]
        text, spans = _cleaned(self._render(marked, False, more))
        if spans:
            turn = [i for i, m in enumerate(marked) if m.get("role") == SAID]
            if len(turn) == len(spans):
                spans = [span for i, span in zip(turn, spans, strict=True) if i in asked]
            elif turns != "all" or first:
                raise DataError(
                    f"{self.where} marks {len(spans)} pieces of {len(turn)} turns, so that one turn cannot be told "
                    "apart; use turns = 'all'"
                )
        else:
            spans = [self._span(text, marked, i, more) for i in asked]
        ids, places = _encode(text, tokenizer)
        learned = np.zeros(len(ids), bool)
        for begin, end in spans:
            inside = np.flatnonzero((places[:, 0] < end) & (places[:, 1] > begin))
            if len(inside):  # and what lies between, of which some tokenizers give no place (white space)
                learned[inside[0] : inside[-1] + 1] = True
        return ids, learned

    def _span(self, text: str, messages: list[dict[str, Any]], i: int, more: dict[str, Any]) -> tuple[int, int]:
        before = _cleaned(self._render(messages[:i], True, more))[0]
        after = text if i + 1 == len(messages) else _cleaned(self._render(messages[: i + 1], False, more))[0]
        if not text.startswith(before) or not text.startswith(after) or len(after) < len(before):
            raise DataError(
                f"{self.where} writes turn {i} otherwise when it is the last than when others follow, so that it does "
                "not show what was said; use turns = 'last', or mark it in the template with {% generation %}"
            )
        return len(before), len(after)

    def _render(self, messages: Sequence[Message], prompt: bool, more: dict[str, Any]) -> str:
        names = {"tools": None, "documents": None, **self.names, **more}
        names |= {"messages": list(messages), "add_generation_prompt": prompt}
        try:
            return self._render_text(self.text, names)
        except TemplateFault as e:
            raise DataError(f"{self.where} does not take these messages: {e}") from e
        except TooSlow:
            raise DataError(f"{self.where} did not write these messages in time; look for a loop in it") from None


def _encode(text: str, tokenizer: Spelling) -> tuple[Int32[np.ndarray, " t"], Int64[np.ndarray, "t 2"]]:
    """Ids of a text in which words of messages that look like special tokens are marked, and the places of each."""
    if not _WORDS.search(text):
        return tokenizer.spans(text)
    # the words go back to how they were, and the template's own special tokens are written otherwise
    special = tokenizer.special
    out: list[str] = []
    origin: list[np.ndarray] = []
    pattern = "|".join(re.escape(s) for s in sorted(special, key=len, reverse=True))
    number, at = {s: n for n, s in enumerate(special)}, 0
    for piece in re.split(f"({_WORDS.pattern.replace('(', '(?:')}|{pattern})", text):
        word = _WORDS.fullmatch(piece)
        if word is not None:
            new = special[int(word[1])] if int(word[1]) < len(special) else ""
        else:
            new = alias(number[piece]) if piece in number else piece
        out.append(new)
        origin.append(at + (np.arange(len(new)) if new is piece else np.zeros(len(new), np.int64)))
        at += len(piece)
    ids, spans = tokenizer.spans("".join(out), aliased=True)
    return ids, np.concatenate([*origin, [at]]).astype(np.int64)[spans]


def _marked(messages: Sequence[Message], special: tuple[str, ...]) -> list[dict[str, Any]]:
    """Messages in which special tokens are numbers between marks; a role of `ROLES` stays, as templates compare it."""
    mark = _marker(special)
    return [{k: v if k == "role" and v in ROLES else mark(v) for k, v in m.items()} for m in _without_none(messages)]


def _marked_names(more: Mapping[str, Any], special: tuple[str, ...]) -> dict[str, Any]:
    """What else a template sees, marked alike where it is a user's."""
    mark = _marker(special)
    return {k: mark(v) if k in ("tools", "documents") else v for k, v in more.items()}


def _marker(special: tuple[str, ...]) -> Callable[[Any], Any]:
    """Marks special tokens in every string of a value."""
    pattern = re.compile("|".join(re.escape(s) for s in sorted(special, key=len, reverse=True)) or "(?!)")
    number = {s: n for n, s in enumerate(special)}

    def mark(x: Any) -> Any:
        if isinstance(x, str):
            return pattern.sub(lambda m: f"{_WORD}{number[m[0]]}{_WORD_END}", _MARKS.sub("", x))
        if isinstance(x, Mapping):
            return {mark(k): mark(v) for k, v in x.items()}
        return [mark(v) for v in x] if isinstance(x, list | tuple) else x

    return mark


def _without_none(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Plain copies; a key without a value is left out, since many templates would write "None"."""
    if not isinstance(messages, list | tuple) or not all(isinstance(m, Mapping) and "role" in m for m in messages):
        raise DataError("a conversation is a list of messages such as {'role': 'user', 'content': 'Hello'}")
    return [{k: v for k, v in m.items() if v is not None} for m in messages]


def _cleaned(text: str) -> tuple[str, list[tuple[int, int]]]:
    """A rendered text without the marks around what was said, and where they stood; marks of words stay."""
    out, spans, begin, length = [], [], None, 0
    for piece in re.split(f"([{SAID_BEGIN}{SAID_END}])", text):
        if piece == SAID_BEGIN:
            begin = length
        elif piece == SAID_END and begin is not None:
            spans.append((begin, length))
            begin = None
        elif piece != SAID_END:
            out.append(piece)
            length += len(piece)
    return "".join(out), spans


def _check(text: str, where: str, compile: Callable[[str], Any]) -> None:
    """That a template can be read.

    Args:
      text, where: see `ChatTemplate`.
      compile: raises where it cannot.

    Raises:
      DataError: it is no Jinja, or `jinja2` is not installed.
    """
    try:
        import jinja2  # noqa: F401

        compile(text)
    except ImportError as e:
        raise DataError("chat templates need the package 'jinja2': pip install 'jaxscale[hf]'") from e
    except TooSlow:
        raise DataError(f"{where} could not be compiled in time; look for a huge constant in it") from None
    except TemplateFault as e:
        raise DataError(f"{where} is no template of Jinja: {e}") from e


def _spelled(names: Mapping[str, Any]) -> dict[str, str]:
    """Special tokens as text; files have some as dicts, with how they are matched."""
    found = {k: v.get("content") if isinstance(v, Mapping) else v for k, v in names.items()}
    return {k: v for k, v in found.items() if isinstance(v, str)}


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        found = json.loads(_text(path))
    except ValueError as e:
        raise DataError(f"{path} is no JSON ({e}); bring back the file as it came") from e
    return found if isinstance(found, dict) else {}


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        raise DataError(f"cannot read {path} ({e}); give a file of UTF-8 text") from e
