"""The table of choices: for each op, dtype and shape the implementation that each accelerator gets, and why.

    python -m tests.pallas_kernels.choices    # writes pallas_kernels/CHOICES.md (jax 0.11 or newer)

Nothing is compiled: each case is traced for a device that need not exist, and dispatch says what it chose. On NVIDIA
GPUs from Ampere on, cuDNN 9.15 is assumed to be there.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp

from pallas_kernels import dispatch
from pallas_kernels.blockwise import ADAMW, quantize_blockwise, update_blockwise
from pallas_kernels.chunked_recurrence import chunked_recurrence
from pallas_kernels.chunked_recurrence.examples import MIXERS
from pallas_kernels.chunked_recurrence.examples import shapes as recurrence
from pallas_kernels.cut_cross_entropy import linear_cross_entropy
from pallas_kernels.decode_attention import decode_attention
from pallas_kernels.dispatch import Choice, choosing, on_device
from pallas_kernels.fftconv import fftconv
from pallas_kernels.flash_attention import cudnn, flash_attention
from pallas_kernels.grouped_experts import grouped_experts
from pallas_kernels.grouped_matmul import grouped_matmul
from pallas_kernels.grouped_stored_matmul import grouped_stored_matmul
from pallas_kernels.grouped_stored_matmul.examples import weight_of
from pallas_kernels.routed_experts import routed_experts
from pallas_kernels.softmax import softmax
from pallas_kernels.stored_matmul import stored_matmul
from pallas_kernels.stored_matmul.examples import FORMATS
from pallas_kernels.stored_matmul.examples import shapes as stored

TABLE = Path(dispatch.__file__).parent / "CHOICES.md"

DEVICES = {
    "TPU v5e": "TPU v5 lite",
    "TPU v5p": "TPU v5",
    "TPU v6e": "TPU v6 lite",
    "TPU7x": "TPU7x",
    "V100": "Tesla V100-SXM2-32GB",
    "A100": "NVIDIA A100-SXM4-80GB",
    "RTX 4090, L40S": "NVIDIA GeForce RTX 4090",
    "H100, H200": "NVIDIA H100 80GB HBM3",
    "B200": "NVIDIA B200",
    "RTX 5090": "NVIDIA GeForce RTX 5090",
    "MI300X": "AMD Instinct MI300X",
}
"""A column's title -> the device kind of JAX."""


@dataclasses.dataclass(frozen=True)
class Case:
    """A line of the table.

    Args:
      op: the op's name.
      name: its shape and options, in words.
      call: the op, with its options.
      arrays: shapes of its arguments.
      gradients: the arguments that are differentiated; none leaves out the backward pass.
    """

    op: str
    name: str
    call: Callable[..., Any]
    arrays: tuple[Any, ...]
    gradients: tuple[int, ...] = ()

    def choices(self, kind: str) -> list[Choice]:
        """Return what dispatch chooses for a device kind, forward before backward."""

        def run(*arrays: Any) -> Any:
            if not self.gradients:
                return self.call(*arrays)
            return jax.value_and_grad(lambda *a: _sum(self.call(*a)), self.gradients)(*arrays)

        with _as_if_on(kind), choosing() as made:
            jax.eval_shape(jax.jit(run), *self.arrays)  # a new function: no trace of another device is used
        # the products within a layer of experts have a table of their own
        return [c for c in made.values() if c.op != "grouped_matmul" or self.op == c.op]


def _sum(tree: Any) -> Any:
    return sum(jnp.sum(x.astype(jnp.float32)) for x in jax.tree.leaves(tree))


@contextlib.contextmanager
def _as_if_on(kind: str) -> Iterator[None]:
    """Have one such device, and cuDNN 9.15, as far as dispatch looks."""
    with on_device(kind):
        device = jax.sharding.get_abstract_mesh().abstract_device
    # of automatic axes, since XLA's grouped product cannot be traced on explicit ones
    mesh = jax.sharding.AbstractMesh((1,), ("_device",), (jax.sharding.AxisType.Auto,), abstract_device=device)
    with (
        jax.sharding.use_abstract_mesh(mesh),
        mock.patch.object(cudnn, "_present", lambda kind: True),
        mock.patch.object(cudnn._binding(), "check_cudnn_version", lambda: 91500),
    ):
        yield


def like(*shape: int, dtype: str = "bfloat16") -> jax.ShapeDtypeStruct:
    """Return the shape of an argument."""
    return jax.ShapeDtypeStruct(shape, dtype)


def cases() -> Iterator[Case]:
    """Yield every line, in the order of the table."""
    yield from _attention()
    yield from _losses()
    yield from _softmaxes()
    yield from _decoding()
    yield from _updates()
    yield from _experts()
    yield from _stored()
    yield from _mixers()


