"""What a training step has to send, by arithmetic on names and rules: no compiler, no devices.

A layout says how a parameter lies where it is kept, where it is used and where its gradient goes; a product says what
of its result is yet to be summed (`jaxscale.layout.boxing`). Every collective is what brings one to the next.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp

from jaxscale.errors import ConfigError
from jaxscale.hardware import Topology, topology
from jaxscale.layout import Boxes, Layout, TensorInfo, as_used
from jaxscale.layout.table import B, F, Table
from jaxscale.nn.reversible import ReversibleRun
from jaxscale.parallel.pipeline import assign
from jaxscale.plan.attention_moves import deals_out
from jaxscale.plan.block_moves import Blocks
from jaxscale.plan.collectives import Collective
from jaxscale.plan.covered import covered
from jaxscale.plan.moves import Mover
from jaxscale.step import TrainConfig, blueprint_of, replicas_of, token_loss
from jaxscale.step.loss import holds_logits

Tree = Any
_STAGES = "pipeline"


def predict(config: TrainConfig, hardware: str | Topology, *, every_branch: bool = False) -> list[Collective]:
    """Every collective that a run's layout demands of a training step; `name` says what for.

    These are the rules' demands. A compiler may put others in their place, joins small ones, and moves a few scalars
    besides (`experiments/planner_accuracy/COMMUNICATION.md` compares). A ragged exchange of experts' tokens is
    counted as routers send it that drop nothing.

    Args:
      config: the run's settings, with a layout.
      hardware: a topology or its name, as "v5p:8x8x8"; only the number of its devices matters, and whether it is a TPU.
      every_branch: count a pipeline's branches at every tick, as a compiled program's text has them, and not only at
        the ticks that take them.

    Returns:
      a `Collective` for each, with no source line.

    Raises:
      ConfigError: a run without a layout, or a model whose layers are not known here.
      LayoutError: what cannot be laid out, or an unknown topology.
    """
    if config.layout is None:
        raise ConfigError("a run with layout=None is for one local device; give it Layout('data=1') to plan it")
    covered(config)
    there = topology(hardware) if isinstance(hardware, str) else hardware
    layout = sized(config.layout, there.devices)
    blueprint, _ = blueprint_of(dataclasses.replace(config, layout=layout))
    replicas = replicas_of(blueprint.graphdef, blueprint.infos, layout) if layout.stages > 1 else ()
    step = _Step(config, layout, blueprint.infos, replicas, there.chip.platform == "tpu", every_branch)
    parts = (
        step.arranged, step.layers, step.embeddings, step.head, step.stages, step.over_replicas, step.update,
        step.scalars,
    )  # fmt: skip
    return [c for part in parts for c in part()]


def sized(layout: Layout, devices: int) -> Layout:
    """A layout whose sizes are known, without devices; of its mesh's -1, they are what is left of so many.

    Raises:
      LayoutError: a mesh that needs more, or a -1 that they do not fill.
    """
    return layout.abstract(devices)


@dataclasses.dataclass(frozen=True)
class _Step:
    """A training step, part by part; arguments as `predict`, with a `TensorInfo` per parameter.

    `replicas` are the mesh axes over which a pipeline sums gradients after its last micro-batch.
    """

    config: TrainConfig
    layout: Layout
    infos: Tree
    replicas: tuple[str, ...]
    ragged: bool
    every_branch: bool

    # --- how often ---

    @property
    def _table(self) -> Table | None:
        """The pipeline's, if there is one."""
        if self.layout.stages == 1:
            return None
        schedule, rows = self.layout.schedule, self.config.micro_batch
        split = self.layout.split("batch")
        return schedule.table(self.layout.stages, schedule.microbatches_of(self.layout.stages, rows, split))

    @property
    def _rows(self) -> int:
        """Rows of a micro-batch, of accumulation's and of the pipeline's, that its replicas work at together."""
        parts = 1 if self._table is None else self._table.microbatches
        return self.config.micro_batch // parts // Mover(self.layout).devices(self.replicas)

    def _ticks(self, phase: int) -> int:
        """In how many ticks of a pipeline layers run this phase, on all devices together."""
        table = self._table
        assert table is not None
        entered = int((table.slots[..., phase] >= 0).any(axis=1).sum())
        return self.config.accumulate * (len(table.slots) if self.every_branch else entered)

    @property
    def _ends(self) -> int:
        """How often the embedding and the head run."""
        table = self._table
        if table is None:
            return self.config.accumulate
        return self.config.accumulate * (len(table.slots) if self.every_branch else table.microbatches)

    def _blocks(self, forward: int, backward: int, looped: bool = True) -> Blocks:
        manual = frozenset() if self._table is None else frozenset({_STAGES, *self.replicas})
        config = self.config
        return Blocks(
            Mover(self.layout, manual), config.model, self._rows, config.seq_len, forward, backward, config.segments,
            config.accumulate if self._table is None else 1, looped, self.ragged,
        )  # fmt: skip

    # --- layers ---

    def arranged(self) -> list[Collective]:
        """Tokens and what goes with them, in the order in which an attention wants a sequence that is cut.

        The partitioner takes columns out of whole rows.
        """
        mover, config = Mover(self.layout), self.config
        over = mover.over("seq")
        if not deals_out(config.model.attention, mover.devices(over)):  # type: ignore[attr-defined]
            return []
        rows = TensorInfo("rows", (config.micro_batch, config.seq_len), jnp.dtype("int32"), ("batch", None))
        given = 5 if config.segments else 3  # tokens, targets, weights, and documents and positions
        size, times = mover.local_bytes(rows), config.accumulate
        return given * mover.send("all-gather", over, size, times, "rows gathered, to be dealt out anew")

    def layers(self) -> list[Collective]:
        """Every block of every run, its gradients' sums included."""
        model: Any = self.config.model
        forward, backward = self._passes
        found = []
        for n, run in enumerate(self.infos["runs"].values()):
            windows, repeats = model.runs[n]
            copies = repeats if self._table is None else self._assigned.index[n].shape[-1]
            blocks = self._blocks(forward * copies, backward * copies, looped=copies > 1 or model.scan is False)
            for j, block in enumerate(run["blocks"].values()):
                found += blocks.block(block, windows[j], last=j == len(windows) - 1)
        return found

    @property
    def _passes(self) -> tuple[int, int]:
        """How often a device runs its layers forward, and backward. A pipeline's backward phase does both."""
        if self._table is None:
            return self.config.accumulate, self.config.accumulate
        return self._ticks(F) + self._ticks(B), self._ticks(B)

    @property
    def _assigned(self) -> Any:
        repeats, weights = zip(*((n, len(group)) for group, n in self.config.model.runs), strict=True)  # type: ignore[attr-defined]
        return assign(repeats, weights, self.layout.stages, self.layout.schedule.chunks_per_stage)

    # --- the vocabulary's two ends ---

    def embeddings(self) -> list[Collective]:
        """Tables that are looked up: of tokens, and of positions that are learned."""
        found = []
        for name in ("embed", "positions"):
            if name in self.infos:
                found += self._lookup(self.infos[name]["weight"])
        found += [c for i in jax.tree.leaves(self.infos["embed"]) if len(i.axes) == 1 for c in self._ending.vector(i)]
        return found

    @property
    def _ending(self) -> Blocks:
        return self._blocks(self._ends, self._ends)

    def _lookup(self, table: TensorInfo) -> list[Collective]:
        blocks, local = self._ending, self._local(table)
        mover, tokens = blocks.mover, blocks.mover.over("batch", "seq")
        whole, cut = blocks.stream("seq"), blocks.stream()
        inside, between = mover.boxes(whole), mover.boxes(cut)
        rows = Boxes(inside.split, frozenset(mover.over(table.axes[0])))
        found = mover.change(whole, rows, between, self._ends, "looked-up rows summed")
        found += mover.change(cut, between, inside, self._ends, "looked-up rows, their cotangent gathered")
        if self._cut_by_stages(table):
            found += self._over_stages(cut, "looked-up rows summed over stages", bool(mover.over("vocab")))
        gradient = dataclasses.replace(local, dtype=jnp.promote_types(local.dtype, jnp.float32))
        left = Boxes(mover.boxes(gradient).split, frozenset(tokens))
        weights = blocks.kernel(gradient, left, "the embedding", once=True)
        return found + weights

    def head(self) -> list[Collective]:
        """From the last block to the loss, and back."""
        blocks = self._ending
        mover, tied = blocks.mover, "head" not in self.infos
        weight = self._local(self.infos["embed" if tied else "head"]["weight"])
        whole, cut = blocks.stream("seq"), blocks.stream()
        inside, between = mover.boxes(whole), mover.boxes(cut)
        found = mover.change(cut, between, inside, self._ends, "the last block's output gathered")
        vocab = mover.over("vocab")
        left = Boxes(mover.boxes(weight).split, frozenset(mover.over("batch", "seq")))
        if tied:
            found += blocks.gradient(weight, left, "the head", once=True)
        else:
            found += blocks.kernel(weight, left, "the head", once=True)
        for info in jax.tree.leaves(self.infos["norm"]):
            found += blocks.vector(info)
        stages = (_STAGES,) if self._cut_by_stages(self.infos["embed" if tied else "head"]["weight"]) else ()
        numbers = TensorInfo("a number a token", (blocks.rows, blocks.seq), jnp.dtype("float32"), ("batch", "seq"))
        every = mover.local_bytes(numbers)
        if not holds_logits(token_loss(self.config)):
            over = (*stages, *vocab)
            found += mover.send("all-gather", over, 3 * every * mover.devices(over), self._ends, "the loss's parts")
            return found + mover.summed(whole, over, self._ends, "the head's input, its cotangent summed")
        # the largest logit, the sum of exponentials and the target's logit
        found += 3 * mover.send("all-reduce", vocab, every, self._ends, "the loss's parts")
        terms = Boxes(inside.split, frozenset(vocab))
        found += mover.change(cut, terms, between, self._ends, "the head's input, its cotangent summed")
        if stages:
            # the partitioner makes what stages gather whole along all that is not theirs
            pairs, tokens = 2 * numbers.nbytes, mover.over("batch", "seq")
            found += mover.send("all-gather", tokens, pairs, self._ends, "the loss's parts, for all stages")
            found += mover.send(
                "all-gather", stages, pairs * mover.devices(stages), self._ends, "the loss's parts over stages"
            )
            found += mover.send("all-reduce", stages, every, self._ends, "the target's logit over stages")
            found += self._over_stages(whole, "the head's input, its cotangent over stages", bool(vocab))
        return found

    def _local(self, table: TensorInfo) -> TensorInfo:
        """A table's part on a stage."""
        if not self._cut_by_stages(table):
            return table
        rows, *rest = as_used(table, self.layout).shape
        return dataclasses.replace(table, shape=(rows // self.layout.stages, *rest))

    def _cut_by_stages(self, table: TensorInfo) -> bool:
        return self.layout.stages > 1 and _STAGES in self.layout.resolved_rules.target(
            "activations", str(table.axes[0])
        )

    def _over_stages(self, stream: TensorInfo, name: str, summed: bool = False) -> list[Collective]:
        """A sum over stages, in float32; of what was `summed` over other axes just before, as narrow as that was."""
        wide = stream if summed else dataclasses.replace(stream, dtype=jnp.dtype("float32"))
        return self._ending.mover.summed(wide, (_STAGES,), self._ends, name)

    # --- stages ---

    def stages(self) -> list[Collective]:
        """What goes from stage to stage, and from the last to all."""
        table = self._table
        if table is None:
            return []
        stream = self._ending.stream()
        mover, ticks = self._ending.mover, self.config.accumulate * len(table.slots)
        reversible = issubclass(self.config.model.stack, ReversibleRun)  # type: ignore[attr-defined]
        if reversible:
            stream = dataclasses.replace(stream, dtype=jnp.dtype("float32"))
        found = []
        for way in ("streams to the next stage", "cotangents to the stage before"):
            found += (1 + reversible) * mover.send(
                "collective-permute", (_STAGES,), mover.local_bytes(stream), ticks, way
            )
        found += (1 + reversible) * self._over_stages(stream, "the last stage's output to all")
        found += (1 + reversible) * self._over_stages(stream, "the first stage's cotangent to all")
        for n, run in enumerate(self.infos["runs"].values()):
            if not self._assigned.in_place(n):
                found += self._dealt_out(run)
        return found + self._tables_to_rows()

    def _dealt_out(self, run: Tree) -> list[Collective]:
        """A stack that does not lie stage after stage, brought to its stages, and its gradient back."""
        whole = Mover(self.layout)
        found = []
        for info in jax.tree.leaves(run):
            held = whole.local_bytes(info, "params")
            found += whole.send("all-to-all", (_STAGES,), held, 1, "layers to their stages")
            back = whole.local_bytes(dataclasses.replace(info, dtype=jnp.dtype("float32")), "grads")
            found += whole.send("all-to-all", (_STAGES,), back, 1, "layers' gradients back")
        return found

    def _tables_to_rows(self) -> list[Collective]:
        """Tables whose vocabulary devices do not divide, to the rows that stages use, and their gradients back."""
        whole, found = Mover(self.layout), []
        for info in jax.tree.leaves({name: i for name, i in self.infos.items() if name != "runs"}):
            if (used := whole.used(info)) is info:
                continue
            back, times = dataclasses.replace(used, dtype=jnp.dtype("float32")), self.config.accumulate
            for kind, sent, name in (("params", used, "tables to their rows"), ("grads", back, "their gradients back")):
                over = whole.over("vocab", kind=kind)  # type: ignore[arg-type]
                found += whole.send("all-to-all", over, whole.local_bytes(sent, kind), times, name)  # type: ignore[arg-type]
        return found

    def over_replicas(self) -> list[Collective]:
        """Gradients that each replica of the stages has added up, to where they go."""
        if not self.replicas:
            return []
        ours, found = Mover(self.layout, frozenset({_STAGES})), []
        for info in self._of_a_stage():
            wide = dataclasses.replace(info, dtype=jnp.dtype("float32"))
            before = Boxes(self._ending.mover.boxes(wide, "grads").split, frozenset(self.replicas))
            found += ours.change(
                wide, before, ours.boxes(wide, "grads"), self.config.accumulate, "gradients summed over replicas"
            )
        return found

    def _of_a_stage(self) -> list[TensorInfo]:
        """A stage's parameters, padding included, with what of the vocabulary is its own."""
        held = []
        for index, run in zip(self._assigned.index, self.infos["runs"].values(), strict=True):
            copies = index.shape[1] * index.shape[2]
            held += [dataclasses.replace(i, shape=(copies, *i.shape[1:])) for i in jax.tree.leaves(run)]
        ends = jax.tree.leaves({name: i for name, i in self.infos.items() if name != "runs"})
        return [*held, *map(self._local, ends)]

    # --- the update ---

    def update(self) -> list[Collective]:
        """Gradients to where the optimizer's state is, and parameters from there to where they are kept."""
        mover = Mover(self.layout)
        found = []
        for info in jax.tree.leaves(self.infos):
            kept, state, grads = (mover.boxes(info, k) for k in ("params", "opt_state", "grads"))
            found += mover.change(info, grads, state, 1, "gradients to the optimizer's state")
            found += mover.change(info, state, kept, 1, "updated parameters gathered")
        return found

    def scalars(self) -> list[Collective]:
        """Squares of gradients for their norm, by what cuts them; the loss, and the number of its tokens."""
        mover = Mover(self.layout)
        by_axes: Counter[tuple[str, ...]] = Counter()
        for info in jax.tree.leaves(self.infos):
            by_axes[mover.over(*info.axes, kind="grads")] += 1
        found = [c for axes, n in by_axes.items() for c in mover.send("all-reduce", axes, 4 * n, 1, "gradients' norm")]
        tokens, once = mover.over("batch", "seq"), 1 + bool(self.replicas)
        inside = tuple(m for m in tokens if m not in self.replicas)
        found += mover.send("all-reduce", inside, 4, self._ends, "the loss")
        return found + mover.send("all-reduce", tokens, 4, once, "the number of tokens, and the loss of all replicas")
