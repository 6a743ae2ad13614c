"""`Pipeline`: which schedule a layout's `pipeline` axis runs, and with how many micro-batches."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
from collections.abc import Callable

from jaxscale.config import register
from jaxscale.errors import LayoutError, near
from jaxscale.layout.schedules import SCHEDULES, from_csv
from jaxscale.layout.table import Table, validate

AT_MOST = 4
"""Micro-batches per stage, when nobody says how many: a bubble of about a fifth."""

_CHUNKS = {"interleaved": 2}


@register
@dataclasses.dataclass(frozen=True)
class Pipeline:
    """A pipeline schedule, written `"1f1b"`, `"1f1b:8"` (micro-batches) or `"interleaved:8:2"` (and chunks) for short.

    Args:
      schedule: a name of `jaxscale.layout.SCHEDULES`, the path of a `.csv` (see `from_csv`), or a function of stages
        and micro-batches (and chunks, where it has such a parameter) that returns a `Table`. `"lockstep"`, the
        default, is what costs least where a layer is split over devices as well.
      microbatches: into how many parts a step's batch (one accumulation step's rows) is cut. `None` takes as many as
        divide it over the devices that split the batch, at most 4 per stage; a file brings its own number.
      chunks: pieces of the model per stage; 1, and 2 for "interleaved", when `None`.

    Raises:
      LayoutError: no such schedule, or a number below 1.
    """

    schedule: str | Callable[..., Table] = "lockstep"
    microbatches: int | None = None
    chunks: int | None = None

    def __post_init__(self) -> None:
        name = self.schedule
        if isinstance(name, str) and name not in SCHEDULES and not name.endswith(".csv"):
            raise LayoutError(f"there is no pipeline schedule '{name}'{near(name, SCHEDULES)}; a file ends in .csv")
        if not isinstance(name, str):
            try:
                inspect.signature(name).bind(1, 1, **({"chunks": 1} if self._takes_chunks else {}))
            except TypeError as e:
                raise LayoutError(
                    f"Pipeline.schedule = {name!r} must be a name or a function (stages, microbatches): {e}"
                ) from None
        for field in ("microbatches", "chunks"):
            value = getattr(self, field)
            if value is not None and (not isinstance(value, int) or value < 1):
                raise LayoutError(f"Pipeline.{field} = {value!r}: must be a whole number of at least 1")
        if self.chunks is not None and self.chunks > 1 and not self._takes_chunks and not self._file:
            raise LayoutError(f"schedule '{self.name}' has 1 chunk a stage, not {self.chunks}; 'interleaved' has more")

    @classmethod
    def of(cls, text: str | Pipeline | None) -> Pipeline:
        """A pipeline, or what is written for short.

        Raises:
          LayoutError: not of that form.
        """
        if isinstance(text, cls):
            return text
        if text is None:
            return cls()
        found = re.fullmatch(r"(.+?)(?::(\d+))?(?::(\d+))?", text) if isinstance(text, str) else None
        if found is None:
            raise LayoutError(f"a pipeline is written as text, such as '1f1b:8', or Pipeline('1f1b', 8), not {text!r}")
        name, *numbers = found.groups()
        return cls(name, *(None if n is None else int(n) for n in numbers))

    @property
    def name(self) -> str:
        """What the schedule is called."""
        return self.schedule if isinstance(self.schedule, str) else getattr(self.schedule, "__name__", "own schedule")

    @property
    def chunks_per_stage(self) -> int:
        """Pieces of the model that a stage holds."""
        if self._file:
            return self.chunks or self._file.chunks
        return self.chunks or (_CHUNKS.get(self.schedule, 1) if isinstance(self.schedule, str) else 1)

    @functools.cached_property
    def _file(self) -> Table | None:
        named = isinstance(self.schedule, str) and self.schedule not in SCHEDULES
        return from_csv(self.schedule) if named else None  # type: ignore[arg-type]

    @property
    def _takes_chunks(self) -> bool:
        fn = SCHEDULES.get(self.schedule) if isinstance(self.schedule, str) else self.schedule
        return fn is not None and "chunks" in inspect.signature(fn).parameters

    def sizes_or(self, stages: int, microbatches: int) -> tuple[int, int]:
        """Stages and micro-batches: a file's own, else these, of which the second is for when nothing was asked."""
        if self._file:
            return self._file.stages, self._file.microbatches
        return stages, self.microbatches or microbatches

    def microbatches_of(self, stages: int, rows: int, split: int) -> int:
        """Into how many micro-batches rows are cut.

        Args:
          stages: of the layout.
          rows: of the batch.
          split: over how many devices rows are split.

        Raises:
          LayoutError: they cannot be cut into as many as was asked.
        """
        fits = [m for m in range(1, rows + 1) if rows % m == 0 and rows // m % split == 0]
        if self.schedule == "interleaved":
            fits = [m for m in fits if m % stages == 0]
        if not fits:
            step = split * (stages if self.schedule == "interleaved" else 1)
            raise LayoutError(
                f"a batch of {rows} rows over {split} device(s) cannot be cut into micro-batches for the schedule "
                f"'{self.name}' on {stages} stages; the nearest batch that can has {-(-rows // step) * step} rows"
            )
        wanted = self._file.microbatches if self._file else self.microbatches
        if wanted is None:
            return max([m for m in fits if m <= AT_MOST * stages] or fits[:1])
        if wanted not in fits:
            fit = min(fits, key=lambda m: abs(m - wanted))
            rest = "" if self.schedule != "interleaved" else f" (of which 'interleaved' wants a multiple of {stages})"
            raise LayoutError(
                f"{wanted} micro-batches{rest} do not divide a batch of {rows} rows over {split} device(s); the "
                f"nearest number that does is {fit}"
            )
        return wanted

    def table(self, stages: int, microbatches: int) -> Table:
        """The schedule's table, valid.

        Raises:
          LayoutError: it is not, or is for other sizes.
        """
        # a file may have been written anew since another layout read it
        return (_table if self._file else _made)(self, stages, microbatches)


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
            f"and the layout runs {stages}, {microbatches} and {p.chunks_per_stage}; use pipeline={sizes[0]} and "
            f"Pipeline(..., microbatches={sizes[1]}, chunks={sizes[2]})"
        )
    validate(table)
    if table.phases < 2:
        raise LayoutError(f"schedule '{p.name}' has no backward phase, so nothing can be trained with it; add B's")
    return table


_made = functools.lru_cache(64)(_table)
