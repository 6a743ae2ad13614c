"""Cases that the gate compiles: layers of known models for the tokens of a step of generation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import Target, device
from pallas_kernels.routed_experts.inputs import Facts, swiglu

MODELS: dict[str, tuple[int, int, int, int]] = {
    "mixtral": (8, 2, 4096, 14336),
    "qwen3": (128, 8, 2048, 768),
    "gpt-oss": (32, 4, 2880, 2880),
    "deepseek": (8, 1, 7168, 2048),
}
"""A name -> experts, experts of a token, width and hidden width of Mixtral-8x7B, Qwen3-30B-A3B and GPT-OSS-20B, and of
one of 32 devices of DeepSeek-V3, whose rows have one expert each once they are there."""


def case(
    run: Callable[..., Any],
    tokens: int,
    sizes: tuple[int, int, int, int],
    dtype: str = "bfloat16",
    *,
    routes: bool = False,
    gated: bool = True,
    target: Target | None = None,
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return a function of local arrays and their shapes: a layer by one implementation.

    Args:
      run: `run` of an implementation.
      tokens: rows.
      sizes: see `MODELS`.
      dtype: of x and the matrices.
      routes: choose experts in the kernel.
      gated: experts have a gate.
      target: the device; by default that in scope when the function is traced.
    """
    experts, top_k, e, hidden = sizes
    like: Any = jax.ShapeDtypeStruct
    activation = swiglu if gated else jax.nn.gelu
    facts = Facts(tokens, experts, top_k, e, hidden, dtype, gated, routes, True, activation)
    choices = like((tokens, top_k), jnp.int32), like((tokens, top_k), jnp.float32)
    routing = (like((e, experts), jnp.float32),) if routes else choices
    into = like((experts, e, hidden), dtype)
    fn = lambda *arrays: run(target or device(), *arrays, facts=facts)  # noqa: E731
    return fn, (like((tokens, e), dtype), routing, into if gated else None, into, like((experts, hidden, e), dtype))


def cases(run: Callable[..., Any]) -> Iterator[tuple[str, Callable[..., Any], tuple[Any, ...]]]:
    """Yield (name, function, shapes): every model with few and with many tokens, a router, float32, and no gate.

    Args:
      run: `run` of an implementation.
    """
    for name, sizes in MODELS.items():
        for tokens in (8, 256):
            yield (f"{name} {tokens} tokens", *case(run, tokens, sizes))
    yield ("mixtral 256 tokens, router", *case(run, 256, MODELS["mixtral"], routes=True))
    yield ("qwen3 1000 tokens, router", *case(run, 1000, MODELS["qwen3"], routes=True))
    yield ("float32, router, no gate", *case(run, 100, (4, 2, 512, 384), "float32", routes=True, gated=False))
