"""Work at the sizes of `experiments/benchmarks`, for a device that can hold it; the rule is the parity table's.

The truth is plain jax.numpy on the device, with float32 matrix products of the highest precision on upcast inputs (in
float64 for float32 inputs, where it would otherwise be the plain implementation). It runs on a group of heads, a row or
some tokens at a time, so that arrays of S x T or N x V exist only for those.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.blockwise import ADAMW
from pallas_kernels.chunked_recurrence import chunked_recurrence
from pallas_kernels.chunked_recurrence.examples import MIXERS
from pallas_kernels.chunked_recurrence.reference import tokens
from pallas_kernels.decode_attention import decode_attention
from pallas_kernels.flash_attention import flash_attention
from pallas_kernels.softmax import log_softmax, logsumexp, softmax
from pallas_kernels.stored_matmul import stored_matmul
from pallas_kernels.stored_matmul.examples import FORMATS, shapes
from pallas_kernels.stored_matmul.reference import dense
from tests.pallas_kernels.chunked_recurrence import cases as recurrence_cases
from tests.pallas_kernels.comparison import Program, Work
from tests.pallas_kernels.cut_cross_entropy import cases as loss_cases
from tests.pallas_kernels.decode_attention import cases as decode_cases
from tests.pallas_kernels.flash_attention import cases as attention_cases
from tests.pallas_kernels.flash_attention import grid
from tests.pallas_kernels.grouped_experts import cases as gated_cases
from tests.pallas_kernels.grouped_matmul import cases as grouped_cases
from tests.pallas_kernels.grouped_stored_matmul import cases as grouped_stored_cases
from tests.pallas_kernels.routed_experts import cases as routed_cases
from tests.pallas_kernels.works import loss_and_gradients, update_program


def works(small: bool = False) -> Iterator[Work]:
    """Yield all work; `small` has the same features at sizes for a CPU."""
    yield from _attention(small)
    yield from _softmax(small)
    yield from _blockwise(small)
    yield from _loss(small)
    yield from _decode(small)
    yield from _stored(small)
    yield from _grouped(small)
    yield from _grouped_stored(small)
    yield from _routed(small)
    yield from _gated(small)
    yield from _recurrence(small)


def _key(seed: int | None) -> jax.Array:
    return jax.random.key(seed or 0)


def _true(f: Callable[..., Any], dtype: str, *arrays: jax.Array) -> Any:
    """Call a plain function of upcast arrays, with matrix products as exact as possible."""
    with jax.enable_x64(dtype == "float32"), jax.default_matmul_precision("highest"):
        wide = jnp.float64 if dtype == "float32" else jnp.float32
        return jax.jit(f)(*(x.astype(wide) for x in arrays))


# attention ---------------------------------------------------------------------------------------------------------

DOCUMENTS = (0.31, 0.02, 0.17, 0.05, 0.09, 0.22, 0.01, 0.13)
"""Lengths of a packed row's documents, as shares of the row, as in the benchmark."""

ALONE = tuple(part for part in grid.PARTS if part != "lse")
"""Parts of a call without a log-sum-exp."""

_CAUSAL: dict[str, Any] = {"causal": True}
_ATTENTION: tuple[tuple[str, str, tuple[int, int, int, int], Any, dict[str, Any]], ...] = (
    ("causal", "bfloat16", (2, 8192, 16, 16), 128, _CAUSAL),
    ("causal", "bfloat16", (2, 8192, 16, 16), 64, _CAUSAL),
    ("packed", "bfloat16", (1, 8192, 16, 16), 128, _CAUSAL | {"packed": True}),
    ("grouped", "bfloat16", (1, 8192, 16, 4), 128, _CAUSAL),
    ("window", "bfloat16", (1, 8192, 16, 16), 128, _CAUSAL | {"window": 1024}),
    ("softcap", "bfloat16", (2, 4096, 16, 16), 128, _CAUSAL | {"softcap": 50.0}),
    ("causal", "bfloat16", (2, 4096, 8, 8), 256, _CAUSAL),
    ("full", "bfloat16", (2, 4096, 16, 16), 128, {}),
    ("full", "float16", (2, 4096, 16, 16), 64, {}),
    ("full", "bfloat16", (2, 4096, 8, 8), 256, {}),
    ("packed grouped window", "bfloat16", (1, 8192, 16, 4), 64, _CAUSAL | {"packed": True, "window": 1024}),
    ("softcap", "bfloat16", (2, 4096, 16, 16), 64, _CAUSAL | {"softcap": 50.0}),
    ("causal", "float16", (4, 2048, 16, 16), 128, _CAUSAL),
    ("causal", "bfloat16", (1, 4096, 16, 16), (192, 128), _CAUSAL),
    ("causal", "float32", (1, 2048, 8, 8), 128, _CAUSAL),
)
"""Name, dtype, (B, S, H, K), width of heads (of values), options."""

