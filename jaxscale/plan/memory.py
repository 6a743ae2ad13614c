"""Choosing a memory policy: the cheapest that fits a budget, by arithmetic where that settles it, else by compiling."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import math
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax

from jaxscale.errors import ConfigError
from jaxscale.layout import HOST, Layout, TensorInfo, describe
from jaxscale.layout.rules import Kind
from jaxscale.nn import POLICIES, MemoryPolicy
from jaxscale.optim import state_infos, state_shardings
from jaxscale.plan.compile import compile_step, topology_devices
from jaxscale.train import AutoLoss, MaterialisedLoss, TrainConfig, blueprint_of

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

COMPILES = 4
"""At most so many programs are compiled for one choice."""


@dataclasses.dataclass(frozen=True)
class Estimate:
    """What a policy costs by arithmetic; all bytes are per device.

    What is there at once. A compiler adds copies in other orders and gaps between buffers, and saves what it can make
    in place: of most compiled steps of Llama 3 8B these are 0.90 to 1.05 (`experiments/memory_policies`).

    Args:
      state: parameters and optimizer state.
      gradients: of the parameters.
      copies: of the layers' weights in the type of the arithmetic, made once and not layer by layer.
      kept: activations on the device from forward to backward pass.
      working: besides these, at the worst moment: the loss, one layer on its way back, or the embedding's gradient.
      host: activations and optimizer state in host memory.
      extra_flops: matrix products made again, whole machine, as a share of the model's own three passes.
    """

    state: int
    gradients: int
    copies: int
    kept: int
    working: int
    host: int
    extra_flops: float

    @property
    def device(self) -> int:
        """Bytes on the device."""
        return self.state + self.gradients + self.copies + self.kept + self.working


def estimate(config: TrainConfig, topology: str) -> Estimate:
    """What a run's memory policy costs, by arithmetic.

    Args:
      config: the run's settings, with a layout.
      topology: as for `topology_devices`.

    Raises:
      ConfigError: a model without memory policies, or a run without a layout.
      LayoutError: what cannot be laid out, or an unknown topology.
    """
    model = _model(config)
    if config.layout is None:
        raise ConfigError("a run with layout=None is for one local device; give it Layout('data=1') to plan it")
    layout = config.layout.on(topology_devices(topology))
    if layout.stages > 1:
        raise ConfigError(
            f"{layout} has pipeline stages, whose stashes this arithmetic does not know; compile the step and read its "
            "memory (jaxscale.plan.compile_step), or plan a mesh without pipeline"
        )
    policy = MemoryPolicy.of(model.memory)
    blueprint, _ = blueprint_of(dataclasses.replace(config, layout=layout))
    held = lambda infos, kind: sum(r.bytes_per_device for r in describe(infos, layout, kind))  # noqa: E731
    gradients = held(blueprint.infos, "grads")
    layers = {
        name: sum(_local_bytes(i, layout) for i in infos)
        for name, infos in model.activations(config.micro_batch, config.seq_len).items()
    }
    gathered = _gathered_bytes(model.activations(config.micro_batch, config.seq_len)["residual"][0], layout)
    layers["unnamed"] += 2 * gathered  # each sub-layer's input
    kept, host = _activation_bytes(policy, layers, model.depth, sum(repeats for _, repeats in model.runs))
    rows = describe(state_infos(blueprint.tx, blueprint.infos), layout, "opt_state")
    where = jax.tree.leaves(state_shardings(blueprint.tx, blueprint.infos, layout))
    away = sum(r.bytes_per_device for r, s in zip(rows, where, strict=True) if s.memory_kind == HOST)
    copies = sum(_copied_bytes(i, layout, model.dtype) for i in jax.tree.leaves(blueprint.infos))
    ends = _Ends.of(config, jax.tree.leaves(blueprint.infos), layout)
    moments = {
        "loss": ends.loss - (gradients - ends.gradients),  # the layers' are not there yet
        "layers": ends.head
        + _working_bytes(policy, layers, gathered, config.seq_len, max(len(group) for group, _ in model.runs)),
        "embedding": ends.embedding - kept - copies,  # which are gone
    }
    return Estimate(
        held(blueprint.infos, "params") + sum(r.bytes_per_device for r in rows) - away,
        gradients * (1 if config.accumulate == 1 else 2),
        copies,
        kept,
        max(0, *moments.values()),
        host + away,
        _extra_flops(policy, model.products(config.batch_size, config.seq_len), "lse" if layers["lse"] else None)
        / model.flops(config.batch_size, config.seq_len),
    )


def _model(config: TrainConfig) -> Any:
    for part in ("memory", "activations", "products", "runs", "dtype"):
        if not hasattr(config.model, part):
            raise ConfigError(
                f"{type(config.model).__name__} has no '{part}', which planning its memory needs; Transformer has"
            )
    return config.model


def _local_bytes(info: TensorInfo, layout: Layout) -> int:
    """An activation's bytes on one device; `kv_seq` of scores stays whole."""
    pieces = math.prod(layout.split(axis) for axis in info.axes if axis is not None and axis != "kv_seq")
    return info.nbytes // pieces


