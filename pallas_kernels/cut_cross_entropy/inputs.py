"""Arguments of the loss: the arrays, the static description of its terms, and the checks before tracing."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from pallas_kernels.arguments import as_int32
from pallas_kernels.errors import KernelError
from pallas_kernels.softmax.pairs import Partial, combine_all, pow2

__all__ = [
    "NAMES",
    "Arguments",
    "Inputs",
    "Logits",
    "Merged",
    "Parts",
    "Terms",
    "WeightLayout",
    "checked",
    "entropy_of",
    "joined",
]

WeightLayout = Literal["ve", "ev"]
_DTYPES = ("float32", "bfloat16", "float16")

NAMES = ("cut_lse", "cut_entropy")
"""Names of the backward pass' residuals, for a `jax.checkpoint` policy; without entropies the first is enough."""


class Inputs(NamedTuple):
    """Arrays that an implementation receives.

    Args:
      x: (N, E).
      w: (V, E) or (E, V), perhaps a shard of the vocabulary.
      rows: (N,) int32, the row of each token's target; a number out of range, such as -1, is no row of w.
    """

    x: jax.Array
    w: jax.Array
    rows: jax.Array


class Parts(NamedTuple):
    """What one shard of the vocabulary gives each token, float32; parts of several shards can be merged.

    Args:
      total: the sum of the exponentials of the logits.
      hit: the target's logit, 0 where the target is not in this shard.
      summed: the sum of the logits, or `None` where it is not needed.
      entropy: of the distribution over this shard's words alone, in nats, or `None` where it is not needed.
    """

    total: Partial
    hit: jax.Array
    summed: jax.Array | None = None
    entropy: jax.Array | None = None

    def merged(self) -> Merged:
        """Return the result for the whole vocabulary, of which this is the only shard."""
        return Merged(self.total.logsumexp(), self.hit, self.summed, self.entropy)


class Merged(NamedTuple):
    """What the whole vocabulary gives each token, float32; or the cotangents of it.

    Args:
      lse: log-sum-exp of the logits.
      hit: the target's logit.
      summed: the sum of the logits, or `None` where it is not needed.
      entropy: of the distribution, in nats, or `None` where it is not needed.
    """

    lse: jax.Array
    hit: jax.Array
    summed: jax.Array | None = None
    entropy: jax.Array | None = None

    def appended_to(self, loss: jax.Array, *, lse: bool, entropy: bool) -> Any:
        """Return a loss, or a tuple of it, the log-sum-exp and the entropy, as far as requested.

        Args:
          loss: of each token.
          lse: whether to return the log-sum-exp.
          entropy: whether to return the entropy.
        """
        results = (loss, *[self.lse] * lse, *[self.entropy] * entropy)
        return results if len(results) > 1 else loss

    def with_names(self) -> Merged:
        """Return the same, with the names of `NAMES` for what the backward pass reads."""
        entropy = None if self.entropy is None else checkpoint_name(self.entropy, NAMES[1])
        return self._replace(lse=checkpoint_name(self.lse, NAMES[0]), entropy=entropy)

    def folded(self, entropy: jax.Array | None) -> Merged:
        """Return cotangents with which a log-probability l has the cotangent exp(l) (lse - entropy l).

        The derivative of an entropy H by a logit is -exp(l) (l + H); these hold H in `lse`.

        Args:
          entropy: H of each token, or `None` where it is not needed.
        """
        if self.entropy is None or entropy is None:
            return self
        return self._replace(lse=self.lse - self.entropy * entropy)

    def of_logits(self, logprobs: jax.Array, hit: jax.Array) -> jax.Array:
        """Return the cotangents of logits (..., V), of cotangents that are `folded`.

        Args:
          logprobs: float32 (..., V).
          hit: boolean (..., V), which of them are targets.
        """
        slope = self.lse[..., None]
        if self.entropy is not None:
            slope = slope - self.entropy[..., None] * logprobs
        slope = slope * jnp.exp(logprobs) + jnp.where(hit, self.hit[..., None], 0)
        return slope if self.summed is None else slope + self.summed[..., None]


