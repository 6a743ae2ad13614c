"""Muon: the update is the orthogonalised momentum of each layer's matrix."""

from __future__ import annotations

import dataclasses
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxscale.config import register
from jaxscale.errors import ConfigError
from jaxscale.layout import TensorInfo
from jaxscale.optim.adamw import fractions, not_negative
from jaxscale.optim.base import Schedule, Tree, decay_mask
from jaxscale.optim.layers import gather_matrices, hidden_matrices, scatter_matrices, view_of, with_rest

QUINTIC = (3.4445, -4.7750, 2.0315)
"""Jordan's coefficients: steep at 0, so that few iterations suffice; they do not converge to exactly 1."""


def newton_schulz(
    x: jax.Array, steps: int = 5, coefficients: tuple[float, float, float] = QUINTIC, eps: float = 1e-8
) -> jax.Array:
    """Approximate the closest orthogonal matrix by Newton-Schulz iterations (Jordan et al. 2024).

    Singular values move to between 0.7 and 1.2, singular vectors stay. Arithmetic is in float32, at the default matmul
    precision.

    Args:
      x: (..., m, n), a matrix per index of the leading dimensions.
      steps: number of iterations.
      coefficients: (a, b, c) of x -> (a + b xxᵀ + c (xxᵀ)²) x.
      eps: added to the norm by which x is divided first.

    Returns:
      (..., m, n) float32.
    """
    a, b, c = coefficients
    tall = x.shape[-2] > x.shape[-1]
    y = (jnp.swapaxes(x, -1, -2) if tall else x).astype(jnp.float32)
    y = y / (jnp.sqrt(jnp.sum(jnp.square(y), axis=(-2, -1), keepdims=True)) + eps)

    def step(_: object, y: jax.Array) -> jax.Array:
        gram = y @ jnp.swapaxes(y, -1, -2)
        return a * y + (b * gram + c * (gram @ gram)) @ y

    y = jax.lax.fori_loop(0, steps, step, y)
    return jnp.swapaxes(y, -1, -2) if tall else y


class MuonState(NamedTuple):
    """State of `scale_by_muon`.

    Args:
      count: updates so far (int32 scalar).
      mu: the momentum, of the parameters' shapes and dtypes.
    """

    count: jax.Array  # type: ignore[assignment]  # a tuple has a method of this name; optax's states do the same
    mu: Tree


def scale_by_muon(
    infos: Tree,
    beta: float = 0.95,
    nesterov: bool = True,
    ns_steps: int = 5,
    rms: float | None = 0.2,
    coefficients: tuple[float, float, float] = QUINTIC,
) -> optax.GradientTransformation:
    """The direction of Muon (Jordan et al. 2024; Liu et al. 2025), for parameters that are all matrices per layer.

    On one matrix it is `optax.contrib.scale_by_muon`, scaled. On a layout the momentum is sharded by the rules for
    optimizer state. To orthogonalise it, the matrices of a stack are distributed whole over the devices that hold
    shards of them (`gather_matrices`), and the updates are resharded back: an exchange each way of as many bytes as
    the parameters have in float32, and no product is computed twice if the mesh axes divide the stack. Along mesh axes
    that do not, and for a matrix without a stack, matrices are gathered and processed by every device.

    Args:
      infos: a `TensorInfo` per parameter.
      beta: decay of the momentum.
      nesterov: look ahead along the momentum.
      ns_steps: iterations of `newton_schulz`.
      rms: root mean square of the update's entries: the orthogonal matrix is multiplied by
        rms · √max(inputs, outputs). 0.2 is about AdamW's, so AdamW's learning rate and weight decay can be used (Liu et
        al. 2025). `None` multiplies by √max(1, outputs / inputs) instead (Jordan et al. 2024), which needs its own
        learning rate, about 0.02.
      coefficients: of `newton_schulz`.
    """

    def one(info: TensorInfo, momentum: jax.Array) -> jax.Array:
        view = view_of(info)
        inputs, outputs = view.shape[-2:]
        whole = newton_schulz(gather_matrices(momentum.reshape(view.shape), *view.axes), ns_steps, coefficients)
        scale = max(1.0, outputs / inputs) ** 0.5 if rms is None else rms * max(inputs, outputs) ** 0.5
        return scatter_matrices((scale * whole).astype(momentum.dtype), *view.axes).reshape(info.shape)

    def init(params: Tree) -> MuonState:
        return MuonState(jnp.zeros([], jnp.int32), optax.tree.zeros_like(params))

    def update(updates: Tree, state: MuonState, params: Tree | None = None) -> tuple[Tree, MuonState]:
        count = optax.safe_increment(state.count)
        mu = optax.tree.update_moment(updates, state.mu, beta, 1)
        fixed = optax.tree.bias_correction(mu, beta, optax.safe_increment(count) if nesterov else count)
        if nesterov:

            def ahead(m: jax.Array, g: jax.Array) -> jax.Array:
                return beta * m + (1 - beta) * g

            fixed = jax.tree.map(ahead, fixed, optax.tree.bias_correction(updates, beta, count))
        return jax.tree.map(one, infos, fixed), MuonState(count, mu)

    return optax.GradientTransformation(init, update)


@register
@dataclasses.dataclass(frozen=True)
class Muon:
    """Muon for matrices between hidden features and AdamW for all other parameters (Jordan et al. 2024).

    AdamW updates the embedding, output head, learned positions, routers, norms and biases (see `is_hidden_matrix`).
    Weight decay is on all but norms and biases.

    Args:
      beta: decay of Muon's momentum.
      nesterov: look ahead along the momentum.
      ns_steps: Newton-Schulz iterations.
      rms: root mean square of an update's entries, or `None`; see `scale_by_muon`.
      weight_decay: a step subtracts weight_decay · learning rate · parameter.
      others: path components of further parameters that AdamW updates.
      b1: AdamW's decay of the first moment.
      b2: AdamW's decay of the second moment.
      eps: AdamW's, added to the root of the second moment.
      rest: AdamW's learning rate, as a fraction of Muon's.
    """

    by_layer: ClassVar[bool] = True
    beta: float = 0.95
    nesterov: bool = True
    ns_steps: int = 5
    rms: float | None = 0.2
    weight_decay: float = 0.1
    others: tuple[str, ...] = ()
    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8
    rest: float = 1.0

    def __post_init__(self) -> None:
        fractions(self, "beta", "b1", "b2")
        not_negative(self, "weight_decay", "eps", "rest")
        if not (isinstance(self.ns_steps, int) and self.ns_steps >= 1):
            raise ConfigError(f"Muon.ns_steps = {self.ns_steps!r}: must be a whole number of at least 1")
        if self.rms is not None and not self.rms > 0:
            raise ConfigError(f"Muon.rms = {self.rms}: must be above 0, or None")

    def make(self, learning_rate: Schedule, infos: Tree) -> optax.GradientTransformation:
        """Return Muon and AdamW for these parameters."""
        is_matrix = hidden_matrices(infos, self.others, "Muon")
        return optax.chain(
            with_rest(
                lambda infos: scale_by_muon(infos, self.beta, self.nesterov, self.ns_steps, self.rms),
                optax.chain(optax.scale_by_adam(self.b1, self.b2, self.eps), optax.scale(self.rest)),
                is_matrix,
                infos,
            ),
            optax.add_decayed_weights(self.weight_decay, decay_mask(infos)),
            optax.scale_by_learning_rate(learning_rate),
        )
