"""Stoppers, which end running trials early; every search has one as its `stopper`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Protocol

from jaxscale.config import register
from jaxscale.sweep.base import Record


class Stopper(Protocol):
    """Judges running trials. Has no state, like a search."""

    def keeps(self, record: Record, records: Sequence[Record], steps: int) -> bool:
        """Whether to let a running trial continue.

        Args:
          record: record of the running trial.
          records: records of all trials so far, by id.
          steps: the config's last step.
        """


@register
@dataclasses.dataclass(frozen=True)
class Never:
    """Ends no trial early."""

    def keeps(self, record: Record, records: Sequence[Record], steps: int) -> bool:
        """Return `True`."""
        return True