def joined(pieces: Parts) -> Parts:
    """Return the parts of several shards together.

    Args:
      pieces: their arrays, stacked along a leading axis.
    """
    total, entropy = combine_all(pieces.total), None
    if pieces.entropy is not None:
        # From the pairs: a difference of log-sum-exps has lost its last digits where logits are large.
        mantissa, exponent = pieces.total
        share = mantissa * pow2(exponent - total.exponent) / jnp.where(total.mantissa == 0, 1, total.mantissa)
        some = share != 0
        surprise = -jnp.log(jnp.where(some, share, 1))
        entropy = jnp.where(some, share * (pieces.entropy + surprise), 0).sum(0)
    return Parts(total, pieces.hit.sum(0), None if pieces.summed is None else pieces.summed.sum(0), entropy)


def entropy_of(total: jax.Array, weighted: jax.Array) -> jax.Array:
    """Return the entropy in nats of exponentials of u, the differences of logits from their maximum.

    Both terms of `log(total) - weighted / total` are positive: no digits cancel.

    Args:
      total: the sum of exp(u), float32; 0 for an empty distribution, whose entropy is 0.
      weighted: the sum of u exp(u).
    """
    some = jnp.where(total == 0, 1, total)
    return jnp.log(some) - weighted / some


@dataclasses.dataclass(frozen=True)
class Logits:
    """How logits are computed, and what is needed of them.

    Args:
      w_layout: "ve" or "ev", the order of w's axes.
      softcap: logits become `softcap * tanh(logits / softcap)`; `None` leaves them.
      summed: whether their sum is needed.
      entropy: whether the entropy of their distribution is needed.
      filter: the share of a token's largest coefficient below which a block's gradient is left out; `None` keeps all.
    """

    w_layout: WeightLayout = "ve"
    softcap: float | None = None
    summed: bool = False
    entropy: bool = False
    filter: float | None = None

    @property
    def statistics(self) -> int:
        """How many numbers a kernel accumulates for each token.

        They are its maximum, the sum of exponentials of u, the differences from it, the target's logit and, as far as
        needed, the sum of logits, and that of u exp(u).
        """
        return 3 + self.summed + self.entropy

    def named(self, statistics: Iterable[Any]) -> tuple[Any, Any, Any, Any, Any]:
        """Return the five `statistics`, `None` for what is not needed.

        Args:
          statistics: those that are needed.
        """
        each = iter(statistics)
        top, total, hit = next(each), next(each), next(each)
        return top, total, hit, next(each) if self.summed else None, next(each) if self.entropy else None

    @property
    def words_axis(self) -> int:
        """The vocabulary's axis of w."""
        return self.w_layout.index("v")


@dataclasses.dataclass(frozen=True)
class Terms:
    """How a loss is computed from `Merged`.

    Args:
      vocabulary: V, of all shards.
      z_loss: as for `linear_cross_entropy`.
      label_smoothing: as for `linear_cross_entropy`.
      ignore_index: as for `linear_cross_entropy`.
    """

    vocabulary: int
    z_loss: float = 0.0
    label_smoothing: float = 0.0
    ignore_index: int | None = None

    def rows(self, targets: jax.Array) -> jax.Array:
        """Return the targets as int32 rows, with -1 for targets that are out of range or ignored.

        Args:
          targets: integers of any shape.
        """
        return jnp.where(self._known(targets) & ~self._ignored(targets), _wide(targets), -1).astype(jnp.int32)

    def losses(self, merged: Merged, targets: jax.Array, weights: jax.Array | None) -> jax.Array:
        """Return the loss of each token, float32 of the targets' shape; differentiable.

        Args:
          merged: float32 arrays of the targets' shape.
          targets: integers.
          weights: float32 of the targets' shape, or `None`.
        """
        loss = merged.lse - (1 - self.label_smoothing) * merged.hit
        if merged.summed is not None:
            loss = loss - self.label_smoothing / self.vocabulary * merged.summed
        if self.z_loss:
            loss = loss + self.z_loss * jnp.square(merged.lse)
        ignored = self._ignored(targets)
        # A factor, so that the gradient is NaN, too.
        loss = loss * jnp.where(self._known(targets) | ignored, 1.0, jnp.nan)
        if weights is not None:
            loss = loss * weights
        return jnp.where(ignored, 0.0, loss)

    def _known(self, targets: jax.Array) -> jax.Array:
        wide = _wide(targets)
        return (wide >= 0) & (wide < self.vocabulary)

    def _ignored(self, targets: jax.Array) -> jax.Array:
        if self.ignore_index is None:
            return jnp.zeros(targets.shape, bool)
        return targets == self.ignore_index


