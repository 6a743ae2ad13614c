"""A member of a group of peers: it joins, takes part in means, and passes its state on to newcomers."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jaxscale.errors import LOST, MISTAKE, RunError
from jaxscale.peers.messages import TOKEN, Channel, Message, OtherToken, PeerLost, close_listener, listen
from jaxscale.peers.reduce import Arrays, Errors, MemberLost, Packing, Reduced, all_reduce

STATE = 300.0
"""Seconds that a newcomer waits for the member that sends it the state, which may compile first."""


class PeerRefused(RunError):
    """The coordinator refused this process, or is lost."""


@dataclasses.dataclass(frozen=True)
class Joined:
    """What a member begins with.

    Args:
      number: its number.
      round: exchanges that counted so far.
      state: the bytes of the shared state, from another member; `None` if its own is that of the others.
      newcomers: addresses of members that need the state from this member.
    """

    number: int
    round: int
    state: bytearray | None
    newcomers: list[dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class Counted:
    """A mean that counts.

    Args:
      reduced: the mean.
      members: the numbers of the members whose mean it is.
      attempts: how often it was computed.
      newcomers: addresses of members that need the state after this mean from this member.
    """

    reduced: Reduced
    members: list[int]
    attempts: int
    newcomers: list[dict[str, Any]]


class Member:
    """One process of a group.

    Args:
      address: host and port of the coordinator.
      token: the shared secret.
      name: what sentences call this process, such as its run folder.
      settings: texts by name that must be equal for all members.
      shares: the most members.
      silence: seconds after which a coordinator that sends nothing is lost.
      slow: seconds after which a member that sends no numbers is lost.

    Raises:
      PeerRefused: there is no coordinator, or it has another token.
    """

    def __init__(
        self,
        address: tuple[str, int],
        *,
        token: str,
        name: str,
        settings: dict[str, str],
        shares: int,
        silence: float = 10.0,
        slow: float = 60.0,
    ):
        self._place = f"{address[0]}:{address[1]}"
        try:
            self._channel = Channel.connect(address, token, silence)
        except OtherToken:
            error = self._error(
                f"the coordinator at {self._place} has another token; set {TOKEN} to that of the coordinator"
            )
            error.code = MISTAKE
            raise error from None
        except PeerLost as e:
            raise self._error(f"the coordinator at {self._place}: {e}; start it with jaxscale peers") from None
        self._token, self._silence, self._slow = token, silence, slow
        self._hello = {"name": name, "settings": settings, "shares": shares}
        self._listener = listen(self._channel.local_host(), 0)
        self._orders: queue.Queue[Message] = queue.Queue()
        self._arrived: dict[tuple[Any, ...], Channel] = {}
        self._change = threading.Condition()
        self._aborted = self._closed = False
        self._attempt, self._number = 0, -1
        self._links: list[Channel] = []
        self._given_up: set[tuple[Any, ...]] = set()
        for thread in (self._listen, self._accept, self._beat):
            threading.Thread(target=thread, daemon=True).start()

    @staticmethod
    def _error(text: str) -> PeerRefused:
        error = PeerRefused(text)
        error.code = LOST
        return error

    def _refusal(self, order: Message) -> PeerRefused:
        error = self._error(str(order["why"]))
        error.code = LOST if order.get("again") else MISTAKE
        return error

    def join(self, round: int, digest: str, size: int, stopping: Callable[[], bool] = lambda: False) -> Joined | None:
        """Wait until this process is a member.

        Args:
          round: exchanges that its state has taken part in.
          digest: of its shared state.
          size: bytes of the shared state.
          stopping: polled; once it is true, `None` is returned.

        Raises:
          PeerRefused: the coordinator refused it, and why.
        """
        self._send("hello", round=round, digest=digest, port=self._listener.getsockname()[1], **self._hello)
        while (begin := self._order("begin", stopping=stopping)) is not None:
            self._number, now = int(begin["number"]), int(begin["round"])
            if begin["transfer"] is None:
                return Joined(self._number, now, None, list(begin["send"]))
            key = ("state", int(begin["transfer"]))
            with contextlib.suppress(PeerLost):
                with contextlib.closing(self._from_member(key, STATE)) as channel:
                    _, state = channel.receive(size)
                if len(state) == size:
                    return Joined(self._number, now, state, [])
            self._give_up(key)
            self._send("not joined")
        return None

    def pass_on(self, newcomers: Sequence[dict[str, Any]], state: Sequence[np.ndarray]) -> None:
        """Send the shared state to newcomers; one that is lost meanwhile is left out.

        Args:
          newcomers: their addresses, from `join` or `exchange`.
          state: the arrays of the shared state.
        """
        for to in newcomers:
            with contextlib.suppress(PeerLost):
                link = Channel.connect((to["host"], to["port"]), self._token, self._slow)
                with contextlib.closing(link):
                    link.send("state", transfer=to["transfer"])
                    link.send("numbers", [np.ascontiguousarray(a) for a in state])
                    link.finish_sending()
                    with contextlib.suppress(PeerLost):
                        link.receive()  # until the newcomer has read all and closes

    def exchange(self, digest: str, arrays: Arrays, packing: Packing, errors: Errors | None = None) -> Counted:
        """Return the mean of all members' arrays, repeated without those that are lost meanwhile.

        Args:
          digest: of this member's shared state, which is compared with the others'.
          arrays: float32 (blocks, size of a block).
          packing: how numbers become bytes.
          errors: the rounding errors of the last mean that counted.

        Raises:
          PeerRefused: the coordinator refused this member, or is lost.
        """
        self._send("ready", digest=digest)
        attempts, reduced = 0, None
        while True:
            order = self._order("reduce", "counts")
            assert order is not None
            if order["type"] == "counts":
                assert reduced is not None
                return Counted(reduced, list(map(int, order["members"])), attempts, list(order["send"]))
            attempts += 1
            attempt = int(order["attempt"])
            try:
                reduced = self._attempted(order, arrays, packing, errors)
            except PeerLost as e:
                reduced = None
                self._send("failed", attempt=attempt, lost=e.member if isinstance(e, MemberLost) else None)
            else:
                sha = hashlib.sha256()
                for a in reduced.mean:
                    sha.update(a.data)
                self._send("reduced", attempt=attempt, digest=sha.hexdigest())

    def _attempted(self, order: Message, arrays: Arrays, packing: Packing, errors: Errors | None) -> Reduced:
        attempt, links = int(order["attempt"]), {}
        with self._change:
            self._attempt, self._aborted = attempt, self._aborted and self._attempt == attempt
            for key in [k for k in self._arrived if k[0] == "numbers" and k[1] < attempt]:
                self._arrived.pop(key).close()
        try:
            for to in sorted(order["members"], key=lambda m: m["number"]):
                number = int(to["number"])
                if number == self._number:
                    continue
                try:
                    if number > self._number:
                        link = Channel.connect((to["host"], int(to["port"])), self._token, self._slow)
                        link.send("numbers", attempt=attempt, member=self._number)
                    else:
                        link = self._from_member(("numbers", attempt, number), self._slow)
                except PeerLost as e:
                    raise MemberLost(number, e) from None
                with self._change:
                    links[number] = link
                    self._links = list(links.values())
                    if self._aborted:
                        raise PeerLost("another member was lost")
            return all_reduce(arrays, packing, links, self._number, errors)
        finally:
            for link in links.values():
                link.close()
            with self._change:
                self._links = []

    def finish(self) -> None:
        """Leave, since all steps are taken."""
        until = time.monotonic() + self._silence
        with contextlib.suppress(PeerRefused):
            self._send("finished")
            self._order("bye", stopping=lambda: time.monotonic() > until)
        self.close()

    def close(self) -> None:
        """Close all connections; the others go on without this member."""
        self._closed = True
        close_listener(self._listener)
        self._channel.close()
        with self._change:
            for link in (*self._links, *self._arrived.values()):
                link.close()

    def _send(self, kind: str, **fields: Any) -> None:
        try:
            self._channel.send(kind, **fields)
        except PeerLost as e:
            self._order_lost(e)

    def _order_lost(self, why: object) -> None:
        refused = [m for m in list(self._orders.queue) if m["type"] == "refused"]
        if refused:
            raise self._refusal(refused[0])
        raise self._error(
            f"the coordinator at {self._place} is lost: {why}; start jaxscale peers again, and resume every peer"
        )

    def _order(self, *kinds: str, stopping: Callable[[], bool] = lambda: False) -> Message | None:
        """Return the coordinator's next order of these types, or `None` when stopping."""
        while not stopping():
            with contextlib.suppress(queue.Empty):
                order = self._orders.get(timeout=0.2)
                if order["type"] == "refused":
                    raise self._refusal(order)
                if order["type"] == "lost":
                    self._order_lost(order["why"])
                if order["type"] in kinds:
                    return order
        return None

    def _listen(self) -> None:
        """Thread: read the coordinator's orders."""
        why = "it sent an order that cannot be read"
        try:
            while True:
                message, _ = self._channel.receive()
                if message["type"] == "abort":
                    self._abort(int(message["attempt"]))
                elif message["type"] == "source lost":
                    self._give_up(("state", int(message["transfer"])))
                elif message["type"] != "alive":
                    self._orders.put(message)
        except PeerLost as e:
            why = str(e)
        except (KeyError, ValueError, TypeError):
            pass
        finally:  # whatever happened: the training thread waits for an order
            self._orders.put({"type": "lost", "why": why})

    def _abort(self, attempt: int) -> None:
        with self._change:
            if attempt >= self._attempt:
                self._attempt, self._aborted = attempt, True
                for link in self._links:
                    link.close()
                self._change.notify_all()

    def _give_up(self, key: tuple[Any, ...]) -> None:
        """Wait no longer for a connection."""
        with self._change:
            self._given_up.add(key)
            self._change.notify_all()

    def _accept(self) -> None:
        """Thread: accept other members' connections."""
        while not self._closed:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._take, args=(sock,), daemon=True).start()

    def _take(self, sock: Any) -> None:
        try:
            channel = Channel(sock, self._token, accepted=True, silence=self._slow)
            message, _ = channel.receive()
            if message["type"] == "numbers":
                key: tuple[Any, ...] = ("numbers", int(message["attempt"]), int(message["member"]))
            else:
                key = ("state", int(message["transfer"]))
        except (PeerLost, KeyError, ValueError, TypeError):
            sock.close()
            return
        with self._change:
            if key in self._given_up or self._closed:
                channel.close()
                return
            self._arrived[key] = channel
            self._change.notify_all()

    def _from_member(self, key: tuple[Any, ...], seconds: float) -> Channel:
        """Wait for a connection."""
        until = time.monotonic() + seconds
        with self._change:
            while key not in self._arrived:
                if key in self._given_up:
                    raise PeerLost("who was to send it is lost")
                if key[0] == "numbers" and self._aborted and self._attempt == key[1]:
                    raise PeerLost("another member was lost")
                if not self._change.wait(max(until - time.monotonic(), 0)):
                    raise PeerLost("it did not connect")
            return self._arrived.pop(key)

    def _beat(self) -> None:
        """Thread: show the coordinator that this process lives."""
        while not self._closed:
            with contextlib.suppress(PeerLost):
                self._channel.send("alive")
            time.sleep(self._silence / 5)
