"""Where a run's first parameters come from, when not from random numbers: what the step asks of `train.start`."""

from __future__ import annotations

from typing import Any, Protocol

from jaxscale.layout import Layout

Tree = Any


class Start(Protocol):
    """Gives first parameters; `jaxscale.train.FromRun` reads those of another run.

    Attributes:
      path: where they come from, for messages.
      step: of which checkpoint; `None` until `settled`.
      run: the run they come from, with `config`, `imported` and the like (see `jaxscale.train.run.RunFolder`).
    """

    path: str
    step: int | None

    @property
    def run(self) -> Any:
        """The run.

        Raises:
          RunError: it is not there.
        """

    def settled(self) -> Any:
        """The same, with everything written out that could mean something else tomorrow."""

    def check(self, infos: Tree) -> None:
        """That it has these parameters, a `TensorInfo` each; reads none.

        Raises:
          CheckpointError: listing those that are missing, extra or of another shape.
        """

    def params(self, infos: Tree, layout: Layout | None) -> Tree:
        """The parameters, in the types of `infos`, each device its shards."""

    def fingerprint(self) -> str:
        """Hex, of the values."""

    def about(self) -> dict[str, Any]:
        """What `run.json` says of it."""