class Arguments(NamedTuple):
    """The checked arguments of `linear_cross_entropy`.

    Args:
      x: (..., E).
      w: (V, E) or (E, V).
      targets: integers (...).
      weights: float32 (...), or `None`.
      logits: how logits are computed.
      terms: how losses are computed from them.
    """

    x: jax.Array
    w: jax.Array
    targets: jax.Array
    weights: jax.Array | None
    logits: Logits
    terms: Terms


def checked(
    op: str,
    x: Any,
    w: Any,
    targets: Any,
    *,
    softcap: Any = None,
    z_loss: Any = 0.0,
    label_smoothing: Any = 0.0,
    ignore_index: Any = None,
    weights: Any = None,
    filter: Any = None,
    entropy: bool = False,
    w_layout: str | None = None,
) -> Arguments:
    """Check and convert the arguments of `linear_cross_entropy`.

    Args:
      op: name of the caller, for the error message.
      x: as for `linear_cross_entropy`, like all that follow.
      w: (V, E) or (E, V).
      targets: integers of x's leading shape.
      softcap: a positive number or `None`.
      z_loss: a number of at least 0.
      label_smoothing: at least 0 and below 1.
      ignore_index: an integer or `None`.
      weights: floats of the targets' shape or `None`.
      filter: at least 0 and below 1, or `None`.
      entropy: whether it is needed.
      w_layout: "ve", "ev" or `None`.

    Raises:
      KernelError: as `linear_cross_entropy`.
    """
    x, w = jnp.asarray(x), jnp.asarray(w)
    if not isinstance(targets, jax.Array | jax.core.Tracer):
        targets = np.asarray(targets)
        # JAX would wrap numbers that int32 cannot hold (padding in int64, for example) to other tokens.
        targets = (
            as_int32(op, "targets", targets) if targets.dtype.name in ("int64", "uint64") else jnp.asarray(targets)
        )
    for name, array in (("x", x), ("w", w)):
        if array.dtype.name not in _DTYPES:
            raise KernelError(
                f"{op} takes float32, bfloat16 or float16, and {name} is {array.dtype.name}; convert with {name}.astype"
            )
    if x.ndim not in (2, 3) or x.shape[-1] == 0:
        raise KernelError(
            f"{op}: x has to be (tokens, width) or (batch, sequence, width) with a width of at least 1, "
            f"not of shape {x.shape}"
        )
    layout = _layout(op, x.shape[-1], w, w_layout)
    if targets.shape != x.shape[:-1]:
        raise KernelError(
            f"{op}: x of shape {x.shape} needs targets of shape {x.shape[:-1]}, one a token, not {targets.shape}"
        )
    if not jnp.issubdtype(targets.dtype, jnp.integer):
        raise KernelError(f"{op}: targets have to be integers, not {targets.dtype.name}")
    if weights is not None:
        weights = jnp.asarray(weights)
        if weights.shape != targets.shape or not jnp.issubdtype(weights.dtype, jnp.floating):
            raise KernelError(
                f"{op}: weights have to be floating and of the targets' shape {targets.shape}, not "
                f"{weights.dtype.name} of shape {weights.shape}"
            )
        weights = weights.astype(jnp.float32)
    softcap = None if softcap is None else _number(op, "softcap", softcap, above=0.0)
    filter = None if filter is None else _number(op, "filter", filter, least=0.0, below=1.0)
    smoothing = _number(op, "label_smoothing", label_smoothing, least=0.0, below=1.0)
    terms = Terms(
        w.shape[layout.index("v")],
        _number(op, "z_loss", z_loss, least=0.0),
        smoothing,
        _ignore_index(op, ignore_index, targets.dtype),
    )
    _check_targets(op, targets, terms)
    return Arguments(x, w, targets, weights, Logits(layout, softcap, smoothing > 0, entropy, filter), terms)


