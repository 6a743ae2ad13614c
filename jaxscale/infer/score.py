"""Log-probabilities of given texts: cut into windows, laid side by side in rows, and taken by the run's own loss."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxscale.data.packing import best_fit
from jaxscale.errors import ConfigError
from jaxscale.infer.forward import everywhere
from jaxscale.infer.loaded import Loaded
from jaxscale.parallel import as_weight


class Window(NamedTuple):
    """A stretch of a text that the model sees at once.

    Args:
      text: which.
      begin, end: of its targets; target i is token i + 1, read after tokens 0 to i.
      counted: the first of them that counts; those before it are context.
    """

    text: int
    begin: int
    end: int
    counted: int


def windows(lengths: Sequence[int], first: Sequence[int], length: int, stride: int) -> list[Window]:
    """Windows of at most `length` targets, of which each target counts in one.

    With a stride of `length` they are segments side by side. With a smaller one each next window begins so much later
    and counts the targets that none before it reached, so that they have at least `length - stride` behind them.

    Args:
      lengths: targets of each text.
      first: the first target of each that counts.
      length, stride: in tokens.
    """
    found = []
    for text, (n, counted) in enumerate(zip(lengths, first, strict=True)):
        begin = max(0, min(counted, n - length)) if counted else 0  # as much as fits of what comes before
        while counted < n:
            end = min(begin + length, n)
            found.append(Window(text, begin, end, counted))
            begin, counted = begin + stride, end
    return found


def log_probabilities(
    loaded: Loaded,
    texts: Sequence[Int[np.ndarray, " t"]],
    *,
    length: int,
    loss: Any,
    first: Sequence[int] | None = None,
    stride: int | None = None,
    rows: int = 8,
    apart: bool = True,
) -> list[Float[np.ndarray, " n"]]:
    """The log-probability of every token of each text but those before `first`, nats, float32.

    Args:
      loaded: the model.
      texts: ids, the first of which is given: what opens a text.
      length: how many tokens the model sees at once.
      loss: makes each token's (`jaxscale.step.loss`), with its logits held or without.
      first: the first target of each that counts, 0 by default.
      stride: of windows, `length` by default (see `windows`).
      rows: of a batch; rounded up to what the layout divides.
      apart: several windows stand in a row, and attention stays within each; else a row has one.

    Raises:
      ConfigError: lengths out of range.
      LayoutError: a batch cannot be laid out.
    """
    stride = length if stride is None else stride
    for name, value, most in (("length", length, None), ("stride", stride, length), ("rows", rows, None)):
        if value < 1 or (most is not None and value > most):
            raise ConfigError(f"{name} = {value}: must be at least 1" + (f" and at most {most}" if most else ""))
    sizes = [len(ids) - 1 for ids in texts]
    found = windows(sizes, [0] * len(texts) if first is None else first, length, stride)
    out = [np.zeros(n, np.float32) for n in sizes]
    spans = np.asarray([w.end - w.begin for w in found], np.int64)
    row, order = best_fit(spans, length) if apart else (np.arange(len(found)), np.arange(len(found)))
    batch = _Batch(loaded, length, loss, rows, apart)
    for at in range(0, int(row.max()) + 1 if len(found) else 0, batch.rows):
        mine = order[(row[order] >= at) & (row[order] < at + batch.rows)]
        batch.score([(int(row[w]) - at, found[w]) for w in mine], texts, out)
    return [x[(0 if first is None else first[i]) :] for i, x in enumerate(out)]


class _Batch:
    """Rows that are scored at once, always of one shape."""

    def __init__(self, loaded: Loaded, length: int, loss: Any, rows: int, apart: bool):
        from jaxscale.step.step import batch_sharding

        split = 1 if loaded.layout is None else loaded.layout.split("batch")
        self.rows = -(-rows // split) * split
        self._loaded, self._length, self._loss, self._apart = loaded, length, loss, apart
        self._where = batch_sharding(loaded.layout, self.rows, length)

    def score(self, placed: list[tuple[int, Window]], texts: Sequence[np.ndarray], out: list[np.ndarray]) -> None:
        """Writes the log-probabilities of windows, each in its row, to where they belong."""
        shape = (self.rows, self._length)
        batch = {k: np.zeros(shape, np.int32) for k in ("tokens", "targets", "segment_ids", "positions")}
        filled, windows_in = np.zeros(self.rows, np.int64), np.zeros(self.rows, np.int64)
        places = []
        for row, w in placed:
            at = slice(filled[row], filled[row] + w.end - w.begin)
            windows_in[row] += 1
            batch["tokens"][row, at] = texts[w.text][w.begin : w.end]
            batch["targets"][row, at] = texts[w.text][w.begin + 1 : w.end + 1]
            batch["segment_ids"][row, at] = windows_in[row]
            batch["positions"][row, at] = np.arange(w.end - w.begin)
            places.append((row, int(at.start) + w.counted - w.begin, w))
            filled[row] = at.stop
        if not self._apart:
            del batch["segment_ids"], batch["positions"]
        with self._loaded.in_force():
            given = batch if self._where is None else jax.device_put(batch, dict.fromkeys(batch, self._where))
            losses = np.asarray(_losses(self._loaded.graphdef, self._loss, self._loaded.params, given))
        for row, begin, w in places:
            out[w.text][w.counted : w.end] = -losses[row, begin : begin + w.end - w.counted]


@functools.partial(jax.jit, static_argnums=(0, 1))
def _losses(graphdef: nnx.GraphDef[Any], loss: Any, params: Any, batch: dict[str, Array]) -> Float[Array, "b s"]:
    model = nnx.merge(graphdef, params)
    told = {k: v for k, v in batch.items() if k not in ("tokens", "targets")}
    hidden = model.hidden(batch["tokens"], **told)
    weight = as_weight(model.head_weight()).dense()
    return everywhere(loss(hidden, weight, batch["targets"], softcap=model.logit_softcap)[0])
