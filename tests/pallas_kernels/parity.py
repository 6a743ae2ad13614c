"""The parity table: every op, backend, feature and dtype, its error beside that of a plain implementation.

    python -m tests.pallas_kernels.parity            # writes pallas_kernels/PARITY.md (jax 0.11 or newer)
    python -m tests.pallas_kernels.parity --op softmax   # measures these rows and keeps the others

Errors are against float64, as the deviation's norm over the value's. There is no tolerance chosen by hand: ours
may be twice the error of a plain jax.numpy implementation in the same dtype, or, where that one happens to be more
exact, one unit in the last place of the output, two of float32: that is what an accelerator's own exp2 is off by
(2**-22, PTX ISA, ex2.approx).

Attention 256 wide is compared in 16 bits only: of tiles as large as a kernel's a CPU sums 256 float32 products with
twice the error that it has on the small matrices of the plain implementation, which says nothing of the kernel.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxscale.testing.ops import allowed, error_of
from pallas_kernels import dispatch
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
from pallas_kernels.dispatch import KernelError
from pallas_kernels.softmax import log_softmax, logsumexp, softmax

TABLE = Path(dispatch.__file__).parent / "PARITY.md"
BACKENDS = ("xla", "mosaic_tpu", "mosaic_gpu")
THREADS = 8
"""Devices to simulate: the CPU client has as many threads, or one a core. Each warp group of an interpreted GPU kernel
takes one of them and waits for the others; with too few they wait for ever."""
HEAD = ("op", "feature", "dtype", "direction", "backend", "error", "plain error", "verdict")


@dataclasses.dataclass(frozen=True)
class Case:
    """One line of the table on every backend.

    Args:
      op, feature, dtype, direction: what it is called.
      ours: implementation -> what to compare.
      plain: the same in plain jax.numpy, in the same dtype.
      truth: float64.
    """

    op: str
    feature: str
    dtype: str
    direction: str
    ours: Callable[[str], Any]
    plain: Callable[[], Any]
    truth: Callable[[], np.ndarray]

    @property
    def name(self) -> str:
        return f"{self.op} {self.feature} {self.dtype} {self.direction}"


@dataclasses.dataclass(frozen=True)
class Row:
    """A line of the table. Without an error, `verdict` is the sentence of the refusal."""

    case: Case
    backend: str
    error: float | None
    plain: float | None
    verdict: str

    @property
    def cells(self) -> tuple[str, ...]:
        c, number = self.case, lambda x: "" if x is None else f"{x:.1e}"
        errors = (number(self.error), number(self.plain))
        return (c.op, c.feature, c.dtype, c.direction, self.backend, *errors, self.verdict)


def measure(case: Case, backend: str) -> Row:
    """Runs a case on a backend: compiled for "xla", else in the interpreter with race detection."""
    truth = case.truth()
    error = functools.partial(error_of, truth=truth)
    try:
        if backend == "xla":
            got = case.ours(backend)
        else:
            with dispatch.interpreted(races=True):
                got = case.ours(backend)
    except KernelError as e:
        return Row(case, backend, None, None, f"not supported: {str(e).partition('not supported here: ')[2] or e}")
    ours, plain = error(got), error(case.plain())
    return Row(case, backend, ours, plain, "ok" if ours <= allowed(plain, np.asarray(got).dtype) else "WRONG")


def cases() -> Iterator[Case]:
    """Every line, in the order of the table."""
    yield from _softmax_cases()
    yield from _blockwise_cases()
    yield from _attention_cases()
    yield from _loss_cases()
    yield from _decode_cases()


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


def _softmax_cases() -> Iterator[Case]:
    for name, (ours, plain) in _OPS.items():
        for feature, shape in _SHAPES.items():
            for dtype in ("float32", "bfloat16", "float16"):
                x, g, mask = _logits(feature, shape, dtype, name)

                for direction in ("forward", "backward"):
                    if mask is not None and direction == "backward" and name == "log_softmax":
                        continue  # -inf at a masked place: what a plain one differentiates there is NaN
                    yield Case(
                        name, feature, dtype, direction,
                        lambda how, ours=ours, d=direction, x=x, g=g, mask=mask: _ours(ours, how, d, x, g, mask),
                        lambda plain=plain, d=direction, x=x, g=g, mask=mask: _ours(plain, None, d, x, g, mask),
                        lambda name=name, d=direction, x=x, g=g, mask=mask: _truth(name, d, x, g, mask),
                    )  # fmt: skip


def _ours(op: Callable[..., Any], how: str | None, direction: str, x: Any, g: Any, mask: Any) -> Any:
    f = functools.partial(op, where=mask) if how is None else functools.partial(op, where=mask, implementation=how)
    if direction == "forward":
        return _finite(jax.jit(f)(x))
    return jax.jit(lambda x: jax.vjp(f, x)[1](g.astype(jax.eval_shape(f, x).dtype))[0])(x)


def _finite(y: Any) -> Any:
    """A masked place of a log-softmax is -inf in both; zero, so that errors can be taken."""
    y = np.asarray(y)
    return np.where(np.isneginf(y.astype(np.float64)), 0, y).astype(y.dtype)


def _logits(feature: str, shape: tuple[int, int], dtype: str, name: str) -> tuple[Any, Any, Any]:
    random = np.random.default_rng(0)
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
_FEATURES = {"matrix": ((128, 512), (2, 128)), "heads": ((128, 4, 128), (2, 1, 128)), "narrow": ((64, 64), (4, 64))}


def _blockwise_cases() -> Iterator[Case]:
    for rule in RULES.values():
        for feature, (shape, tile) in _FEATURES.items():
            for dtype in ("float32", "bfloat16"):
                if feature != "matrix" and (rule.name != "adamw" or dtype != "float32"):
                    continue  # the shapes once, the rules once
                p, g, states = _inputs(rule, shape, tile, dtype)
                # one run shows the parameter and every state
                ours = functools.cache(functools.partial(_updated, rule, p, g, states))
                plain = functools.cache(functools.partial(_plain_update, rule, p, g, states))
                for i in range(-1, len(rule.states)):
                    yield Case(
                        "blockwise", feature, dtype, f"{rule.name}: {'parameter' if i < 0 else f'state {i}'}",
                        lambda how, ours=ours, i=i: _part(ours(how), i),
                        lambda plain=plain, i=i: _part(plain(), i),
                        lambda r=rule, p=p, g=g, s=states, i=i: _true_update(r, p, g, s, i),
                    )  # fmt: skip


def _inputs(rule: Rule, shape: Any, tile: Any, dtype: str) -> tuple[Any, Any, tuple[Quantized, ...]]:
    random = np.random.default_rng(1)
    draw = lambda scale: jnp.asarray(random.normal(size=shape) * scale, jnp.float32)  # noqa: E731
    p, g = draw(1.0).astype(dtype), draw(0.1).astype(dtype)
    states = (draw(0.1) if signed else jnp.square(draw(0.1)) for signed in rule.states)
    kept = zip(states, rule.states, strict=True)
    return p, g, tuple(quantize_blockwise(s, tile=tile, signed=signed) for s, signed in kept)


def _scalars(rule: Rule) -> dict[str, float]:
    return {name: _SCALARS[name] for name in rule.scalars}


def _updated(rule: Rule, p: Any, g: Any, states: Any, how: str) -> Any:
    return jax.jit(lambda p, g, s: update_blockwise(rule, _scalars(rule), p, g, s, implementation=how))(p, g, states)


def _part(found: Any, i: int) -> Any:
    return found[0] if i < 0 else dequantize_blockwise(found[1][i])


def _plain_update(rule: Rule, p: Any, g: Any, states: Any) -> Any:
    """Dequantise, the rule, quantise: three steps of jax.numpy."""
    derived = rule.derive({k: jnp.float32(v) for k, v in _scalars(rule).items()})
    exact = p.astype(jnp.float32)
    u, new = rule.step(exact, g.astype(jnp.float32), tuple(map(dequantize_blockwise, states)), derived)
    again = (quantize_blockwise(n, tile=s.tile, signed=s.signed) for n, s in zip(new, states, strict=True))
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
"""Of the full grid's features (`flash_attention/grid.py`): each once at least, and all kinds of widths."""


