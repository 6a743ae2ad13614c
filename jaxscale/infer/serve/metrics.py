"""Metrics of a server in Prometheus' text format 0.0.4."""

from __future__ import annotations

import bisect
import threading
from collections.abc import Callable, Iterable, Sequence

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
Sample = tuple[str, dict[str, str], float]

_LOCK = threading.Lock()


class Counter:
    """A counter, or one for each value of a label.

    Args:
      name: of the metric.
      about: its description.
      label: the label's name, if there is one.
      values: of the label, which start at 0.
    """

    kind = "counter"

    def __init__(self, name: str, about: str, label: str | None = None, values: Sequence[str] = ()):
        self.name, self.about, self.label = name, about, label
        self._sums: dict[str, float] = dict.fromkeys(values if label else [""], 0)

    def add(self, amount: float = 1, value: str = "") -> None:
        """Add to the counter of a label's value.

        Args:
          amount: not negative.
          value: of the label.
        """
        with _LOCK:
            self._sums[value] = self._sums.get(value, 0) + amount

    def samples(self) -> Iterable[Sample]:
        """Return name, labels and value of each counter."""
        with _LOCK:
            sums = list(self._sums.items())
        return [(self.name, {self.label: value} if self.label else {}, s) for value, s in sums]


class Gauge:
    """A value that a function returns when the metrics are read.

    Args:
      name: of the metric.
      about: its description.
      read: returns the value.
      kind: "counter" for a value that only grows.
    """

    kind = "gauge"

    def __init__(self, name: str, about: str, read: Callable[[], float], kind: str = "gauge"):
        self.name, self.about, self.read, self.kind = name, about, read, kind

    def samples(self) -> Iterable[Sample]:
        """Return name, labels and value."""
        return [(self.name, {}, self.read())]


class Histogram:
    """How many of the observed values are at or below each of some bounds.

    Args:
      name: of the metric.
      about: its description.
      bounds: in ascending order.
    """

    kind = "histogram"

    def __init__(self, name: str, about: str, bounds: Sequence[float] = SECONDS):
        self.name, self.about, self.bounds = name, about, tuple(bounds)
        self._counts, self._sum = [0] * (len(bounds) + 1), 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count a value.

        Args:
          value: the value.
          times: how often.
        """
        with _LOCK:
            self._counts[bisect.bisect_left(self.bounds, value)] += times
            self._sum += value * times

    def samples(self) -> Iterable[Sample]:
        """Return cumulative counts, the sum and the number of values."""
        with _LOCK:
            counts, total = list(self._counts), self._sum
        below, out = 0, []
        for bound, count in zip([*map(str, self.bounds), "+Inf"], counts, strict=True):
            below += count
            out.append((f"{self.name}_bucket", {"le": bound}, float(below)))
        return [*out, (f"{self.name}_sum", {}, total), (f"{self.name}_count", {}, float(below))]


Metric = Counter | Gauge | Histogram


class Metrics:
    """A server's metrics: requests by how they ended, tokens, and times as clients see them."""

    STATES = ("done", "cancelled", "refused", "timeout", "failed")

    def __init__(self) -> None:
        p = "jaxscale_"
        self.requests = Counter(f"{p}requests_total", "Requests, by how they ended.", "state", self.STATES)
        self.responses = Counter(f"{p}http_responses_total", "Responses by status.", "code")
        self.tokens_in = Counter(f"{p}prompt_tokens_total", "Tokens of accepted prompts.")
        self.tokens_out = Counter(f"{p}generation_tokens_total", "Tokens generated.")
        self.first = Histogram(f"{p}time_to_first_token_seconds", "From a sequence's submission to its first token.")
        self.each = Histogram(f"{p}time_per_output_token_seconds", "Between successive tokens of a sequence.")
        self.whole = Histogram(f"{p}request_seconds", "From a sequence's submission to its last token.")
        self.gauges: list[Metric] = []

    def text(self) -> str:
        """Return all metrics in Prometheus' format."""
        lines = []
        own = (self.requests, self.responses, self.tokens_in, self.tokens_out, self.first, self.each, self.whole)
        for metric in (*own, *self.gauges):
            lines += [f"# HELP {metric.name} {metric.about}", f"# TYPE {metric.name} {metric.kind}"]
            for name, labels, value in metric.samples():
                inside = ",".join(f'{label}="{of}"' for label, of in labels.items())
                lines.append(f"{name}{{{inside}}} {_number(value)}" if inside else f"{name} {_number(value)}")
        return "\n".join(lines) + "\n"


def _number(value: float) -> str:
    return repr(int(value)) if value == int(value) else repr(value)
