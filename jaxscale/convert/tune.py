"""Tune a run whose matrices are stored in few bits: its codes and its scales, by the loss of calibration rows."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, UInt8

from jaxscale.convert.new_run import begin, check_new, finish, save_params
from jaxscale.data import Loader
from jaxscale.errors import ConfigError, DataError
from jaxscale.layout import Layout
from jaxscale.nn.formats import StoredWeight, numbers_of, pack
from jaxscale.parallel import Arithmetic, Dense
from jaxscale.run import Run
from jaxscale.step import Objective, describe_model
from jaxscale.step.backprop import numbered
from jaxscale.step.objective import Batch, terms_of
from jaxscale.step.stored import is_weight

log = logging.getLogger("jaxscale")
Tree = Any
Loss = Callable[[Tree, Batch], Array]
"""(parameters as arrays, batch) -> the number to minimise."""


@dataclasses.dataclass(frozen=True)
class PVTuning:
    """PV-Tuning (Malinovskii et al. 2024, "Beyond Straight-Through Estimation for Extreme LLM Compression").

    A step has two parts. V: with the gradient of every weight, the codes whose move to the next number lowers the loss
    most, to first order, are moved. P: the floats (scales, tables, norms, embeddings) take a step of Adam, relative to
    each array's root mean square. Each part is halved, in the share of codes or in its length, until the loss of the
    calibration rows is not higher, else left out: the loss never rises from one step to the next.

    Args:
      steps: number of steps.
      codes: the largest share of the codes that a step moves, at first; it doubles when a move is accepted at once.
      lr: the length of the first step of floats, likewise.
      halvings: how often a part is halved before it is left out.

    Raises:
      ConfigError: a number out of its range.
    """

    steps: int = 20
    codes: float = 0.01
    lr: float = 0.01
    halvings: int = 6

    def __post_init__(self) -> None:
        for name, least in (("steps", 1), ("halvings", 0)):
            if not isinstance(getattr(self, name), int) or getattr(self, name) < least:
                raise ConfigError(f"PVTuning.{name} = {getattr(self, name)!r}: must be a whole number from {least}")
        if not 0 < self.codes <= 1:
            raise ConfigError(f"PVTuning.codes = {self.codes}: is a share of the codes, above 0 and at most 1")
        if not self.lr > 0:
            raise ConfigError(f"PVTuning.lr = {self.lr}: must be above 0")

    def tuned(
        self, loss: Loss, params: Tree, batches: Sequence[Batch], say: Callable[[str], None] = log.info
    ) -> tuple[Tree, list[float]]:
        """Return tuned parameters, and the loss before the first step and after each.

        Args:
          loss: the loss of one batch.
          params: parameters, with `StoredWeight`s.
          batches: the calibration rows.
          say: prints a line.
        """
        programs = _Programs(loss, params, batches)
        fixed, floats = programs.fixed, programs.floats
        mean = square = jax.tree.map(jnp.zeros_like, floats)
        share, lr, best = self.codes, self.lr, programs.loss(fixed, floats)
        losses = [best]
        for n in range(1, self.steps + 1):
            moved, gain, order = programs.moves(fixed, floats, programs.gradients(fixed, floats)[1])

            def with_codes(share: float) -> tuple[Tree, float]:
                trial = programs.with_moves(fixed, moved, gain, order[max(0, round(share * order.size) - 1)])  # noqa: B023
                return trial, programs.loss(trial, floats)  # noqa: B023

            fixed, best, share = self._search(with_codes, fixed, best, share)
            by_float, _ = programs.gradients(fixed, floats)
            direction, mean, square = adam(by_float, mean, square, jnp.float32(n))

            def with_floats(lr: float) -> tuple[Tree, float]:
                trial = stepped(floats, direction, jnp.float32(lr))  # noqa: B023
                return trial, programs.loss(fixed, trial)  # noqa: B023

            floats, best, lr = self._search(with_floats, floats, best, lr)
            losses.append(best)
            say(f"step {n} of {self.steps}: loss {best:.4f} (next: {share:.2%} of the codes, floats by {lr:.1e})")
        return programs.whole(fixed, floats), losses

    def _search(
        self, attempt: Callable[[float], tuple[Tree, float]], now: Tree, best: float, length: float
    ) -> tuple[Tree, float, float]:
        """Halve a move until the loss is not higher; return the new values, their loss, and the next length."""
        for n in range(self.halvings + 1):
            trial, after = attempt(length)
            if after <= best:
                return trial, after, min(2 * length, 1.0) if n == 0 else length
            length /= 2
        return now, best, length


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class FewBits(Dense):
    """An array of numbers that are rounded already, which products do not round again.

    Args:
      array: the array.
    """

    def arithmetic(self, arithmetic: Arithmetic) -> Arithmetic:
        """See `Weight`."""
        return arithmetic.for_stored()

    def matmul(
        self, x: Float[Array, "..."], axes: tuple[str, ...], contracted: tuple[int, ...], arithmetic: Arithmetic
    ) -> Float[Array, "..."]:
        """See `Weight`."""
        return super().matmul(x, axes, contracted, arithmetic.for_stored())


class _Programs:
    """Compiled functions of a model's codes (`fixed`) and floats, both dicts by the number of the array.

    Args:
      loss: the loss of one batch.
      params: parameters, with `StoredWeight`s.
      batches: the calibration rows.
    """

    def __init__(self, loss: Loss, params: Tree, batches: Sequence[Batch]):
        leaves, self._structure = jax.tree.flatten(params)
        self._batches = batches
        is_float = [jnp.issubdtype(x.dtype, jnp.floating) for x in leaves]
        self._dtypes = {n: x.dtype for n, x in enumerate(leaves)}
        self.fixed = {n: x for n, x in enumerate(leaves) if not is_float[n]}
        self.floats = {n: x.astype(jnp.float32) for n, x in enumerate(leaves) if is_float[n]}
        weights = [w for w in jax.tree.leaves(params, is_leaf=is_weight) if is_weight(w)]
        self._zeros = [jnp.zeros(w.shape, jnp.float32) for w in weights]

        def value(floats: Tree, taps: list[Array], fixed: Tree, batch: Batch) -> Array:
            rest = iter(taps)
            params = jax.tree.map(
                lambda w: FewBits(w.dense(jnp.float32) + next(rest)) if is_weight(w) else w,
                self.whole(fixed, floats),
                is_leaf=is_weight,
            )
            return loss(params, batch)

        self._value, self._gradient = jax.jit(value), jax.jit(jax.grad(value, argnums=(0, 1)))
        self.moves, self.with_moves = jax.jit(self._moves), jax.jit(self._with_moves)

    def whole(self, fixed: Tree, floats: Tree) -> Tree:
        """Return the parameters as they are stored."""
        leaves = {**fixed, **{n: x.astype(self._dtypes[n]) for n, x in floats.items()}}
        return jax.tree.unflatten(self._structure, [leaves[n] for n in range(len(leaves))])

    def loss(self, fixed: Tree, floats: Tree) -> float:
        """Return the mean loss of the batches."""
        return float(np.mean([float(self._value(floats, self._zeros, fixed, b)) for b in self._batches]))

    def gradients(self, fixed: Tree, floats: Tree) -> tuple[Tree, list[Array]]:
        """Return the gradients of floats, and of each stored matrix's weights."""
        total = None
        for b in self._batches:
            one = self._gradient(floats, self._zeros, fixed, b)
            total = one if total is None else jax.tree.map(jnp.add, total, one)
        return jax.tree.map(lambda g: g / len(self._batches), total)

    def _weights(self, fixed: Tree, floats: Tree) -> list[StoredWeight]:
        leaves = jax.tree.leaves(self.whole(fixed, floats), is_leaf=is_weight)
        return [w for w in leaves if isinstance(w, StoredWeight)]

    def _moves(self, fixed: Tree, floats: Tree, gradients: list[Array]) -> tuple[list[Array], list[Array], Array]:
        """Return the codes of each matrix after a move, each move's gain, and all gains, the largest first."""
        pairs = [next_numbers(w, g) for w, g in zip(self._weights(fixed, floats), gradients, strict=True)]
        moved, gain = [m for m, _ in pairs], [g for _, g in pairs]
        return moved, gain, -jnp.sort(-jnp.concatenate([g.reshape(-1) for g in gain]))

    def _with_moves(self, fixed: Tree, moved: list[Array], gain: list[Array], least: Array) -> Tree:
        """Return the fixed arrays with those moves whose gain is at least `least`, and above 0."""
        rest = iter(zip(moved, gain, strict=True))

        def one(w: Any) -> Any:
            if not is_weight(w):
                return w
            codes, g = next(rest)
            chosen = jnp.where((g >= least) & (g > 0), codes, w.unpacked())
            packed = pack(chosen, numbers_of(w.numbers).bits, w.axis, w.codes.dtype)
            return dataclasses.replace(w, codes=packed)

        leaves = jax.tree.leaves(jax.tree.map(one, self.whole(fixed, self.floats), is_leaf=is_weight))
        return {n: leaves[n] for n in fixed}


