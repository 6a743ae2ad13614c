"""Check a training run without running it: trace and lower its step for a mesh of any size."""

from __future__ import annotations

import dataclasses
import math
import time

import jax
import jax.numpy as jnp

from jaxscale.errors import RunError
from jaxscale.layout import describe
from jaxscale.layout.host import HOST
from jaxscale.layout.tensors import Tree
from jaxscale.plan.compile import lower_step
from jaxscale.step import TrainConfig, blueprint_of, model_flops
from jaxscale.step.prepare import check_ids
from jaxscale.step.rates import examples, parameter_count
from jaxscale.step.start import Start
from jaxscale.units import human_bytes


@dataclasses.dataclass(frozen=True)
class DryRun:
    """Sizes of one training step.

    Args:
      layout: mesh and rules, in words.
      devices: number of devices of the mesh.
      parameters: number of the model's parameters.
      rows: rows of the global batch.
      tokens: tokens of the global batch; `None` for an objective without tokens.
      micro_batches: micro-batches of a step.
      flops: FLOPs of a step's matrix products over all devices, by the model's formula; `None` for a model without one.
      parameter_bytes: bytes of parameters per device.
      state_bytes: bytes of the training state per device, parameters included.
      host_bytes: those of `state_bytes` that are in host memory.
      host_parameter_bytes: those of `parameter_bytes` that are in host memory.
      data: name of the corpus.
      models: where frozen or first parameters are from, by "start" and "teacher".
      operations: lines of the lowered program.
      seconds: seconds that tracing and lowering took.
    """

    layout: str
    devices: int
    parameters: int
    rows: int
    tokens: int | None
    micro_batches: int
    flops: int | None
    parameter_bytes: int
    state_bytes: int
    host_bytes: int
    host_parameter_bytes: int
    data: str
    models: dict[str, str]
    operations: int
    seconds: float

    def __str__(self) -> str:
        batch = f"{self.rows:,} rows" + ("" if self.tokens is None else f", {self.tokens:,} tokens")
        batch += f" in {self.micro_batches} micro-batches" if self.micro_batches > 1 else ""
        state = f"{human_bytes(self.state_bytes)} a device, {human_bytes(self.parameter_bytes)} of it parameters"
        if self.host_bytes:
            parts = human_bytes(self.host_parameter_bytes)
            state += f"; {human_bytes(self.host_bytes)} of these are in host memory ({parts} of parameters)"
        rows = {
            "layout": f"{self.layout}: {self.devices:,} device{'s' * (self.devices > 1)}",
            "model": f"{self.parameters:,} parameters",
            "batch": batch,
            "step": "FLOPs not known (the model config has no flops)"
            if self.flops is None
            else f"{self.flops:.3g} FLOPs of products, over all devices",
            "state": state,
            **self.models,
            "data": f"{self.data}, not opened; errors of files, splits and lengths appear when training starts",
            "program": f"{self.operations:,} lines, traced and lowered in {self.seconds:.1f} s; not compiled",
        }
        return "\n".join(f"{name:8} {text}" for name, text in rows.items())


def dry_run(config: TrainConfig) -> DryRun:
    """Check a run, then trace and lower its step on the layout's mesh; this needs no devices.

    Args:
      config: the run's settings; its data is not opened.

    Raises:
      LayoutError, ConfigError, DataError: the run cannot be trained; the message names what does not fit.
    """
    check_ids(config)
    began, (unit, count) = time.perf_counter(), examples(config)
    lowered = lower_step(config)
    seconds = time.perf_counter() - began
    layout = config.layout if config.layout is None else config.layout.abstract()
    blueprint, _ = blueprint_of(dataclasses.replace(config, layout=layout))
    params = blueprint.algorithm.infos(blueprint)["params"]
    abstract, shardings = blueprint.abstract_state(), blueprint.shardings()
    tables = [row for tree in (params, blueprint.frozen) for row in describe(tree, layout)]
    starts = {"start": config.start, "teacher": config.objective.teacher}
    return DryRun(
        layout=str(layout) if layout else "no layout",
        devices=layout.devices if layout else 1,
        parameters=parameter_count(config),
        rows=config.batch_size,
        tokens=count if unit == "tokens" else None,
        micro_batches=config.accumulate,
        flops=model_flops(config),
        parameter_bytes=sum(row.bytes_per_device for row in tables),
        state_bytes=_bytes_per_device(abstract, shardings),
        host_bytes=0 if shardings is None else _bytes_per_device(abstract, shardings, host=True),
        host_parameter_bytes=_bytes_per_device(abstract.params, shardings.params, host=True) if shardings else 0,
        data=config.data.name,
        models={name: _where(start) for name, start in starts.items() if start is not None},
        operations=lowered.as_text().count("\n"),
        seconds=seconds,
    )


def _where(start: Start) -> str:
    """Return the checkpoint that parameters are from."""
    try:
        return f"step {start.settled().step} of {start.path}"
    except RunError:
        return f"{start.path}, which is not a run with a checkpoint yet"


def _bytes_per_device(arrays: Tree, shardings: Tree, *, host: bool = False) -> int:
    """Return the bytes of arrays on a device, or of those in its host's memory."""

    def bytes_of(x: jax.Array | jax.ShapeDtypeStruct, where: jax.sharding.Sharding | None = None) -> int:
        shape = x.shape if where is None else where.shard_shape(x.shape)
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) or (host and (where is None or where.memory_kind != HOST)):
            return 0
        return math.prod(shape) * x.dtype.itemsize

    return sum(jax.tree.leaves(jax.tree.map(bytes_of, arrays, *([] if shardings is None else [shardings]))))