def _attention_cases() -> Iterator[Case]:
    from tests.pallas_kernels.flash_attention import grid  # which asks this file to measure

    for chosen in _ATTENTION:
        for dtype in ("float32", "bfloat16", "float16"):
            if dtype == "float32" and chosen["D"] == 256:
                continue  # see above
            for case in grid.parts_of(dict.fromkeys(grid.FEATURES, False) | chosen | {"dtype": dtype}):
                yield dataclasses.replace(case, feature=case.feature.partition(" ")[2])


# cut cross-entropy ------------------------------------------------------------------------------------------------

_LOSSES: dict[str, dict[str, Any]] = {
    "plain": {},
    "softcap": {"softcap": 3.0},
    "label smoothing": {"label_smoothing": 0.1},
    "w (E, V)": {"w_layout": "ev"},
}


def _loss_cases() -> Iterator[Case]:
    from tests.pallas_kernels.cut_cross_entropy.cases import truth

    for feature, given in _LOSSES.items():
        for dtype in ("float32", "bfloat16", "float16"):
            (x, w, targets), d = _loss_inputs(dtype, given.get("w_layout", "ve"))
            # one run shows the loss and both gradients
            ours = functools.cache(functools.partial(_loss_and_gradients, x, w, targets, d, given))
            plain = functools.cache(functools.partial(ours, None))
            right = functools.cache(lambda x=x, w=w, t=targets, d=d, o=given: truth((x, w, t), o, d, np.zeros_like(d)))
            for i, part in enumerate(("loss", "dx", "dw")):
                yield Case(
                    "linear_cross_entropy", feature, dtype, part,
                    lambda how, ours=ours, i=i: ours(how)[i],
                    lambda plain=plain, i=i: plain()[i],
                    lambda right=right, i=i: right()[(0, 2, 3)[i]],
                )  # fmt: skip


