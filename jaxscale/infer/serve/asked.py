"""A request to either interface, read whole: the texts to continue, and how the answer is wanted."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxscale.data.chat import ROLES
from jaxscale.data.tokenizer import Tokenizer
from jaxscale.errors import JaxscaleError, near
from jaxscale.infer.serve.errors import bad
from jaxscale.infer.serve.fields import Common, Fields, encodable, short
from jaxscale.infer.serve.worker import Text

Message = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Served:
    """A model as the server knows it.

    Args:
      name: what clients call it.
      tokenizer: of its text.
      length: tokens that a text may have, its prompt included.
      vocab: its ids are below this.
      encode: ids of a prompt's text, with what opens a text.
      chat: ids of a conversation, up to where the assistant begins to speak; `None` when the model has no template.
      end_ids: which end a text.
      choice: fields of `Sampling` for a request that says nothing of them.
    """

    name: str
    tokenizer: Tokenizer
    length: int
    vocab: int
    encode: Callable[[str], Sequence[int]]
    chat: Callable[[list[Message]], Sequence[int]] | None = None
    end_ids: frozenset[int] = frozenset()
    choice: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Asked:
    """What was asked for.

    Args:
      common: settings.
      texts: to be continued, the n of the first prompt first.
      echoes: what each answer begins with.
      silent: nothing but that is wanted, and no token was asked for.
    """

    common: Common
    texts: list[Text]
    echoes: list[str]
    silent: bool = False

    @property
    def prompt_tokens(self) -> int:
        """A prompt counts once, however many continuations it has."""
        return sum(len(t.prompt) for t in self.texts[:: self.common.n])


def read_completion(body: bytes, served: Served, longest: int, most: int) -> Asked:
    """A request to `/v1/completions`.

    Args:
      body: its JSON.
      served: the model.
      longest: tokens that a prompt may have.
      most: texts that one request may ask for.

    Raises:
      ApiError: a field is wrong, unknown, or asks for what is not here.
    """
    fields = Fields(body)
    fields.model(served.name)
    echo = fields.take("echo", bool, "true or false", False)
    silent = echo and fields.instead("max_tokens", 0, 1)  # a prompt's own log-probabilities come with a token after it

    def logprobs() -> int | None:
        shown = fields.take("logprobs", int, "a whole number from 0 to 20")
        if shown is not None:
            fields.sampling("logprobs", int, "a whole number from 0 to 20", None, "logprobs")
        return shown

    common = fields.common(max_names=("max_tokens",), max_default=16, logprobs=logprobs, choice=served.choice)
    prompts = _prompts(fields.take("prompt", (str, list), "text, token ids, or a list of either", ""))
    fields.done()
    ids = [_encoded(p, served) for p in prompts]
    told = [_told(p, served) if echo else "" for p in prompts]
    asked = _asked(common, ids, told, "prompt", served, longest, most)
    texts = [t._replace(scored=True) for t in asked.texts] if echo and common.logprobs is not None else asked.texts
    return dataclasses.replace(asked, texts=texts, silent=silent)


def read_chat(body: bytes, served: Served, longest: int, most: int) -> Asked:
    """A request to `/v1/chat/completions`; arguments and errors as `read_completion`'s."""
    fields = Fields(body)
    fields.model(served.name)

    def logprobs() -> int | None:
        wanted = fields.take("logprobs", bool, "true or false", False)
        top = fields.sampling("top_logprobs", int, "a whole number from 0 to 20", None, "logprobs")
        if top and not wanted:
            raise bad("top_logprobs", "top_logprobs is for logprobs = true")
        return top.get("logprobs", 0) if wanted else None

    names = ("max_completion_tokens", "max_tokens")
    common = fields.common(max_names=names, max_default=None, logprobs=logprobs, choice=served.choice)
    messages = _messages(fields.take("messages", list, "a list of messages", []))
    fields.done()
    if served.chat is None:
        raise bad("messages", f"the model '{served.name}' has no chat template; use /v1/completions")
    try:
        ids = list(served.chat(messages))
    except JaxscaleError as e:
        raise bad("messages", str(e)) from None
    return _asked(common, [ids], [""], "messages", served, longest, most)


