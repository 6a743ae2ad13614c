"""Generation for many requests at once: continuous batching over a cache that texts share."""

from jaxscale.infer.engine.cached import Cached
from jaxscale.infer.engine.engine import Engine, Stats
from jaxscale.infer.engine.pages import PageCounts, Pages
from jaxscale.infer.engine.request import Event, Request, Score, Text
from jaxscale.infer.engine.scheduler import Batch, FirstCome, Scheduler
from jaxscale.infer.engine.stepper import Give, Stepper, check_independent, check_sizes

__all__ = [
    "Batch",
    "Cached",
    "Engine",
    "Event",
    "FirstCome",
    "Give",
    "PageCounts",
    "Pages",
    "Request",
    "Scheduler",
    "Score",
    "Stats",
    "Stepper",
    "Text",
    "check_independent",
    "check_sizes",
]
