"""Generation for many requests at once: continuous batching over a cache that texts share."""

from jaxscale.infer.engine.engine import Engine, Stats, check_independent
from jaxscale.infer.engine.pages import PageCounts, Pages
from jaxscale.infer.engine.request import Event, Request, Score, Text
from jaxscale.infer.engine.scheduler import Batch, FirstCome, Scheduler

__all__ = [
    "Batch",
    "Engine",
    "Event",
    "FirstCome",
    "PageCounts",
    "Pages",
    "Request",
    "Scheduler",
    "Score",
    "Stats",
    "Text",
    "check_independent",
]
