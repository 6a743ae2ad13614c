"""Read single keys of a GGUF file's metadata: each has the type that it should have, or is named."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from jaxscale import reading
from jaxscale.errors import CheckpointError
from jaxscale.interop.fields import LARGEST, is_number, short

_NEEDED = object()


class Keys:
    """The keys of a file that begin in the same way.

    All methods return `default` for a key that is missing; without a default it is required. They raise
    CheckpointError, naming the file and the key, if it is missing or has a value of another type.

    Args:
      metadata: the file's metadata.
      prefix: how the keys begin; methods take the rest of the name.
      what: the file, for messages.
    """

    def __init__(self, metadata: Mapping[str, Any], prefix: str, what: str):
        self.what, self.prefix = what, prefix
        self._values = {k.removeprefix(prefix): v for k, v in metadata.items() if k.startswith(prefix)}

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def whole(self, key: str, least: int = 0, most: int = LARGEST, default: Any = _NEEDED) -> Any:
        """Return a whole number from `least` to `most`."""
        kind = f"a whole number from {least} to {most}"
        return self._read(key, lambda v: reading.is_whole(v, least) and v <= most, kind, default)

    def number(self, key: str, least: float = 0.0, default: Any = _NEEDED) -> Any:
        """Return a finite number of at least `least`."""
        value = self._read(key, lambda v: is_number(v) and v >= least, f"a number of at least {least:g}", default)
        return value if value is default else float(value)

    def text(self, key: str, default: Any = _NEEDED) -> Any:
        """Return a text."""
        return self._read(key, lambda v: isinstance(v, str), "a text", default)

    def flag(self, key: str, default: Any = _NEEDED) -> Any:
        """Return true or false."""
        return self._read(key, lambda v: isinstance(v, bool), "true or false", default)

    def strings(self, key: str, default: Any = _NEEDED) -> Any:
        """Return a list of texts."""
        return self._read(key, lambda v: _list_of(str, v), "a list of texts", default)

    def wholes(self, key: str, default: Any = _NEEDED) -> Any:
        """Return a list of whole numbers."""
        return self._read(key, lambda v: _list_of(int, v), "a list of whole numbers", default)

    def only(self, key: str, *known: Any, why: str) -> None:
        """Check that a key is missing or has one of a few values.

        Args:
          key: the key.
          *known: the values that it may have.
          why: what is not supported, for the message.
        """
        value = self._values.get(key, known[0])
        if isinstance(value, list) or value not in known:
            raise CheckpointError(
                f"{self.what} has {self.prefix}{key} = {short(value)}, but {why}; use its Hugging Face folder"
            )

    def _read(self, key: str, fits: Callable[[Any], bool], kind: str, default: Any) -> Any:
        if key not in self._values:
            if default is _NEEDED:
                raise CheckpointError(f"{self.what} has no {self.prefix}{key}")
            return default
        value = self._values[key]
        if not fits(value):
            raise CheckpointError(f"{self.what} has {self.prefix}{key} = {short(value)}, which is not {kind}")
        return value


def _list_of(kind: type, value: object) -> bool:
    return isinstance(value, list) and all(isinstance(x, kind) for x in value)
