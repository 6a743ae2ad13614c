"""Work of one device in a step of a Transformer: FLOPs, and bytes of device memory that are read and written.

A matrix product is sharded over the mesh axes of its dimensions and computed in several passes: one forward, two
backward, and those that the memory policy and the kernels recompute. Every pass reads two of the three matrices and
writes the third, so that all passes move the same bytes. The operations between products (norms, rotary embeddings,
gates, residual sums, the loss, the update) are bounded by memory bandwidth, and counted as one fused pass over their
inputs and outputs.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence

import jax.numpy as jnp

from jaxscale.layout import Layout, Pipeline, simulate
from jaxscale.models import TransformerConfig
from jaxscale.models.sizes import gated
from jaxscale.nn import MemoryPolicy, MixtureOfExperts, Width, dot_product_attention
from jaxscale.nn.flash import key_heads_read
from jaxscale.parallel.pipeline import assign
from jaxscale.plan.collectives import Collective
from jaxscale.plan.covered import covered, covered_model
from jaxscale.plan.expert_loads import EVEN, SlowestRows
from jaxscale.plan.memory import Estimate, _extra_flops
from jaxscale.plan.roofline import Op, Work
from jaxscale.step import TrainConfig, describe_model, replicas_of, token_loss
from jaxscale.step.loss import holds_logits

FLOAT32 = 4
"""Bytes of an element of logits, scores and gradients."""


@dataclasses.dataclass(frozen=True)
class Product:
    """A product (rows x inner) @ (inner x outer) of the forward pass, in all layers that have it.

    Args:
      name: its result, as memory policies and `Transformer.products` name it.
      rows: rows of its left operand for each token; for routed experts, the number of experts of a token.
      inner: width that is summed over.
      outer: width of the result.
      side: the width that tensor parallelism shards, "inner" or "outer".
      parts: the parts of that width.
      layers: number of layers that have it.
      weights: weight matrices in each layer: one, or one for each expert.
    """

    name: str
    rows: float
    inner: int
    outer: int
    side: str
    parts: tuple[Width, ...]
    layers: int
    weights: int = 1

    @property
    def flops(self) -> float:
        """Forward FLOPs for each token in all layers."""
        return 2 * self.rows * self.inner * self.outer * self.layers

    def local(self, layout: Layout) -> int:
        """Return the sharded width on one device; key heads that the mesh does not divide are replicated."""
        cuts = ((layout.filled(p.axis, p.size) // layout.split(p.axis, size=p.size), p.columns) for p in self.parts)
        return sum(size * columns for size, columns in cuts)


def products(model: TransformerConfig, seq: int) -> list[Product]:
    """Return every product with weights of a forward pass: those of `Transformer.products`, with their sizes.

    Args:
      model: the model's config.
      seq: tokens of a sequence.
    """
    covered_model(model)
    z, depth = model.sizes, model.depth
    result = [Product("qkv", 1, p.inner, p.outer, "outer", p.parts, depth) for p in model.projections()]
    mixed = (Width("heads", z.heads, z.value_dim),)
    result.append(Product("residual_mid", 1, z.heads * z.value_dim, z.width, "inner", mixed, depth))
    mlps = model.layer_mlps()
    for mlp in dict.fromkeys(mlps):
        layers = mlps.count(mlp)
        gates = 1 + gated(mlp)
        fed = [(1.0, z.hidden, "mlp", 1)]
        if isinstance(mlp, MixtureOfExperts):
            one, shared = mlp.widths(z.hidden)
            slots = mlp.slots(seq)
            rows = mlp.top_k if slots is None else slots.slots * mlp.experts / slots.group
            fed = [(rows, one, "expert_mlp", mlp.experts), *([(1.0, shared, "mlp", 1)] if shared else [])]
            scores = (Width("router", mlp.experts),)
            result.append(Product("router", 1, z.width, mlp.experts, "outer", scores, layers))
        for rows, hidden, axis, weights in fed:
            up, down = (Width(axis, hidden, gates),), (Width(axis, hidden),)
            result.append(Product("mlp_up", rows, z.width, gates * hidden, "outer", up, layers, weights))
            result.append(Product("mlp_down", rows, hidden, z.width, "inner", down, layers, weights))
    return [*result, Product("logits", 1, z.width, model.vocab, "outer", (Width("vocab", model.vocab),), 1)]


def work_of(
    config: TrainConfig,
    layout: Layout,
    memory: Estimate,
    collectives: Sequence[Collective],
    update: Mapping[str, float] | None = None,
    slowest: SlowestRows = EVEN,
) -> Work:
    """Return the work of a run's step, the input of `step_time`.

    Args:
      config: the run's settings, of a `Transformer`.
      layout: the run's layout, with a mesh without -1.
      memory: `jaxscale.plan.estimate` of the run.
      collectives: the collectives of a step.
      update: FLOPs of the optimizer's own products on a device, by dtype (`jaxscale.plan.partition`).
      slowest: rows of experts on the device that the others wait for; by default all have as many, and no tile is
        filled up.

    Raises:
      LayoutError: more stages than layers, or a batch that the pipeline schedule does not divide.
    """
    model = covered(config)
    at = _Place.of(config, layout)
    ops = [*_multiplied(config, at, slowest), *_attended(config, at), *_between(config, at, slowest.held)]
    ops.append(_update(config, memory))
    ops += [
        Op("update's products", "matmul", flops, 0.0, dtype, staged=False, optimizer=True)
        for dtype, flops in (update or {}).items()
    ]
    return Work(
        tuple(op for op in ops if op.flops or op.bytes),
        tuple(waited_for(c, slowest.exchanged) for c in collectives),
        layout.sizes,
        model.flops(config.batch_size, config.seq_len),
        config.batch_size * config.seq_len,
        model.dtype,
        at.bubble,
        2.0 * memory.host,
        crosses=layout.across,
    )


def waited_for(collective: Collective, rows: float) -> Collective:
    """Return a ragged exchange with the bytes of the device that has `rows` times the mean, and others unchanged."""
    if rows == 1.0 or "ragged_all_to_all" not in collective.name:
        return collective
    return dataclasses.replace(collective, payload=round(collective.payload * rows))


@dataclasses.dataclass(frozen=True)
class _Place:
    """Shares and numbers of passes of a step's products in a layout.

    Args:
      layout: the layout.
      again: by product, how often the backward pass recomputes it.
      parts: micro-batches of a step, each of which reads every weight.
      padding: layers that stages compute, padding included, over the model's layers.
      bubble: fraction of a stage's time that the pipeline schedule leaves idle.
    """

    layout: Layout
    again: Mapping[str, int]
    parts: int
    padding: float
    bubble: float

    @classmethod
    def of(cls, config: TrainConfig, layout: Layout) -> _Place:
        model: TransformerConfig = config.model  # type: ignore[assignment]
        dense = model.attention is dot_product_attention
        names, policy = tuple(model.product_flops(1, 2)), MemoryPolicy.of(model.memory)
        counts = {
            name: _extra_flops(policy, {other: int(other == name) for other in names}, None if dense else "lse")
            for name in names
        }
        counts["logits"] = int(not holds_logits(token_loss(config)))  # a cut loss recomputes them
        counts["scores"] += not dense  # flash attention recomputes scores in its backward pass (Dao et al. 2022)
        if layout.stages == 1:
            return cls(layout, counts, config.accumulate, 1.0, 0.0)
        schedule = layout.schedule
        groups = [(repeats, len(windows)) for windows, repeats in model.runs]
        assigned = assign(*zip(*groups, strict=True), layout.stages, schedule.chunks_per_stage, schedule.placement)
        copies = sum(index.size * weight for index, (_, weight) in zip(assigned.index, groups, strict=True))
        parts = schedule.microbatches_of(layout.stages, config.micro_batch, layout.split("batch"))
        counts = {name: n + (name != "logits") for name, n in counts.items()}  # a backward phase recomputes its stage
        forward = model.product_flops(config.batch_size, config.seq_len)
        layers = sum(forward.values()) - forward["logits"]
        made = sum(forward[name] * n for name, n in counts.items() if name != "logits")
        alone = layout.stages * math.prod(layout.sizes[m] for m in replicas_of(*describe_model(model), layout))
        bubble = _bubble(schedule, layout.stages, parts, made / layers, layout.devices == alone)
        return cls(layout, counts, config.accumulate * parts, copies / model.depth, bubble)

    def passes(self, name: str) -> int:
        """Number of passes of a product: forward, two gradients, and recomputation."""
        return 3 + self.again[name]

    def share(self, *dims: str | Width) -> float:
        """Fraction of an array with these dimensions that is on one device, including the padding of stages."""
        over = set[str]()
        for d in dims:
            axis, size = (d.axis, d.size) if isinstance(d, Width) else (d, None)
            over.update(self.layout.cut(axis, size=size))
        if "layers" in dims:
            over.update(self.layout.resolved_rules.target("params", "layers"))
        return (self.padding if "layers" in dims else 1.0) / math.prod(self.layout.sizes[m] for m in over)

    def share_of(self, product: Product, *axes: str) -> float:
        """Fraction on one device of a product's sharded operand, which also has the dimensions `axes`."""
        sizes = [p.size * p.columns for p in product.parts]
        return sum(n * self.share(*axes, p) for n, p in zip(sizes, product.parts, strict=True)) / sum(sizes)


