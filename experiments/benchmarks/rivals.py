"""Implementations that our kernels are compared with, where installed: torch, flex_attention, Triton, tokamax.

Each function returns a call without arguments that starts one computation on fixed arrays, or raises with the reason
why it cannot. `agreeing` collects the calls whose results agree with ours.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Call = Callable[[], Any]


def agreeing(makers: Mapping[str, Callable[[], Call]], tolerance: float) -> tuple[dict[str, Call], dict[str, str]]:
    """Return the calls whose results agree with those of "ours", and name to reason of the others.

    Args:
      makers: name to function that makes a call; "ours" first.
      tolerance: largest norm of a difference over the norm of our result.

    Raises:
      RuntimeError: other implementations have results, and none agrees with ours: ours is probably wrong.
    """
    calls: dict[str, Call] = {}
    refused: dict[str, str] = {}
    others: list[str] = []
    want: list[Any] = []
    for name, make in makers.items():
        if name == "ours":
            calls[name] = make()
            want = jax.tree.leaves(calls[name]())
            continue
        try:
            call = make()
            got = [_array(leaf) for leaf in jax.tree.leaves(call())]
            apart = max(float(_apart(a, b)) for a, b in zip(want, got, strict=True))
        except Exception as e:  # other libraries raise any kind of exception
            refused[name] = f"{type(e).__name__}: {str(e).strip().splitlines()[0][:200] if str(e) else ''}"
            continue
        if apart < tolerance:
            calls[name] = call
        else:
            refused[name] = f"its result and ours are {apart:.3g} apart"
            others.append(f"'{name}' by {apart:.3g}")
    if others and not set(calls) - {"ours", "deterministic"}:
        raise RuntimeError(
            f"WRONG: no other result agrees with ours, which differs from that of {' and '.join(others)}"
        )
    return calls, refused


def several(call: Call, calls: int) -> Callable[[], None]:
    """Return a function that starts a computation `calls` times without waiting in between, then waits for the last."""

    def run() -> None:
        out = None
        for _ in range(calls):
            out = call()
        wait(out)

    return run


def wait(out: Any) -> None:
    """Wait for the result of JAX or torch."""
    leaves = jax.tree.leaves(out)
    if leaves and not isinstance(leaves[0], jax.Array):
        torch_here().cuda.synchronize()
    else:
        jax.block_until_ready(out)


def _array(leaf: Any) -> jax.Array:
    if isinstance(leaf, jax.Array):
        return leaf
    torch_here().cuda.synchronize()
    return jax.dlpack.from_dlpack(leaf.detach().contiguous())


@jax.jit
def _apart(a: jax.Array, b: jax.Array) -> jax.Array:
    a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    return jnp.linalg.norm((a - b).ravel()) / jnp.linalg.norm(a.ravel())


# torch -----------------------------------------------------------------------------------------------------------


def torch_here() -> Any:
    """Return the torch module.

    Raises:
      ImportError: torch is not installed.
      RuntimeError: torch finds no GPU.
    """
    torch = importlib.import_module("torch")
    if not torch.cuda.is_available():
        raise RuntimeError("torch finds no GPU")
    return torch


def tensor(x: Any) -> Any:
    """Return a copy of an array as a torch tensor on the GPU."""
    return torch_here().from_dlpack(jax.block_until_ready(x)).clone()


def torch_softmax(x: jax.Array, g: jax.Array, direction: str) -> Call:
    """Return torch's softmax over the last axis."""
    f = torch_here().nn.functional.softmax
    return _torch_call(functools.partial(f, dim=-1), (x,), g, direction)


def torch_attention(arrays: tuple[jax.Array, ...], g: jax.Array, direction: str, causal: bool) -> Call:
    """Return torch's scaled dot-product attention, by the kernel that torch chooses.

    Args:
      arrays: queries (B, S, H, D), keys and values (B, S, K, D).
      g: cotangent of the result.
      direction: "forward" or "backward".
      causal: whether the mask is causal.
    """
    torch = torch_here()
    grouped = arrays[0].shape[2] != arrays[1].shape[2]
    f = functools.partial(torch.nn.functional.scaled_dot_product_attention, is_causal=causal, enable_gqa=grouped)
    return _heads_first(f, arrays, g, direction)


