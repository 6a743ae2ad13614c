"""Expert parallelism: dispatch tokens to their experts by all-to-all, multiply grouped by expert, and combine."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from jaxscale.errors import LayoutError
from jaxscale.layout import constrain, current
from jaxscale.layout.rules import Kind
from jaxscale.parallel.arithmetic import Arithmetic, Cut, Numbers
from jaxscale.parallel.expert_exchange import Exchange, carry, move
from jaxscale.parallel.seeds import mixed, next_seed
from jaxscale.parallel.sharded import cut_over, free_and_manual

TOKENS = ("expert_batch", "expert_seq", "embed")
"""Logical axes of the experts' input and output."""

UP = ("experts", "expert_embed", "expert_mlp")
DOWN = ("experts", "expert_mlp", "expert_embed")
"""Logical axes of the experts' weights."""


class Choices(NamedTuple):
    """The experts of each token.

    Args:
      ids: int32; the number of experts as an id means no expert.
      weights: float32 factors on the experts' outputs.
    """

    ids: Int[Array, "b s k"]
    weights: Float[Array, "b s k"]


class Slots(NamedTuple):
    """The tokens of each expert, in each of the `n` groups of consecutive tokens of a row.

    Args:
      token: int32, the token's number within its group; the size of a group for an empty slot.
      weight: float32 factor on the expert's output; 0 for an empty slot.
    """

    token: Int[Array, "b n x c"]
    weight: Float[Array, "b n x c"]


class Weights(NamedTuple):
    """The experts' stored matrices.

    Args:
      gate: the gates, or `None`.
      up: the first matrices.
      down: the last matrices.
    """

    gate: Float[Array, "x e f"] | None
    up: Float[Array, "x e f"]
    down: Float[Array, "x f e"]


class Biases(NamedTuple):
    """What is added after the experts' products, float32.

    Args:
      gate: after the gates' product, or `None` without gates.
      up: after the first product.
      down: after the last product.
    """

    gate: Float[Array, "x f"] | None
    up: Float[Array, "x f"]
    down: Float[Array, "x e"]


@dataclasses.dataclass(frozen=True)
class Capacity:
    """The number of tokens that an expert takes of each group of consecutive tokens.

    Args:
      slots: slots of an expert per group.
      group: tokens per group; divides the row.
    """

    slots: int
    group: int


