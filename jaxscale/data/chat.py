"""Chat templates: conversations as token ids, and a mask of the tokens that the assistant wrote.

A template is the Jinja program in a Hugging Face folder (`chat_template.jinja`, or `chat_template` in
`tokenizer_config.json`). Since others wrote it, it runs in Jinja's sandbox, and has access only to the messages and the
names of the special tokens. Needs `jinja2` (`pip install 'jaxscale[hf]'`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from jaxtyping import Bool, Int32, Int64

from jaxscale.data.chat_render import GENERATED, GENERATED_END, Renderer, TemplateFault, TooSlow, compiled, render
from jaxscale.data.tokenizer import alias
from jaxscale.errors import DataError, near
from jaxscale.renamed import renamed

Message = Mapping[str, Any]
"""`{"role": "user", "content": "..."}`, and further keys that a template may use."""

TURNS = ("all", "last")
"""Which of the assistant's turns a model learns."""

ASSISTANT = "assistant"
"""The role whose messages are learned."""

ROLES = ("system", "developer", "user", ASSISTANT, "tool", "function")
"""Roles that OpenAI's clients send."""

# Markers around the number of a special token. They are noncharacters of Unicode, which occur in no text.
_WORD, _WORD_END = "\ufdd0", "\ufdd1"
_MARKS = re.compile(f"[{_WORD}{_WORD_END}{GENERATED}{GENERATED_END}\ufdd4\ufdd5]")
_WORDS = re.compile(f"{_WORD}([0-9]+){_WORD_END}")


class Spelling(Protocol):
    """What chat templates need of a tokenizer."""

    @property
    def special(self) -> tuple[str, ...]:
        """The texts of its special tokens."""
        ...

    def spans(self, text: str, *, aliased: bool = False) -> tuple[Int32[np.ndarray, " t"], Int64[np.ndarray, "t 2"]]:
        """Return token ids, and the span of characters (from, to) of each; special tokens are recognised.

        Args:
          text: the text.
          aliased: whether special token i is written as `alias(i)` instead of its own text.
        """
        ...