@functools.lru_cache(1024)
def _bubble(schedule: Pipeline, stages: int, microbatches: int, again: float, alone: bool) -> float:
    """Idle fraction of a stage's time, if a backward phase recomputes a fraction `again` of its forward products."""
    simulated = simulate(schedule.table(stages, microbatches), (1.0, 1.0 + again, 1.0))
    return simulated.bubble if alone else simulated.lockstep_bubble  # collectives inside layers keep stages in lockstep


def _multiplied(config: TrainConfig, at: _Place, slowest: SlowestRows) -> list[Op]:
    model: TransformerConfig = config.model  # type: ignore[assignment]
    size, tokens = jnp.dtype(model.dtype).itemsize, config.batch_size * config.seq_len
    ops = []
    for p in products(model, config.seq_len):
        depth = () if p.name == "logits" else ("layers",)
        spread = ("expert_batch", "expert_seq", "experts") if p.weights > 1 else ("batch", "seq")
        used, multiplied = (slowest.used, slowest.multiplied) if p.weights > 1 else (1.0, 1.0)
        rows = tokens * p.rows * used
        whole = {"inner": rows * p.inner, "outer": rows * p.outer}
        cut = at.share_of(p, *spread, *depth)
        plain = at.share(*spread, *depth)
        moved = sum(n * (cut if name == p.side else plain) for name, n in whole.items())
        experts = ("experts",) if p.weights > 1 else ()
        moved += at.parts * p.weights * p.inner * p.outer * at.share_of(p, *experts, *depth)
        ops.append(
            Op(
                p.name,
                "experts" if p.weights > 1 else "matmul",
                tokens * p.flops * multiplied * cut * at.passes(p.name),
                p.layers * moved * size * at.passes(p.name),
                model.dtype,
                p.name != "logits",
            )
        )
    return ops