def _asked(
    common: Common, prompts: list[list[int]], told: list[str], param: str, served: Served, longest: int, most: int
) -> Asked:
    if len(prompts) > most:
        raise bad(param, f"{param} has {len(prompts)} texts; this server takes {most} texts of a client")
    if len(prompts) * common.n > most:
        raise bad(
            "n", f"{common.n} continuations of {len(prompts)} prompts; this server takes {most} texts of a client"
        )
    texts: list[Text] = []
    for ids in prompts:
        if len(ids) > longest:
            code = "context_length_exceeded"
            raise bad(param, f"{param} has {len(ids)} tokens, and this server takes at most {longest}", code)
        room, wanted = served.length - len(ids), common.sampling.max_tokens
        if common.to_the_end:
            wanted = room
        elif wanted > room:
            sizes = f"{len(ids)} tokens of {param} and {wanted} new ones"
            raise bad(param, f"{sizes} are more than the {served.length} of a text", "context_length_exceeded")
        for i in range(common.n):
            nth = i if common.seeded else len(texts)  # a seed and a prompt give one text; without, each is its own
            own = dataclasses.replace(
                common.sampling, max_tokens=wanted, seed=(common.sampling.seed + nth) % 2**32, stop=()
            )
            texts.append(Text(tuple(ids), own))
    return Asked(common, texts, [t for t in told for _ in range(common.n)])


def _prompts(given: str | list[Any]) -> list[str | list[int]]:
    """The prompts of any of the four forms."""
    if isinstance(given, str):
        return [given]
    if given and all(_is_id(t) for t in given):
        return [given]
    for prompt in given:
        if not isinstance(prompt, str) and not (isinstance(prompt, list) and prompt and all(_is_id(t) for t in prompt)):
            raise bad("prompt", "prompt: must be text, a list of texts, token ids, or a list of lists of token ids")
    if not given:
        raise bad("prompt", "prompt = []: there is nothing to continue")
    return given


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _told(prompt: str | list[int], served: Served) -> str:
    return prompt if isinstance(prompt, str) else served.tokenizer.decode(np.asarray(prompt))


def _encoded(prompt: str | list[int], served: Served) -> list[int]:
    if isinstance(prompt, str):
        try:
            ids = [int(t) for t in served.encode(encodable(prompt, "prompt"))]
        except JaxscaleError as e:
            raise bad("prompt", str(e)) from None
    else:
        ids = prompt
    strange = next((t for t in ids if not 0 <= t < served.vocab), None)
    if strange is not None:
        raise bad("prompt", f"prompt holds the token id {str(strange)[:40]}; ids are from 0 to {served.vocab - 1}")
    return ids


def _messages(given: list[Any]) -> list[Message]:
    if not given:
        raise bad("messages", "messages = []: there is nothing to answer")
    return [_message(m, f"messages[{i}]") for i, m in enumerate(given)]


def _message(given: Any, at: str) -> Message:
    """One of them, its content as one text."""
    if not isinstance(given, dict) or not isinstance(given.get("role"), str):
        raise bad("messages", f"{at}: must be an object with a role and content")
    role = given["role"]
    if role not in ROLES:  # a template may write '<|' + role + '|>'
        raise bad("messages", f"{at}.role = {short(role)} is not one of {', '.join(ROLES)}{near(role[:60], ROLES)}")
    content = given.get("content")
    if isinstance(content, list):
        for part in content:
            if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
                raise bad("messages", f"{at}.content: its parts must be of type 'text'; this model reads nothing else")
        content = "".join(part["text"] for part in content)
    if not isinstance(content, str):
        raise bad("messages", f"{at}.content: must be text, or a list of parts of type 'text'")
    for name, value in given.items():
        if name not in ("role", "content", "name") and value:
            raise bad("messages", f"{at}.{name[:60]} is not supported here")
    message = {"role": role, "content": encodable(content, "messages")}
    if isinstance(given.get("name"), str):
        message["name"] = encodable(given["name"], "messages")
    return message