def next_numbers(
    weight: StoredWeight, gradient: Float[Array, "..."]
) -> tuple[UInt8[Array, "..."], Float[Array, "..."]]:
    """Return, for each weight, the code of the next number against the gradient, and the gain of moving to it.

    Args:
      weight: the weight.
      gradient: the loss's gradient of each of its numbers.

    Returns:
      codes, not packed; and by how much the loss falls to first order, 0 where there is no further number.
    """
    kind, codes = numbers_of(weight.numbers), weight.unpacked()
    values = np.asarray(kind.values) if weight.table is None else np.arange(2.0**kind.bits)  # tables rise
    rising = np.asarray([c for c in np.argsort(values, kind="stable") if np.isfinite(values[c])], np.uint8)
    rank = np.zeros(2**kind.bits, np.int32)
    rank[rising] = np.arange(len(rising))
    place, now = jnp.asarray(rank)[codes], weight.dense(jnp.float32)

    def at(step: int) -> tuple[Array, Array]:
        other = jnp.asarray(rising)[jnp.clip(place + step, 0, len(rising) - 1)]
        packed = pack(other, kind.bits, weight.axis, weight.codes.dtype)
        return other, gradient * (now - dataclasses.replace(weight, codes=packed).dense(jnp.float32))

    (up, gain_up), (down, gain_down) = at(1), at(-1)
    return jnp.where(gain_up >= gain_down, up, down), jnp.maximum(jnp.maximum(gain_up, gain_down), 0.0)


