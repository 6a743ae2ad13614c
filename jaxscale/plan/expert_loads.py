"""Loads of experts: which share of a layer's rows each expert gets, and what that costs the slowest device.

Devices wait for the one whose experts have the most rows. Its rows are computed here as the kernels compute them:
rounded up to whole tiles by group (`pallas_kernels.grouped_matmul`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Float

from jaxscale.errors import ConfigError
from jaxscale.hardware import Chip
from jaxscale.layout import Layout
from jaxscale.models import TransformerConfig
from jaxscale.nn import MixtureOfExperts
from jaxscale.parallel.dispatch import Dispatcher, DroplessDispatch, FusedDispatch, HierarchicalDispatch, SlotDispatch
from pallas_kernels.dispatch import Target
from pallas_kernels.grouped_matmul import gpu, tpu
from pallas_kernels.grouped_matmul.inputs import Facts


@dataclasses.dataclass(frozen=True)
class Loads:
    """Which share of a layer's rows each expert gets.

    Args:
      layers: the shares of each layer's experts, which sum to 1; one line for all layers, or one for each layer that
        has experts.
      name: where they come from, in a few words.

    Raises:
      ConfigError: shares that are negative or sum to 0.
    """

    layers: tuple[tuple[float, ...], ...]
    name: str = ""

    def __post_init__(self) -> None:
        lines = []
        for line in self.layers:
            total = math.fsum(line)
            if not (0 < total < math.inf and min(line) >= 0):
                raise ConfigError(f"loads of experts {line[:4]}...: must be at least 0, finite, and not all of them 0")
            lines.append(tuple(share / total for share in line))
        object.__setattr__(self, "layers", tuple(lines))

    @classmethod
    def zipf(cls, experts: int, exponent: float, seed: int = 0) -> Loads:
        """Return loads that fall as 1 / rank ** exponent, by a random order of the experts; 0 is even.

        Args:
          experts: the number of experts.
          exponent: the exponent.
          seed: of the order.

        Raises:
          ConfigError: an exponent below 0, or infinite.
        """
        if not 0 <= exponent < math.inf:
            raise ConfigError(f"zipf:{exponent:g}: the exponent must be finite and at least 0, which is even loads")
        order = np.random.default_rng(seed).permutation(experts)
        shares = (1.0 + order) ** -exponent
        return cls((tuple(shares.tolist()),), f"zipf:{exponent:g}" if exponent else "even")

    @classmethod
    def counted(cls, lines: Mapping[int, Mapping[int, Sequence[int]]], name: str = "") -> Loads:
        """Return the mean loads of the last tenth of a run's recorded steps.

        Args:
          lines: by step and by layer, how often each expert was chosen (`jaxscale.train.expert_load.read_experts`).
          name: where they come from.

        Raises:
          ConfigError: nothing was recorded.
        """
        steps = sorted(lines)
        if not steps:
            raise ConfigError(f"{name} has no recorded loads of experts; train at least one step, or use zipf:1")
        last = [lines[step] for step in steps[-max(1, len(steps) // 10) :]]
        layers = sorted(set.intersection(*({*line} for line in last)))
        sums = (np.array([line[layer] for line in last], np.float64).sum(axis=0) for layer in layers)
        return cls(tuple(tuple(map(float, total)) for total in sums), name)

    def check(self, experts: int) -> None:
        """Raise `ConfigError` if the loads are not those of layers with this number of experts."""
        other = next((len(line) for line in self.layers if len(line) != experts), None)
        if other is not None:
            raise ConfigError(f"the loads {self.name} are of {other} experts, and the model's layers have {experts}")


def loads_of(text: str, experts: int) -> Loads:
    """Parse loads: "even", or "zipf:1.2" for loads that fall as 1 / rank ** 1.2.

    Args:
      text: the loads.
      experts: number of experts of the model's layers.

    Raises:
      ConfigError: neither of these.
    """
    kind, _, value = text.partition(":")
    if text == "even":
        return Loads.zipf(experts, 0.0)
    try:
        if kind == "zipf":
            return Loads.zipf(experts, float(value))
    except ValueError:
        pass
    raise ConfigError(f"'{text}' is not a distribution of experts' loads; write even, zipf:1.2, or the folder of a run")


@dataclasses.dataclass(frozen=True)
class SlowestRows:
    """Rows of the device that has the most, relative to the mean of all devices' rows; averages over layers.

    Args:
      used: rows of its experts.
      multiplied: rows that its kernel multiplies, with those that fill tiles.
      held: rows of its buffers, which operations between products read and write whole.
      exchanged: rows that a ragged exchange brings to it, or takes from it.
    """

    used: float = 1.0
    multiplied: float = 1.0
    held: float = 1.0
    exchanged: float = 1.0


EVEN = SlowestRows()
"""Every device has as many rows, no tile is filled up, and buffers hold no more than rows."""


def mixture_of(model: object) -> MixtureOfExperts:
    """Return the experts of a model, which all of its layers with experts have.

    Args:
      model: the model's config; its layers without experts may have any feed-forward layer.

    Raises:
      ConfigError: no layer has experts, or some layers have other experts than the rest.
    """
    mlps = model.layer_mlps() if isinstance(model, TransformerConfig) else []
    layers = {at: mlp for at, mlp in enumerate(mlps) if isinstance(mlp, MixtureOfExperts)}
    if not layers:
        raise ConfigError("loads are of experts, and no layer of the model has any; leave them out")
    first, moe = next(iter(layers.items()))
    for at, other in layers.items():
        if other != moe:
            fields = [f.name for f in dataclasses.fields(moe) if getattr(moe, f.name) != getattr(other, f.name)]
            raise ConfigError(
                f"loads are of layers with the same experts, and layer {at} differs from layer {first} in "
                f"{' and '.join(fields)}; leave them out"
            )
    return moe


def sent_axes(layout: Layout) -> dict[str, int]:
    """Return the mesh axes along which a layout sends tokens to experts, and their sizes, the outermost first.

    Args:
      layout: the layout, every size of its mesh known.
    """
    rules = layout.resolved_rules
    tokens = {m for a in ("expert_batch", "expert_seq") for m in rules.target("activations", a)}
    experts = rules.target("activations", "experts")
    return {m: layout.sizes[m] for m in experts if m in tokens and layout.sizes[m] > 1}


def dispatcher_of(moe: MixtureOfExperts) -> Dispatcher:
    """Return a layer's dispatcher, its default included."""
    return moe.dispatcher or (DroplessDispatch() if moe.capacity is None else SlotDispatch())


