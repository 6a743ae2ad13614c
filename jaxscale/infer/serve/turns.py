"""Texts that wait for the engine, in turns: no client, and no request of a client, keeps the others waiting."""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class Turns(Generic[T]):
    """Items that are taken in turns over clients, and over the requests of each client; in order within a request."""

    def __init__(self) -> None:
        self._clients: dict[str, dict[int, deque[T]]] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def put(self, client: str, request: int, item: T) -> None:
        """Puts an item behind those of the same request.

        Args:
          client: whose it is.
          request: which of its requests, any number.
          item: to be taken.
        """
        self._clients.setdefault(client, {}).setdefault(request, deque()).append(item)
        self._count += 1

    def take(self) -> T:
        """The next item. Its client goes behind the other clients, and its request behind the client's others.

        Raises:
          LookupError: there is none.
        """
        if not self._clients:
            raise LookupError("nothing waits")
        client, requests = next(iter(self._clients.items()))
        request, items = next(iter(requests.items()))
        item = items.popleft()
        self._count -= 1
        del self._clients[client], requests[request]
        if items:
            requests[request] = items
        if requests:
            self._clients[client] = requests
        return item

    def remove(self, client: str, request: int, item: T) -> bool:
        """Takes out an item; whether it was still here."""
        items = self._clients.get(client, {}).get(request)
        if items is None or item not in items:
            return False
        items.remove(item)
        self._count -= 1
        if not items:
            del self._clients[client][request]
        if not self._clients[client]:
            del self._clients[client]
        return True
