"""A queue that is fair to clients, and to the requests of each client."""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class FairQueue(Generic[T]):
    """Round robin over clients, and over the requests of each client; items of one request stay in order."""

    def __init__(self) -> None:
        self._clients: dict[str, dict[int, deque[T]]] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def put(self, client: str, request: int, item: T) -> None:
        """Append an item to those of the same request.

        Args:
          client: whose request it is.
          request: a number that identifies the request among the client's.
          item: the item.
        """
        self._clients.setdefault(client, {}).setdefault(request, deque()).append(item)
        self._count += 1

    def take(self) -> T:
        """Remove and return the next item; its client and its request go to the end of the line.

        Raises:
          LookupError: the queue is empty.
        """
        if not self._clients:
            raise LookupError("the queue is empty")
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
        """Remove an item.

        Args:
          client: as for `put`.
          request: as for `put`.
          item: the item.

        Returns:
          whether it was in the queue.
        """
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
