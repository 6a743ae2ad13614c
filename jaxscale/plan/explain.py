"""What a run will do, before it does it: where its tensors live, which loss and which attention it takes."""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any

from jaxscale.layout import TensorRow, describe
from jaxscale.optim import check_state, state_infos
from jaxscale.plan.shown import Shown
from jaxscale.train import Blueprint, Run, TrainConfig, blueprint_of, is_pipelined, pipelined

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult


@dataclasses.dataclass(frozen=True)
class Explanation(Shown):
    """Where every tensor of a run lives and why; prints as tables, in a terminal or a notebook.

    Args:
      layout: the layout, in words.
      params: a row per parameter.
      state_bytes_per_device: of the optimizer's state, by the rules for it.
      loss: which one runs, in words.
      attention: the attention kernel, by name; "" for a model that has none to choose.
      notes: what else to know, such as which state keeps 32 bits and why, or what stages cost, a sentence each.
    """

    layout: str
    params: tuple[TensorRow, ...]
    state_bytes_per_device: int
    loss: str
    attention: str
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """The same as plain values."""
        return dataclasses.asdict(self)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from jaxscale.train.report import human_bytes, tensor_table

        yield tensor_table(f"parameters, laid out {self.layout}", self.params, why=True)
        yield f"optimizer state: {human_bytes(self.state_bytes_per_device)} per device"
        yield f"loss: {self.loss}"
        if self.attention:
            yield f"attention: {self.attention}"
        yield from self.notes


def explain(run: Run | TrainConfig) -> Explanation:
    """Explains a run, or the settings of one that has not started; needs no devices.

    Args:
      run: a run or its settings.

    Raises:
      LayoutError: naming the tensor that cannot be laid out.
    """
    config = run if isinstance(run, TrainConfig) else run.config
    blueprint, _ = blueprint_of(config)
    if config.layout is not None:
        check_state(blueprint.tx, blueprint.infos, config.layout)
    state = describe(state_infos(blueprint.tx, blueprint.infos), config.layout, "opt_state")
    return Explanation(
        "on one device" if config.layout is None else str(config.layout),
        tuple(describe(blueprint.infos, config.layout)),
        sum(r.bytes_per_device for r in state),
        config.loss.describe(config.model.vocab),
        _called(getattr(config.model, "attention", None)),
        (*getattr(blueprint.tx, "notes", ()), *_of_stages(blueprint, config)),
    )


def _of_stages(blueprint: Blueprint, config: TrainConfig) -> tuple[str, ...]:
    if not is_pipelined(blueprint):
        return ()
    return pipelined(blueprint, config.loss, config.z_loss).notes(config.micro_batch)


def _called(kernel: Any) -> str:
    """A callable's name, with what is bound to it."""
    if kernel is None:
        return ""
    if isinstance(kernel, functools.partial):
        given = [repr(a) for a in kernel.args] + [f"{name}={value!r}" for name, value in kernel.keywords.items()]
        return f"{_called(kernel.func)}({', '.join(given)})"
    return getattr(kernel, "__name__", None) or repr(kernel)