def _attention() -> Iterator[Case]:
    s, ids = 8192, like(2, 8192, dtype="int32")
    causal: dict[str, Any] = {"causal": True}
    dropout = {"dropout": 0.1, "dropout_seeds": like(2, 16, 2, dtype="uint32")}
    lines: Sequence[tuple[str, str, int, int, Any, dict[str, Any]]] = (
        ("causal", "bfloat16", s, 16, 128, causal),
        ("causal", "float16", s, 16, 128, causal),
        ("causal", "float32", s, 16, 128, causal),
        ("causal", "bfloat16", 524288, 16, 128, causal),
        ("causal, 8 heads a key head", "bfloat16", s, 2, 128, causal),
        ("causal", "bfloat16", s, 16, 64, causal),
        ("causal", "bfloat16", s, 16, 256, causal),
        ("causal", "bfloat16", s, 16, 72, causal),
        ("causal, keys and values", "bfloat16", s, 16, (192, 128), causal),
        ("not causal", "bfloat16", s, 16, 128, {}),
        ("packed documents", "bfloat16", s, 16, 128, causal | {"segment_ids": ids}),
        ("window of 1024", "bfloat16", s, 16, 128, causal | {"window": 1024}),
        ("soft-cap", "bfloat16", s, 16, 128, causal | {"softcap": 50.0}),
        ("sigmoid", "bfloat16", s, 16, 128, causal | {"kind": "sigmoid"}),
        ("deterministic", "bfloat16", s, 16, 128, causal | {"deterministic": True}),
        ("bias", "bfloat16", s, 16, 128, causal | {"bias": like(1, 16, s, s, dtype="float32")}),
        ("odd length 1055", "bfloat16", 1055, 16, 128, causal),
        ("dropout", "bfloat16", s, 16, 128, causal | dropout),
    )
    for name, dtype, length, kv, width, options in lines:
        d, dv = width if isinstance(width, tuple) else (width, width)
        q, k, v = (like(2, length, h, w, dtype=dtype) for h, w in ((16, d), (kv, d), (kv, dv)))
        arguments = {n: x for n, x in options.items() if isinstance(x, jax.ShapeDtypeStruct)}
        fixed = {n: x for n, x in options.items() if n not in arguments}

        def call(q: Any, k: Any, v: Any, *more: Any, names: Any = tuple(arguments), fixed: Any = fixed) -> Any:
            return flash_attention(q, k, v, **fixed, **dict(zip(names, more, strict=True)))

        wide = f"{d} and {dv}" if d != dv else f"{d}"
        yield Case(
            "flash_attention",
            f"{name}; {length:,} tokens, width {wide}",
            call,
            (q, k, v, *arguments.values()),
            (0, 1, 2),
        )


def _losses() -> Iterator[Case]:
    for name, dtype, width, vocabulary, layout, options in (
        ("Llama 3", "bfloat16", 4096, 128256, "ev", {}),
        ("Llama 3, tied", "bfloat16", 4096, 128256, "ve", {}),
        ("GPT-2, tied", "bfloat16", 768, 50257, "ve", {}),
        ("GPT-2's vocabulary, untied", "bfloat16", 768, 50257, "ev", {}),
        ("soft-cap", "bfloat16", 4096, 256000, "ve", {"softcap": 30.0}),
        ("float16", "float16", 4096, 128256, "ev", {}),
        ("float32", "float32", 4096, 128256, "ev", {}),
        ("filtered gradients", "bfloat16", 4096, 128256, "ev", {"filter": 2.0**-12}),
        ("with entropies", "bfloat16", 4096, 128256, "ev", {"return_entropy": True}),
    ):
        shape = (vocabulary, width) if layout == "ve" else (width, vocabulary)
        call = functools.partial(linear_cross_entropy, **options, w_layout=layout)
        arrays = like(8192, width, dtype=dtype), like(*shape, dtype=dtype), like(8192, dtype="int32")
        yield Case("linear_cross_entropy", f"{name}; {vocabulary:,} words", call, arrays, (0, 1))


def _softmaxes() -> Iterator[Case]:
    for rows, columns, dtype in (
        (4096, 32768, "bfloat16"),
        (4096, 32768, "float32"),
        (512, 131072, "float32"),
        (8, 1048576, "float32"),
        (65536, 1024, "bfloat16"),
        (65536, 1000, "bfloat16"),
        (4096, 50257, "float32"),
    ):
        yield Case("softmax", f"{rows:,} rows of {columns:,}", softmax, (like(rows, columns, dtype=dtype),), (0,))


