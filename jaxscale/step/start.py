"""The interface of `train.start`: initial parameters from another run."""

from __future__ import annotations

from typing import Any, Protocol

from jaxscale.layout import Layout
from jaxscale.nn import WeightFormat

Tree = Any


class Start(Protocol):
    """A source of initial parameters; `jaxscale.train.FromRun` reads those of another run.

    Attributes:
      path: where the parameters are from, for messages.
      step: step of the checkpoint; `None` before `settled`.
      run: the run that they are from, a `jaxscale.train.run.RunFolder`.
    """

    path: str
    step: int | None

    @property
    def run(self) -> Any:  # a jaxscale.train.run.RunFolder, whose package may not be imported here
        """The run.

        Raises:
          RunError: it does not exist.
        """

    def settled(self) -> Start:
        """Return the same start with everything explicit that could change later, such as "the newest checkpoint"."""

    def check(self, infos: Tree) -> None:
        """Check that the checkpoint has these parameters, without reading them.

        Args:
          infos: a `TensorInfo` per parameter.

        Raises:
          CheckpointError: parameters are missing, extra or of another shape; the message lists them.
        """

    def params(self, infos: Tree, layout: Layout | None, *, stored: WeightFormat | None = None) -> Tree:
        """Return the parameters, sharded.

        Args:
          infos: a `TensorInfo` per parameter, with the dtype to convert to.
          layout: the layout that shards them; `None` is one device.
          stored: a weight format; matrices that the checkpoint holds in it are returned so, others as arrays.
        """

    def fingerprint(self) -> str:
        """Return a digest of the values, in hexadecimal."""

    def about(self) -> dict[str, Any]:
        """Return the entry in `run.json` about this start."""