def _found(policy: MemoryPolicy, layers: Mapping[str, int]) -> set[str]:
    """What of a layer's tensors its backward pass finds on the device; of a group's layers, but for their inputs."""
    if policy.rest == "keep":
        tiled = {"mlp_up", "mlp_hidden", "unnamed"} if "mlp_hidden" in policy.tile else set()
        return set(layers) - {*policy.offload} - tiled
    products = {"qkv", "residual_mid", "mlp_up"} if policy.rest == "dots" else set()
    return ({"residual", *policy.keep} | products) - {*policy.offload}


def _activation_bytes(policy: MemoryPolicy, layers: Mapping[str, int], depth: int, groups: int) -> tuple[int, int]:
    """Bytes from forward to backward pass, on the device and in host memory."""
    every = policy.rest == "keep" or "residual" in policy.keep  # else each group's, which recomputing starts from
    count = {t: depth if every or t != "residual" else groups for t in _found(policy, layers)}
    return sum(layers[t] * n for t, n in count.items()), sum(layers[t] for t in policy.offload) * depth


def _gathered_bytes(stream: TensorInfo, layout: Layout) -> int:
    """What a sub-layer takes where the stream is split along its sequence: all of it; else 0."""
    whole = _local_bytes(dataclasses.replace(stream, axes=("batch", "seq", "embed")), layout)
    return whole if whole > _local_bytes(stream, layout) else 0


def _working_bytes(policy: MemoryPolicy, layers: Mapping[str, int], gathered: int, seq: int, blocks: int) -> int:
    """A group of `blocks` layers on its way back: what it makes again, and cotangents in the worse half of a layer."""
    tile = min(1.0, policy.tile_size / seq) if "mlp_hidden" in policy.tile else 1.0
    attention, feed = ("qkv", "scores", "attn_out"), ("mlp_up", "mlp_hidden")
    found = _found(policy, layers)
    makes = {t: int(n * (tile if t in feed else 1)) for t, n in layers.items() if t != "unnamed"}  # fused, mostly
    again = {t: 0 if t in found else n for t, n in makes.items()}
    # What the last product took is done with before its cotangent is made. A sub-layer's input and the cotangent of its
    # output are gathered together, before the cotangents within.
    fed = sum(again.values()) - again["mlp_hidden"] + int(tile * (2 * gathered + sum(layers[t] for t in feed)))
    within = max(layers["qkv"] + layers["scores"], gathered)
    attended = sum(again[t] for t in ("residual", "norm", "lse", *attention)) + layers["attn_out"] + gathered + within
    others = 0 if policy.rest == "keep" else sum(again.values()) + (layers["residual"] if "residual" in found else 0)
    return max(fed, attended) + (blocks - 1) * others + layers["residual"]


def _copied_bytes(info: TensorInfo, layout: Layout, dtype: str) -> int:
    """A stacked weight in another type than its own: XLA casts the whole stack before it walks it."""
    if "layers" not in info.axes or "norm" in info.axes or jax.numpy.dtype(dtype) == info.dtype:
        return 0
    return _bytes_as(info, layout, "params") * jax.numpy.dtype(dtype).itemsize // info.dtype.itemsize


def _bytes_as(info: TensorInfo, layout: Layout, kind: Kind) -> int:
    """A tensor's bytes on one device, laid out as another kind of it is."""
    return info.nbytes // math.prod(layout.split(axis, kind) for axis in info.axes if axis is not None)