@renamed(said="ids_and_mask")
class ChatTemplate:
    """A model's format of conversations.

    Args:
      text: the template, a Jinja program.
      names: special tokens by name, such as `{"bos_token": "<s>"}`, which templates use.
      where: what errors call the template.
      seconds: time limit of rendering a conversation, in another process that is killed then; `None` renders in this
        process, without a limit.

    Raises:
      DataError: the template is not valid Jinja, or `jinja2` is not installed.
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
        """Read the template of a Hugging Face folder, or a file of Jinja.

        Args:
          folder: the folder or file.
          seconds: time limit of rendering, as of the class.

        Raises:
          DataError: there is no template, or it is not valid.
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
        """Return a conversation as text.

        Args:
          messages: the messages, in order.
          add_generation_prompt: whether to end with what opens the assistant's next turn.
          **more: further variables of the template, such as `tools`.

        Raises:
          DataError: the template does not accept these messages.
        """
        return _MARKS.sub("", self._render(_without_none(messages), add_generation_prompt, more))

    def ids(
        self, messages: Sequence[Message], tokenizer: Spelling, add_generation_prompt: bool = True, **more: Any
    ) -> Int32[np.ndarray, " t"]:
        """Return a conversation as token ids.

        Special tokens that the template writes are special. The same strings inside a message are ordinary text, so
        that a user cannot end a turn by writing them; `apply_chat_template` treats them as special by default.

        Args:
          messages: the messages, in order.
          tokenizer: the model's tokenizer.
          add_generation_prompt: whether to end with what opens the assistant's next turn.
          **more: further variables of the template, such as `tools`.

        Raises:
          DataError: the template does not accept these messages.
        """
        marked = _marked(messages, tokenizer.special)
        text = self._render(marked, add_generation_prompt, _marked_names(more, tokenizer.special))
        return _encode(_cleaned(text)[0], tokenizer)[0]

    def ids_and_mask(
        self, messages: Sequence[Message], tokenizer: Spelling, turns: str = "all", first: int = 0, **more: Any
    ) -> tuple[Int32[np.ndarray, " t"], Bool[np.ndarray, " t"]]:
        """Return token ids of a conversation, and a mask of those that the assistant wrote, with the end of its turns.

        A template may mark them (`{% generation %}`). If it does not, the tokens of a turn are those that it adds to
        the conversation before the turn with the generation prompt.

        Args:
          messages: the messages, in order.
          tokenizer: the model's tokenizer.
          turns: whether the mask has "all" turns of the assistant, or the "last" only.
          first: leave turns before this message out of the mask.
          **more: further variables of the template, as for `render`.

        Raises:
          DataError: there is no turn of the assistant, or the template writes a turn differently if others follow.
        """
        if turns not in TURNS:
            raise DataError(f"turns = '{turns}' does not exist{near(turns, TURNS)}")
        marked, more = _marked(messages, tokenizer.special), _marked_names(more, tokenizer.special)
        chosen = [i for i, m in enumerate(marked) if m.get("role") == ASSISTANT and i >= first]
        if not chosen:
            raise DataError(f"no message is the assistant's (role '{ASSISTANT}'), so there is nothing to learn from")
        chosen = chosen if turns == "all" else chosen[-1:]
        text, spans = _cleaned(self._render(marked, False, more))
        if spans:
            turn = [i for i, m in enumerate(marked) if m.get("role") == ASSISTANT]
            if len(turn) == len(spans):
                spans = [span for i, span in zip(turn, spans, strict=True) if i in chosen]
            elif turns != "all" or first:
                raise DataError(
                    f"{self.where} marks {len(spans)} pieces of {len(turn)} turns, so single turns cannot be "
                    "identified; use turns = 'all'"
                )
        else:
            spans = [self._span(text, marked, i, more) for i in chosen]
        ids, places = _encode(text, tokenizer)
        learned = np.zeros(len(ids), bool)
        for begin, end in spans:
            inside = np.flatnonzero((places[:, 0] < end) & (places[:, 1] > begin))
            if len(inside):  # and all tokens between, since some tokenizers give white space no span
                learned[inside[0] : inside[-1] + 1] = True
        return ids, learned

    def _span(self, text: str, messages: list[dict[str, Any]], i: int, more: dict[str, Any]) -> tuple[int, int]:
        before = _cleaned(self._render(messages[:i], True, more))[0]
        after = text if i + 1 == len(messages) else _cleaned(self._render(messages[: i + 1], False, more))[0]
        if not text.startswith(before) or not text.startswith(after) or len(after) < len(before):
            raise DataError(
                f"{self.where} writes turn {i} differently if it is the last than if others follow, so its tokens "
                "cannot be identified; use turns = 'last', or mark it in the template with {% generation %}"
            )
        return len(before), len(after)

    def _render(self, messages: Sequence[Message], prompt: bool, more: dict[str, Any]) -> str:
        names = {"tools": None, "documents": None, **self.names, **more}
        names |= {"messages": list(messages), "add_generation_prompt": prompt}
        try:
            return self._render_text(self.text, names)
        except TemplateFault as e:
            raise DataError(f"{self.where} does not accept these messages: {e}") from e
        except TooSlow:
            raise DataError(f"{self.where} did not finish in time; look for an endless loop in it") from None