def expert_mlp(
    x: Float[Array, "b s e"],
    routed: Choices | Slots,
    weights: Weights,
    *,
    act: Callable[[Array], Array],
    combine: Callable[[Array, Array], Array] | None = None,
    biases: Biases | None = None,
    arithmetic: Arithmetic,
    capacity: Capacity | None = None,
    gathered: bool = False,
) -> Float[Array, "b s e"]:
    """Sum `weight * down(act(gate(x)) * up(x))` over each token's experts; without a gate `down(act(up(x)))`.

    Under a layout, every device sends each of its tokens to the devices that hold its experts, along the mesh axes of
    'experts' that also shard tokens. Along the other axes of 'experts' all devices have the same tokens, and each
    computes its own experts; the outputs are summed, as over the axes of 'expert_mlp'. Weights that are sharded along
    'expert_embed' (FSDP) are cast and then gathered; their gradients are computed in the parameters' dtype and
    reduce-scattered.

    Choices without a capacity are dropless (Gale et al. 2023): tokens are sorted by expert, for products over ragged
    groups. The size of the exchange then depends on the data: TPUs send only the rows that are needed
    (`ragged_all_to_all`); other platforms pad to the worst case, see `wire_rows`. With a capacity, an expert takes as
    many tokens of each group as it has slots, first choices before second ones, then earlier tokens first (Lepikhin et
    al. 2021), and drops the others; the exchange is an ordinary all-to-all of the slots.

    Args:
      x: activations.
      routed: the experts of each token, or the tokens of each expert.
      weights: float32 or bfloat16, with logical axes `UP` and `DOWN`.
      act: the activation function.
      combine: the hidden layer of `gate(x)` and `up(x)`; `None` is `act(gate) * up`.
      biases: added after each product, or `None`.
      arithmetic: the numbers of products; its dtype is that of what devices exchange.
      capacity: capacity for `Choices`; `None` drops nothing. It has no effect on `Slots`.
      gathered: whether the weights are sharded as activations already (`Weight.gathered`).

    Returns:
      an array of x's shape, in the arithmetic's dtype.

    Raises:
      LayoutError: a dimension that does not divide, or a group of tokens that the layout would shard.
    """
    if isinstance(routed, Slots):
        capacity = Capacity(routed.token.shape[3], x.shape[1] // routed.token.shape[1])
    x, seed = x.astype(arithmetic.dtype), next_seed() if arithmetic.random else None
    layout, (free, manual) = current(), free_and_manual()
    if layout is None or not free:
        return _local(x, routed, weights, weights, biases, seed, _Settings(act, combine, arithmetic, capacity))
    settings = _settings(act, combine, arithmetic, capacity)
    if gathered:
        settings = dataclasses.replace(settings, gathered=(), scattered=())
    if not manual:
        _check(x, weights, capacity)
    x = constrain(x, *TOKENS)
    # One copy per device that has the same tokens: the partitioner then sums over copies, forward and backward, and
    # reduce-scatters where the result is sharded.
    copies = math.prod(layout.sizes[m] for m in settings.summed)

    def spec(*dims: tuple[str, ...]) -> PartitionSpec:
        return PartitionSpec(*(axes or None for axes in dims))

    batch, seq = cut_over("expert_batch"), cut_over("expert_seq")
    tokens = spec(settings.summed, batch, seq, ())
    route = spec(batch, seq, (), ())

    def kernels(embed: tuple[str, ...]) -> Weights:
        up = spec(settings.experts, embed, cut_over("expert_mlp"))
        down = spec(settings.experts, cut_over("expert_mlp"), embed)
        return Weights(None if weights.gate is None else up, up, down)  # type: ignore[arg-type]  # of the same tree

    up_bias, down_bias = spec(settings.experts, cut_over("expert_mlp")), spec(settings.experts, ())
    of_biases = None if biases is None else Biases(None if biases.gate is None else up_bias, up_bias, down_bias)  # type: ignore[arg-type]
    # `taps` are sharded as gradients: only their cotangents are used, and of `weights` only the values.
    taps = weights
    if settings.scattered != settings.gathered:
        names = zip(weights, (UP, UP, DOWN), strict=True)
        taps = Weights._make(w if w is None else constrain(w, *axes, kind="grads") for w, axes in names)
    weights = jax.tree.map(lax.stop_gradient, weights)
    stack = lax.with_sharding_constraint(jnp.broadcast_to(x, (copies, *x.shape)), tokens)
    y = jax.shard_map(
        lambda x, routed, weights, taps, biases, seed: _local(x[0], routed, weights, taps, biases, seed, settings)[
            None
        ],
        in_specs=(
            tokens,
            jax.tree.map(lambda r: PartitionSpec(*route[: r.ndim]), routed),
            kernels(settings.gathered),
            kernels(settings.scattered),
            of_biases,
            PartitionSpec(),
        ),
        out_specs=tokens,
        axis_names=free if manual else set(),
        check_vma=False,  # copies differ until they are summed
    )(stack, routed, weights, taps, biases, seed)
    # in y's dtype, and with a constant initial value, without which the derivative is computed slice by slice
    return constrain(lax.reduce(y, np.zeros([], y.dtype), lax.add, (0,)), *TOKENS)


def wire_rows(ids: Int[Any, "d n k"], experts: int) -> dict[str, int]:
    """Count the rows that devices send each other in a dropless dispatch (as many return in the combine).

    Args:
      ids: the experts chosen by the tokens of each of D devices; device d holds the d-th `experts / D` experts.
      experts: the number of experts.

    Returns:
      "useful": rows that some token needs, which a ragged exchange sends; "padded": rows that an exchange of fixed size
      sends, which must have space for all rows of a device going to another.
    """
    devices, tokens, k = ids.shape
    local_experts = experts // devices
    going = jnp.asarray(ids) // local_experts != jnp.arange(devices)[:, None, None]
    return {"useful": int(jnp.sum(going)), "padded": devices * (devices - 1) * tokens * min(k, local_experts)}


@dataclasses.dataclass(frozen=True)
class _Settings:
    """Static settings of a layer of experts, and mesh axes by use.

    Args:
      act: the activation function.
      combine: see `expert_mlp`.
      arithmetic: the numbers of products.
      capacity: the capacity, or `None`.
      experts: all mesh axes that shard experts.
      sent: those of them along which tokens are sent.
      summed: the axes over which outputs are summed.
      gathered: the axes over which weights are sharded and gathered.
      scattered: the axes over which weights' gradients are reduce-scattered.
      mlp: the axes that shard the hidden layer.
      tokens: the axes that shard tokens before the exchange.
    """

    act: Callable[[Array], Array]
    combine: Callable[[Array, Array], Array] | None
    arithmetic: Arithmetic
    capacity: Capacity | None
    experts: tuple[str, ...] = ()
    sent: tuple[str, ...] = ()
    summed: tuple[str, ...] = ()
    gathered: tuple[str, ...] = ()
    scattered: tuple[str, ...] = ()
    mlp: tuple[str, ...] = ()
    tokens: tuple[str, ...] = ()

    def lead(self, sizes: Array | None) -> Cut:
        """Return the mesh axes that shard all dimensions of rows but the last."""
        if sizes is not None:  # rows of all experts
            return (tuple(dict.fromkeys((*self.tokens, *self.experts))),)
        others = tuple(m for m in self.tokens if m not in self.experts)
        return others, (), others

    def inner(self, embed: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the mesh axes that shard the last dimension of a product's rows, and of its result."""
        return ((), self.mlp) if embed == 1 else (self.mlp, ())


def _settings(
    act: Callable[[Array], Array],
    combine: Callable[[Array, Array], Array] | None,
    arithmetic: Arithmetic,
    capacity: Capacity | None,
) -> _Settings:
    experts, mlp = cut_over("experts"), cut_over("expert_mlp")
    tokens = cut_over("expert_batch", "expert_seq")

    def embed(kind: Kind) -> tuple[str, ...]:  # () if the rules reshard weights for use, which also gathers them
        same = all(cut_over(a, kind=kind) == cut_over(a) for a in ("experts", "expert_mlp"))
        return cut_over("expert_embed", kind=kind) if same else ()

    sent = tuple(m for m in experts if m in tokens)
    summed = tuple(m for m in (*experts, *mlp) if m not in tokens)
    gathered, scattered = embed("params"), embed("grads")
    return _Settings(act, combine, arithmetic, capacity, experts, sent, summed, gathered, scattered, mlp, tokens)


def _check(x: Array, weights: Weights, capacity: Capacity | None) -> None:
    layout = current()
    assert layout is not None
    if over := cut_over("embed"):
        raise LayoutError(
            f"experts need whole vectors, and the layout {layout} shards the activations' 'embed' over "
            f"{' and '.join(over)}; remove that rule"
        )
    layout.spec(UP, weights.up.shape, kind="activations", name="the experts' weights")
    layout.spec(UP, weights.up.shape, kind="params", name="the experts' weights")
    names = (*TOKENS[:2], "expert_mlp")
    layout.spec(names, (*x.shape[:2], weights.up.shape[2]), kind="activations", name="the experts' hidden layer")
    if capacity is not None:
        check_groups(x.shape[1], capacity)


def check_groups(seq: int, capacity: Capacity, *, dropless: bool = False) -> None:
    """Check that the layout in force does not shard a row inside of a group of tokens.

    Args:
      seq: tokens per row.
      capacity: the capacity, with the size of groups.
      dropless: the router works without a capacity, which the message then suggests.

    Raises:
      LayoutError: the layout shards a group.
    """
    layout = current()
    if layout is None or free_and_manual()[1]:  # inside another shard_map a row is local already
        return
    pieces = layout.split("expert_seq")
    if seq % pieces == 0 and seq // pieces % capacity.group:
        fit = math.gcd(capacity.group, seq // pieces)
        raise LayoutError(
            f"the layout {layout} shards rows of {seq} tokens over {pieces} devices, and an expert's slots are for "
            f"groups of {capacity.group} tokens; set MixtureOfExperts.group = {fit}"
            + (", or MixtureOfExperts.capacity = None" if dropless else "")
        )


def _local(
    x: Array,
    routed: Choices | Slots,
    weights: Weights,
    taps: Weights,
    biases: Biases | None,
    seed: Array | None,
    settings: _Settings,
) -> Array:
    """The layer on one device, with its tokens and its experts."""
    if seed is not None:  # places are counted on each device, which has random numbers of its own
        for m in dict.fromkeys((*settings.tokens, *settings.experts, *settings.mlp)):
            seed = mixed(seed + lax.axis_index(m).astype(jnp.uint32))
    apply = functools.partial(_mlp, weights=weights, taps=taps, biases=biases, seed=seed, settings=settings)
    local_experts = weights.up.shape[0]
    if settings.capacity is None:
        assert isinstance(routed, Choices)
        return _dropless(x, routed, local_experts, apply, settings)
    if isinstance(routed, Choices):
        routed = fill(routed, local_experts * _size(settings.experts), settings.capacity)
    return _in_slots(x, routed, apply, settings)


# --- with a capacity --------------------------------------------------------------------------------------------------


def fill(choices: Choices, experts: int, capacity: Capacity) -> Slots:
    """Assign tokens to experts' slots: first choices before second ones, then earlier tokens first."""
    b, s, k = choices.ids.shape
    n, g, c = s // capacity.group, capacity.group, capacity.slots

    def one(ids: Array, weights: Array) -> tuple[Array, Array]:  # of one group, (g, k)
        expert, weights = ids.T.reshape(-1), weights.T.reshape(-1)  # all first choices before any second
        counts = jnp.cumsum(jax.nn.one_hot(expert, experts, dtype=jnp.int32), axis=0) - 1
        at = jnp.take_along_axis(counts, expert[:, None], axis=1)[:, 0]
        slot = jnp.where((at < c) & (expert < experts), expert * c + at, experts * c)  # out of range: dropped
        of = jnp.full(experts * c, g * k, jnp.int32).at[slot].set(jnp.arange(g * k, dtype=jnp.int32), mode="drop")
        token = jnp.where(of < g * k, of % g, g)
        weight = jnp.take(weights, of, mode="fill", fill_value=0)
        return token.reshape(experts, c), weight.reshape(experts, c)

    token, weight = jax.vmap(one)(*(a.reshape(b * n, g, k) for a in choices))
    return Slots(token.reshape(b, n, experts, c), weight.reshape(b, n, experts, c))


def _in_slots(x: Array, slots: Slots, apply: Callable[..., Array], settings: _Settings) -> Array:
    b, s, e = x.shape
    n, c = slots.token.shape[1], slots.token.shape[3]
    groups = x.reshape(b * n, s // n, e)
    token, weight = (_mine(a.reshape(b * n, -1, c), settings) for a in slots)
    rows = jax.vmap(lambda rows, at: jnp.take(rows, at, axis=0, mode="fill", fill_value=0))(groups, token)
    if settings.sent:
        rows, weight = (lax.all_to_all(a, settings.sent, 1, 0, tiled=True) for a in (rows, weight))
    out = apply(rows, weight[..., None])
    out = lax.all_to_all(out, settings.sent, 0, 1, tiled=True) if settings.sent else out
    empty = jnp.zeros((s // n, e), jnp.float32)
    y = jax.vmap(lambda token, out: empty.at[token].add(out.astype(jnp.float32), mode="drop"))(token, out)
    return y.reshape(b, s, e).astype(x.dtype)


def _mine(a: Array, settings: _Settings) -> Array:
    """Select, in arrays (groups, x, slots), the experts that this device's copy of the tokens is sent to."""
    if settings.sent == settings.experts:
        return a
    shape = a.shape
    a = a.reshape(shape[0], *(_size((m,)) for m in settings.experts), -1, shape[2])
    for dim in reversed(range(len(settings.experts))):
        if settings.experts[dim] not in settings.sent:
            a = lax.dynamic_index_in_dim(a, lax.axis_index(settings.experts[dim]), dim + 1, keepdims=False)
    return a.reshape(shape[0], -1, shape[2])


# --- dropless ---------------------------------------------------------------------------------------------------------


def _dropless(
    x: Array, choices: Choices, local_experts: int, apply: Callable[..., Array], settings: _Settings
) -> Array:
    b, s, e = x.shape
    k = choices.ids.shape[2]
    n = b * s
    devices = _size(settings.sent)
    place = _place(choices.ids.reshape(-1), local_experts, settings)
    order = jnp.argsort(place, stable=True)
    back = jnp.argsort(order)
    rows = jnp.broadcast_to(x.reshape(n, 1, e), (n, k, e)).reshape(n * k, e)
    rows, scale = move(rows, order, back), move(choices.weights.reshape(n * k, 1), order, back)
    # rows without an expert are out of range, and not counted
    counts = jnp.bincount(place, length=devices * local_experts).reshape(devices, local_experts)
    if not settings.sent:
        out = apply(rows, scale, counts[0])
    else:
        exchange = Exchange(settings.sent, devices, n * min(k, local_experts), n * k, ragged=True)
        # a TPU pads each number of a ragged exchange to a row of 128, so padded rows cost less for `scale`
        exchange_scale = dataclasses.replace(exchange, ragged=False)
        theirs = lax.all_to_all(counts, settings.sent, 0, 0, tiled=True)
        sizes = counts.sum(1), theirs.sum(1)
        # each sender's rows are sorted by expert; the rows of all senders are sorted once more
        ends = jnp.cumsum(theirs, axis=1)
        expert = jnp.sum(jnp.arange(exchange.max_rows)[None, :, None] >= ends[:, None, :], axis=-1).reshape(-1)
        by_expert = jnp.argsort(expert, stable=True)
        by_sender = jnp.argsort(by_expert)
        rows = move(carry(rows, *sizes, exchange, True), by_expert, by_sender)
        scale = move(carry(scale, *sizes, exchange_scale, True), by_expert, by_sender)
        out = apply(rows, scale, theirs.sum(0))
        out = carry(move(out, by_sender, by_expert), *sizes, exchange, False)
    out = move(out, back, order).reshape(n, k, e).astype(jnp.float32)
    # rows without an expert contribute 0, whatever values they have
    y = jnp.sum(jnp.where((place < devices * local_experts).reshape(n, k, 1), out, 0.0), axis=1)
    return y.reshape(b, s, e).astype(x.dtype)


def _place(ids: Array, local_experts: int, settings: _Settings) -> Array:
    """Return the sort key of each row's expert: the device it is sent to, then its number there; no expert is last."""
    left = _size(settings.experts)
    place, mine = jnp.zeros_like(ids), ids < left * local_experts
    for m in settings.experts:
        left //= _size((m,))
        at = ids // (local_experts * left) % _size((m,))
        if m in settings.sent:
            place = place * _size((m,)) + at
        else:
            mine &= at == lax.axis_index(m)
    return jnp.where(mine, place * local_experts + ids % local_experts, _size(settings.sent) * local_experts)


# --- products ---------------------------------------------------------------------------------------------------------


def _mlp(
    rows: Array,
    scale: Array,
    sizes: Array | None = None,
    *,
    weights: Weights,
    taps: Weights,
    biases: Biases | None,
    seed: Array | None,
    settings: _Settings,
) -> Array:
    """Apply each expert to its rows, and multiply by `scale`, float32.

    Rows are (groups, x, slots, e), or (rows, e) sorted by expert with `sizes` of each. They are scaled before the last
    product: scaled after it, the derivative of `scale` would need the outputs, and recomputation would repeat the
    product and the exchange.
    """

    def product(number: int, rows: Array, kernel: Array, tap: Array, embed: int) -> Array:
        own = None if seed is None else mixed(seed + jnp.uint32(number))
        return _product(rows, kernel, tap, sizes, own, embed, settings)

    def plus(y: Array, bias: Array | None) -> Array:
        return y if bias is None else (y + _of_rows(bias, len(rows), sizes)).astype(y.dtype)

    gate_bias, up_bias, down_bias = biases or (None, None, None)
    up = checkpoint_name(plus(product(0, rows, weights.up, taps.up, 1), up_bias), "mlp_up")
    if weights.gate is None or taps.gate is None:
        h = settings.act(up)
    else:
        gate = checkpoint_name(plus(product(1, rows, weights.gate, taps.gate, 1), gate_bias), "mlp_up")
        h = settings.act(gate) * up if settings.combine is None else settings.combine(gate, up)
    h = (checkpoint_name(h, "mlp_hidden") * scale).astype(settings.arithmetic.dtype)
    y = product(2, h, weights.down, taps.down, 2)
    if down_bias is None:
        return y
    if settings.mlp:  # of the devices whose outputs are summed, one adds it
        down_bias = jnp.where(lax.axis_index(settings.mlp) == 0, down_bias, 0)
    return (y + scale * _of_rows(down_bias, len(rows), sizes)).astype(y.dtype)


def _of_rows(bias: Float[Array, "x n"], rows: int, sizes: Int[Array, " x"] | None) -> Array:
    """Return the bias of each row's expert, for rows as those of `_mlp`."""
    if sizes is None:
        return bias[:, None]
    expert = jnp.searchsorted(jnp.cumsum(sizes), jnp.arange(rows), side="right")
    return jnp.take(bias, expert, axis=0, mode="fill", fill_value=0)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def _product(
    rows: Array,
    kernel: Array,
    tap: Array,
    sizes: Array | None,
    seed: Array | None,
    embed: int,
    settings: _Settings,
) -> Array:
    """Multiply rows by their expert's matrix; the derivative is custom for the reasons given in `project`.

    Args:
      rows: (groups, x, slots, in), or (rows, in) sorted by expert.
      kernel: (x, in, out), whose dimension `embed` is sharded over `settings.gathered`.
      tap: gets the kernel's gradient, in its dtype; its dimension `embed` is sharded over `settings.scattered`.
      sizes: rows of each expert, int, or `None`.
      seed: of random numbers, or `None`.
      embed: 1 or 2.
      settings: mesh axes, and the numbers of the product.
    """
    return _product_fwd(rows, kernel, tap, sizes, seed, embed, settings)[0]


def _product_fwd(rows, kernel, tap, sizes, seed, embed, settings):  # type: ignore[no-untyped-def]
    numbers = settings.arithmetic.forward
    y = _grouped(numbers, rows, kernel, 1, sizes, embed, settings)
    return y.astype(settings.arithmetic.out_dtype), (rows, kernel, sizes, seed)


def _product_bwd(embed, settings, residuals, dy):  # type: ignore[no-untyped-def]
    rows, kernel, sizes, seed = residuals
    arithmetic = settings.arithmetic.seeded(seed)
    drows = _grouped(arithmetic.input_gradient, dy, kernel, 2, sizes, embed, settings).astype(rows.dtype)
    numbers = arithmetic.kernel_gradient
    summed, batch = ((0,), ()) if sizes is not None else ((0, 2), (1,))
    left, right = (
        encode(a, summed, batch, (*settings.lead(sizes), cut))
        for encode, a, cut in zip((numbers.left, numbers.right), (rows, dy), settings.inner(embed), strict=True)
    )
    if sizes is None:
        dkernel = numbers.dot(left, right, ((summed, summed), (batch, batch)), kernel.dtype)
    else:
        dkernel = numbers.ragged_outer(left, right, sizes, kernel.dtype)
    if settings.scattered:
        dkernel = lax.psum_scatter(dkernel, settings.scattered, scatter_dimension=embed, tiled=True)
    return drows, None, dkernel, None, None


_product.defvjp(_product_fwd, _product_bwd)


def _grouped(
    numbers: Numbers, rows: Array, kernel: Array, summed: int, sizes: Array | None, embed: int, settings: _Settings
) -> Array:
    """Multiply rows by their expert's matrix, of which dimension `summed` is summed over."""
    cut = settings.inner(embed)[0 if summed == 1 else 1]
    stored = [(), settings.mlp, settings.mlp]
    stored[embed] = settings.gathered
    matrices = numbers.right(kernel, (summed,), (0,), tuple(stored))

    def whole(a: Array) -> Array:  # FSDP's all-gather, of encoded numbers
        shared = a.shape[embed] == 1 != kernel.shape[embed]
        return a if shared else lax.all_gather(a, settings.gathered, axis=embed, tiled=True)

    matrices = jax.tree.map(whole, matrices) if settings.gathered else matrices
    if sizes is None:
        left = numbers.left(rows, (3,), (1,), (*settings.lead(sizes), cut))
        dims = ((3,), (summed,)), ((1,), (0,))
        return jnp.moveaxis(numbers.dot(left, matrices, dims, settings.arithmetic.dtype), 0, 1)
    left = numbers.left(rows, (1,), (), (*settings.lead(sizes), cut))
    matrices = matrices if summed == 1 else jax.tree.map(lambda a: jnp.swapaxes(a, 1, 2), matrices)
    out = numbers.ragged_dot(left, matrices, sizes)
    # `ragged_dot` does not define the values of rows without an expert, forward or backward
    return jnp.where(jnp.arange(len(rows))[:, None] < jnp.sum(sizes), out, 0)


def _size(axes: tuple[str, ...]) -> int:
    return math.prod(lax.axis_size(m) for m in axes)