def _layout(op: str, width: int, w: jax.Array, requested: str | None) -> WeightLayout:
    if requested not in (None, "ve", "ev"):
        raise KernelError(
            f"{op}: w_layout is 've' for (vocabulary, width), 'ev' for (width, vocabulary), not {requested!r}"
        )
    if w.ndim != 2 or 0 in w.shape:
        raise KernelError(f"{op}: w has to be a matrix with something in it, not of shape {w.shape}")
    fitting: list[WeightLayout] = [layout for layout in ("ve", "ev") if w.shape[layout.index("e")] == width]
    if requested is not None and requested not in fitting:
        raise KernelError(
            f"{op}: w of shape {w.shape} as w_layout={requested!r} has a width of {w.shape[requested.index('e')]}, "
            f"and x has one of {width}"
        )
    if not fitting:
        raise KernelError(f"{op}: no axis of w, of shape {w.shape}, is as long as x is wide, {width}")
    if requested is None and len(fitting) > 1:
        raise KernelError(
            f"{op}: either axis of w, of shape {w.shape}, may be the vocabulary; set w_layout='ve' or 'ev'"
        )
    return fitting[0] if requested is None else ("ve" if requested == "ve" else "ev")


def _number(
    op: str,
    name: str,
    value: Any,
    *,
    least: float | None = None,
    above: float | None = None,
    below: float | None = None,
) -> float:
    if isinstance(value, jax.core.Tracer):
        raise KernelError(f"{op}: {name} has to be known before tracing")
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise KernelError(f"{op}: {name} has to be a number, not {value!r}") from None
    fits = (
        np.isfinite(number)
        and (least is None or number >= least)
        and (above is None or number > above)
        and (below is None or number < below)
    )
    if not fits:
        lower = f"greater than {above:g}" if above is not None else f"at least {least:g}"
        raise KernelError(f"{op}: {name} has to be {lower}{f' and below {below:g}' if below else ''}, not {value!r}")
    return number


def _ignore_index(op: str, value: Any, dtype: Any) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise KernelError(f"{op}: ignore_index has to be an integer or None, not {value!r}")
    if not jnp.iinfo(dtype).min <= int(value) <= jnp.iinfo(dtype).max:
        raise KernelError(f"{op}: no target of type {dtype.name} can be ignore_index={int(value)}; use int32 targets")
    return int(value)


def _check_targets(op: str, targets: Any, terms: Terms) -> None:
    """Check targets whose values are known; in a traced program the loss of a wrong one is NaN."""
    if isinstance(targets, jax.core.Tracer) or not targets.size or not targets.is_fully_addressable:
        return
    values = np.asarray(targets)
    bad = (values < 0) | (values >= terms.vocabulary)
    if terms.ignore_index is not None:
        bad &= values != terms.ignore_index
    if bad.any():
        place = tuple(int(i) for i in np.argwhere(bad)[0])
        raise KernelError(
            f"{op}: the target {int(values[place])} at {place} is not in a vocabulary of {terms.vocabulary}, which has "
            f"0 to {terms.vocabulary - 1}; for padding set ignore_index"
        )


def _wide(targets: jax.Array) -> jax.Array:
    """Return targets in a dtype that holds V, so that comparing them with V does not wrap around."""
    return targets.astype(jnp.int32) if targets.dtype.itemsize < 4 else targets