def _encode(text: str, tokenizer: Spelling) -> tuple[Int32[np.ndarray, " t"], Int64[np.ndarray, "t 2"]]:
    """Return the token ids of a rendered text with marked strings, and the span of characters of each."""
    if not _WORDS.search(text):
        return tokenizer.spans(text)
    # Restore the marked strings, and write the template's own special tokens as aliases.
    special = tokenizer.special
    out: list[str] = []
    origin: list[np.ndarray] = []
    pattern = "|".join(re.escape(s) for s in sorted(special, key=len, reverse=True))
    number, offset = {s: n for n, s in enumerate(special)}, 0
    for piece in re.split(f"({_WORDS.pattern.replace('(', '(?:')}|{pattern})", text):
        word = _WORDS.fullmatch(piece)
        if word is not None:
            new = special[int(word[1])] if int(word[1]) < len(special) else ""
        else:
            new = alias(number[piece]) if piece in number else piece
        out.append(new)
        origin.append(offset + (np.arange(len(new)) if new is piece else np.zeros(len(new), np.int64)))
        offset += len(piece)
    ids, spans = tokenizer.spans("".join(out), aliased=True)
    return ids, np.concatenate([*origin, [offset]]).astype(np.int64)[spans]


def _marked(messages: Sequence[Message], special: tuple[str, ...]) -> list[dict[str, Any]]:
    """Return messages in which special tokens are replaced by numbers between markers, except for roles of `ROLES`."""
    mark = _marker(special)
    return [{k: v if k == "role" and v in ROLES else mark(v) for k, v in m.items()} for m in _without_none(messages)]


def _marked_names(more: Mapping[str, Any], special: tuple[str, ...]) -> dict[str, Any]:
    """Return further variables of a template, marked like messages if users may write them."""
    mark = _marker(special)
    return {k: mark(v) if k in ("tools", "documents") else v for k, v in more.items()}


def _marker(special: tuple[str, ...]) -> Callable[[Any], Any]:
    """Return a function that marks special tokens in every string of a value."""
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
    """Return copies of messages without keys whose value is `None`, since many templates would write "None"."""
    if not isinstance(messages, list | tuple) or not all(isinstance(m, Mapping) and "role" in m for m in messages):
        raise DataError("a conversation is a list of messages such as {'role': 'user', 'content': 'Hello'}")
    return [{k: v for k, v in m.items() if v is not None} for m in messages]


def _cleaned(text: str) -> tuple[str, list[tuple[int, int]]]:
    """Return a rendered text without the markers of the assistant's turns, and the spans that they marked."""
    out, spans, begin, length = [], [], None, 0
    for piece in re.split(f"([{GENERATED}{GENERATED_END}])", text):
        if piece == GENERATED:
            begin = length
        elif piece == GENERATED_END and begin is not None:
            spans.append((begin, length))
            begin = None
        elif piece != GENERATED_END:
            out.append(piece)
            length += len(piece)
    return "".join(out), spans


def _check(text: str, where: str, compile: Callable[[str], Any]) -> None:
    """Check that a template is valid.

    Args:
      text: the template.
      where: what errors call it.
      compile: compiles a template, or raises `TemplateFault` or `TooSlow`.

    Raises:
      DataError: the template is not valid Jinja, or `jinja2` is not installed.
    """
    try:
        import jinja2  # noqa: F401

        compile(text)
    except ImportError as e:
        raise DataError("chat templates need the package 'jinja2': pip install 'jaxscale[hf]'") from e
    except TooSlow:
        raise DataError(f"{where} could not be compiled in time; look for a huge constant in it") from None
    except TemplateFault as e:
        raise DataError(f"{where} is not a valid Jinja template: {e}") from e


def _spelled(names: Mapping[str, Any]) -> dict[str, str]:
    """Return special tokens as text; files may have dicts, with "content" and how the token is matched."""
    texts = {k: v.get("content") if isinstance(v, Mapping) else v for k, v in names.items()}
    return {k: v for k, v in texts.items() if isinstance(v, str)}


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(_text(path))
    except ValueError as e:
        raise DataError(f"{path} is not valid JSON ({e}); restore the original file") from e
    return content if isinstance(content, dict) else {}


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        raise DataError(f"cannot read {path} ({e}); give a file of UTF-8 text") from e
