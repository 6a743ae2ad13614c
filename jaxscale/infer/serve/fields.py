"""What a client asks for, read from its JSON and checked field by field."""

from __future__ import annotations

import dataclasses
import json
import secrets
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from jaxscale import reading
from jaxscale.errors import ConfigError, near
from jaxscale.infer.sampling import Sampling
from jaxscale.infer.serve.errors import ApiError, bad

IGNORED = frozenset({"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"})
"""OpenAI's fields that change nothing of a text."""

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
"""OpenAI's fields that this server cannot follow, with the values that ask for nothing."""

_HINTS = {name: "; repetition_penalty is there" for name in ("presence_penalty", "frequency_penalty")}
_STOPS, _STOP_CHARACTERS = 16, 1000
_NUMBER = (int, float)
_DIGITS = 40
"""Of a whole number. No field takes larger ones, and errors repeat the number."""


@dataclasses.dataclass(frozen=True)
class Common:
    """What both interfaces take.

    Args:
      sampling: of every text, its seed that of the first.
      seeded: somebody gave that seed.
      n: continuations of each prompt.
      stream: answer piece by piece.
      usage: end a stream with the numbers of tokens.
      logprobs: how many of the likeliest tokens to tell with every chosen one; `None` tells no log-probability.
      to_the_end: nobody said how many tokens: as many as there is room for.
    """

    sampling: Sampling
    seeded: bool
    n: int
    stream: bool
    usage: bool
    logprobs: int | None
    to_the_end: bool


class Fields:
    """A request's JSON object, whose fields are taken one after the other; `done` refuses those that nobody took."""

    def __init__(self, body: bytes):
        given = _parsed(body)
        if not isinstance(given, dict):
            raise bad(None, "the body must be a JSON object")
        self._given = {name: value for name, value in given.items() if value is not None}
        self._known: set[str] = set(IGNORED)

    def take(self, name: str, kinds: type | tuple[type, ...], wanted: str, default: Any = None) -> Any:
        """A field's value.

        Raises:
          ApiError: it is of another kind.
        """
        self._known.add(name)
        value = self._given.get(name, default)
        if value is None:
            return None
        kinds = kinds if isinstance(kinds, tuple) else (kinds,)
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            raise bad(name, f"{name} = {short(value)}: must be {wanted}")
        return value

    def instead(self, name: str, value: Any, by: Any) -> bool:
        """Whether a field has this value, in whose place another is put."""
        found = self._given.get(name) == value and not isinstance(self._given[name], bool)
        if found:
            self._given[name] = by
        return found

    def sampling(
        self, name: str, kinds: type | tuple[type, ...], wanted: str, default: Any, own: str
    ) -> dict[str, Any]:
        """A field that is one of `Sampling`'s, named `own` there, if it was given or has a default."""
        value = self.take(name, kinds, wanted, default)
        if value is None:
            return {}
        try:
            own_value: Any = float(value) if kinds == _NUMBER else value
            Sampling(**{own: own_value})
        except (ConfigError, OverflowError) as e:
            raise bad(name, str(e).replace(f"Sampling.{own}", name)) from None
        return {own: own_value}

    def done(self) -> None:
        """Refuses what nothing here reads, or cannot be followed.

        Raises:
          ApiError: there is such a field.
        """
        for name, values in NEUTRAL.items():
            if name in self._given and self._given[name] not in values:
                raise bad(name, f"{name} = {short(self._given[name])} is not supported here{_HINTS.get(name, '')}")
        known = self._known | set(NEUTRAL)
        for name in self._given:
            if name not in known:
                raise bad(name[:60], f"unrecognised field {short(name)}{near(name[:60], known)}", "unknown_parameter")

    def model(self, name: str) -> None:
        """Checks that the model asked for, if any, is the one there is.

        Raises:
          ApiError: it is not.
        """
        asked = self.take("model", str, "text")
        if asked not in (None, name):
            message = f"the model {short(asked)} does not exist; this server has '{name}'"
            raise ApiError(404, message, param="model", code="model_not_found")

    def common(
        self,
        *,
        max_names: Iterable[str],
        max_default: int | None,
        logprobs: Callable[[], int | None],
        choice: Mapping[str, Any],
    ) -> Common:
        """What both interfaces take.

        Args:
          max_names: of the field that says how many tokens; the first one given counts.
          max_default: how many when none is given; `None` is as many as there is room for.
          logprobs: reads their own fields for that.
          choice: of `Sampling`, for what is not given.

        Raises:
          ApiError: a field that is of another kind, or out of range.
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
        if self._given.get("top_k") in (0, -1):  # how others say: all
            del self._given["top_k"]
        else:
            settings |= self.sampling("top_k", int, whole, choice.get("top_k"), "top_k")
        settings |= self.sampling("ignore_eos", bool, "true or false", None, "ignore_end")
        settings["stop"] = self._stop()
        seed = self.take("seed", int, whole)
        settings["seed"] = secrets.randbits(32) if seed is None else seed % 2**32
        shown = logprobs()
        n = self.take("n", int, whole, 1)
        if n < 1:
            raise bad("n", f"n = {n}: must be at least 1")
        stream = self.take("stream", bool, "true or false", False)
        options = self.take("stream_options", dict, "an object", {})
        if options and not stream:
            raise bad("stream_options", "stream_options is for stream = true")
        for name, value in options.items():
            if name not in ("include_usage", "include_obfuscation") or not isinstance(value, bool):
                told = f"stream_options.{name[:60]} = {short(value)}"
                raise bad("stream_options", f"{told}: what can be asked for is include_usage = true")
        sampling = Sampling(**settings, logprobs=shown or 0)
        return Common(sampling, seed is not None, n, stream, options.get("include_usage", False), shown, to_the_end)

    def _stop(self) -> tuple[str, ...]:
        stop = self.take("stop", (str, list), "text, or a list of texts", [])
        stop = [stop] if isinstance(stop, str) else stop
        if len(stop) > _STOPS or any(not isinstance(s, str) or not 0 < len(s) <= _STOP_CHARACTERS for s in stop):
            raise bad("stop", f"stop: must be at most {_STOPS} texts of 1 to {_STOP_CHARACTERS} characters")
        return tuple(stop)


def encodable(text: str, param: str) -> str:
    """The text itself, where it is Unicode that can be written.

    Raises:
      ApiError: it holds half a surrogate pair.
    """
    try:
        text.encode()
    except UnicodeEncodeError as e:
        raise bad(param, f"{param} holds half a surrogate pair at character {e.start}") from None
    return text


def short(value: Any) -> str:
    """JSON of a value, cut to what fits a sentence."""
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else text[:57] + "..."


def _parsed(body: bytes) -> Any:
    """The value of a JSON text.

    Raises:
      ApiError: it is none, is nested too deep, or has a whole number of too many digits.
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
        raise bad(None, f"the body has a whole number of {len(text)} digits; at most {_DIGITS} are read")
    return int(text)


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no number of JSON")