@dataclasses.dataclass(frozen=True)
class _Ends:
    """What the tables at a model's two ends take, bytes per device.

    A table that devices split and a batch that they split as well make a gradient of the whole table on each of them,
    which is summed, and then cut.

    Args:
      loss: while the loss runs backwards.
      head: the head's gradient while it waits for its sum, beyond what `gradients` holds of it.
      embedding: while the embedding's gradient is summed, beyond `gradients`.
      gradients: the part of `gradients` that is the tables'.
    """

    loss: int
    head: int
    embedding: int
    gradients: int

    @classmethod
    def of(cls, config: TrainConfig, infos: Sequence[TensorInfo], layout: Layout) -> _Ends:
        tables = [i for i in infos if "vocab" in i.axes]
        cut = [_bytes_as(i, layout, "grads") for i in tables]
        whole = [_bytes_as(i, layout, "activations") for i in tables]
        lookup, head = whole[0], whole[-1]
        summed = lookup if whole != cut else 0
        as_used = head * jax.numpy.dtype(_model(config).dtype).itemsize // tables[-1].dtype.itemsize
        return cls(
            as_used + (head - cut[-1]) + 2 * _logit_bytes(config, layout),
            head - cut[-1],
            lookup + head + summed - sum(cut),
            sum(cut),
        )


def _logit_bytes(config: TrainConfig, layout: Layout) -> int:
    loss = config.loss.of(config.model.vocab) if isinstance(config.loss, AutoLoss) else config.loss
    if not isinstance(loss, MaterialisedLoss):
        return 0
    shape = (config.micro_batch, config.seq_len, config.model.vocab)
    return _local_bytes(TensorInfo("logits", shape, jax.numpy.dtype("float32"), ("batch", "seq", "vocab")), layout)


def _extra_flops(policy: MemoryPolicy, products: Mapping[str, int], lse: str | None) -> int:
    """Products that the backward pass makes again. A layer's last one is not needed."""
    if policy.rest == "keep":
        return products["mlp_up"] if "mlp_hidden" in policy.tile else 0
    found = {*policy.keep, *policy.offload}
    if policy.rest == "dots":
        found |= {"qkv", "residual_mid", "mlp_up"}
    again = {t for t in ("qkv", "residual_mid", "mlp_up") if t not in found}
    if policy.rest != "dots":
        again |= {"router"} & products.keys()
    if lse is None:  # dense attention: the weights are made again whatever is kept of what they mix
        again |= {"scores"} | ({"attn_out"} - found)
    elif not {"attn_out", lse} <= found:
        again |= {"scores", "attn_out"}
    return sum(products[t] for t in again)


@dataclasses.dataclass(frozen=True)
class PolicyRow:
    """A line of the table a choice was made from.

    Args:
      policy: its name.
      estimate: by arithmetic.
      compiled_bytes: per device, of the compiled step; `None` where none was compiled.
      verdict: "chosen", or why not.
    """

    policy: str
    estimate: Estimate
    compiled_bytes: int | None
    verdict: str


@dataclasses.dataclass(frozen=True)
class Choice:
    """The cheapest policy that fits, and the table it was chosen from; prints as that table.

    Args:
      policy: its name.
      config: the run's settings with that policy.
      topology, budget: what it was chosen for, bytes per device.
      rows: a line per policy, cheapest first.
    """

    policy: str
    config: TrainConfig
    topology: str
    budget: int
    rows: tuple[PolicyRow, ...]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield policy_table(self.rows, self.topology, self.budget)

    def __str__(self) -> str:
        return _text(policy_table(self.rows, self.topology, self.budget))


