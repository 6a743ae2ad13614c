"""Who may ask."""

from __future__ import annotations

import hashlib
import hmac
import re
from typing import Any

from jaxscale.infer.serve.errors import ApiError


class Guard:
    """Who may ask: with a key, who has it; without one, who names this machine by a loopback name.

    The second keeps web pages out whose own name was made to mean 127.0.0.1 (DNS rebinding). Other headers that say
    where a request comes from are not looked at, and no cross-origin header is sent.

    Args:
      key: or none.
      names: hosts that may be named.
    """

    def __init__(self, key: str | None, names: frozenset[str]):
        self._key = None if key is None else hashlib.sha256(key.encode()).digest()
        self._names = names

    def check(self, headers: Any) -> None:
        """Lets through, or raises.

        Raises:
          ApiError: 401 or 403.
        """
        if self._key is None:
            host = re.sub(r":[0-9]*$", "", headers.get("Host", "").strip()).lower().strip("[]")
            if host and host not in self._names:
                raise ApiError(403, "this server has no API key, and answers only to its own loopback name")
            return
        kind, _, given = headers.get("Authorization", "").partition(" ")
        digest = hashlib.sha256(given.strip().encode("utf-8", "surrogateescape")).digest()
        if not hmac.compare_digest(digest, self._key) or kind.lower() != "bearer":
            told = "the API key is missing or wrong: Authorization: Bearer KEY"
            raise ApiError(401, told, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
