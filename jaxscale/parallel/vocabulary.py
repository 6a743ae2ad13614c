"""Log-probabilities of tokens and what is made of them, from hidden states and heads: logits are never stored.

All are float32, exact in the forward and the backward pass, and take vocabularies that the layout shards. Log-
probabilities, entropies and the log-sum-exp are those of `sharded_cross_entropy`, with its kernels; the rest is plain
XLA on every platform, which computes the logits of `vocabulary_tiles.TILE` at a time.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxscale.errors import LayoutError
from jaxscale.layout import constrain, in_use, unfill
from jaxscale.parallel.cross_entropy import sharded_cross_entropy
from jaxscale.parallel.ends import local_rows
from jaxscale.parallel.reductions import sum_to
from jaxscale.parallel.sharded import cut_already, cut_over, sharded_op, where_gradients_go
from jaxscale.parallel.vocabulary_tiles import Chosen, Head, OfLogprobs, Settings, largest, slopes, sums

_X, _W, _TOKENS = ("batch", "seq", "embed"), ("vocab", "embed"), ("batch", "seq")
_NAME = "an operand of the log-probabilities"


@functools.partial(jax.tree_util.register_dataclass, data_fields=["hidden", "head"], meta_fields=["softcap"])
@dataclasses.dataclass(frozen=True)
class Logits:
    """What gives one model's logits of every token: `softcap * tanh(hidden @ head.T / softcap)`.

    Args:
      hidden: final hidden states, (B, S, E), logical axes ("batch", "seq", "embed").
      head: the output head's weight, (V, E), logical axes ("vocab", "embed"); products are in hidden's dtype.
      softcap: the logits' soft cap, or `None`.
    """

    hidden: Float[Array, "b s e"]
    head: Float[Array, "v e"]
    softcap: float | None = None

    def at(self, temperature: float) -> Logits:
        """Return the logits divided by a temperature; the divided hidden states are rounded to their dtype.

        Args:
          temperature: above 0.
        """
        if temperature == 1.0:
            return self
        cap = None if self.softcap is None else self.softcap / temperature
        hidden = (self.hidden.astype(jnp.float32) / temperature).astype(self.hidden.dtype)
        return Logits(hidden, self.head, cap)


def token_logprobs(
    logits: Logits, ids: Int[Array, "b s"], *, temperature: float = 1.0, implementation: str | None = None
) -> Float[Array, "b s"]:
    """Return the log-probability of a token id at each position, in nats, float32; differentiable.

    Args:
      logits: of the positions that predict the ids.
      ids: from 0 to V - 1; under `jit` the result for others is NaN.
      temperature: what logits are divided by.
      implementation: of the kernel (see `sharded_cross_entropy`).

    Raises:
      LayoutError: a dimension that does not divide.
      KernelError: an implementation that is not supported here, or outside of `jit` an id that is no token.
    """
    at = logits.at(temperature)
    nats = sharded_cross_entropy(at.hidden, at.head, ids, softcap=at.softcap, implementation=implementation)
    return -nats  # type: ignore[operator]  # one array, without return_lse


def token_logprobs_and_entropy(
    logits: Logits, ids: Int[Array, "b s"], *, temperature: float = 1.0, implementation: str | None = None
) -> tuple[Float[Array, "b s"], Float[Array, "b s"]]:
    """Return `token_logprobs`, and the entropy of each position's distribution in nats, from one pass; differentiable.

    Args:
      logits: as for `token_logprobs`, like the other arguments.
      ids: from 0 to V - 1; the entropy does not depend on them.
      temperature: what logits are divided by.
      implementation: of the kernel.

    Raises:
      LayoutError: as `token_logprobs`.
      KernelError: as `token_logprobs`.
    """
    at = logits.at(temperature)
    nats, entropy = sharded_cross_entropy(
        at.hidden, at.head, ids, softcap=at.softcap, return_entropy=True, implementation=implementation
    )
    return -nats, entropy


def token_entropy(
    logits: Logits, *, temperature: float = 1.0, implementation: str | None = None
) -> Float[Array, "b s"]:
    """Return the entropy of each position's distribution, in nats, float32; differentiable.

    Args:
      logits: of the positions.
      temperature: what logits are divided by.
      implementation: of the kernel (see `sharded_cross_entropy`).

    Raises:
      LayoutError: a dimension that does not divide.
      KernelError: an implementation that is not supported here.
    """
    ids = jnp.zeros(logits.hidden.shape[:2], jnp.int32)
    return token_logprobs_and_entropy(logits, ids, temperature=temperature, implementation=implementation)[1]


def vocabulary_sum(
    fn: Callable[..., Array], logits: Sequence[Logits], *, trained: Sequence[bool] | None = None
) -> Float[Array, "b s"]:
    """Return the sum over the vocabulary of a function of the log-probabilities of one or several models.

    `fn` may be any divergence: `lambda t, s: jnp.exp(t) * (t - s)` is the forward Kullback–Leibler divergence. Each
    model's logits are computed three times: for the log-sum-exp, for the sum, and for the gradients.

    Args:
      fn: takes an array of log-probabilities of each model, float32 of one shape, and works element by element. It is
        static: pass the same object in every call, else each call compiles again.
      logits: of each model, for the same positions and the same vocabulary; hidden sizes may differ.
      trained: which models have gradients, by default all.

    Returns:
      nats (or what `fn` gives), float32 (B, S).

    Raises:
      LayoutError: vocabularies of different sizes, or a dimension that does not divide.
    """
    trained = (True,) * len(logits) if trained is None else tuple(trained)
    return _sum(logits, None, (_TOKENS,) * (1 + len(logits)), Settings(OfLogprobs(fn), _caps(logits), trained))[0]


def logprobs_at(logits: Logits, ids: Int[Array, "b s k"]) -> Float[Array, "b s k"]:
    """Return the log-probabilities of `k` token ids at each position, float32; differentiable.

    Args:
      logits: of the positions.
      ids: from 0 to V - 1; the results for others are NaN.
    """
    known = (ids >= 0) & (ids < logits.head.shape[0])
    summand = Settings(Chosen(), (logits.softcap,), (True,))
    (results,) = _sum((logits,), jnp.where(known, ids, -1), ((*_TOKENS, None),), summand)
    return jnp.where(known, results, jnp.nan)


def top_logprobs(logits: Logits, k: int) -> tuple[Float[Array, "b s k"], Int[Array, "b s k"]]:
    """Return the `k` largest log-probabilities of each position, float32, and their token ids; without gradients.

    Args:
      logits: of the positions.
      k: number of ids, at most V.

    Raises:
      LayoutError: `k` is below 1 or above V.
    """
    vocab = logits.head.shape[0]
    if not 1 <= k <= vocab:
        raise LayoutError(f"top_logprobs(k={k}) of a vocabulary of {vocab}: give 1 to {vocab}")
    logits = jax.tree.map(lax.stop_gradient, logits)
    over = _whole("top_logprobs")

    def local(x: Array, w: Array, lse: Array, words: Array) -> tuple[Array, Array]:
        lead, first = x.shape[:2], local_rows(jnp.int32(0), w.shape[0], over)
        head = Head(x.reshape(-1, x.shape[2]), w, lse.reshape(-1))
        values, rows = largest(head, k, words + first, logits.softcap)
        rows = rows - first
        if over:
            every = [lax.all_gather(a, over, axis=1, tiled=True) for a in (values, rows)]
            values, at = lax.top_k(every[0], k)
            rows = jnp.take_along_axis(every[1], at, 1)
        return values.reshape(*lead, k), rows.reshape(*lead, k)

    return sharded_op(
        local,
        logits.hidden,
        in_use(logits.head, _W, logits.hidden.dtype),
        _lse(logits),
        jnp.int32(vocab),
        axes=(_X, _W, _TOKENS, ()),
        out_axes=((*_TOKENS, None),) * 2,
        name=_NAME,
    )


def _caps(logits: Sequence[Logits]) -> tuple[float | None, ...]:
    return tuple(x.softcap for x in logits)


def _lse(logits: Logits) -> Array:
    x, w = logits.hidden, logits.head
    ids = jnp.zeros(x.shape[:2], jnp.int32)
    return lax.stop_gradient(sharded_cross_entropy(x, w, ids, softcap=logits.softcap, return_lse=True)[1])


def _whole(op: str) -> tuple[str, ...]:
    if cut_already("vocab"):
        raise LayoutError(f"{op} does not work inside a shard_map that shards the vocabulary, such as a pipeline's")
    return cut_over("vocab")


def _sum(logits: Sequence[Logits], ids: Array | None, out_axes: Any, settings: Settings) -> tuple[Array, ...]:
    sizes = [x.head.shape[0] for x in logits]
    if len(set(sizes)) > 1:
        raise LayoutError(
            f"the models' vocabularies have {' and '.join(map(str, sizes))} tokens; they must be the same"
        )
    _whole("a sum over the vocabulary")
    xs, ws = tuple(x.hidden for x in logits), tuple(x.head for x in logits)
    return _summed(xs, ws, tuple(map(_lse, logits)), ids, out_axes, settings)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _summed(xs: Any, ws: Any, lses: Any, ids: Array | None, out_axes: Any, settings: Settings) -> tuple[Array, ...]:
    over, vocab = cut_over("vocab"), ws[0].shape[0]

    def local(xs: Any, ws: Any, lses: Any, ids: Array | None, words: Array) -> tuple[Array, ...]:
        lead = xs[0].shape[:2]
        flat, own = _flat(xs, ws, lses), _own(ids, ws[0], over)
        totals = sums(flat, own, local_rows(words, ws[0].shape[0], over), settings)
        totals = lax.psum(totals, over) if over else totals
        return tuple(t.reshape(*lead, *t.shape[1:]) for t in totals)

    return _on_shards(local, (xs, ws, lses, ids), jnp.int32(vocab), {"out_axes": out_axes})


def _forward(
    xs: Any, ws: Any, lses: Any, ids: Array | None, out_axes: Any, settings: Settings
) -> tuple[tuple[Array, ...], tuple[Any, ...]]:
    totals = _summed(xs, ws, lses, ids, out_axes, settings)
    return totals, (xs, ws, lses, ids, totals)


def _backward(out_axes: Any, settings: Settings, residuals: tuple[Any, ...], slope: Any) -> tuple[Any, ...]:
    xs, ws, lses, ids, totals = residuals
    over, token_axes = cut_over("vocab"), cut_over("batch", "seq")
    split = where_gradients_go(_W, token_axes)
    trained = [i for i, yes in enumerate(settings.trained) if yes]
    dtypes = tuple(w.dtype for w in ws)

    def local(xs: Any, ws: Any, lses: Any, ids: Array | None, totals: Any, slope: Any, words: Array) -> Any:
        flat, own = _flat(xs, ws, lses), _own(ids, ws[0], over)
        totals, slope = jax.tree.map(lambda t: t.reshape(-1, *t.shape[2:]), (totals, slope))
        results = slopes(flat, own, local_rows(words, ws[0].shape[0], over), totals, slope, settings, dtypes)
        out = []
        for i in trained:
            dx, dw = results[i]  # type: ignore[misc]
            dx = (lax.psum(dx, over) if over else dx).astype(xs[i].dtype).reshape(xs[i].shape)
            out.append((dx, sum_to(dw, token_axes, split, dim=1)))
        return tuple(out)

    more = {
        "out_axes": ((_X, _W),) * len(trained),
        "out_kinds": (("activations", "grads" if split else "activations"),) * len(trained),
    }
    grads = _on_shards(local, (xs, ws, lses, ids, totals, slope), jnp.int32(ws[0].shape[0]), more)
    dxs, dws = [jnp.zeros_like(x) for x in xs], [jnp.zeros_like(w) for w in ws]
    for i, (dx, dw) in zip(trained, grads, strict=True):
        dxs[i], dws[i] = dx, unfill(constrain(dw, *_W, kind="grads"), ws[i].shape, *_W)
    return tuple(dxs), tuple(dws), tuple(map(jnp.zeros_like, lses)), None


_summed.defvjp(_forward, _backward)


def _on_shards(local: Callable[..., Any], trees: tuple[Any, ...], words: Array, out: dict[str, Any]) -> Any:
    """Call `local(*trees, words)` on every device's shards; the first two trees are hidden states and heads."""
    xs, ws, *rest = trees
    ws = tuple(in_use(w, _W, x.dtype) for w, x in zip(ws, xs, strict=True))
    leaves, structure = jax.tree.flatten((xs, ws, *rest))
    n = len(xs)
    axes = [_X] * n + [_W] * n + [(*_TOKENS, *[None] * (a.ndim - 2)) for a in leaves[2 * n :]]

    def run(*arrays: Array) -> Any:
        return local(*jax.tree.unflatten(structure, arrays[:-1]), arrays[-1])

    return sharded_op(run, *leaves, words, axes=(*axes, ()), name=_NAME, **out)


def _flat(xs: Any, ws: Any, lses: Any) -> tuple[Head, ...]:
    return tuple(Head(x.reshape(-1, x.shape[2]), w, z.reshape(-1)) for x, w, z in zip(xs, ws, lses, strict=True))


def _own(ids: Array | None, w: Array, over: tuple[str, ...]) -> Array | None:
    """Return ids as (N, k) rows of this device."""
    return None if ids is None else local_rows(ids.reshape(-1, ids.shape[2]), w.shape[0], over)
