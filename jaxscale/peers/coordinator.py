"""The coordinator: who is a member, when all exchange, and whether an exchange counts.

It sees no arrays. Rounds are counted by the exchanges that counted so far: a mean counts once all living members have
computed it with equal digests. Whoever is lost is left out, and the others repeat the mean.
"""

from __future__ import annotations

import contextlib
import dataclasses
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from jaxscale.peers.messages import TEXT_LIMIT, TOKEN, Channel, Message, OtherToken, PeerLost, close_listener, listen

ATTEMPTS = 3
"""A member that others cannot reach is removed after this many failed attempts at one mean."""

MOST = 512
"""The most members: the list of their addresses fits into one message."""

_KEYS = 64
_TEXT = 4096
_ROUNDS = 1 << 53


@dataclasses.dataclass(eq=False)
class _Peer:
    """A connected process.

    Args:
      channel: the connection.
      name: what it calls itself, for sentences.
      address: where other peers reach it.
      round: exchanges that its state has taken part in.
      digest: of its shared state.
      number: its number as a member, or `None` while it waits.
      source: who sends it the shared state, or `None` if its own is that of the others.
      transfer: the number of that transfer.
      ready: the digest of its shared state, once it waits for the mean of the round.
      reply: its report on the current attempt: the digest of the mean, or `None` and the number of who was lost.
      refused: whether it is no longer wanted.
    """

    channel: Channel
    name: str
    address: tuple[str, int]
    round: int
    digest: str
    number: int | None = None
    source: _Peer | None = None
    transfer: int = 0
    ready: str | None = None
    reply: tuple[str | None, int | None] | None = None
    refused: bool = False

    def __str__(self) -> str:
        return self.name if self.number is None else f"{self.name} (peer {self.number})"


