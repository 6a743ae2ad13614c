"""Limits of a server: sizes, numbers and times."""

from __future__ import annotations

import dataclasses

from jaxscale.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class Limits:
    """Limits of what clients can request. Sizes are in bytes, times in seconds.

    Args:
      head: bytes of a request line with its headers.
      body: bytes of a request's JSON.
      prompt: tokens of a prompt; `None` is what the model's length leaves.
      requests: sequences that wait or run at once; one more is answered 429. A request for n completions of m prompts
        has n·m sequences.
      share: how many of these one client (an address) may have; by default half of `requests`, so that no client can
        take all. Behind a proxy all clients have one address.
      connections: connections open at once; one more is answered 503 and closed.
      read: time from the first byte of a request to the last of its body.
      write: time for the client to receive each write.
      idle: time between requests of one connection.
      time: time from the request to the last token of its answer; then it is cancelled, and answered 504.
      drain: time for running requests to end, once the server is stopping.

    Raises:
      ConfigError: a limit is not above 0.
    """

    head: int = 32 * 1024
    body: int = 1024 * 1024
    prompt: int | None = None
    requests: int = 512
    share: int | None = None
    connections: int = 1024
    read: float = 30.0
    write: float = 30.0
    idle: float = 60.0
    time: float = 600.0
    drain: float = 30.0

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is not None and not 0 < value < float("inf"):
                raise ConfigError(f"Limits.{field.name} = {value!r}: must be above 0, and finite")

    @property
    def per_client(self) -> int:
        """Sequences that one client may have waiting or running."""
        return min(self.requests, max(1, self.requests // 2) if self.share is None else self.share)
