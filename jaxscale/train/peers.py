"""A run's part in a group of peers: it joins before the first step, and exchanges arrays between steps."""

from __future__ import annotations

import dataclasses
import hashlib
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxscale.errors import RunError
from jaxscale.layout import path_name
from jaxscale.parallel import host_arrays
from jaxscale.peers import Errors, Member, address_of, token_for
from jaxscale.step.config import TrainConfig
from jaxscale.step.meeting import Meeting
from jaxscale.step.prepare import Prepared
from jaxscale.step.state import TrainState

Tree = Any


class Alone:
    """The part of a run that trains by itself: nothing."""

    def join(self, prepared: Prepared, state: TrainState) -> tuple[Prepared, TrainState]:
        """Return both as they are.

        Args:
          prepared: the run's compiled parts and data.
          state: the state to train from.
        """
        return prepared, state

    def due(self, step: int) -> bool:
        """Return whether there is an exchange after a step.

        Args:
          step: the step, from 1.
        """
        return False

    def exchange(self, step: int, state: TrainState) -> tuple[TrainState, dict[str, float]]:
        """Return the state after the exchange, and metrics.

        Args:
          step: the step, from 1.
          state: the state after it.
        """
        return state, {}

    def leave(self, *, finished: bool) -> None:
        """Leave the group.

        Args:
          finished: whether all steps are taken.
        """


class Group(Alone):
    """A run's part in a group of peers.

    Args:
      meeting: what is exchanged, and when.
      config: the run's settings.
      name: what sentences call this run.
      say: prints a line.
      stopping: whether the run should stop.
    """

    def __init__(
        self,
        meeting: Meeting,
        config: TrainConfig,
        name: str,
        say: Callable[[str], None],
        stopping: Callable[[], bool],
    ):
        self.meeting, self.config, self.name, self.say, self.stopping = meeting, config, name, say, stopping
        self.member: Member | None = None
        self.number, self.round, self.members = -1, 0, [0]
        self.errors = Errors()
        self._sent = jax.jit(meeting.sent)

    def join(self, prepared: Prepared, state: TrainState) -> tuple[Prepared, TrainState]:
        """Join the group; return the loader of this peer's share of rows, and the state that the group has.

        Raises:
          RunError: there is no coordinator, it refused this run, or the run was stopped while it waited.
        """
        meeting, blueprint = self.meeting, prepared.blueprint
        host, port = address_of(meeting.coordinator)
        shardings = blueprint.shardings()
        placed = None if shardings is None else shardings.extra
        donated: Any = dict(donate_argnums=0, out_shardings=shardings)
        merged = jax.jit(meeting.joined, **(donated if shardings is not None else {"donate_argnums": 0}))
        self._joined = lambda state, shared: merged(state, jax.device_put(shared, placed))
        shared = jax.device_get(meeting.shared(state))
        self.member = Member(
            (host, port),
            token=token_for(host),
            name=self.name,
            settings=self._settings(prepared),
            shares=meeting.shares,
        )
        self.say(f"waiting for the other peers of {host}:{port}")
        round = int(state.step) // meeting.every
        joined = self.member.join(round, digest(shared), _bytes(shared), self.stopping)
        if joined is None:
            self.member.close()
            raise RunError(f"{self.name} was stopped while it waited for other peers; nothing was trained")
        self.number, self.round = joined.number, joined.round
        self.member.pass_on(joined.newcomers, jax.tree.leaves(shared))
        if joined.state is not None:
            state = self._joined(state, _from_bytes(joined.state, shared))
            step = np.asarray(joined.round * meeting.every, np.int32)
            state = state.replace(step=jax.device_put(step, state.step.sharding))
        key = jax.random.fold_in(jax.random.key(self.config.seed), self.number)  # peers' dropout differs
        state = state.replace(rng=jax.device_put(key, state.rng.sharding))
        loader = dataclasses.replace(prepared.loader, shares=meeting.shares, share=self.number)
        self.say(f"this is peer {self.number}; it trains from step {int(state.step)}")
        return dataclasses.replace(prepared, loader=loader), state

    def due(self, step: int) -> bool:
        """Return whether a round ends after a step."""
        return step % self.meeting.every == 0

    def exchange(self, step: int, state: TrainState) -> tuple[TrainState, dict[str, float]]:
        """Exchange arrays with the peers that are there.

        Raises:
          RunError: this run was refused, the coordinator is lost, or the state cannot be exchanged.
        """
        meeting, began, member = self.meeting, time.perf_counter(), self.member
        assert member is not None
        if step != (self.round + 1) * meeting.every:
            raise RunError(
                f"{self.name} went back to step {step}, and the other peers are at step {self.round * meeting.every}; "
                f"resume it to join them again, and leave out guards that go back"
            )
        shared, own = jax.device_get((meeting.shared(state), self._sent(state)))
        leaves, structure = jax.tree.flatten(own)
        if not all(np.isfinite(x).all() for x in leaves):
            raise RunError(
                f"{self.name} has parameters that are not finite after step {step}; the peers train on alone"
            )
        blocks = [x.astype(np.float32).reshape(-1, meeting.wire.block_of(x.shape)) for x in leaves]
        counted = member.exchange(digest(shared), blocks, meeting.wire, self.errors)
        means = [m.reshape(x.shape) for m, x in zip(counted.reduced.mean, leaves, strict=True)]
        self.errors, self.round = counted.reduced.errors, self.round + 1
        with host_arrays():
            mean = jax.tree.unflatten(structure, [jnp.asarray(m) for m in means])
            shared = jax.device_get(meeting.moved(jax.tree.map(jnp.asarray, shared), mean))
        state = self._joined(state, shared)
        member.pass_on(counted.newcomers, jax.tree.leaves(shared))
        if counted.members != self.members:
            self.members = counted.members
            self.say(f"the mean after step {step} is that of {len(self.members)} peers: {self.members}")
        return state, {
            "peer": float(self.number),
            "peers": float(len(counted.members)),
            "outer_attempts": float(counted.attempts),
            "outer_bytes_sent": float(counted.reduced.sent),
            "outer_seconds": time.perf_counter() - began,
            "shared_digest": float(int(digest(shared)[:12], 16)),
        }

    def leave(self, *, finished: bool) -> None:
        """Leave the group; the others go on."""
        if self.member is not None:
            self.member.finish() if finished else self.member.close()

    def _settings(self, prepared: Prepared) -> dict[str, str]:
        config, meeting = self.config, self.meeting
        kind = type(config.algorithm).__name__
        infos = jax.tree.leaves(prepared.blueprint.infos)
        model = hashlib.sha256(repr([(i.path, i.shape, str(i.dtype)) for i in infos]).encode()).hexdigest()
        names = ("steps", "batch_size", "seq_len", "packing", "seed")
        return {
            **{f"train.{name}": str(getattr(config, name)) for name in names},
            "list of parameters (digest)": model[:16],
            "corpus (fingerprint)": prepared.fingerprint[:16],
            **{f"{kind}.{name}": str(getattr(meeting, name)) for name in ("every", "shares", "wire")},
            **{f"{kind}.{name}": value for name, value in meeting.settings.items()},
        }


