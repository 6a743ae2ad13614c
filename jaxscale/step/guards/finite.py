"""Steps that are not finite are not taken."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

from jaxscale.config import register
from jaxscale.parallel.anywhere import anywhere
from jaxscale.step.guards.base import Metrics, Patience, RollBack, StepGuard, Watch, Watched

if TYPE_CHECKING:
    from jaxscale.step.state import TrainState

Tree = Any


@register
@dataclasses.dataclass(frozen=True)
class FiniteGuard(StepGuard):
    """Refuses a step whose loss, gradient or state holds a NaN or an infinity, and never saves such a state.

    All of it is looked at before the update, which can then be done in place: an update that makes its own infinity is
    seen at the next step, and undone by going back. Optimizer state in host memory is judged by what it does to the
    parameters.

    Args:
      patience: as of `StepGuard`.
    """

    offence: ClassVar[str] = "is not finite"

    def refuses(self, memory: Tree, state: TrainState, metrics: Metrics) -> Bool[Array, ""]:
        # of a gradient its norm: it is made anyway, and any NaN or infinity is in it
        return ~all_finite((metrics["loss"], metrics["grad_norm"], state.params, state.opt_state))

    def watch(self, run: Watched) -> Watch:
        return _FiniteWatch(self, run)


class _FiniteWatch(Patience):
    def before_save(self, state: TrainState) -> None:
        if bool(_nonfinite_anywhere((state.params, state.opt_state))):
            raise RollBack(f"the state after step {int(state.step)} is not finite, and must not be saved")


def all_finite(tree: Tree) -> Bool[Array, ""]:
    """Whether no floating-point number in a tree is NaN or infinite, host memory left out."""
    floats = [x for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.floating) and not _on_host(x)]
    return jnp.all(jnp.stack([jnp.all(jnp.isfinite(x)) for x in floats]))


@jax.jit
def _nonfinite_anywhere(tree: Tree) -> Bool[Array, ""]:
    return anywhere(~all_finite(tree))


def _on_host(x: Any) -> bool:
    """Arithmetic in a program takes what is on the device."""
    return jax.typeof(x).memory_space == jax.memory.Space.Host
