"""Check of every error: one sentence that names the offending thing and what to do."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from jaxscale.errors import JaxscaleError


@contextlib.contextmanager
def raises_saying(kind: type[Exception], *words: str) -> Iterator[None]:
    """Expect one of our errors, on one line, whose message contains all `words`."""
    assert issubclass(kind, JaxscaleError)
    with pytest.raises(kind) as caught:
        yield
    message = str(caught.value)
    assert "\n" not in message, f"more than a line: {message!r}"
    missing = [w for w in words if w not in message]
    assert not missing, f"{message!r} does not say {missing}"
