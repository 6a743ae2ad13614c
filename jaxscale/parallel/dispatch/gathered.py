"""Dispatch by all-gather: every device gets all tokens and applies its own experts."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from jaxtyping import Array, Float

from jaxscale.config import register
from jaxscale.parallel.dispatch.base import Apply, Dispatcher, ExpertAxes, Rows
from jaxscale.parallel.dispatch.dropless import DroplessDispatch
from jaxscale.parallel.dispatch.payload import check_payload
from jaxscale.parallel.dispatch.routed import Choices, Slots
from jaxscale.parallel.dispatch.whole_exchange import gather, scatter
from jaxscale.parallel.wires import CodedWire


@register
@dataclasses.dataclass(frozen=True)
class AllGatherDispatch(Dispatcher):
    """Every device gathers the tokens of all, applies its own experts and reduce-scatters outputs; drops no token.

    On n devices a token is sent n - 1 times each way, whatever its experts: less than by `DroplessDispatch` where an
    exchange is padded, or where tokens have more than n experts. The size does not depend on the data.

    Args:
      payload: the codes in which tokens are gathered, and the cotangents of the outputs; `None` sends them as they are.
        Outputs, and the cotangents of tokens, are always summed as they are.

    Raises:
      ConfigError: a payload that keeps rounding errors.
    """

    payload: CodedWire | None = None

    def __post_init__(self) -> None:
        check_payload(self, self.payload)

    def rows(self, sent: Mapping[str, int], top_k: int, local_experts: int) -> Rows:
        """See `Dispatcher`: every token of every device, with a row for each of its experts, whoever has them."""
        devices = math.prod(sent.values())
        return Rows(devices / top_k if sent else 0, devices, 0)

    def __call__(
        self, x: Float[Array, "b s e"], routed: Choices | Slots, local_experts: int, apply: Apply, axes: ExpertAxes
    ) -> Float[Array, "b s e"]:
        """See `Dispatcher`; needs `Choices`."""
        assert isinstance(routed, Choices)
        local = DroplessDispatch()
        if not axes.sent:
            return local(x, routed, local_experts, apply, axes)
        tokens = gather(x.reshape(-1, x.shape[2]), axes.sent, self.payload)
        ids, weights = (gather(a.reshape(-1, a.shape[2]), axes.sent, None) for a in routed)
        y = local(
            tokens[None], Choices(ids[None], weights[None]), local_experts, apply, dataclasses.replace(axes, sent=())
        )
        return scatter(y[0], axes.sent, self.payload).reshape(x.shape)
