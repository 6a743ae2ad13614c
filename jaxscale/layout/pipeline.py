"""`Pipeline`: the schedule of a layout's `pipeline` axis and its number of micro-batches."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
from collections.abc import Callable
from typing import Literal, get_args

from jaxscale.config import register
from jaxscale.errors import LayoutError, count, near
from jaxscale.layout.schedules import CHUNKS, PLACEMENTS, SCHEDULES, from_csv
from jaxscale.layout.table import Placement, Table, validate

AT_MOST = 4
"""Most micro-batches per stage by default, which gives a bubble of about a fifth."""

Gather = Literal["layer", "step"]
Vocabulary = Literal["sharded", "whole"]

_BOTH_ENDS = ("dualpipe", "chimera")


@register
@dataclasses.dataclass(frozen=True)
class Pipeline:
    """A pipeline schedule; short forms are `"1f1b"`, `"1f1b:8"` (micro-batches) and `"interleaved:8:2"` (and chunks).

    Args:
      schedule: a name of `jaxscale.layout.SCHEDULES`, the path of a `.csv` file (see
        `jaxscale.layout.schedules.from_csv`), or a function of stages and micro-batches (and chunks, if it has such a
        parameter) that returns a `Table`, with an attribute `placement` if the table's is not "ring". `"lockstep"`, the
        default, costs least when layers are sharded as well.
      microbatches: the number of parts that a step's batch (the rows of one accumulation step) is divided into. `None`
        takes the most that divide it over the devices that the batch is sharded over, at most 4 per stage; a file has
        its own number.
      chunks: virtual stages per stage; `None` is 2 for "interleaved", "zb-v" and "dualpipe-v", and else 1.
      gather: when parameters that FSDP shards are gathered. "layer": whenever a layer uses them, and the gradients of
        each micro-batch are reduce-scattered. "step": once, before the first micro-batch, and gradients are
        reduce-scattered once, after the last; devices then hold a stage's parameters and float32 gradients whole during
        a step. If nothing else shards the layers, each stage then runs on its own clock.
      vocabulary: how stages compute the embedding and the logits. "sharded": all together, each for its part of the
        vocabulary; the residual stream before the first and after the last layer, and its gradients, are sent to all.
        "whole": the first stage embeds and the last one computes the logits, from tables that each stage gathers
        before the first micro-batch, and stages send each other the residual stream alone; for slow links between them.

    Raises:
      LayoutError: no such schedule, or a number below 1.
    """

    schedule: str | Callable[..., Table] = "lockstep"
    microbatches: int | None = None
    chunks: int | None = None
    gather: Gather = "layer"
    vocabulary: Vocabulary = "sharded"

    def __post_init__(self) -> None:
        name = self.schedule
        if self.gather not in get_args(Gather):
            raise LayoutError(f"Pipeline.gather = {self.gather!r}: must be 'layer' or 'step'")
        if self.vocabulary not in get_args(Vocabulary):
            raise LayoutError(f"Pipeline.vocabulary = {self.vocabulary!r}: must be 'sharded' or 'whole'")
        if name in _BOTH_ENDS:
            raise LayoutError(
                f"schedule '{name}' starts micro-batches at both ends of the pipeline, which needs every stage's "
                "parameters on two devices; use 'dualpipe-v', which needs them on one"
            )
        if isinstance(name, str) and name not in SCHEDULES and not name.endswith(".csv"):
            raise LayoutError(f"'{name}' is no pipeline schedule, and no file of one (.csv){near(name, SCHEDULES)}")
        if not isinstance(name, str):
            try:
                inspect.signature(name).bind(1, 1, **({"chunks": 1} if self._takes_chunks else {}))
            except TypeError as e:
                raise LayoutError(
                    f"Pipeline.schedule = {name!r} must be a name or a function of (stages, microbatches): {e}"
                ) from None
        for field in ("microbatches", "chunks"):
            value = getattr(self, field)
            if value is not None and (not isinstance(value, int) or value < 1):
                raise LayoutError(f"Pipeline.{field} = {value!r}: must be a whole number of at least 1")
        if self.chunks is not None and not self._takes_chunks and not self._file:
            has = count(CHUNKS.get(self.name, 1), "chunk", "chunks")
            if self.chunks != CHUNKS.get(self.name, 1):
                raise LayoutError(
                    f"schedule '{self.name}' has {has} a stage, not {self.chunks}; 'interleaved' has more"
                )

    @classmethod
    def of(cls, text: str | Pipeline | None) -> Pipeline:
        """Make a `Pipeline` from its short form.

        Args:
          text: such as "1f1b" or "1f1b:8"; `None` is the default, and a `Pipeline` is returned as it is.

        Raises:
          LayoutError: not of that form.
        """
        if isinstance(text, cls):
            return text
        if text is None:
            return cls()
        match = re.fullmatch(r"(.+?)(?::(\d+))?(?::(\d+))?", text) if isinstance(text, str) else None
        if match is None:
            raise LayoutError(f"a pipeline is a string, such as '1f1b:8', or Pipeline('1f1b', 8), not {text!r}")
        name, *numbers = match.groups()
        microbatches, chunks = (None if n is None else int(n) for n in numbers)
        return cls(name, microbatches, chunks)

    @property
    def name(self) -> str:
        """The schedule's name."""
        return self.schedule if isinstance(self.schedule, str) else getattr(self.schedule, "__name__", "own schedule")

    @property
    def chunks_per_stage(self) -> int:
        """The number of virtual stages per stage."""
        if self._file:
            return self.chunks or self._file.chunks
        return self.chunks or (CHUNKS.get(self.schedule, 1) if isinstance(self.schedule, str) else 1)

    @property
    def placement(self) -> Placement:
        """The order of virtual stages on stages."""
        if self._file:
            return self._file.placement
        named = isinstance(self.schedule, str)
        return PLACEMENTS.get(self.name, "ring") if named else getattr(self.schedule, "placement", "ring")

    @functools.cached_property
    def _file(self) -> Table | None:
        named = isinstance(self.schedule, str) and self.schedule not in SCHEDULES
        return from_csv(self.schedule) if named else None  # type: ignore[arg-type]

    @property
    def _takes_chunks(self) -> bool:
        fn = SCHEDULES.get(self.schedule) if isinstance(self.schedule, str) else self.schedule
        return fn is not None and "chunks" in inspect.signature(fn).parameters

    def sizes_or(self, stages: int, microbatches: int) -> tuple[int, int]:
        """Return the numbers of stages and micro-batches.

        Args:
          stages: the stages, unless the schedule is a file.
          microbatches: the micro-batches, where neither a file nor `self.microbatches` has a number.
        """
        if self._file:
            return self._file.stages, self._file.microbatches
        return stages, self.microbatches or microbatches

    def microbatches_of(self, stages: int, rows: int, split: int) -> int:
        """Return the number of micro-batches of a batch.

        Args:
          stages: the layout's number of stages.
          rows: the batch's rows.
          split: the number of devices that rows are sharded over.

        Raises:
          LayoutError: the rows cannot be divided into the configured number of micro-batches, or into any.
        """
        fits = [m for m in range(1, rows + 1) if rows % m == 0 and rows // m % split == 0]
        if self.schedule == "interleaved":
            fits = [m for m in fits if m % stages == 0]
        if not fits:
            step = split * (stages if self.schedule == "interleaved" else 1)
            raise LayoutError(
                f"a batch of {rows} rows over {split} device(s) cannot be divided into micro-batches for the schedule "
                f"'{self.name}' on {stages} stages; the nearest batch that can has {-(-rows // step) * step} rows"
            )
        configured = self._file.microbatches if self._file else self.microbatches
        if configured is None:
            return max([m for m in fits if m <= AT_MOST * stages] or fits[:1])
        if configured not in fits:
            fit = min(fits, key=lambda m: abs(m - configured))
            rest = "" if self.schedule != "interleaved" else f" ('interleaved' needs a multiple of {stages})"
            raise LayoutError(
                f"{configured} micro-batches{rest} do not divide a batch of {rows} rows over {split} device(s); the "
                f"nearest number that does is {fit}"
            )
        return configured

    def table(self, stages: int, microbatches: int) -> Table:
        """Return the schedule's table, checked.

        Args:
          stages: the number of stages.
          microbatches: the number of micro-batches.

        Raises:
          LayoutError: the table is invalid, or has other sizes.
        """
        # not cached for a file, which may have changed since another layout read it
        return (_table if self._file else _cached_table)(self, stages, microbatches)


def _table(p: Pipeline, stages: int, microbatches: int) -> Table:
    if p._file:
        table = p._file
    else:
        fn = SCHEDULES[p.schedule] if isinstance(p.schedule, str) else p.schedule
        table = fn(stages, microbatches, **({"chunks": p.chunks_per_stage} if p._takes_chunks else {}))
        if not isinstance(table, Table):
            raise LayoutError(f"schedule '{p.name}' returned {type(table).__name__}; return a jaxscale.layout.Table")
    sizes = (table.stages, table.microbatches, table.chunks)
    if sizes != (stages, microbatches, p.chunks_per_stage):
        raise LayoutError(
            f"schedule '{p.name}' is a table of {sizes[0]} stages, {sizes[1]} micro-batches and {sizes[2]} chunk(s), "
            f"and the layout has {stages}, {microbatches} and {p.chunks_per_stage}; use pipeline={sizes[0]} and "
            f"Pipeline(..., microbatches={sizes[1]}, chunks={sizes[2]})"
        )
    if table.placement != p.placement:
        raise LayoutError(
            f"schedule '{p.name}' is a table with placement '{table.placement}'; set the function's attribute "
            f"'placement' to '{table.placement}'"
        )
    validate(table)
    if table.phases < 2:
        raise LayoutError(f"schedule '{p.name}' has no backward phase, so it cannot train; add backward ops (B)")
    return table


_cached_table = functools.lru_cache(64)(_table)
