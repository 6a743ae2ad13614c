"""Answers that are errors, in the form that OpenAI's clients know."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_KINDS = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """A request that is not answered as asked.

    Args:
      status: of HTTP.
      message: one sentence for a person.
      param: the field of the request that is at fault.
      code: a word for a program.
      headers: that the answer carries besides.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = dict(headers or {})

    def json(self) -> dict[str, Any]:
        """The body: `{"error": {"message", "type", "param", "code"}}`."""
        kind = _KINDS.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def bad(param: str | None, message: str, code: str | None = None) -> ApiError:
    """400, naming the field."""
    return ApiError(400, message, param=param, code=code)


def busy(message: str, status: int = 503, seconds: int = 1) -> ApiError:
    """Come back later."""
    code = "rate_limit_exceeded" if status == 429 else "unavailable"
    return ApiError(status, message, code=code, headers={"Retry-After": str(seconds)})
