"""What the kinds of KV cache share: attention to a step's sequences, and running it on every device's shard."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxscale.errors import ConfigError, near
from jaxscale.nn import KeyValues, Packed
from jaxscale.nn.flash import heads_over, heads_read_by
from jaxscale.parallel.context import Part, merge_over
from jaxscale.parallel.sharded import cut_over, sharded_op
from pallas_kernels.decode_attention import decode_attention

NUMBERS: dict[str, tuple[Any, float]] = {"int8": (jnp.int8, 127.0), "fp8": (jnp.float8_e4m3fn, 448.0)}
"""Types of 8 bits in which a cache stores keys and values: the dtype of codes, and the largest of them."""

QUERIES = ("batch", None, "heads", "head_dim")

State = dict[str, Array]


def attend_packed(
    q: Float[Array, "b s h d"],
    state: State,
    step: Packed,
    tables: Int[Array, "b slots p"],
    *,
    value_dim: int,
    first: Int[Array, ""] | int = 0,
    stride: int = 1,
    window: int | None = None,
    softcap: float | None = None,
    scale: float | None = None,
) -> Part:
    """Attention of each token to the positions of its sequence that this device holds, one group at a time.

    Args:
      q: a step's queries (batch, columns, heads, width).
      state: keys and values by page, of all layers and batch rows (`flat_pages`): (pages, page, kv_heads, width).
      step: slot and position of each query.
      tables: the pages of each slot, int32 (batch, slots, entries); negative where another device holds the page.
      value_dim: as in `pallas_kernels.decode_attention`, like the next five.
      first: likewise.
      stride: likewise.
      window: likewise.
      softcap: likewise.
      scale: likewise.

    Returns:
      outputs and log-sum-exps, float32.
    """
    b, s, h, _ = q.shape
    whole = Part(jnp.zeros((b, s, h, value_dim), jnp.float32), jnp.full((b, s, h), -jnp.inf, jnp.float32))
    batch_row = jnp.arange(b)[:, None, None]
    for columns, slots in step.groups:
        pages = tables if slots is None else tables.at[batch_row[..., 0], slots].get(mode="fill", fill_value=-1)
        part = decode_attention(
            _merge_batch(q.at[batch_row, columns].get(mode="fill", fill_value=0)),
            state["k"],
            state.get("v"),
            positions=_merge_batch(step.positions.at[batch_row, columns].get(mode="fill", fill_value=-1)),
            tables=_merge_batch(pages),
            first=first,
            stride=stride,
            window=window,
            softcap=softcap,
            scale=scale,
            value_dim=value_dim,
            scales=_scales_of(state),
        )
        shape = columns.shape
        whole = Part(
            *(
                x.at[batch_row, columns].set(new.reshape(*shape, *new.shape[2:]), mode="drop")
                for x, new in zip(whole, part, strict=True)
            )
        )
    return whole


def _scales_of(state: State) -> tuple[Array, Array | None] | None:
    """The scales of keys and of values of a cache of 8 bits."""
    if "k_scale" not in state:
        return None
    return state["k_scale"][..., 0], state["v_scale"][..., 0] if "v_scale" in state else None


def _merge_batch(x: Array) -> Array:
    """(batch, sequences, ...) -> (batch * sequences, ...)."""
    return x.reshape(-1, *x.shape[2:])


def attend_to(
    local: Callable[[Array, State, Packed, Array, Array], Part],
    q: Float[Array, "b s h d"],
    state: State,
    axes: tuple[str | None, ...],
    step: Packed,
    layer: Int[Array, ""],
    along: str,
    name: str,
) -> tuple[Float[Array, "b s h dv"], Float[Array, "b s h"]]:
    """Run `local(q, state, step, layer, device)` on every device's shard of a cache, and merge the results.

    Args:
      local: attention to a shard of the cache; `device` is the index of this device among those that shard `along`.
      q: queries (batch, columns, heads, width).
      state: the cache's arrays, all with these `axes`.
      axes: the logical axes of each array.
      step: slot and position of each query.
      layer: the layer's index, int32 scalar.
      along: the logical axis along which the tokens of a sequence are sharded.
      name: the cache's name in errors.

    Returns:
      outputs (batch, columns, heads, value_dim) in `q`'s dtype, and log-sum-exps (batch, columns, heads), float32.

    Raises:
      LayoutError: heads and key-value heads are sharded over different mesh axes.
    """
    kv_heads = state["k"].shape[-2]
    (over, whole), pieces = heads_over(kv_heads, name), cut_over(along)
    groups = q.shape[2] // kv_heads
    names = list(state)
    leaves, tree = jax.tree.flatten((step, layer))

    def read(q: Array, *rest: Array) -> tuple[Array, Array]:
        shard = dict(zip(names, rest[: len(names)], strict=True))
        step, layer = jax.tree.unflatten(tree, rest[len(names) :])
        if whole:  # key-value heads are replicated: copy those that this device's heads read, of this layer alone
            of_layer = {n: lax.dynamic_index_in_dim(x, layer) for n, x in shard.items()}
            index = lax.axis_index(over)
            shard = {n: heads_read_by(x, q.shape[2], groups, index, axis=x.ndim - 2) for n, x in of_layer.items()}
            layer = jnp.zeros_like(layer)
        device = lax.axis_index(pieces) if pieces else jnp.int32(0)
        part = local(q, shard, step, layer, device)
        part = merge_over(part, pieces) if pieces else part
        return part.out.astype(q.dtype), part.lse

    step_axes = [("batch", *[None] * (x.ndim - 1))[: x.ndim] for x in leaves]
    state_axes = _state_axes(axes, kv_heads)
    return sharded_op(
        read,
        q,
        *state.values(),
        *leaves,
        axes=(QUERIES, *[state_axes] * len(names), *step_axes),
        out_axes=(QUERIES, QUERIES[:-1]),
        name=f"{name}'s operand",
    )


def append_to(
    local: Callable[[State, State, Packed, Array, Array], State],
    state: State,
    axes: tuple[str | None, ...],
    new: State,
    step: Packed,
    layer: Int[Array, ""],
    along: str,
    name: str,
) -> State:
    """Run `local(state, new, step, layer, device)` on every device's shard of a cache.

    Args:
      local: writes new keys and values to a shard of the cache, and returns the shard.
      state: the cache's arrays, all with these `axes`.
      axes: the logical axes of each array.
      new: keys and values of a step's tokens, by the names of `state`.
      step: slot and position of each token.
      layer: the layer's index, int32 scalar.
      along: the logical axis along which the tokens of a sequence are sharded.
      name: the cache's name in errors.
    """
    pieces, kv_heads = cut_over(along), state["k"].shape[-2]
    state_axes = _state_axes(axes, kv_heads)
    leaves, tree = jax.tree.flatten((step, layer))
    n = len(state)

    def write(*rest: Array) -> tuple[Array, ...]:
        shard = dict(zip(state, rest[:n], strict=True))
        values = dict(zip(state, rest[n : 2 * n], strict=True))
        step, layer = jax.tree.unflatten(tree, rest[2 * n :])
        device = lax.axis_index(pieces) if pieces else jnp.int32(0)
        return tuple(local(shard, values, step, layer, device).values())

    new_axes = ("batch", None, None if kv_heads == 1 else "kv_heads", "head_dim")
    step_axes = [("batch", *[None] * (x.ndim - 1))[: x.ndim] for x in leaves]
    out = sharded_op(
        write,
        *state.values(),
        *(new[name] for name in state),
        *leaves,
        axes=(*[state_axes] * n, *[new_axes] * n, *step_axes),
        out_axes=(state_axes,) * n,
        name=f"{name}'s operand",
    )
    return dict(zip(state, out, strict=True))


def _state_axes(axes: tuple[str | None, ...], kv_heads: int) -> tuple[str | None, ...]:
    """A single key-value head is replicated."""
    return tuple(None if kv_heads == 1 and a == "kv_heads" else a for a in axes)


def flat_pages(state: State) -> State:
    """Join the pages of all layers and batch rows: (layers * batch * pages, page, kv_heads, width).

    Args:
      state: arrays (layers, batch, pages, page, kv_heads, width).
    """
    return {n: x.reshape(-1, *x.shape[3:]) for n, x in state.items()}


def arrays(key_values: KeyValues, numbers: str | None, *leading: int) -> State:
    """Return empty keys, and values where they are stored apart; of 8 bits with a scale for each token and head.

    Args:
      key_values: heads, widths and dtype.
      numbers: "int8" or "fp8"; `None` is `key_values.dtype`.
      *leading: the sizes before (kv_heads, width).
    """
    return {n: jnp.zeros((*leading, *shape), dtype) for n, (shape, dtype) in _parts(key_values, numbers).items()}


def bytes_of(key_values: KeyValues, numbers: str | None, tokens: int) -> int:
    """Return the bytes of `arrays` for a number of tokens.

    Args:
      key_values: heads, widths and dtype.
      numbers: see `arrays`.
      tokens: the product of the leading sizes.
    """
    parts = _parts(key_values, numbers).values()
    return tokens * sum(heads * width * jnp.dtype(dtype).itemsize for (heads, width), dtype in parts)


def _parts(key_values: KeyValues, numbers: str | None) -> dict[str, tuple[tuple[int, int], Any]]:
    """The (heads, width) and dtype of each array of a cache, for one token."""
    heads = key_values.kv_heads
    widths = {"k": key_values.key_dim} | ({} if key_values.shared else {"v": key_values.value_dim})
    codes = {n: ((heads, d), key_values.dtype if numbers is None else NUMBERS[numbers][0]) for n, d in widths.items()}
    return codes if numbers is None else codes | {f"{n}_scale": ((heads, 1), jnp.float32) for n in widths}


def loaded(state: State, layer: Int[Array, ""]) -> tuple[Array, Array | None]:
    """Return one layer's keys and values as they were before `stored`, (batch, ..., kv_heads, width).

    Values that are stored once with the keys (`KeyValues.shared`) are `None`.

    Args:
      state: arrays (layers, batch, ..., kv_heads, width).
      layer: the layer's index, int32 scalar.
    """
    mine = {n: lax.dynamic_index_in_dim(x, layer, keepdims=False) for n, x in state.items()}
    if "k_scale" in mine:
        mine = {n: mine[n].astype(jnp.float32) * mine[f"{n}_scale"] for n in ("k", "v") if n in mine}
    return mine["k"], mine.get("v")


def check_numbers(name: str, numbers: str | None) -> None:
    """Check the type of numbers of a cache.

    Args:
      name: the setting.
      numbers: its value.

    Raises:
      ConfigError: there is no such type.
    """
    if numbers is not None and numbers not in NUMBERS:
        hint = near(str(numbers), NUMBERS) or "; use 'int8', 'fp8', or None for the type of the computation"
        raise ConfigError(f"{name} = {numbers!r}: keys and values are not stored so{hint}")


def check_tokens(name: str, value: int | None) -> None:
    """Check a number of tokens or pages of a cache.

    Args:
      name: the setting.
      value: its value.

    Raises:
      ConfigError: it is neither `None` nor a whole number of at least 1.
    """
    if value is not None and (not isinstance(value, int) or value < 1):
        raise ConfigError(f"{name} = {value!r}: must be a whole number of at least 1")


def stored(new: State, numbers: str | None) -> State:
    """Return keys and values of a step as a cache stores them.

    Args:
      new: arrays (batch, columns, kv_heads, width) by name.
      numbers: see `arrays`.
    """
    if numbers is None:
        return new
    dtype, largest = NUMBERS[numbers]
    out = {}
    for name, x in new.items():
        x = x.astype(jnp.float32)
        scale = jnp.max(jnp.abs(x), axis=-1, keepdims=True) / largest
        scale = jnp.where(scale > 0, scale, 1)
        whole = jnp.clip(x / scale, -largest, largest)
        out[name] = (jnp.round(whole) if numbers == "int8" else whole).astype(dtype)
        out[f"{name}_scale"] = scale
    return out
