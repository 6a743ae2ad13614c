"""A guard that skips steps with NaN or infinity."""

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
    """Refuses a step if the loss, gradients or state have a NaN or an infinity, and never saves such a state.

    The check is before the update, which can then be done in place. If the update itself makes an infinity, the
    following steps are refused, and the run goes back to a checkpoint. Optimizer state in host memory is not checked;
    its infinities are noticed in the parameters.

    Args:
      patience: consecutive refusals before the run goes back to a checkpoint.
    """

    offence: ClassVar[str] = "is not finite"

    def refuses(self, memory: Tree, state: TrainState, metrics: Metrics) -> Bool[Array, ""]:
        """Return whether the loss, the gradients' norm, the parameters or the optimizer's state are not finite."""
        # the norm stands for the gradients: it is computed anyway, and is not finite if any gradient is not
        return ~all_finite((metrics["loss"], metrics["grad_norm"], state.params, state.opt_state))

    def watch(self, run: Watched) -> Watch:
        """Return callbacks that also check the state before it is saved."""
        return _FiniteWatch(self, run)


class _FiniteWatch(Patience):
    def before_save(self, state: TrainState) -> None:
        if bool(_nonfinite_anywhere((state.params, state.opt_state))):
            raise RollBack(f"the state after step {int(state.step)} is not finite, and must not be saved")


def all_finite(tree: Tree) -> Bool[Array, ""]:
    """Return whether all floating-point numbers of a tree in device memory are finite, a bool scalar.

    Args:
      tree: a tree of arrays; those in host memory are ignored.
    """
    floats = [x for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.floating) and not _on_host(x)]
    return jnp.all(jnp.stack([jnp.all(jnp.isfinite(x)) for x in floats]))


@jax.jit
def _nonfinite_anywhere(tree: Tree) -> Bool[Array, ""]:
    return anywhere(~all_finite(tree))


def _on_host(x: jax.Array) -> bool:
    """Return whether an array is in host memory, where compiled programs cannot compute with it."""
    return jax.typeof(x).memory_space == jax.memory.Space.Host
