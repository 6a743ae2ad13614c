"""What serving a model takes of named hardware: bytes of weights and KV cache, and the time that reading them takes."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import jax
from flax import nnx

from jaxscale.errors import ConfigError
from jaxscale.hardware import Topology, topology
from jaxscale.layout import Layout, TensorInfo, describe
from jaxscale.models import Decodable, TransformerConfig
from jaxscale.nn import Cache, WeightFormat
from jaxscale.plan.communication import sized
from jaxscale.plan.printing import Printable, table_of
from jaxscale.step import TrainConfig
from jaxscale.step.state import describe_model
from jaxscale.units import human_bytes, human_seconds

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult


@dataclasses.dataclass(frozen=True)
class Serving(Printable):
    """Memory and the least time of generation on named hardware; prints as a table.

    Args:
      hardware: the hardware.
      layout: where the model is.
      weights: the format of the matrices in words.
      rows: sequences of each of the devices that shard the batch.
      length: tokens of each.
      sequences: of all devices.
      parameters: bytes of parameters on a device.
      plain: those as plain arrays.
      cache: bytes of the KV cache on a device.
      read: bytes that a device reads for a token of every sequence, at full length.
      flops: FLOPs of such a step on a device.
      prompt_flops: FLOPs on a device of a prompt of full length.
    """

    hardware: Topology
    layout: Layout
    weights: str
    rows: int
    length: int
    sequences: int
    parameters: int
    plain: int
    cache: int
    read: int
    flops: float
    prompt_flops: float

    @property
    def fits(self) -> bool:
        """Whether parameters and cache fit in a device's memory."""
        return self.parameters + self.cache <= self.hardware.chip.capacity

    @property
    def most_rows(self) -> int:
        """Return the most rows of full length that fit beside the parameters."""
        free = self.hardware.chip.capacity - self.parameters
        return max(0, free * self.rows // max(self.cache, 1))

    @property
    def step(self) -> float:
        """Least seconds of a step that makes a token of every sequence."""
        chip = self.hardware.chip
        return max(self.read / chip.bandwidth, self.flops / chip.rate("bfloat16"))

    @property
    def tokens_per_second(self) -> float:
        """Most tokens per second of all sequences together."""
        return self.sequences / self.step

    @property
    def first_token(self) -> float:
        """Least seconds of a prompt of full length."""
        chip = self.hardware.chip
        return max(self.parameters / chip.bandwidth, self.prompt_flops / chip.rate("bfloat16"))

    def to_json(self) -> dict[str, Any]:
        """Return the numbers."""
        own = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name not in ("hardware", "layout")}
        more = {n: getattr(self, n) for n in ("fits", "most_rows", "step", "tokens_per_second", "first_token")}
        return {"hardware": self.hardware.name, "mesh": self.layout.mesh, **own, **more}

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        capacity = self.hardware.chip.capacity
        table = table_of(f"serving on {self.hardware.name}, mesh {self.layout.mesh}", "on each device", "")
        table.add_row(f"parameters, {self.weights}", human_bytes(self.parameters))
        table.add_row("parameters as plain arrays", human_bytes(self.plain))
        table.add_row(f"KV cache, {self.rows} rows a device, {self.length:,} tokens each", human_bytes(self.cache))
        table.add_row("memory", f"{human_bytes(capacity)}, {'fits' if self.fits else 'does not fit'}")
        table.add_row("most rows a device of this length", f"{self.most_rows:,}")
        table.add_row("step of a token for each sequence, at least", human_seconds(self.step))
        table.add_row(f"tokens/s of {self.sequences} sequences, at most", f"{self.tokens_per_second:,.0f}")
        table.add_row("prompt of full length, at least", human_seconds(self.first_token))
        yield table
        yield (
            "Times are bounds by the data sheet: parameters and cache are read once a step at the memory's bandwidth, "
            "or products run at the peak of bfloat16. Communication, buffers and sampling are not counted."
        )


def serving(
    config: TrainConfig,
    hardware: str | Topology,
    cache: Cache,
    *,
    weights: WeightFormat | None = None,
    rows: int = 8,
    length: int | None = None,
) -> Serving:
    """Return what serving a run's model takes of hardware; nothing is compiled.

    Args:
      config: the run's settings; its layout is used, one device by default.
      hardware: a name such as "v5e:2x2", or a topology.
      cache: the kind of KV cache.
      weights: the format of the matrices; by default the one that the run's checkpoint has.
      rows: sequences of each of the devices that shard the batch.
      length: tokens of each; the run's `seq_len` by default.

    Raises:
      ConfigError: the model has no KV cache or no FLOPs to count, or a size is below 1.
      LayoutError: the hardware has too few devices, or an array cannot be laid out.
    """
    target = topology(hardware) if isinstance(hardware, str) else hardware
    length = config.seq_len if length is None else length
    for name, value in (("rows", rows), ("length", length)):
        if value < 1:
            raise ConfigError(f"{name} = {value}: must be at least 1")
    model = config.model
    if not isinstance(model, TransformerConfig):
        raise ConfigError(f"{type(model).__name__} cannot be planned for serving; that needs a Transformer")
    layout = sized(config.layout or Layout("data=1"), target.devices)
    rules = layout.resolved_rules.for_generation()
    layout = dataclasses.replace(layout, rules=rules, sequence_sharded=False, pipeline=None)
    graphdef, infos = describe_model(model)
    few = weights or config.stored
    stored = infos if few is None else few.infos(infos)
    shards = layout.split("batch")

    def size(tree: Any, kind: Any = "params") -> int:
        return sum(row.bytes_per_device for row in describe(tree, layout, kind))

    made = nnx.merge(graphdef, infos)
    with layout.abstract():
        held = size(_cache_infos(made, cache, shards, rows, length), "activations")
    looked_up = 0 if model.tied else size([i for i in jax.tree.leaves(stored) if i.path.startswith("embed/")])
    return Serving(
        hardware=target,
        layout=layout,
        weights=_words(few, infos),
        rows=rows,
        length=length,
        sequences=shards * rows,
        parameters=size(stored),
        plain=size(infos),
        cache=held,
        read=size(stored) - looked_up + held,
        flops=2.0 * model.active_param_count() * rows * shards / layout.devices,
        prompt_flops=model.flops(1, length, training=False) * shards / layout.devices,
    )


def _words(few: WeightFormat | None, infos: Any) -> str:
    if few is not None:
        return few.describe()
    return ", ".join(sorted({str(i.dtype) for i in jax.tree.leaves(infos)}))


def _cache_infos(model: Any, cache: Cache, batch: int, slots: int, length: int) -> list[TensorInfo]:
    """A `TensorInfo` for each array of the cache.

    Raises:
      ConfigError: the model has none.
    """
    if not isinstance(model, Decodable):
        raise ConfigError(f"{type(model).__name__} has no KV cache; `jaxscale plan` without --serve plans a step")
    out = []
    for state, layers in (one for run in model.runs for one in run.decode_states()):

        def make(state: Any = state, layers: int = layers) -> Any:
            return state.init(cache, layers, batch, slots, length, 0)

        for name, x in jax.eval_shape(make).items():
            axes = state.axes(cache, name) or (None,) * len(x.shape)
            out.append(TensorInfo(f"the cache's {name}", tuple(x.shape), x.dtype, axes))
    return out
