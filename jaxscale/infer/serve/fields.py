"""The fields of a request's JSON, checked one by one."""

from __future__ import annotations

import dataclasses
import json
import secrets
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn

from jaxscale import reading
from jaxscale.errors import ConfigError, near
from jaxscale.infer.sampling import Sampling
from jaxscale.infer.serve.errors import ApiError, bad

IGNORED = frozenset({"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"})
"""OpenAI's fields that do not change the generated text; they are ignored."""

NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "best_of": (1,),
    "suffix": ("",),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "tools": ([],),
    "functions": ([],),
    "tool_choice": ("none", "auto"),
    "function_call": ("none", "auto"),
    "parallel_tool_calls": (True, False),
}
"""OpenAI's fields that this server does not support, with the values that have no effect and are accepted."""

_HINTS = {name: "; use repetition_penalty" for name in ("presence_penalty", "frequency_penalty")}
_STOPS, _STOP_CHARACTERS = 16, 1000
_NUMBER = (int, float)
_DIGITS = 40
"""The most digits of a whole number. No field needs more, and error messages repeat the number."""


@dataclasses.dataclass(frozen=True)
class Common:
    """The settings that both interfaces have.

    Args:
      sampling: of every sequence; the seed is that of the first.
      seeded: whether the request sets the seed.
      n: completions of each prompt.
      stream: answer piece by piece.
      usage: end a stream with the numbers of tokens.
      logprobs: how many of the likeliest tokens to return with each token; `None` returns no log-probabilities.
      to_the_end: generate up to the model's length, since the request sets no number of tokens.
    """

    sampling: Sampling
    seeded: bool
    n: int
    stream: bool
    usage: bool
    logprobs: int | None
    to_the_end: bool


