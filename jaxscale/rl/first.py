"""What the first of several processes computes, for all of them: rewards and tools need not be functions."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxscale.rl.rewards import RewardError

T = TypeVar("T")


def on_first(call: Callable[[], T]) -> T:
    """Return the result of a call that the first process makes alone; every process must call this.

    Args:
      call: returns numbers, texts, `None` or lists of them.

    Raises:
      RewardError: it raised one; then all processes do.
    """
    if jax.process_count() == 1:
        return call()
    answer: dict[str, Any] = {}
    if jax.process_index() == 0:
        try:
            answer = {"result": call()}
        except RewardError as e:
            answer = {"error": str(e)}
    data = np.frombuffer(json.dumps(answer).encode(), np.uint8)
    size = int(multihost_utils.broadcast_one_to_all(np.int32(len(data))))
    mine = data if jax.process_index() == 0 else np.zeros(size, np.uint8)
    answer = json.loads(bytes(np.asarray(multihost_utils.broadcast_one_to_all(mine))))
    if "error" in answer:
        raise RewardError(answer["error"])
    result: T = answer["result"]
    return result
