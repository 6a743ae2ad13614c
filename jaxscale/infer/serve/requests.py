"""Requests to the completion and chat interfaces: parsed, checked, and turned into sequences to generate."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeGuard

import numpy as np

from jaxscale.data.chat import ROLES
from jaxscale.data.tokenizer import Tokenizer
from jaxscale.errors import JaxscaleError, near
from jaxscale.infer.serve.errors import bad
from jaxscale.infer.serve.fields import Common, Fields, encodable, short
from jaxscale.infer.serve.worker import NewSequence

Message = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Served:
    """A model as the server sees it.

    Args:
      name: what clients call it.
      tokenizer: its tokenizer.
      length: the most tokens of a sequence, prompt included.
      vocab: its token ids are below this.
      encode: returns the ids of a prompt's text, with an opening token if there is one.
      chat: returns the ids of a conversation, up to the beginning of the assistant's message; `None` if the model has
        no chat template.
      end_ids: end-of-text token ids.
      choice: fields of `Sampling` for requests that do not set them.
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
class ParsedRequest:
    """A request, parsed.

    Args:
      common: settings.
      sequences: to generate: first the n completions of the first prompt.
      echoes: the text that each answer begins with.
      echo_only: the answer is the echo alone, since no new token was requested.
    """

    common: Common
    sequences: list[NewSequence]
    echoes: list[str]
    echo_only: bool = False

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts; a prompt counts once, however many completions it has."""
        return sum(len(s.prompt) for s in self.sequences[:: self.common.n])


def read_completion(body: bytes, served: Served, longest: int, most: int) -> ParsedRequest:
    """Parse a request to `/v1/completions`.

    Args:
      body: its JSON.
      served: the model.
      longest: the most tokens of a prompt.
      most: the most sequences of a request.

    Raises:
      ApiError: a field is unknown, has a wrong value, or requests what the server does not support.
    """
    fields = Fields(body)
    fields.model(served.name)
    echo = fields.take("echo", bool, "true or false", False)
    # The log-probabilities of a prompt come with the first new token, so that one is generated and not shown.
    echo_only = echo and fields.replace("max_tokens", 0, 1)

    def logprobs() -> int | None:
        value = fields.take("logprobs", int, "a whole number from 0 to 20")
        if value is not None:
            fields.sampling("logprobs", int, "a whole number from 0 to 20", None, "logprobs")
        return value

    common = fields.common(max_names=("max_tokens",), max_default=16, logprobs=logprobs, choice=served.choice)
    prompts = _prompts(fields.take("prompt", (str, list), "text, token ids, or a list of either", ""))
    fields.done()
    ids = [_encode(p, served) for p in prompts]
    echoes = [_decode(p, served) if echo else "" for p in prompts]
    request = _request(common, ids, echoes, "prompt", served, longest, most)
    sequences = request.sequences
    if echo and common.logprobs is not None:
        sequences = [s._replace(scored=True) for s in sequences]
    return dataclasses.replace(request, sequences=sequences, echo_only=echo_only)


def read_chat(body: bytes, served: Served, longest: int, most: int) -> ParsedRequest:
    """Parse a request to `/v1/chat/completions`.

    Args:
      body: its JSON.
      served: the model.
      longest: the most tokens of a prompt.
      most: the most sequences of a request.

    Raises:
      ApiError: as `read_completion`.
    """
    fields = Fields(body)
    fields.model(served.name)

    def logprobs() -> int | None:
        enabled = fields.take("logprobs", bool, "true or false", False)
        top = fields.sampling("top_logprobs", int, "a whole number from 0 to 20", None, "logprobs")
        if top and not enabled:
            raise bad("top_logprobs", "top_logprobs needs logprobs = true")
        return top.get("logprobs", 0) if enabled else None

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
    return _request(common, [ids], [""], "messages", served, longest, most)


def _request(
    common: Common, prompts: list[list[int]], echoes: list[str], param: str, served: Served, longest: int, most: int
) -> ParsedRequest:
    if len(prompts) > most:
        raise bad(param, f"{param} has {len(prompts)} prompts; this server allows a client {most} sequences at once")
    if len(prompts) * common.n > most:
        raise bad(
            "n",
            f"{common.n} completions of {len(prompts)} prompts; this server allows a client {most} sequences at once",
        )
    sequences: list[NewSequence] = []
    for ids in prompts:
        if len(ids) > longest:
            code = "context_length_exceeded"
            raise bad(param, f"{param} has {len(ids)} tokens, and this server takes at most {longest}", code)
        available, tokens = served.length - len(ids), common.sampling.max_tokens
        if common.to_the_end:
            tokens = available
        elif tokens > available:
            sizes = f"{len(ids)} tokens of {param} and {tokens} new ones"
            raise bad(param, f"{sizes} exceed the model's length of {served.length}", "context_length_exceeded")
        for i in range(common.n):
            # With a seed, every prompt gets the same seeds; without one, every sequence gets its own.
            nth = i if common.seeded else len(sequences)
            sampling = dataclasses.replace(
                common.sampling, max_tokens=tokens, seed=(common.sampling.seed + nth) % 2**32, stop=()
            )
            sequences.append(NewSequence(tuple(ids), sampling))
    return ParsedRequest(common, sequences, [echo for echo in echoes for _ in range(common.n)])


def _prompts(value: str | list[Any]) -> list[str | list[int]]:
    """The prompts of a field in any of its four forms."""
    if isinstance(value, str):
        return [value]
    if value and all(_is_id(t) for t in value):
        return [value]
    for prompt in value:
        if not isinstance(prompt, str) and not (isinstance(prompt, list) and prompt and all(_is_id(t) for t in prompt)):
            raise bad("prompt", "prompt: must be text, a list of texts, token ids, or a list of lists of token ids")
    if not value:
        raise bad("prompt", "prompt = []: there is nothing to continue")
    return value


def _is_id(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _decode(prompt: str | list[int], served: Served) -> str:
    return prompt if isinstance(prompt, str) else served.tokenizer.decode(np.asarray(prompt))


def _encode(prompt: str | list[int], served: Served) -> list[int]:
    if isinstance(prompt, str):
        try:
            ids = [int(t) for t in served.encode(encodable(prompt, "prompt"))]
        except JaxscaleError as e:
            raise bad("prompt", str(e)) from None
    else:
        ids = prompt
    wrong = next((t for t in ids if not 0 <= t < served.vocab), None)
    if wrong is not None:
        raise bad("prompt", f"prompt has the token id {str(wrong)[:40]}; ids are from 0 to {served.vocab - 1}")
    return ids


def _messages(values: list[Any]) -> list[Message]:
    if not values:
        raise bad("messages", "messages = []: there is nothing to answer")
    return [_message(m, f"messages[{i}]") for i, m in enumerate(values)]


def _message(value: object, at: str) -> Message:
    """A checked message, its content joined to one text."""
    if not isinstance(value, dict) or not isinstance(value.get("role"), str):
        raise bad("messages", f"{at}: must be an object with a role and content")
    role = value["role"]
    if role not in ROLES:  # a template may write '<|' + role + '|>', so that any role could forge special tokens
        raise bad("messages", f"{at}.role = {short(role)} is not one of {', '.join(ROLES)}{near(role[:60], ROLES)}")
    content = value.get("content")
    if isinstance(content, list):
        for part in content:
            if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
                raise bad("messages", f"{at}.content: its parts must be of type 'text'; this model reads nothing else")
        content = "".join(part["text"] for part in content)
    if not isinstance(content, str):
        raise bad("messages", f"{at}.content: must be text, or a list of parts of type 'text'")
    for name, field in value.items():
        if name not in ("role", "content", "name") and field:
            raise bad("messages", f"{at}.{name[:60]} is not supported here")
    message = {"role": role, "content": encodable(content, "messages")}
    if isinstance(value.get("name"), str):
        message["name"] = encodable(value["name"], "messages")
    return message