def flex_attention(
    arrays: tuple[jax.Array, ...],
    g: jax.Array,
    direction: str,
    *,
    causal: bool,
    segments: np.ndarray | None = None,
    window: int | None = None,
    softcap: float | None = None,
) -> Call:
    """Return torch's compiled flex_attention with a block mask.

    Args:
      arrays: queries (B, S, H, D), keys and values (B, S, K, D).
      g: cotangent of the result.
      direction: "forward" or "backward".
      causal: whether the mask is causal.
      segments: (B, S) segment ids, or `None`.
      window: number of keys that a query attends to, its own among them; or `None`.
      softcap: limit of the scores, or `None`.
    """
    torch = torch_here()
    flex = importlib.import_module("torch.nn.attention.flex_attention")
    (b, s, h, _), kv = arrays[0].shape, arrays[1].shape[2]
    ids = None if segments is None else torch.from_numpy(segments).cuda()

    def seen(batch: Any, head: Any, q: Any, k: Any) -> Any:
        keep = q >= k if causal else q >= 0
        if window is not None:
            keep = keep & (q - k < window)
        if ids is not None:
            keep = keep & (ids[batch, q] == ids[batch, k])
        return keep

    def capped(score: Any, batch: Any, head: Any, q: Any, k: Any) -> Any:
        return softcap * torch.tanh(score / softcap)

    torch._dynamo.reset()  # else the ninth variant of a function silently runs uncompiled
    torch._functorch.config.donated_buffer = False  # the graph is used for several backward passes
    masked = causal or window is not None or ids is not None
    mask = flex.create_block_mask(seen, b if ids is not None else None, None, s, s, device="cuda") if masked else None
    f = functools.partial(
        torch.compile(flex.flex_attention, dynamic=False, fullgraph=True),
        block_mask=mask, score_mod=None if softcap is None else capped, enable_gqa=h != kv,
    )  # fmt: skip
    return _heads_first(f, arrays, g, direction)


def _heads_first(f: Callable[..., Any], arrays: tuple[jax.Array, ...], g: jax.Array, direction: str) -> Call:
    """Call torch with heads before positions; arrays are copied to that order once, before anything is timed."""
    return _torch_call(f, arrays, g, direction, lambda x: x.transpose(1, 2).contiguous(), lambda x: x.transpose(1, 2))


def _torch_call(
    f: Callable[..., Any],
    arrays: tuple[jax.Array, ...],
    g: jax.Array,
    direction: str,
    turn: Callable[[Any], Any] = lambda x: x,
    back: Callable[[Any], Any] = lambda x: x,
) -> Call:
    torch = torch_here()
    own = [turn(tensor(x)) for x in arrays]
    if direction == "forward":

        def forward() -> Any:
            with torch.no_grad():
                return back(f(*own))

        return forward
    own = [x.requires_grad_() for x in own]
    out, cotangent = f(*own), turn(tensor(g))
    return lambda: [back(x) for x in torch.autograd.grad(out, own, cotangent, retain_graph=True)]


def flash_linear_attention(
    module: str, function: str, inputs: Mapping[str, jax.Array], g: jax.Array, direction: str
) -> Call:
    """Return a linear recurrence of flash-linear-attention.

    Args:
      module: of `fla.ops`.
      function: of the module.
      inputs: arrays by their names in `pallas_kernels.chunked_recurrence.inputs.Inputs`.
      g: cotangent of the result.
      direction: "forward" or "backward".
    """
    torch_here()
    f = getattr(importlib.import_module(f"fla.ops.{module}"), function)
    names = [{"log_decay": "g"}.get(name, name) for name in inputs]
    run = lambda *x: f(**dict(zip(names, x, strict=True)), scale=1.0)[0]  # noqa: E731
    return _torch_call(run, tuple(inputs.values()), g, direction)