def choose(
    config: TrainConfig,
    topology: str,
    budget: int,
    *,
    policies: Mapping[str, MemoryPolicy] = POLICIES,
    compiles: int = COMPILES,
) -> Choice:
    """The memory policy that costs the least arithmetic among those that fit.

    Policies that the model refuses are left out. The rest are tried from the cheapest on. One is passed over without
    compiling when its estimate is over the budget by itself or with the least that the compiler added to another. An
    estimate may be a few per cent too high, so one that only just fits may be passed over; what is chosen was compiled.

    Args:
      config: the run's settings; its model's own policy does not matter.
      topology: as for `topology_devices`.
      budget: bytes per device for arguments, outputs and temporaries together.
      policies: to choose from, by name.
      compiles: how many programs may be compiled.

    Raises:
      ConfigError: none of them fits, or `estimate`'s reasons.
      LayoutError: as for `compile_step`.
    """
    model, configs = _model(config), {}
    for name, policy in policies.items():
        with contextlib.suppress(ConfigError):  # experts are not tiled
            configs[name] = dataclasses.replace(config, model=dataclasses.replace(model, memory=policy))
    if not configs:
        raise ConfigError(f"the model takes none of the memory policies {', '.join(policies)}; give others")
    found = {n: estimate(c, topology) for n, c in configs.items()}
    order = sorted(found, key=lambda n: (found[n].extra_flops, found[n].host, -found[n].device))
    last = min(order, key=lambda n: found[n].device)
    rows: dict[str, PolicyRow] = {}
    added: list[int] = []  # by the compiler, to what arithmetic knows of
    chosen = None
    for name in order:
        row = lambda verdict, size=None, name=name: PolicyRow(name, found[name], size, verdict)  # noqa: E731
        expected = found[name].device + min(added, default=0)
        if chosen is not None:
            rows[name] = row(f"not needed: dearer than {chosen}")
        elif expected > budget:
            rows[name] = row("passed over: over the budget by arithmetic")
        elif len(added) >= compiles - 1 and name != last:
            rows[name] = row("passed over: the last compilation is for the smallest estimate")
        else:
            size = compiled_bytes(configs[name], topology)
            added.append(max(0, size - found[name].device))
            chosen = name if size <= budget else None
            rows[name] = row("chosen" if chosen else "over the budget", size)
    table = tuple(rows[name] for name in order)
    if chosen is None:
        least = min(table, key=lambda r: r.compiled_bytes or r.estimate.device)
        how = "by arithmetic" if least.compiled_bytes is None else "compiled"
        raise ConfigError(
            f"no memory policy fits {budget:,} bytes per device of {topology}: the smallest, '{least.policy}', takes "
            f"{least.compiled_bytes or least.estimate.device:,} {how}; give more devices, a smaller batch or a shorter "
            "sequence"
        )
    return Choice(chosen, configs[chosen], topology, budget, table)


def compiled_bytes(config: TrainConfig, topology: str) -> int:
    """Bytes per device of a run's compiled training step: arguments, outputs that are not theirs, temporaries.

    A step that does not fit the hardware is answered with the size that the TPU's compiler names on giving up. Of a
    TPU, jax 0.10.2 reports more temporaries than it allocates (10.9 GiB for 7.4 in one case), and jax 0.12 what it
    allocates.

    Raises:
      jax.errors.JaxRuntimeError: it fails for another reason.
    """
    try:
        m = compile_step(config, topology).memory_analysis()
    except jax.errors.JaxRuntimeError as e:
        size = re.search(r"(?:Used |temporaries \()([\d.]+)([KMGT])", str(e))
        if size is None:
            raise
        return int(float(size[1]) * 1024 ** (1 + "KMGT".index(size[2])))
    return m.argument_size_in_bytes + m.temp_size_in_bytes + m.output_size_in_bytes - m.alias_size_in_bytes


def policy_table(rows: tuple[PolicyRow, ...], topology: str, budget: int) -> Any:
    """A rich table: policy, estimated and compiled bytes per device, bytes in host memory, extra FLOPs, verdict."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    from jaxscale.train.report import human_bytes

    title = f"memory policies on {topology}, {human_bytes(budget)} per device"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for name in ("policy", "estimated", "compiled", "on the host", "extra FLOPs", "verdict"):
        table.add_column(name, justify="left" if name in ("policy", "verdict") else "right", no_wrap=name == "policy")
    for r in rows:
        compiled = "-" if r.compiled_bytes is None else human_bytes(r.compiled_bytes)
        host = human_bytes(r.estimate.host) if r.estimate.host else "-"
        share = f"{100 * r.estimate.extra_flops:.1f}%"
        table.add_row(r.policy, human_bytes(r.estimate.device), compiled, host, share, r.verdict)
    return table


def _text(table: Any) -> str:
    from rich.console import Console

    console = Console(record=True, file=io.StringIO(), width=120, force_jupyter=False)
    console.print(table)
    return console.export_text()