def group_of(
    config: TrainConfig, prepared: Prepared, name: str, say: Callable[[str], None], stopping: Callable[[], bool]
) -> Alone:
    """Return a run's part in its group of peers.

    Args:
      config: the run's settings.
      prepared: its compiled parts and data.
      name: what sentences call this run.
      say: prints a line.
      stopping: whether the run should stop.
    """
    meeting = prepared.blueprint.algorithm.meeting(prepared.blueprint)
    return Alone() if meeting is None else Group(meeting, config, name, say, stopping)


def digest(tree: Tree) -> str:
    """Return a hex SHA-256 of arrays in host memory and their names, shapes and dtypes.

    Args:
      tree: the arrays.
    """
    sha = hashlib.sha256()
    for path, x in jax.tree_util.tree_leaves_with_path(tree):
        x = np.ascontiguousarray(x)
        sha.update(f"{path_name(path)} {x.shape} {x.dtype}\n".encode())
        sha.update(x.tobytes())
    return sha.hexdigest()


def _bytes(tree: Tree) -> int:
    return sum(np.asarray(x).nbytes for x in jax.tree.leaves(tree))


def _from_bytes(data: bytearray, like: Tree) -> Tree:
    out, first = [], 0
    leaves, structure = jax.tree.flatten(like)
    for x in map(np.asarray, leaves):
        out.append(np.frombuffer(data, x.dtype, x.size, first).reshape(x.shape))
        first += x.nbytes
    return jax.tree.unflatten(structure, out)
