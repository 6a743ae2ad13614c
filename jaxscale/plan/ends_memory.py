"""The buffers of a model's two ends in the order of a step: embedding, loss, and their gradients on the way to sums."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from jaxscale.hardware import Topology
from jaxscale.layout import Layout, TensorInfo
from jaxscale.nn import MemoryPolicy
from jaxscale.plan.heap import Buffer, SteadyHeap
from jaxscale.plan.layer_memory import Weight, copied_bytes, local_bytes
from jaxscale.step import Loss
from jaxscale.step.loss import holds_logits


@dataclasses.dataclass(frozen=True)
class Sums:
    """How a compiler adds gradients up over devices.

    Args:
      whole: it leaves all of the sum on each device, which then cuts its own piece out.
      late: sums of tables wait for the end of the step.
      padded: it gathers by adding up pieces that are padded with zeros.
    """

    whole: bool
    late: bool
    padded: bool

    @classmethod
    def of(cls, model: Any, topology: Topology, layout: Layout) -> Sums:
        """As XLA for TPUs was seen to, over the devices that cut gradients.

        All of a slice of more than 8 chips (v5e, v6e) or 4 (others) make a reduce-scatter an all-reduce, and all of a
        torus of 4 x 4 x 4 a gather as well. A v5p's tables are summed at the end; a v5e's and a v6e's at once, unless
        something is moved to host memory, or eight chips are all there are: those wait from some depth on (8 layers of
        8B's width), and are taken to wait always. Of v6e:2x4 a vocabulary of 151,936 or 256,000 was seen to be an
        all-reduce, 128,256 a reduce-scatter; why was not found.
        """
        offloads = bool(MemoryPolicy.of(model.memory).offload)
        tpu = topology.chip.platform == "tpu"
        by_eight = topology.chip.name in ("v5e", "v6e")
        all_of_it = tpu and layout.split("embed", "grads") == topology.devices > 4
        whole = all_of_it and not (by_eight and topology.devices <= 8)
        deep = sum(n > 2 for n in topology.shape) > 2
        return cls(whole, offloads or not by_eight or (all_of_it and not whole), whole and deep)


@dataclasses.dataclass(frozen=True)
class Ends:
    """A model's two ends on one device.

    A table that devices split and a batch that they split as well make a gradient of the whole table on each of them,
    which is summed, and then cut.

    Args:
      embedding, head: the tables; one and the same where they are tied.
      tied: whether they are.
      cast: of a table, its own piece in the type of the arithmetic, before it is gathered.
      stream: what the loss is given.
      residual: the same as it is cut between layers.
      logits: float32, where they are held.
      size: bytes of a number in the arithmetic.
      summed: devices that hold other tokens sum their gradients.
      sums: how.
      early: a head of its own is gathered before anything else, as where nothing has to be cast first and nothing is
        updated.
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
        cls, model: Any, tables: list[TensorInfo], layout: Layout, loss: Loss, rows: int, seq: int, sums: Sums
    ) -> Ends:
        """Of a model whose tables over the vocabulary are `tables`, for so many rows."""
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
        """The same where no step changes the tables."""
        embedding, head = self.embedding.frozen(), self.head.frozen()
        return dataclasses.replace(self, embedding=embedding, head=head, early=not self.cast and not self.tied)

    @property
    def kept(self) -> int:
        """Bytes of the tables' gradients once they are cut."""
        return self.head.kept + (0 if self.tied else self.embedding.kept)

    def look_up(self, heap: SteadyHeap, *, at_once: bool = False) -> list[Buffer]:
        """Tokens to vectors; returns what the loss reads as well.

        A tied table is gathered once, and copied as the loss wants it laid out; if each end is `at_once` done with,
        twice.
        """
        early = [self._gather(heap, "head", self.head)] if self.early else []
        table = self._gather(heap, "embedding", self.embedding)
        kept = self.tied and not at_once and table.size
        shared = [table, heap.take("head, as the loss reads it", table.size)] if kept else []
        heap.drop(heap.take("looked up", self.stream))
        if not shared:
            heap.drop(table)
        return [*early, *shared]

    def lose(self, heap: SteadyHeap, shared: Sequence[Buffer] = (), *, at_once: bool = False) -> list[Buffer]:
        """The loss, forward and backward, with what `look_up` left; returns what waits for the end.

        That of held logits is made there, unless `at_once`; another is made here, and waits for its sum if that leaves
        all of it on each device.
        """
        wide = self.stream * 4 // self.size
        norm = self.residual * 4 // self.size
        held = [heap.take("what the last norm is given, float32", norm), heap.take("hidden", self.stream)]
        held += shared or [self._gather(heap, "head", self.head)]
        held.append(heap.take("logits", self.logits))
        if self.logits and not at_once:
            waiting = [heap.take("logits' cotangent", self.logits * self.size // 4)]
            waiting.append(heap.take("hidden, float32", norm))
            heap.drop(*held)
            return waiting
        gradient = heap.take("head's gradient", self.head.made, "gradient")
        held.append(heap.take("hidden's gradient, float32", 0 if self.logits else wide))
        heap.drop(*held)
        if self._waits(self.head) or not self.summed:
            return [gradient]
        piece = heap.take("head's gradient, summed", self.head.kept)
        heap.drop(gradient)
        return [piece]

    def _gather(self, heap: SteadyHeap, name: str, table: Weight) -> Buffer:
        """A table as it is used, from the pieces of it."""
        pieces = [heap.take(f"{name}, cast", self.cast)]
        pieces.append(heap.take(f"{name}, padded", table.used if self.sums.padded else 0))
        # padded pieces and their sum, both in the type of the arithmetic, leave room for a gradient in float32
        gathered = heap.take(f"{name}, gathered", table.used, "gradient" if self.sums.padded else "table")
        heap.drop(*pieces)
        return gathered

    def finish(self, heap: SteadyHeap, waiting: Sequence[Buffer]) -> None:
        """The embedding's gradient, the head's if it is not there, and their sums over devices.

        Args:
          heap: where they go.
          waiting: what `lose` returned; empty where the head is done with.
        """
        stream = heap.take("the stream's cotangent, float32", self.stream * 4 // self.size)
        left = [heap.take("embedding's gradient", self.embedding.made, "gradient")]
        heap.drop(stream)
        if waiting and waiting[0].what == "logits' cotangent":
            made = [heap.take("head's gradient", self.head.made, "gradient")]
            heap.drop(*waiting)
            waiting = made
            late = True
        else:
            late = bool(waiting) and self._waits(self.head)
        if self.tied:  # one gradient, of which the second part is added to the first
            left, waiting = [*left, *waiting], []
        if self.summed:
            left = [self._sum(heap, self.embedding, left)]
            if waiting and late:
                waiting = [self._sum(heap, self.head, waiting)]
        heap.drop(*left, *waiting)

    def _sum(self, heap: SteadyHeap, table: Weight, made: Sequence[Buffer]) -> Buffer:
        """What is there after the sum over devices of a table's gradient, in place of the gradient itself."""
        size, place = (table.made, "gradient") if self.sums.whole else (table.kept, "")
        summed = heap.take("a table's gradient, summed", size, place)
        heap.drop(*made)
        return summed

    def _waits(self, table: Weight) -> bool:
        return self.summed and (self.tied or self.sums.late or self.sums.whole or table.made == table.kept)