def _attended(config: TrainConfig, at: _Place) -> list[Op]:
    """Attention's own products. Only dense attention computes pairs that a causal mask hides, and writes all scores."""
    model: TransformerConfig = config.model  # type: ignore[assignment]
    z, size = model.sizes, jnp.dtype(model.dtype).itemsize
    batch, seq = config.batch_size, config.seq_len
    share = at.share("batch", "seq", "heads", "layers")
    pairs = model.depth * batch * z.heads * seq * seq
    made = {name: float(n) for name, n in model.product_flops(batch, seq).items()}
    width = {"scores": z.head_dim, "attn_out": z.value_dim}
    rows = batch * seq * model.depth * size
    keys = key_heads_read(z.heads // at.layout.split("heads"), z.heads // z.kv_heads)  # for one device's queries
    heads = z.heads * share + keys * at.share("batch", "seq", "layers")
    streamed = {name: rows * heads * d for name, d in width.items()}
    if model.attention is not dot_product_attention:
        return [
            Op(
                name,
                "attention",
                made[name] * share * at.passes(name),
                n * at.passes(name),
                model.dtype,
                width=width[name],
            )
            for name, n in streamed.items()
        ]
    written = {"scores": FLOAT32 * pairs, "attn_out": size * pairs}
    ops = [
        Op(
            name,
            "attention",
            2 * pairs * width[name] * share * at.passes(name),
            (streamed[name] + bytes_written * share) * at.passes(name),
            model.dtype,
            width=width[name],
        )
        for name, bytes_written in written.items()
    ]
    softmax = (FLOAT32 + size) * pairs * share * at.passes("scores")
    return [*ops, Op("softmax", "memory", 0, softmax, model.dtype)]


def _between(config: TrainConfig, at: _Place, held: float) -> list[Op]:
    """Operations between products: elements that a fused pass reads and writes, in the forward and backward passes."""
    model: TransformerConfig = config.model  # type: ignore[assignment]
    z, size = model.sizes, jnp.dtype(model.dtype).itemsize
    tokens = config.batch_size * config.seq_len
    stream = tokens * z.width * model.depth * at.share("batch", "residual_seq", "layers")
    rotated = (Width("heads", z.heads), Width("kv_heads", z.kv_heads))
    heads = sum(p.size * at.share("batch", "seq", p, "layers") for p in rotated) * tokens * z.rotary_dim * model.depth
    rotated_layers = sum(layer.rotary for layer in model.layer_specs())
    norms = (1 if model.parallel else 2) * model.pre_norm + 2 * model.post_norm
    again = at.again["mlp_up"]  # recomputing the hidden layer recomputes everything before it
    elements = {
        "norms": 4 * norms * stream,  # read a branch and the stream, write their sum and its norm
        "rotary": 2 * heads * rotated_layers / model.depth if model.positions is not None else 0.0,
        "gates": 0.0,
        "dispatch": 0.0,
    }
    gates = 1
    for p in products(model, config.seq_len):
        if p.name == "mlp_up":  # before its "mlp_down"
            gates = sum(part.columns for part in p.parts)
        if p.name == "mlp_down":
            spread = ("expert_batch", "expert_seq", "experts") if p.weights > 1 else ("batch", "seq")
            rows = tokens * p.rows * p.layers * at.share(*spread, "layers") * (held if p.weights > 1 else 1.0)
            elements["gates"] += (gates + 1) * rows * p.inner * at.share_of(p, *spread) / at.share(*spread)
            elements["dispatch"] += 4 * rows * z.width if p.weights > 1 else 0.0  # sent to experts and back
    ops = [Op(name, "memory", 0, n * size * (3 + again), model.dtype) for name, n in elements.items()]
    logits = tokens * model.vocab * at.share("batch", "seq", "vocab")
    # Logits are read by the softmax and for its gradient, which is written and read.
    return [*ops, Op("loss", "memory", 0, 4 * FLOAT32 * logits, model.dtype, False)]


def _update(config: TrainConfig, memory: Estimate) -> Op:
    """The optimizer's update: state is read and written, gradients are written, read for their norm, and read.

    It includes sums of gradients over micro-batches, and casts of weights to the compute dtype.
    """
    sums = 3 * (config.accumulate - 1) * memory.gradients // 2 if config.accumulate > 1 else 0
    moved = 2 * memory.state + 3 * memory.gradients + sums + 3 * memory.copies
    dtype = config.model.dtype  # type: ignore[attr-defined]
    return Op("update", "memory", 0, moved, dtype, staged=False, optimizer=True)