_OUTPUTS: tuple[tuple[str, str, tuple[int, int, int, int], int, dict[str, Any]], ...] = (
    ("causal", "bfloat16", (2, 8192, 16, 16), 128, _CAUSAL),
    ("causal", "bfloat16", (2, 8192, 16, 16), 64, _CAUSAL),
    ("grouped", "bfloat16", (1, 8192, 16, 4), 128, _CAUSAL),
    ("window", "bfloat16", (1, 8192, 16, 16), 128, _CAUSAL | {"window": 1024}),
    ("full", "float16", (2, 4096, 16, 16), 64, {}),
    ("odd grouped window", "bfloat16", (3, 1055, 12, 4), 80, _CAUSAL | {"window": 96}),
)
"""Likewise, of calls that want no log-sum-exp, which is what cuDNN serves."""


def _attention(small: bool) -> Iterator[Work]:
    for name, dtype, (b, s, h, kv), width, options in _ATTENTION:
        d, dv = width if isinstance(width, tuple) else (width, width)
        if small:
            s, h, kv = s // 32, h // 4, kv // 4
            options = options | ({"window": options["window"] // 32} if "window" in options else {})
        for deterministic in (False, True):
            if deterministic and (d != dv or d > 128 or dtype == "float32"):
                continue  # the default is deterministic
            feature = f"{name} D={grid.width_of({'D': width})} {b}x{s}x{h}" + (f" on {kv}" if kv != h else "")
            make = functools.partial(_attention_program, dtype, (b, s, h, kv), (d, dv), options, deterministic)
            feature += " deterministic" if deterministic else ""
            yield Work("flash_attention", feature, dtype, grid.PARTS, make, large=True)
    for name, dtype, (b, s, h, kv), d, options in _OUTPUTS:
        if small:
            s, h, kv = s // 32, h // 4, kv // 4
            options = options | ({"window": options["window"] // 32} if "window" in options else {})
        feature = f"{name} D={d} {b}x{s}x{h}" + (f" on {kv}" if kv != h else "") + " output alone"
        make = functools.partial(_attention_program, dtype, (b, s, h, kv), (d, d), options, False, lse=False)
        yield Work("flash_attention", feature, dtype, ALONE, make, large=True)


def _attention_program(
    dtype: str,
    shape: tuple[int, int, int, int],
    widths: tuple[int, int],
    options: dict[str, Any],
    deterministic: bool,
    seed: int | None,
    *,
    lse: bool = True,
) -> Program:
    (b, s, h, kv), (d, dv) = shape, widths
    sizes = ((b, s, h, d), (b, s, kv, d), (b, s, kv, dv), (b, s, h, dv), (b, s, h))
    keys = jax.random.split(_key(seed), len(sizes))
    q, k, v, dout, dlse = (jax.random.normal(key, size, jnp.float32) for key, size in zip(keys, sizes, strict=True))
    arrays = (*(x.astype(dtype) for x in (q, k, v, dout)), dlse if lse else jnp.zeros_like(dlse))
    kwargs = {n: x for n, x in options.items() if n != "packed"}
    ids = None
    if options.get("packed"):
        ends = np.round(np.cumsum(DOCUMENTS) * s).astype(int)
        ids = np.tile(np.searchsorted(ends, np.arange(s), side="right").astype(np.int32), (b, 1))

    def ours(implementation: str) -> Any:
        op = functools.partial(flash_attention, **kwargs, segment_ids=ids, return_lse=lse, deterministic=deterministic)
        return functools.partial(grid.both if lse else _alone, functools.partial(op, implementation=implementation))

    def plain(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        out, its_lse, *grads = _plain_attention(options, ids, *arrays)
        return (out, its_lse, *grads) if lse else (out, *grads)

    return Program(ours, arrays, tuple, lambda: jax.jit(plain)(*arrays), lambda: _true(plain, dtype, *arrays))


def _alone(op: Any, q: Any, k: Any, v: Any, dout: Any, _: Any) -> tuple[Any, ...]:
    """Return the output and the gradients of q, k and v."""
    out, pull = jax.vjp(op, q, k, v)
    return out, *pull(dout)


def _plain_attention(options: dict[str, Any], ids: np.ndarray | None, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Return `cases.plain` and its gradients, one key head of one example at a time."""
    (b, s, *_), kv = arrays[0].shape, arrays[1].shape[2]
    i, j = jnp.arange(s, dtype=jnp.int32)[:, None], jnp.arange(s, dtype=jnp.int32)
    documents = jnp.zeros((b, s), jnp.int32) if ids is None else jnp.asarray(ids)

    def one(xs: tuple[Any, ...]) -> tuple[jax.Array, ...]:
        at, *mine = xs
        seen = documents[at][:, None] == documents[at]
        if options.get("causal"):
            seen &= i >= j
        if options.get("window"):
            seen &= i - j < options["window"]
        op = functools.partial(
            attention_cases.plain, bias=None, seen=seen[None], options={"softcap": options.get("softcap")}
        )
        *mine, dlse = (x[None] for x in mine)
        return grid.both(op, *mine, dlse.astype(jnp.float32))  # the function's log-sum-exp is float32

    def heads(x: jax.Array) -> jax.Array:  # (B, S, K * n, ...) -> (B * K, S, n, ...)
        split = x.reshape(b, s, kv, x.shape[2] // kv, *x.shape[3:])
        return jnp.moveaxis(split, 2, 1).reshape(b * kv, s, *split.shape[3:])

    def together(x: jax.Array) -> jax.Array:
        x = x[:, 0].reshape(b, kv, s, *x.shape[3:])
        return jnp.moveaxis(x, 1, 2).reshape(b, s, kv * x.shape[3], *x.shape[4:])

    examples = jnp.repeat(jnp.arange(b, dtype=jnp.int32), kv)
    return tuple(map(together, jax.lax.map(one, (examples, *map(heads, arrays)))))


# softmax -----------------------------------------------------------------------------------------------------------

_SOFTMAX = {
    "softmax": (softmax, jax.nn.softmax),
    "log_softmax": (log_softmax, jax.nn.log_softmax),
    "logsumexp": (logsumexp, functools.partial(jax.nn.logsumexp, axis=-1)),
}


def _softmax(small: bool) -> Iterator[Work]:
    elements = 2**20 if small else 2**26
    for name in _SOFTMAX:
        for columns in (32768, 131072, 1024, 1048576) if name == "softmax" else (131072,):
            for dtype in ("bfloat16", "float32"):
                rows = elements // columns
                for direction in ("forward", "backward"):  # separately: a kernel may have only one of them
                    make = functools.partial(_softmax_program, name, (rows, columns), dtype, direction)
                    yield Work(name, f"{rows}x{columns}", dtype, (direction,), make, large=True)


def _softmax_program(name: str, shape: tuple[int, int], dtype: str, direction: str, seed: int | None) -> Program:
    one, other = jax.random.split(_key(seed))
    x = (jax.random.normal(one, shape, jnp.float32) * 4.0).astype(dtype)
    g = jax.random.normal(other, shape[:1] if name == "logsumexp" else shape, jnp.float32).astype(dtype)
    ours, theirs = _SOFTMAX[name]

    def run(op: Callable[..., Any], x: jax.Array, g: jax.Array) -> jax.Array:
        if direction == "forward":
            return op(x)
        y, pull = jax.vjp(op, x)
        return pull(g.astype(y.dtype))[0]

    plain = functools.partial(run, theirs)
    return Program(
        lambda implementation: functools.partial(run, functools.partial(ours, implementation=implementation)),
        (x, g),
        lambda y: (y,),
        lambda: (jax.jit(plain)(x, g),),
        lambda: (_true(plain, dtype, x, g),),
    )


# blockwise ---------------------------------------------------------------------------------------------------------


def _blockwise(small: bool) -> Iterator[Work]:
    rows = 64 if small else 4096
    parts = ("adamw: parameter", "adamw: state 0", "adamw: state 1")
    for name, shape, tile, dtype in (
        ("", (rows, 4096), (1, 128), "bfloat16"),
        ("", (rows, 4096), (1, 128), "float32"),
        (", heads of 64", (rows, 32, 64), (1, 2, 64), "bfloat16"),
    ):
        make = functools.partial(update_program, ADAMW, shape, tile, dtype)
        yield Work("blockwise", f"{math.prod(shape):,} parameters{name}", dtype, parts, make, large=True)


# cut cross-entropy -------------------------------------------------------------------------------------------------

_LOSSES: tuple[tuple[str, str, tuple[int, int, int], dict[str, Any]], ...] = (
    ("plain", "bfloat16", (2048, 1024, 32768), {}),
    ("softcap", "bfloat16", (2048, 1024, 32768), {"softcap": 30.0}),
    ("label smoothing", "float16", (2048, 1024, 32768), {"label_smoothing": 0.1}),
    ("plain", "bfloat16", (8192, 4096, 131072), {}),
)
_LOGITS = 2**27
"""Float32 logits that are held at a time."""


def _loss(small: bool) -> Iterator[Work]:
    for name, dtype, (n, e, v), options in _LOSSES:
        sizes = (n // 16, e // 16, v // 64) if small else (n, e, v)
        make = functools.partial(_loss_program, dtype, sizes, options)
        feature = f"{name} {'x'.join(map(str, sizes))}"
        yield Work("linear_cross_entropy", feature, dtype, ("loss", "dx", "dw"), make, large=True)


def _loss_program(dtype: str, sizes: tuple[int, int, int], options: dict[str, Any], seed: int | None) -> Program:
    n, e, v = sizes
    keys = jax.random.split(_key(seed), 4)
    x = jax.random.normal(keys[0], (n, e), jnp.float32).astype(dtype)
    w = (jax.random.normal(keys[1], (v, e), jnp.float32) * e**-0.5).astype(dtype)
    targets, d = jax.random.randint(keys[2], (n,), 0, v), jax.random.normal(keys[3], (n,), jnp.float32)
    ours = functools.partial(loss_and_gradients, np.asarray(targets), np.asarray(d), options)
    plain = functools.partial(_plain_loss, targets, d, options, dtype)

    def rounded(x: jax.Array, w: jax.Array) -> tuple[jax.Array, ...]:
        loss, dx, dw = plain(x, w)
        return loss, dx, dw.astype(dtype)

    return Program(ours, (x, w), tuple, lambda: jax.jit(rounded)(x, w), lambda: _true(plain, dtype, x, w))


def _plain_loss(
    targets: jax.Array, d: jax.Array, options: dict[str, Any], dtype: str, x: jax.Array, w: jax.Array
) -> tuple[jax.Array, ...]:
    """Return `cases.plain` and its gradients, some tokens at a time; the sum of dw is not rounded in between."""
    (n, e), v = x.shape, w.shape[0]
    some = math.gcd(n, max(1, _LOGITS // v))

    def step(dw: jax.Array, xs: tuple[jax.Array, ...]) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        x, targets, d = xs
        loss = lambda x, w: loss_cases.plain(x, w, 1.0, targets=targets, options=options)[0]  # noqa: E731
        y, pull = jax.vjp(loss, x, w)
        dx, more = pull(d.astype(y.dtype))
        return dw + more.astype(dw.dtype), (y, dx)

    pieces = (x.reshape(-1, some, e), targets.reshape(-1, some), d.reshape(-1, some))
    dw, (loss, dx) = jax.lax.scan(step, jnp.zeros(w.shape, jnp.float32), pieces)
    return loss.reshape(n), dx.reshape(n, e), dw


# decode attention --------------------------------------------------------------------------------------------------

_DECODES: tuple[tuple[str, int, int | None, bool, dict[str, Any]], ...] = (
    ("contiguous", 128, None, False, {}),
    ("paged 16 ragged", 128, 16, True, {}),
    ("paged 128", 128, 128, False, {}),
    ("contiguous ragged", 128, None, True, {}),
    ("paged 128 ragged window softcap", 128, 128, True, {"window": 1024, "softcap": 30.0}),
    ("width 256 paged 16 ragged", 256, 16, True, {}),
)
"""Name, width of a head, keys of a page, whether rows have from an eighth of the keys to all, options."""


def _decode(small: bool) -> Iterator[Work]:
    t = 1024 if small else 32768
    for name, width, page, ragged, options in _DECODES:
        make = functools.partial(_decode_program, t, width, page, ragged, options)
        yield Work("decode_attention", f"{name} 8x{t}", "bfloat16", ("out", "lse"), make, large=True)


def _decode_program(
    t: int, d: int, page: int | None, ragged: bool, options: dict[str, Any], seed: int | None
) -> Program:
    b, h, kv = 8, 32, 8
    page = page or t
    keys = jax.random.split(_key(seed), 3)
    sizes = ((b, 1, h, d), (b * t // page, page, kv, d), (b * t // page, page, kv, d))
    arrays = tuple(
        jax.random.normal(k, size, jnp.float32).astype(jnp.bfloat16) for k, size in zip(keys, sizes, strict=True)
    )
    lengths = np.maximum(1, np.linspace(1 / 8 if ragged else 1, 1, b) * t).astype(np.int32)
    tables = np.random.default_rng(seed).permutation(b * t // page).reshape(b, -1).astype(np.int32)
    if page == t:
        tables = np.arange(b, dtype=np.int32)[:, None]

    def ours(implementation: str) -> Any:
        kwargs = {"lengths": lengths, "tables": None if page == t else tables, "implementation": implementation}
        return functools.partial(decode_attention, **options, **kwargs)

    def plain(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, ...]:
        """Return `cases.plain`, one row at a time."""

        def one(xs: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            q, table, last = xs
            row = {"tables": table[None], "positions": last[None, None]}
            return tuple(x[0] for x in decode_cases.plain((q[None], k, v), options | row))

        return jax.lax.map(one, (q, jnp.asarray(tables), jnp.asarray(lengths - 1)))

    return Program(ours, arrays, tuple, lambda: jax.jit(plain)(*arrays), lambda: _true(plain, "bfloat16", *arrays))


# products with stored weights ----------------------------------------------------------------------------------------

_SCALE_CODES = (112, 120)
"""Codes of scales in 8 bits, which are finite as floats and not extreme as powers of two."""


def _stored(small: bool) -> Iterator[Work]:
    k, n = (512, 256) if small else (4096, 14336)
    cases = [(name, 16, "bfloat16", False) for name in FORMATS]
    int4 = "int4, groups of 128"
    cases += [(int4, 1, "bfloat16", False), (int4, 1024, "bfloat16", False), (int4, 7, "float32", False)]
    cases += [(name, 128, "bfloat16", True) for name in (int4, "int3, groups of 64", "mxfp4")]
    for name, m, dtype, transposed in cases:
        make = functools.partial(_stored_program, name, (m, k, n), dtype, transposed)
        feature = f"{name} {m}x{k}x{n}" + (" transposed" if transposed else "")
        yield Work("stored_matmul", feature, dtype, ("out",), make, large=True)


def _stored_program(name: str, sizes: tuple[int, int, int], dtype: str, transposed: bool, seed: int | None) -> Program:
    m, k, n = sizes
    like = shapes(k, n, **FORMATS[name])
    leaves, tree = jax.tree.flatten(like)
    *keys, last = jax.random.split(_key(seed), len(leaves) + 1)

    def draw(key: jax.Array, leaf: Any) -> jax.Array:
        if not jnp.issubdtype(leaf.dtype, jnp.integer):
            return jax.random.uniform(key, leaf.shape, jnp.float32, 0.5, 1.5).astype(leaf.dtype)
        if leaf is like.scale:
            return jax.random.randint(key, leaf.shape, *_SCALE_CODES).astype(leaf.dtype)
        wide = jnp.uint32 if leaf.dtype == jnp.uint32 else jnp.uint8
        codes = jax.random.bits(key, leaf.shape, wide).astype(leaf.dtype)
        return codes & 0xF7 if name == "fp8" else codes  # no NaN

    weight = jax.tree.unflatten(tree, [draw(k, leaf) for k, leaf in zip(keys, leaves, strict=True)])
    x = jax.random.normal(last, (m, n if transposed else k), jnp.float32).astype(dtype)

    def ours(implementation: str) -> Any:
        return lambda x, w: (stored_matmul(x, w, transposed=transposed, implementation=implementation),)

    def plain(x: jax.Array, w: jax.Array) -> tuple[jax.Array, ...]:
        return (jnp.dot(x, (w.T if transposed else w).astype(x.dtype)),)

    matrix = jax.jit(dense)(weight)
    return Program(ours, (x, weight), tuple, lambda: jax.jit(plain)(x, matrix), lambda: _true(plain, dtype, x, matrix))


# products of groups --------------------------------------------------------------------------------------------------


def _grouped(small: bool) -> Iterator[Work]:
    times, k, n = (1, 64, 192) if small else (16, 2048, 1408)  # columns that are no multiple of a tile's
    for feature in list(grouped_cases.SIZES)[1:3]:
        for dtype in ("bfloat16", "float16"):
            make = functools.partial(grouped_cases.program, feature, dtype, m=512 * times, k=k, n=n, times=times)
            yield Work(
                "grouped_matmul", f"{feature} {512 * times}x{k}x{n}", dtype, grouped_cases.PARTS, make, large=True
            )


def _grouped_stored(small: bool) -> Iterator[Work]:
    times, k, n = (1, 256, 128) if small else (16, 2048, 1408)
    for form in ("int8", "int4, groups of 128", "mxfp4"):
        make = functools.partial(grouped_stored_cases.program, form, "bfloat16", k=k, n=n, times=times)
        feature = f"{form} {180 * times}x{k}x{n}"
        yield Work("grouped_stored_matmul", feature, "bfloat16", grouped_stored_cases.PARTS, make, large=True)


def _gated(small: bool) -> Iterator[Work]:
    times, e, f = (1, 64, 192) if small else (128, 2048, 1408)
    for feature in gated_cases.FEATURES:
        make = functools.partial(gated_cases.program, feature, "bfloat16", m=48 * times, e=e, f=f, times=times)
        name = f"{feature} {48 * times}x{e}x{f}"
        yield Work("grouped_experts", name, "bfloat16", gated_cases.PARTS, make, large=True)


# layers of experts ---------------------------------------------------------------------------------------------------


def _routed(small: bool) -> Iterator[Work]:
    shapes = dict(tokens=40, e=64, f=128) if small else dict(tokens=512, e=2048, f=1408)
    for feature in routed_cases.FEATURES:
        make = functools.partial(routed_cases.program, feature, "bfloat16", **shapes)
        name = f"{feature} {'x'.join(map(str, shapes.values()))}"
        yield Work("routed_experts", name, "bfloat16", routed_cases.PARTS, make, large=True)


# recurrences ---------------------------------------------------------------------------------------------------------

_MIXERS = ("Mamba-2", "linear attention", "Gated DeltaNet", "GLA", "Kimi Delta Attention")
"""Those that have a kernel for every accelerator."""


def _recurrence(small: bool) -> Iterator[Work]:
    seq, heads = (64, 1) if small else (2048, 8)
    for name in _MIXERS:
        mixer = {"delta": False} | MIXERS[name]
        parts = ("out", "state", "dq", "dk", "dv", *("dbeta",) * mixer["delta"], "dinitial")
        make = functools.partial(_recurrence_program, mixer["decay"], mixer["delta"], (2, seq, heads, *mixer["widths"]))
        yield Work("chunked_recurrence", f"{name} 2x{seq}x{heads}", "bfloat16", parts, make, large=True)


def _recurrence_program(decay: str, delta: bool, size: tuple[int, ...], seed: int | None) -> Program:
    arrays = recurrence_cases.make(decay, delta, "bfloat16", seed or 0, size=size)
    both = recurrence_cases.everything

    def ours(implementation: str) -> Any:
        f = lambda x: chunked_recurrence(*x, implementation=implementation)  # noqa: E731
        return lambda *a: both(f, *a)

    def right() -> tuple[Any, ...]:
        wide = jax.tree.map(lambda x: x if x.dtype == bool else x.astype(jnp.float32), arrays)
        with jax.default_matmul_precision("highest"):
            return tuple(jax.jit(lambda *a: both(tokens, *a))(*wide))

    made = Program(ours, arrays, tuple, lambda: tuple(jax.jit(lambda *a: both(tokens, *a))(*arrays)), right)
    return recurrence_cases.without_log_decay(made, decay)
