"""Generation for many requests at once: continuous batching over a shared KV cache."""

from jaxscale.infer.engine.cached import Cached
from jaxscale.infer.engine.engine import Engine, Stats
from jaxscale.infer.engine.pages import PageCounts, Pages
from jaxscale.infer.engine.request import Event, Request, Score, SequenceState
from jaxscale.infer.engine.scheduler import Batch, FirstCome, Scheduler
from jaxscale.infer.engine.stepper import Emit, Stepper, check_independent, check_sizes

__all__ = [
    "Batch",
    "Cached",
    "Emit",
    "Engine",
    "Event",
    "FirstCome",
    "PageCounts",
    "Pages",
    "Request",
    "Scheduler",
    "Score",
    "SequenceState",
    "Stats",
    "Stepper",
    "check_independent",
    "check_sizes",
]
