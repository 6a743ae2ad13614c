"""Errors as answers, in the format of OpenAI's interface."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_KINDS = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """A request that cannot be answered.

    Args:
      status: HTTP status.
      message: one sentence for people.
      param: the field of the request that is wrong.
      code: a word for programs.
      headers: further headers of the answer.
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
        """Return the body: `{"error": {"message", "type", "param", "code"}}`."""
        kind = _KINDS.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def bad(param: str | None, message: str, code: str | None = None) -> ApiError:
    """Return an error 400.

    Args:
      param: the field that is wrong.
      message: one sentence for people.
      code: a word for programs.
    """
    return ApiError(400, message, param=param, code=code)


def busy(message: str, status: int = 503, seconds: int = 1) -> ApiError:
    """Return an error that asks the client to try again later.

    Args:
      message: one sentence for people.
      status: HTTP status.
      seconds: when to try again.
    """
    code = "rate_limit_exceeded" if status == 429 else "unavailable"
    return ApiError(status, message, code=code, headers={"Retry-After": str(seconds)})
