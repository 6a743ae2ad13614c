"""SOAP: Adam in the eigenbases of Shampoo's preconditioners of each layer."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxscale.config import register
from jaxscale.errors import ConfigError
from jaxscale.layout import TensorInfo, constrain
from jaxscale.optim.adamw import fractions, not_negative
from jaxscale.optim.base import NamedState, Schedule, Tree, decay_mask
from jaxscale.optim.layers import gather_matrices, hidden_matrices, scatter_matrices, view_of, with_rest

_dot = functools.partial(jnp.matmul, precision="highest")  # with bfloat16 products the bases become inexact


class SoapState(NamedTuple):
    """State of `scale_by_soap`.

    Args:
      count: updates so far (int32 scalar); the first one only initialises the bases.
      mu: first moment, of the parameters' shapes.
      nu: second moment of the rotated gradients, of the parameters' shapes.
      rows: a `Side` per parameter for the rows of its matrices, or `None` if they are not rotated.
      cols: the same for the columns.
    """

    count: jax.Array  # type: ignore[assignment]  # a tuple has a method of this name; optax's states do the same
    mu: Tree
    nu: Tree
    rows: Tree
    cols: Tree


class Side(NamedTuple):
    """The preconditioner of the rows of a stack of (m, n) matrices G, or of the columns with Gᵀ for G.

    Args:
      gram: the running mean of GGᵀ, (..., m, m) float32.
      basis: its eigenvectors as columns, (..., m, m) float32.
    """

    gram: NamedState
    basis: NamedState


def scale_by_soap(
    infos: Tree,
    b1: float = 0.95,
    b2: float = 0.95,
    eps: float = 1e-8,
    frequency: int = 10,
    *,
    max_size: int = 10000,
    one_sided: bool = False,
) -> optax.GradientTransformation:
    """The direction of SOAP (Vyas et al. 2024), for parameters that are all matrices per layer.

    As in the authors' code, the first update initialises the bases (by `eigh`) and changes no parameter; every
    `frequency` steps, one step of the power method and a QR decomposition update them. On a layout the preconditioners
    are sharded along their rows like the parameter (`NamedState`), GSPMD partitions products with them, and matrices to
    decompose are gathered: those of a stack are distributed whole over the devices (`gather_matrices`).

    If a matrix is wider than tall, GᵀG of the first gradient has a null space, of which any basis is valid: results may
    then differ between computers, or layouts. `one_sided` avoids this.

    Args:
      infos: a `TensorInfo` per parameter.
      b1: decay of the first moment.
      b2: decay of the second moment and of the preconditioners.
      eps: added to the root of the second moment.
      frequency: steps between decompositions.
      max_size: a side larger than this is not rotated.
      one_sided: whether to rotate only the smaller side.
    """

    def sides(info: TensorInfo) -> tuple[bool, bool]:
        m, n = view_of(info).shape[-2:]
        return m <= max_size and not (one_sided and m > n), n <= max_size and not (one_sided and n >= m)

    def side(info: TensorInfo, axis: int) -> Side | None:
        """Return the zero `Side` of the rows (axis -2) or columns (-1), or `None` if they are not rotated."""
        view = view_of(info)
        if not sides(info)[axis]:
            return None
        n, side_name = view.shape[axis], ("rows", "cols")[axis]
        axes = (*view.axes[:-2], view.axes[axis], None)

        def part(name: str) -> NamedState:
            return NamedState(jnp.zeros((*view.shape[:-2], n, n), jnp.float32), f"{info.path}/{side_name}.{name}", axes)

        return Side(part("gram"), part("basis"))

    def init(params: Tree) -> SoapState:
        zeros = optax.tree.zeros_like
        made = [jax.tree.map(lambda i, a=axis: side(i, a), infos) for axis in (-2, -1)]
        return SoapState(jnp.zeros([], jnp.int32), zeros(params), zeros(params), *made)

    def update(updates: Tree, state: SoapState, params: Tree | None = None) -> tuple[Tree, SoapState]:
        leaves: Any
        structure: Any
        leaves, structure = jax.tree.flatten(infos)
        columns = [structure.flatten_up_to(t) for t in (updates, state.mu, state.nu, state.rows, state.cols)]
        one = functools.partial(_one, b1=b1, b2=b2, eps=eps)
        out = [one(info, state.count, *of) for info, *of in zip(leaves, *columns, strict=True)]
        first, mu, nu, rows, cols = (list(column) for column in zip(*out, strict=True))
        stage = jnp.where(state.count == 0, 0, jnp.where(state.count % frequency == 0, 1, 2))
        rows, cols = (_with_new_bases(stage, side, frequency) for side in (rows, cols))
        whole = (structure.unflatten(x) for x in (mu, nu, rows, cols))
        return structure.unflatten(first), SoapState(optax.safe_increment(state.count), *whole)

    return optax.GradientTransformation(init, update)


def _one(
    info: TensorInfo,
    count: jax.Array,
    g: jax.Array,
    mu: jax.Array,
    nu: jax.Array,
    rows: Side | None,
    cols: Side | None,
    b1: float,
    b2: float,
    eps: float,
) -> tuple[jax.Array, jax.Array, jax.Array, Side | None, Side | None]:
    """Return a parameter's direction and new state; in the first update, without bases yet, the direction is 0."""
    shape, has_bases = view_of(info).shape, count > 0
    wide, m, v = (x.astype(jnp.float32).reshape(shape) for x in (g, mu, nu))
    rotated = _rotate(wide, rows, cols)
    m = jnp.where(has_bases, b1 * m + (1 - b1) * wide, m)
    v = jnp.where(has_bases, b2 * v + (1 - b2) * jnp.square(rotated), v)
    t = jnp.maximum(count, 1)
    direction = (_rotate(m, rows, cols) / (1 - b1**t)) / (jnp.sqrt(v / (1 - b2**t)) + eps)
    direction = jnp.where(has_bases, _rotate(direction, rows, cols, back=True), 0.0)
    flipped = jnp.swapaxes(wide, -1, -2)
    rows, cols = _observe(rows, _dot(wide, flipped), b2), _observe(cols, _dot(flipped, wide), b2)

    def lay(x: jax.Array, like: jax.Array) -> jax.Array:
        return constrain(x.reshape(info.shape), *info.axes, kind="opt_state").astype(like.dtype)

    return lay(direction, g), lay(m, mu), lay(v, nu), rows, cols


