"""Authorisation of requests."""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Mapping
from email.message import Message

from jaxscale.infer.serve.errors import ApiError


class Guard:
    """Accepts requests that have the API key; without a key, requests whose header Host is a loopback name.

    Checking the host keeps out web pages whose own name resolves to 127.0.0.1 (DNS rebinding). Other headers about the
    origin of a request are ignored, and no cross-origin header is sent.

    Args:
      key: the API key, or `None`.
      names: the accepted hosts.
    """

    def __init__(self, key: str | None, names: frozenset[str]):
        self._key = None if key is None else hashlib.sha256(key.encode()).digest()
        self._names = names

    def check(self, headers: Mapping[str, str] | Message) -> None:
        """Check a request.

        Args:
          headers: its headers.

        Raises:
          ApiError: 401 for a missing or wrong key, 403 for a host that is not accepted.
        """
        if self._key is None:
            host = re.sub(r":[0-9]*$", "", headers.get("Host", "").strip()).lower().strip("[]")
            if host and host not in self._names:
                raise ApiError(403, "this server has no API key, and so accepts only requests to its loopback name")
            return
        kind, _, key = headers.get("Authorization", "").partition(" ")
        digest = hashlib.sha256(key.strip().encode("utf-8", "surrogateescape")).digest()
        if not hmac.compare_digest(digest, self._key) or kind.lower() != "bearer":
            message = "the API key is missing or wrong; send the header Authorization: Bearer KEY"
            raise ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