class Coordinator:
    """Keeps the members of one group of peers.

    Args:
      host: the address to listen at.
      port: the port; 0 takes a free one.
      token: the shared secret.
      least: peers that must be there before training begins.
      silence: seconds after which a peer that sends nothing is lost.
      patience: seconds that members wait for one that has not reached the end of a round.
      say: prints a line.

    Raises:
      ConfigError: the address cannot be used.

    Attributes:
      address: host and port.
      round: exchanges that counted so far.
      unfinished: names of members that were lost or refused and are not back.
    """

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        token: str = "",
        least: int = 2,
        silence: float = 10.0,
        patience: float = 600.0,
        say: Callable[[str], None] = lambda line: None,
    ):
        self._listener = listen(host, port)
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        self.round = 0
        self.unfinished: set[str] = set()
        self._token, self._least, self._silence, self._patience, self._say = token, least, silence, patience, say
        self._lock = threading.RLock()
        self._members: list[_Peer] = []
        self._waiting: list[_Peer] = []
        self._settings: dict[str, str] | None = None
        self._shares = 0
        self._attempt, self._attempts, self._blamed = 0, 0, Counter[int]()
        self._transfers = 0
        self._running: list[_Peer] = []  # members of the current attempt; empty between attempts
        self._first_ready: float | None = None
        self._counted: list[int] = []
        self._finished = self._done = False

    def serve(self, stop: Callable[[], bool] = lambda: False) -> bool:
        """Serve until no member is left and at least one has finished.

        Args:
          stop: polled; once it is true, serving ends.

        Returns:
          whether that is so; members that were lost before it are in `unfinished`.
        """
        self._listener.settimeout(0.2)
        try:
            while not self._done and not stop():
                with contextlib.suppress(TimeoutError):
                    sock, address = self._listener.accept()
                    threading.Thread(target=self._talk, args=(sock, address[0]), daemon=True).start()
                self._hurry()
        finally:
            self.close()
        return self._done

    def close(self) -> None:
        """Close all connections."""
        close_listener(self._listener)
        with self._lock:
            for peer in (*self._members, *self._waiting):
                peer.channel.finish_sending() if self._done else peer.channel.close()

    def members(self) -> list[int]:
        """Return the members' numbers."""
        with self._lock:
            return sorted(p.number for p in self._members if p.number is not None)

    def _talk(self, sock: socket.socket, host: str) -> None:
        """Read what one peer sends until it is gone."""
        peer: _Peer | None = None
        why = "it sent a message that cannot be read"
        try:
            channel = Channel(sock, self._token, accepted=True, silence=self._silence)
            try:
                while True:
                    message, _ = channel.receive()
                    if peer is None and message["type"] == "hello":
                        peer = _peer_of(channel, host, message)
                        self._welcome(peer, message)
                    elif message["type"] != "alive":
                        self._hear(peer, message)
                    elif peer is None or not peer.refused:
                        channel.send("alive")
            finally:
                channel.close()
        except OtherToken:
            self._say(f"a connection from {host} had another token; set {TOKEN} to the same text for all")
        except PeerLost as e:
            why = str(e)
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError):
            pass
        finally:  # whatever happened: the others must not wait for it
            if peer is not None:
                self._lose(peer, why)

    def _welcome(self, peer: _Peer, hello: Message) -> None:
        settings = {_plain(k, _TEXT): _plain(v, _TEXT) for k, v in list(hello["settings"].items())[:_KEYS]}
        shares = _whole(hello["shares"])
        with self._lock:
            why = self._differs(settings)
            if not 1 <= shares <= MOST:
                why = f"its group has {shares} shares; set shares to between 1 and {MOST}"
            if self._done:
                why = "all peers have finished their steps"
            if why is not None:
                self._refuse(peer, why)
                return
            if self._settings is None:
                self._settings, self._shares = settings, shares
            self._waiting.append(peer)
            self._say(f"{peer} has joined and waits, at round {peer.round}")
            self._advance()

    def _differs(self, settings: dict[str, str]) -> str | None:
        ours = self._settings
        if ours is None:
            return None
        for key in sorted({*ours, *settings}):
            mine, theirs = ours.get(key, "missing"), settings.get(key, "missing")
            if mine != theirs:
                return f"its {key} is {theirs}, and that of the other peers is {mine}; give all the same"
        return None

    def _hear(self, peer: _Peer | None, message: Message) -> None:
        kind = message["type"]
        with self._lock:
            if peer is None or peer.refused:
                return
            if kind == "ready" and peer in self._members:
                peer.ready = _plain(message["digest"], 64)
                self._first_ready = self._first_ready or time.monotonic()
            elif kind in ("reduced", "failed") and peer in self._running:
                lost = message.get("lost")
                if lost is not None and _whole(lost) not in range(self._shares):
                    raise ValueError(lost)
                if message["attempt"] == self._attempt:
                    whole = kind == "reduced"
                    peer.reply = (_plain(message["digest"], 64), None) if whole else (None, lost)
            elif kind == "not joined" and peer in self._members:
                self._members.remove(peer)
                peer.number = None
                self._waiting.append(peer)
            elif kind == "finished" and peer in self._members:
                self._members.remove(peer)
                self._finished = True
                self._say(f"{peer} has finished")
                self._broadcast([peer], "bye")
            self._advance()

    def _lose(self, peer: _Peer, why: str) -> None:
        with self._lock:
            if peer in self._members or peer in self._waiting:
                self._say(f"{peer} is lost: {why}")
                self._remove(peer)
                self._advance()

    def _remove(self, peer: _Peer) -> None:
        """Remove a peer, and end an attempt that it has not completed."""
        if peer in self._members:
            self.unfinished.add(peer.name)
        for group in (self._members, self._waiting):
            if peer in group:
                group.remove(peer)
        for newcomer in [p for p in self._members if p.source is peer and p.ready is None]:
            self._broadcast([newcomer], "source lost", transfer=newcomer.transfer)
        if peer in self._running:
            self._running.remove(peer)
            if peer.reply is None or peer.reply[0] is None:
                self._broadcast(self._running, "abort", attempt=self._attempt)

    def _refuse(self, peer: _Peer, why: str, *, again: bool = False) -> None:
        peer.refused = True
        self._say(f"{peer} is refused: {why}")
        self._remove(peer)
        self._broadcast([peer], "refused", why=f"{peer}: {why}"[: TEXT_LIMIT // 16], again=again)
        peer.channel.finish_sending()

    def _broadcast(self, to: list[_Peer], kind: str, **fields: Any) -> None:
        for peer in to:
            with contextlib.suppress(PeerLost):  # the thread that reads from it notices
                peer.channel.send(kind, **fields)

    def _hurry(self) -> None:
        """Remove members for which the others have waited too long."""
        with self._lock:
            first = self._first_ready
            if first is None or self._running or time.monotonic() - first < self._patience:
                return
            for peer in [p for p in self._members if p.ready is None]:
                waited = f"the others waited {self._patience:g} s for the end of its round"
                self._refuse(peer, f"{waited}; resume it to join again", again=True)
            self._first_ready = None
            self._advance()

    def _advance(self) -> None:
        """Take the next step for which everything is there: begin, attempt a mean, count it, or repeat it."""
        if self._running:
            if all(p.reply is not None for p in self._running):
                self._judge()
        elif self._members:
            if all(p.ready is not None for p in self._members):
                self._keep_equal(self._members, lambda p: p.ready, "shared parameters")
                self._start_attempt()
        elif self._finished:
            self._done = True
            for peer in list(self._waiting):
                self._refuse(peer, "all peers have finished their steps")
        elif len(self._waiting) >= max(self._least, 1):
            self._begin()

    def _keep_equal(self, peers: list[_Peer], digest: Callable[[_Peer], Any], what: str) -> None:
        """Refuse those whose digest is not that of most, and at a tie not that of the lowest number."""
        peers = sorted(peers, key=lambda p: p.number or 0)
        votes = Counter(digest(p) for p in peers)
        best = max(votes.values())
        right = next(digest(p) for p in peers if votes[digest(p)] == best)
        for peer in [p for p in peers if digest(p) != right]:
            others = f"{votes[right]} other peer{'s' if votes[right] > 1 else ''}"
            self._refuse(
                peer,
                f"the digest of its {what} at round {self.round} is {str(digest(peer))[:12]}, and that of {others} is "
                f"{str(right)[:12]}; its run is kept up to its last checkpoint, from which it can be resumed",
            )

    def _begin(self) -> None:
        self.round = max(p.round for p in self._waiting)
        if self.round:  # initial values may differ by rounding, with the layout; then those of one are used
            newest = [p for p in self._waiting if p.round == self.round]
            self._keep_equal(newest, lambda p: p.digest, "shared parameters")
        new = sorted(self._waiting, key=lambda p: p.round != self.round)  # those with the newest state first
        self._admit(new, new[0])

    def _admit(self, new: list[_Peer], source: _Peer) -> list[dict[str, Any]]:
        """Make peers members as far as there are shares; those that lack the state get it from `source`."""
        free = sorted(set(range(self._shares)) - {p.number for p in self._members})
        send: list[dict[str, Any]] = []
        beginning = source.number is None
        new = new[: len(free)]
        for peer, number in zip(new, free, strict=False):
            own = beginning and peer.round == self.round and peer.digest == source.digest
            peer.number, peer.ready = number, None
            self._waiting.remove(peer)
            self._members.append(peer)
            self.unfinished.discard(peer.name)
            peer.source = None if own else source
            if not own:
                self._transfers += 1
                peer.transfer = self._transfers
                send.append({"transfer": peer.transfer, "host": peer.address[0], "port": peer.address[1]})
            peer.round = self.round
        for peer in new:
            transfer = peer.source and peer.transfer
            fields = {"number": peer.number, "round": self.round, "transfer": transfer}
            self._broadcast([peer], "begin", **fields, send=send if peer is source else [])
            self._say(f"{peer} trains from the end of round {self.round}")
        return send

    def _start_attempt(self) -> None:
        self._first_ready = None
        self._attempt += 1
        self._running = sorted(self._members, key=lambda p: p.number or 0)
        for peer in self._running:
            peer.reply = None
        members = [{"number": p.number, "host": p.address[0], "port": p.address[1]} for p in self._running]
        self._broadcast(list(self._running), "reduce", attempt=self._attempt, round=self.round, members=members)

    def _judge(self) -> None:
        """All living members have reported: count the mean, or repeat it."""
        running, self._running = self._running, []
        failed = [p for p in running if p.reply is not None and p.reply[0] is None]
        if failed:
            self._attempts += 1
            self._blamed.update(p.reply[1] for p in failed if p.reply is not None and p.reply[1] is not None)
            if self._attempts >= ATTEMPTS:
                number, _ = max(self._blamed.items(), key=lambda item: item[1], default=(None, 0))
                for peer in [p for p in self._members if p.number == number]:
                    why = f"other peers lost the connection to it {ATTEMPTS} times; resume it to join again"
                    self._refuse(peer, why, again=True)
                self._attempts, self._blamed = 0, Counter()
            if self._members:
                self._say(f"round {self.round}: the mean is repeated among {self.members()}")
            self._advance()
            return
        self._keep_equal(running, lambda p: p.reply[0] if p.reply else None, "mean")
        self.round += 1
        self._attempts, self._blamed = 0, Counter()
        counted = [p for p in running if p in self._members]
        for peer in counted:
            peer.ready, peer.round = None, self.round
        for peer in [p for p in self._waiting if p.round > self.round]:
            self._refuse(peer, f"it is at round {peer.round}, and the others are at round {self.round}")
        numbers = self.members()
        if numbers != self._counted:
            self._say(f"round {self.round} and on: the mean of {len(numbers)} peers, {numbers}")
            self._counted = numbers
        send = self._admit(list(self._waiting), counted[0])
        for peer in counted:
            self._broadcast(
                [peer],
                "counts",
                attempt=self._attempt,
                round=self.round,
                members=[p.number for p in counted],
                send=send if peer is counted[0] else [],
            )


def _peer_of(channel: Channel, host: str, hello: Message) -> _Peer:
    port, round = _whole(hello["port"]), _whole(hello["round"])
    if not 0 < port < 65536 or not 0 <= round < _ROUNDS:
        raise ValueError(f"port {port}, round {round}")
    return _Peer(channel, _plain(hello["name"], 200), (host, port), round, _plain(hello["digest"], 64))


def _whole(value: Any) -> int:
    if type(value) is not int:
        raise TypeError(f"{value!r} is no whole number")
    return value


def _plain(value: Any, most: int) -> str:
    """Return the beginning of a text without what would move a terminal's cursor or cannot be encoded."""
    return "".join(c if c.isprintable() else "?" for c in str(value)[:most])
