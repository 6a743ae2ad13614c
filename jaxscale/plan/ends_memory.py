"""Memory of embedding and loss: their buffers in the order of a step, up to the sums of the tables' gradients."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax.numpy as jnp

from jaxscale.hardware import Topology
from jaxscale.layout import Layout, TensorInfo
from jaxscale.models import TransformerConfig
from jaxscale.nn import MemoryPolicy
from jaxscale.plan.heap import Buffer, SteadyHeap
from jaxscale.plan.layer_memory import Weight, copied_bytes, local_bytes
from jaxscale.step import Loss
from jaxscale.step.loss import holds_logits


@dataclasses.dataclass(frozen=True)
class Sums:
    """How a compiler sums gradients over devices.

    Args:
      whole: by an all-reduce, from which each device slices its shard, in place of a reduce-scatter.
      late: gradients of tables over the vocabulary are summed at the end of the step.
      padded: an all-gather is an all-reduce of shards that are padded with zeros.
    """

    whole: bool
    late: bool
    padded: bool

    @classmethod
    def of(cls, model: TransformerConfig, topology: Topology, layout: Layout) -> Sums:
        """Return what XLA for TPUs does, as observed in compiled programs, over the devices that shard gradients.

        Over all chips of a slice of more than 8 (v5e, v6e) or 4 (others), a reduce-scatter becomes an all-reduce; over
        all of a torus of at least 4 x 4 x 4, so does an all-gather. On v5p tables are summed at the end of the step; on
        v5e and v6e at once, unless something is offloaded to host memory or gradients are sharded over all of eight
        chips: those wait from some depth on (8 layers of 8B's width), and are assumed to wait always. On v6e:2x4 the
        gradient of a vocabulary of 151,936 or 256,000 took an all-reduce and that of 128,256 a reduce-scatter, for
        unknown reasons.

        Args:
          model: a `TransformerConfig`.
          topology: the hardware.
          layout: the run's layout, every size of its mesh known.
        """
        offloads = bool(MemoryPolicy.of(model.memory).offload)
        tpu = topology.chip.platform == "tpu"
        by_eight = topology.chip.name in ("v5e", "v6e")
        over_all = tpu and layout.split("embed", "grads") == topology.devices > 4
        whole = over_all and not (by_eight and topology.devices <= 8)
        deep = sum(n > 2 for n in topology.shape) > 2
        return cls(whole, offloads or not by_eight or (over_all and not whole), whole and deep)


@dataclasses.dataclass(frozen=True)
class Ends:
    """Embedding and output head on one device; all sizes in bytes.

    Where devices shard a table as well as the batch, each computes a gradient of the whole table. It is summed over
    devices, then sliced.

    Args:
      embedding, head: the tables; the same one where they are tied.
      tied: whether they are tied.
      cast: the shard of a table cast to the computation's dtype, before it is gathered; 0 where nothing is cast.
      stream: the loss's input, in the computation's dtype.
      residual: the same array as it is sharded between layers.
      logits: float32 logits, where the loss holds them; else 0.
      size: bytes of one number in the computation's dtype.
      summed: whether devices have different tokens, so that they sum their gradients.
      sums: how they do.
      early: whether the head is gathered before anything else: the tables are frozen, not tied and not cast.
    """

    embedding: Weight
    head: Weight
    tied: bool
    cast: int
    stream: int
    residual: int
    logits: int
    size: int
    summed: bool
    sums: Sums
    early: bool = False

    @classmethod
    def of(
        cls,
        model: TransformerConfig,
        tables: list[TensorInfo],
        layout: Layout,
        loss: Loss,
        rows: int,
        seq: int,
        sums: Sums,
    ) -> Ends:
        """Return the ends of a model.

        Args:
          model: a `TransformerConfig`.
          tables: its parameters over the vocabulary, the embedding first.
          layout: the run's layout, every size of its mesh known.
          loss: the loss.
          rows: rows of a micro-batch, over all devices.
          seq: tokens of a row.
          sums: how the compiler sums gradients.
        """
        weights = [Weight.of(i, layout, model.dtype) for i in tables]
        shape = (rows, seq, model.vocab)
        logits = TensorInfo("logits", shape, jnp.dtype("float32"), ("batch", "seq", "vocab"))
        stream = TensorInfo("hidden", (rows, seq, model.sizes.width), jnp.dtype(model.dtype), ("batch", "seq", "embed"))
        return cls(
            weights[0],
            weights[-1],
            len(tables) == 1,
            copied_bytes(tables[0], layout, model.dtype),
            local_bytes(stream, layout),
            local_bytes(dataclasses.replace(stream, axes=("batch", "residual_seq", "embed")), layout),
            local_bytes(logits, layout) if holds_logits(loss) else 0,
            jnp.dtype(model.dtype).itemsize,
            layout.split("batch") * layout.split("seq") > 1,
            sums,
        )

    def frozen(self) -> Ends:
        """Return the ends with frozen tables."""
        embedding, head = self.embedding.frozen(), self.head.frozen()
        return dataclasses.replace(self, embedding=embedding, head=head, early=not self.cast and not self.tied)

    @property
    def reduced(self) -> int:
        """Bytes of the tables' gradients after their sums over devices."""
        return self.head.reduced + (0 if self.tied else self.embedding.reduced)

    def look_up(self, heap: SteadyHeap, *, at_once: bool = False) -> list[Buffer]:
        """Allocate and free the buffers of the embedding lookup.

        A tied table is gathered once, and copied to the layout that the loss reads.

        Args:
          heap: the memory.
          at_once: whether each end frees its buffers before the next begins, as in a pipeline; a tied table is then
            gathered twice.

        Returns:
          buffers that the loss reads, for `loss`.
        """
        early = [self._gather(heap, "head", self.head)] if self.early else []
        table = self._gather(heap, "embedding", self.embedding)
        shares = self.tied and not at_once and table.size
        shared = [table, heap.take("head, as the loss reads it", table.size)] if shares else []
        heap.drop(heap.take("embeddings of tokens", self.stream))
        if not shared:
            heap.drop(table)
        return [*early, *shared]

    def loss(self, heap: SteadyHeap, shared: Sequence[Buffer] = (), *, at_once: bool = False) -> list[Buffer]:
        """Allocate and free the buffers of the loss's forward and backward pass.

        Args:
          heap: the memory.
          shared: what `look_up` returned.
          at_once: whether the head's gradient is computed at once also where the loss holds logits.

        Returns:
          buffers that live until `finish`: the head's gradient or, where the loss holds logits and not `at_once`, what
          its gradient is computed from.
        """
        wide = self.stream * 4 // self.size
        norm = self.residual * 4 // self.size
        held = [heap.take("input of the last norm, float32", norm), heap.take("hidden", self.stream)]
        held += shared or [self._gather(heap, "head", self.head)]
        held.append(heap.take("logits", self.logits))
        if self.logits and not at_once:
            waiting = [heap.take("logits' cotangent", self.logits * self.size // 4)]
            waiting.append(heap.take("hidden, float32", norm))
            heap.drop(*held)
            return waiting
        gradient = heap.take("head's gradient", self.head.gradient, "gradient")
        held.append(heap.take("hidden's gradient, float32", 0 if self.logits else wide))
        heap.drop(*held)
        if self._waits(self.head) or not self.summed:
            return [gradient]
        shard = heap.take("head's gradient, summed", self.head.reduced)
        heap.drop(gradient)
        return [shard]

    def _gather(self, heap: SteadyHeap, name: str, table: Weight) -> Buffer:
        """Return the buffer of a gathered table."""
        shards = [heap.take(f"{name}, cast", self.cast)]
        shards.append(heap.take(f"{name}, padded", table.used if self.sums.padded else 0))
        # a padded shard and the sum, both in the computation's dtype, leave enough memory for a float32 gradient
        gathered = heap.take(f"{name}, gathered", table.used, "gradient" if self.sums.padded else "table")
        heap.drop(*shards)
        return gathered

    def finish(self, heap: SteadyHeap, waiting: Sequence[Buffer]) -> None:
        """Allocate and free the embedding's gradient, the head's if not yet computed, and their sums over devices.

        Args:
          heap: the memory.
          waiting: what `loss` returned; empty where the head's gradient is complete.
        """
        stream = heap.take("the stream's cotangent, float32", self.stream * 4 // self.size)
        gradients = [heap.take("embedding's gradient", self.embedding.gradient, "gradient")]
        heap.drop(stream)
        if waiting and waiting[0].what == "logits' cotangent":
            gradient = heap.take("head's gradient", self.head.gradient, "gradient")
            heap.drop(*waiting)
            waiting = [gradient]
            late = True
        else:
            late = bool(waiting) and self._waits(self.head)
        if self.tied:  # the two parts of one gradient are added
            gradients, waiting = [*gradients, *waiting], []
        if self.summed:
            gradients = [self._sum(heap, self.embedding, gradients)]
            if waiting and late:
                waiting = [self._sum(heap, self.head, waiting)]
        heap.drop(*gradients, *waiting)

    def _sum(self, heap: SteadyHeap, table: Weight, gradients: Sequence[Buffer]) -> Buffer:
        """Replace the buffers of a table's gradient by that of its sum over devices."""
        size, place = (table.gradient, "gradient") if self.sums.whole else (table.reduced, "")
        summed = heap.take("a table's gradient, summed", size, place)
        heap.drop(*gradients)
        return summed

    def _waits(self, table: Weight) -> bool:
        """Return whether a table's gradient is summed at the end of the step only."""
        return self.summed and (self.tied or self.sums.late or self.sums.whole or table.gradient == table.reduced)
