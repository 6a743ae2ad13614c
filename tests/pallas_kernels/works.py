"""What the parity table measures: each op with its features and dtypes."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.blockwise import (
    RULES,
    Quantized,
    Rule,
    dequantize_blockwise,
    quantize_blockwise,
    update_blockwise,
)
from pallas_kernels.cut_cross_entropy import linear_cross_entropy
from pallas_kernels.decode_attention import decode_attention
from pallas_kernels.softmax import log_softmax, logsumexp, softmax
from tests.pallas_kernels.comparison import Program, Work, draws
from tests.pallas_kernels.flash_attention import dropout_cases


def works() -> Iterator[Work]:
    """Yield all work, in the order of the table; no data is drawn before `make` is called."""
    yield from _softmax_works()
    yield from _blockwise_works()
    yield from _attention_works()
    yield from _loss_works()
    yield from _decode_works()
    yield from _recurrence_works()
    yield from _convolution_works()
    yield from _grouped_works()
    yield from _grouped_stored_works()
    yield from _routed_works()
    yield from _gated_works()


# softmax ---------------------------------------------------------------------------------------------------------

_SHAPES = {
    "rows in one read": (16, 1024),
    "rows in two reads": (8, 16384),
    "masked": (16, 1024),
    "large logits": (16, 1024),
}
_OPS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "softmax": (softmax, jax.nn.softmax),
    "log_softmax": (log_softmax, jax.nn.log_softmax),
    "logsumexp": (logsumexp, functools.partial(jax.nn.logsumexp, axis=-1)),
}


def _softmax_works() -> Iterator[Work]:
    for name in _OPS:
        for feature in _SHAPES:
            for dtype in ("float32", "bfloat16", "float16"):
                for direction in ("forward", "backward"):
                    if feature == "masked" and direction == "backward" and name == "log_softmax":
                        continue  # -inf at a masked place: the plain implementation's gradient is NaN there
                    make = functools.partial(_softmax_program, name, feature, dtype, direction)
                    yield Work(name, feature, dtype, (direction,), make)


def _softmax_program(name: str, feature: str, dtype: str, direction: str, seed: int | None) -> Program:
    x, g, mask = _logits(feature, _SHAPES[feature], dtype, name, seed)
    ours, plain = _OPS[name]

    def run(op: Callable[..., Any]) -> Callable[..., Any]:
        f = functools.partial(op, where=mask)
        if direction == "forward":
            return f
        return lambda x: jax.vjp(f, x)[1](g.astype(jax.eval_shape(f, x).dtype))[0]

    finite_part = lambda y: (_finite(y) if direction == "forward" else y,)  # noqa: E731
    return Program(
        lambda implementation: run(functools.partial(ours, implementation=implementation)),
        (x,),
        finite_part,
        lambda: finite_part(jax.jit(run(plain))(x)),
        lambda: (_truth(name, direction, x, g, mask),),
    )


def _finite(y: Any) -> Any:
    """Replace -inf, which a log-softmax has at masked places, by 0, so that errors can be computed."""
    y = np.asarray(y)
    return np.where(np.isneginf(y.astype(np.float64)), 0, y).astype(y.dtype)


def _logits(feature: str, shape: tuple[int, int], dtype: str, name: str, seed: int | None) -> tuple[Any, Any, Any]:
    random = np.random.default_rng(draws(0, seed))
    x = random.normal(size=shape) * 4.0 + (3e4 if feature == "large logits" else 0.0)  # exp overflows everywhere
    g = random.normal(size=shape[:1] if name == "logsumexp" else shape)
    mask = jnp.asarray(random.random(shape) < 0.7) if feature == "masked" else None
    return jnp.asarray(x, dtype), jnp.asarray(g, dtype), mask


def _truth(name: str, direction: str, x: Any, g: Any, mask: Any) -> np.ndarray:
    x, g = np.asarray(x).astype(np.float64), np.asarray(g).astype(np.float64)
    keep = np.ones_like(x, bool) if mask is None else np.asarray(mask)
    low = np.where(keep, x, -np.inf)
    top = low.max(-1, keepdims=True)
    e = np.exp(low - top)
    total = e.sum(-1, keepdims=True)
    p, lse = e / total, top + np.log(total)
    if direction == "forward":
        return {"softmax": p, "log_softmax": np.where(keep, x - lse, 0), "logsumexp": lse[..., 0]}[name]
    if name == "softmax":
        return p * (g - (g * p).sum(-1, keepdims=True))
    if name == "log_softmax":
        return g - p * g.sum(-1, keepdims=True)
    return g[..., None] * p


# blockwise -------------------------------------------------------------------------------------------------------

_SCALARS = {"lr": 0.01, "b1": 0.9, "b2": 0.95, "eps": 1e-8, "weight_decay": 0.1, "fix1": 0.5, "fix2": 0.2}
_SCALARS |= {"momentum": 0.9}
_FEATURES = {"matrix": ((128, 512), (1, 128)), "heads": ((128, 4, 128), (1, 1, 128)), "narrow": ((64, 64), (1, 64))}


def _blockwise_works() -> Iterator[Work]:
    for rule in RULES.values():
        for feature in _FEATURES:
            for dtype in ("float32", "bfloat16"):
                if feature != "matrix" and (rule.name != "adamw" or dtype != "float32"):
                    continue  # each shape once and each rule once
                states = (f"state {i}" for i in range(len(rule.states)))
                parts = tuple(f"{rule.name}: {what}" for what in ("parameter", *states))
                yield Work(
                    "blockwise",
                    feature,
                    dtype,
                    parts,
                    functools.partial(update_program, rule, *_FEATURES[feature], dtype),
                )


def update_program(rule: Rule, shape: Any, tile: Any, dtype: str, seed: int | None) -> Program:
    """Return one step of a rule; its parts are the parameter and each state, dequantised."""
    p, g, states = _inputs(rule, shape, tile, dtype, seed)
    every = range(-1, len(rule.states))
    parts = lambda outputs: tuple(_part(outputs, i) for i in every)  # noqa: E731
    return Program(
        lambda implementation: (
            lambda p, g, s: update_blockwise(rule, _scalars(rule), p, g, s, implementation=implementation)
        ),
        (p, g, states),
        parts,
        lambda: parts(jax.jit(functools.partial(_plain_update, rule))(p, g, states)),
        lambda: tuple(_true_update(rule, p, g, states, i) for i in every),
    )


def _inputs(rule: Rule, shape: Any, tile: Any, dtype: str, seed: int | None) -> tuple[Any, Any, tuple[Quantized, ...]]:
    random = np.random.default_rng(draws(1, seed))
    draw = lambda scale: jnp.asarray(random.normal(size=shape) * scale, jnp.float32)  # noqa: E731
    p, g = draw(1.0).astype(dtype), draw(0.1).astype(dtype)
    states = (draw(0.1) if signed else jnp.square(draw(0.1)) for signed in rule.states)
    signed_states = zip(states, rule.states, strict=True)
    return p, g, tuple(quantize_blockwise(s, tile=tile, signed=signed) for s, signed in signed_states)


def _scalars(rule: Rule) -> dict[str, float]:
    return {name: _SCALARS[name] for name in rule.scalars}


def _part(outputs: Any, i: int) -> Any:
    return outputs[0] if i < 0 else dequantize_blockwise(outputs[1][i])


def _plain_update(rule: Rule, p: Any, g: Any, states: Any) -> Any:
    """Dequantise, the rule, quantise: three steps of jax.numpy."""
    derived = rule.derive({k: jnp.float32(v) for k, v in _scalars(rule).items()})
    exact = p.astype(jnp.float32)
    u, new = rule.step(exact, g.astype(jnp.float32), tuple(map(dequantize_blockwise, states)), derived)
    again = (quantize_blockwise(n, tile=s.tile, signed=s.signed, moment=True) for n, s in zip(new, states, strict=True))
    return (exact + u).astype(p.dtype), tuple(again)


def _true_update(rule: Rule, p: Any, g: Any, states: Any, i: int) -> np.ndarray:
    """The rule in float64 on the same dequantised states; of a state, before it is quantised again."""
    wide = lambda x: np.asarray(x).astype(np.float64)  # noqa: E731
    with jax.enable_x64(True):
        derived = rule.derive({k: jnp.float64(v) for k, v in _scalars(rule).items()})
        before = tuple(jnp.asarray(wide(dequantize_blockwise(s))) for s in states)
        u, new = rule.step(jnp.asarray(wide(p)), jnp.asarray(wide(g)), before, derived)
        return wide(p) + wide(u) if i < 0 else wide(new[i])


# flash attention --------------------------------------------------------------------------------------------------

_ATTENTION: tuple[dict[str, Any], ...] = (
    {"D": 128, "grouped": True, "causal": True},
    {"D": 64, "causal": True, "segments": True, "odd": True},
    {"D": 96, "causal": True, "window": True, "softcap": True},
    {"D": (192, 128), "causal": True, "S≠T": True},
    {"D": 256, "segments": True, "odd": True, "S≠T": True},
)
"""Cases of the full grid (`flash_attention/grid.py`): each feature at least once, and all kinds of widths."""


def _attention_works() -> Iterator[Work]:
    from tests.pallas_kernels.flash_attention import grid  # late, since it imports parity.py, which imports this module

    for chosen in _ATTENTION:
        for dtype in ("float32", "bfloat16", "float16"):
            if dtype == "float32" and chosen["D"] == 256:
                continue  # see the module docstring
            work = grid.work_of(dict.fromkeys(grid.FEATURES, False) | chosen | {"dtype": dtype})
            yield dataclasses.replace(work, feature=work.feature.partition(" ")[2])
    yield from dropout_cases.works()


# cut cross-entropy ------------------------------------------------------------------------------------------------

_LOSSES: dict[str, dict[str, Any]] = {
    "plain": {},
    "softcap": {"softcap": 3.0},
    "label smoothing": {"label_smoothing": 0.1},
    "w (E, V)": {"w_layout": "ev"},
    "entropy": {"return_entropy": True},
}


def _loss_works() -> Iterator[Work]:
    for feature in _LOSSES:
        for dtype in ("float32", "bfloat16", "float16"):
            make = functools.partial(_loss_program, feature, dtype)
            first = "entropy" if "return_entropy" in _LOSSES[feature] else "loss"
            yield Work("linear_cross_entropy", feature, dtype, (first, "dx", "dw"), make)


def _loss_program(feature: str, dtype: str, seed: int | None) -> Program:
    from tests.pallas_kernels.cut_cross_entropy.cases import truth

    options = _LOSSES[feature]
    (x, w, targets), d = _loss_inputs(dtype, options.get("w_layout", "ve"), seed)
    ours = functools.partial(loss_and_gradients, targets, d, options)

    def right() -> tuple[Any, ...]:
        at = 2 if "return_entropy" in options else 0  # of the results, and of their cotangents
        slopes = [d if i == at else np.zeros_like(d) for i in range(3)]
        *results, dx, dw, _ = truth((x, w, targets), options, *slopes)
        return results[at], dx, dw

    return Program(ours, (x, w), tuple, lambda: tuple(jax.jit(ours(None))(x, w)), right)


def _loss_inputs(dtype: str, w_layout: str, seed: int | None) -> tuple[tuple[Any, Any, Any], Any]:
    random = np.random.default_rng(draws(2, seed))
    n, v, e = 24, 320, 64
    x, w = jnp.asarray(random.normal(size=(n, e)), dtype), jnp.asarray(random.normal(size=(v, e)) / 4, dtype)
    targets, d = random.integers(0, v, n).astype(np.int32), random.normal(size=n).astype(np.float32)
    return (x, w if w_layout == "ve" else w.T, targets), d


def loss_and_gradients(targets: Any, d: Any, options: dict[str, Any], implementation: str | None) -> Callable[..., Any]:
    """Return loss and gradients by x and w; with `None` as the implementation, of materialised logits."""
    from tests.pallas_kernels.cut_cross_entropy import cases

    of_entropy = "return_entropy" in options

    def f(x: Any, w: Any) -> Any:
        if implementation is None:
            return cases.plain(x, w, 1.0, targets=targets, options=options)[2 if of_entropy else 0]
        results = linear_cross_entropy(x, w, targets, **options, implementation=implementation)
        return results[1] if of_entropy else results

    return lambda x, w: (f(x, w), *jax.vjp(f, x, w)[1](d))


# decode attention ------------------------------------------------------------------------------------------------

_CACHES: dict[str, dict[str, Any]] = {
    "contiguous, grouped": {"pages": (136, 1)},
    "pages, 3 queries, window": {"pages": (16, 9), "queries": 3, "window": 40},
    "pages dealt out, softcap": {"pages": (16, 9), "stride": 2, "softcap": 2.0},
}


def _decode_works() -> Iterator[Work]:
    for feature in _CACHES:
        for dtype in ("float32", "bfloat16", "float16"):
            yield Work(
                "decode_attention", feature, dtype, ("out", "lse"), functools.partial(_decode_program, feature, dtype)
            )


def _decode_program(feature: str, dtype: str, seed: int | None) -> Program:
    from tests.pallas_kernels.decode_attention import cases

    case = {"dtype": dtype, "widths": (64, 64), "heads": (4, 2), "queries": 1, **_CACHES[feature]}
    arrays, options = cases.make(case, draws(0, seed), pages=True)
    finite = lambda outputs: tuple(map(_finite, outputs))  # noqa: E731
    return Program(
        lambda implementation: lambda a: decode_attention(*a, **options, implementation=implementation),
        (arrays,),
        finite,
        lambda: finite(jax.jit(lambda a: cases.plain(a, options))(arrays)),
        lambda: finite(cases.truth(arrays, options)),
    )


# chunked recurrence ------------------------------------------------------------------------------------------------


def _recurrence_works() -> Iterator[Work]:
    from tests.pallas_kernels.chunked_recurrence.cases import FEATURES, WIDE, program, without_log_decay

    for feature, (decay, delta) in (FEATURES | WIDE).items():
        for dtype in ("bfloat16",) if feature in WIDE else ("float32", "bfloat16", "float16"):
            parts = ("out", "state", "dq", "dk", "dv", *("dbeta",) * delta, "dinitial")
            run = functools.partial(program, wide=feature in WIDE)
            make = functools.partial(lambda run, *a: without_log_decay(run(*a), a[0]), run, decay, delta, dtype)
            yield Work("chunked_recurrence", feature, dtype, parts, make)


# long convolutions -------------------------------------------------------------------------------------------------


def _convolution_works() -> Iterator[Work]:
    from tests.pallas_kernels.fftconv.cases import FEATURES, program

    for feature, (taps, packed) in FEATURES.items():
        for dtype in ("float32", "bfloat16", "float16"):
            yield Work(
                "fftconv", feature, dtype, ("y", "dx", "dkernel"), functools.partial(program, taps, packed, dtype)
            )


# grouped products --------------------------------------------------------------------------------------------------


def _grouped_works() -> Iterator[Work]:
    from tests.pallas_kernels.grouped_matmul.cases import PARTS, SIZES, program

    for feature in list(SIZES)[1:3]:
        for dtype in ("float32", "bfloat16", "float16"):
            yield Work("grouped_matmul", feature, dtype, PARTS, functools.partial(program, feature, dtype))


def _grouped_stored_works() -> Iterator[Work]:
    from tests.pallas_kernels.grouped_stored_matmul.cases import PARTS, program

    for form, dtype in (("mxfp4", "float32"), ("mxfp4", "bfloat16"), ("mxfp4", "float16"), ("int8", "bfloat16")):
        yield Work("grouped_stored_matmul", form, dtype, PARTS, functools.partial(program, form, dtype))


# layers of experts -------------------------------------------------------------------------------------------------


def _routed_works() -> Iterator[Work]:
    from tests.pallas_kernels.routed_experts.cases import FEATURES, PARTS, program

    for feature in FEATURES:
        for dtype in ("float32", "bfloat16", "float16"):
            yield Work("routed_experts", feature, dtype, PARTS, functools.partial(program, feature, dtype))


def _gated_works() -> Iterator[Work]:
    from tests.pallas_kernels.grouped_experts.cases import FEATURES, PARTS, program

    for feature in FEATURES:
        for dtype in ("float32", "bfloat16", "float16"):
            yield Work("grouped_experts", feature, dtype, PARTS, functools.partial(program, feature, dtype))
