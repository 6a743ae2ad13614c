"""Tokens per second and bytes of a model in several weight formats, one after the other in one process."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax

from jaxscale.infer.generate import Prompt, generate
from jaxscale.infer.loaded import load_model
from jaxscale.infer.sampling import Sampling
from jaxscale.nn import WeightFormat

if TYPE_CHECKING:
    from jaxscale.run import Run


@dataclasses.dataclass(frozen=True)
class Rate:
    """How fast a model generates in a weight format, and the bytes that it takes.

    Args:
      parameters: bytes of all parameters in their format; copies on several devices count once.
      tokens: how many were generated in the timed call.
      seconds: of the timed call, for which a paged cache has the prompts' whole pages already.
      peak: the most bytes in use on the first device so far in this process; `None` where it is not reported.
    """

    parameters: int
    tokens: int
    seconds: float
    peak: int | None

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens per second of the call."""
        return self.tokens / self.seconds


def rates(
    run: Run,
    prompts: Sequence[Prompt],
    sampling: Sequence[Sampling],
    formats: Sequence[WeightFormat | None],
    **options: Any,
) -> list[Rate]:
    """Generate with a model in each of several formats, and measure the last of three calls.

    The first call compiles, and the second compiles what differs once the cache has the prompts' pages.

    The formats are measured in their order; give the smallest first, since the peak of a larger one hides those after
    it. Sequences do not end before `max_tokens`, so that all formats generate as many tokens.

    Args:
      run: the run.
      prompts: texts or token ids.
      sampling: settings of each prompt.
      formats: weight formats; `None` is as the checkpoint stores them.
      **options: as for `generate`.

    Raises:
      ConfigError: as for `generate`.
    """
    whole = [dataclasses.replace(s, ignore_end=True, stop=()) for s in sampling]
    out = []
    for weights in formats:
        for _ in range(2):
            generate(run, prompts, sampling=whole, weights=weights, **options)
        began = time.perf_counter()
        done = generate(run, prompts, sampling=whole, weights=weights, **options)
        seconds = time.perf_counter() - began
        layout, step = options.get("layout"), options.get("step")
        loaded = load_model(
            run, layout, step, generation=True, weights=weights
        )  # the call's, which are in memory still
        peak = (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
        out.append(Rate(loaded.nbytes, sum(len(c.ids) for c in done), seconds, peak))
    return out
