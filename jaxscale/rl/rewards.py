"""Rewards: Python functions of a sample, called with a time limit, and checked."""

from __future__ import annotations

import dataclasses
import math
import numbers
import re
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

from jaxscale.config import register
from jaxscale.errors import JaxscaleError

Reward = Callable[..., Any]
"""`reward(sample) -> float`; or, with an attribute `batched = True`, `reward(samples) -> floats`."""


class RewardError(JaxscaleError, RuntimeError):
    """A reward or tool raised an error, took too long, or returned something of the wrong kind."""


@dataclasses.dataclass(frozen=True)
class Sample:
    """What a reward sees of a sampled sequence.

    Args:
      prompt: the prompt's text.
      text: all that was generated, and results of tools between.
      answer: of the prompt.
      ids: token ids of the prompt and everything after it.
      generated: whether the model generated each of `ids`.
      logprobs: the sampler's log-probability of each of `ids`; 0 for those that were not generated.
      finished: "stop" if the last turn ended by itself, "length" if it was cut off.
    """

    prompt: str
    text: str
    answer: Any
    ids: tuple[int, ...]
    generated: tuple[bool, ...]
    logprobs: tuple[float, ...]
    finished: str

    @property
    def tokens(self) -> int:
        """Generated tokens."""
        return sum(self.generated)


def rewards_of(reward: Reward, samples: Sequence[Sample], seconds: float) -> Float[np.ndarray, " n"]:
    """Return the rewards of samples, float64 (n,).

    A function that takes longer is abandoned, not ended: Python cannot end a thread.

    Args:
      reward: the function.
      samples: what to reward.
      seconds: the time limit for all of them.

    Raises:
      RewardError: it raised an error, took too long, or returned something else than finite numbers.
    """
    result: list[Any] = []
    problem: list[BaseException] = []

    def call() -> None:
        try:
            result.extend(reward(samples) if getattr(reward, "batched", False) else map(reward, samples))
        except BaseException as e:  # noqa: BLE001  (whatever the user's code raises; reported below)
            problem.append(e)

    thread = threading.Thread(target=call, daemon=True, name="reward")
    thread.start()
    thread.join(seconds)
    name = getattr(reward, "__name__", type(reward).__name__)
    if thread.is_alive():
        raise RewardError(f"the reward {name} took longer than {seconds:g} s (rl.reward_seconds)")
    if problem:
        if isinstance(problem[0], KeyboardInterrupt | SystemExit):
            raise problem[0]
        raise RewardError(f"the reward {name} raised {type(problem[0]).__name__}: {problem[0]}")
    if len(result) != len(samples):
        raise RewardError(f"the reward {name} returned {len(result)} numbers for {len(samples)} samples")
    for value, sample in zip(result, samples, strict=True):
        if not isinstance(value, numbers.Real | np.ndarray | np.generic) and not hasattr(value, "__float__"):
            raise RewardError(f"the reward {name} returned {value!r} for {sample.text!r}; return a number")
        if not math.isfinite(float(value)):
            raise RewardError(f"the reward {name} returned {float(value)} for {sample.text!r}; return a finite number")
    return np.asarray([float(v) for v in result], np.float64)


@register
@dataclasses.dataclass(frozen=True)
class ArithmeticReward:
    """1 where the first number in a completion is the answer, else 0.

    Args:
      exact: also 0 if anything but blanks surrounds the number.
    """

    exact: bool = True

    def __call__(self, sample: Sample) -> float:
        """Return the reward.

        Args:
          sample: the sample; its answer is a number, or a text that is one.
        """
        text = sample.text.strip()
        match = re.search(r"[-+]?\d+(?:\.\d+)?", text)
        if match is None or (self.exact and match[0] != text):
            return 0.0
        try:
            return float(float(match[0]) == float(sample.answer))
        except (TypeError, ValueError):
            raise ValueError(f"the answer {sample.answer!r} is not a number") from None
