"""What processes that train apart exchange, and when; `jaxscale.train.peers` does it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from jaxscale.parallel import Wire
from jaxscale.step.state import TrainState

Tree = Any


@dataclasses.dataclass(frozen=True)
class Meeting:
    """An exchange of processes that train apart, of which some may join or be lost at any time.

    Args:
      coordinator: host and port of the coordinator, "HOST:PORT".
      shares: the most processes at a time; each trains on its own share of the rows.
      every: steps between two exchanges.
      wire: the format of what is sent.
      infos: a `TensorInfo` per array that is sent.
      shared_infos: a `TensorInfo` per array that is equal in all processes.
      shared: state -> those arrays, float32.
      sent: state -> float32 arrays of which the mean over all processes is made.
      moved: (shared arrays, mean) -> shared arrays after the exchange. It is called on the host with whole arrays, and
        operation by operation, so that it gives the same bits whatever a process's layout is.
      joined: (state, shared arrays) -> the state of a process that goes on from them.
      settings: texts by name that must be equal in all processes, beside those of the run that `train` adds.
    """

    coordinator: str
    shares: int
    every: int
    wire: Wire
    infos: Tree
    shared_infos: Tree
    shared: Callable[[TrainState], Tree]
    sent: Callable[[TrainState], Tree]
    moved: Callable[[Tree, Tree], Tree]
    joined: Callable[[TrainState, Tree], TrainState]
    settings: dict[str, str]