def torch_loss(x: jax.Array, w: jax.Array, targets: jax.Array, direction: str) -> Call:
    """Return torch's cross-entropy of a linear head, compiled."""
    torch = torch_here()
    a, b, t = tensor(x), tensor(w), tensor(targets).long()

    def mean(a: Any, b: Any) -> Any:
        return torch.nn.functional.cross_entropy((a @ b.T).float(), t)

    compiled = torch.compile(mean, dynamic=False)
    if direction == "forward":

        def forward() -> Any:
            with torch.no_grad():
                return compiled(a, b)

        return forward
    a, b = a.requires_grad_(), b.requires_grad_()

    def both() -> Any:
        y = compiled(a, b)
        return [y, *torch.autograd.grad(y, (a, b))]

    return both


# Triton and tokamax ----------------------------------------------------------------------------------------------


def triton_softmax(x: jax.Array, direction: str) -> Call:
    """Return the Triton softmax that JAX ships."""
    _only_gpu()
    if direction == "backward":
        raise NotImplementedError("JAX's Triton softmax has no gradient")
    if x.shape[-1] > 32768:
        raise NotImplementedError("JAX's Triton softmax needs a whole row in one block")
    ops = importlib.import_module("jax.experimental.pallas.ops.gpu.softmax")
    return functools.partial(jax.jit(ops.softmax), x)


def triton_attention(
    arrays: tuple[jax.Array, ...], g: jax.Array, direction: str, *, causal: bool, segments: np.ndarray | None
) -> Call:
    """Return the Triton flash attention that JAX ships."""
    _only_gpu()
    if arrays[0].shape[2] != arrays[1].shape[2]:
        raise NotImplementedError("JAX's Triton attention has no grouped heads")
    ops = importlib.import_module("jax.experimental.pallas.ops.gpu.attention")
    ids = None if segments is None else jnp.asarray(segments)
    scale = arrays[0].shape[-1] ** -0.5
    return of_jax(lambda q, k, v: ops.mha(q, k, v, ids, scale, causal), arrays, g, direction)


def tokamax_attention(arrays: tuple[jax.Array, ...], g: jax.Array, direction: str, **options: Any) -> Call:
    """Return tokamax's attention, by the kernel that it chooses; `options` are its own, such as `is_causal`."""
    _only_gpu()
    tokamax = importlib.import_module("tokamax")
    return of_jax(functools.partial(tokamax.dot_product_attention, **options), arrays, g, direction)


def tokamax_loss(x: jax.Array, w: jax.Array, targets: jax.Array, direction: str) -> Call:
    """Return tokamax's loss of a linear head; `w` is (V, E), and tokamax takes (E, V)."""
    _only_gpu()
    tokamax = importlib.import_module("tokamax")
    f = lambda x, w: tokamax.linear_softmax_cross_entropy_loss(x, targets, w.T, reduction="mean")  # noqa: E731
    return functools.partial(jax.jit(f if direction == "forward" else jax.value_and_grad(f, (0, 1))), x, w)


def of_jax(
    f: Callable[..., jax.Array], arrays: tuple[jax.Array, ...], g: jax.Array, direction: str, *fixed: jax.Array
) -> Call:
    """Return a call of the forward pass alone or the backward pass alone of `f(*arrays, *fixed)`."""
    if direction == "forward":
        return functools.partial(jax.jit(f), *arrays, *fixed)
    pull = jax.jit(lambda fixed, *x: jax.vjp(lambda *x: f(*x, *fixed), *x)[1])(fixed, *arrays)
    return functools.partial(jax.jit(lambda pull, g: pull(g)), pull, g)


def _only_gpu() -> None:
    if jax.default_backend() != "gpu":
        raise NotImplementedError("needs a GPU")
