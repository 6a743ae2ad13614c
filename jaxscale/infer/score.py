"""Log-probabilities of token sequences: split into windows, packed into rows, computed by the run's own loss."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxscale.data.packing import best_fit
from jaxscale.errors import ConfigError
from jaxscale.infer.forward import replicated
from jaxscale.infer.loaded import Loaded
from jaxscale.layout.tensors import Tree
from jaxscale.parallel import as_weight
from jaxscale.step.loss import Loss


class Window(NamedTuple):
    """The part of a sequence that the model sees at once.

    Args:
      sequence: the index of the sequence.
      begin: the first target; target i is token i + 1, predicted from tokens up to i.
      end: the target after the last one.
      counted: the first target that is scored here; those before it are context.
    """

    sequence: int
    begin: int
    end: int
    counted: int


def windows(lengths: Sequence[int], first: Sequence[int], length: int, stride: int) -> list[Window]:
    """Split sequences into windows of at most `length` targets; each target is scored in one window.

    With a stride of `length` windows do not overlap. With a smaller one, each window begins `stride` targets after the
    one before and scores the targets that are new in it, so that they have at least `length - stride` targets of
    context (except in the first window).

    Args:
      lengths: the number of targets of each sequence.
      first: the first target of each to be scored.
      length: the most targets of a window.
      stride: between the beginnings of windows, in targets.
    """
    out = []
    for sequence, (n, counted) in enumerate(zip(lengths, first, strict=True)):
        begin = max(0, min(counted, n - length)) if counted else 0  # as much context as fits
        while counted < n:
            end = min(begin + length, n)
            out.append(Window(sequence, begin, end, counted))
            begin, counted = begin + stride, end
    return out


def log_probabilities(
    loaded: Loaded,
    sequences: Sequence[Int[np.ndarray, " t"]],
    *,
    length: int,
    loss: Loss,
    first: Sequence[int] | None = None,
    stride: int | None = None,
    rows: int = 8,
    apart: bool = True,
    note: Callable[[int], None] = lambda scored: None,
) -> list[Float[np.ndarray, " n"]]:
    """Return the log-probability of every target of each sequence from `first` on.

    Args:
      loaded: the model.
      sequences: token ids, int32 (t,) each; the first token is context only.
      length: how many tokens the model sees at once.
      loss: computes each token's loss from hidden states (see `jaxscale.step.loss`).
      first: the first target of each sequence to be scored; 0 by default.
      stride: of windows; `length` by default (see `windows`).
      rows: batch rows, rounded up to what the layout divides.
      apart: pack several windows into a row, with attention within each; else a row has one.
      note: called after each batch with the number of targets that were scored in it.

    Returns:
      nats, float32 (targets,), for each sequence.

    Raises:
      ConfigError: a length out of range.
      LayoutError: the batch does not divide over the layout's devices.
    """
    stride = length if stride is None else stride
    for name, value, most in (("length", length, None), ("stride", stride, length), ("rows", rows, None)):
        if value < 1 or (most is not None and value > most):
            raise ConfigError(f"{name} = {value}: must be at least 1" + (f" and at most {most}" if most else ""))
    sizes = [len(ids) - 1 for ids in sequences]
    cut = windows(sizes, [0] * len(sequences) if first is None else first, length, stride)
    out = [np.zeros(n, np.float32) for n in sizes]
    spans = np.asarray([w.end - w.begin for w in cut], np.int64)
    row, order = best_fit(spans, length) if apart else (np.arange(len(cut)), np.arange(len(cut)))
    batch = _Batch(loaded, length, loss, rows, apart)
    for at in range(0, int(row.max()) + 1 if len(cut) else 0, batch.rows):
        mine = order[(row[order] >= at) & (row[order] < at + batch.rows)]
        batch.score([(int(row[w]) - at, cut[w]) for w in mine], sequences, out)
        note(sum(cut[w].end - cut[w].counted for w in mine))
    return [x[(0 if first is None else first[i]) :] for i, x in enumerate(out)]


class _Batch:
    """A batch that is scored at once; every batch has the same shape."""

    def __init__(self, loaded: Loaded, length: int, loss: Loss, rows: int, apart: bool):
        from jaxscale.step.step import batch_sharding

        split = 1 if loaded.layout is None else loaded.layout.split("batch")
        self.rows = -(-rows // split) * split
        self._loaded, self._length, self._loss, self._apart = loaded, length, loss, apart
        self._where = batch_sharding(loaded.layout, self.rows, length)

    def score(self, placed: list[tuple[int, Window]], sequences: Sequence[np.ndarray], out: list[np.ndarray]) -> None:
        """Score windows, and write the log-probabilities to `out`.

        Args:
          placed: windows, and the batch row of each.
          sequences: all token ids.
          out: the log-probabilities of each sequence.
        """
        shape = (self.rows, self._length)
        batch = {k: np.zeros(shape, np.int32) for k in ("tokens", "targets", "segment_ids", "positions")}
        filled, windows_in = np.zeros(self.rows, np.int64), np.zeros(self.rows, np.int64)
        places = []
        for row, w in placed:
            at = slice(filled[row], filled[row] + w.end - w.begin)
            windows_in[row] += 1
            batch["tokens"][row, at] = sequences[w.sequence][w.begin : w.end]
            batch["targets"][row, at] = sequences[w.sequence][w.begin + 1 : w.end + 1]
            batch["segment_ids"][row, at] = windows_in[row]
            batch["positions"][row, at] = np.arange(w.end - w.begin)
            places.append((row, int(at.start) + w.counted - w.begin, w))
            filled[row] = at.stop
        if not self._apart:
            del batch["segment_ids"], batch["positions"]
        with self._loaded.in_force():
            on_device = batch if self._where is None else jax.device_put(batch, dict.fromkeys(batch, self._where))
            losses = np.asarray(_losses(self._loaded.graphdef, self._loss, self._loaded.params, on_device))
        for row, begin, w in places:
            out[w.sequence][w.counted : w.end] = -losses[row, begin : begin + w.end - w.counted]


@functools.partial(jax.jit, static_argnums=(0, 1))
def _losses(graphdef: nnx.GraphDef[Any], loss: Loss, params: Tree, batch: dict[str, Array]) -> Float[Array, "b s"]:
    model = nnx.merge(graphdef, params)
    kwargs = {k: v for k, v in batch.items() if k not in ("tokens", "targets")}
    hidden = model.hidden(batch["tokens"], **kwargs)
    weight = as_weight(model.head_weight()).for_loss()
    return replicated(loss(hidden, weight, batch["targets"], softcap=model.logit_softcap)[0])