def _loss_inputs(dtype: str, w_layout: str) -> tuple[tuple[Any, Any, Any], Any]:
    random = np.random.default_rng(2)
    n, v, e = 24, 320, 64
    x, w = jnp.asarray(random.normal(size=(n, e)), dtype), jnp.asarray(random.normal(size=(v, e)) / 4, dtype)
    targets, d = random.integers(0, v, n).astype(np.int32), random.normal(size=n).astype(np.float32)
    return (x, w if w_layout == "ve" else w.T, targets), d


def _loss_and_gradients(x: Any, w: Any, targets: Any, d: Any, options: dict[str, Any], how: str | None) -> Any:
    """With no implementation, what anybody writes: the loss of materialised logits."""
    from tests.pallas_kernels.cut_cross_entropy import cases

    def f(x: Any, w: Any) -> Any:
        if how is None:
            return cases.plain(x, w, 1.0, targets=targets, options=options)[0]
        return linear_cross_entropy(x, w, targets, **options, implementation=how)

    y, (dx, dw) = jax.jit(lambda x, w: (f(x, w), jax.vjp(f, x, w)[1](d)))(x, w)
    return y, dx, dw


# decode attention ------------------------------------------------------------------------------------------------

_CACHES: dict[str, dict[str, Any]] = {
    "contiguous, grouped": {"pages": (136, 1)},
    "pages, 3 queries, window": {"pages": (16, 9), "queries": 3, "window": 40},
    "pages dealt out, softcap": {"pages": (16, 9), "stride": 2, "softcap": 2.0},
}


def _decode_cases() -> Iterator[Case]:
    from tests.pallas_kernels.decode_attention import cases

    for feature, given in _CACHES.items():
        for dtype in ("float32", "bfloat16", "float16"):
            case = {"dtype": dtype, "widths": (64, 64), "heads": (4, 2), "queries": 1, **given}
            arrays, options = cases.make(case, pages=True)
            # one run shows both
            ours = functools.cache(functools.partial(_decoded, arrays, options))
            plain = functools.cache(functools.partial(cases.plain, arrays, options))
            right = functools.cache(functools.partial(cases.truth, arrays, options))
            for i, part in enumerate(("out", "lse")):
                yield Case(
                    "decode_attention", feature, dtype, part,
                    lambda how, ours=ours, i=i: _finite(ours(how)[i]),
                    lambda plain=plain, i=i: _finite(plain()[i]),
                    lambda right=right, i=i: _finite(right()[i]),
                )  # fmt: skip


def _decoded(arrays: Any, options: dict[str, Any], how: str) -> Any:
    return jax.jit(lambda a: decode_attention(*a, **options, implementation=how))(arrays)


# the table -------------------------------------------------------------------------------------------------------


def committed() -> dict[tuple[str, ...], tuple[str, ...]]:
    """The committed table: what a row is called -> its cells."""
    lines = (line.strip("| ").split(" | ") for line in TABLE.read_text().splitlines() if line.startswith("| "))
    _, _, *rows = (tuple(cell.strip() for cell in line) for line in lines)
    return {cells[:5]: cells for cells in rows}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--op", help="measure this op alone; the table's other rows stay")
    args = parser.parse_args()
    if dispatch.JAX_VERSION < (0, 11):
        sys.exit(f"the table needs the GPU interpreter of jax 0.11 or newer, and this is jax {jax.__version__}")
    jax.config.update("jax_num_cpu_devices", THREADS)
    if args.op and f"jax {jax.__version__}:" not in TABLE.read_text():
        sys.exit(f"the table is not of jax {jax.__version__}, so none of its rows can stay; leave --op out")
    kept = committed() if args.op else {}
    rows: list[tuple[str, ...]] = []
    for case in cases():
        for backend in BACKENDS:
            name = (case.op, case.feature, case.dtype, case.direction, backend)
            if case.op == args.op or name not in kept:
                kept[name] = measure(case, backend).cells
                print(" ".join(kept[name]), flush=True)
            rows.append(kept[name])
    width = [max(len(r[i]) for r in [HEAD, *rows]) for i in range(7)]
    line = lambda cells: "| " + " | ".join(c.ljust(w) for c, w in zip(cells, [*width, 0], strict=True)) + " |"  # noqa: E731
    text = (__doc__ or "").split("\n\n", 2)[2]
    TABLE.write_text(
        "# Parity\n\n"
        "Made by `python -m tests.pallas_kernels.parity`; do not edit. `xla` ran compiled on a CPU, the kernels in\n"
        f"their interpreters with race detection, jax {jax.__version__}: numbers, no speed, no hardware.\n\n{text}\n"
        + "\n".join([line(HEAD), line(["-" * max(3, w) for w in [*width, 3]]), *map(line, rows)])
        + "\n"
    )
    wrong = [row for row in rows if row[-1] == "WRONG"]
    print(f"{len(rows)} rows, {len(wrong)} wrong, {sum(not row[5] for row in rows)} not supported: {TABLE}")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
