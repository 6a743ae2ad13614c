"""`HeadWeight`: the output head's weight with the numbers of its product."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxscale.layout import fill
from jaxscale.parallel import Arithmetic, Weight, as_weight


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class HeadWeight(Weight):
    """The output head's weight, whose product with hidden states is in the numbers of a `ProductRule`.

    Args:
      kernel: the stored weight, (V, E), an array or a `Weight`.
      arithmetic: the numbers; logits are float32.
    """

    pads: ClassVar[bool] = True
    kernel: Float[Array, "v e"] | Weight
    arithmetic_of_head: Arithmetic = dataclasses.field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the kernel."""
        return tuple(self.kernel.shape)

    def dense(self, dtype: DTypeLike | None = None) -> Float[Array, "v e"]:
        """See `Weight`."""
        return as_weight(self.kernel).dense(dtype)

    def matmul(
        self, x: Float[Array, "..."], axes: tuple[str, ...], contracted: tuple[int, ...], arithmetic: Arithmetic
    ) -> Float[Array, "..."]:
        """See `Weight`; in the head's numbers and not those of the caller."""
        kernel = fill(self.dense(), *axes)  # before it is encoded: scales of a vocabulary alone are not padded
        return as_weight(kernel).matmul(x, axes, contracted, self.arithmetic_of_head)

    def for_loss(self) -> Weight:
        """See `Weight`: this weight."""
        return self