def _decoding() -> Iterator[Case]:
    for name, heads, kv, d, dv, page, dtype, options in (
        ("contiguous", 32, 8, 128, 128, None, "bfloat16", {}),
        ("pages of 16", 32, 8, 128, 128, 16, "bfloat16", {}),
        ("pages of 128", 32, 8, 128, 128, 128, "bfloat16", {}),
        ("window, soft-cap", 32, 8, 128, 128, 128, "bfloat16", {"window": 1024, "softcap": 30.0}),
        ("width 256", 16, 8, 256, 256, 128, "bfloat16", {}),
        ("one key head", 8, 1, 128, 128, 128, "bfloat16", {}),
        ("float16", 32, 8, 128, 128, 128, "float16", {}),
        ("float32", 32, 8, 128, 128, 128, "float32", {}),
        ("latent (values in the keys)", 16, 1, 576, None, 128, "bfloat16", {"value_dim": 512}),
    ):
        b, t = 8, 32768
        size = page or t
        keys = like(b * t // size, size, kv, d, dtype=dtype)
        values = None if dv is None else like(b * t // size, size, kv, dv, dtype=dtype)

        def call(q: Any, k: Any, v: Any, lengths: Any, tables: Any, options: Any = options, page: Any = page) -> Any:
            more = {} if page is None else {"tables": tables}
            return decode_attention(q, k, v, lengths=lengths, **more, **options)

        arrays = like(b, 1, heads, d, dtype=dtype), keys, values, like(b, dtype="int32")
        yield Case("decode_attention", name, call, (*arrays, like(b, t // size, dtype="int32")))


def _updates() -> Iterator[Case]:
    for shape, tile, dtype in (
        ((4096, 4096), (1, 128), "float32"),
        ((4096, 4096), (1, 128), "bfloat16"),
        ((4096, 32, 64), (1, 2, 64), "float32"),
        ((4096,), (128,), "float32"),
    ):
        states = [
            jax.eval_shape(
                functools.partial(quantize_blockwise, tile=tile, signed=signed), like(*shape, dtype="float32")
            )
            for signed in ADAMW.states
        ]
        numbers = {name: 0.5 for name in ADAMW.scalars}
        call = lambda p, g, *s, numbers=numbers: update_blockwise(ADAMW, numbers, p, g, s)  # noqa: E731
        arrays = like(*shape, dtype=dtype), like(*shape, dtype=dtype), *states
        yield Case("update_blockwise", f"AdamW, {'x'.join(map(str, shape))}", call, arrays)


def _experts() -> Iterator[Case]:
    for name, groups, rows, k, n, dtype in (
        ("Mixtral", 8, 16384, 4096, 14336, "bfloat16"),
        ("Qwen3-30B-A3B", 128, 32768, 2048, 768, "bfloat16"),
        ("GPT-OSS", 32, 16384, 2880, 5760, "bfloat16"),
        ("Mixtral", 8, 16384, 4096, 14336, "float32"),
        ("Mixtral", 8, 16384, 4096, 14336, "float16"),
        ("odd sizes", 8, 16384, 1000, 1408, "bfloat16"),
        ("256 rows", 8, 256, 4096, 14336, "bfloat16"),
        ("one expert a device", 1, 16384, 4096, 14336, "bfloat16"),
    ):
        arrays = like(rows, k, dtype=dtype), like(groups, k, n, dtype=dtype), like(groups, dtype="int32")
        shape = f"{groups} group{'s' * (groups > 1)}, {k}x{n}"
        yield Case("grouped_matmul", f"{name}: {shape}", grouped_matmul, arrays, (0, 1))
    for name, groups, rows, e, f, dtype in (
        ("Mixtral", 8, 16384, 4096, 14336, "bfloat16"),
        ("GPT-OSS", 32, 16384, 2880, 2880, "bfloat16"),
        ("Mixtral", 8, 16384, 4096, 14336, "float32"),
    ):
        into, back = like(groups, e, f, dtype=dtype), like(groups, f, e, dtype=dtype)
        arrays = like(rows, e, dtype=dtype), like(rows, dtype="float32"), into, into, back, like(groups, dtype="int32")
        yield Case("grouped_experts", f"{name}: {groups} groups, {e}x{f}", grouped_experts, arrays, (0, 1, 2, 3, 4))
    for model, form, rows, groups, k, n in (
        ("Mixtral", "mxfp4", 256, 8, 4096, 14336),
        ("Mixtral", "int4, groups of 128", 256, 8, 4096, 14336),
        ("GPT-OSS", "mxfp4", 16, 32, 2880, 2880),
        ("Qwen3-30B-A3B", "int8", 1024, 128, 2048, 768),
    ):
        arrays = like(rows, k), weight_of(groups, k, n, form), like(groups, dtype="int32")
        yield Case("grouped_stored_matmul", f"{model}: {rows} rows, {form}", grouped_stored_matmul, arrays)
    for name, tokens, dtype, (groups, top, e, f) in (
        ("Mixtral", 256, "bfloat16", (8, 2, 4096, 14336)),
        ("Qwen3-30B-A3B", 8, "bfloat16", (128, 8, 2048, 768)),
        ("Qwen3-30B-A3B", 4096, "bfloat16", (128, 8, 2048, 768)),
        ("Qwen3-30B-A3B", 256, "float16", (128, 8, 2048, 768)),
    ):
        into, back = like(groups, e, f, dtype=dtype), like(groups, f, e, dtype=dtype)
        routing = like(tokens, top, dtype="int32"), like(tokens, top, dtype="float32")
        arrays = like(tokens, e, dtype=dtype), *routing, into, into, back
        yield Case("routed_experts", f"{name}: {tokens} tokens", routed_experts, arrays, (0, 2, 3, 4, 5))


def _stored() -> Iterator[Case]:
    for name in ("int8", "int4, groups of 128", "int3, groups of 64", "nf4", "mxfp4", "fp8"):
        yield Case("stored_matmul", name, stored_matmul, (like(16, 4096), stored(4096, 14336, **FORMATS[name])))


def _mixers() -> Iterator[Case]:
    for name, facts in MIXERS.items():
        made = recurrence(4096, 16, **facts)
        places = tuple(i for i, x in enumerate(made) if x is not None and x.dtype != bool)
        yield Case("chunked_recurrence", name, chunked_recurrence, tuple(made), places)
    arrays = like(2, 4096, 768), like(4096, 768, dtype="float32")
    yield Case("fftconv", "4,096 tokens, 768 channels", fftconv, arrays, (0, 1))


# ---- the table

_WORDS = {
    "mosaic_tpu": "kernel",
    "mosaic_gpu": "kernel",
    "cudnn": "cuDNN",
    "xla_chunks": "chunks",
    "xla_tiles": "tiles",
    "xla": "XLA",
}


def text() -> str:
    """Return the tables of all ops as Markdown."""
    ops = dict.fromkeys(case.op for case in cases())
    return _HEAD + "".join("\n" + section(op) for op in ops)


def section(op: str) -> str:
    """Return one op's table: devices with the same cells share a column, and reasons stand below."""
    rows = [(case, {title: case.choices(kind) for title, kind in DEVICES.items()}) for case in cases() if case.op == op]
    return "\n".join([f"## {op}", "", *_lines(rows)]).rstrip() + "\n"


def _lines(rows: list[tuple[Case, dict[str, list[Choice]]]]) -> Iterator[str]:
    reasons: dict[str, int] = {}

    def cell(choices: list[Choice]) -> str:
        names = [_WORDS.get(choice.implementation, choice.implementation) for choice in choices]
        numbers = []
        for choice in choices:
            for name, why in choice.why_not:
                why = f"{_WORDS.get(name, name)}: {why.replace(f', and this is {choice.kind}', '')}"
                numbers.append(reasons.setdefault(why, len(reasons) + 1))
        noted = f" ({', '.join(map(str, sorted(set(numbers))))})" if numbers else ""
        return (names[0] if len(set(names)) == 1 else "; ".join(names)) + noted

    columns = {title: tuple(cell(choices[title]) for _, choices in rows) for title in DEVICES}
    titles: dict[tuple[str, ...], list[str]] = {}
    for title, cells in columns.items():
        titles.setdefault(cells, []).append(title)
    yield "| " + " | ".join(["case", "dtype", *(", ".join(names) for names in titles.values())]) + " |"
    yield "|" + "---|" * (len(titles) + 2)
    for at, (case, _) in enumerate(rows):
        yield "| " + " | ".join([case.name, case.arrays[0].dtype.name, *(cells[at] for cells in titles)]) + " |"
    yield ""
    for why, number in reasons.items():
        yield f"{number}. {why}"


_HEAD = """# What runs where

Generated by `python -m tests.pallas_kernels.choices`: for each op, shape and dtype the implementation that dispatch
chooses on each accelerator. *kernel* is this package's Pallas kernel for the platform, *cuDNN* is called through JAX
(9.15 is assumed to be there), *XLA* is the op in jax.numpy, *tiles* is that in a loop over tiles of rows, and *chunks*
unpacks the matrices of some groups by XLA and multiplies them by the kernel. Two words are forward and backward pass
where they differ. The numbers say why an implementation that would be preferred is not chosen; the reasons stand below
each table.
What is chosen is not what has run: [the benchmarks](../experiments/benchmarks/README.md) say on which devices results
were compared and times measured.
"""


if __name__ == "__main__":
    TABLE.write_text(text(), encoding="utf-8")