def _rotate(x: jax.Array, rows: Side | None, cols: Side | None, back: bool = False) -> jax.Array:
    """Rotate matrices into the bases, or with `back` out of them."""

    def flip(q: jax.Array, turn: bool) -> jax.Array:
        return jnp.swapaxes(q, -1, -2) if turn else q

    if rows is not None:
        x = _dot(flip(rows.basis.value, not back), x)
    if cols is not None:
        x = _dot(x, flip(cols.basis.value, back))
    return x


def _observe(side: Side | None, outer: jax.Array, b2: float) -> Side | None:
    if side is None:
        return None
    gram = b2 * side.gram.value + (1 - b2) * outer
    return side._replace(gram=dataclasses.replace(side.gram, value=constrain(gram, *side.gram.axes, kind="opt_state")))


def _with_new_bases(stage: jax.Array, sides: list[Side | None], frequency: int) -> list[Side | None]:
    """Return the sides with the bases of this step: initialised (stage 0), updated (1), or unchanged (2).

    Named scopes tell the planner how often each stage runs (`jaxscale.plan.scopes`).
    """

    def of(fn: Callable[[Side], jax.Array], scope: str) -> list[jax.Array | None]:
        with jax.named_scope(scope) if scope else contextlib.nullcontext():
            return [None if s is None else fn(s) for s in sides]

    def decompose(fn: Callable[[jax.Array], jax.Array], s: Side, x: jax.Array) -> jax.Array:
        return scatter_matrices(fn(gather_matrices(x, *s.gram.axes)), *s.gram.axes)

    def initial(s: Side) -> jax.Array:
        return decompose(lambda a: jnp.linalg.eigh(a)[1][..., ::-1], s, s.gram.value)  # largest eigenvalue first

    def updated(s: Side) -> jax.Array:
        return decompose(lambda a: jnp.linalg.qr(a)[0], s, _dot(s.gram.value, s.basis.value))

    def unchanged(s: Side) -> jax.Array:
        return s.basis.value

    scopes = {"first_update": initial, f"every_{frequency}_updates": updated, "": unchanged}
    bases = jax.lax.switch(stage, [functools.partial(of, fn, scope) for scope, fn in scopes.items()])

    def put(s: Side, q: jax.Array) -> Side:
        return s._replace(basis=dataclasses.replace(s.basis, value=q))

    return [None if s is None else put(s, q) for s, q in zip(sides, bases, strict=True)]


@register
@dataclasses.dataclass(frozen=True)
class SOAP:
    """SOAP for matrices between hidden features and AdamW for all other parameters (Vyas et al. 2024).

    `is_hidden_matrix` decides which are matrices. Weight decay is on all but norms and biases. The state is large: for
    an (m, n) matrix 2 (mn + m² + n²) numbers, or 2 (mn + min(m, n)²) with `one_sided`.

    Args:
      b1: decay of the first moment, also AdamW's.
      b2: decay of the second moment and of the preconditioners, also AdamW's.
      eps: added to the root of the second moment, also AdamW's.
      frequency: steps between decompositions.
      max_size: a side larger than this is not rotated.
      one_sided: whether to rotate only the smaller side of a matrix.
      weight_decay: a step subtracts weight_decay · learning rate · parameter.
      others: path components of further parameters that AdamW updates.
    """

    b1: float = 0.95
    b2: float = 0.95
    eps: float = 1e-8
    frequency: int = 10
    max_size: int = 10000
    one_sided: bool = False
    weight_decay: float = 0.01
    others: tuple[str, ...] = ()

    why_no_vmap: ClassVar[str] = "SOAP's decompositions of several runs at once never finished on a CPU (jax 0.10.2)"

    def __post_init__(self) -> None:
        fractions(self, "b1", "b2")
        not_negative(self, "eps", "weight_decay")
        for name in ("frequency", "max_size"):
            if not (isinstance(getattr(self, name), int) and getattr(self, name) >= 1):
                raise ConfigError(f"SOAP.{name} = {getattr(self, name)!r}: must be a whole number of at least 1")

    def make(self, learning_rate: Schedule, infos: Tree) -> optax.GradientTransformation:
        """Return SOAP and AdamW for these parameters."""
        sizes: Any = dict(max_size=self.max_size, one_sided=self.one_sided)
        return optax.chain(
            with_rest(
                lambda infos: scale_by_soap(infos, self.b1, self.b2, self.eps, self.frequency, **sizes),
                optax.scale_by_adam(self.b1, self.b2, self.eps),
                hidden_matrices(infos, self.others, "SOAP"),
                infos,
            ),
            optax.add_decayed_weights(self.weight_decay, decay_mask(infos)),
            optax.scale_by_learning_rate(learning_rate),
        )