@jax.jit
def adam(grads: Tree, mean: Tree, square: Tree, n: Float[Array, ""]) -> tuple[Tree, Tree, Tree]:
    """Return the direction of Adam's step number `n` (decays 0.9 and 0.95), and its moments."""
    mean = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, mean, grads)
    square = jax.tree.map(lambda v, g: 0.95 * v + 0.05 * g * g, square, grads)
    one, two = 1 - 0.9**n, 1 - 0.95**n
    return jax.tree.map(lambda m, v: (m / one) / (jnp.sqrt(v / two) + 1e-12), mean, square), mean, square


@jax.jit
def stepped(floats: Tree, direction: Tree, lr: Float[Array, ""]) -> Tree:
    """Return floats after a step of `lr` times each array's root mean square along a direction."""
    return jax.tree.map(lambda x, d: x - lr * jnp.sqrt(jnp.mean(x * x)) * d, floats, direction)


def tune(
    run: Run,
    out: str | Path,
    method: PVTuning = PVTuning(),  # noqa: B008  (frozen)
    *,
    rows: int = 64,
    batch: int = 8,
    step: int | None = None,
    layout: Layout | None = None,
    say: Callable[[str], None] = log.warning,
) -> Run:
    """Write a run with the tuned codes and floats of a run whose matrices are stored in few bits (`jaxscale quantize`).

    The gradients of all weights are on the devices at once, in float32.

    Args:
      run: the run.
      out: the new folder.
      method: how.
      rows: calibration rows from the run's training corpus, of `seq_len` tokens.
      batch: rows that are computed at once.
      step: the checkpoint's step; the newest by default.
      layout: where to compute; the default device by default.
      say: prints a line.

    Returns:
      the new run.

    Raises:
      ConfigError: the run stores plain arrays, `batch` does not divide `rows`, or its format has no codes.
      DataError: the corpus has too few rows.
      RunError: `out` exists already.
    """
    config = run.config
    if config.stored is None:
        raise ConfigError(
            f"{run.place} stores plain arrays; quantise it first: jaxscale quantize {run.place} OUT --recipe "
            "'@RoundToNearest(weights=@int2())'"
        )
    if rows < 1 or batch < 1 or rows % batch:
        raise ConfigError(f"{rows} calibration rows are not whole batches of {batch} rows; use a multiple of {batch}")
    check_new(out)
    source = config.data.source(config.tokenizer, seq_len=config.seq_len, split="train", packing=config.packing)
    if len(source) < rows:
        raise DataError(f"'{source.name}' has {len(source)} rows, fewer than {rows}; use at most {len(source)} rows")
    loader = Loader(source, batch, config.seed)
    step = run.last_step() if step is None else step
    params = run.weights(step, layout)
    stored = [w for w in jax.tree.leaves(params, is_leaf=is_weight) if is_weight(w)]
    if not stored or not all(isinstance(w, StoredWeight) for w in stored):
        raise ConfigError(
            f"{run.place}: {config.stored.describe()} has no codes to tune; use a Stored format, such as @int2()"
        )
    batches: list[Any] = [dict(loader.batch_at(n)) for n in range(rows // batch)]
    with layout if layout is not None else contextlib.nullcontext():
        params, losses = method.tuned(loss_of(config.model, config.objective), params, batches, say)
    facts = {"tuned": {"run": str(run.path.absolute()), "id": run.info.get("id"), "step": step, "by": repr(method)}}
    facts["tuned"]["losses"] = losses
    tuned = begin(run, out, dataclasses.replace(config, layout=layout), facts, "tuning")
    save_params(tuned, params, layout)
    finish(tuned, "tuned")
    return tuned


def loss_of(model: Any, objective: Objective) -> Loss:
    """Return the loss of a batch.

    Args:
      model: the model's config.
      objective: what is minimised.
    """
    graphdef, _ = describe_model(model)

    def loss(params: Tree, batch: Batch) -> Array:
        batch = numbered(batch)
        terms = terms_of(objective, nnx.merge(graphdef, params), batch, reference=None)
        return objective.value(terms | objective.weights(batch, 1))

    return loss