def slowest_rows(
    loads: Loads, moe: MixtureOfExperts, tokens: int, width: int, layout: Layout, chip: Chip, dtype: str = "bfloat16"
) -> SlowestRows:
    """Return what loads cost the slowest device; with a capacity nothing, since all slots are computed and sent.

    Args:
      loads: the loads.
      moe: the layer of experts.
      tokens: tokens of a micro-batch on one device.
      width: the model's width.
      layout: the layout, every size of its mesh known.
      chip: the chip.
      dtype: of computation.

    Raises:
      ConfigError: loads of another number of experts.
    """
    loads.check(moe.experts)
    if moe.capacity is not None:
        return SlowestRows()
    sent, ranks = sent_axes(layout), layout.split("experts")
    local = moe.experts // ranks
    dispatcher = dispatcher_of(moe)
    choices = tokens * moe.top_k
    total = choices * math.prod(sent.values())  # of all devices that send to one another
    mean = total / ranks
    held = dispatcher.rows(sent, moe.top_k, local).multiplied * choices
    shares = np.array(loads.layers)
    rows = np.array([_whole(line, total) for line in shares]).reshape(len(shares), ranks, local)
    used = rows.sum(2)
    hidden = moe.widths(moe.hidden or width)[0] // layout.split("expert_mlp")
    multiplied = [[_multiplied(sizes, round(held), width, hidden, chip, dtype) for sizes in layer] for layer in rows]
    return SlowestRows(
        float(used.max(1).mean() / mean),
        float(np.max(multiplied, axis=1).mean() / mean),
        held / mean,
        float(used.max(1).mean() / mean) if sent and _ragged(dispatcher) else 1.0,
    )


def _ragged(dispatcher: Dispatcher) -> bool:
    return isinstance(dispatcher, DroplessDispatch | FusedDispatch | HierarchicalDispatch)


def _whole(shares: Float[np.ndarray, " x"], total: int) -> np.ndarray:
    """Return whole numbers of rows with these shares and this sum."""
    ends = np.rint(np.cumsum(shares) * total).astype(np.int64)
    return np.diff(ends, prepend=0)


def _multiplied(sizes: np.ndarray, held: int, width: int, hidden: int, chip: Chip, dtype: str) -> int:
    """Return the rows that the chip's kernel multiplies for groups of these sizes; without a kernel those used."""
    used, kind = int(sizes.sum()), chip.kinds[0] if chip.kinds else ""
    m = max(held, used)
    facts = Facts("matmul", len(sizes), m, width, hidden, dtype, dtype, dtype)
    if chip.platform == "tpu" and tpu.supported(Target(kind, "tpu"), facts=facts) is None:
        return tpu.multiplied_rows(sizes, m, tpu.tile_of(Target(kind, "tpu"), facts)[0])
    if chip.platform == "gpu" and gpu.supported(Target(kind, "cuda"), facts=facts) is None:
        return gpu.multiplied_rows(sizes, m)
    return used
