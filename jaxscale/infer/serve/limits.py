"""What a server takes, and for how long it waits."""

from __future__ import annotations

import dataclasses

from jaxscale.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class Limits:
    """Bounds of what strangers can ask for. Sizes in bytes, times in seconds.

    Args:
      head: of a request line with its headers.
      body: of a request's JSON.
      prompt: tokens of a prompt; `None` is what the engine's rows hold.
      requests: texts that wait or run; one more is answered 429. A request for n continuations of m prompts is n·m of
        them.
      share: of these, those of one client (an address); by default half of `requests`, so that no client keeps others
        out. Behind a proxy all clients have one address.
      connections: open at once; one more is answered 503 and closed.
      read: from the first byte of a request to the last of its body.
      write: for the client to take what is sent.
      idle: between requests of one connection.
      time: from the request to the last token of its answer; then it is cancelled, and answered 504.
      drain: for what runs to end, once the server was told to stop.

    Raises:
      ConfigError: one that is not above 0.
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
    def most(self) -> int:
        """Texts of one client."""
        return min(self.requests, max(1, self.requests // 2) if self.share is None else self.share)