class Fields:
    """The fields of a request's JSON object; read them one by one, then call `done`, which rejects unknown ones.

    Args:
      body: the JSON.

    Raises:
      ApiError: it is not a JSON object.
    """

    def __init__(self, body: bytes):
        values = _parsed(body)
        if not isinstance(values, dict):
            raise bad(None, "the body must be a JSON object")
        self._values = {name: value for name, value in values.items() if value is not None}
        self._known: set[str] = set(IGNORED)

    def take(self, name: str, kinds: type | tuple[type, ...], expected: str, default: object = None) -> Any:
        """Return a field's value.

        Args:
          name: of the field.
          kinds: its type or types.
          expected: a description of its values, for the error.
          default: the value of a missing field.

        Raises:
          ApiError: it has another type.
        """
        self._known.add(name)
        value = self._values.get(name, default)
        if value is None:
            return None
        kinds = kinds if isinstance(kinds, tuple) else (kinds,)
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            raise bad(name, f"{name} = {short(value)}: must be {expected}")
        return value

    def replace(self, name: str, value: object, new: object) -> bool:
        """Replace a field's value.

        Args:
          name: of the field.
          value: the value to replace.
          new: the value to put there.

        Returns:
          whether the field had that value.
        """
        same = self._values.get(name) == value and not isinstance(self._values[name], bool)
        if same:
            self._values[name] = new
        return same

    def sampling(
        self, name: str, kinds: type | tuple[type, ...], expected: str, default: object, setting: str
    ) -> dict[str, Any]:
        """Return a field that is a setting of `Sampling`.

        Args:
          name: of the field.
          kinds: its type or types.
          expected: a description of its values, for the error.
          default: the value of a missing field.
          setting: its name in `Sampling`.

        Returns:
          the value by the setting's name; empty without a value.

        Raises:
          ApiError: it has another type, or is out of range.
        """
        value = self.take(name, kinds, expected, default)
        if value is None:
            return {}
        try:
            converted: Any = float(value) if kinds == _NUMBER else value
            Sampling(**{setting: converted})
        except (ConfigError, OverflowError) as e:
            raise bad(name, str(e).replace(f"Sampling.{setting}", name)) from None
        return {setting: converted}

    def done(self) -> None:
        """Reject fields that are unknown, or have a value that is not supported.

        Raises:
          ApiError: there is such a field.
        """
        for name, values in NEUTRAL.items():
            if name in self._values and self._values[name] not in values:
                raise bad(name, f"{name} = {short(self._values[name])} is not supported here{_HINTS.get(name, '')}")
        known = self._known | set(NEUTRAL)
        for name in self._values:
            if name not in known:
                raise bad(name[:60], f"unrecognised field {short(name)}{near(name[:60], known)}", "unknown_parameter")

    def model(self, name: str) -> None:
        """Check that the request's model, if it names one, is this server's.

        Args:
          name: of the server's model.

        Raises:
          ApiError: it is another one.
        """
        requested = self.take("model", str, "text")
        if requested not in (None, name):
            message = f"the model {short(requested)} does not exist; this server has '{name}'"
            raise ApiError(404, message, param="model", code="model_not_found")

    def common(
        self,
        *,
        max_names: Iterable[str],
        max_default: int | None,
        logprobs: Callable[[], int | None],
        choice: Mapping[str, Any],
    ) -> Common:
        """Return the settings that both interfaces have.

        Args:
          max_names: names of the field for the number of tokens; the first one that is present counts.
          max_default: the number of tokens without such a field; `None` is up to the model's length.
          logprobs: reads the interface's own fields for log-probabilities.
          choice: fields of `Sampling` for what the request does not set.

        Raises:
          ApiError: a field has another type, or is out of range.
        """
        whole = "a whole number"
        settings: dict[str, Any] = {}
        for name in max_names:
            settings = self.sampling(name, int, whole, None, "max_tokens") | settings
        to_the_end = not settings and max_default is None
        if not settings and max_default is not None:
            settings["max_tokens"] = max_default
        for name in ("temperature", "top_p", "min_p", "repetition_penalty"):
            settings |= self.sampling(name, _NUMBER, "a number", choice.get(name), name)
        if self._values.get("top_k") in (0, -1):  # other servers' values for all tokens
            del self._values["top_k"]
        else:
            settings |= self.sampling("top_k", int, whole, choice.get("top_k"), "top_k")
        settings |= self.sampling("ignore_eos", bool, "true or false", None, "ignore_end")
        settings["stop"] = self._stop()
        seed = self.take("seed", int, whole)
        settings["seed"] = secrets.randbits(32) if seed is None else seed % 2**32
        top = logprobs()
        n = self.take("n", int, whole, 1)
        if n < 1:
            raise bad("n", f"n = {n}: must be at least 1")
        stream = self.take("stream", bool, "true or false", False)
        options = self.take("stream_options", dict, "an object", {})
        if options and not stream:
            raise bad("stream_options", "stream_options needs stream = true")
        for name, value in options.items():
            if name not in ("include_usage", "include_obfuscation") or not isinstance(value, bool):
                option = f"stream_options.{name[:60]} = {short(value)}"
                raise bad("stream_options", f"{option} is not supported; use include_usage = true")
        sampling = Sampling(**settings, logprobs=top or 0)
        return Common(sampling, seed is not None, n, stream, options.get("include_usage", False), top, to_the_end)

    def _stop(self) -> tuple[str, ...]:
        stop = self.take("stop", (str, list), "text, or a list of texts", [])
        stop = [stop] if isinstance(stop, str) else stop
        if len(stop) > _STOPS or any(not isinstance(s, str) or not 0 < len(s) <= _STOP_CHARACTERS for s in stop):
            raise bad("stop", f"stop: must be at most {_STOPS} texts of 1 to {_STOP_CHARACTERS} characters")
        return tuple(stop)


def encodable(text: str, param: str) -> str:
    """Return a text if it can be encoded as UTF-8.

    Args:
      text: the text.
      param: the field that it is of, for the error.

    Raises:
      ApiError: it has half a surrogate pair.
    """
    try:
        text.encode()
    except UnicodeEncodeError as e:
        raise bad(param, f"{param} has half a surrogate pair at character {e.start}") from None
    return text


def short(value: object) -> str:
    """Return a value's JSON, cut to 60 characters.

    Args:
      value: the value.
    """
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else text[:57] + "..."


def _parsed(body: bytes) -> Any:
    """The value of a JSON text.

    Raises:
      ApiError: it is not JSON, is nested too deep, or has a whole number of too many digits.
    """
    try:
        value = json.loads(body.decode("utf-8"), parse_constant=_no_constant, parse_int=_whole)
    except RecursionError:
        raise bad(None, f"the body is nested more than {reading.DEPTH} deep") from None
    except ValueError as e:
        raise bad(None, f"the body is not JSON: {e}") from None
    try:
        reading.check_depth(value)
    except ValueError:
        raise bad(None, f"the body is nested more than {reading.DEPTH} deep") from None
    return value


def _whole(text: str) -> int:
    if len(text) > _DIGITS:
        raise bad(None, f"the body has a whole number of {len(text)} digits; at most {_DIGITS} are allowed")
    return int(text)


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number in JSON")
